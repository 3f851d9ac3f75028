"""What training learned for counts: data sets apart, sparse rows, rates of their own, joint steps, refined scores."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scipy import sparse
from torch import Tensor, nn

from test_training import SHORT, TRUE, X, member
from vaerdict.core import DataError, SettingError
from vaerdict.datasets import appendix
from vaerdict.likelihoods import NegativeBinomial
from vaerdict.models.counts import CountModel
from vaerdict.models.ppca import PPCA
from vaerdict.noise import seeded
from vaerdict.objectives import loss
from vaerdict.proposals import OfCounts
from vaerdict.training import (
    CHI,
    CYCLIC,
    IWAE,
    VAE,
    WW,
    Fit,
    Member,
    OwnBound,
    RefinedBound,
    loop,
    train,
)
from vaerdict.training.data import Apart, Resampled, Shared, Sparse
from vaerdict.training.flat import Adam, Flat
from vaerdict.training.stacks import Stack

CPU = torch.device("cpu")


def parameters(fit: Fit | Member) -> list[Tensor]:
    return [t.detach().clone() for module in (fit.model, fit.proposal) for t in module.state_dict().values()]


def alike(a: Fit, b: Fit) -> bool:
    return all(torch.allclose(s, t, rtol=1e-9, atol=1e-11) for s, t in zip(parameters(a), parameters(b), strict=True))


def stack_of(*members: Member, learn_model: bool = True) -> Stack:
    return Stack(members, lr_theta=1e-2, lr_phi=1e-2, learn_model=learn_model, device=CPU)


# ------------------------------------------------------------------------------------------- data sets of their own
def own_data(n: int) -> Tensor:
    return torch.stack([TRUE.simulate(n, generator=seeded(10 + i))[0] for i in range(3)])


@pytest.mark.parametrize("joint", [False, True])
def test_members_with_data_of_their_own_learn_what_they_learn_alone(joint):
    members = [member(recipe, i) for i, recipe in enumerate((IWAE, VAE, WW))]
    x_train, x_valid, settings = own_data(200), own_data(60), replace(SHORT, joint=joint)
    together = train(members, x_train, x_valid, settings, apart=True)
    for i, fit in enumerate(together):
        (alone,) = train([members[i]], x_train[i], x_valid[i], settings)
        assert alike(fit, alone)
        assert fit.history[-1][1] == pytest.approx(alone.history[-1][1], abs=1e-9)
    (elsewhere,) = train([members[0]], x_train[1], x_valid[1], settings)
    assert not alike(together[0], elsewhere)


def test_batches_of_data_apart_are_each_members_own():
    x = torch.arange(24.0).reshape(2, 4, 3)
    data, index = Apart(x), torch.tensor([[3, 0], [1, 1]])
    assert torch.equal(data.take(index), torch.stack([x[0, [3, 0]], x[1, [1, 1]]]))
    assert torch.equal(data.block(slice(1, 3), 2), x[:, 1:3])
    assert (data.n, data.shape) == (4, (3,))
    one = data.of([1])
    assert isinstance(one, Shared)
    assert torch.equal(one.x, x[1])
    assert torch.equal(data.of([1, 0]).tensors()[0], x.flip(0))


@pytest.mark.parametrize("n_members", [1, 2])
def test_resampled_rows_train_like_copies_of_them(n_members):
    """A bootstrap by numbers of rows is the bootstrap of the rows, in a stack and alone."""
    rows = torch.stack([torch.randint(len(X), (60,), generator=seeded(i)) for i in range(n_members)])
    members = [member(IWAE, seed=i) for i in range(n_members)]
    valid = X[:30].expand(n_members, -1, -1)
    copies, numbers = (train(members, given, valid, SHORT, apart=True) for given in (X[rows], Resampled(X, rows)))
    assert all(alike(a, b) for a, b in zip(copies, numbers, strict=True))


def test_as_many_data_sets_as_members_are_needed():
    with pytest.raises(DataError, match=r"x_train has shape \(3, 50, 5\); one data set a member is \(2, n, features\)"):
        train([member(IWAE, i) for i in range(2)], own_data(50), own_data(50)[:2], SHORT, apart=True)
    bad = own_data(50)
    bad[2, 0, 0] = torch.nan
    with pytest.raises(DataError, match="x_valid holds 1 non-finite"):
        train([member(IWAE, i) for i in range(3)], own_data(50), bad, SHORT, apart=True)


def test_a_checkpoint_sees_whose_data_is_whose(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=itertools.count(0.0, 3600.0).__next__))
    members, x = [member(IWAE, i) for i in range(3)], own_data(60)
    train(members, x, x, SHORT, apart=True, checkpoint=tmp_path)
    train(members, x, x, SHORT, apart=True, checkpoint=tmp_path)
    with pytest.raises(SettingError, match="another run"):
        train(members, x.flip(0), x, SHORT, apart=True, checkpoint=tmp_path)


# ------------------------------------------------------------------------------------------------------ sparse rows
COUNTS = appendix(0, n_cells=120, n_genes=15).counts.clamp(0, 3)


def count_member(seed: int) -> Member:
    model = CountModel.start(COUNTS, 2, generator=seeded(seed), likelihood=NegativeBinomial(), hidden=(8,))
    return Member(model, OfCounts().make(COUNTS, 2, hidden=(8,), generator=seeded(seed)), IWAE, seed)


@pytest.mark.parametrize("n_members", [1, 2])
def test_sparse_rows_train_like_dense_ones(n_members, tmp_path):
    members = [count_member(i) for i in range(n_members)]
    matrix = sparse.csr_matrix(COUNTS.numpy())
    dense = train(members, COUNTS[:100], COUNTS[100:], SHORT)
    thin = train(members, matrix[:100], matrix[100:], SHORT, checkpoint=tmp_path)
    for a, b in zip(dense, thin, strict=True):
        assert all(torch.equal(s, t) for s, t in zip(parameters(a), parameters(b), strict=True))
        assert a.history == b.history


def test_genes_that_never_vary_stop_no_count_model():
    x = COUNTS.clone()
    x[:, 4] = 0
    (fit,) = train([count_member(0)], x, x, SHORT)
    assert fit.model.log_joint(x, torch.zeros(1, 120, 2)).isfinite().all()


def test_rows_of_a_sparse_matrix_are_made_dense():
    data = Sparse(sparse.csr_matrix(COUNTS.numpy()), CPU)
    index = torch.tensor([[3, 0], [1, 1]])
    assert torch.equal(data.take(index), COUNTS[index])
    assert torch.equal(data.block(slice(2, 5)), COUNTS[2:5])
    assert torch.equal(data.block(slice(2, 5), 3), COUNTS[2:5].expand(3, 3, 15))
    assert (data.n, data.shape) == (120, (15,))


def test_sparse_observations_that_cannot_be_used_are_refused():
    matrix, members = sparse.csr_matrix(COUNTS.numpy()), [count_member(0)]
    with pytest.raises(SettingError, match="x_train is sparse, which all members share"):
        train(members, matrix, matrix, SHORT, apart=True)
    with pytest.raises(DataError, match=r"x_valid of shape \(0, 15\) is empty"):
        train(members, matrix, matrix[:0], SHORT)
    matrix.data[0] = float("nan")
    with pytest.raises(DataError, match="x_train holds values that are not finite"):
        train(members, matrix, matrix, SHORT)


# -------------------------------------------------------------------------------------------------- rates of their own
class Two(nn.Module):
    rates = {"fast": 10.0}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))


def test_named_parameters_take_longer_steps():
    module = Two()
    flat = Flat(module, 1)
    Adam(flat, 0.01).step(torch.ones(1, len(flat)))
    assert module.fast.tolist() == pytest.approx([-0.1] * 3)
    assert module.slow.flatten().tolist() == pytest.approx([-0.01] * 4)


def test_in_a_stack_rates_are_every_members():
    stack = stack_of(*(count_member(i) for i in range(2)))
    rates = stack.theta.flat.rates
    assert rates is not None
    assert rates.shape == (1, len(stack.theta.flat))
    assert (rates == 10).sum() == COUNTS.shape[1]
    before = [p.clone() for p in (stack.model.log_dispersion, stack.model.decoder.layers[0].bias)]
    stack.theta.step(torch.ones(2, len(stack.theta.flat)))
    for old, new, rate in zip(
        before, (stack.model.log_dispersion, stack.model.decoder.layers[0].bias), (0.1, 0.01), strict=True
    ):
        torch.testing.assert_close(old - new, torch.full_like(old, rate), rtol=1e-4, atol=0)


def test_without_rates_nothing_changes():
    assert Flat(PPCA(TRUE.weight, 1.0), 1).rates is None


def test_a_checkpoint_sees_rates(tmp_path, monkeypatch):
    train([count_member(0)], COUNTS, COUNTS, SHORT, checkpoint=tmp_path)
    monkeypatch.setattr(CountModel, "rates", {"log_dispersion": 3.0})
    with pytest.raises(SettingError, match="another run"):
        train([count_member(0)], COUNTS, COUNTS, SHORT, checkpoint=tmp_path)


# --------------------------------------------------------------------------------------------------------- joint steps
@pytest.mark.parametrize("recipe", [VAE, IWAE, WW, CHI, CYCLIC])
@pytest.mark.parametrize("n_members", [1, 2])
def test_one_backward_pass_gives_both_gradients(recipe, n_members, monkeypatch):
    """A joint step moves model and proposal as the two separate losses do on the same particles."""
    members = [member(recipe, i) for i in range(n_members)]
    joint, apart = stack_of(*members), stack_of(*members)
    x = Shared(X[:40]).block(slice(None), joint.n_stacked)
    beta = None if recipe is not CYCLIC else torch.tensor(0.4).double()
    noise = joint.proposal.noise(x, 7, joint.source)
    monkeypatch.setattr(joint.proposal, "noise", lambda *_: noise)
    losses = joint.joint_step(x, 7, beta)
    separate = apart.theta_loss(x, noise, beta), apart.phi_loss(x, noise, beta)
    torch.testing.assert_close(losses, torch.stack(separate).detach())
    for mine, theirs, value in ((joint.theta, apart.theta, separate[0]), (joint.phi, apart.phi, separate[1])):
        gradient = theirs.flat.gradient(value)
        assert gradient.abs().max() > 0
        torch.testing.assert_close(mine.first, 0.1 * gradient, rtol=1e-7, atol=1e-10)  # Adam's first moment


def test_joint_training_learns_what_separate_steps_learn():
    settings = replace(SHORT, epochs=60, n_particles=10, lr_theta=2e-2)
    noises = []
    for joint in (False, True):
        fits = train([member(r, 0) for r in (IWAE, CHI)], X[:200], X[200:], replace(settings, joint=joint))
        noises.append(torch.stack([f.model.noise_sd.detach() for f in fits]))
    torch.testing.assert_close(noises[0], noises[1], rtol=0, atol=0.05)
    assert (noises[0] - 1).abs().max() > 0.1  # and that is not where they started


@pytest.mark.parametrize(
    "recipe",
    [
        replace(WW, name="score", phi=loss("forward_kl", "score")),
        replace(IWAE, name="pathwise", phi=loss("iwelbo", "pathwise")),
        replace(IWAE, name="mixed", phi=loss("elbo", "stl")),
        replace(IWAE, name="vr", phi=loss("vr_iwelbo", "dreg", alpha=0.5)),
    ],
)
def test_losses_that_cannot_share_a_pass_are_refused(recipe):
    with pytest.raises(SettingError, match=rf"{recipe.name} \(.*\) cannot take joint steps"):
        train([member(recipe, 0)], X, X, replace(SHORT, joint=True))


@pytest.mark.parametrize("also", [{"compile": True}, {"n_particles_theta": 50}])
def test_joint_steps_share_particles_and_are_not_compiled(also):
    with pytest.raises(SettingError, match="joint steps share"):
        replace(SHORT, joint=True, **also)


# ----------------------------------------------------------------------------------------------------- refined scores
@pytest.mark.parametrize("n_members", [1, 2])
def test_the_refined_bound_is_the_evidence_however_poor_the_encoder(n_members):
    stack = stack_of(*(member(IWAE, i) for i in range(n_members)))
    exact = PPCA(TRUE.weight, 1.0).log_evidence(X[:64]).mean().item()
    refined = RefinedBound(64)(stack, Shared(X), 400)
    assert refined.shape == (n_members,)
    assert refined.tolist() == pytest.approx([exact] * n_members, abs=0.02)
    few = [score(stack, Shared(X[:64]), 5) for score in (OwnBound(), RefinedBound(64))]
    assert (few[0] < exact - 0.2).all()  # the encoders are untrained
    assert (few[1] > exact - 0.1).all()


def test_the_refined_bound_of_data_apart_is_each_members_own():
    x = own_data(20)
    found = RefinedBound(20)(stack_of(*(member(IWAE, i) for i in range(3))), Apart(x), 400)
    exact = PPCA(TRUE.weight, 1.0).log_evidence(x).mean(-1)
    assert found.tolist() == pytest.approx(exact.tolist(), abs=0.03)


def test_proposals_for_a_fixed_model_are_scored_by_themselves():
    stack = stack_of(member(IWAE, 0), learn_model=False)
    assert torch.equal(RefinedBound()(stack, Shared(X), 10), stack.score(Shared(X), 10))


def test_training_follows_the_score_it_is_given(tmp_path):
    members, refined = [member(IWAE, 0)], replace(SHORT, score=RefinedBound(32), score_particles=50)
    (fit,) = train(members, X[:200], X[200:], refined, checkpoint=tmp_path)
    exact = fit.model.log_evidence(X[200:232]).mean().item()
    assert fit.history[-1][1] == pytest.approx(exact, abs=0.05)
    (again,) = train(members, X[:200], X[200:], refined, checkpoint=tmp_path)
    assert alike(fit, again)
    for other in (RefinedBound(33), OwnBound()):
        with pytest.raises(SettingError, match="another run"):
            train(members, X[:200], X[200:], replace(refined, score=other), checkpoint=tmp_path)


def test_scores_take_counts():
    with pytest.raises(SettingError, match="n_observations=0"):
        RefinedBound(0)
    with pytest.raises(SettingError, match="n_steps=0"):
        RefinedBound(n_steps=0)
