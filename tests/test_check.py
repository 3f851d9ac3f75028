"""The check of a model by simulated pairs: right answers pass, missed modes and biased answers do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.distributions import Beta, Independent

import vaerdict as vd
from checks import assert_mean, assert_within
from inference_toys import MODEL, Near
from vaerdict.core import SettingError, ShapeError
from vaerdict.diagnostics import Verdict
from vaerdict.distributions import StandardNormal
from vaerdict.inference.check import MIN_P, UNCOVERED, CheckReport, _count_test, _of_events, _of_numbers
from vaerdict.inference.search import ModeSearch


def positive(z: Tensor) -> Tensor:
    return (z[..., 0] > 0).double()


def given(z: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(len(z), 5, generator=generator, dtype=z.dtype)
    return MODEL.center + z @ MODEL.loading.mT + MODEL.noise_sd * noise


@pytest.fixture(scope="module")
def report() -> CheckReport:
    return vd.check(MODEL, positive, n=500, tolerance=0.05)


# ------------------------------------------------------------------------------------------------------------ pPCA
def test_ppca_passes(report):  # a right model fails at seeds with probability MIN_P, once in a thousand
    assert report.verdict == Verdict.OK
    assert report.ok.all()
    assert not report.uncovered.any()
    assert report.p_value > MIN_P
    assert report.p_mean.shape == report.p_slope.shape == ()
    assert report.x.shape == (100, 5)
    assert report.z.shape == (100, 2)
    log_w = report.record.latent_log_w
    assert log_w.max() < 2  # the local proposal of a Gaussian posterior fits


def test_ppca_passes_with_an_encoder_and_numbers_as_query():  # fails at seeds with probability MIN_P
    both = vd.check(MODEL, lambda z: z, Near(1.3), 500, sample_x=given, tolerance=0.05, seed=1)
    assert both.verdict == Verdict.OK
    assert both.p_mean.shape == both.p_slope.shape == (2,)
    assert both.p_value == min(1, 4 * float(torch.stack([both.p_mean, both.p_slope]).min()))


def test_bounded_latents_pass():  # fails at seeds with probability MIN_P
    class Coin:
        prior = Independent(Beta(torch.tensor([2.0]).double(), torch.tensor([2.0]).double()), 1)

        def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
            return (x * z.log() + (20 - x) * (-z).log1p()).sum(-1) + self.prior.log_prob(z)

    def heads(z: Tensor, generator: torch.Generator) -> Tensor:
        return (torch.rand(len(z), 20, generator=generator) < z).sum(-1, keepdim=True).double()

    bounded = vd.check(Coin(), lambda z: z, n=500, n_pairs=50, sample_x=heads, tolerance=0.05)
    assert bounded.verdict == Verdict.OK
    assert ((bounded.z > 0) & (bounded.z < 1)).all()
    exact = (bounded.x + 2) / 24  # the mean of the conjugate posterior
    assert_within(bounded.record.value, exact, bounded.record.mcse, rate=1e-6)


@pytest.mark.parametrize("query", [positive, lambda z: z], ids=["event", "numbers"])
def test_answers_that_are_biased_for_the_simulated_pairs_fail(query):
    biased = vd.check(MODEL, query, n=500, sample_x=lambda z, g: given(z + 1, g), tolerance=0.05)
    assert biased.p_value < MIN_P
    assert biased.verdict == Verdict.REFUSE
    assert str(biased).startswith("REFUSE: answers that are ok are not right for this model")


def test_the_summary_says_what_was_found(report):
    lines = str(report).splitlines()
    assert lines[0] == "OK: nothing speaks against the answers that are ok"
    assert lines[1].startswith("answers      100 OK, 0 CAUTION, 0 REFUSE; ")
    assert "0 of 100 true latents are not covered: ok answers miss 0.0% to 3.6% of the posterior (95 %)" in lines[2]
    assert lines[3].startswith(f"calibration  p = {report.p_value:.2g} over 1 output(s)")


# ----------------------------------------------------------------------------------------------------- many modes
class Moduli:
    """The moduli of four latents, observed with little noise: the posterior has 16 modes."""

    prior = StandardNormal(4)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return -0.5 * ((x - z.abs()) / 0.01).square().sum(-1) + self.prior.log_prob(z)

    def simulate(self, n: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        z, noise = torch.randn(2, n, 4, generator=generator, dtype=torch.double)
        return z.abs() + 0.01 * noise, z


def moduli(z: Tensor) -> Tensor:
    return z.abs()


def test_many_modes_pass_where_searches_find_them():  # fails at seeds with probability MIN_P
    found = vd.check(Moduli(), moduli, n=500, n_pairs=50, tolerance=0.05)
    assert found.verdict == Verdict.OK
    assert found.missing[0] == 0


def test_missed_modes_are_caught_although_answers_are_ok_and_calibrated(monkeypatch):
    extend = ModeSearch.extend  # all searches begin, and therefore end, where all latents are positive
    monkeypatch.setattr(ModeSearch, "extend", lambda self, rows, starts: extend(self, rows, starts.abs()))
    missed = vd.check(Moduli(), moduli, n=500, n_pairs=50, tolerance=0.05)
    assert missed.ok.double().mean() > 0.7  # the answers do not know what they miss
    assert missed.p_value > MIN_P  # nor does the query, which is the same at all modes
    assert missed.missing[0] > 0.5
    assert missed.verdict == Verdict.REFUSE
    assert torch.equal(missed.uncovered, missed.ok & (missed.record.latent_log_w > UNCOVERED))


# --------------------------------------------------------------------------------------------------------- verdict
@pytest.mark.parametrize(("n_uncovered", "verdict"), [(0, Verdict.OK), (3, Verdict.OK), (4, Verdict.REFUSE)])
def test_the_interval_of_the_uncovered_share_decides(report, n_uncovered, verdict):
    log_w = report.record.latent_log_w.clone()
    log_w[:n_uncovered] = UNCOVERED + 0.01
    changed = replace(report, record=replace(report.record, latent_log_w=log_w))
    low, high = changed.missing
    assert changed.verdict == verdict
    assert (low > 0.01) == (n_uncovered == 4)
    if n_uncovered:  # the limits at which as many or more, and as few or fewer, have the probability 2.5 %
        assert stats.binom.sf(n_uncovered - 1, 100, low) == pytest.approx(0.025)
    assert stats.binom.cdf(n_uncovered, 100, high) == pytest.approx(0.025)


@pytest.mark.parametrize("n_ok", [0, 1, 20])
def test_few_ok_answers_show_too_little(report, n_ok):
    verdicts = torch.where(torch.arange(100) < n_ok, int(Verdict.OK), int(Verdict.REFUSE))
    changed = replace(report, record=replace(report.record, verdict=verdicts))
    assert changed.verdict == Verdict.CAUTION
    assert str(changed).startswith("CAUTION: too few answers are ok")


def test_a_check_without_ok_answers_is_undecided():
    refused = vd.check(MODEL, positive, n=64, n_pairs=5, tolerance=1e-6)
    assert not refused.ok.any()
    assert refused.p_value == 1
    assert refused.verdict == Verdict.CAUTION


# ----------------------------------------------------------------------------------------------------- calibration
N, REPEATS = 60, 1000


def events(generator: torch.Generator, sharpness: float = 1.0) -> tuple[Tensor, Tensor]:
    logit = 1.5 * torch.randn(N, generator=generator, dtype=torch.double)
    return torch.bernoulli(logit.sigmoid(), generator=generator), (sharpness * logit).sigmoid()


def numbers(generator: torch.Generator, sharpness: float = 1.0) -> tuple[Tensor, Tensor]:
    mean, noise, error = torch.randn(3, N, generator=generator, dtype=torch.double)
    return mean + noise, sharpness * mean + 0.1 * error


@pytest.mark.parametrize(("make", "test"), [(events, _of_events), (numbers, _of_numbers)])
def test_p_values_are_small_as_rarely_as_they_say(make, test, generator):
    mcse = torch.full((N,), 0.1 if make is numbers else 0.0, dtype=torch.double)
    p = torch.tensor([test(*make(generator), mcse) for _ in range(REPEATS)])
    for level in (0.2, 0.05, 0.01):
        n_small = (p <= level).sum(0)
        assert all(stats.binom.sf(k - 1, REPEATS, level) > 1e-6 for k in n_small.tolist())
    assert (p <= 0.2).double().mean() > 0.08  # and not much rarer
    f, value = (torch.cat(part) for part in zip(*(make(generator, 2.5) for _ in range(10)), strict=True))
    assert test(f, value, mcse.repeat(10))[1] < 1e-6  # too extreme answers are caught by their slope


def test_slope_of_answers_without_information(generator):
    """Answers that differ by their Monte-Carlo error alone are not called too different."""
    noise, error = torch.randn(2, 50_000, generator=generator, dtype=torch.double)
    mcse = torch.full_like(noise, 0.2)
    p_mean, p_slope = _of_numbers(noise, 0.2 * error, mcse)
    assert min(p_mean, p_slope) > 1e-6
    assert _of_numbers(noise, 0.2 * error, 0 * mcse)[1] < 1e-6  # the correction is needed
    centred = (noise - 0.2 * error) * (0.2 * error) + mcse.square()
    assert_mean(centred, 0.0, rate=1e-6)


def test_counts_of_events_are_tested_exactly():
    p, none = torch.full((20,), 0.3, dtype=torch.double), torch.zeros(20, dtype=torch.double)
    for k in range(21):
        y = (torch.arange(20) < k).double()
        tails = stats.binom.sf(k - 1, 20, 0.3), stats.binom.cdf(k, 20, 0.3)
        assert _count_test(y, p, none) == pytest.approx(min(1, 2 * min(tails)))


def test_rare_events_and_rounded_probabilities_are_no_alarm():
    never, once = torch.zeros(100).double(), torch.eye(1, 100).double()[0]
    rare, error = torch.full_like(never, 1e-3), torch.full_like(never, 5e-3)
    assert min(_of_events(never, rare, 0.5 * rare)) == 1
    assert min(_of_events(once, rare, 0.5 * rare)) > 0.1
    assert min(_of_events(once, never, error)) > 0.1  # a probability of zero is believed to within its error
    assert min(_of_events(once, never, never)) == 0
    assert min(_of_events(never.repeat(100), never.repeat(100), error.repeat(100))) == 1


def test_a_constant_query_is_calibrated():
    constant = torch.full((50,), 1 / 3, dtype=torch.double)
    assert min(_of_numbers(constant, constant * (1 + 1e-12), 0 * constant)) > 0.9


# ---------------------------------------------------------------------------------------------------------- errors
def test_a_model_without_simulate_needs_sample_x():
    class Bare:
        prior, log_joint = MODEL.prior, staticmethod(MODEL.log_joint)

    with pytest.raises(SettingError, match=r"Bare has no simulate.*pass sample_x="):
        vd.check(Bare(), positive)
    with pytest.raises(ShapeError, match="10 pairs were asked for, but x has 9 rows and z has 10"):
        vd.check(Bare(), positive, n_pairs=10, sample_x=lambda z, g: given(z.double(), g)[1:])
    with pytest.raises(SettingError, match="n_pairs=0"):
        vd.check(MODEL, positive, n_pairs=0)
