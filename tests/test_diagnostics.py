"""PSIS, k-hat, effective sample size, standard errors and verdicts: compared with arviz and with exact values."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from scipy import stats
from torch import Tensor

from checks import assert_mean
from vaerdict import diagnostics
from vaerdict.core import DivergenceError, SettingError, ShapeError, WeightError, log_mean_exp, log_normalise
from vaerdict.diagnostics import Verdict
from vaerdict.noise import seeded
from vaerdict_paper.benchmarks import psis as benchmark

NAN, INF = math.nan, math.inf


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=seeded(seed), dtype=torch.float64)


def gaussian_weights(z: Tensor, scale: float) -> Tensor:
    """Log-weights of p = N(0, 1) at draws z from q = N(0, scale^2); bounded for a scale above one."""
    return math.log(scale) - 0.5 * z**2 + 0.5 * (z / scale) ** 2


def zeroed(log_w: Tensor, share: float) -> Tensor:
    out = log_w.masked_fill(uniform(*log_w.shape, seed=1) < share, -INF)
    out[0] = log_w[0]
    return out


FAMILIES = {
    "nearly equal": lambda k, n: 1e-3 * normal(k, n),
    "lognormal": lambda k, n: normal(k, n),
    "wide lognormal": lambda k, n: 3 * normal(k, n),
    "overflowing": lambda k, n: 300 * normal(k, n),
    "bounded": lambda k, n: -(normal(k, n) ** 2),
    "uniform": lambda k, n: uniform(k, n).log(),
    "pareto 0.2": lambda k, n: -0.2 * uniform(k, n).log(),
    "pareto 0.9": lambda k, n: -0.9 * uniform(k, n).log(),
    "far from zero": lambda k, n: normal(k, n) - 5000,
    "half tied": lambda k, n: (4 * normal(k, n)).round() / 4,
    "tied at the top": lambda k, n: normal(k, n).clamp(max=1.5),
    "a third zero": lambda k, n: zeroed(normal(k, n), 0.3),
    "nearly all zero": lambda k, n: zeroed(normal(k, n), 0.95),
    "one outlier": lambda k, n: torch.cat([0.3 * normal(k - 1, n), torch.full((1, n), 15.0, dtype=torch.float64)]),
    "float32": lambda k, n: normal(k, n).float(),
}


OTHERWISE_IN_ARVIZ_1 = {"overflowing", "half tied", "nearly all zero"}
"""Families whose tails arviz 1 cuts at other weights: those tied with the cutoff, or below the smallest number."""


def arviz_psis(log_w: Tensor) -> tuple[Tensor, Tensor]:
    _, psis = benchmark.arviz_psis()
    smoothed, khat = psis(log_w.double().t().numpy().copy())
    return log_normalise(torch.as_tensor(smoothed).t()), torch.as_tensor(khat)


@pytest.mark.parametrize("k", [5, 20, 21, 40, 100, 101, 900, 1000, 5000])
@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_arviz(family: str, k: int) -> None:
    arviz = pytest.importorskip("arviz")
    whole = min(k / 5, 3 * k**0.5).is_integer() and k >= 25
    if not arviz.__version__.startswith("0.") and (family in OTHERWISE_IN_ARVIZ_1 or not whole):
        pytest.skip("arviz 1 cuts this tail at another weight")
    log_w = FAMILIES[family](k, 12)
    smoothed, khat = diagnostics.psis(log_w)
    expected, expected_khat = arviz_psis(log_w)
    fitted = khat.isfinite()
    torch.testing.assert_close(khat[fitted], expected_khat[fitted], atol=1e-8, rtol=1e-10)
    assert expected_khat[khat.isnan()].eq(INF).all()  # tails too short, infinite in arviz, are not assessed here
    assert expected_khat[khat.isposinf()].le(0.7).all()  # arviz accepts weights of which one dominates
    # tied weights get distinct smoothed values in an arbitrary order
    ours = log_normalise(smoothed.double()).exp().sort(0).values
    close = 1e-6 if log_w.dtype == torch.float32 else 1e-10
    torch.testing.assert_close(ours[:, fitted], expected.exp().sort(0).values[:, fitted], atol=close, rtol=0)
    torch.testing.assert_close(smoothed[:, ~fitted], log_w[:, ~fitted], atol=0, rtol=0)


@pytest.mark.parametrize("variance", [0.1, 0.3, 0.5, 0.8])
def test_recovers_the_exact_shape(variance: float) -> None:
    """For N(0, 1) under N(0, s^2) the shape is k = 1 - s^2, approached from below as the cutoff grows.

    With z = s u, log w is k u^2 / 2 up to a constant, so that the tail's local shape at u is k u / h(u), where h is the
    hazard of the normal distribution: 0.88 k at this cutoff, and more beyond it. The prior pulls towards one half by
    10 / (n + 10), and the mean over observations is known to a standard error.
    """
    k, n, exact, scale = 50_000, 60, 1 - variance, math.sqrt(variance)
    khat = diagnostics.khat(gaussian_weights(scale * normal(k, n), scale))
    tail = math.ceil(3 * math.sqrt(k))
    u = stats.norm.isf(tail / k / 2)
    local = exact * u * stats.norm.sf(u) / stats.norm.pdf(u)
    slack = abs(exact - 0.5) * 10 / (tail + 10) + 4 * khat.std().item() / math.sqrt(n)
    assert slack < 0.05
    assert local - slack < khat.mean().item() < exact + slack
    assert not khat.mean().item() + 0.15 < exact + slack  # the check can fail


def test_exact_pareto_weights_have_their_shape() -> None:
    """Weights that are exactly Pareto have no cutoff bias; the prior and the noise of 60 fits remain."""
    for shape in (0.3, 0.6, 0.9):
        khat = diagnostics.khat(-shape * uniform(10_000, 60).log())
        unshrunk = khat + (khat - 0.5) * 10 / 300
        assert_mean(unshrunk, shape, rate=1e-4)
        with pytest.raises(AssertionError, match="standard errors"):
            assert_mean(unshrunk + 0.05, shape, rate=1e-4)


def outlier(k: int, height: float) -> Tensor:
    log_w = 0.3 * normal(k)
    log_w[k // 2] = height
    return log_w


def sparse(k: int, positive: int) -> Tensor:
    log_w = torch.full((k,), -INF, dtype=torch.float64)
    log_w[:positive] = normal(positive)
    return log_w


@pytest.mark.parametrize(
    ("log_w", "expected"),
    [
        pytest.param(torch.zeros(1), NAN, id="one draw"),
        pytest.param(normal(20), NAN, id="20 draws leave a tail of 4"),
        pytest.param(torch.zeros(1000), NAN, id="constant"),
        pytest.param(torch.full((1000,), -1234.5), NAN, id="constant, far from zero"),
        pytest.param(torch.arange(1000.0).remainder(2), NAN, id="two values"),
        pytest.param(normal(1000).clamp(max=0.0), NAN, id="tied at the top"),
        pytest.param(sparse(1000, 1), NAN, id="one positive weight"),
        pytest.param(sparse(1000, 4), NAN, id="four positive weights"),
        pytest.param(outlier(20_000, 10.0), INF, id="outlier beyond the rest"),
        pytest.param(outlier(20_000, 30.0), INF, id="outlier far beyond the rest"),
    ],
)
def test_weights_that_cannot_be_assessed(log_w: Tensor, expected: float) -> None:
    smoothed, khat = diagnostics.psis(log_w)
    assert torch.equal(smoothed, log_w)
    assert khat.shape == ()
    torch.testing.assert_close(khat.item(), expected, equal_nan=True)
    torch.testing.assert_close(diagnostics.khat(log_w).item(), expected, equal_nan=True)


@pytest.mark.parametrize("height", [10, 15, 20, 30, 60, 300])
@pytest.mark.parametrize("k", [25, 100, 1000, 20_000])
def test_a_dominating_weight_is_always_detected(k: int, height: int) -> None:
    log_w = outlier(k, float(height))
    assert log_normalise(log_w).max() > -math.log(2)
    assert diagnostics.khat(log_w) > diagnostics.MAX_KHAT


def test_five_positive_weights_are_enough() -> None:
    assert diagnostics.khat(0.1 * sparse(1000, 5)).isfinite()


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("assess", [diagnostics.psis, diagnostics.khat, diagnostics.ess])
def test_weights_that_are_not_finite_raise(assess, bad: float) -> None:
    log_w = normal(100, 3)
    log_w[7, 1] = bad
    with pytest.raises(WeightError, match=r"1 of 300 log-weights are NaN|1 are \+inf"):
        assess(log_w)
    with pytest.raises(WeightError, match="1 observations have no particle"):
        assess(normal(100, 3).masked_fill(torch.tensor([False, True, False]), -INF))
    with pytest.raises(WeightError, match="floating point"):
        assess(torch.ones(100, 3, dtype=torch.long))
    with pytest.raises(ShapeError, match="no particle"):
        assess(torch.zeros(0, 3))


def test_psis_keeps_shape_dtype_and_scale() -> None:
    log_w = gaussian_weights(0.8 * normal(2000, 3, 4), 0.8).float()
    smoothed, khat = diagnostics.psis(log_w.requires_grad_())
    assert smoothed.shape == (2000, 3, 4)
    assert smoothed.dtype == torch.float32
    assert not smoothed.requires_grad
    assert khat.shape == (3, 4)
    assert (smoothed.amax(0) <= log_w.amax(0)).all()
    assert (smoothed != log_w).any(0).all()
    assert ((smoothed != log_w).sum(0) <= math.ceil(3 * math.sqrt(2000))).all()
    torch.testing.assert_close(log_mean_exp(smoothed), torch.zeros(3, 4), atol=0.15, rtol=0)  # evidence one


def test_no_observations_is_no_error() -> None:
    smoothed, khat = diagnostics.psis(torch.zeros(100, 0))
    assert smoothed.shape == (100, 0)
    assert khat.shape == (0,)


@pytest.mark.parametrize("k", [50, 300, 1000])
def test_a_batch_gives_the_results_of_single_observations(k: int) -> None:
    families = [make(k, 3).double() for make in FAMILIES.values()]
    log_w = torch.stack(families, 2)
    smoothed, khat = diagnostics.psis(log_w)
    for i in range(3):
        for j in range(len(families)):
            alone, alone_khat = diagnostics.psis(log_w[:, i, j])
            torch.testing.assert_close(khat[i, j], alone_khat, atol=1e-9, rtol=1e-9, equal_nan=True)
            torch.testing.assert_close(smoothed[:, i, j].sort().values, alone.sort().values, atol=1e-9, rtol=1e-12)


def test_chunks_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    log_w, f = normal(400, 33), normal(400, 33, 2, seed=3).exp()
    unchunked = (*diagnostics.psis(log_w), diagnostics.khat(log_w), diagnostics.khat_of(f, log_w))
    monkeypatch.setitem(diagnostics._CHUNK, "cpu", 5 * 400)
    chunked = (*diagnostics.psis(log_w), diagnostics.khat(log_w), diagnostics.khat_of(f, log_w))
    for a, b in zip(unchunked, chunked, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.slow
def test_memory_stays_bounded() -> None:
    program = (
        "import resource, torch; from vaerdict import diagnostics; from vaerdict.noise import seeded\n"
        "w = torch.randn(5000, 10_000, generator=seeded(0), dtype=torch.float64)\n"
        "diagnostics.psis(w), diagnostics.khat(w), diagnostics.ess(w)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 4.0  # GiB, of which the input and the smoothed output are 0.75


def test_ess_bounds_and_closed_form() -> None:
    log_w = 3 * normal(500, 40)
    ess = diagnostics.ess(log_w)
    assert ((ess >= 1) & (ess <= 500)).all()
    assert diagnostics.ess(torch.full((500,), -800.0)).item() == 500
    assert diagnostics.ess(torch.tensor([0.0, -INF, -INF])).item() == 1
    assert diagnostics.ess(torch.tensor([1.0, 3.0]).log()).item() == pytest.approx(16 / 10, rel=1e-6)
    torch.testing.assert_close(diagnostics.ess(log_w - 900), ess)


THRESHOLDS = [(1, -INF), (10, 0.0), (200, 0.5654), (1000, 2 / 3), (2155, 0.7), (10**6, 0.7)]


@pytest.mark.parametrize(("k", "expected"), THRESHOLDS)
def test_khat_threshold(k: int, expected: float) -> None:
    assert diagnostics.khat_threshold(k) == pytest.approx(expected, abs=1e-4)


VERDICTS = [
    # khat, ess, k, verdict
    (0.3, 500.0, 1000, Verdict.OK),
    (-0.2, 10.0, 1000, Verdict.OK),
    (0.3, 9.9, 1000, Verdict.CAUTION),  # too few effective draws
    (0.3, 1.9, 1000, Verdict.REFUSE),  # one draw dominates
    (0.68, 500.0, 1000, Verdict.CAUTION),  # above 2/3, which 1000 draws allow
    (0.68, 500.0, 5000, Verdict.OK),
    (0.7, 500.0, 5000, Verdict.OK),
    (0.71, 500.0, 5000, Verdict.REFUSE),
    (0.71, 5000.0, 5000, Verdict.REFUSE),
    (INF, 3.0, 5000, Verdict.REFUSE),
    (NAN, 1000.0, 1000, Verdict.OK),  # equal weights
    (NAN, 999.0, 1000, Verdict.CAUTION),  # even, but tied
    (NAN, 500.0, 1000, Verdict.CAUTION),
    (NAN, 499.0, 1000, Verdict.REFUSE),
    (NAN, 21.0, 21, Verdict.OK),
    (NAN, 20.0, 20, Verdict.CAUTION),  # equal, but too few to tell
    (NAN, 2.0, 2, Verdict.CAUTION),
    (NAN, 1.0, 1, Verdict.REFUSE),
    (NAN, 1.0, 1000, Verdict.REFUSE),
    (NAN, NAN, 1000, Verdict.REFUSE),
]


@pytest.mark.parametrize(("khat", "ess", "k", "expected"), VERDICTS)
def test_verdict(khat: float, ess: float, k: int, expected: Verdict) -> None:
    verdict = diagnostics.verdict(torch.tensor([[khat]]), torch.tensor([ess]), k)
    assert verdict.shape == (1, 1)
    assert Verdict(int(verdict)) is expected


def test_verdict_on_weights() -> None:
    good, bad = gaussian_weights(1.3 * normal(2000, 1), 1.3), gaussian_weights(0.3 * normal(2000, 1), 0.3)
    log_w = torch.cat([torch.zeros_like(good), good, bad, outlier(2000, 40.0).unsqueeze(1)], 1)
    verdict = diagnostics.verdict(diagnostics.khat(log_w), diagnostics.ess(log_w), 2000)
    assert verdict.tolist() == [Verdict.OK, Verdict.OK, Verdict.REFUSE, Verdict.REFUSE]
    assert diagnostics.verdict(diagnostics.khat(good[:15]), diagnostics.ess(good[:15]), 15).item() == Verdict.CAUTION


def squared_scores(f: Tensor, log_w: Tensor, truth: float, strata: Tensor | None = None) -> Tensor:
    value = (log_normalise(log_w).exp() * f).sum(0)
    return ((value - truth) / diagnostics.mcse_snis(f, log_w, strata=strata)).square()


def test_mcse_is_the_error_of_repeated_estimates() -> None:
    """Bounded weights, E[z^2] = 1: squared scores have mean one up to O(1/K), below a tenth of what is allowed."""
    z = 1.3 * normal(2000, 4000)
    scores = squared_scores(z**2, gaussian_weights(z, 1.3), 1.0)
    assert_mean(scores, 1.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(scores / 0.9**2, 1.0, rate=1e-6)  # a standard error 10 % too small is detected


def test_stratified_mcse_is_the_error_of_stratified_estimates() -> None:
    """A third of the draws from N(-1.5, 1), the rest from N(1.5, 1), all weighted relative to the mixture."""
    strata = torch.arange(900).remainder(3).clamp(max=1)
    z = normal(900, 4000) + torch.tensor([-1.5, 1.5]).double()[strata].unsqueeze(1)
    log_q = torch.logaddexp(math.log(1 / 3) - 0.5 * (z + 1.5) ** 2, math.log(2 / 3) - 0.5 * (z - 1.5) ** 2)
    log_w = -0.5 * z**2 - log_q
    assert_mean(squared_scores(z, log_w, 0.0, strata), 1.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(
            squared_scores(z, log_w, 0.0), 1.0, rate=1e-6
        )  # the i.i.d. formula includes the variance that strata remove


def test_mcse_closed_form_shapes_and_strata() -> None:
    f, log_w = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 3.0]).log()
    assert diagnostics.mcse_snis(f, log_w).item() == pytest.approx(math.sqrt(2) * 0.25 * 0.75, rel=1e-6)
    f, log_w = normal(60, 4, 5, 2), normal(60, 4, seed=1)
    strata = torch.arange(60).remainder(2) * 7  # labels are names, not indices
    assert diagnostics.mcse_snis(f, log_w).shape == (4, 5, 2)
    first, weight = f[:, 0, 0, 0], log_normalise(log_w[:, 0]).exp()
    error = weight * (first - (weight * first).sum())
    by_hand = (30 * error[::2].var() + 30 * error[1::2].var()).sqrt()
    torch.testing.assert_close(diagnostics.mcse_snis(f, log_w, strata=strata)[0, 0, 0], by_hand)
    assert diagnostics.mcse_snis(f[:1], log_w[:1]).isnan().all()  # the error of one draw is unknown
    above = (f > 0)[..., 0, 0]
    torch.testing.assert_close(diagnostics.mcse_snis(above, log_w), diagnostics.mcse_snis(above.double(), log_w))


def test_events_count_effective_hits_and_give_few_of_them_an_error() -> None:
    """Of 100 equal weights c hit an event; columns: no hit, 3, 98, 40, a constant, a density."""
    f, log_w = torch.zeros(100, 2, 6), torch.zeros(100, 2).double()
    f[:3, :, 1], f[:98, :, 2], f[:40, :, 3], f[:, :, 4] = 1, 1000, 1, 7
    f[..., 5] = normal(100, 2)
    f[..., 2] -= 300  # any two values, and the event is the one of lower probability
    inside, mcse = diagnostics.events(f, log_w)
    assert inside.tolist() == [[0, 3, 2, 40, INF, INF]] * 2
    expected = torch.tensor([0.01 * 2, 0.01 * 3, 1000 * 0.01 * (1 + 3**0.5), 0, 0, 0]).double()
    torch.testing.assert_close(mcse, expected.expand(2, 6))
    for indicator in (f[..., 1] > 0, f[..., 1].float()):
        torch.testing.assert_close(diagnostics.events(indicator, log_w).mcse, mcse[:, 1])


def test_hits_are_counted_by_the_largest_weight_and_weigh_at_least_the_mean() -> None:
    weight = torch.tensor([1.0, 1.0, 2.0, *[20.0] * 50]).double()
    f = (torch.arange(53) < 3).double()
    inside, mcse = diagnostics.events(f, weight.log())
    assert inside.item() == pytest.approx(4 / 2)
    ess = weight.sum() ** 2 / weight.square().sum()
    assert mcse.item() == pytest.approx((1 + 3**0.5) / ess.item())  # the hits weigh less than the mean
    heavy = torch.cat([100 * weight[:3], weight[3:]])
    assert diagnostics.events(f, heavy.log()).mcse.item() == pytest.approx((1 + 3**0.5) * 200 / heavy.sum().item())


def test_probes_tell_how_large_a_function_may_be_where_no_draw_is() -> None:
    loss, log_w = torch.zeros(100, 3), torch.zeros(100, 3)
    loss[:2] = 5
    probes = torch.tensor([0.0, 50.0, 5.0]).repeat(4, 1)
    mcse = diagnostics.events(loss, log_w, probes=probes).mcse
    torch.testing.assert_close(mcse, torch.tensor([5.0, 50.0, 5.0]).double() * 0.01 * (1 + 3**0.5))
    assert diagnostics.events(loss + torch.rand(100, 3, generator=seeded(0)), log_w, probes=probes).mcse.max() == 0


@pytest.mark.parametrize("probability", [0.005, 0.01, 0.02])
def test_the_error_of_few_hits_covers_the_probability(probability) -> None:
    """P is below the estimate plus two errors in 97.5 % of cases or more; 4000 cases fall below 96.5 % once in 1e4."""
    f = (torch.rand(500, 4000, generator=seeded(3)) < probability).double()
    inside, mcse = diagnostics.events(f, torch.zeros(500, 4000))
    few = inside < diagnostics.FEW_HITS
    assert few.double().mean() > 0.99
    covered = f.mean(0) + 2 * mcse >= probability
    assert covered[few].double().mean() > 0.965
    assert (f.mean(0) + mcse >= probability).double().mean() < 0.95  # one error would not do


def test_verdicts_have_names() -> None:
    assert Verdict.names(torch.tensor([2, 0, 1])) == ["REFUSE", "OK", "CAUTION"]


def test_functions_that_do_not_fit_raise() -> None:
    f, log_w = normal(50, 3), normal(50, 2)
    for assess in (diagnostics.mcse_snis, diagnostics.khat_of, diagnostics.events):
        with pytest.raises(ShapeError, match="must begin with the shape of log_w"):
            assess(f, log_w)
    with pytest.raises(ShapeError, match="one component per draw"):
        diagnostics.mcse_snis(f, f, strata=torch.zeros(49, dtype=torch.long))
    with pytest.raises(SettingError, match=r"strata \[1\] have one draw each"):
        diagnostics.mcse_snis(f, f, strata=(torch.arange(50) == 9).long())
    with pytest.raises(DivergenceError, match="1 of 150 values"):
        diagnostics.khat_of(f.masked_fill(f == f.max(), INF), f)


def test_khat_of_detects_a_heavy_function_on_light_weights() -> None:
    """Under q = N(0, 1.2^2) f w = exp(c z^2) has shape 2 * 1.44 * c: 0.86 for f = exp(0.45 z^2), far from an integral.

    Finite cutoffs read up to an eighth low (see `test_recovers_the_exact_shape`), which still leaves it above 0.7.
    """
    z = 1.2 * normal(20_000, 8)
    log_w = gaussian_weights(z, 1.2)
    heavy = torch.exp(0.45 * z**2)
    khat = diagnostics.khat(log_w)
    assert khat.max() < 0.3
    f = torch.stack([heavy, -heavy, z, (z > 1).double(), torch.ones_like(z)], -1)
    of = diagnostics.khat_of(f, log_w)
    assert of.shape == (8, 5)
    assert of[:, 0].mean() > 0.7
    torch.testing.assert_close(of[:, 0], of[:, 1])
    assert ((of[:, 2] >= khat) & (of[:, 2] < 0.4)).all()
    assert torch.equal(of[:, 3], khat)
    assert torch.equal(of[:, 4], khat)
    assert torch.equal(diagnostics.khat_of(z > 1, log_w), khat)


def test_khat_of_with_equal_weights_is_that_of_the_function() -> None:
    f = (-0.8 * uniform(4000, 2).log()).exp()
    log_w = torch.zeros(4000, 2, dtype=torch.float64)
    torch.testing.assert_close(diagnostics.khat_of(f, log_w), diagnostics.khat(f.log()))
    assert diagnostics.khat_of((f > 1.5), log_w).isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_devices_agree() -> None:
    log_w = torch.cat([make(1000, 7).double() for make in FAMILIES.values()], 1)
    for here, there in zip(diagnostics.psis(log_w), diagnostics.psis(log_w.cuda()), strict=True):
        torch.testing.assert_close(
            there.cpu().sort(0).values, here.sort(0).values, atol=1e-9, rtol=1e-9, equal_nan=True
        )


def test_benchmark_runs_and_agrees() -> None:
    pytest.importorskip("arviz")
    rows = list(benchmark.run(quick=True))
    assert {"case", "ours_s", "peer", "peer_s", "ratio", "max_khat_difference"} <= rows[0].keys()
    assert all(row["max_khat_difference"] < 1e-3 for row in rows)
