"""The three steps: selection, proposals, answers, modules of users, checkpoints and files."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent
from torch.distributions import Normal as TorchNormal

from checks import assert_within
from inference_toys import MODEL, Near
from vaerdict.core import SettingError
from vaerdict.diagnostics import Verdict
from vaerdict.inference import ThreeStep, expect, posterior
from vaerdict.inference.three_steps import select
from vaerdict.models.ppca import PPCA
from vaerdict.noise import seeded
from vaerdict.proposals import Normal, Student, Trainable
from vaerdict.training import CHI, IWAE, VAE, WW, Fit, Member, Settings
from vaerdict.training.checkpoint import save_checkpoint

X = MODEL.simulate(30, generator=seeded(1))[0]
SD = MODEL.posterior(X).covariance().diagonal(dim1=-2, dim2=-1).sqrt()
QUICK = Settings(n_particles=8, epochs=25, batch_size=40, check_every=5, patience=3, score_particles=30)
TRAIN, VALID = MODEL.simulate(160, generator=seeded(7))[0], MODEL.simulate(80, generator=seeded(8))[0]


def positive(z: Tensor) -> Tensor:
    return (z[..., 0] >= 0).double()


@pytest.fixture(scope="module")
def steps() -> ThreeStep:
    return ThreeStep(
        PPCA(MODEL.weight, 1.0),
        objectives=(VAE, IWAE),
        families=(Normal(), Student(full=True)),
        proposals=(IWAE, WW, CHI),
        seeds=2,
        settings=QUICK,
        hidden=(8,),
    ).fit(TRAIN, VALID)


def test_the_selection_is_a_sorted_table_with_the_winner_first(steps):
    table = steps.selection
    assert sorted((s.model, s.seed) for s in table) == [("IWAE", 0), ("IWAE", 1), ("VAE", 0), ("VAE", 1)]
    scores = [s.iwelbo_best for s in table]
    assert scores == sorted(scores, reverse=True)
    assert (steps.winner.name, steps.winner.seed) == (table[0].model, table[0].seed)
    assert steps.model is steps.winner.model
    assert (table[0].behind, table[0].behind_se) == (0, 0)
    for s in table:
        assert s.gap == pytest.approx(s.iwelbo_best - s.iwelbo)
        assert s.gap >= 0
        assert s.behind == pytest.approx(table[0].iwelbo_best - s.iwelbo_best)
        assert s.iwelbo_se > 0
        assert math.isfinite(s.khat)
        assert (s.best_by == "own encoder") == (s.gap == 0)


def test_scores_come_near_the_exact_evidence(steps):
    fits = {(f.name, f.seed): f for f in steps.fits}
    for s in steps.selection:
        model = fits[s.model, s.seed].model
        assert isinstance(model, PPCA)
        exact = model.log_evidence(VALID).mean().item()
        assert s.iwelbo_best == pytest.approx(exact, abs=0.02)
        assert s.iwelbo <= exact + 0.02


def test_step_two_fits_every_recipe_and_family_for_the_selected_model(steps):
    assert set(steps.proposals) == {f"{r}{f}" for r in ("IWAE", "WW", "CHI") for f in ("", "-full-t")}
    mixture = steps.mixture()
    assert list(mixture.components) == [*steps.proposals, "PRIOR"]
    assert mixture.shares["PRIOR"] == pytest.approx(0.05)
    assert steps.winner.model.log_noise.requires_grad  # not frozen by step two
    sizes = [posterior(steps.model, VALID, q, 500, seed=seeded(0)).ess.mean().item() for q in steps.proposals.values()]
    assert sizes[0] == pytest.approx(max(sizes), rel=0.05)  # the best proposal comes first


def test_step_three_answers_for_the_selected_model(steps):
    model = steps.model
    assert isinstance(model, PPCA)
    answer = steps.posterior(X, 3000, seed=seeded(9))
    assert answer.names == (*steps.proposals, "PRIOR")
    mean = answer.expect(lambda z: z)
    assert_within(mean.value, model.posterior(X).loc, mean.mcse, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors off"):
        assert_within(mean.value + 0.2 * SD, model.posterior(X).loc, mean.mcse, rate=1e-6)
    escalated = steps.posterior(X, 500, tolerance=0.05, query=positive)
    assert escalated.record is not None
    assert (escalated.verdict == Verdict.OK).all()
    exact = model.tail_probability(X, torch.zeros(1))[:, 0]
    assert (escalated.expect(positive).value - exact).abs().max() < 5.5 * 0.05  # in 30: fails at a rate of 1e-6
    with pytest.raises(SettingError, match="query=, rtol= and budget= belong to escalation"):
        steps.posterior(X, 500, query=positive)


class UserModel(nn.Module):
    """A user's module with log_joint and a prior of torch only."""

    def __init__(self) -> None:
        super().__init__()
        self.prior = Independent(TorchNormal(torch.zeros(2), torch.ones(2)), 1)
        self.decoder = nn.Linear(2, 5)  # initialised from the global random state
        self.log_noise = nn.Parameter(torch.zeros(5))

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        likelihood = TorchNormal(self.decoder(z), self.log_noise.exp()).log_prob(x).sum(-1)
        return likelihood + self.prior.log_prob(z)


def test_a_function_that_makes_the_users_module():
    def fitted(seeds: list[int]) -> ThreeStep:
        short = replace(QUICK, epochs=6, check_every=3)
        steps = ThreeStep(
            UserModel, objectives=(IWAE, VAE), proposals=(IWAE,), seeds=seeds, settings=short, hidden=(8,)
        )
        return steps.fit(TRAIN.float(), VALID.float())

    steps = fitted([0, 1])
    assert isinstance(steps.model, UserModel)
    starts = {f.member.seed: f.member.model.decoder.weight for f in steps.fits}
    assert not torch.equal(starts[0], starts[1])
    for fit in steps.fits:  # recipes of one seed share their initial values
        assert torch.equal(fit.member.model.decoder.weight, starts[fit.seed])
    answer = steps.posterior(X.float(), 400)
    assert answer.expect(lambda z: z).value.shape == (30, 2)
    assert answer.names == ("IWAE-full", "PRIOR")
    again = fitted([0, 1])
    assert again.selection == steps.selection
    assert torch.equal(again.posterior(X.float(), 400).log_w, answer.log_w)


def test_a_users_module_is_copied():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = UserModel()
    before = [p.detach().clone() for p in module.parameters()]
    short = replace(QUICK, epochs=4, check_every=2)
    steps = ThreeStep(module, objectives=(VAE,), proposals=(WW,), settings=short, hidden=(8,)).fit(
        TRAIN.float(), VALID.float()
    )
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert steps.selection[0].iwelbo_best > -15
    answer = expect(steps.model, X[:4].float(), lambda z: z[..., 0], steps.proposals, 500, tolerance=0.1)
    assert answer.value.shape == (4,)
    assert (answer.verdict == Verdict.OK).all()


def test_selection_does_not_depend_on_an_encoder_that_generalises_badly():
    """The true model with a useless encoder is selected over a wrong model with an exact encoder."""
    wrong = PPCA(MODEL.weight, 1.1).requires_grad_(False)

    def fit(model: PPCA, proposal: Trainable, seed: int) -> Fit:
        return Fit(Member(model, proposal, IWAE, seed), model, proposal, [], True, 1, 0.0)

    right, other = fit(MODEL, Near(9.0, 5.0), 0), fit(wrong, Near(1.1, model=wrong), 1)
    winner, table = select([other, right], VALID)
    assert winner is right
    assert table[0].best_by == "refined"
    assert table[0].iwelbo < table[1].iwelbo - 0.1  # by their own encoders the order is reversed
    exact = (MODEL.log_evidence(VALID) - wrong.log_evidence(VALID)).mean().item()
    assert table[1].behind == pytest.approx(exact, abs=0.02)
    assert table[1].behind > 5 * table[1].behind_se > 0


@pytest.mark.parametrize(
    ("prior", "shape"),
    [
        (TorchNormal(torch.zeros(2), torch.ones(2)), r"\(\)"),
        (Independent(TorchNormal(torch.zeros(2, 3), torch.ones(2, 3)), 2), r"\(2, 3\)"),
    ],
    ids=["scalar", "matrix"],
)
def test_a_prior_that_is_not_a_vector_is_refused(prior, shape):
    class Other(PPCA):
        pass

    Other.prior = prior
    model = Other(MODEL.weight, 1.0)
    with pytest.raises(SettingError, match=rf"prior has event shape {shape}; encoders need one vector"):
        ThreeStep(model, settings=QUICK).fit(TRAIN, VALID)


def test_settings_that_cannot_be_used_are_refused():
    for empty in ({"objectives": ()}, {"families": ()}, {"proposals": ()}):
        with pytest.raises(SettingError, match="at least one objective, one family and one proposal recipe"):
            ThreeStep(MODEL, **empty)
    with pytest.raises(SettingError, match="proposals would share a name: IWAE-t, IWAE-t; drop one"):
        ThreeStep(MODEL, families=(Student(3.0), Student(9.0)), proposals=(IWAE,))
    with pytest.raises(SettingError, match=r"nothing has been fitted yet; call fit\(x_train, x_valid\) first"):
        ThreeStep(MODEL).posterior(X)
    with pytest.raises(SettingError, match="no members to train"):
        ThreeStep(MODEL, seeds=0).fit(TRAIN, VALID)
    with pytest.raises(SettingError, match="Identity has no log_joint and no prior"):
        ThreeStep(nn.Identity()).fit(TRAIN, VALID)


def test_both_steps_resume_from_their_checkpoints(tmp_path):
    class Killed(Exception):
        pass

    def new() -> ThreeStep:
        short = replace(QUICK, epochs=3, check_every=1)
        return ThreeStep(PPCA(MODEL.weight, 1.0), objectives=(VAE, IWAE), proposals=(CHI,), settings=short, hidden=(6,))

    def kill_in_step_two(done: int, total: int, what: str) -> None:
        if what.startswith("CHI"):
            raise Killed

    uninterrupted = new().fit(TRAIN, VALID)
    with pytest.raises(Killed):
        new().fit(TRAIN, VALID, checkpoint=tmp_path, progress=kill_in_step_two)
    calls: Counter[str] = Counter()
    resumed = new().fit(
        TRAIN, VALID, checkpoint=tmp_path, progress=lambda done, total, what: calls.update([what.split()[0]])
    )
    assert resumed.selection == uninterrupted.selection
    assert torch.equal(resumed.posterior(X, 100).log_w, uninterrupted.posterior(X, 100).log_w)
    assert calls["VAE+IWAE"] == 1  # the first step was done: one report only
    assert calls["CHI"] == 4


# ------------------------------------------------------------------------------------------------------ files
SAME: dict[str, Any] = {"objectives": (VAE, IWAE), "families": (Normal(), Student(full=True))}


def test_a_saved_fit_is_the_same_fit(steps, tmp_path):
    path = steps.save(tmp_path / "three-0.1")
    assert path == tmp_path / "three-0.1.safetensors"
    again = ThreeStep.load(path, PPCA(MODEL.weight, 1.0), **SAME)
    assert (again.seeds, again.hidden, again.prior_share) == (steps.seeds, steps.hidden, steps.prior_share)
    assert again.selection == steps.selection
    assert list(again.proposals) == list(steps.proposals)
    for name in ("name", "seed", "history", "converged", "epochs", "seconds"):
        assert getattr(again.winner, name) == getattr(steps.winner, name)
    before, after = (s.posterior(X, 400, seed=seeded(3)) for s in (steps, again))
    assert torch.equal(before.z, after.z)
    assert torch.equal(before.log_w, after.log_w)
    encoders = [s.winner.proposal.draw(X, 3, generator=seeded(0)).z for s in (steps, again)]
    assert torch.equal(*encoders)
    assert not any(module.training for module in again._modules().values())
    assert again.save(tmp_path / "twice").read_bytes() == path.read_bytes()


WRONG: dict[str, dict[str, Any]] = {
    "hidden": {"hidden": (9,)},
    "encoder": {"encoder": Normal(full=True)},
    "families": {"families": (Normal(),)},
    "objectives": {"objectives": (WW,)},
}
MESSAGES = {
    "hidden": r"the encoder in the file differs .* encoder.layers.0.bias.*: \(\(8,\).* against \(\(9,\).*; pass `load`",
    "encoder": r"the encoder in the file differs from the one made by `load` in encoder.layers.1",
    "families": "file holds proposals CHI, CHI-full-t, .* make CHI, IWAE, WW; pass `load` those of the fit",
    "objectives": "the file holds a model fitted by (VAE|IWAE); objectives=WW must include it",
}


@pytest.mark.parametrize("what", MESSAGES)
def test_a_file_of_another_architecture_is_refused(what, steps, tmp_path):
    with pytest.raises(SettingError, match=MESSAGES[what]):
        ThreeStep.load(steps.save(tmp_path / "three"), PPCA(MODEL.weight, 1.0), **(SAME | WRONG[what]))


def test_another_model_or_file_is_refused(steps, tmp_path):
    path = steps.save(tmp_path / "three")
    with pytest.raises(SettingError, match=r"the model in the file differs from the one made by `load` .* against"):
        ThreeStep.load(path, PPCA(MODEL.weight[:4], 1.0), **SAME)
    with pytest.raises(SettingError, match=r"the model in the file .*float64.* against .*float32"):
        ThreeStep.load(path, PPCA(MODEL.weight.float(), 1.0), **SAME)
    save_checkpoint(tmp_path / "other", {"a": torch.zeros(1)}, {"format": "other"})
    with pytest.raises(SettingError, match="holds 'other', not 'vaerdict three steps 1'; was it written by `save`"):
        ThreeStep.load(tmp_path / "other", MODEL)
    with pytest.raises(SettingError, match="nothing has been fitted yet"):
        ThreeStep(MODEL).save(tmp_path / "none")


def test_a_fit_can_be_pickled(steps):
    again = pickle.loads(pickle.dumps(steps))
    before, after = (s.posterior(X, 100, seed=seeded(3)).log_w for s in (steps, again))
    assert torch.equal(before, after)
