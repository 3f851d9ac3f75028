from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from vaerdict.core import DataError, DivergenceError, SettingError
from vaerdict.distributions import StandardNormal
from vaerdict.flows import SplineFlow
from vaerdict.models.ppca import PPCA
from vaerdict.networks import MLP
from vaerdict.noise import seeded
from vaerdict.objectives import elbo_loss, iwelbo, loss
from vaerdict.proposals import Amortised, Family, Normal, Student
from vaerdict.training import (
    AGG,
    CHI,
    CYCLIC,
    IWAE,
    VAE,
    WW,
    Fit,
    Lagging,
    Member,
    Recipe,
    Settings,
    as_model,
    cyclical,
    recipe,
    train,
    warm_up,
)
from vaerdict.training.data import Shared
from vaerdict.training.flat import Adam, Flat
from vaerdict.training.loop import _Course, _lag, stack_size
from vaerdict.training.stacks import Stack, signature

TRUE = PPCA(torch.randn(5, 2, generator=seeded(0), dtype=torch.double), 0.7)
X = TRUE.simulate(300, generator=seeded(1))[0]
SHORT = Settings(n_particles=5, epochs=3, batch_size=50, patience=None, check_every=2, score_particles=10)


def member(recipe: Recipe, seed: int, family: Family | None = None, dtype: torch.dtype = torch.double) -> Member:
    x = X.to(dtype)
    proposal = (family or Normal()).make(x, 2, hidden=(8,), generator=seeded(seed))
    return Member(PPCA(TRUE.weight.to(dtype), 1.0), proposal, recipe, seed)


def short_train(members: list[Member], settings: Settings = SHORT, **how) -> list[Fit]:
    x = X.to(next(members[0].proposal.parameters()).dtype)
    return train(members, x[:200], x[200:], settings, **how)


def tensors(fit: Fit | Member) -> list[Tensor]:
    return [t.detach().clone() for module in (fit.model, fit.proposal) for t in module.state_dict().values()]


def same_bits(a: Fit | Member, b: Fit | Member) -> bool:
    return all(torch.equal(s, t) for s, t in zip(tensors(a), tensors(b), strict=True))


def stack_of(*members: Member, lr: float = 1e-2, learn_model: bool = True) -> Stack:
    return Stack(members, lr_theta=lr, lr_phi=lr, learn_model=learn_model, device=torch.device("cpu"))


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
    members = [member(*what, dtype=dtype) for what in GROUPS[name]]
    seen: set[str] = set()
    settings = replace(SHORT, epochs=8)
    together = short_train(members, settings, progress=lambda done, total, what: seen.add(what))
    assert len(seen) == 1, f"they were to be one stack, not {seen}"
    allowed = {"rtol": 1e-7, "atol": 1e-8} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 1e-3}
    for one, fit in zip(members, together, strict=True):
        (alone,) = short_train([one], settings)
        for a, b in zip(tensors(fit), tensors(alone), strict=True):
            torch.testing.assert_close(a, b, **allowed)
        assert [e for e, _ in fit.history] == [e for e, _ in alone.history] == [2, 4, 6, 8]
        torch.testing.assert_close([s for _, s in fit.history], [s for _, s in alone.history], **allowed)


def test_members_come_back_in_their_order_whatever_the_stacks():
    what = [(CHI, 0, Student()), (IWAE, 3, Normal()), (CHI, 1, Student()), (AGG, 2, Normal()), (VAE, 3, Normal())]
    fits = short_train([member(*w) for w in what])
    assert [(f.name, f.seed) for f in fits] == [(r.name, s) for r, s, _ in what]
    assert [f.proposal.log_df is None for f in fits] == [False, True, False, True, True]
    assert all(not f.model.training and not f.proposal.training for f in fits)


def test_a_stack_too_large_to_pay_is_cut():
    members = [member(IWAE, seed) for seed in range(3)]
    seen: set[str] = set()
    large = replace(SHORT, n_particles=330, epochs=1)  # 16,500 rows a member: one and a bit fill a core
    cut = short_train(members, large, progress=lambda done, total, what: seen.add(what))
    assert seen == {"IWAE (1 of 3)", "IWAE (2 of 3)", "IWAE (3 of 3)"}
    assert [f.seed for f in cut] == [0, 1, 2]


def test_how_many_members_pay():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert stack_size(5 * 128, cpu) == 51
    assert stack_size(30 * 128, cpu) == 8
    assert stack_size(10**6, cpu) == 1
    assert stack_size(30 * 128, gpu) > 40 * stack_size(30 * 128, cpu)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    members = [member(IWAE, 0), member(CHI, 0, Student()), member(AGG, 0)]
    first, again = short_train(members), short_train(members)
    assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))
    assert [f.history for f in first] == [f.history for f in again]
    (other,) = short_train([replace(members[0], seed=1)])  # from the same start
    assert not same_bits(first[0], other)


def test_recipes_with_one_seed_do_not_share_their_noise():
    same = replace(IWAE, name="IWAE-2")
    a, b = short_train([member(IWAE, 0), member(same, 0)])
    assert not same_bits(a, b)


def test_inputs_are_left_untouched():
    members = [member(IWAE, 0), member(VAE, 0), member(AGG, 1)]
    before, x = [tensors(m) for m in members], X.clone()
    fits = short_train(members)
    assert torch.equal(x, X)
    for m, old, fit in zip(members, before, fits, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors(m), old, strict=True))
        assert not same_bits(m, fit)
        assert fit.model is not m.model
        assert all(p.grad is None for p in m.model.parameters())


# ---------------------------------------------------------------------------------- what keeps members apart
def test_only_members_of_one_shape_share_a_signature():
    base = signature(member(IWAE, 0))
    assert base is not None
    assert base == signature(member(CHI, 7))  # losses may differ, the way gradient flows may not
    apart = [
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
    kinds = [base, *(signature(m) for m in apart)]
    assert len(set(kinds)) == len(kinds)
    assert signature(replace(member(IWAE, 0), proposal=Amortised(_encoder(F.relu), 2, full=False))) == base
    assert signature(member(IWAE, 0, SplineFlow(1))) is None


def _encoder(activation) -> MLP:
    flat = X.reshape(-1, 5)
    return MLP(5, 4, (8,), generator=seeded(0), activation=activation, center=flat.mean(0), spread=flat.std(0)).double()


@pytest.mark.parametrize(
    ("one", "other"),
    [({"a": 2}, {"a": 3}), ([2], [3]), (torch.ones(1), torch.zeros(1)), (2.0, 3.0), ((1, [2]), (1, [3]))],
)
def test_plain_attributes_that_differ_keep_members_apart(one, other):
    """A stack is a copy of its first member: an attribute that is no tensor of the module would be lost on the rest."""

    def made(attribute: object) -> Member:
        m = member(IWAE, 0)
        m.model.extra = attribute
        return m

    assert signature(made(one)) != signature(made(other))
    assert signature(made(one)) == signature(made(one))  # one object is one value


# ------------------------------------------------------------------------------------- who learns from what
def test_a_fixed_model_stays_as_it_is():
    members = [member(IWAE, 0), member(CHI, 1), member(AGG, 0)]
    fits = short_train(members, learn_model=False)
    for m, fit in zip(members, fits, strict=True):
        assert torch.equal(fit.model.log_noise, m.model.log_noise)
        assert not torch.equal(fit.proposal.encoder.layers[0].weight, m.proposal.encoder.layers[0].weight)


def test_each_objective_moves_its_own_part_alone():
    nothing = replace(loss("elbo", "pathwise"), fn=lambda log_w, log_q: 0 * log_w.mean(0))
    still_model = Recipe("A", lambda log_w: 0 * log_w.mean(0), IWAE.phi)
    still_proposal = Recipe("B", IWAE.theta, nothing)
    for one, model_moves in ((member(still_model, 0), False), (member(still_proposal, 0), True)):
        (fit,) = short_train([one])
        assert torch.equal(fit.model.log_noise, one.model.log_noise) != model_moves
        weights = (m.proposal.encoder.layers[0].weight for m in (fit, one))
        assert torch.equal(*weights) == model_moves


SCORE = replace(WW, name="score", phi=loss("forward_kl", "score"))
PATHWISE = replace(IWAE, name="pathwise", phi=loss("iwelbo", "pathwise"))


@pytest.mark.parametrize("recipes", [(VAE, IWAE, WW, VAE), (CHI, IWAE), (SCORE, SCORE), (PATHWISE, PATHWISE)])
def test_losses_and_gradients_are_those_of_the_recipes(recipes):
    """By hand: theta by the recipe's bound, phi by its loss with what carries gradient, on the noise of the step."""
    members = [member(one, seed) for seed, one in enumerate(recipes)]
    stack, x = stack_of(*members), X[:12]
    batch = x.expand(len(members), 12, 5)
    noise = stack.proposal.noise(batch, 7, stack.source)
    theta, phi = stack.theta_loss(batch, noise, None), stack.phi_loss(batch, noise, None)
    slopes = stack.theta.flat.gradient(theta), stack.phi.flat.gradient(phi)
    for i, m in enumerate(members):
        q, loss_of_q = m.proposal(x), m.recipe.phi
        z = q.transform(type(noise)(noise.normal[:, i]))
        bound = m.recipe.theta(m.model.log_joint(x, z.detach()) - q.log_prob(z).detach()).mean()
        z = z if loss_of_q.z_grad else z.detach()
        log_q = (q if loss_of_q.q_grad else q.detach()).log_prob(z)
        value = loss_of_q(m.model.log_joint(x, z) - log_q, log_q).mean()
        for got, slope, expected, module in ((theta, slopes[0], bound, m.model), (phi, slopes[1], value, m.proposal)):
            torch.testing.assert_close(got[i], expected)
            gradient = torch.autograd.grad(expected, list(module.parameters()))
            torch.testing.assert_close(slope[i], torch.cat([g.flatten() for g in gradient]))


# ------------------------------------------------------------------------------------------------- schedules
def test_schedules():
    rise = warm_up(0.5)
    assert [rise(t) for t in (0, 0.25, 0.5, 0.75, 1)] == [0, 0.5, 1, 1, 1]
    cycle = cyclical(2, 0.5)
    assert [cycle(t) for t in (0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 1)] == [0, 0.5, 1, 1, 0, 0.5, 1, 1]


@pytest.mark.parametrize("stacked", [False, True])
def test_beta_weighs_the_kl_term(stacked):
    half, none = replace(VAE, name="half", annealing=lambda done: 0.5), replace(VAE, name="none", annealing=warm_up())
    members = [member(none, 0), member(half, 1), member(VAE, 2)]
    groups = [members] if stacked else [[m] for m in members]
    got = torch.cat([_first_losses(group) for group in groups])
    for m, beta, value in zip(members, (0.0, 0.5, 1.0), got, strict=True):
        stack = stack_of(m)
        z = (q := m.proposal(X[:9])).transform(stack.proposal.noise(X[:9], 4, stack.source))
        kl = q.log_prob(z) - StandardNormal(2).log_prob(z)
        log_lik = m.model.log_joint(X[:9], z) - StandardNormal(2).log_prob(z)
        torch.testing.assert_close(value, (beta * kl - log_lik).mean().detach())


def _first_losses(members: list[Member]) -> Tensor:
    from vaerdict.training.loop import _beta

    stack = stack_of(*members)
    x = X[:9].expand(len(members), 9, 5) if len(members) > 1 else X[:9]
    return stack.phi_loss(x, stack.proposal.noise(x, 4, stack.source), _beta(stack, 0.0)).detach()


def test_annealing_follows_the_share_of_training_done():
    asked: list[float] = []

    def annealing(done: float) -> float:
        asked.append(done)
        return 1.0

    short_train([member(replace(VAE, annealing=annealing), 0)], replace(SHORT, epochs=4))
    assert asked == [0, 0.25, 0.5, 0.75]


# --------------------------------------------------------------------------------------------------- lagging
class Identity(nn.Module):
    """An encoder whose q(z | x) is N(x, sd^2)."""

    stackable = True

    def __init__(self, sd: float) -> None:
        super().__init__()
        raw = math.log(math.expm1(sd - 1e-6)) - math.log(math.e - 1)
        self.raw = nn.Parameter(torch.tensor([raw], dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.raw.unsqueeze(-2).expand_as(x)], -1)


def information(sd: float, x: Tensor, n_members: int) -> Tensor:
    q = Amortised(Identity(sd), 1, full=False)
    model = PPCA(torch.ones(1, 1).double(), 1.0)
    return stack_of(*(Member(model, q, AGG, seed) for seed in range(n_members))).mutual_information(Shared(x))


def test_mutual_information_of_a_gaussian_channel():
    """For x ~ N(0, 1) and z = x + sd e it is log(1 + 1/sd^2) / 2; x by quantiles, so that only z is random."""
    x = torch.as_tensor(stats.norm.ppf((torch.arange(400) + 0.5) / 400)).unsqueeze(-1)
    for sd in (0.5, 1.0, 2.0):
        got = information(sd, x, 30)
        assert got.shape == (30,)
        assert got.std() > 0  # members draw apart
        assert got.mean().item() == pytest.approx(0.5 * math.log(1 + sd**-2), abs=0.015)
    assert information(0.9, x, 30).mean().item() != pytest.approx(0.5 * math.log(2), abs=0.015)  # the check can fail


def test_mutual_information_is_bounded_by_what_so_few_observations_can_tell():
    x = torch.arange(10, dtype=torch.double).unsqueeze(-1)
    torch.testing.assert_close(information(0.01, x, 1), torch.tensor([math.log(10)]).double())
    torch.testing.assert_close(information(1.0, torch.zeros(10, 1).double(), 1), torch.zeros(1).double())


def test_only_members_that_still_lag_catch_up():
    aggressive = replace(AGG, lagging=Lagging(inner=2))
    stack = stack_of(*(member(aggressive, seed) for seed in range(3)))
    stack.phi_step(X[:50].expand(3, 50, 5), 5, None)  # something to remember
    course = _Course.start(stack)
    course.lagging = [True, False, True]
    before, noise = [t.clone() for t in stack.phi.tensors()], [g.get_state() for g in stack.generators]
    _lag(stack, Shared(X[:200]), 50, SHORT, course, None)
    for old, new in zip(before, stack.phi.tensors(), strict=True):
        assert torch.equal(old[1], new[1])
        assert not torch.equal(old[0], new[0])
        assert not torch.equal(old[2], new[2])
    assert stack.phi.steps.flatten().tolist() == [3, 1, 3]
    unchanged = [torch.equal(a, g.get_state()) for a, g in zip(noise, stack.generators, strict=True)]
    assert unchanged == [False, True, False]


def test_lagging_ends_when_information_stops_rising_or_its_epochs_are_over(monkeypatch):
    inner: list[list[bool]] = []
    real = Stack.phi_step

    def phi_step(self, x, k, beta, only=None):
        inner.append([] if only is None else only.tolist())
        return real(self, x, k, beta, only)

    scripted = iter([[1.0, 1.0, 1.0], [2.0, 0.5, 2.0], [1.5, 9.0, 3.0], [0.0, 9.9, 4.0]])
    monkeypatch.setattr(Stack, "phi_step", phi_step)
    monkeypatch.setattr(Stack, "mutual_information", lambda self, x, most: torch.tensor(next(scripted)))
    members = [member(replace(AGG, lagging=Lagging(inner=1, epochs=4)), seed) for seed in range(3)]
    short_train(members, replace(SHORT, epochs=6, batch_size=200, check_every=1))
    masks = [m for m in inner if m]
    # epoch 1 and 2: all; then the second has stopped rising, then the first, and at last the epochs are over
    assert masks == [[True] * 3, [True] * 3, [True, False, True], [False, False, True]]
    assert len(inner) == len(masks) + 6


def test_lagging_is_watched_every_epoch_however_rare_the_checks(monkeypatch):
    caught_up = 0
    real = Stack.phi_step

    def phi_step(self, x, k, beta, only=None):
        nonlocal caught_up
        caught_up += only is not None
        return real(self, x, k, beta, only)

    rising = iter(range(100))
    monkeypatch.setattr(Stack, "phi_step", phi_step)
    monkeypatch.setattr(Stack, "mutual_information", lambda self, x, most: torch.tensor([float(next(rising))]))
    agg = replace(AGG, lagging=Lagging(inner=1, epochs=3))
    short_train([member(agg, 0)], replace(SHORT, epochs=8, batch_size=200, check_every=8, patience=None))
    assert caught_up == 3


def test_a_schedule_is_followed_to_its_end():
    settings = Settings(n_particles=2, epochs=12, patience=1, drops=0, check_every=1, min_gain=10.0)
    plain, annealed = short_train([member(VAE, 0), member(replace(CYCLIC, annealing=warm_up(0.9)), 0)], settings)
    assert (plain.converged, plain.epochs < 6) == (True, True)
    assert (annealed.converged, annealed.epochs) == (False, 12)


# ---------------------------------------------------------------------------------------------- convergence
def test_without_patience_training_takes_its_epochs():
    (fit,) = short_train([member(IWAE, 0)], replace(SHORT, epochs=7, check_every=3))
    assert (fit.epochs, fit.converged) == (7, False)
    assert [epoch for epoch, _ in fit.history] == [3, 6, 7]


def test_the_held_out_bound_is_the_iwelbo_of_the_member_on_fixed_noise():
    (fit,) = short_train([member(IWAE, 0)], replace(SHORT, score_particles=4000))
    with torch.no_grad():
        z, log_q = fit.proposal.draw(X[200:], 4000, generator=seeded(5))
        again = iwelbo(fit.model.log_joint(X[200:], z) - log_q).mean().item()
    assert fit.history[-1][1] == pytest.approx(again, abs=0.02)
    stack = stack_of(member(IWAE, 0), member(IWAE, 1))
    assert torch.equal(stack.score(Shared(X[200:]), 10), stack.score(Shared(X[200:]), 10))
    assert torch.unique(stack.score(Shared(X[200:]), 10)).numel() == 2


PLATEAU = replace(SHORT, epochs=50, patience=2, drops=1, decay=0.3, check_every=1, min_gain=0.1)


def script(monkeypatch, scores: list[list[float]]) -> list[list[float]]:
    """Replace held-out bounds by these, one row a check; returns the learning rates in force at each."""
    rates: list[list[float]] = []
    rows = iter(scores)

    def score(self, x, k):
        rates.append([self.theta.lr.flatten().tolist(), self.phi.lr.flatten().tolist()])
        return torch.tensor(next(rows), dtype=torch.double)

    monkeypatch.setattr(Stack, "score", score)
    return rates


def test_a_plateau_lowers_the_rate_then_ends_training_at_the_best_parameters(monkeypatch):
    one = member(IWAE, 0)
    (two_epochs,) = short_train([one], replace(PLATEAU, patience=None, epochs=2))
    # best after the second epoch; gains of less than min_gain move the best, not the clock
    rates = script(monkeypatch, [[1.0], [2.0], [1.9], [1.5], [2.0], [1.0], [99.0]])
    (fit,) = short_train([one], PLATEAU)
    assert (fit.epochs, fit.converged) == (6, True)
    assert fit.history == [(1, 1.0), (2, 2.0), (3, 1.9), (4, 1.5), (5, 2.0), (6, 1.0)]
    assert same_bits(fit, two_epochs)
    theta, phi = PLATEAU.lr_theta, PLATEAU.lr_phi
    expected = [[theta, phi]] * 4 + [[0.3 * theta, 0.3 * phi]] * 2
    assert [[r[0][0], r[1][0]] for r in rates] == [pytest.approx(pair) for pair in expected]


def test_small_gains_count_for_the_best_but_not_against_the_plateau(monkeypatch):
    one = member(IWAE, 0)
    (three_epochs,) = short_train([one], replace(PLATEAU, patience=None, epochs=3))
    script(monkeypatch, [[1.0], [1.05], [1.06], [0.0], [0.0]])
    (fit,) = short_train([one], replace(PLATEAU, drops=0))
    assert (fit.epochs, fit.converged) == (3, True)
    assert same_bits(fit, three_epochs)


def test_members_of_a_stack_converge_each_in_its_own_time(monkeypatch):
    members = [member(IWAE, 0), member(VAE, 0)]
    script(monkeypatch, [[1.0, 1.0], [0.0, 2.0], [0.0, 3.0], [9.0, 4.0], [9.0, 0.0], [9.0, 0.0], [9.0, 0.0]])
    fits = short_train(members, replace(PLATEAU, drops=0))
    assert [(f.epochs, f.converged) for f in fits] == [(3, True), (6, True)]
    assert [len(f.history) for f in fits] == [3, 6]  # a bound after the end is not recorded


def test_the_best_parameters_are_kept_at_the_limit_too(monkeypatch):
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
    """A model that breaks at one call of log_joint."""

    stackable = False
    calls = 0

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        self.calls += 1
        value = super().log_joint(x, z)
        return value + torch.inf if self.calls == self.breaks_at else value


@pytest.mark.parametrize(("epoch", "batch", "part"), [(1, 1, 0), (2, 3, 0), (2, 3, 1), (3, 4, 1)])
def test_a_loss_that_is_not_finite_says_whose_and_when(epoch, batch, part):
    one = member(IWAE, 3)
    model = Fragile(TRUE.weight, 1.0)
    model.breaks_at = 8 * (epoch - 1) + 2 * (batch - 1) + part + 1  # four batches of two calls
    message = rf"loss of IWAE, seed 3 became (nan|-?inf) in epoch {epoch}, batch {batch}; lower its learning rate"
    with pytest.raises(DivergenceError, match=message):
        short_train([replace(one, model=model)], replace(SHORT, check_every=100))


def test_in_a_stack_the_one_that_diverged_is_named():
    members = [member(IWAE, seed) for seed in range(3)]
    with torch.no_grad():
        members[1].model.log_noise[2] = torch.nan
    with pytest.raises(DivergenceError, match="loss of IWAE, seed 1 became nan in epoch 1, batch 1"):
        short_train(members)


class Cusp(MLP):
    """A network whose value is finite where its gradient is not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0 * self.layers[-1].bias).abs().sqrt().sum()


def test_a_last_step_that_ruins_the_parameters_is_no_success():
    one = replace(member(IWAE, 4), proposal=Amortised(Cusp(5, 4, (8,), generator=seeded(0)).double(), 2, full=False))
    settings = replace(SHORT, epochs=1, batch_size=200)  # one batch, so that no later loss can tell
    with pytest.raises(DivergenceError, match="last step of IWAE, seed 4, in epoch 1, left parameters that are not"):
        short_train([one], settings)


# ------------------------------------------------------------------------------------------------------ Adam
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_flat_adam_is_adam_member_by_member(dtype):
    g = seeded(0)
    module = nn.ParameterList([torch.randn(3, 4, 2, generator=g).to(dtype), torch.randn(3, 5, generator=g).to(dtype)])
    copies = [[p[i].detach().clone().requires_grad_() for p in module] for i in range(3)]
    rates = [1e-1, 1e-2, 0.0]
    flat = Flat(module, 3)
    adam = Adam(flat, 1.0)
    adam.lr.copy_(torch.tensor(rates, dtype=torch.double)[:, None])
    peers = [torch.optim.Adam(c, lr) for c, lr in zip(copies, rates, strict=True)]

    def objective(parts: list[Tensor]) -> Tensor:
        return (parts[0] - 1).pow(4).sum() + 1e-3 * (parts[1] * 3).sin().sum()

    for _ in range(25):
        adam.step(flat.gradient(torch.stack([objective([p[i] for p in module]) for i in range(3)])))
        for c, peer in zip(copies, peers, strict=True):
            peer.zero_grad()
            objective(c).backward()
            peer.step()
        allowed = {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 2e-6, "atol": 2e-7}
        for i, c in enumerate(copies):
            for mine, theirs in zip(module, c, strict=True):
                torch.testing.assert_close(mine[i], theirs, **allowed)


def test_parameters_are_views_of_one_matrix():
    module = nn.ParameterList([torch.zeros(2, 3), torch.ones(2)])
    module.append(nn.Parameter(torch.full((2,), 7.0), requires_grad=False))
    flat = Flat(module, 2)
    assert len(flat) == 4
    flat.values[1] = 5.0
    assert module[0].tolist() == [[0, 0, 0], [5, 5, 5]]
    assert module[1].tolist() == [1, 5]
    assert module[2].tolist() == [7, 7]
    unused = flat.gradient(module[0].sum(1))  # a parameter the loss does not touch has gradient zero
    assert unused.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]


def test_a_masked_step_leaves_the_others_bit_for_bit():
    module = nn.ParameterList([torch.randn(3, 4, generator=seeded(0))])
    adam = Adam(Flat(module, 3), 0.1)
    adam.step(torch.randn(3, 4, generator=seeded(1)))
    before = [t.clone() for t in adam.tensors()]
    gradient = torch.randn(3, 4, generator=seeded(2))
    gradient[0] = torch.nan  # not even this reaches a member left out
    adam.step(gradient, torch.tensor([False, True, True]))
    for old, new in zip(before, adam.tensors(), strict=True):
        assert torch.equal(old[0], new[0])
        assert not torch.equal(old[1:], new[1:])
        assert torch.isfinite(new).all()


def test_adam_goes_on_from_its_state():
    gradients = torch.randn(6, 2, 3, generator=seeded(0))
    whole, half, rest = (Adam(Flat(nn.ParameterList([torch.ones(2, 3)]), 2), 0.1) for _ in range(3))
    for g in gradients:
        whole.step(g)
    for g in gradients[:3]:
        half.step(g)
    rest.load({name: t.clone() for name, t in half.state().items()})
    for g in gradients[3:]:
        rest.step(g)
    assert all(torch.equal(a, b) for a, b in zip(whole.state().values(), rest.state().values(), strict=True))


# -------------------------------------------------------------------------------------------------- compiled
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # the compiler imports what torch itself deprecates
def test_compiled_training_is_the_same_to_rounding():
    members = [member(IWAE, 0, dtype=torch.float32), member(CYCLIC, 0, dtype=torch.float32)]
    plain, fast = (short_train(members, replace(SHORT, compile=c)) for c in (False, True))
    for a, b in zip(plain, fast, strict=True):
        torch.testing.assert_close([s for _, s in a.history], [s for _, s in b.history], rtol=1e-3, atol=1e-3)
        for s, t in zip(tensors(a), tensors(b), strict=True):
            torch.testing.assert_close(s, t, rtol=1e-2, atol=1e-3)


# -------------------------------------------------------------------------------------------------- refusals
def test_recipes_by_name():
    assert recipe("WW") is WW
    assert recipe("VAE").theta is elbo_loss
    with pytest.raises(SettingError, match="no recipe 'WAE'; choose one of VAE, IWAE, WW, CHI, AGG, CYCLIC"):
        recipe("WAE")


@pytest.mark.parametrize("name", ["n_particles", "epochs", "batch_size", "check_every", "score_particles"])
def test_counts_must_be_counts(name):
    for value in (0, 1.5):
        with pytest.raises(SettingError, match=f"{name}={value} must be a whole number of at least 1"):
            Settings(**{name: value})


def test_data_that_cannot_be_trained_on_are_refused():
    one = member(IWAE, 0)
    with pytest.raises(SettingError, match="no members to train"):
        train([], X, X)
    with pytest.raises(DataError, match=r"x_train has \(5,\) features, x_valid \(4,\)"):
        train([one], X, X[:, :4])
    with pytest.raises(DataError, match="x_valid holds 5 non-finite values"):
        train([one], X, X[:1] * torch.nan)


def test_a_module_that_is_no_model_is_refused():
    one = replace(member(IWAE, 0), model=nn.Identity())
    with pytest.raises(SettingError, match=r"Identity has no log_joint and no prior; a model offers"):
        short_train([one])
    assert as_model(TRUE) is TRUE
