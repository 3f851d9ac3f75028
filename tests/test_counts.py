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
from vaerdict.noise import seeded
from vaerdict.proposals import Normal, OfCounts, Student, Viewed
from vaerdict.training import refined_evidence

LIKELIHOODS: list[CountLikelihood] = [Poisson(), NegativeBinomial(), ZeroInflated(), ZeroInflated(per_cell=True)]
GENES, D, K = 12, 3, 4


def counts(n: int = 20, seed: int = 0) -> Tensor:
    g = seeded(seed)
    x = torch.poisson(4 * torch.rand(n, GENES, generator=g, dtype=torch.double), generator=g)
    x[:, 0] += 1  # no cell is empty
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
def test_single_precision_keeps_what_no_latent_moves(likelihood):
    """Differences of large gamma functions, summed over genes: right to the rounding of the sum."""
    g = seeded(0)
    x = torch.poisson(5 * torch.exp(torch.randn(20, 2000, generator=g) - 0.5), generator=g)
    single = CountModel.start(x, D, generator=g, likelihood=likelihood, hidden=(8,))
    exact = copy.deepcopy(single).double().prepare(x.double()).fixed
    fixed = single.prepare(x).fixed
    assert fixed.dtype == torch.float32
    torch.testing.assert_close(fixed, exact.float(), rtol=2e-7, atol=0)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_it_is_a_model_whose_batch_may_have_any_axes(likelihood):
    x, z = counts(), latents(20)
    m = model(likelihood, x)
    assert isinstance(m, core.Model)
    assert isinstance(m.prior, core.Prior)
    twice = m.log_joint(core.prepared(m, torch.stack([x, x])), z.unsqueeze(1).expand(K, 2, 20, D))
    torch.testing.assert_close(twice[:, 1], m.log_joint(x, z))
    torch.testing.assert_close(m.log_joint(x[0], z[:, 0]), m.log_joint(x, z)[:, 0])


def test_the_library_enters_by_its_logarithm():
    """The mean of a count is library times proportion: scipy's probability of it, written out."""
    x, z = counts(), latents(20)
    m = model(NegativeBinomial(), x)
    mean = x.sum(-1, keepdim=True) * m.expression(z)
    r = m.log_dispersion.exp()
    log_lik = torch.as_tensor(stats.nbinom(r.detach(), (r / (r + mean)).detach()).logpmf(x)).sum(-1)
    torch.testing.assert_close(m.log_joint(x, z).detach(), log_lik + m.prior.log_prob(z), rtol=1e-6, atol=1e-6)


def test_a_zero_inflated_model_can_make_up_for_what_was_dropped_from_the_library():
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


def test_expression_is_a_proportion():
    x, z = counts(), latents(20)
    m = model(NegativeBinomial(), x)
    torch.testing.assert_close(m.expression(z).sum(-1), torch.ones(K, 20).double())
    torch.testing.assert_close(m.log_expression(z).exp(), m.expression(z))


def test_counts_like_the_observed_can_be_drawn():
    x, z = counts(200), latents(200)
    m = model(NegativeBinomial(), x)
    drawn = m.sample(x, z, generator=seeded(3))
    assert drawn.shape == (K, 200, GENES)
    assert torch.equal(drawn, drawn.round())
    assert drawn.sum(-1).mean().item() == pytest.approx(x.sum(-1).mean().item(), rel=0.1)
    assert torch.equal(drawn, m.sample(x, z, generator=seeded(3)))


# ------------------------------------------------------------------------------------------------------ batches
def test_the_decoder_sees_the_batch_of_a_cell():
    x = with_batches(counts(), 2)
    m, z = model(NegativeBinomial(), x, n_batches=2), latents(20)
    assert m.n_genes == GENES
    other = x.clone()
    other[:, GENES:] = other[:, GENES:].flip(-1)
    assert not torch.isclose(m.log_joint(x, z), m.log_joint(other, z)).any()
    assert torch.equal(m.log_expression(z, x[:, GENES:]), m.log_expression(z, other[:, GENES:].flip(-1)))


def test_expression_of_no_batch_is_the_mean_over_batches():
    x = with_batches(counts(), 2)
    m, z = model(NegativeBinomial(), x, n_batches=2), latents(20)
    each = [m.expression(z, one.expand(20, 2)) for one in torch.eye(2).double()]
    torch.testing.assert_close(m.expression(z), (each[0] + each[1]) / 2)
    assert not torch.isclose(each[0], each[1]).all()


# -------------------------------------------------------------------------------------------------- side by side
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("n_batches", [0, 2])
def test_a_stack_is_its_members_side_by_side(likelihood, n_batches):
    xs = [counts(seed=s) if n_batches == 0 else with_batches(counts(seed=s), n_batches) for s in range(3)]
    members = [model(likelihood, x, seed=i, n_batches=n_batches) for i, x in enumerate(xs)]
    with torch.no_grad():  # gene-wise parameters that differ more than moments do
        for i, m in enumerate(members):
            for p in m.parameters():
                p += 0.1 * i
    together, x, z = stack(members), torch.stack(xs), latents(3, 20)
    log_p = together.log_joint(x, z)
    expression = together.expression(z)
    assert log_p.shape == (K, 3, 20)
    for i, m in enumerate(members):
        torch.testing.assert_close(log_p[:, i], m.log_joint(xs[i], z[:, i]))
        torch.testing.assert_close(expression[:, i], m.expression(z[:, i]))


# ------------------------------------------------------------------------------------------------------- starts
def test_moments_find_the_dispersion_and_the_shares():
    g = seeded(4)
    r, mean = torch.tensor([1.0, 5.0, 20.0]), torch.tensor([20.0, 40.0, 100.0])
    rate = torch._standard_gamma((r * torch.ones(20_000, 1)), generator=g) / r * mean
    rest = torch.full((20_000, 1), 5000.0)  # keeps library sizes alike
    x = torch.cat([torch.poisson(rate, generator=g), rest], -1)
    found = moments(x, inflated=False)
    torch.testing.assert_close(found.log_dispersion[:3].exp().float(), r, rtol=0.1, atol=0)
    torch.testing.assert_close(found.log_share.exp()[:3].float(), mean / (5000 + mean.sum()), rtol=0.05, atol=0)


def test_moments_tell_dropped_zeros_from_rare_genes():
    data = released(0, n_cells=2000)
    found = moments(data.counts, inflated=True)
    torch.testing.assert_close(
        torch.sigmoid(found.zero_logit), torch.full_like(found.zero_logit, 0.3), rtol=0, atol=0.05
    )
    assert found.library_shift.item() == pytest.approx(-math.log(0.7), abs=0.02)
    g = seeded(5)
    rare = torch.poisson(torch.full((5000, 4), 0.2), generator=g)
    rare[:, 0] = 50
    assert torch.sigmoid(moments(rare, inflated=True).zero_logit).max() < 0.25  # 82 % of the others are zero


def test_a_gene_never_seen_starts_finite():
    x = counts()
    x[:, 3] = 0
    for likelihood in LIKELIHOODS:
        m = model(likelihood, x)
        assert all(p.isfinite().all() for p in m.parameters())
        assert m.log_joint(x, latents(20)).isfinite().all()


def test_a_start_by_moments_is_a_good_one():
    """Before any training, at z = 0, the start is nats a cell better than unit dispersions or even shares."""
    x = torch.poisson(released(0, n_cells=200).rate, generator=seeded(0))
    started = CountModel.start(x, 2, generator=seeded(0))
    plain = CountModel(started.decoder, 2, x.shape[-1])
    z = torch.zeros(1, 200, 2)
    good = started.log_joint(x, z).mean()
    assert plain.log_joint(x, z).mean() < good - 10
    with torch.no_grad():
        started.decoder.layers[-1].bias.zero_()
    assert started.log_joint(x, z).mean() < good - 10


def test_gene_wise_parameters_learn_faster():
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


def test_what_does_not_fit_is_refused():
    x = counts()
    m = model(NegativeBinomial(), x)
    with pytest.raises(ShapeError, match="11 columns, the model 12 genes"):
        m.log_joint(x[:, 1:], latents(20))
    with pytest.raises(ShapeError, match="z has 2 latents, the model 3"):
        m.log_joint(x, latents(20)[..., :2])


# ---------------------------------------------------------------------------------------------------- proposals
def test_encoders_see_logarithms_of_normalised_counts():
    x = counts()
    view = LogNormalised(GENES, x.sum(-1).median())
    expected = torch.log1p(x / x.sum(-1, keepdim=True) * x.sum(-1).median())
    torch.testing.assert_close(view(x), expected)
    torch.testing.assert_close(view(5 * x), expected)  # depth is not seen
    both = with_batches(x, 2)
    assert torch.equal(view(both)[:, GENES:], both[:, GENES:])


@pytest.mark.parametrize("family", [Normal(), Normal(full=True), Student(), Student(full=True, learn_df=True)])
def test_families_of_counts_are_the_families_on_the_view(family):
    x = counts()
    q = OfCounts(family).make(x, D, hidden=(8,), generator=seeded(0))
    assert isinstance(q, Viewed)
    assert OfCounts(family).suffix == family.suffix
    z, log_q = q.draw(x, K, generator=seeded(1))
    torch.testing.assert_close(log_q, q.proposal(q.view(x)).log_prob(z))
    torch.testing.assert_close(log_q, q.log_prob(z, x))
    assert torch.equal(q.noise(x, K, as_iid(1)).normal, q(x).noise(K, as_iid(1)).normal)


def as_iid(seed: int):
    from vaerdict.noise import Iid

    return Iid((seeded(seed),))


def test_proposals_for_counts_can_be_stacked():
    xs = [counts(seed=s) for s in range(2)]
    members = [OfCounts(Normal(full=True)).make(x, D, hidden=(8,), generator=seeded(i)) for i, x in enumerate(xs)]
    z = latents(2, 20)
    together = stack(members).log_prob(z, torch.stack(xs))
    for i, q in enumerate(members):
        torch.testing.assert_close(together[:, i], q.log_prob(z[:, i], xs[i]))


@pytest.mark.parametrize("n_batches", [0, 2])
def test_whole_numbers_are_counts_too(n_batches):
    x = counts()[:, : GENES - n_batches].float()
    x = with_batches(x, n_batches) if n_batches else x
    made = []
    for given in (x, x.int()):
        m = CountModel.start(given, D, generator=seeded(0), hidden=(8,), n_batches=n_batches)
        q = OfCounts(n_batches=n_batches).make(given, D, hidden=(8,), generator=seeded(1))
        z, log_q = q.draw(given, K, generator=seeded(2))
        made.append(m.log_joint(given, z) - log_q)
    assert torch.equal(*made)


# ----------------------------------------------------------------------------------------- evidence, by quadrature
@pytest.mark.parametrize("likelihood", [NegativeBinomial(), ZeroInflated()])
def test_refined_evidence_is_the_integral(likelihood):
    x = counts(8)
    m = CountModel.start(x, 1, generator=seeded(1), likelihood=likelihood, hidden=(8,)).double()
    with torch.no_grad():
        m.decoder.layers[-1].weight *= 5  # a latent that matters
    grid = torch.linspace(-9, 9, 2001).double()
    log_p = m.log_joint(x, grid.reshape(-1, 1, 1).expand(-1, 8, 1)).detach()
    exact = torch.logsumexp(log_p, 0) + math.log(18 / 2000)
    found = refined_evidence(m, x, torch.zeros(8, 1).double(), 20_000, generator=seeded(2))
    torch.testing.assert_close(found.log_evidence, exact, rtol=0, atol=0.03)
    assert (found.khat < 0.7).all()
    assert (found.ess > 0.15 * 20_000).all()
    assert not torch.allclose(found.log_evidence, exact + 0.1, rtol=0, atol=0.03)  # the check can fail


def test_refined_evidence_does_not_depend_on_how_it_is_cut(monkeypatch):
    x = counts(10)
    m = model(NegativeBinomial(), x)
    start = torch.zeros(10, D).double()
    whole = refined_evidence(m, x, start, 2000, generator=seeded(0))
    monkeypatch.setattr("vaerdict.training.scores._ROWS", 6000)
    parts = refined_evidence(m, x, start, 2000, generator=seeded(0))
    assert whole.khat.shape == parts.khat.shape == (10,)
    torch.testing.assert_close(whole.log_evidence, parts.log_evidence, rtol=0, atol=0.1)
