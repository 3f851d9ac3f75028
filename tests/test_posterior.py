"""Posteriors as weighted particles: expectations, decisions, resampling, modules of users, refusals."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal as TorchNormal

from checks import assert_mean, assert_within, chi_square_rate
from inference_toys import MODEL, Near
from vaerdict.core import DataError, Draws, SettingError, ShapeError, WeightError
from vaerdict.decisions import bayes_action
from vaerdict.diagnostics import Verdict, psis
from vaerdict.distributions import StandardNormal
from vaerdict.inference import Posterior, assess, expect, posterior
from vaerdict.models.ppca import PPCA
from vaerdict.noise import Randomness, Sobol, seeded
from vaerdict.proposals import Normal, Prior

X = MODEL.simulate(30, generator=seeded(1))[0]
EXACT = MODEL.posterior(X)
SD = EXACT.covariance().diagonal(dim1=-2, dim2=-1).sqrt()


OFFSET = torch.linspace(-1.5, 1.5, 30, dtype=torch.double)
CUT = EXACT.loc[:, 0] + OFFSET * SD[:, 0]
EXACT_TAIL = torch.special.ndtr(-OFFSET)


def tail(z: Tensor) -> Tensor:
    """Whether z_1 exceeds a threshold that depends on the observation, so that no probability is close to 0 or 1."""
    return (z[..., 0] >= CUT).double()


# -------------------------------------------------------------------------------------------- expectations
PROPOSALS = {
    "one": Near(),
    "several": {"wide": Near(2.0), "off": Near(1.5, 0.5), "PRIOR": StandardNormal(2)},
}


@pytest.fixture(params=[(name, smooth) for name in PROPOSALS for smooth in (True, False)], ids=str)
def answer(request) -> Posterior:
    name, smooth = request.param
    return posterior(MODEL, X, PROPOSALS[name], 3000, seed=seeded(2), smooth=smooth)


def test_expectations_are_those_of_the_exact_posterior(answer):
    mean, probability = answer.expect(lambda z: z), answer.expect(tail)
    assert (mean.value.shape, mean.ess.shape, probability.value.shape) == ((30, 2), (30,), (30,))
    assert_within(mean.value, EXACT.loc, mean.mcse, rate=1e-6)
    assert_within(probability.value, EXACT_TAIL, probability.mcse, rate=1e-6)
    for score in ((mean.value - EXACT.loc) / mean.mcse, (probability.value - EXACT_TAIL) / probability.mcse):
        assert chi_square_rate(score) > 1e-6  # errors are not too small,
        assert chi_square_rate(score) < 1 - 1e-4  # nor too large
    with pytest.raises(AssertionError, match="standard errors off"):
        assert_within(mean.value + 0.15 * SD, EXACT.loc, mean.mcse, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors off"):
        assert_within(probability.value + 0.1, EXACT_TAIL, probability.mcse, rate=1e-6)


def test_the_evidence_is_estimated(answer):
    ratio = (answer.log_w - MODEL.log_evidence(X)).exp()
    assert_mean(ratio.mean(1), 1.0, rate=1e-6)
    torch.testing.assert_close(answer.log_evidence, ratio.mean(0).log() + MODEL.log_evidence(X))
    assert (answer.log_evidence - MODEL.log_evidence(X)).abs().max() < 0.2


def test_particles_carry_the_index_of_their_proposal():
    several = posterior(MODEL, X, PROPOSALS["several"], 300, shares={"wide": 2, "off": 3, "PRIOR": 1})
    assert several.names == ("wide", "off", "PRIOR")
    assert Counter(several.source.tolist()) == {0: 100, 1: 150, 2: 50}
    one = posterior(MODEL, X, Near(), 300)
    assert (one.names, one.source.unique().tolist()) == (("q",), [0])
    assert one.z.shape == (300, 30, 2)
    assert one.log_w.shape == (300, 30)


def test_draws_repeat_and_follow_their_generator():
    first, again = (posterior(MODEL, X, Near(), 50) for _ in range(2))
    assert torch.equal(first.z, again.z)
    assert not torch.equal(first.z, posterior(MODEL, X, Near(), 50, seed=seeded(1)).z)
    quasi = posterior(MODEL, X, Near(1.1), 1024, seed=Sobol(seeded(0))).expect(lambda z: z)
    plain = posterior(MODEL, X, Near(1.1), 1024, seed=seeded(0)).expect(lambda z: z)
    assert (quasi.value - EXACT.loc).square().mean() < 0.1 * (plain.value - EXACT.loc).square().mean()


@pytest.mark.parametrize("local", [True, False], ids=["made for x", "amortised"])
def test_particles_of_many_observations_are_drawn_in_chunks(local, monkeypatch):
    monkeypatch.setattr(assess, "_CHUNK", 7 * 2000 * 5)  # seven observations
    q = MODEL.posterior(X, inflate=1.3) if local else Near()
    answer = posterior(MODEL, X, q, 2000, seed=seeded(2))
    torch.testing.assert_close(answer.log_w, MODEL.log_joint(X, answer.z) - Near().log_prob(answer.z, X))
    mean = answer.expect(lambda z: z)
    assert_within(mean.value, EXACT.loc, mean.mcse, rate=1e-6)
    assert len(answer.log_w.unique()) == answer.log_w.numel()  # no chunk repeats the noise of another


def test_verdicts_follow_the_weights():
    good = posterior(MODEL, X, Near(), 1000)
    assert (good.verdict == Verdict.OK).all()
    assert torch.equal(good.khat, good.expect(tail).khat)
    assert torch.equal(good.ess, good.expect(tail).ess)
    narrow = posterior(MODEL, X, Near(0.15), 1000)
    assert (narrow.khat > 0.7).double().mean() > 0.6
    assert (narrow.verdict == Verdict.REFUSE).double().mean() > 0.6
    few = posterior(MODEL, X, Near(), 20)  # too few for a k-hat, with uneven weights
    assert few.khat.isnan().all()
    assert (few.verdict == Verdict.CAUTION).all()


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def test_several_latents_in_a_named_tuple():
    class Both:
        prior = StandardNormal(2)

        def log_joint(self, x: Tensor, z: Pair) -> Tensor:
            return MODEL.log_joint(x, torch.cat([z.a, z.b], -1))

        def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
            z, log_q = Near().draw(x, k, generator=generator)
            return Draws(Pair(z[..., :1], z[..., 1:]), log_q)

        def log_prob(self, z: Pair, x: Tensor) -> Tensor:
            return Near().log_prob(torch.cat([z.a, z.b], -1), x)

    pair = posterior(Both(), X, Both(), 500)
    torch.testing.assert_close(
        pair.expect(lambda z: z.b[..., 0]).value,
        posterior(MODEL, X, Near(), 500).expect(lambda z: z[..., 1]).value,
    )
    assert pair.resample(7, generator=seeded(0)).b.shape == (7, 30, 1)
    assert set(pair.to_arviz().posterior.data_vars) == {"a", "b"}


# ------------------------------------------------------------------------------------------------- decisions
ACTIONS = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.double)


def squared(z: Tensor) -> Tensor:
    return (z[..., :1] - ACTIONS).square()


def test_the_action_of_least_expected_loss():
    """E (z_1 - a)^2 = var + (mean - a)^2, so the nearest action is optimal."""
    decision = posterior(MODEL, X, Near(), 4000, seed=seeded(3)).decide(squared)
    exact = SD[:, :1] ** 2 + (EXACT.loc[:, :1] - ACTIONS) ** 2
    assert_within(decision.expected_loss.value, exact, decision.expected_loss.mcse, rate=1e-6)
    best, second = exact.sort(-1).values[:, 0], exact.sort(-1).values[:, 1]
    assert_within(decision.margin, second - best, decision.margin_mcse, rate=1e-6)
    clear = second - best > 0.15
    assert clear.sum() > 20
    assert torch.equal(decision.action[clear], exact.argmin(-1)[clear])
    with pytest.raises(AssertionError, match="standard errors off"):
        assert_within(decision.margin + 0.15, second - best, decision.margin_mcse, rate=1e-6)


def test_the_margin_has_a_smaller_error_than_the_losses():
    decision = posterior(MODEL, X, Near(), 1000).decide(squared)
    worst = decision.expected_loss.mcse.max(-1).values
    assert (decision.margin_mcse < 1.5 * worst).all()
    constant = posterior(MODEL, X, Near(), 1000).decide(lambda z: z[..., :1].square() + torch.tensor([0.0, 0.5]))
    torch.testing.assert_close(constant.margin, torch.full((30,), 0.5).double())
    assert constant.margin_mcse.max() < 1e-12  # though each expected loss is uncertain
    assert constant.expected_loss.mcse.min() > 1e-3
    assert (constant.action == 0).all()


def test_a_loss_matrix_with_the_probability_of_each_state():
    loss = torch.tensor([[0.0, 5.0], [1.0, 0.0], [0.4, 0.4]])

    def state(z: Tensor) -> Tensor:
        return torch.stack([1 - tail(z), tail(z)], -1)

    decision = posterior(MODEL, X, Near(), 4000, seed=seeded(4)).decide(loss, state)
    probability = torch.stack([1 - EXACT_TAIL, EXACT_TAIL], -1)
    exact = probability @ loss.double().mT
    assert_within(decision.expected_loss.value[:, :2], exact[:, :2], decision.expected_loss.mcse[:, :2], rate=1e-6)
    clear = exact.sort(-1).values.diff(dim=-1)[:, 0] > 0.1
    assert torch.equal(decision.action[clear], bayes_action(probability, loss.double())[clear])
    assert set(decision.action.tolist()) == {0, 1, 2}


def test_the_verdict_includes_weights_and_margin():
    def loss(z: Tensor) -> Tensor:
        return torch.stack([tail(z), 0 * tail(z) + EXACT_TAIL + torch.where(close, 0.0, 0.2)], -1)

    close = torch.arange(30) % 2 == 0  # actions with exactly the same expected loss
    good = posterior(MODEL, X, Near(), 2000, seed=seeded(5))
    decision = good.decide(loss)
    assert (good.verdict == Verdict.OK).all()
    assert (decision.verdict[~close] == Verdict.OK).all()
    assert (decision.verdict[close] == Verdict.CAUTION).double().mean() > 0.7  # 0.95 in the long run
    bad = posterior(MODEL, X, Near(0.15), 2000, seed=seeded(5))
    assert torch.equal(bad.decide(loss).verdict[~close] == Verdict.REFUSE, bad.verdict[~close] == Verdict.REFUSE)
    assert (bad.decide(loss).verdict >= bad.verdict).all()


def test_every_other_action_must_be_clearly_worse():
    def loss(z: Tensor) -> Tensor:
        return torch.stack([0 * tail(z), 0 * tail(z) + 0.05, 0.06 + 20 * (tail(z) - EXACT_TAIL)], -1)

    decision = posterior(MODEL, X, Near(), 1000, seed=seeded(5)).decide(loss)
    clear = decision.margin >= 2 * decision.margin_mcse  # of the action that looks second best
    assert clear.sum() > 3
    assert (decision.verdict[clear] == Verdict.CAUTION).double().mean() > 0.8


@pytest.mark.parametrize("n_states", [2, 3])
def test_a_rare_costly_state_that_no_draw_has_reached_makes_the_decision_uncertain(n_states):
    """At losses of 1000 and 0.3 a state of probability 5e-4 decides; a thousand draws often miss it."""
    model = PPCA(torch.eye(2, 1, dtype=torch.double), 1.0)
    x = torch.zeros(100, 2, dtype=torch.double)
    answer = posterior(model, x, model.posterior(x).detach(), 1000, seed=seeded(3))
    cut = 3.29 * 0.5**0.5

    def state(z: Tensor) -> Tensor:
        bad = z[..., 0] > cut
        rest = [~bad] if n_states == 2 else [~bad & (z[..., 0] > 0), z[..., 0] <= 0]
        return torch.stack([*rest, bad], -1).double()

    loss = torch.tensor([[*[0.0] * (n_states - 1), 1000.0], [0.3] * n_states])
    decision = answer.decide(loss, state)
    wrong = decision.action == 0
    assert wrong.sum() > 30
    assert (decision.verdict[wrong] == Verdict.CAUTION).all()
    torch.testing.assert_close(
        decision.margin_mcse[wrong], torch.full((100,), 2 * 1000 / 1000).double()[wrong]
    )  # no hit in 1000 draws
    assert (decision.expected_loss.mcse[:, 1] < 1e-12).all()  # it costs the same in every state
    cheap = answer.decide(loss.clamp_max(1.0), state)
    assert (cheap.action == 0).all()
    assert (cheap.verdict == Verdict.OK).all()


def test_few_draws_of_many_proposals_still_give_an_error():
    proposals = {name: Near() for name in "abc"} | {"rare": Near()}
    answer = posterior(MODEL, X, proposals, 19, shares={"a": 0.32, "b": 0.32, "c": 0.31, "rare": 0.05})
    assert torch.bincount(answer.source).tolist()[-1] == 1
    assert (answer.expect(tail).mcse > 0).all()


# -------------------------------------------------------------------------------------------- resampling, arviz
@pytest.mark.parametrize("smooth", [True, False])
def test_resampling_is_systematic_and_unbiased(smooth):
    """A particle is drawn floor or ceiling of n times its weight times, and n times its weight on average."""
    log_w = 2 * torch.randn(40, 3, generator=seeded(0)).double()
    index = torch.arange(40.0).reshape(40, 1, 1).expand(40, 3, 1)
    answer = Posterior(index, log_w, torch.zeros(40, dtype=torch.long), smooth=smooth)
    weight = torch.softmax(psis(log_w)[0] if smooth else log_w, 0)
    g, n = seeded(1), 20
    counts = []
    for _ in range(400):
        drawn = answer.resample(n, generator=g)
        assert drawn.shape == (n, 3, 1)
        counts.append(torch.nn.functional.one_hot(drawn[..., 0].long(), 40).sum(0).T)
    counts = torch.stack(counts).double()  # (400, 40, 3)
    assert (counts - n * weight).abs().max() < 1
    fraction = (n * weight).frac()
    varied = ((fraction > 0.05) & (fraction < 0.95)).nonzero().tolist()
    assert len(varied) > 20
    for i, j in varied:
        assert_mean(counts[:, i, j], n * weight[i, j].item(), rate=1e-7)
        with pytest.raises(AssertionError, match="standard errors"):
            assert_mean(counts[:, i, j] + 0.3, n * weight[i, j].item(), rate=1e-7)
    correlation = torch.corrcoef(
        torch.stack([counts[:, int(fraction[:, j].sub(0.5).abs().argmin()), j] for j in (0, 1)])
    )
    assert abs(correlation[0, 1]) < 0.25  # observations are resampled independently


def test_resampled_latents_have_the_posterior_mean():
    answer = posterior(MODEL, X, Near(2.0), 4000)
    drawn = answer.resample(4000, generator=seeded(6))
    torch.testing.assert_close(drawn.mean(0), answer.expect(lambda z: z).value, atol=0.01, rtol=0)
    with pytest.raises(SettingError, match="n=0 must be a whole number"):
        answer.resample(0, generator=seeded(6))


def test_resampling_accepts_one_observation_without_an_axis_and_named_tuples():
    answer = Posterior(torch.arange(50.0)[:, None], torch.zeros(50), torch.zeros(50, dtype=torch.long))
    assert sorted(answer.resample(50, generator=seeded(0))[:, 0].tolist()) == list(range(50))
    assert answer.log_evidence.item() == pytest.approx(0, abs=1e-12)
    pair = Pair(torch.arange(50.0)[:, None, None], -torch.arange(50.0)[:, None, None])
    drawn = Posterior(pair, torch.zeros(50, 1), answer.source).resample(7, generator=seeded(0))
    assert torch.equal(drawn.a, -drawn.b)
    assert drawn.a.shape == (7, 1, 1)


def test_to_arviz():
    answer = posterior(MODEL, X, Near(2.0), 600)
    data = answer.to_arviz()
    assert data.posterior["z"].shape == (1, 600, 30, 2)
    assert data.posterior["z"].dims == ("chain", "draw", "batch_0", "z_dim")
    diagnostics = data.importance_diagnostics
    assert diagnostics["log_weight"].shape == (600, 30)
    assert (diagnostics["khat"].to_numpy() == answer.khat.numpy()).all()
    assert (diagnostics["ess"].to_numpy() == answer.ess.numpy()).all()
    mean = torch.as_tensor(data.posterior["z"].mean(("chain", "draw")).to_numpy())
    torch.testing.assert_close(mean, answer.expect(lambda z: z).value, atol=0.05, rtol=0)  # without weights
    assert answer.to_arviz(40, generator=seeded(0)).posterior["z"].shape == (1, 40, 30, 2)


# -------------------------------------------------------------------------------------------- a user's module
class Dropping(nn.Module):
    """A decoder with dropout in training mode."""

    prior = StandardNormal(2)

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.drop = nn.Parameter(torch.randn(2, 3, generator=seeded(0))), nn.Dropout(0.3)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return TorchNormal(self.drop(z @ self.weight), 1.0).log_prob(x).sum(-1) + self.prior.log_prob(z)


@pytest.mark.parametrize("tolerance", [None, 0.3])
def test_modules_are_evaluated_not_trained(tolerance):
    """Dropout would also use the global random state, which a fixture checks."""
    model, x = Dropping(), torch.randn(4, 3, generator=seeded(2))
    q = Normal().make(x, 2, hidden=(4,), generator=seeded(0))
    q.encoder = nn.Sequential(q.encoder, nn.Dropout(0.3))
    trained = posterior(model, x, q, 200, tolerance=tolerance)
    assert model.training
    assert q.encoder[1].training
    torch.testing.assert_close(trained.log_w, posterior(model.eval(), x, q.eval(), 200, tolerance=tolerance).log_w)
    model.train()
    means = [expect(model, x, lambda z: model.drop(z @ model.weight), n=100, tolerance=0.3).value for _ in range(2)]
    assert torch.equal(*means)


# ---------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("tolerance", [None, 0.3])
def test_a_log_joint_of_wrong_shape_is_refused(tolerance):
    class Total(Dropping):
        def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
            return super().log_joint(x, z).sum()

    class Each(Dropping):
        def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
            return TorchNormal(z @ self.weight, 1.0).log_prob(x)

    x = torch.randn(4, 3, generator=seeded(2))
    q = Normal().make(x, 2, hidden=(4,), generator=seeded(0))
    for model, shape in ((Total(), r"\(\)"), (Each(), r"\(\d+, \d, 3\)")):
        with pytest.raises(ShapeError, match=f"log_joint returned shape {shape} for latents"):
            posterior(model, x, q, 100, tolerance=tolerance)


@pytest.mark.parametrize("tolerance", [None, 0.3])
def test_observations_of_another_float_type_than_the_model_are_refused(tolerance):
    model, x = Dropping(), torch.zeros(4, 3)
    message = r"x is torch.float64, the parameters of Dropping are torch.float32; pass x.float\(\)"
    with pytest.raises(DataError, match=message):
        posterior(model, x.double(), Prior(model.prior), 100, tolerance=tolerance)
    assert posterior(model, x, Prior(model.prior), np.int64(100)).z.shape == (100, 4, 2)


def test_bad_input_gets_the_named_error():
    answer = posterior(MODEL, X, Near(), 50)
    with pytest.raises(ShapeError, match=r"f returned \(30,\); it must .* one value per particle, shape \(50, 30\)"):
        answer.expect(lambda z: z.mean((0, -1)))
    with pytest.raises(ShapeError, match="f returned float; it must return one value per particle"):
        answer.expect(lambda z: 1.0)
    with pytest.raises(WeightError, match="values of f are not finite"):
        answer.expect(lambda z: z / 0)
    with pytest.raises(DataError, match=r"x of shape \(0, 5\) is empty"):
        posterior(MODEL, X[:0], Near(), 50)
    with pytest.raises(DataError, match="x is a list; pass a tensor"):
        posterior(MODEL, [[0.0]], Near(), 50)
    with pytest.raises(DataError, match="x holds 5 non-finite values"):
        posterior(MODEL, X[:1] * torch.nan, Near(), 50)
    with pytest.raises(SettingError, match="n=0 must be a whole number of at least 1"):
        posterior(MODEL, X, Near(), 0)
    with pytest.raises(SettingError, match="a mixture needs at least one component"):
        posterior(MODEL, X, {}, 50)


@pytest.mark.parametrize("tolerance", [None, 0.1])
def test_a_proposal_of_another_size_than_the_model_is_refused(tolerance):
    other = Near(model=PPCA(torch.ones(5, 3, dtype=torch.double), 1.0))
    for proposals in (other, {"three": other}, {"two": Near(), "three": other}):
        with pytest.raises(ShapeError, match=r"latents of (size \(3,\), the model's prior|different sizes)"):
            posterior(MODEL, X, proposals, 100, tolerance=tolerance)


def test_options_that_do_not_belong_together_are_refused():
    for options in ({"query": tail}, {"budget": 100}, {"rtol": 0.1}):
        with pytest.raises(SettingError, match="query=, rtol= and budget= belong to escalation; give a tolerance="):
            posterior(MODEL, X, Near(), 50, **options)
    for proposals, options in ((Near(), {}), ({"q": Near()}, {"tolerance": 0.1})):
        with pytest.raises(SettingError, match="shares= needs a mapping of several proposals and no tolerance="):
            posterior(MODEL, X, proposals, 100, shares={"q": 1.0}, **options)


def test_losses_of_wrong_shape_are_refused():
    answer = posterior(MODEL, X, Near(), 50)
    with pytest.raises(SettingError, match="at least two actions; the loss has one"):
        answer.decide(lambda z: z[..., :1])
    with pytest.raises(ShapeError, match=r"the loss gives \(\) for each particle; it must give one number per action"):
        answer.decide(lambda z: z[..., 0])  # otherwise observations would be taken for actions
    with pytest.raises(ShapeError, match=r"the loss gives \(2, 1\) for each particle"):
        answer.decide(lambda z: z.unsqueeze(-1))
    loss = torch.ones(2, 3)
    with pytest.raises(SettingError, match=r"a loss matrix \(actions, states\) needs `state`"):
        answer.decide(loss)
    with pytest.raises(ShapeError, match="the loss has 3 states, `state` returned 2"):
        answer.decide(loss, lambda z: torch.softmax(z, -1))
    with pytest.raises(SettingError, match="sums of probabilities over states differ from one by up to"):
        answer.decide(torch.ones(2, 2), lambda z: torch.softmax(z, -1) / 2)
