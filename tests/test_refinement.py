from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal as TorchNormal
from torch.nn import functional as F

from checks import assert_mean
from vaerdict import diagnostics
from vaerdict.core import DivergenceError, SettingError, ShapeError, log_mean_exp
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal, Triangular
from vaerdict.models.ppca import PPCA
from vaerdict.networks import MLP, stack
from vaerdict.noise import Sobol, seeded
from vaerdict.objectives import loss
from vaerdict.proposals import Mixture, Normal, Prior, defensive
from vaerdict.refinement import _MAX_CONDITION, _ModeSearch, refine, refine_elbo

DOUBLE = torch.float64


def make_ppca(seed: int = 0, p: int = 8, d: int = 3) -> PPCA:
    g = seeded(seed)
    noise = 0.4 + torch.rand(p, generator=g, dtype=DOUBLE)
    return PPCA(torch.randn(p, d, generator=g, dtype=DOUBLE), noise).requires_grad_(False)


class Counts(nn.Module):
    """Counts with a small decoder: Poisson, or negative binomial with a dispersion."""

    def __init__(self, d: int = 4, p: int = 40, *, activation=F.softplus, dispersion: float | None = None, spread=4.0):
        super().__init__()
        self.decoder = MLP(d, p, (32,), generator=seeded(7), activation=activation).double()
        self.prior, self.dispersion, self.spread = StandardNormal(d), dispersion, spread

    def log_rate(self, z: Tensor) -> Tensor:
        return 1 + self.spread * self.decoder(z)

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.lgamma(x + 1).sum(-1)

    def log_joint(self, x: tuple[Tensor, Tensor], z: Tensor) -> Tensor:
        counts, constant = x
        log_rate = self.log_rate(z)
        if self.dispersion is None:
            log_lik = (counts * log_rate - log_rate.exp()).sum(-1)
        else:
            r = torch.tensor(self.dispersion).to(z)
            terms = counts * log_rate - (counts + r) * torch.logaddexp(log_rate, r.log())
            log_lik = (terms + torch.lgamma(counts + r) - torch.lgamma(r) + r * r.log()).sum(-1)
        return log_lik - constant + self.prior.log_prob(z)

    @torch.no_grad()
    def simulate(self, n: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        z = torch.randn(n, self.prior.d, generator=generator, dtype=DOUBLE)
        return torch.poisson(self.log_rate(z).exp(), generator=generator), z


class Formula:
    """A model given by a function log p(x | z) and a prior."""

    def __init__(self, log_lik, prior) -> None:
        self.log_lik, self.prior = log_lik, prior

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        log_p = self.prior.log_prob(z)
        return self.log_lik(x, z) + (log_p if log_p.dim() < z.dim() else log_p.sum(-1))


class Spy:
    """A model that records the number of observations of each call of log_joint."""

    def __init__(self, model) -> None:
        self.model, self.prior, self.sizes = model, model.prior, []

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        self.sizes.append(z.shape[1])
        return self.model.log_joint(self.model.prepare(x), z)


def bimodal() -> Formula:
    """x_1 is observed about z_1^2, hence two modes near +-sqrt(x_1); x_2 is observed about z_2."""
    return Formula(
        lambda x, z: -8 * (x[..., 0] - z[..., 0] ** 2) ** 2 - 2 * (x[..., 1] - z[..., 1]) ** 2, StandardNormal(2)
    )


def log_weights(model, x: Tensor, q, k: int, generator) -> Tensor:
    with torch.no_grad():
        z, log_q = q.draw(x, k, generator=generator)
        context = model.prepare(x) if hasattr(model, "prepare") else x
        return model.log_joint(context, z) - log_q


def slope(model, x: Tensor, z: Tensor) -> Tensor:
    z = z.clone().requires_grad_()
    context = model.prepare(x) if hasattr(model, "prepare") else x
    return torch.autograd.grad(model.log_joint(context, z[None]).sum(), z)[0]


# ------------------------------------------------------------------------------------------------- closed form
def test_one_step_on_a_linear_model_is_the_exact_posterior(generator):
    model = make_ppca()
    x, _ = model.simulate(50, generator=generator)
    refined = refine(model, x, torch.full((50, 3), 5.0, dtype=DOUBLE), df=None, inflate=1.0, n_steps=1)
    exact = model.posterior(x)
    torch.testing.assert_close(refined.distribution.loc, exact.loc, rtol=0, atol=1e-9)
    torch.testing.assert_close(refined.distribution.covariance(), exact.covariance(), rtol=0, atol=1e-9)
    assert refined.converged.all()
    assert (refined.n_steps == 1).all()
    assert (refined.n_gradients == 2 * (1 + 3)).all()  # two points, a gradient and three rows of the Hessian each
    ess = diagnostics.ess(log_weights(model, x, refined.distribution, 1000, generator))
    torch.testing.assert_close(ess, torch.full_like(ess, 1000.0))


def test_inflate_multiplies_the_root_and_df_gives_a_student(generator):
    model = make_ppca()
    x, _ = model.simulate(5, generator=generator)
    q = refine(model, x, torch.zeros(5, 3, dtype=DOUBLE), df=7.0, inflate=1.3).distribution
    torch.testing.assert_close(q.root.covariance(), 1.69 * model.posterior(x).covariance())
    assert q.df is not None
    assert q.df.item() == 7.0


def test_the_refined_proposal_is_unbiased(generator):
    model = make_ppca()
    x, _ = model.simulate(4, generator=generator)
    # tails heavier than those of the posterior: bounded weights
    q = refine(model, x, torch.zeros(4, 3, dtype=DOUBLE)).distribution
    ratio = (log_weights(model, x, q, 20_000, generator) - model.log_evidence(x)).exp()
    assert_mean(ratio, 1.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(1.02 * ratio, 1.0, rate=1e-6)


def test_the_mode_and_curvature_of_a_skewed_posterior():
    model = Formula(lambda x, z: x[..., 0] * z[..., 0] - z[..., 0].exp(), StandardNormal(1))
    x = torch.tensor([[0.0], [1.0], [30.0], [1000.0]], dtype=DOUBLE)
    refined = refine(model, x, torch.full((4, 1), -3.0, dtype=DOUBLE), df=None, inflate=1.0, tolerance=1e-12)
    mode = refined.distribution.loc
    assert refined.converged.all()
    torch.testing.assert_close(x - mode.exp() - mode, torch.zeros_like(x), rtol=0, atol=1e-4)
    torch.testing.assert_close(refined.distribution.covariance()[..., 0], 1 / (mode.exp() + 1))


# ------------------------------------------------------------------------------------------------ count models
@pytest.mark.parametrize("dispersion", [None, 2.0])
def test_refinement_repairs_a_poor_encoder_of_counts(dispersion, generator):
    model = Counts(dispersion=dispersion)
    x, z = model.simulate(100, generator=generator)
    poor = Elliptical(
        z + 0.5 * torch.randn(z.shape, generator=generator, dtype=DOUBLE), Diagonal(torch.full_like(z, 0.2))
    )
    refined = refine(model, x, poor)
    k = 1000
    before, after = (log_weights(model, x, q, k, generator) for q in (poor, refined.distribution))
    assert refined.converged.all()
    torch.testing.assert_close(slope(model, x, refined.distribution.loc), torch.zeros_like(z), rtol=0, atol=0.05)
    assert diagnostics.khat(before).median() > 1
    assert diagnostics.khat(after).median() < 0.4
    assert (diagnostics.khat(after) < diagnostics.khat_threshold(k)).double().mean() > 0.95
    assert (diagnostics.ess(before) / k).median() < 0.02
    assert (diagnostics.ess(after) / k).median() > 0.6


def test_a_float32_model_gives_a_float32_result_close_to_float64(generator):
    wide = Counts()
    x, z = wide.simulate(60, generator=generator)
    start = torch.zeros_like(z)
    narrow = Counts().float()
    refined, exact = refine(narrow, x.float(), start.float()), refine(wide, x, start)
    q = refined.distribution
    assert {q.loc.dtype, q.root.covariance().dtype, q.draw(None, 2, generator=generator).z.dtype} == {torch.float32}
    # rounding, which differs between processors, may end a search early or lead to another mode
    assert refined.converged.double().mean() > 0.95
    same = (q.loc.double() - exact.distribution.loc).norm(dim=-1) < 1
    assert same.double().mean() > 0.95
    distance = exact.distribution.root.square_norm((q.loc.double() - exact.distribution.loc)[None])[0]
    assert distance[same].max() < 0.05**2


class UserModule(nn.Module):
    """A torch decoder with kinks and a torch prior that does not sum over coordinates."""

    def __init__(self, d: int = 3, p: int = 20) -> None:
        super().__init__()
        g = seeded(3)
        layers = [nn.utils.skip_init(nn.Linear, a, b, dtype=DOUBLE) for a, b in ((d, 32), (32, p))]
        for layer in layers:
            nn.init.normal_(layer.weight, 0, 1.5 / math.sqrt(layer.in_features), generator=g)
            nn.init.normal_(layer.bias, 0, 0.3, generator=g)
        self.decoder = nn.Sequential(layers[0], nn.ReLU(), layers[1])
        self.prior = TorchNormal(torch.zeros(d, dtype=DOUBLE), torch.ones(d, dtype=DOUBLE))

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return TorchNormal(self.decoder(z), 0.5).log_prob(x).sum(-1) + self.prior.log_prob(z).sum(-1)


def test_a_piecewise_linear_decoder(generator):
    model = UserModule()
    z = torch.randn(200, 3, generator=generator, dtype=DOUBLE)
    with torch.no_grad():
        x = model.decoder(z) + 0.5 * torch.randn(200, 20, generator=generator, dtype=DOUBLE)
    refined = refine(model, x, torch.zeros_like(z))
    assert refined.converged.double().mean() > 0.95
    with torch.no_grad():
        q = refined.distribution
        near = q.loc + 0.1 * (q.draw(x, 100, generator=generator).z - q.loc)
        rise = model.log_joint(x, near) - model.log_joint(x, q.loc[None])
    assert rise[:, refined.converged].max() < 0.5
    assert (diagnostics.ess(log_weights(model, x, q, 500, generator)) / 500).median() > 0.4
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not q.loc.requires_grad


# ---------------------------------------------------------------------------------------------- hard searches
def test_the_search_finds_one_of_two_modes_even_from_the_saddle():
    model, x = bimodal(), torch.tensor([[2.0, 1.0]] * 3, dtype=DOUBLE)
    start = torch.tensor([[0.0, 0.0], [0.3, 0.0], [-5.0, 9.0]], dtype=DOUBLE)
    refined = refine(model, x, start, tolerance=1e-12)
    loc = refined.distribution.loc
    assert refined.converged.all()
    assert (slope(model, x, loc).abs() < 1e-4).all()
    torch.testing.assert_close(loc[:, 0].abs(), loc[:1, 0].abs().expand(3), rtol=0, atol=1e-5)
    assert loc[1, 0] > 0  # uphill of the start
    assert loc[2, 0] < 0


def test_a_mixture_with_the_prior_recovers_the_other_mode(generator):
    model, x = bimodal(), torch.tensor([[2.0, 1.0]], dtype=DOUBLE)
    axis = torch.linspace(-6, 6, 1201, dtype=DOUBLE)
    grid = torch.cartesian_prod(axis, axis).unsqueeze(1)
    log_evidence = torch.logsumexp(model.log_joint(x, grid), 0) + 2 * math.log(0.01)
    q = refine(model, x, x, df=None).distribution
    mixture = defensive({"REFINED": q}, model.prior, share=0.5)
    alone, mixed = (log_mean_exp(log_weights(model, x, p, 20_000, generator)) for p in (q, mixture))
    assert abs((log_evidence - alone).item() - math.log(2)) < 0.05  # half of the mass is missing
    assert abs((log_evidence - mixed).item()) < 0.05


def pseudo_huber() -> Formula:
    prior = TorchNormal(torch.zeros(1, dtype=DOUBLE), 1e3 * torch.ones(1, dtype=DOUBLE))
    return Formula(lambda x, z: -100 * (1 + (z - x) ** 2).sqrt()[..., 0], prior)


def test_damped_newton_converges_where_newton_diverges():
    model, x = pseudo_huber(), torch.zeros(4, 1, dtype=DOUBLE)
    start = torch.tensor([[1.5], [-3.0], [20.0], [500.0]], dtype=DOUBLE)
    newton = start
    for _ in range(3):  # u -> -u^3
        newton = newton - newton * (1 + newton**2)
    assert (newton.abs() > start.abs()).all()
    refined = refine(model, x, start)
    assert refined.converged.all()
    assert (refined.distribution.loc.abs() < 1e-3).all()


def test_the_search_converges_from_a_convex_tail():
    model = Formula(lambda x, z: -20 * torch.log1p((z - x).square()).sum(-1), StandardNormal(2))
    x = torch.zeros(3, 2, dtype=DOUBLE)
    refined = refine(model, x, torch.tensor([[3.0, 4.0], [30.0, -4.0], [300.0, 300.0]], dtype=DOUBLE))
    assert refined.converged.all()
    assert (refined.distribution.loc.abs() < 1e-3).all()


def test_no_step_lowers_log_p_for_any_number_of_steps(generator):
    model = Counts(spread=12.0, activation=F.relu)
    x, _ = model.simulate(100, generator=generator)
    start = 2 * torch.randn(100, 4, generator=generator, dtype=DOUBLE)
    last = model.log_joint(model.prepare(x), start[None])[0]
    n_unconverged = []
    for n_steps in (1, 2, 4, 8):
        refined = refine(model, x, start, n_steps=n_steps)
        value = model.log_joint(model.prepare(x), refined.distribution.loc[None])[0]
        assert (value >= last).all()
        assert (refined.n_steps <= n_steps).all()
        n_unconverged.append(int((~refined.converged).sum()))
        last = value
    assert n_unconverged[0] == 100
    assert n_unconverged[-1] < 100


def test_a_step_that_gains_by_no_damping_is_undone_and_a_smaller_one_taken():
    """The first steps are at least 5 / 101 long and lead beyond the kink at one, where log p falls steeply."""
    model = Formula(lambda x, z: torch.where(z < 1, 5 * z, 105 - 100 * z)[..., 0], StandardNormal(1))
    x, start = torch.zeros(1, 1, dtype=DOUBLE), torch.tensor([[0.99]], dtype=DOUBLE)
    first, second = (refine(model, x, start, n_steps=n) for n in (1, 2))
    assert torch.equal(first.distribution.loc, start)
    assert start < second.distribution.loc < 1
    torch.testing.assert_close(first.log_joint, model.log_joint(x, start[None])[0])


def half_line() -> Formula:
    """NaN below zero, minus infinity at zero; the mode solves 2/z - x - z = 0."""
    return Formula(lambda x, z: (2 * z.log() - x * z)[..., 0], StandardNormal(1))


def test_regions_without_density_are_avoided_and_do_not_affect_other_observations():
    x = torch.tensor([[1.0], [1.0], [50.0], [1.0], [1.0]], dtype=DOUBLE)
    start = torch.tensor([[3.0], [1e-6], [4.0], [-1.0], [0.0]], dtype=DOUBLE)
    refined = refine(half_line(), x, start, inflate=1.0, tolerance=1e-12)
    q = refined.distribution
    assert refined.converged.tolist() == [True, True, True, False, False]
    torch.testing.assert_close(q.loc[:3], (((x * x + 8).sqrt() - x) / 2)[:3], rtol=0, atol=1e-5)
    torch.testing.assert_close(q.loc[3:], start[3:])  # no density at the start: the start itself, as wide as the prior
    torch.testing.assert_close(q.root.covariance()[3:], torch.ones(2, 1, 1, dtype=DOUBLE))


def test_a_discontinuity_is_not_a_mode():
    model = Formula(lambda x, z: torch.where(z < 1, 5 * z, -torch.inf)[..., 0], StandardNormal(1))
    refined = refine(model, torch.zeros(1, 1, dtype=DOUBLE), torch.zeros(1, 1, dtype=DOUBLE), n_steps=1000)
    assert refined.n_steps < 1000  # the search stalled
    assert not refined.converged
    assert 0.99 < refined.distribution.loc.item() < 1  # the best point of the search


def test_a_flat_posterior_is_not_wider_than_the_prior():
    model = Formula(lambda x, z: 0.5 * 0.9 * z.square().sum(-1), StandardNormal(2))  # curvature 0.1 in place of 1
    refined = refine(model, torch.zeros(3, 2, dtype=DOUBLE), torch.ones(3, 2, dtype=DOUBLE), inflate=1.0)
    assert refined.converged.all()
    assert (refined.distribution.loc.abs() < 1e-6).all()
    torch.testing.assert_close(refined.distribution.root.covariance(), torch.eye(2, dtype=DOUBLE).expand(3, 2, 2))


@pytest.mark.parametrize("prior", [torch.distributions.Laplace(0.0, 1.0), torch.distributions.Cauchy(0.0, 1.0)])
def test_a_prior_without_positive_curvature_is_assigned_one(prior):
    model = Formula(lambda x, z: -2 * (z - x).square().sum(-1), prior)
    x = torch.full((1, 1), 4.0, dtype=DOUBLE)
    refined = refine(model, x, torch.full((1, 1), 5.0, dtype=DOUBLE), inflate=1.0)
    assert refined.converged.all()
    assert (slope(model, x, refined.distribution.loc).abs() < 1e-2).all()
    assert 0.2 < refined.distribution.root.covariance().item() < 0.3


@pytest.mark.parametrize("sd", [1e3, 1e5, 1e9])
def test_a_prior_of_any_width_sets_the_scale(sd):
    """With noise a thousandth as wide as the prior, the posterior has the width of the noise."""
    model = Formula(
        lambda x, z: TorchNormal(x, 1e-3 * sd).log_prob(z).sum(-1), TorchNormal(torch.zeros(1, dtype=DOUBLE), sd)
    )
    refined = refine(model, torch.full((2, 1), 5.0, dtype=DOUBLE), torch.zeros(2, 1, dtype=DOUBLE), inflate=1.0)
    assert refined.converged.all()
    expected = torch.full((2, 1, 1), (sd**-2 + (1e-3 * sd) ** -2) ** -0.5, dtype=DOUBLE)
    torch.testing.assert_close(refined.distribution.root.tril, expected)


# --------------------------------------------------------------------------------- the root of the covariance
def search(curvature: Tensor, basis: Tensor) -> _ModeSearch:
    """A search at a mode with these eigenvalues and eigenvectors."""
    batch = curvature.shape[:-1]
    one = torch.ones(batch, dtype=DOUBLE)
    return _ModeSearch(
        z=torch.zeros_like(curvature),
        value=one,
        slope=torch.zeros_like(curvature),
        curvature=curvature,
        basis=basis,
        finite=one.bool(),
        floor=torch.zeros(*batch, 1, dtype=DOUBLE),
        damping=one,
        stalled=~one.bool(),
        n_steps=one.long(),
    )


def rotations(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(torch.randn(n, d, d, generator=seeded(seed), dtype=DOUBLE)).Q


def spectrum(ratio: float, n: int, d: int) -> Tensor:
    return torch.logspace(0, math.log10(ratio), d, dtype=DOUBLE).expand(n, d).contiguous()


@pytest.mark.parametrize("ratio", [1.0, 1e4, 0.5 * _MAX_CONDITION])
def test_the_root_by_cholesky_agrees_with_that_by_qr(ratio, monkeypatch):
    state = search(spectrum(ratio, 5, 6), rotations(5, 6))
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "qr", lambda _: pytest.fail("a well-conditioned root needs no QR"))
        by_cholesky = state.root(1.0)
    monkeypatch.setattr("vaerdict.refinement._MAX_CONDITION", 0.0)
    torch.testing.assert_close(by_cholesky, state.root(1.0), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("ratio", [4 * _MAX_CONDITION, 1e14, 1e20])
def test_an_ill_conditioned_root_is_accurate(ratio):
    """The covariance matrix itself would have lost the digits of the root."""
    state = search(spectrum(ratio, 5, 6), rotations(5, 6))
    root, axes = state.root(1.0), state.basis * state.curvature.rsqrt().unsqueeze(-2)
    # with R R' = A A' the matrix R^-1 A is orthogonal
    rotation = torch.linalg.solve_triangular(root, axes, upper=False)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(6, dtype=DOUBLE).expand(5, 6, 6), rtol=0, atol=1e-5)
    log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    torch.testing.assert_close(log_det, -0.5 * state.curvature.log().sum(-1), rtol=0, atol=1e-12)


def test_a_curvature_below_the_least_one_is_replaced_by_the_prior():
    state = search(torch.tensor([[0.25, 4.0]], dtype=DOUBLE), torch.eye(2, dtype=DOUBLE).expand(1, 2, 2))
    state = state._replace(floor=torch.ones(1, 1, dtype=DOUBLE))
    for least_curvature, sd in ((1.0, [1.0, 0.5]), (0.25, [2.0, 0.5])):
        assert state.root(least_curvature)[0].diagonal().tolist() == pytest.approx(sd)


def test_ill_and_well_conditioned_roots_may_be_in_one_batch():
    curvature = torch.stack([spectrum(ratio, 3, 4) for ratio in (10.0, 1e12)])
    root = search(curvature, rotations(6, 4).reshape(2, 3, 4, 4)).root(1.0)
    assert torch.equal(root, root.tril())
    assert (root.diagonal(dim1=-2, dim2=-1) > 0).all()
    for i in range(2):
        alone = search(curvature[i], rotations(6, 4).reshape(2, 3, 4, 4)[i]).root(1.0)
        torch.testing.assert_close(root[i], alone)


# ------------------------------------------------------------------------------------------- batches and memory
class PerClass:
    """Log p(x, z | class), where the class is the index on the second batch axis."""

    def __init__(self, model: Counts, shifts: Tensor) -> None:
        self.model, self.prior, self.shifts = model, model.prior, shifts

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return self.model.log_joint(self.model.prepare(x), z + self.shifts) + self.prior.log_prob(z)


@pytest.mark.parametrize("max_bytes", [None, 1])
def test_classes_may_be_a_batch_axis(max_bytes, generator):
    model, n_images, n_classes = Counts(spread=2.0), 7, 3
    x, _ = model.simulate(n_images, generator=generator)
    shifts = torch.randn(n_classes, 4, generator=generator, dtype=DOUBLE)
    start = torch.zeros(n_images, n_classes, 4, dtype=DOUBLE)
    wide = x.unsqueeze(1).expand(-1, n_classes, -1)
    refined = refine(PerClass(model, shifts), wide, start, max_bytes=max_bytes)
    assert refined.converged.shape == refined.n_steps.shape == refined.n_gradients.shape == (n_images, n_classes)
    for c in range(n_classes):
        alone = refine(PerClass(model, shifts[c]), x, start[:, c])
        torch.testing.assert_close(refined.distribution.loc[:, c], alone.distribution.loc, rtol=0, atol=1e-6)
        torch.testing.assert_close(
            refined.distribution.covariance()[:, c], alone.distribution.covariance(), rtol=0, atol=1e-6
        )
    improved = refine_elbo(
        PerClass(model, shifts), wide, refined.distribution, generator=generator, max_bytes=max_bytes,
        stages=((loss("elbo", "stl"), 5),), n_groups=4,
    )  # fmt: skip
    assert improved.gain.shape == (n_images, n_classes)


def test_stacked_members_are_refined_together(generator):
    members = [make_ppca(seed) for seed in (0, 1)]
    x = torch.stack([m.simulate(9, generator=generator)[0] for m in members])
    refined = refine(stack(members), x, torch.zeros(2, 9, 3, dtype=DOUBLE), df=None, inflate=1.0, axis=1, max_bytes=1)
    for i, member in enumerate(members):
        torch.testing.assert_close(refined.distribution.loc[i], member.posterior(x[i]).loc)


def test_a_small_budget_gives_chunks_and_the_same_result(generator):
    model = Counts()
    x, z = model.simulate(64, generator=generator)
    start = torch.zeros_like(z)
    one_chunk, many_chunks = Spy(model), Spy(model)
    reports = []
    refined = refine(one_chunk, x, start)
    chunked = refine(
        many_chunks, x, start, max_bytes=500_000, progress=lambda done, total, what: reports.append((done, total))
    )
    assert max(one_chunk.sizes) == 64
    assert 1 < max(many_chunks.sizes) < 32
    assert reports[-1] == (64, 64)
    assert len(reports) > 2
    torch.testing.assert_close(chunked.distribution.loc, refined.distribution.loc, rtol=0, atol=1e-6)
    torch.testing.assert_close(chunked.converged, refined.converged)


def test_converged_observations_are_not_evaluated_again(generator):
    model = Counts()
    x, z = model.simulate(128, generator=generator)
    start = refine(model, x, torch.zeros_like(z)).distribution.loc
    start[:3] += 3.0
    spy = Spy(model)
    refined = refine(spy, x, start)
    assert refined.n_steps[3:].max() <= 1
    assert refined.n_steps[:3].max() > 3
    assert spy.sizes.count(128) <= 3
    assert set(spy.sizes[-5:]) <= {1, 2, 3}


def test_the_search_narrows_to_unfinished_observations(generator):
    model = Counts()
    x, z = model.simulate(128, generator=generator)
    spy = Spy(model)
    refined = refine(spy, x, torch.zeros_like(z))
    sizes = spy.sizes[2:]  # after the two evaluations that measure memory
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) >= 3
    assert sum(sizes) < 0.7 * 128 * 2 * int(refined.n_steps.max())  # two calls per step for all observations


def test_refinement_works_under_no_grad(generator):
    model = Counts()
    x, z = model.simulate(5, generator=generator)
    with torch.no_grad():
        refined = refine(model, x, z)
        improved = refine_elbo(model, x, refined.distribution, generator=generator, stages=((loss("elbo", "stl"), 2),))
    assert refined.converged.all()
    assert torch.isfinite(improved.distribution.loc).all()


# ------------------------------------------------------------------------------------------------------- starts
def test_the_start_may_be_an_encoder_a_distribution_or_a_proposal_without_location(generator):
    model = make_ppca()
    x, _ = model.simulate(20, generator=generator)
    encoder = Normal().make(x, 3, hidden=(8,), generator=generator).double()
    starts = [encoder, encoder(x), Prior(model.prior), Mixture({"IWAE": encoder, "PRIOR": Prior(model.prior)})]
    for start in starts:
        refined = refine(model, x, start, generator=generator)
        torch.testing.assert_close(refined.distribution.loc, model.posterior(x).loc)
    with pytest.raises(SettingError, match=r"Prior has no location.*generator"):
        refine(model, x, Prior(model.prior))


def test_the_refined_proposal_may_be_a_component_of_a_mixture(generator):
    model = make_ppca()
    x, _ = model.simulate(20, generator=generator)
    encoder = Normal().make(x, 3, hidden=(8,), generator=generator).double()
    mixture = Mixture({"IWAE": encoder, "REFINED": refine(model, x, encoder).distribution})
    log_w = log_weights(model, x, mixture, 400, generator)
    assert (diagnostics.ess(log_w) > 100).all()
    torch.testing.assert_close(log_mean_exp(log_w), model.log_evidence(x), rtol=0, atol=0.5)


class Detached:
    prior = StandardNormal(2)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return self.prior.log_prob(z.detach())


def test_invalid_arguments_raise():
    x, z = torch.zeros(4, 2, dtype=DOUBLE), torch.zeros(4, 2, dtype=DOUBLE)
    model = Formula(lambda x, z: -(z - x).square().sum(-1), StandardNormal(2))
    with pytest.raises(SettingError, match=r"inflate=0.*positive"):
        refine(model, x, z, inflate=0.0)
    with pytest.raises(SettingError, match="df=-1"):
        refine(model, x, z, df=-1.0)
    with pytest.raises(SettingError, match="n_steps=0"):
        refine(model, x, z, n_steps=0)
    with pytest.raises(SettingError, match="max_bytes=0"):
        refine(model, x, z, max_bytes=0)
    with pytest.raises(ShapeError, match="do not match"):
        refine(model, x, z[:3])
    with pytest.raises(ShapeError, match="at least one batch axis"):
        refine(model, x[0], z[0])
    with pytest.raises(ShapeError, match="axis=1 is not one of the 1 batch axes"):
        refine(model, x, z, axis=1)
    with pytest.raises(ShapeError, match="log_joint returned shape"):
        refine(Formula(lambda x, z: -(z - x).square(), TorchNormal(0.0, 1.0)), x.unsqueeze(1), z.unsqueeze(1))
    with pytest.raises(SettingError, match="no gradient in z"):
        refine(Detached(), x, z)
    with pytest.raises(DivergenceError, match="2 of 4 locations"):
        refine(model, x, torch.where(torch.arange(4).unsqueeze(1) < 2, torch.nan, z))


# ----------------------------------------------------------------------------------------------- gradient steps
def reverse_kl(q: Elliptical, p: Elliptical) -> Tensor:
    """KL(q || p) of two normals. Shapes: ``-> (*batch)``."""
    spread = torch.linalg.solve(p.covariance(), q.covariance()).diagonal(dim1=-2, dim2=-1).sum(-1)
    distance = p.root.square_norm((q.loc - p.loc)[None])[0]
    return 0.5 * (spread + distance - q.loc.shape[-1]) + p.root.log_det() - q.root.log_det()


def test_gradient_steps_reach_the_exact_posterior_of_a_linear_model(generator):
    model = make_ppca()
    x, _ = model.simulate(30, generator=generator)
    exact = model.posterior(x)
    start = Elliptical(exact.loc + 0.5, Diagonal(torch.full_like(exact.loc, 0.5)))
    improved = refine_elbo(model, x, start, generator=generator)
    assert reverse_kl(start, exact).median() > 1
    assert reverse_kl(improved.distribution, exact).max() < 0.02
    assert (improved.gain > 0).all()
    assert (improved.n_steps, improved.n_gradients) == (450, 450 * 8)


def test_score_losses_reach_the_exact_posterior_too(generator):
    model = make_ppca()
    x, _ = model.simulate(30, generator=generator)
    exact = model.posterior(x)
    start = Elliptical(exact.loc + 0.1, Diagonal(torch.full_like(exact.loc, 0.5)))
    improved = refine_elbo(model, x, start, generator=generator, stages=((loss("forward_kl", "score"), 400),), k=64)
    assert reverse_kl(start, exact).median() > 0.3
    assert reverse_kl(improved.distribution, exact).median() < 0.02


@pytest.mark.parametrize("df", [None, 10.0])
def test_gradient_steps_improve_on_laplace_for_skewed_counts(df, generator):
    model, k = Counts(p=8, spread=3.0), 2000
    x, z = model.simulate(60, generator=generator)
    laplace = refine(model, x, z, df=df, inflate=1.0 if df is None else 1.1).distribution
    improved = refine_elbo(model, x, laplace, generator=generator)
    before, after = (log_weights(model, x, q, k, generator) for q in (laplace, improved.distribution))
    gain = diagnostics.ess(after) / diagnostics.ess(before)
    assert gain.median() > 1.03
    assert (gain > 0.9).double().mean() > 0.95
    assert diagnostics.ess(after).quantile(0.1) > diagnostics.ess(before).quantile(0.1)
    if df is not None:  # the tails of a normal become lighter, so that its k-hat may grow
        assert (diagnostics.khat(after) < 0.5).all()


@pytest.mark.parametrize("stages", [((loss("elbo", "stl"), 20),), ((loss("cubo", "score"), 20),)])
def test_the_start_is_kept_where_the_steps_make_it_worse(stages, generator):
    model = make_ppca()
    x, _ = model.simulate(30, generator=generator)
    start = model.posterior(x)
    improved = refine_elbo(model, x, start, generator=generator, stages=stages, lr=20.0)
    assert (improved.gain == 0).all()
    assert torch.equal(improved.distribution.loc, start.loc)
    assert torch.equal(improved.distribution.root.covariance(), start.root.covariance())


def test_a_student_keeps_its_df_and_a_heading_is_dropped(generator):
    model = make_ppca()
    x, _ = model.simulate(3, generator=generator)
    start = refine(model, x, torch.zeros(3, 3, dtype=DOUBLE), df=6.0).distribution.towards(torch.eye(3)[0])
    q = refine_elbo(model, x, start, generator=generator, stages=((loss("elbo", "stl"), 3),), n_groups=2).distribution
    assert q.df is not None
    assert q.df.item() == 6.0
    assert q.heading is None
    assert isinstance(q.root, Triangular)


def test_particles_outside_the_support_do_not_affect_the_steps(generator):
    def log_lik(x: Tensor, z: Tensor) -> Tensor:
        return torch.where(z > 0, 4 * z.sqrt() - x * z, -torch.inf)[..., 0]  # its gradient below zero is NaN

    model, x = Formula(log_lik, StandardNormal(1)), torch.ones(2, 1, dtype=DOUBLE)
    start = Elliptical(torch.tensor([[3.0], [-50.0]], dtype=DOUBLE), Diagonal(torch.ones(2, 1, dtype=DOUBLE)))
    improved = refine_elbo(model, x, start, generator=generator)
    assert torch.isfinite(improved.distribution.loc).all()
    assert improved.gain[0] > 0
    assert improved.gain[1] == 0  # no particle has density: the start is kept
    assert improved.distribution.loc[1] == -50


def test_gradient_steps_are_reproducible(generator):
    model = make_ppca()
    x, _ = model.simulate(3, generator=generator)
    start, stages = Elliptical(0 * x[:, :3], Diagonal(torch.ones(3, 3, dtype=DOUBLE))), ((loss("elbo", "stl"), 5),)
    runs = [refine_elbo(model, x, start, generator=seeded(s), stages=stages) for s in (1, 1, 2)]
    assert torch.equal(runs[0].distribution.loc, runs[1].distribution.loc)
    assert not torch.equal(runs[0].distribution.loc, runs[2].distribution.loc)
    with pytest.raises(SettingError, match=r"lr=0.0 must be positive"):
        refine_elbo(model, x, runs[0].distribution, generator=generator, lr=0.0)


# ------------------------------------------------------------------------------------------------------- queries
def test_sobol_draws_towards_the_query_give_accurate_tail_probabilities(generator):
    g = seeded(0)
    weight = torch.randn(10, 6, generator=g, dtype=DOUBLE) / math.sqrt(6)
    model = PPCA(weight, (1 + 2 * torch.randn(10, generator=g, dtype=DOUBLE)).abs() + 0.1).requires_grad_(False)
    x, _ = model.simulate(200, generator=g)
    nu = torch.logspace(-2, 1, 40, dtype=DOUBLE)
    q = refine(model, x, torch.zeros(200, 6, dtype=DOUBLE), df=None, inflate=1.0).distribution

    def error(q: Elliptical, coordinate: int, source) -> float:
        sd = model.posterior_covariance()[coordinate, coordinate].sqrt()
        exact = torch.special.ndtr((model.posterior(x).loc[:, coordinate, None] - nu) / sd)
        z = q.draw(x, 256, generator=source).z[..., coordinate, None]
        return ((z >= nu).double().mean(0) - exact).abs().mean().item()

    assert 0.008 < error(q, 0, generator) < 0.016
    for coordinate in (0, 5):
        aligned = q.towards(torch.eye(6, dtype=DOUBLE)[coordinate])
        assert error(aligned, coordinate, Sobol(generator)) < 0.0015
    # the first coordinate is the first of the triangular root anyway; the direction matters for any other query
    assert error(q, 5, Sobol(generator)) > 3 * error(aligned, 5, Sobol(generator))


def test_refinement_leaks_no_tensors():
    """Measuring what autograd saves must not keep it alive."""
    model = Counts()
    x, z = model.simulate(6, generator=seeded(0))

    def live() -> int:
        gc.collect()
        return sum(type(o) is Tensor for o in gc.get_objects())

    refine(model, x, z)
    before = live()
    for _ in range(3):
        refine(model, x, z)
    assert live() == before
