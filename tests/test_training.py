"""The training loop: members side by side, convergence, divergence and refused inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training_toys import SHORT, TRUE, X, member, same_bits, script, short_train, stack_of, tensors
from vaerdict.core import DataError, DivergenceError, SettingError
from vaerdict.models.ppca import PPCA
from vaerdict.networks import MLP
from vaerdict.noise import seeded
from vaerdict.objectives import iwelbo, loss
from vaerdict.proposals import Amortised, Family, Normal, SplineFlow, Student
from vaerdict.training import (
    AGG,
    CHI,
    CYCLIC,
    IWAE,
    VAE,
    WW,
    AmortisedBound,
    Lagging,
    Member,
    Recipe,
    Settings,
    as_model,
    train,
)
from vaerdict.training.data import SharedRows
from vaerdict.training.loop import stack_size
from vaerdict.training.stacks import signature

# ------------------------------------------------------------------------------------- many members side by side
GROUPS: dict[str, list[tuple[Recipe, int, Family]]] = {
    "normal": [(IWAE, 0, Normal()), (IWAE, 1, Normal()), (IWAE, 2, Normal())],
    "recipes": [(VAE, 0, Normal()), (IWAE, 0, Normal()), (WW, 1, Normal()), (CHI, 0, Normal()), (CYCLIC, 0, Normal())],
    "full": [(VAE, 0, Normal(full=True)), (CHI, 1, Normal(full=True))],
    "student": [(CHI, 0, Student()), (WW, 0, Student()), (CHI, 1, Student())],
    "student, several df": [(CHI, 0, Student(4.0)), (CHI, 1, Student(9.0))],
    "student, learned df": [(IWAE, 0, Student(full=True, learn_df=True)), (IWAE, 1, Student(full=True, learn_df=True))],
    "score": [(replace(WW, phi=loss("forward_kl", "score")), s, Normal()) for s in range(2)],
    "lagging": [(replace(AGG, lagging=Lagging(inner=2)), s, Normal()) for s in range(3)],
}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
def test_a_stack_learns_what_its_members_learn_alone(name, dtype):
    """To rounding: matrix products of other shapes sum in another order, and Adam magnifies small gradients."""
    members = [member(*arguments, dtype=dtype) for arguments in GROUPS[name]]
    stacks: set[str] = set()
    settings = replace(SHORT, epochs=8)
    fits = short_train(members, settings, progress=lambda done, total, stack: stacks.add(stack))
    assert len(stacks) == 1
    allowed = {"rtol": 1e-7, "atol": 1e-8} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 1e-3}
    for one, fit in zip(members, fits, strict=True):
        (alone,) = short_train([one], settings)
        for a, b in zip(tensors(fit), tensors(alone), strict=True):
            torch.testing.assert_close(a, b, **allowed)
        assert [e for e, _ in fit.history] == [e for e, _ in alone.history] == [2, 4, 6, 8]
        torch.testing.assert_close([s for _, s in fit.history], [s for _, s in alone.history], **allowed)


def test_fits_have_the_order_of_the_members_whatever_the_stacks():
    arguments = [(CHI, 0, Student()), (IWAE, 3, Normal()), (CHI, 1, Student()), (AGG, 2, Normal()), (VAE, 3, Normal())]
    fits = short_train([member(*args) for args in arguments])
    assert [(f.name, f.seed) for f in fits] == [(r.name, s) for r, s, _ in arguments]
    assert [f.proposal.log_df is None for f in fits] == [False, True, False, True, True]
    assert all(not f.model.training and not f.proposal.training for f in fits)


def test_a_stack_that_is_too_large_is_split():
    members = [member(IWAE, seed) for seed in range(3)]
    stacks: set[str] = set()
    large = replace(SHORT, n_particles=330, epochs=1)  # 16,500 rows per member, more than half of a CPU stack
    fits = short_train(members, large, progress=lambda done, total, stack: stacks.add(stack))
    assert stacks == {"IWAE (1 of 3)", "IWAE (2 of 3)", "IWAE (3 of 3)"}
    assert [f.seed for f in fits] == [0, 1, 2]


def test_stack_sizes():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert stack_size(5 * 128, cpu) == 51
    assert stack_size(30 * 128, cpu) == 8
    assert stack_size(10**6, cpu) == 1
    assert stack_size(30 * 128, gpu) > 40 * stack_size(30 * 128, cpu)


def test_one_seed_gives_equal_bits_and_another_seed_does_not():
    members = [member(IWAE, 0), member(CHI, 0, Student()), member(AGG, 0)]
    first, again = short_train(members), short_train(members)
    assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))
    assert [f.history for f in first] == [f.history for f in again]
    (other,) = short_train([replace(members[0], seed=1)])  # with the same initial parameters
    assert not same_bits(first[0], other)


def test_recipes_with_one_seed_do_not_share_their_noise():
    renamed = replace(IWAE, name="IWAE-2")
    a, b = short_train([member(IWAE, 0), member(renamed, 0)])
    assert not same_bits(a, b)


def test_inputs_are_not_changed():
    members = [member(IWAE, 0), member(VAE, 0), member(AGG, 1)]
    before, x = [tensors(m) for m in members], X.clone()
    fits = short_train(members)
    assert torch.equal(x, X)
    for m, old, fit in zip(members, before, fits, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors(m), old, strict=True))
        assert not same_bits(m, fit)
        assert fit.model is not m.model
        assert all(p.grad is None for p in m.model.parameters())


# ------------------------------------------------------------------------------------------------ signatures
def test_only_members_of_one_structure_share_a_signature():
    base = signature(member(IWAE, 0))
    assert base is not None
    assert base == signature(member(CHI, 7))  # losses may differ, the parts that carry gradient may not
    others = [
        member(IWAE, 0, Normal(full=True)),
        member(IWAE, 0, Student()),
        member(IWAE, 0, Student(learn_df=True)),
        member(IWAE, 0, dtype=torch.float32),
        member(AGG, 0),
        member(replace(IWAE, phi=loss("iwelbo", "pathwise")), 0),
        member(replace(WW, phi=loss("forward_kl", "score")), 0),
        replace(member(IWAE, 0), proposal=Normal().make(X, 2, hidden=(9,), generator=seeded(0))),
        replace(member(IWAE, 0), proposal=Normal().make(X, 2, hidden=(8, 8), generator=seeded(0))),
        replace(member(IWAE, 0), proposal=Amortised(_encoder(F.silu), 2, full=False)),
        replace(member(IWAE, 0), model=PPCA(TRUE.weight, 1.0).requires_grad_(False)),
    ]
    signatures = [base, *(signature(m) for m in others)]
    assert len(set(signatures)) == len(signatures)
    assert signature(replace(member(IWAE, 0), proposal=Amortised(_encoder(F.relu), 2, full=False))) == base
    assert signature(member(IWAE, 0, SplineFlow(1))) is None


def _encoder(activation) -> MLP:
    flat = X.reshape(-1, 5)
    return MLP(5, 4, (8,), generator=seeded(0), activation=activation, center=flat.mean(0), spread=flat.std(0)).double()


@pytest.mark.parametrize(
    ("one", "other"),
    [({"a": 2}, {"a": 3}), ([2], [3]), (torch.ones(1), torch.zeros(1)), (2.0, 3.0), ((1, [2]), (1, [3]))],
)
def test_members_with_different_attributes_have_different_signatures(one, other):
    """A stack is a copy of its first member, which has only the first member's attributes."""

    def with_attribute(attribute: object) -> Member:
        m = member(IWAE, 0)
        m.model.extra = attribute
        return m

    assert signature(with_attribute(one)) != signature(with_attribute(other))
    assert signature(with_attribute(one)) == signature(with_attribute(one))


# ---------------------------------------------------------------------------------------------- convergence
def test_without_patience_training_takes_all_epochs():
    (fit,) = short_train([member(IWAE, 0)], replace(SHORT, epochs=7, check_every=3))
    assert (fit.epochs, fit.converged) == (7, False)
    assert [epoch for epoch, _ in fit.history] == [3, 6, 7]


def test_the_held_out_bound_is_the_iwelbo_of_the_member_on_fixed_noise():
    (fit,) = short_train([member(IWAE, 0)], replace(SHORT, score_particles=4000))
    with torch.no_grad():
        z, log_q = fit.proposal.draw(X[200:], 4000, generator=seeded(5))
        bound = iwelbo(fit.model.log_joint(X[200:], z) - log_q).mean().item()
    assert fit.history[-1][1] == pytest.approx(bound, abs=0.02)
    stack, held_out = stack_of(member(IWAE, 0), member(IWAE, 1)), SharedRows(X[200:])
    scores = [AmortisedBound()(stack, held_out, 10) for _ in range(2)]
    assert torch.equal(*scores)
    assert torch.unique(scores[0]).numel() == 2


PLATEAU = replace(SHORT, epochs=50, patience=2, drops=1, decay=0.3, check_every=1, min_gain=0.1)


def test_a_plateau_lowers_the_rate_then_ends_training_at_the_best_parameters(monkeypatch):
    one = member(IWAE, 0)
    (two_epochs,) = short_train([one], replace(PLATEAU, patience=None, epochs=2))
    # the best score is after the second epoch
    rates = script(monkeypatch, [[1.0], [2.0], [1.9], [1.5], [2.0], [1.0], [99.0]])
    (fit,) = short_train([one], PLATEAU)
    assert (fit.epochs, fit.converged) == (6, True)
    assert fit.history == [(1, 1.0), (2, 2.0), (3, 1.9), (4, 1.5), (5, 2.0), (6, 1.0)]
    assert same_bits(fit, two_epochs)
    theta, phi = PLATEAU.lr_theta, PLATEAU.lr_phi
    expected = [[theta, phi]] * 4 + [[0.3 * theta, 0.3 * phi]] * 2
    assert [[r[0][0], r[1][0]] for r in rates] == [pytest.approx(pair) for pair in expected]


def test_training_goes_on_from_the_best_parameters_after_a_plateau(monkeypatch):
    """After the drop the rates are too small to change a bit, so that the next best parameters are those returned."""
    one = member(IWAE, 0)
    (two_epochs,) = short_train([one], replace(PLATEAU, patience=None, epochs=2))
    script(monkeypatch, [[1.0], [2.0], [1.0], [1.0], [3.0], [1.0], [1.0]])
    (fit,) = short_train([one], replace(PLATEAU, decay=1e-30))
    assert (fit.epochs, fit.converged) == (7, True)
    assert same_bits(fit, two_epochs)


def test_small_gains_update_the_best_parameters_but_do_not_end_a_plateau(monkeypatch):
    one = member(IWAE, 0)
    (three_epochs,) = short_train([one], replace(PLATEAU, patience=None, epochs=3))
    script(monkeypatch, [[1.0], [1.05], [1.06], [0.0], [0.0]])
    (fit,) = short_train([one], replace(PLATEAU, drops=0))
    assert (fit.epochs, fit.converged) == (3, True)
    assert same_bits(fit, three_epochs)


def test_members_of_a_stack_converge_independently(monkeypatch):
    members = [member(IWAE, 0), member(VAE, 0)]
    script(monkeypatch, [[1.0, 1.0], [0.0, 2.0], [0.0, 3.0], [9.0, 4.0], [9.0, 0.0], [9.0, 0.0], [9.0, 0.0]])
    fits = short_train(members, replace(PLATEAU, drops=0))
    assert [(f.epochs, f.converged) for f in fits] == [(3, True), (6, True)]
    assert [len(f.history) for f in fits] == [3, 6]  # scores after convergence are not recorded


def test_the_best_parameters_are_returned_at_the_limit_of_epochs_too(monkeypatch):
    one = member(IWAE, 0)
    (one_epoch,) = short_train([one], replace(PLATEAU, patience=None, epochs=1))
    script(monkeypatch, [[3.0], [2.0], [1.0]])
    (fit,) = short_train([one], replace(PLATEAU, epochs=3, patience=5))
    assert (fit.epochs, fit.converged) == (3, False)
    assert same_bits(fit, one_epoch)


def test_iwae_recovers_the_maximum_likelihood_noise():
    x = TRUE.simulate(600, generator=seeded(2))[0].float()
    settings = Settings(n_particles=10, epochs=150, batch_size=100, patience=None, check_every=150)
    proposal = Normal(full=True).make(x, 2, hidden=(16,), generator=seeded(0))
    (fit,) = train([Member(PPCA(TRUE.weight.float(), 1.5), proposal, IWAE, 0)], x, x[:100], settings)
    best = _maximum_likelihood(x)
    gap = (best.log_evidence(x.double()).mean() - fit.model.log_evidence(x).mean()).item()
    assert -1e-5 <= gap < 1e-3
    torch.testing.assert_close(fit.model.noise_sd.double(), best.noise_sd, rtol=0.06, atol=0)
    assert PPCA(TRUE.weight, 1.5).log_evidence(x.double()).mean() < best.log_evidence(x.double()).mean() - 1


def _maximum_likelihood(x: Tensor) -> PPCA:
    model = PPCA(TRUE.weight, 1.0)
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = -model.log_evidence(x.double()).mean()
        value.backward()
        return value

    optimiser.step(closure)
    return model


# ------------------------------------------------------------------------------------------------ divergence
class Fragile(PPCA):
    """A model whose density is infinite at one call of log_joint."""

    stackable = False
    calls = 0

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        self.calls += 1
        value = super().log_joint(x, z)
        return value + torch.inf if self.calls == self.breaks_at else value


@pytest.mark.parametrize(("epoch", "batch", "part"), [(1, 1, 0), (2, 3, 0), (2, 3, 1), (3, 4, 1)])
def test_the_error_of_a_loss_that_is_not_finite_names_member_and_epoch(epoch, batch, part):
    one = member(IWAE, 3)
    model = Fragile(TRUE.weight, 1.0)
    model.breaks_at = 8 * (epoch - 1) + 2 * (batch - 1) + part + 1  # four batches of two calls
    message = rf"loss of IWAE, seed 3 became (nan|-?inf) in epoch {epoch}, batch {batch}; lower its learning rate"
    with pytest.raises(DivergenceError, match=message):
        short_train([replace(one, model=model)], replace(SHORT, check_every=100))


def test_the_member_of_a_stack_that_diverged_is_named():
    members = [member(IWAE, seed) for seed in range(3)]
    with torch.no_grad():
        members[1].model.log_noise[2] = torch.nan
    with pytest.raises(DivergenceError, match="loss of IWAE, seed 1 became nan in epoch 1, batch 1"):
        short_train(members)


class Cusp(MLP):
    """A network with a finite value and an infinite gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0 * self.layers[-1].bias).abs().sqrt().sum()


def test_a_last_step_to_parameters_that_are_not_finite_is_an_error():
    one = replace(member(IWAE, 4), proposal=Amortised(Cusp(5, 4, (8,), generator=seeded(0)).double(), 2, full=False))
    settings = replace(SHORT, epochs=1, batch_size=200)  # one batch, so that no later loss shows it
    with pytest.raises(DivergenceError, match="last step of IWAE, seed 4, in epoch 1, left parameters that are not"):
        short_train([one], settings)


# -------------------------------------------------------------------------------------------------- compiled
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # the compiler imports modules that torch deprecates
def test_compiled_training_gives_equal_results_to_rounding():
    members = [member(IWAE, 0, dtype=torch.float32), member(CYCLIC, 0, dtype=torch.float32)]
    eager, compiled = (short_train(members, replace(SHORT, compile=c)) for c in (False, True))
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close([s for _, s in a.history], [s for _, s in b.history], rtol=1e-3, atol=1e-3)
        for s, t in zip(tensors(a), tensors(b), strict=True):
            torch.testing.assert_close(s, t, rtol=1e-2, atol=1e-3)


# ---------------------------------------------------------------------------------------------- invalid inputs
@pytest.mark.parametrize("name", ["n_particles", "epochs", "batch_size", "check_every", "score_particles"])
def test_numbers_must_be_positive_integers(name):
    for value in (0, 1.5):
        with pytest.raises(SettingError, match=f"{name}={value} must be a whole number of at least 1"):
            Settings(**{name: value})


def test_invalid_data_are_refused():
    one = member(IWAE, 0)
    with pytest.raises(SettingError, match="no members to train"):
        train([], X, X)
    with pytest.raises(DataError, match=r"x_train has \(5,\) features, x_valid \(4,\)"):
        train([one], X, X[:, :4])
    with pytest.raises(DataError, match="x_valid holds 5 non-finite values"):
        train([one], X, X[:1] * torch.nan)


def test_a_module_without_log_joint_is_refused():
    one = replace(member(IWAE, 0), model=nn.Identity())
    with pytest.raises(SettingError, match=r"Identity has no log_joint and no prior; a model offers"):
        short_train([one])
    assert as_model(TRUE) is TRUE
