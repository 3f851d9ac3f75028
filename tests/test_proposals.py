from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributions as td
from scipy import stats
from torch import Tensor, nn

from checks import assert_mean
from vaerdict import core, proposals
from vaerdict.core import Draws, SettingError, ShapeError
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal
from vaerdict.models.ppca import PPCA
from vaerdict.networks import stack, stackable
from vaerdict.noise import Sobol, as_source, seeded
from vaerdict.proposals import (
    Flow,
    Mixture,
    Normal,
    Prior,
    SplineFlow,
    Student,
    Trainable,
    defensive,
    optimal_shares,
)

FAMILIES: dict[str, proposals.Family] = {
    "normal": Normal(),
    "normal-full": Normal(full=True),
    "student": Student(df=5.0),
    "student-full": Student(df=4.0, full=True, learn_df=True),
    "flow": SplineFlow(transforms=2),
}


@pytest.fixture(scope="module")
def model() -> PPCA:
    return PPCA(torch.randn(5, 2, generator=seeded(0), dtype=torch.double), 1.5).requires_grad_(False)


@pytest.fixture(scope="module")
def x(model) -> Tensor:
    return model.simulate(6, generator=seeded(1))[0]


def new_proposal(name: str, x: Tensor, seed: int = 2) -> Trainable:
    family = FAMILIES[name]
    assert isinstance(family, proposals.Family)
    module = family.make(x, 2, hidden=(16,), generator=seeded(seed))
    assert isinstance(module, Trainable)
    return module


def proposal(name: str, model: PPCA, x: Tensor) -> core.Proposal:
    if name in FAMILIES:
        return new_proposal(name, x)
    components = {"wide": model.posterior(x, inflate=2.0), "normal": new_proposal("normal", x)}
    mixture = defensive(components, model.prior, 0.1)
    return mixture if name == "mixture" else Prior(model.prior)


# ------------------------------------------------------------------------------- the contract of every proposal
@pytest.fixture(params=[*FAMILIES, "prior", "mixture"])
def q(request, model, x) -> core.Proposal:
    return proposal(request.param, model, x)


@torch.no_grad()
def test_draws_are_reproducible_and_have_the_density_of_log_prob(q, x):
    assert isinstance(q, core.Proposal)
    z, log_q = q.draw(x, 40, generator=seeded(3))
    assert (z.shape, log_q.shape, z.dtype) == ((40, 6, 2), (40, 6), torch.float64)
    torch.testing.assert_close(log_q, q.log_prob(z, x), rtol=1e-9, atol=1e-9)
    assert torch.equal(z, q.draw(x, 40, generator=seeded(3)).z)
    assert not torch.equal(z, q.draw(x, 40, generator=seeded(4)).z)
    assert q.draw(x, 64, generator=Sobol(seeded(3))).z.shape == (64, 6, 2)


@torch.no_grad()
def test_weights_average_to_the_evidence(q, model, x):
    for component in q.components.values() if isinstance(q, Mixture) else [q]:
        if isinstance(component, Trainable):  # keep untrained networks near the prior, which covers the posterior
            for name, parameter in component.named_parameters():
                parameter *= 1 if name == "log_df" else 0.3
    z, log_q = q.draw(x, 20_000, generator=seeded(5))
    ratio = (model.log_joint(x, z) - log_q - model.log_evidence(x)).exp()
    assert ratio.max() < 100  # bounded weights, so that the normal approximation holds
    assert_mean(ratio.mean(1), 1.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(1.05 * ratio.mean(1), 1.0, rate=1e-6)


def test_zero_particles_raise(q, x, generator):
    with pytest.raises(SettingError, match="k=0 must be a whole number of at least 1"):
        q.draw(x, 0, generator=generator)


@torch.no_grad()
def test_batches_of_any_shape(q, x, generator):
    stacked = x.expand(3, 6, 5)
    if isinstance(q, Mixture):  # its exact posterior is for one batch only
        q = Mixture({"normal": q.components["normal"], "PRIOR": q.components["PRIOR"]})
    z, log_q = q.draw(stacked, 4, generator=generator)
    assert (z.shape, log_q.shape) == ((4, 3, 6, 2), (4, 3, 6))


# ------------------------------------------------------------------------------------------- trainable families
@pytest.mark.parametrize("name", FAMILIES)
def test_a_detached_conditional_has_the_same_density_and_no_gradient_in_the_parameters(name, x):
    q = new_proposal(name, x)
    parameters = list(q.parameters())
    conditional = q(x)
    assert isinstance(conditional, proposals.Conditional)
    z = conditional.transform(conditional.noise(3, as_source(seeded(0))))
    live, stopped = conditional.log_prob(z.detach()), conditional.detach().log_prob(z.detach())
    torch.testing.assert_close(stopped, live, rtol=1e-12, atol=1e-12)
    assert not stopped.requires_grad
    assert all(g is not None for g in torch.autograd.grad(live.sum(), parameters, retain_graph=True))
    assert any(g.abs().sum() > 0 for g in torch.autograd.grad(conditional.detach().log_prob(z).sum(), parameters))


@pytest.mark.parametrize("name", FAMILIES)
def test_noise_reproduces_the_draw(name, x):
    q = new_proposal(name, x)
    noise = q.noise(x, 3, as_source(seeded(7)))
    assert torch.equal(q(x).transform(noise), q.draw(x, 3, generator=seeded(7)).z)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "flow"])
@torch.no_grad()
def test_a_stack_of_proposals_equals_its_members(name, x):
    members = [new_proposal(name, x, seed) for seed in range(3)]
    for i, member in enumerate(members):
        if isinstance(member.log_df, nn.Parameter):
            member.log_df += 0.3 * i
    stacked = stack(members)
    assert isinstance(stacked, Trainable)
    draws = stacked.draw(x.expand(3, 6, 5), 4, generator=[seeded(s) for s in range(3)])
    for m, member in enumerate(members):
        alone = member.draw(x, 4, generator=seeded(m))
        torch.testing.assert_close(draws.z[:, m], alone.z, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(draws.log_q[:, m], alone.log_q, rtol=1e-12, atol=1e-12)


def test_untrained_proposals_are_near_the_prior_and_families_have_suffixes(x):
    suffixes = [family.suffix for family in FAMILIES.values()]
    assert suffixes == ["", "-full", "-t", "-full-t", "-flow"]
    covariance = new_proposal("normal-full", x)(x).covariance().detach()
    assert (covariance.diagonal(dim1=-2, dim2=-1) < 5).all()
    assert (covariance.diagonal(dim1=-2, dim2=-1) > 0.2).all()
    assert stackable(new_proposal("normal", x))
    assert not stackable(new_proposal("flow", x))


def test_only_a_learned_df_is_a_parameter(x):
    assert "log_df" in dict(new_proposal("student-full", x).named_parameters())
    assert "log_df" in dict(new_proposal("student", x).named_buffers())
    with pytest.raises(SettingError, match="df=0 must be positive; 5 is a good start"):
        Student(df=0)


@pytest.mark.parametrize("name", ["normal", "flow"])
def test_a_column_constant_in_training_may_vary_later(name, x):
    x = torch.cat([x, torch.ones(6, 1, dtype=torch.double)], -1)
    q = new_proposal(name, x)
    x[0, -1] = 3.0
    assert torch.isfinite(q.draw(x, 5, generator=seeded(0)).log_q).all()
    assert q.draw(x, 5, generator=seeded(0)).z.abs().max() < 1e3
    assert torch.isfinite(
        new_proposal(name, x[:1]).draw(x, 5, generator=seeded(0)).log_q
    ).all()  # one row has no spread


def test_a_flow_inverts_its_own_transform(x):
    q = new_proposal("flow", x)
    assert isinstance(q, Flow)
    noise = q.noise(x, 50, as_source(seeded(0)))
    z = q(x).transform(noise)
    inverse = q.flow.flow((x - q.center) / q.spread).transform(z)
    torch.testing.assert_close(inverse, noise.normal, rtol=1e-9, atol=1e-9)


def test_the_error_without_zuko_names_the_extra(x, monkeypatch):
    monkeypatch.setitem(sys.modules, "zuko.flows", None)
    with pytest.raises(SettingError, match=r"needs zuko; install it with `pip install 'vaerdict\[flows\]'`"):
        new_proposal("flow", x)


def test_a_trainable_without_forward_raises(x):
    class Empty(Trainable):
        pass

    with pytest.raises(SettingError, match=r"Empty must implement forward\(x\)"):
        Empty()(x)


# --------------------------------------------------------------------------------------------------- the prior
@pytest.mark.parametrize(
    "prior",
    [
        StandardNormal(2),
        torch.distributions.Normal(torch.zeros(2), torch.ones(2)),
        torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2)),
    ],
    ids=["StandardNormal", "coordinates", "joint"],
)
def test_priors_of_torch_are_drawn_from_the_generator(prior, x):
    x = x.float()
    for source in (seeded(0), Sobol(seeded(0)), [seeded(s) for s in range(6)]):
        if isinstance(source, list) and isinstance(prior, StandardNormal):
            continue  # a stack has one generator per member
        z, log_q = Prior(prior).draw(x, 3, generator=source)
        assert z.shape == (3, 6, 2)
        torch.testing.assert_close(log_q, StandardNormal(2).log_prob(z))
    with pytest.raises(ShapeError, match=r"Normal.* without an axis for the latent; use .* Independent\("):
        Prior(torch.distributions.Normal(0.0, 1.0))  # its log_prob would be summed over observations
    first = Prior(prior).draw(x, 3, generator=seeded(0)).z
    assert torch.equal(first, Prior(prior).draw(x, 3, generator=seeded(0)).z)
    assert not torch.equal(first, Prior(prior).draw(x, 3, generator=seeded(1)).z)


@pytest.mark.parametrize("validate", [True, False])
def test_the_prior_is_zero_outside_its_support(validate):
    low, high = torch.tensor([0.0, -1.0]), torch.tensor([2.0, 1.0])
    box = td.Uniform(low, high, validate_args=validate)
    z = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 3.0]]).unsqueeze(1).requires_grad_()
    expected = torch.tensor([[-math.log(4)], [-torch.inf], [-torch.inf]])
    for prior in (box, td.Independent(box, 1, validate_args=validate)):
        torch.testing.assert_close(Prior(prior).log_prob(z, torch.zeros(1, 1)), expected)
    # without validation torch's density of a negative number is finite
    exponential = Prior(td.Independent(td.Exponential(torch.ones(2), validate), 1, validate))
    log_p = exponential.log_prob(z, torch.zeros(1, 1))
    torch.testing.assert_close(log_p, torch.tensor([[-1.0], [-torch.inf], [-4.0]]))
    assert torch.autograd.grad(log_p[[0, 2]].sum(), z)[0][:, 0].tolist() == [[-1, -1], [0, 0], [-1, -1]]


TORCH_PRIORS = {
    "normal": td.Normal(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])),
    "uniform": td.Independent(td.Uniform(torch.tensor([10.0, -1.0]), torch.tensor([11.0, 4.0])), 1),
    "laplace": td.Independent(td.Laplace(torch.zeros(2), torch.tensor([1.0, 0.5])), 1),
    "exponential": td.Independent(td.Exponential(torch.tensor([1.0, 3.0])), 1),
    "half-normal": td.Independent(td.HalfNormal(torch.tensor([1.0, 2.0])), 1),
    "log-normal": td.LogNormal(torch.zeros(2), torch.tensor([0.5, 0.3])),
    "joint": td.MultivariateNormal(torch.ones(2), scale_tril=torch.tensor([[1.0, 0.0], [-0.8, 0.3]])),
    "low-rank": td.LowRankMultivariateNormal(torch.zeros(2), torch.tensor([[1.0], [0.5]]), torch.tensor([0.2, 0.3])),
    "logistic-normal": td.LogisticNormal(torch.zeros(1), torch.ones(1)),
    "transformed": td.TransformedDistribution(
        td.Independent(td.Normal(torch.zeros(2), torch.ones(2)), 1), [td.AffineTransform(1.0, 0.3), td.ExpTransform()]
    ),
}


@pytest.mark.parametrize("name", TORCH_PRIORS)
def test_priors_of_torch_keep_the_accuracy_of_sobol_points(name):
    prior, x = TORCH_PRIORS[name], torch.zeros(200, 1)

    def draws(source) -> Tensor:
        z, log_q = Prior(prior).draw(x, 256, generator=source)
        assert (z.shape, z.dtype) == ((256, 200, 2), torch.float32)
        assert log_q.isfinite().all()
        return z.double()

    def distance(a: Tensor, b: Tensor) -> float:
        return stats.ks_2samp(a.flatten().numpy(), b.flatten().numpy()).statistic

    sobol, iid = draws(Sobol(seeded(0))), draws(seeded(0))
    allowed = math.sqrt(-math.log(1e-6 / 2) / iid[..., 0].numel())  # Kolmogorov-Smirnov at a false-alarm rate of 1e-6
    # pooled over independent nets the draws have the distribution of the prior, in both coordinates and their product
    for f in (lambda z: z[..., 0], lambda z: z[..., 1], lambda z: z[..., 0] * z[..., 1]):
        assert distance(f(sobol), f(iid)) < allowed < distance(f(sobol) + 0.1 * f(iid).std(), f(iid))
        # the variance of the mean of a net falls by 19 (product of two Laplace) to 10^4 and more
        assert f(sobol).mean(0).var() < f(iid).mean(0).var() / 5


def test_a_prior_without_inverse_distribution_function_is_sampled_from_the_generator():
    prior, x = td.Independent(td.Gamma(torch.ones(2), torch.ones(2)), 1), torch.zeros(6, 1)
    z = Prior(prior).draw(x, 8, generator=Sobol(seeded(0))).z
    assert z.shape == (8, 6, 2)
    assert torch.equal(z, Prior(prior).draw(x, 8, generator=Sobol(seeded(0))).z)


def test_samples_carry_no_gradient_in_the_parameters_of_the_prior():
    prior = td.Normal(torch.zeros(2, requires_grad=True), torch.ones(2))
    assert not Prior(prior).draw(torch.zeros(6, 1), 8, generator=Sobol(seeded(0))).z.requires_grad


def test_samples_stay_below_the_open_end_of_their_support():
    prior = td.Independent(td.Uniform(torch.full((1,), 10.0), torch.full((1,), 11.0)), 1)

    class Last(Sobol):
        def uniform(self, k, batch, d, *, like):
            return torch.full((k, *batch, d), 1 - 2.0**-31, dtype=torch.float64)

    z, log_q = Prior(prior).draw(torch.zeros(1, 1), 1, generator=Last(seeded(0)))
    assert z.item() < 11
    assert log_q.item() == 0


# --------------------------------------------------------------------------------------------------- mixtures
def normal_at(center: float, scale: float = 1.0) -> Elliptical:
    return Elliptical(torch.full((6, 2), center, dtype=torch.double), Diagonal(torch.full((6, 2), scale).double()))


@pytest.fixture
def mixture() -> Mixture:
    components = {"a": normal_at(-2.0), "b": normal_at(0.0, 2.0), "c": normal_at(1.0)}
    return Mixture(components, {"a": 5, "b": 3, "c": 2})


@pytest.mark.parametrize(
    ("k", "counts"), [(10, [5, 3, 2]), (7, [4, 2, 1]), (3, [1, 1, 1]), (1000, [500, 300, 200]), (101, [51, 30, 20])]
)
def test_particles_are_allocated_by_largest_remainders(mixture, k, counts):
    assert list(mixture.allocation(k).values()) == counts
    assert mixture.source(k).bincount().tolist() == counts


def test_allocation_uses_every_particle_for_any_shares(generator):
    for _ in range(50):
        shares = torch.rand(5, generator=generator) + 0.1
        names = dict(zip("abcde", shares.tolist(), strict=True))
        mixture = Mixture(dict.fromkeys("abcde", normal_at(0.0)), names)
        for k in (50, 77, 200):
            counts = mixture.allocation(k)
            assert sum(counts.values()) == k
            assert all(abs(counts[name] - k * mixture.shares[name]) < 1 for name in counts)


def test_the_error_for_too_few_particles_names_the_number_needed(model, x):
    mixture = defensive({"a": normal_at(0.0)}, model.prior, 0.05)
    with pytest.raises(SettingError, match="k=5 particles leave PRIOR without a draw; use k=20 or more"):
        mixture.draw(x, 5, generator=seeded(0))
    assert mixture.allocation(20) == {"a": 19, "PRIOR": 1}


def test_draws_are_weighted_by_the_realised_shares(mixture, x, generator):
    z, log_q = mixture.draw(x, 7, generator=generator)
    log_qs = mixture.component_log_prob(z, x)
    assert log_qs.shape == (3, 7, 6)
    realised, nominal = torch.tensor([4 / 7, 2 / 7, 1 / 7]).log(), torch.tensor([0.5, 0.3, 0.2]).log()
    density = torch.logsumexp(realised.double()[:, None, None] + log_qs, 0)
    torch.testing.assert_close(log_q, density, rtol=1e-6, atol=1e-6)
    density = torch.logsumexp(nominal.double()[:, None, None] + log_qs, 0)
    torch.testing.assert_close(mixture.log_prob(z, x), density, rtol=1e-6, atol=1e-6)
    assert (z[:4].mean() < -1) & (z[6].mean() > z[:4].mean())  # sorted by component


def test_the_density_of_a_mixture_integrates_to_one(mixture, x, generator):
    wide = normal_at(-0.5, 4.0)
    z, log_q = wide.draw(x, 20_000, generator=generator)
    ratio = (mixture.log_prob(z, x) - log_q).exp()
    assert_mean(ratio, 1.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(1.05 * ratio, 1.0, rate=1e-6)


def test_a_component_with_share_zero_is_not_used(x, generator):
    class Unused:
        def draw(self, x: Tensor, k: int, *, generator: object) -> Draws:
            raise AssertionError("drawn")

        def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
            raise AssertionError("evaluated")

    mixture = Mixture({"a": normal_at(0.0), "b": Unused()}, {"a": 1.0, "b": 0.0})
    z, log_q = mixture.draw(x, 9, generator=generator)
    assert torch.equal(log_q, normal_at(0.0).log_prob(z))
    assert torch.equal(log_q, mixture.log_prob(z, x))
    assert mixture.allocation(9) == {"a": 9, "b": 0}


def test_a_defensive_share_bounds_the_weights(model, x, generator):
    narrow = model.posterior(x, inflate=0.2)
    mixture = defensive({"narrow": narrow}, model.prior, 0.1)
    assert mixture.shares == pytest.approx({"narrow": 0.9, "PRIOR": 0.1})
    z = mixture.draw(x, 5000, generator=generator).z
    log_w = model.log_joint(x, z) - mixture.log_prob(z, x)
    likelihood = model.log_joint(x, z) - model.prior.log_prob(z)
    assert (log_w <= likelihood + torch.tensor(10.0).log() + 1e-12).all()
    assert (model.log_joint(x, z) - narrow.log_prob(z)).max() > log_w.max() + 5  # without it they are huge


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Mixture({}), "a mixture needs at least one component"),
        (
            lambda: Mixture({"a": normal_at(0.0)}, {"b": 1.0}),
            r"shares name \['b'\], components are \['a'\]; they must match",
        ),
        (lambda: Mixture({"a": normal_at(0.0)}, {"a": -1.0}), "must be non-negative with a positive sum"),
        (lambda: Mixture({"a": normal_at(0.0)}, {"a": 0.0}), "positive sum"),
        (lambda: Mixture({"a": normal_at(0.0)}, {"a": float("nan")}), "must be non-negative"),
        (lambda: defensive({"a": normal_at(0.0)}, StandardNormal(2), 1.0), "share=1.0 of the prior must lie strictly"),
        (lambda: defensive({}, StandardNormal(2)), "must have at least one entry"),
        (lambda: defensive({"PRIOR": normal_at(0.0)}, StandardNormal(2)), "none called PRIOR"),
    ],
)
def test_invalid_mixtures_raise(build, message):
    with pytest.raises(SettingError, match=message):
        build()


def test_latents_of_another_size_than_the_prior_raise(model, x, generator):
    draws = StandardNormal(3).draw(x, 2, generator=generator)
    message = r"draws latents of size \(3,\), the model's prior has size \(2,\); give both the same"
    with pytest.raises(ShapeError, match=message):
        proposals.check_latent(draws, model.prior)
    draws = StandardNormal(2).draw(x, 2, generator=generator)
    assert proposals.check_latent(draws, model.prior) is draws


# ---------------------------------------------------------------------------------------------- optimal shares
def pilot(
    mixture: Mixture, log_joint: Callable[[Tensor], Tensor], x: Tensor, k: int = 2000
) -> tuple[Tensor, Tensor, Tensor]:
    z, log_q = mixture.draw(x, k, generator=seeded(11))
    return log_joint(z), mixture.component_log_prob(z, x), log_q


def test_optimal_shares_recover_a_target_that_is_a_mixture(x):
    a, b = normal_at(-1.0), normal_at(1.0, 0.5)
    target = Mixture({"a": a, "b": b}, {"a": 0.3, "b": 0.7})
    shares = optimal_shares(*pilot(Mixture({"a": a, "b": b}), lambda z: target.log_prob(z, x) - 4.2, x))
    torch.testing.assert_close(shares, torch.tensor([0.3, 0.7], dtype=torch.double), atol=1e-3, rtol=0)


def test_optimal_shares_drop_a_useless_component_and_respect_the_floor(model, x):
    components = {"good": model.posterior(x, inflate=1.3), "useless": normal_at(12.0, 0.2)}
    mixture = defensive(components, model.prior)
    numbers = pilot(mixture, lambda z: model.log_joint(x, z), x)
    shares = optimal_shares(*numbers, floor=[0.0, 0.0, 0.05])
    torch.testing.assert_close(shares, torch.tensor([0.95, 0.0, 0.05], dtype=torch.double), atol=1e-6, rtol=0)
    assert shares[1] == 0
    assert torch.equal(shares, optimal_shares(*numbers, floor=[0.0, 0.0, 0.05]))  # deterministic


def test_optimal_shares_minimise_the_second_moment(model, x):
    """Against every mixture on a grid of the simplex with the same floor."""
    components = {
        "narrow": model.posterior(x, inflate=0.4),
        "off": normal_at(0.3, 0.4),
        "wide": model.posterior(x, inflate=4.0),
    }
    log_p, log_qs, log_q = pilot(Mixture(components), lambda z: model.log_joint(x, z), x)
    floor = torch.tensor([0.1, 0.0, 0.0])
    weight = torch.softmax(log_p - log_q, 0).square()

    def moment(shares: Tensor) -> float:
        return (weight / ((log_qs - log_q).exp() * shares[:, None, None]).sum(0)).sum().item()

    best = optimal_shares(log_p, log_qs, log_q, floor, least=0.0)
    assert best.sum().item() == pytest.approx(1)
    assert (best >= floor - 1e-12).all()
    grid = [torch.tensor([a, b, 20 - a - b]).double() / 20 for a in range(2, 21) for b in range(21 - a)]
    assert moment(best) <= min(map(moment, grid)) * (1 + 1e-9)
    assert moment(best) < 0.9 * moment(torch.full((3,), 1 / 3).double())


def test_optimal_shares_of_mismatched_input_raise():
    log_w, log_qs = torch.zeros(4, 2), torch.zeros(3, 4, 2)
    with pytest.raises(ShapeError, match=r"must be \(K, \*batch\), .*; got \(4, 2\), \(3, 4, 2\) and \(5, 2\)"):
        optimal_shares(log_w, log_qs, torch.zeros(5, 2))
    for floor in ([0.1, 0.1], [0.5, 0.5, 0.0], [-0.1, 0.0, 0.0]):
        with pytest.raises(
            SettingError, match="must hold 3 non-negative shares, one per component, with a sum below 1"
        ):
            optimal_shares(log_w, log_qs, log_w, floor)
    with pytest.raises(core.WeightError, match="8 of 8 log-weights are NaN"):
        optimal_shares(log_w * torch.nan, log_qs, log_w)
