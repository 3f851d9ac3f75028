"""Modules in training: buffers, shapes, types and integer counts; recipes and fits that can be pickled."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from training_toys import same_bits, script
from vaerdict.core import DataError, ShapeError
from vaerdict.distributions import StandardNormal
from vaerdict.inference import ThreeStep
from vaerdict.models.counts import CountModel
from vaerdict.models.ppca import PPCA
from vaerdict.noise import seeded
from vaerdict.objectives import loss
from vaerdict.proposals import Family, Normal, OfCounts, SplineFlow, Student
from vaerdict.training import IWAE, RECIPES, VAE, AmortisedBound, Member, Recipe, Settings, cyclical, train, warm_up
from vaerdict.training.data import SharedRows
from vaerdict.training.stacks import Stack

TRUE = PPCA(torch.randn(4, 2, generator=seeded(0), dtype=torch.double), 0.7)
X = TRUE.simulate(120, generator=seeded(1))[0]
SHORT = Settings(n_particles=4, epochs=6, batch_size=40, check_every=1, patience=2, drops=0, score_particles=8)


def member(recipe: Recipe = IWAE, seed: int = 0, model: nn.Module | None = None, x: Tensor = X) -> Member:
    proposal = Normal().make(x, 2, hidden=(6,), generator=seeded(seed))
    return Member(PPCA(TRUE.weight.to(x.dtype), 1.0) if model is None else model, proposal, recipe, seed)


# ------------------------------------------------------------------------------------------------------- buffers
class Normed(nn.Module):
    """A decoder with batch norm, which keeps running means."""

    def __init__(self) -> None:
        super().__init__()
        self.prior = StandardNormal(2)
        with torch.random.fork_rng():
            self.first, self.last = nn.Linear(2, 6, dtype=torch.double), nn.Linear(6, 4, dtype=torch.double)
        self.norm = nn.BatchNorm1d(6, dtype=torch.double)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        h = self.norm(self.first(z).flatten(0, 1)).unflatten(0, z.shape[:2])
        return -0.5 * (x - self.last(h.relu())).square().sum(-1) + self.prior.log_prob(z)


def test_returning_to_the_best_parameters_restores_buffers(monkeypatch):
    one = member(model=Normed())
    (two_epochs,) = train([one], X, X, replace(SHORT, epochs=2, patience=None))
    script(monkeypatch, [[1.0], [2.0], [0.0], [0.0], [0.0], [0.0]])
    (fit,) = train([one], X, X, replace(SHORT, patience=9))
    assert "norm.running_mean" in fit.model.state_dict()
    assert same_bits(fit, two_epochs)


def test_held_out_scores_do_not_change_buffers():
    one = Stack([member(model=Normed())], lr_theta=1, lr_phi=1, learn_model=True, device=X.device)
    one.proposal.encoder = nn.Sequential(nn.BatchNorm1d(4, dtype=torch.double), one.proposal.encoder)
    before = {name: buffer.clone() for name, buffer in one.buffers().items()}
    assert len(before) == 3 + 3 + 2
    held_out = SharedRows(X)
    AmortisedBound()(one, held_out, 5)
    one.mutual_information(held_out)
    assert all(torch.equal(buffer, before[name]) for name, buffer in one.buffers().items())
    assert one.model.training


def test_rows_of_a_stack_are_the_tensors_that_members_do_not_share():
    students = [Student(df).make(X, 2, hidden=(6,), generator=seeded(0)) for df in (4.0, 9.0)]
    two = [replace(member(), proposal=q) for q in students]
    stack = Stack(two, lr_theta=1, lr_phi=1, learn_model=True, device=X.device)
    (log_df,) = stack.rows()[2:]  # centre and spread are equal in both
    assert log_df.exp().tolist() == pytest.approx([4.0, 9.0])
    assert {"proposal.log_df", "proposal.encoder.center", "proposal.encoder.spread"} <= set(stack.buffers())


# ------------------------------------------------------------------------------------------- shapes, types, counts
def test_a_joint_density_summed_over_the_batch_is_refused():
    class Total(PPCA):
        def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
            return super().log_joint(x, z).sum()

    message = r"log_joint returned shape \(\) for latents of shape \(4, 40, 2\); .* shape \(4, 40\)"
    with pytest.raises(ShapeError, match=message):
        train([member(model=Total(TRUE.weight, 1.0))], X, X, SHORT)


def test_observations_of_another_dtype_than_the_module_are_refused():
    with pytest.raises(DataError, match=r"x_train is torch.float64, .* PPCA are torch.float32; pass x_train.float\(\)"):
        train([member(model=PPCA(TRUE.weight.float(), 1.0))], X, X, SHORT)
    with pytest.raises(DataError, match=r"x_valid is torch.float32, .* pass x_valid.double\(\)"):
        train([member()], X, X.float(), SHORT)
    with pytest.raises(DataError, match=r"x_train is torch.float64, .* pass x_train.float\(\)"):
        ThreeStep(PPCA(TRUE.weight.float(), 1.0), settings=SHORT).fit(X, X)


def test_constant_features_do_not_stop_training():
    x = torch.cat([X, torch.full((120, 1), 16.1, dtype=torch.double)], 1)
    model = PPCA(torch.cat([TRUE.weight, torch.zeros(1, 2, dtype=torch.double)]), 1.0)
    steps = ThreeStep(model, objectives=(IWAE,), proposals=(IWAE,), settings=replace(SHORT, epochs=2)).fit(x, x)
    assert steps.posterior(x[:3], 50, seed=seeded(0)).log_w.isfinite().all()


COUNTS = torch.poisson(3 * torch.ones(80, 10), generator=seeded(0)).long()


@pytest.mark.parametrize("family", [Normal(), Normal(full=True), Student(), SplineFlow(1)], ids=lambda f: f.suffix)
@pytest.mark.parametrize("of_counts", [False, True])
def test_counts_may_be_integers(family: Family, of_counts: bool):
    if isinstance(family, SplineFlow):
        pytest.importorskip("zuko")
    family = OfCounts(family) if of_counts else family
    fits = []
    for x in (COUNTS, COUNTS.float()):
        model = CountModel.start(x, 2, generator=seeded(0), hidden=(6,))
        proposal = family.make(x, 2, hidden=(6,), generator=seeded(0))
        fits += train([Member(model, proposal, IWAE, 0)], x, x, replace(SHORT, epochs=2))
    assert same_bits(*fits)


def test_the_three_steps_take_integer_counts():
    model = CountModel.start(COUNTS, 2, generator=seeded(0), hidden=(6,))
    settings = replace(SHORT, epochs=2)
    steps = ThreeStep(model, objectives=(VAE,), families=(OfCounts(),), encoder=OfCounts(), settings=settings)
    answer = steps.fit(COUNTS, COUNTS).posterior(COUNTS[:5], 50, seed=seeded(0))
    assert answer.log_w.dtype == torch.float32


def test_rounding_does_not_make_a_constant_feature_vary():
    x = torch.full((1000, 1), 16.1)
    assert x.std(0) > 1e-6
    assert Normal().make(x, 2, hidden=(6,), generator=seeded(0)).encoder.spread.tolist() == [1.0]
    varying = torch.randn(1000, 1, generator=seeded(0))
    assert torch.equal(Normal().make(varying, 2, hidden=(6,), generator=seeded(0)).encoder.spread, varying.std(0))


# ------------------------------------------------------------------------------------------------ pickling and repr
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_can_be_pickled_copied_and_shown(name):
    recipe = RECIPES[name]
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert copy.deepcopy(recipe) == recipe
    assert repr(recipe) == name


def test_the_repr_of_other_recipes_shows_their_arguments():
    custom = Recipe("CUSTOM", VAE.theta, loss("vr_iwelbo", "dreg", alpha=0.5), annealing=warm_up(0.2))
    expected = "Recipe('CUSTOM', elbo_loss, loss('vr_iwelbo', 'dreg', alpha=0.5), annealing=_WarmUp(fraction=0.2))"
    assert repr(custom) == expected
    assert repr(replace(VAE, theta=IWAE.theta)).startswith("Recipe('VAE', iwelbo_loss")
    assert pickle.loads(pickle.dumps(custom)) == custom
    assert cyclical(2) == cyclical(2) != cyclical(3)


def test_fits_can_be_pickled():
    (fit,) = train([member(RECIPES["CYCLIC"])], X, X, replace(SHORT, epochs=2))
    again = pickle.loads(pickle.dumps(fit))
    assert same_bits(again, fit)
    assert again.member.recipe == fit.member.recipe
