"""Class probabilities of a given SCANVI: exact values by quadrature, and the choice between classifier and model."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss

from checks import assert_within
from vaerdict.auditing.refined import Refined, weigh
from vaerdict.core import SettingError, ShapeError
from vaerdict.diagnostics import Verdict
from vaerdict.models.scvi import from_scvi
from vaerdict.optional import isolated

scvi = pytest.importorskip("scvi", reason="scvi-tools is not installed (extra `scvi`)")
anndata = pytest.importorskip("anndata")

from vaerdict.annotation.scanvi import CLASSIFIER, CORRECTED, class_probabilities  # noqa: E402

N, GENES = 120, 8
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False, "early_stopping": False}


def cells() -> Any:
    """Counts of two kinds of cells that overlap; every other cell has no label in training."""
    draws, kind = np.random.default_rng(0), np.arange(N) // 2 % 2
    rate = draws.gamma(4.0, 1.0, GENES) * np.where(kind[:, None] == np.arange(GENES) % 2, 3.0, 1.0)
    adata = anndata.AnnData(draws.poisson(rate * draws.gamma(4.0, 0.25, (N, 1)) + 0.2).astype(np.float32))
    adata.obs["truth"] = np.array(["a", "b"])[kind]
    adata.obs["label"] = np.where(np.arange(N) % 2 == 0, adata.obs["truth"], "none")
    return adata


@cache
def trained(kind: str = "SCANVI") -> Any:
    """A model with one latent of each kind, so that its posterior has two dimensions."""
    adata, setup = cells(), {"SCANVI": {"labels_key": "label", "unlabeled_category": "none"}, "SCVI": {}}
    with isolated(0):
        model = getattr(scvi.model, kind)
        model.setup_anndata(adata, **setup[kind])
        model = model(adata, n_latent=1, n_hidden=8, gene_likelihood="nb")
        plan = {"n_epochs_kl_warmup": 10, "lr": 1e-2}
        model.train(max_epochs=60 if kind == "SCANVI" else 1, batch_size=32, plan_kwargs=plan, **QUIET)
    return model


def with_classifier(change: float) -> Any:
    """A copy of the model with the logits of its classifier times `change`; p(counts, states, class) is the same."""
    model = from_scvi(trained())
    last = [layer for layer in model.module.classifier.modules() if isinstance(layer, torch.nn.Linear)][-1]
    with torch.no_grad():
        last.weight *= change
        last.bias *= change
    return model


def exact(model: Any, rows: np.ndarray) -> torch.Tensor:
    """P(class | counts) by the trapezoidal rule over both states. Shapes: ``-> (rows, C)``."""
    x, grid = model.observations(None, rows), torch.linspace(-6, 6, 201)
    z2, z1 = (t.reshape(-1, 1, 1).expand(-1, len(rows), 1) for t in torch.meshgrid(grid, 2 * grid, indexing="ij"))
    latent, prepared = model.prior.Latent, model.prepare(x)
    log_p = [
        model.log_joint(prepared, latent(y=torch.full(z1.shape[:-1], c), z2=z2, z1=z1)).double().logsumexp(0)
        for c in range(2)
    ]
    return torch.stack(log_p, -1).softmax(-1)


def test_corrected_probabilities_are_those_of_the_model():
    """At a false-alarm rate of 1e-4; the classifier's probabilities are not within these errors."""
    model, rows = from_scvi(trained()), np.arange(0, N, 10)
    answer = class_probabilities(model, n=1000, n_audited=N, seed=1)
    assert (answer.verdict == Verdict.OK).mean() > 0.9
    value, mcse = (torch.from_numpy(t[rows]) for t in (answer.corrected, answer.mcse))
    assert_within(value[:, 0], exact(model, rows)[:, 0], mcse[:, 0] + 1e-4, rate=1e-4)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_within(torch.from_numpy(answer.classifier[rows, 0]), value[:, 0], mcse[:, 0] + 1e-4, rate=1e-4)


def test_the_classifier_is_that_of_scvi():
    answer = class_probabilities(trained(), n_audited=1, n=80)
    with isolated(0):
        theirs = trained().predict(soft=True)
    assert answer.classes.tolist() == list(theirs.columns)
    np.testing.assert_allclose(answer.classifier, theirs.to_numpy(), atol=1e-6)
    assert answer.audited.sum() == 1
    assert np.isnan(answer.corrected).all(1).sum() == N - 1
    assert (answer.verdict[~answer.audited] == Verdict.REFUSE).all()


def test_a_poor_classifier_is_replaced_and_a_poor_model_is_not():
    """Labels that were not trained with decide: an overconfident, inverted classifier loses, an unfitted model too."""
    answer = class_probabilities(with_classifier(-3.0), labels="truth", n=240, n_audited=60)
    assert answer.chosen == CORRECTED
    assert "corrected probabilities are used" in answer.message
    assert not np.isnan(answer.corrected).any()  # of all cells, not only of those audited
    refused = answer.verdict == Verdict.REFUSE
    np.testing.assert_array_equal(answer.prob[~refused], answer.corrected[~refused])
    np.testing.assert_array_equal(answer.prob[refused], answer.classifier[refused])
    unfitted = from_scvi(trained())
    with torch.no_grad():
        for weight in unfitted.module.decoder_z1_z2.parameters():
            weight.zero_()  # p(state | class) is the same for all classes
    answer = class_probabilities(unfitted, labels="truth", n=240, n_audited=60)
    assert answer.chosen == CLASSIFIER
    assert "worse" in answer.message or "only" in answer.message
    np.testing.assert_array_equal(answer.prob, answer.classifier)


def test_calibration_is_on_labels_that_were_held_out():
    model, truth = trained(), trained().adata.obs["truth"].to_numpy()
    answer = class_probabilities(model, labels=truth, n=80, n_audited=N)
    held_out = model.adata.obs["label"].to_numpy() == "none"
    for name, prob in {CLASSIFIER: answer.classifier, CORRECTED: answer.corrected}.items():
        score, prob, label = answer.calibration[name], prob[held_out], truth[held_out]
        assert score.n == held_out.sum() == sum(b.n for b in score.bins)
        assert score.accuracy == pytest.approx(accuracy_score(label, answer.classes[prob.argmax(1)]))
        assert score.log_loss == pytest.approx(log_loss(label, prob / prob.sum(1, keepdims=True)), rel=1e-5)
        assert score.brier == pytest.approx(2 * np.mean((prob[:, 1] - (label == "b")) ** 2), rel=1e-4)
    wrong = np.where(held_out, truth, "b")
    assert class_probabilities(model, labels=wrong, n=80, n_audited=N).calibration == answer.calibration
    wrong = np.where(held_out, "b", truth)
    assert class_probabilities(model, labels=wrong, n=80, n_audited=N).calibration != answer.calibration


def test_cells_with_labels_are_audited_first_and_answers_do_not_depend_on_the_others(monkeypatch):
    """Rounding differs with the size of a batch, and a search that it ends a step earlier moves a cell a little."""
    model, held_out = trained(), trained().adata.obs["label"].to_numpy() == "none"
    few = class_probabilities(model, labels="truth", n=80, n_audited=60, seed=3)
    np.testing.assert_array_equal(few.audited, held_out)
    monkeypatch.setattr("vaerdict.annotation.scanvi._READ", 50)  # read in three parts
    every = class_probabilities(model, labels="truth", n=80, n_audited=N, seed=3)
    np.testing.assert_allclose(few.classifier, every.classifier, atol=1e-6)
    assert mcse_apart(few, every)[held_out].max() < 0.05
    other = class_probabilities(model, model.adata[:30].copy(), n=80, n_audited=30, seed=3)
    assert mcse_apart(other, every).max() < 0.05
    other = class_probabilities(model, model.adata[:30].copy(), n=80, n_audited=30, seed=4)
    assert np.median(mcse_apart(other, every)) > 0.05  # other draws are further apart


def mcse_apart(answer: Any, every: Any) -> np.ndarray:
    """Distance of corrected probabilities from those of the same cells among all, in standard errors."""
    n = len(answer.corrected)
    return (np.abs(answer.corrected - every.corrected[:n]) / every.mcse[:n]).max(1)


def test_without_enough_labels_the_classifier_is_used():
    for labels in (None, ["a"] * 19 + [None] * (N - 19)):
        answer = class_probabilities(trained(), trained().adata.copy(), labels, n=240, n_audited=30)
        assert answer.chosen == CLASSIFIER
        assert not answer.calibration
        assert f"{0 if labels is None else 19} held-out labels cannot show which are better" in answer.message


def test_refused_where_weights_are_not_reliable(monkeypatch):
    """Draws of an encoder that is far too narrow, without refinement: k-hat shows it, whatever the labels say."""
    model = with_classifier(-3.0)
    with torch.no_grad():
        model.module.z_encoder.var_encoder.bias -= 5

    def unrefined(observed, n, *, generator):
        return Refined(weigh(observed, observed.encoder, n, generator=generator), None, None, torch.zeros(n).long())

    monkeypatch.setattr("vaerdict.annotation.scanvi.refined", unrefined)
    answer = class_probabilities(model, labels="truth", n=240, n_audited=60)
    assert np.nanmedian(answer.khat) > 0.7
    assert answer.chosen == CLASSIFIER
    assert answer.calibration[CORRECTED].log_loss < answer.calibration[CLASSIFIER].log_loss
    assert "of 60 cells" in answer.message
    assert "only; the encoder's k-hat is" in answer.message


def test_what_is_refused():
    with pytest.raises(ShapeError, match="labels= has 3 entries for 120 cells"):
        class_probabilities(trained(), labels=["a", "b", "a"])
    with pytest.raises(SettingError, match="SCVI has no classes"):
        class_probabilities(trained("SCVI"))
