"""Agreement with labels: whether the inference is certified, and whether labels look like draws from the model."""

from __future__ import annotations

import math

import pytest
import torch

from vaerdict.classify.agreement import ADVICE, agreement, calibration_error, log_score, reliability
from vaerdict.core import DataError, SettingError
from vaerdict.diagnostics import Verdict
from vaerdict.noise import seeded

PROB = torch.tensor([[0.92, 0.08], [0.98, 0.02], [0.45, 0.55], [0.5, 0.5]], dtype=torch.double)
LABEL = torch.tensor([0, 1, 1, 1])


def simulated(generator: torch.Generator, n: int, sharpen: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and labels drawn from sharpened ones: above 1 the probabilities are underconfident."""
    logits = 2 * torch.randn(n, 4, generator=generator, dtype=torch.double)
    label = torch.multinomial((sharpen * logits).softmax(-1), 1, generator=generator).squeeze(1)
    return logits.softmax(-1), label


def ok(n: int, share: float = 1.0) -> torch.Tensor:
    return torch.where(torch.arange(n) < share * n, int(Verdict.OK), int(Verdict.REFUSE))


def test_reliability_and_calibration_error_by_hand():
    bins = reliability(PROB, LABEL)
    assert [b.n for b in bins] == [2, 2]
    assert [b.confidence for b in bins] == pytest.approx([0.525, 0.95])
    assert [b.accuracy for b in bins] == pytest.approx([0.5, 0.5])
    assert calibration_error(bins) == pytest.approx((0.025 + 0.45) / 2)
    assert reliability(torch.eye(2), torch.tensor([0, 1])) == ((2, 1.0, 1.0),)  # a confidence of 1 is in the last bin


def test_the_log_score_is_that_of_the_label():
    torch.testing.assert_close(log_score(PROB, LABEL).exp(), torch.tensor([0.92, 0.02, 0.55, 0.5]).double())
    assert log_score(torch.eye(2), torch.tensor([1, 1])).tolist() == [-math.inf, 0]
    with pytest.raises(DataError, match="1 of 4 labels name none of the 2 classes"):
        log_score(PROB, torch.tensor([0, 1, -1, 1]))


def test_the_fields_by_hand():
    plugin = torch.full((4, 2), 0.5, dtype=torch.double)
    answer = agreement(PROB, LABEL, ok(4), plugin=plugin)
    assert (answer.n, answer.certified, answer.accuracy) == (4, 1.0, 0.5)
    assert answer.expected_accuracy == pytest.approx((0.92 + 0.98 + 0.55 + 0.5) / 4)
    assert answer.accuracy_se == pytest.approx(math.sqrt(0.92 * 0.08 + 0.98 * 0.02 + 0.55 * 0.45 + 0.25) / 4)
    gain = math.log(0.5) - log_score(PROB, LABEL)
    assert answer.plugin_gain == pytest.approx(gain.mean().item())
    assert answer.plugin_gain_se == pytest.approx(gain.std().item() / 2)
    assert math.isnan(agreement(PROB, LABEL, ok(4)).plugin_gain)


def test_a_correct_model_is_rejected_at_the_stated_level():
    """400 data sets at level 0.05: at most 20 expected, 42 or more come up once in 100,000 times."""
    alarms = [not agreement(*simulated(seeded(i), 60), ok(60), level=0.05).model_agrees for i in range(400)]
    assert sum(alarms) < 42
    assert any(alarms)


@pytest.mark.parametrize("sharpen", [0.4, 3.0])
def test_overconfident_and_underconfident_models_disagree(sharpen, generator):
    answer = agreement(*simulated(generator, 400, sharpen), ok(400))
    assert not answer.model_agrees
    assert (answer.accuracy < answer.expected_accuracy) == (sharpen < 1)


def test_a_label_of_probability_zero_is_evidence_against_the_model():
    certain = torch.tensor([[1.0, 0.0]]).expand(50, 2)
    label = torch.zeros(50, dtype=torch.long)
    assert agreement(certain, label, ok(50)).p_value == 1
    label[0] = 1
    answer = agreement(certain, label, ok(50))
    assert answer.log_score == -math.inf
    assert not answer.model_agrees


def test_only_certified_rows_are_compared(generator):
    prob, label = simulated(generator, 400)
    half = ok(400, 0.5)
    prob[200:] = torch.tensor([0.97, 0.01, 0.01, 0.01])  # errors of inference
    answer = agreement(prob, label, half)
    assert (answer.n, answer.compared, answer.certified) == (200, "certified", 0.5)
    assert answer.model_agrees
    assert not agreement(prob, label, ok(400)).model_agrees
    few = agreement(prob, label, ok(400, 0.05))
    assert (few.n, few.compared) == (400, "certified or uncertified")


@pytest.mark.parametrize("certified", [True, False])
@pytest.mark.parametrize("agrees", [True, False])
def test_each_of_the_four_cases_has_its_message(certified, agrees, generator):
    answer = agreement(*simulated(generator, 400, 1.0 if agrees else 0.3), ok(400, 1.0 if certified else 0.5))
    assert (answer.inference_certified, answer.model_agrees) == (certified, agrees)
    assert answer.message.startswith("inference certified (100%" if certified else "inference not certified (50%")
    assert ("model agrees" in answer.message) == agrees
    assert answer.message.endswith(f"{ADVICE[certified, agrees]}.")
    assert len(set(ADVICE.values())) == 4


def test_the_level_must_be_within_the_range_of_simulated_p_values():
    with pytest.raises(SettingError, match=r"level=1e-06 of the test must lie in \[0.001, 1\)"):
        agreement(PROB, LABEL, ok(4), level=1e-6)
