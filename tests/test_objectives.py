"""Bounds and losses against closed forms: target N(0, 1) or a bivariate normal, q normal.

For p = N(0, 1) and q = N(m, s^2) the divergences are known. With one copy of (m, log s) per replicate, one backward
pass gives independent gradients of all replicates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from checks import assert_mean
from vaerdict import objectives
from vaerdict.core import SettingError
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal
from vaerdict.models.ppca import PPCA
from vaerdict.noise import as_source
from vaerdict.objectives import Loss, loss

LOG_EVIDENCE = -1.7  # the target is unnormalised, as a joint density is


def reverse_kl_exact(m: Tensor, log_s: Tensor) -> Tensor:
    return 0.5 * ((2 * log_s).exp() + m**2 - 1) - log_s


def forward_kl_exact(m: Tensor, log_s: Tensor) -> Tensor:
    return log_s + 0.5 * (1 + m**2) * (-2 * log_s).exp() - 0.5


def cubo_exact(m: Tensor, log_s: Tensor) -> Tensor:
    excess = 2 * (2 * log_s).exp() - 1
    return log_s - 0.25 * excess.log() + 0.5 * m**2 / excess


EXACT = {"elbo": reverse_kl_exact, "forward_kl": forward_kl_exact, "cubo": cubo_exact}


def log_weights(
    q: Elliptical, log_p: Callable[[Tensor], Tensor], kind: Loss, k: int, generator
) -> tuple[Tensor, Tensor]:
    """(log_w, log_q) with the gradients that the loss needs."""
    z = q.transform(q.noise(k, as_source(generator)))
    z = z if kind.z_grad else z.detach()
    log_q = (q if kind.q_grad else q.detach()).log_prob(z)
    return log_p(z) - log_q, log_q


def normal_target(z: Tensor) -> Tensor:
    return StandardNormal(1).log_prob(z) + LOG_EVIDENCE


def gradients(kind: Loss, m: float, s: float, k: int, replicates: int, generator) -> Tensor:
    """Independent gradients of a loss in (m, log s). Shapes: ``-> (2, replicates)``."""
    loc = torch.full((replicates,), m, dtype=torch.double, requires_grad=True)
    log_s = torch.full((replicates,), math.log(s), dtype=torch.double, requires_grad=True)
    q = Elliptical(loc[:, None], Diagonal(log_s.exp()[:, None]))
    total = kind(*log_weights(q, normal_target, kind, k, generator)).sum()
    return torch.stack(torch.autograd.grad(total, (loc, log_s)))


def assert_mean_near(sample: Tensor, expected: float, *, bias: float, rate: float) -> None:
    """`assert_mean` for an estimator with a bias of at most `bias`."""
    error = sample.std().item() / math.sqrt(sample.numel())
    distance = abs(sample.mean().item() - expected)
    assert distance <= stats.norm.isf(rate / 2) * error + bias, f"mean {sample.mean():.5g} is not near {expected:.5g}"


# ----------------------------------------------------------------------------------------------------- bounds
def test_relations_between_bounds(generator):
    log_w = torch.randn(7, 4, generator=generator, dtype=torch.double)
    one = log_w[:1]
    assert torch.equal(objectives.iwelbo(one), objectives.elbo(one))
    torch.testing.assert_close(objectives.cubo(one), objectives.elbo(one))
    torch.testing.assert_close(objectives.forward_kl(one), torch.zeros(4, dtype=torch.double))
    torch.testing.assert_close(objectives.vr_iwelbo(log_w, 0.0), objectives.iwelbo(log_w))
    torch.testing.assert_close(objectives.vr_iwelbo(log_w, 1 - 1e-6), objectives.elbo(log_w), rtol=0, atol=1e-5)
    ordered = [
        objectives.elbo(log_w),
        objectives.vr_iwelbo(log_w, 0.5),
        objectives.iwelbo(log_w),
        objectives.cubo(log_w),
    ]
    assert all((low < high).all() for low, high in itertools.pairwise(ordered))
    assert (objectives.forward_kl(log_w) > 0).all()


@pytest.mark.parametrize("k", [1, 2, 7, 50])
def test_bounds_of_the_exact_posterior_are_the_evidence(k, generator):
    model = PPCA(torch.randn(5, 2, generator=generator, dtype=torch.double), 0.7)
    x, _ = model.simulate(6, generator=generator)
    z, log_q = model.posterior(x).draw(x, k, generator=generator)
    log_w = (model.log_joint(x, z) - log_q).detach()
    evidence = model.log_evidence(x).detach()
    for bound in (objectives.elbo, objectives.iwelbo, objectives.cubo, lambda w: objectives.vr_iwelbo(w, 0.3)):
        torch.testing.assert_close(bound(log_w), evidence, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(objectives.forward_kl(log_w), torch.zeros(6, dtype=torch.double))


def test_bounds_estimate_their_closed_forms(generator):
    m, s = torch.tensor(0.4, dtype=torch.double), torch.tensor(1.5, dtype=torch.double)
    q = Elliptical(m.expand(200, 1), Diagonal(s.expand(200, 1)))
    z, log_q = q.draw(None, 4000, generator=generator)
    log_w = normal_target(z) - log_q
    assert_mean(objectives.elbo(log_w), LOG_EVIDENCE - reverse_kl_exact(m, s.log()).item(), rate=1e-6)
    for value, exact in [
        (objectives.iwelbo(log_w), LOG_EVIDENCE),
        (objectives.cubo(log_w), LOG_EVIDENCE + cubo_exact(m, s.log()).item()),
        (objectives.forward_kl(log_w), forward_kl_exact(m, s.log()).item()),
    ]:
        assert_mean_near(value, exact, bias=2 / 4000, rate=1e-6)
        with pytest.raises(AssertionError, match="is not near"):
            assert_mean_near(value, exact + 0.01, bias=2 / 4000, rate=1e-6)


def test_values_and_gradients_are_finite_with_weights_of_zero():
    log_w = torch.tensor([[0.0], [-torch.inf], [1.0]], dtype=torch.double, requires_grad=True)
    log_q = torch.tensor([[0.3], [-torch.inf], [0.1]], dtype=torch.double)
    for name in ("iwelbo_dreg_loss", "forward_kl_dreg_loss", "cubo_dreg_loss"):
        value = getattr(objectives, name)(log_w)
        (gradient,) = torch.autograd.grad(value.sum(), log_w)
        assert torch.isfinite(value).all()
        assert torch.isfinite(gradient).all()
    for name in ("forward_kl_score_loss", "cubo_score_loss"):
        assert torch.isfinite(getattr(objectives, name)(log_w, log_q)).all()
    assert torch.isfinite(objectives.forward_kl(log_w)).all()
    assert torch.isfinite(objectives.iwelbo(log_w)).all()


# -------------------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize(
    ("bound", "fn", "sign", "alpha"),
    [
        ("elbo", objectives.elbo, -1, None),
        ("iwelbo", objectives.iwelbo, -1, None),
        ("vr_iwelbo", lambda w: objectives.vr_iwelbo(w, 0.4), -1, 0.4),
        ("cubo", objectives.cubo, +1, None),
    ],
)
def test_pathwise_losses_are_their_bounds_and_descend_them(bound, fn, sign, alpha, generator):
    noise = torch.randn(6, 3, 2, generator=generator, dtype=torch.double)
    kind = loss(bound, "pathwise", alpha=alpha)

    def at(loc: Tensor, log_s: Tensor) -> Tensor:
        z = loc + log_s.exp() * noise  # the same noise for every parameter value
        log_q = Elliptical(loc, Diagonal(log_s.exp())).log_prob(z)
        log_w = StandardNormal(2).log_prob(z) - log_q
        assert torch.equal(kind(log_w, log_q), sign * fn(log_w))
        return kind(log_w, log_q)

    loc = torch.tensor([[0.3, -0.2]] * 3, dtype=torch.double, requires_grad=True)
    log_s = torch.tensor([[0.2, -0.4]] * 3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(at, (loc, log_s))


@pytest.mark.parametrize(
    ("bound", "estimator"),
    [
        ("elbo", "pathwise"),
        ("elbo", "stl"),
        ("forward_kl", "score"),
        ("forward_kl", "dreg"),
        ("cubo", "pathwise"),
        ("cubo", "score"),
        ("cubo", "dreg"),
    ],
)
def test_losses_have_the_exact_gradient_on_average(bound, estimator, generator):
    """Self-normalised losses carry a bias of order 1/K: K = 2000, and 10/K is allowed for it."""
    m, s, k = 0.4, 1.5, 2000
    at = torch.tensor([m, math.log(s)], dtype=torch.double, requires_grad=True)
    (exact,) = torch.autograd.grad(EXACT[bound](at[0], at[1]), at)
    sample = gradients(loss(bound, estimator), m, s, k, 400, generator)
    bias = 0.0 if bound == "elbo" else 10 / k
    for gradient, expected in zip(sample, exact.tolist(), strict=True):
        assert_mean_near(gradient, expected, bias=bias, rate=1e-6)
        with pytest.raises(AssertionError, match="is not near"):
            assert_mean_near(1.1 * gradient, expected, bias=bias, rate=1e-6)  # an error of ten per cent is detected


def test_the_dreg_expression_without_stopping_q_ascends_the_cubo(generator):
    """The sign error that makes a chi-square fit diverge."""
    wrong = Loss("cubo", "wrong", lambda log_w, log_q: objectives.cubo_dreg_loss(log_w), z_grad=True, q_grad=True)
    right = gradients(loss("cubo", "dreg"), 0.0, 1.5, 2000, 400, generator)[1]
    ascending = gradients(wrong, 0.0, 1.5, 2000, 400, generator)[1]
    exact = 1 - 1.5**2 / (2 * 1.5**2 - 1)  # +0.357
    assert_mean_near(right, exact, bias=10 / 2000, rate=1e-6)
    assert_mean_near(ascending, -exact, bias=10 / 2000, rate=1e-6)


# ---------------------------------------------------------------------------- doubly reparameterised gradients
@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("alpha", [None, 0.3])
def test_dreg_and_pathwise_have_the_same_mean(k, alpha, generator):
    bound = "iwelbo" if alpha is None else "vr_iwelbo"
    state = generator.get_state()
    pathwise = gradients(loss(bound, "pathwise", alpha=alpha), 0.4, 1.3, k, 100_000, generator)
    generator.set_state(state)  # the same noise, so that the difference has little of it
    dreg = gradients(loss(bound, "dreg", alpha=alpha), 0.4, 1.3, k, 100_000, generator)
    for difference in dreg - pathwise:
        assert_mean(difference, 0.0, rate=1e-6)
        with pytest.raises(AssertionError, match="standard errors"):
            assert_mean(difference + 0.03, 0.0, rate=1e-6)


def test_vr_iwelbo_by_dreg_runs_from_the_iwelbo_to_the_elbo(generator):
    log_w = torch.randn(7, 4, generator=generator, dtype=torch.double)
    iwelbo, elbo = objectives.iwelbo_dreg_loss(log_w), objectives.elbo_loss(log_w)
    torch.testing.assert_close(objectives.vr_iwelbo_dreg_loss(log_w, 0.0), iwelbo)
    torch.testing.assert_close(objectives.vr_iwelbo_dreg_loss(log_w, 1 - 1e-6), elbo, rtol=0, atol=1e-5)
    assert ((iwelbo - elbo).abs() > 0.01).all()


def test_dropping_the_score_term_of_the_iwelbo_would_be_biased(generator):
    """With coefficients w instead of w squared, as `stl` would have."""
    stl = Loss("iwelbo", "stl", lambda log_w, _: -(torch.softmax(log_w.detach(), 0) * log_w).sum(0), True, False)
    state = generator.get_state()
    biased = gradients(stl, 0.4, 1.3, 16, 40_000, generator)[1]
    generator.set_state(state)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(biased - gradients(loss("iwelbo", "dreg"), 0.4, 1.3, 16, 40_000, generator)[1], 0.0, rate=1e-6)


def test_signal_to_noise_falls_with_k_for_pathwise_and_rises_for_dreg(generator):
    """Rainforth et al. (2018): of order K^-1/2 and K^1/2, hence a factor of 8 from 4 to 256 particles."""
    ratio: dict[str, list[float]] = {"pathwise": [], "dreg": []}
    for k in (4, 32, 256):
        sample = {e: gradients(loss("iwelbo", e), 0.4, 1.3, k, 4000, generator)[1] for e in ratio}
        signal = sample["dreg"].mean().abs().item()  # their means are equal, and that of dreg has less noise
        for estimator, gradient in sample.items():
            ratio[estimator].append(signal / gradient.std().item())
    falling, rising = ratio["pathwise"], ratio["dreg"]
    assert falling[0] > 2 * falling[1] > 4 * falling[2]
    assert rising[2] > 2 * rising[1] > 4 * rising[0]
    assert 5 < falling[0] / falling[2] < 12
    assert 5 < rising[2] / rising[0] < 12


# ----------------------------------------------------------------------------- fits of a bivariate normal
PRECISION = torch.linalg.inv(torch.tensor([[1.0, 0.4], [0.4, 0.25]], dtype=torch.double))  # sd 1 and 1/2, rho 0.8


def optimum(bound: str, precision: Tensor) -> Tensor:
    """The paper's precisions of the mean-field normal closest to a bivariate normal, in each divergence."""
    diagonal = precision.diagonal()
    square = precision[0, 1] ** 2 / diagonal.prod()  # squared correlation
    return (
        diagonal
        * {
            "elbo": torch.ones(()),
            "forward_kl": 1 - square,
            "cubo": 1.5 - 0.5 * (1 + 8 * square).sqrt(),
        }[bound]
    )


def fit(kind: Loss, precision: Tensor, k: int, *, steps: int, batch: int, generator) -> Tensor:
    """Precisions of q after descending a loss, averaged over the second half of the steps."""
    log_s = torch.zeros(2, dtype=torch.double, requires_grad=True)
    optimiser = torch.optim.Adam([log_s], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    tail = torch.zeros(2, dtype=torch.double)
    for step in range(steps):
        optimiser.zero_grad()
        q = Elliptical(torch.zeros(batch, 2, dtype=torch.double), Diagonal(log_s.exp().expand(batch, 2)))
        log_w, log_q = log_weights(
            q, lambda z: -0.5 * torch.einsum("...i,ij,...j", z, precision, z), kind, k, generator
        )
        kind(log_w, log_q).mean().backward()
        optimiser.step()
        schedule.step()
        tail += log_s.detach() * (step >= steps // 2) / (steps - steps // 2)
    return (-2 * tail).exp()


@pytest.mark.parametrize(
    ("bound", "estimator"),
    [
        ("elbo", "pathwise"),
        ("elbo", "stl"),
        ("forward_kl", "score"),
        ("forward_kl", "dreg"),
        ("cubo", "score"),
        ("cubo", "dreg"),
    ],
)
def test_fits_reach_the_closed_form_precisions_within_three_per_cent(bound, estimator, generator):
    """K = 2000: over seeds the bias of the precision is 0.1 to 0.5 per cent (order 1/K), its spread 0.4 per cent."""
    fitted = fit(loss(bound, estimator), PRECISION, 2000, steps=300, batch=4, generator=generator)
    best = optimum(bound, PRECISION)
    assert ((fitted / best - 1).abs() < 0.03).all(), f"{fitted.tolist()} against {best.tolist()}"
    others = [optimum(other, PRECISION) for other in EXACT if other != bound]
    assert all(((fitted / other - 1).abs() > 0.1).all() for other in others)  # three per cent distinguishes the optima


def test_finite_k_bias_of_the_cubo_losses(generator):
    """Unit variances, correlation 0.8: the optimal variance is 1.37, that of the reverse KL 0.36.

    Measured: dreg .36 / .99 / 1.30 / 1.36 at K = 1 / 5 / 30 / 200, score .69 / 1.24 / 1.34 at K = 5 / 30 / 200.
    """
    precision = torch.linalg.inv(torch.tensor([[1.0, 0.8], [0.8, 1.0]], dtype=torch.double))
    best = 1 / optimum("cubo", precision).mean().item()
    assert best == pytest.approx(1.3685, abs=1e-4)

    def variance(estimator: str, k: int) -> float:
        kind = loss("cubo", estimator)
        return (1 / fit(kind, precision, k, steps=150, batch=max(1, 6000 // k), generator=generator)).mean().item()

    assert variance("dreg", 1) == pytest.approx(1 / precision[0, 0].item(), rel=0.03)  # at K = 1 the ELBO's optimum
    assert variance("dreg", 5) == pytest.approx(0.99, rel=0.03)
    assert variance("dreg", 30) == pytest.approx(1.30, rel=0.03)
    assert variance("score", 5) == pytest.approx(0.69, rel=0.03)
    assert variance("score", 30) == pytest.approx(1.24, rel=0.03)
    assert variance("pathwise", 5) < 0.1 * best  # descending the K-sample CUBO itself collapses q


# ------------------------------------------------------------------------------- pairs of bound and estimator
def test_every_valid_pair_runs_and_declares_its_gradients(generator):
    log_w = torch.randn(5, 3, generator=generator)
    for bound, estimator in objectives.legal_pairs():
        kind = loss(bound, estimator, alpha=0.5 if bound == "vr_iwelbo" else None)
        assert (kind.bound, kind.estimator) == (bound, estimator)
        assert kind(log_w, log_w).shape == (3,)
        assert kind.z_grad == (estimator != "score")
        assert kind.q_grad == (estimator in ("pathwise", "score"))


@pytest.mark.parametrize(
    ("bound", "estimator", "alpha", "message"),
    [
        ("elbo", "dreg", None, "for the ELBO the doubly reparameterised estimator is `stl`"),
        ("elbo", "score", None, "use `stl`"),
        ("iwelbo", "stl", None, "biased for K > 1; use `dreg`"),
        ("forward_kl", "pathwise", None, "use `score` or `dreg`"),
        ("cubo", "stl", None, "use `dreg` or `score`"),
        ("vr_iwelbo", "score", 0.5, "use `dreg`"),
        ("vr_iwelbo", "dreg", None, "alpha belongs to the bound 'vr_iwelbo', which needs it"),
        ("elbo", "stl", 0.5, "alpha belongs to the bound 'vr_iwelbo'"),
        ("vr_iwelbo", "dreg", 1.0, r"alpha=1.0 must lie in \[0, 1\); .* use `elbo`"),
        ("elbow", "stl", None, "choose one of elbo by pathwise"),
    ],
)
def test_invalid_pairs_raise_with_a_remedy(bound, estimator, alpha, message):
    with pytest.raises(SettingError, match=message):
        loss(bound, estimator, alpha=alpha)
