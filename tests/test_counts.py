"""The model of counts: its density, stacks, initial values, proposals and evidence."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from vaerdict import core
from vaerdict.core import DataError, ShapeError
from vaerdict.datasets import released
from vaerdict.likelihoods import CountLikelihood, NegativeBinomial, Poisson, ZeroInflated
from vaerdict.models.counts import CountModel, moments
from vaerdict.networks import LogNormalised, stack
from vaerdict.noise import Iid, seeded
from vaerdict.proposals import Normal, OfCounts, Preprocessed, Student
from vaerdict.training import refined_evidence

LIKELIHOODS: list[CountLikelihood] = [Poisson(), NegativeBinomial(), ZeroInflated(), ZeroInflated(per_cell=True)]
GENES, D, K = 12, 3, 4


def counts(n: int = 20, seed: int = 0) -> Tensor:
    g = seeded(seed)
    x = torch.poisson(4 * torch.rand(n, GENES, generator=g, dtype=torch.double), generator=g)
    x[:, 0] += 1  # no cell is without counts
    return x


def with_batches(x: Tensor, n_batches: int) -> Tensor:
    return torch.cat([x, torch.eye(n_batches, dtype=x.dtype)[torch.arange(len(x)) % n_batches]], -1)


def model(likelihood: CountLikelihood, x: Tensor, seed: int = 1, n_batches: int = 0) -> CountModel:
    return CountModel.start(
        x, D, generator=seeded(seed), likelihood=likelihood, hidden=(8,), n_batches=n_batches
    ).double()


def latents(*batch: int, seed: int = 2) -> Tensor:
    return torch.randn(K, *batch, D, generator=seeded(seed), dtype=torch.double)


# -------------------------------------------------------------------------------------------------- the density
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_log_joint_is_prior_times_likelihood(likelihood):
    x, z = counts(), latents(20)
    m = model(likelihood, x)
    entries = likelihood.log_prob(x, m.conditional(x, z))
    expected = entries.sum(-1) + torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)
    assert m.log_joint(x, z).shape == (K, 20)
    torch.testing.assert_close(m.log_joint(x, z), expected)
    torch.testing.assert_close(m.log_joint(m.prepare(x), z), expected)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@torch.no_grad()
def test_the_fixed_part_is_exact_in_single_precision(likelihood):
    """Differences of large gamma functions, summed over genes, are exact to the rounding of the sum."""
    g = seeded(0)
    x = torch.poisson(5 * torch.exp(torch.randn(20, 2000, generator=g) - 0.5), generator=g)
    single = CountModel.start(x, D, generator=g, likelihood=likelihood, hidden=(8,))
    exact = copy.deepcopy(single).double().prepare(x.double()).fixed
    fixed = single.prepare(x).fixed
    assert fixed.dtype == torch.float32
    torch.testing.assert_close(fixed, exact.float(), rtol=2e-7, atol=0)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_batches_may_have_any_number_of_axes(likelihood):
    x, z = counts(), latents(20)
    m = model(likelihood, x)
    assert isinstance(m, core.Model)
    assert isinstance(m.prior, core.PriorDistribution)
    twice = m.log_joint(core.prepared(m, torch.stack([x, x])), z.unsqueeze(1).expand(K, 2, 20, D))
    torch.testing.assert_close(twice[:, 1], m.log_joint(x, z))
    torch.testing.assert_close(m.log_joint(x[0], z[:, 0]), m.log_joint(x, z)[:, 0])


def test_the_library_enters_by_its_logarithm():
    """The mean of a count is library times proportion: compared with scipy's negative binomial."""
    x, z = counts(), latents(20)
    m = model(NegativeBinomial(), x)
    mean = x.sum(-1, keepdim=True) * m.expression(z)
    r = m.log_dispersion.exp()
    log_lik = torch.as_tensor(stats.nbinom(r.detach(), (r / (r + mean)).detach()).logpmf(x)).sum(-1)
    torch.testing.assert_close(m.log_joint(x, z).detach(), log_lik + m.prior.log_prob(z), rtol=1e-6, atol=1e-6)


def test_the_library_shift_of_a_zero_inflated_model():
    x, z = counts(), latents(20)
    m = model(ZeroInflated(), x)
    before = m.conditional(x, z).log_mean
    with torch.no_grad():
        m.library_shift += 0.3
    torch.testing.assert_close(m.conditional(x, z).log_mean, before + 0.3)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_gradients_reach_every_parameter_and_z(likelihood):
    x, z = counts(), latents(20).requires_grad_()
    m = model(likelihood, x)
    gradients = torch.autograd.grad(m.log_joint(x, z).sum(), [z, *m.parameters()])
    assert all(g.abs().max() > 0 for g in gradients)


def test_expression_sums_to_one():
    x, z = counts(), latents(20)
    m = model(NegativeBinomial(), x)
    torch.testing.assert_close(m.expression(z).sum(-1), torch.ones(K, 20).double())
    torch.testing.assert_close(m.log_expression(z).exp(), m.expression(z))


def test_sampled_counts():
    x, z = counts(200), latents(200)
    m = model(NegativeBinomial(), x)
    drawn = m.sample(x, z, generator=seeded(3))
    assert drawn.shape == (K, 200, GENES)
    assert torch.equal(drawn, drawn.round())
    assert drawn.sum(-1).mean().item() == pytest.approx(x.sum(-1).mean().item(), rel=0.1)
    assert torch.equal(drawn, m.sample(x, z, generator=seeded(3)))


# ------------------------------------------------------------------------------------------------------ batches
def test_the_density_depends_on_the_batch():
    x = with_batches(counts(), 2)
    m, z = model(NegativeBinomial(), x, n_batches=2), latents(20)
    assert m.n_genes == GENES
    other = x.clone()
    other[:, GENES:] = other[:, GENES:].flip(-1)
    assert not torch.isclose(m.log_joint(x, z), m.log_joint(other, z)).any()
    assert torch.equal(m.log_expression(z, x[:, GENES:]), m.log_expression(z, other[:, GENES:].flip(-1)))


def test_expression_without_a_batch_is_the_mean_over_batches():
    x = with_batches(counts(), 2)
    m, z = model(NegativeBinomial(), x, n_batches=2), latents(20)
    each = [m.expression(z, one.expand(20, 2)) for one in torch.eye(2).double()]
    torch.testing.assert_close(m.expression(z), (each[0] + each[1]) / 2)
    assert not torch.isclose(each[0], each[1]).all()


# -------------------------------------------------------------------------------------------------- stacks
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("n_batches", [0, 2])
def test_a_stack_agrees_with_its_members(likelihood, n_batches):
    xs = [counts(seed=s) if n_batches == 0 else with_batches(counts(seed=s), n_batches) for s in range(3)]
    members = [model(likelihood, x, seed=i, n_batches=n_batches) for i, x in enumerate(xs)]
    with torch.no_grad():  # larger differences between members than those of their moments
        for i, m in enumerate(members):
            for p in m.parameters():
                p += 0.1 * i
    stacked, x, z = stack(members), torch.stack(xs), latents(3, 20)
    log_p = stacked.log_joint(x, z)
    expression = stacked.expression(z)
    assert log_p.shape == (K, 3, 20)
    for i, m in enumerate(members):
        torch.testing.assert_close(log_p[:, i], m.log_joint(xs[i], z[:, i]))
        torch.testing.assert_close(expression[:, i], m.expression(z[:, i]))


# ------------------------------------------------------------------------------------------------------- initial values
def test_moment_estimates_of_dispersions_and_proportions():
    g = seeded(4)
    r, mean = torch.tensor([1.0, 5.0, 20.0]), torch.tensor([20.0, 40.0, 100.0])
    rate = torch._standard_gamma((r * torch.ones(20_000, 1)), generator=g) / r * mean
    rest = torch.full((20_000, 1), 5000.0)  # keeps library sizes equal
    x = torch.cat([torch.poisson(rate, generator=g), rest], -1)
    estimates = moments(x, inflated=False)
    torch.testing.assert_close(estimates.log_dispersion[:3].exp().float(), r, rtol=0.1, atol=0)
    torch.testing.assert_close(
        estimates.log_proportion.exp()[:3].float(), mean / (5000 + mean.sum()), rtol=0.05, atol=0
    )


def test_moments_distinguish_dropped_counts_from_rare_genes():
    data = released(0, n_cells=2000)
    estimates = moments(data.counts, inflated=True)
    torch.testing.assert_close(
        torch.sigmoid(estimates.zero_logit), torch.full_like(estimates.zero_logit, 0.3), rtol=0, atol=0.05
    )
    assert estimates.library_shift.item() == pytest.approx(-math.log(0.7), abs=0.02)
    g = seeded(5)
    rare = torch.poisson(torch.full((5000, 4), 0.2), generator=g)
    rare[:, 0] = 50
    assert torch.sigmoid(moments(rare, inflated=True).zero_logit).max() < 0.25  # 82 % of the others are zero


def test_a_gene_without_counts_has_finite_initial_values():
    x = counts()
    x[:, 3] = 0
    for likelihood in LIKELIHOODS:
        m = model(likelihood, x)
        assert all(p.isfinite().all() for p in m.parameters())
        assert m.log_joint(x, latents(20)).isfinite().all()


def test_moments_are_good_initial_values():
    """At z = 0 the untrained model is better by nats per cell than with unit dispersions or equal proportions."""
    x = torch.poisson(released(0, n_cells=200).rate, generator=seeded(0))
    model = CountModel.start(x, 2, generator=seeded(0))
    unit_dispersions = CountModel(model.decoder, 2, x.shape[-1])
    z = torch.zeros(1, 200, 2)
    log_joint = model.log_joint(x, z).mean()
    assert unit_dispersions.log_joint(x, z).mean() < log_joint - 10
    with torch.no_grad():
        model.decoder.layers[-1].bias.zero_()
    assert model.log_joint(x, z).mean() < log_joint - 10


def test_gene_wise_parameters_have_larger_learning_rates():
    m = model(ZeroInflated(), counts())
    named = dict(m.named_parameters())
    assert set(m.rates) <= set(named)
    assert m.rates["log_dispersion"] > 1


# ------------------------------------------------------------------------------------------------------- errors
def test_cells_without_counts_are_refused():
    x = counts()
    m = model(NegativeBinomial(), x)
    x[4] = 0
    with pytest.raises(DataError, match="1 cells have no counts"):
        m.prepare(x)


def test_wrong_numbers_of_columns_and_latents_are_refused():
    x = counts()
    m = model(NegativeBinomial(), x)
    with pytest.raises(ShapeError, match="11 columns, the model 12 genes"):
        m.log_joint(x[:, 1:], latents(20))
    with pytest.raises(ShapeError, match="z has 2 latents, the model 3"):
        m.log_joint(x, latents(20)[..., :2])


# ---------------------------------------------------------------------------------------------------- proposals
def test_encoders_take_logarithms_of_normalised_counts():
    x = counts()
    view = LogNormalised(GENES, x.sum(-1).median())
    expected = torch.log1p(x / x.sum(-1, keepdim=True) * x.sum(-1).median())
    torch.testing.assert_close(view(x), expected)
    torch.testing.assert_close(view(5 * x), expected)  # depth has no effect
    both = with_batches(x, 2)
    assert torch.equal(view(both)[:, GENES:], both[:, GENES:])


@pytest.mark.parametrize("family", [Normal(), Normal(full=True), Student(), Student(full=True, learn_df=True)])
def test_families_of_counts_are_the_families_on_normalised_counts(family):
    x = counts()
    q = OfCounts(family).make(x, D, hidden=(8,), generator=seeded(0))
    assert isinstance(q, Preprocessed)
    assert OfCounts(family).suffix == family.suffix
    z, log_q = q.draw(x, K, generator=seeded(1))
    torch.testing.assert_close(log_q, q.proposal(q.view(x)).log_prob(z))
    torch.testing.assert_close(log_q, q.log_prob(z, x))
    noises = [noise(Iid((seeded(1),))) for noise in (lambda s: q.noise(x, K, s), lambda s: q(x).noise(K, s))]
    assert torch.equal(noises[0].normal, noises[1].normal)


def test_proposals_for_counts_can_be_stacked():
    xs = [counts(seed=s) for s in range(2)]
    members = [OfCounts(Normal(full=True)).make(x, D, hidden=(8,), generator=seeded(i)) for i, x in enumerate(xs)]
    z = latents(2, 20)
    log_prob = stack(members).log_prob(z, torch.stack(xs))
    for i, q in enumerate(members):
        torch.testing.assert_close(log_prob[:, i], q.log_prob(z[:, i], xs[i]))


@pytest.mark.parametrize("n_batches", [0, 2])
def test_counts_may_be_integers(n_batches):
    x = counts()[:, : GENES - n_batches].float()
    x = with_batches(x, n_batches) if n_batches else x
    log_weights = []
    for counted in (x, x.int()):
        m = CountModel.start(counted, D, generator=seeded(0), hidden=(8,), n_batches=n_batches)
        q = OfCounts(n_batches=n_batches).make(counted, D, hidden=(8,), generator=seeded(1))
        z, log_q = q.draw(counted, K, generator=seeded(2))
        log_weights.append(m.log_joint(counted, z) - log_q)
    assert torch.equal(*log_weights)


# ----------------------------------------------------------------------------------------- evidence, by quadrature
@pytest.mark.parametrize("likelihood", [NegativeBinomial(), ZeroInflated()])
def test_refined_evidence_is_the_integral(likelihood):
    x = counts(8)
    m = CountModel.start(x, 1, generator=seeded(1), likelihood=likelihood, hidden=(8,)).double()
    with torch.no_grad():
        m.decoder.layers[-1].weight *= 5  # so that the latent matters
    grid = torch.linspace(-9, 9, 2001).double()
    log_p = m.log_joint(x, grid.reshape(-1, 1, 1).expand(-1, 8, 1)).detach()
    exact = torch.logsumexp(log_p, 0) + math.log(18 / 2000)
    estimate = refined_evidence(m, x, torch.zeros(8, 1).double(), 20_000, generator=seeded(2))
    torch.testing.assert_close(estimate.log_evidence, exact, rtol=0, atol=0.03)
    assert (estimate.khat < 0.7).all()
    assert (estimate.ess > 0.15 * 20_000).all()
    assert not torch.allclose(estimate.log_evidence, exact + 0.1, rtol=0, atol=0.03)  # the check can fail


def test_refined_evidence_does_not_depend_on_the_size_of_chunks(monkeypatch):
    x = counts(10)
    m = model(NegativeBinomial(), x)
    start = torch.zeros(10, D).double()
    at_once = refined_evidence(m, x, start, 2000, generator=seeded(0))
    monkeypatch.setattr("vaerdict.training.scores._ROWS", 6000)
    in_chunks = refined_evidence(m, x, start, 2000, generator=seeded(0))
    assert at_once.khat.shape == in_chunks.khat.shape == (10,)
    torch.testing.assert_close(at_once.log_evidence, in_chunks.log_evidence, rtol=0, atol=0.1)
