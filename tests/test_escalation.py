from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from checks import assert_within, chi_square_rate
from vaerdict.core import Draws, SettingError, ShapeError, WeightError
from vaerdict.diagnostics import Verdict
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal
from vaerdict.inference import Posterior, escalation, expect, posterior
from vaerdict.inference.assess import Assessment, island_mcse
from vaerdict.inference.escalation import STAGES
from vaerdict.models.ppca import PPCA
from vaerdict.noise import seeded
from vaerdict.proposals import Prior, Trainable

MODEL = PPCA(torch.randn(5, 2, generator=seeded(0), dtype=torch.double), 0.8).requires_grad_(False)
X = MODEL.simulate(60, generator=seeded(1))[0]
EXACT = MODEL.posterior(X)
SD = EXACT.covariance().diagonal(dim1=-2, dim2=-1).sqrt()


class Near(Trainable):
    """An encoder that knows the exact posterior, widened, and shifted by some of its standard deviations."""

    def __init__(self, inflate: float, shift: float = 0.0) -> None:
        super().__init__()
        self.inflate, self.shift = inflate, shift

    def forward(self, x: Tensor) -> Elliptical:
        q = MODEL.posterior(x, inflate=self.inflate)
        return replace(q, loc=q.loc + self.shift * q.root.apply(torch.ones_like(q.loc)))


def positive(z: Tensor) -> Tensor:
    return (z[..., 0] > 0).double()


def rungs(answer: Posterior) -> set[str]:
    assert answer.record is not None
    return set(answer.record.rung)


# ------------------------------------------------------------------------------------------ pPCA, where all is known
POOR = {"narrow and off": Near(0.3, 3.0), "far too narrow": Near(0.1), "wide and off": Near(9.0, 2.0), "none": {}}


@pytest.mark.parametrize("name", POOR)
def test_whatever_the_encoder_answers_are_within_tolerance_and_calibrated(name):
    answer = posterior(MODEL, X, POOR[name], 500, tolerance=0.06, generator=seeded(2))
    assert answer.record is not None
    assert (answer.verdict == Verdict.OK).all()
    assert rungs(answer) <= {"MIS", "REFINED"}
    mean = answer.expect(lambda z: z)
    assert (mean.mcse <= 0.0601 * SD * (1 + 0.2)).all()  # the spread it is measured in is itself an estimate
    assert_within(mean.value / SD, EXACT.loc / SD, torch.full_like(SD, 0.06), rate=1e-6)
    score = (mean.value - EXACT.loc) / mean.mcse
    assert 1e-6 < chi_square_rate(score) < 1 - 1e-4  # neither too sure nor too modest
    with pytest.raises(AssertionError, match="standard errors off"):
        assert_within(mean.value + 0.3 * SD, EXACT.loc, mean.mcse, rate=1e-6)


def test_a_good_proposal_answers_at_once():
    answer = posterior(MODEL, X, Near(1.05), 500, tolerance=0.06)
    assert answer.record is not None
    assert rungs(answer) == {"plugin"}
    assert answer.record.summary() == {"plugin": 60, "refused": 0}
    assert all(
        re.fullmatch(r"PSIS: k-hat -?\d\.\d\d, Monte-Carlo error 0\.\d+ within 0\.06", r) for r in answer.record.reason
    )
    fair = posterior(MODEL, X, Near(1.8), 1000, tolerance=0.06)
    assert rungs(fair) == {"PSIS"}  # weights that matter, and can be trusted


def test_the_first_proposal_is_asked_first_and_the_mixture_next():
    good, useless = Near(1.3), Near(0.1, 30.0)
    assert rungs(posterior(MODEL, X, {"good": good, "useless": useless}, 1000, tolerance=0.08)) <= {"plugin", "PSIS"}
    assert rungs(posterior(MODEL, X, {"useless": useless, "good": good}, 1000, tolerance=0.08)) == {"MIS"}


def test_the_prior_among_the_proposals_is_the_one_every_rung_adds():
    with_prior = posterior(MODEL, X, {"q": Near(0.1), "PRIOR": Prior(MODEL.prior)}, 500, tolerance=0.06)
    without = posterior(MODEL, X, {"q": Near(0.1)}, 500, tolerance=0.06)
    assert torch.equal(with_prior.log_w, without.log_w)


def test_a_proposal_made_for_these_observations_is_cut_to_those_that_still_climb():
    wide = torch.arange(60) % 3 == 0  # a third answer at once, the others have to climb
    scale = torch.where(wide, 1.05, 0.05).double().sqrt()[:, None, None]
    made = replace(EXACT, root=type(EXACT.root)(EXACT.root.tril * scale))
    answer = posterior(MODEL, X, made, 500, tolerance=0.06, generator=seeded(2))
    assert answer.record is not None
    assert (answer.verdict == Verdict.OK).all()
    assert [r == "plugin" for r in answer.record.rung] == wide.tolist()
    mean = answer.expect(lambda z: z)
    assert_within(mean.value, EXACT.loc, mean.mcse, rate=1e-6)


def test_costs_are_counted():
    n = 500
    easy, hard = (posterior(MODEL, X, q, n, tolerance=0.06).record for q in (Near(1.05), Near(0.1)))
    assert easy is not None
    assert hard is not None
    # 16 scouts take a few Newton steps of 1 + 2 backward passes; the draws of scouts and proposal are n each
    assert (easy.cost >= 2 * n + 16 * 3).all()
    assert (easy.cost <= 2 * n + 16 * 3 * 20).all()
    assert (hard.cost >= 4 * n + 2 * 16 * 3).all()  # and the mixture, and the refined one with scouts of its own
    none = posterior(MODEL, X, {}, n, tolerance=0.06).record
    assert none is not None
    assert (none.cost < easy.cost).all()


def test_the_same_seed_gives_the_same_record():
    first, again = (posterior(MODEL, X, Near(0.3, 3.0), 300, tolerance=0.1, generator=seeded(4)) for _ in range(2))
    other = posterior(MODEL, X, Near(0.3, 3.0), 300, tolerance=0.1, generator=seeded(5))
    assert torch.equal(first.z, again.z)
    assert torch.equal(first.log_w, again.log_w)
    assert str(first.record) == str(again.record)
    assert not torch.equal(first.log_w, other.log_w)


def test_expect_answers_with_all_that_speaks_for_it():
    heard: list[tuple[int, int, str]] = []
    answer = expect(MODEL, X, positive, Near(0.3, 3.0), 1000, tolerance=0.03, progress=lambda *args: heard.append(args))
    exact = MODEL.tail_probability(X, torch.zeros(1))[:, 0]
    assert_within(answer.value, exact, torch.full_like(exact, 0.03), rate=1e-6)
    assert (answer.mcse <= 0.03).all()
    assert (answer.verdict == Verdict.OK).all()
    assert len(answer.rung) == len(answer.reason) == len(answer.cost) == 60
    assert set(answer.rung) <= set(STAGES)
    assert [number for number, _, _ in heard] == list(range(1, len(heard) + 1))
    assert heard[0] == (1, len(heard), "PSIS: 60 observations")
    assert heard[-1][2] == "SMC: 0 observations"


# ------------------------------------------------------------------------------------------------ two modes
class Folded:
    """x_0 = |z_0| + 0.1 e, x_1 = z_1 + 0.3 e: the sign of z_0 is never seen, so P(z_0 > 0 | x) is one half."""

    prior = StandardNormal(2)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        residual = torch.stack([(x[..., 0] - z[..., 0].abs()) / 0.1, (x[..., 1] - z[..., 1]) / 0.3], -1)
        return -0.5 * residual.square().sum(-1) + self.prior.log_prob(z)


class PositiveHalf(Trainable):
    """An encoder that has learned one of the two modes, and that one well."""

    def forward(self, x: Tensor) -> Elliptical:
        loc = x.clamp_min(torch.tensor([0.0, -torch.inf])) / torch.tensor([1.01, 1.09])
        return Elliptical(loc, Diagonal(torch.tensor([0.11, 0.32]).to(loc).expand_as(loc)))


def folded(n: int) -> Tensor:
    z, e = torch.randn(2, n, 2, generator=seeded(6), dtype=torch.double)
    return torch.stack([z[:, 0].abs() + 0.1 * e[:, 0], z[:, 1] + 0.3 * e[:, 1]], -1)


def wrong_and_certified(x: Tensor) -> tuple[int, int]:
    """Answers off by more than a quarter that were certified, and how many were."""
    answer = expect(Folded(), x, positive, PositiveHalf(), 500, tolerance=0.05, generator=seeded(7))
    certified = answer.verdict == Verdict.OK
    return int((certified & ((answer.value - 0.5).abs() > 0.25)).sum()), int(certified.sum())


def test_a_lost_mode_does_not_show_in_the_weights():
    x = folded(120)
    x = x[x[:, 0] > 0.5]  # modes that do not touch
    answer = posterior(Folded(), x, PositiveHalf(), 500)
    assert len(x) > 60
    assert (answer.khat < 0.5).all()
    assert (answer.ess > 350).all()
    assert (answer.verdict == Verdict.OK).all()
    assert (answer.expect(positive).value - 0.5).min() > 0.499


def test_escalation_never_certifies_half_a_posterior():
    """16 scouts from the prior all land on the encoder's side once in 2^16 times: 0.2 % in 120 observations."""
    wrong, certified = wrong_and_certified(folded(120))
    assert wrong == 0
    assert certified > 100


def test_without_the_evidence_of_others_it_would(monkeypatch):
    nothing = property(lambda self: torch.full_like(self.log_evidence, -torch.inf))
    monkeypatch.setattr(Assessment, "log_evidence_low", nothing)
    wrong, _ = wrong_and_certified(folded(120))
    assert wrong > 60


def test_what_was_missed_is_said():
    x = folded(120)
    x = x[x[:, 0] > 0.5][:10]
    answer = expect(Folded(), x, positive, PositiveHalf(), 500, tolerance=0.05, budget=1400, generator=seeded(7))
    assert (answer.verdict == Verdict.REFUSE).all()
    said = "the budget of 1400 evaluations ends before MIS; PSIS misses posterior mass that other draws have found"
    assert answer.reason == [said] * 10


def test_the_unit_of_the_question_does_not_matter():
    """A query and its tolerance a hundred times as large must be judged as before: evidence has no task."""
    x = folded(40)
    x = x[x[:, 0] > 0.5]
    plain = expect(Folded(), x, positive, PositiveHalf(), 500, tolerance=0.05, generator=seeded(8))
    scaled = expect(Folded(), x, lambda z: 100 * positive(z), PositiveHalf(), 500, tolerance=5.0, generator=seeded(8))
    assert scaled.rung == plain.rung
    assert torch.equal(scaled.verdict, plain.verdict)
    torch.testing.assert_close(scaled.value, 100 * plain.value)


# --------------------------------------------------------------------------------------- errors that hide
class Plain:
    """The posterior is N(0, 1), whatever x says."""

    prior = StandardNormal(1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return self.prior.log_prob(z) + 0 * x[..., 0]


def test_an_event_that_no_draw_has_hit_is_not_certain():
    x = torch.zeros(4, 1, dtype=torch.double)
    answer = expect(Plain(), x, lambda z: (z[..., 0] > 4).double(), n=500, tolerance=1e-6, generator=seeded(0))
    assert (answer.mcse > 1e-3).all()
    assert (answer.verdict == Verdict.REFUSE).all()
    assert "times the draws would do" in answer.reason[0]


def test_a_query_with_a_heavier_tail_than_the_weights_is_seen_through():
    """E exp(0.8 z^2) is infinite, but any draws have a mean, and an error within so lavish a tolerance."""
    x = torch.zeros(12, 1, dtype=torch.double)
    answer = expect(Plain(), x, lambda z: (0.8 * z[..., 0] ** 2).exp(), n=1000, tolerance=1e9, generator=seeded(0))
    # each of three rungs estimates a k-hat, and the least of three noisy ones may pass
    assert (answer.verdict == Verdict.REFUSE).double().mean() > 0.6
    tame = expect(Plain(), x, lambda z: (0.1 * z[..., 0] ** 2).exp(), n=1000, tolerance=0.5, generator=seeded(0))
    assert (tame.verdict == Verdict.OK).all()


# ----------------------------------------------------------------------------------------------- a ring: SMC
class Ring:
    """x is the distance of z from (1/2, 0), up to noise: a thin ring, which no ellipse fits."""

    prior = StandardNormal(2)
    sd = 0.02

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        radius = (z - torch.tensor([0.5, 0.0]).to(z)).norm(dim=-1)
        return -0.5 * ((x[..., 0] - radius) / self.sd).square() + self.prior.log_prob(z)

    def exact(self, x: Tensor, f) -> Tensor:
        """Posterior mean of f by quadrature in polar coordinates about the centre. Shapes: ``(m, 1) -> (m, out)``."""
        radius = x + self.sd * torch.linspace(-6, 6, 121, dtype=x.dtype)
        angle = torch.arange(400, dtype=x.dtype) * 2 * math.pi / 400
        r, a = radius.T[:, None], angle[None, :, None]
        z = torch.stack([0.5 + r * a.cos(), r * a.sin()], -1).flatten(0, 1)
        weight = torch.softmax(self.log_joint(x, z) + r.expand(121, 400, len(x)).flatten(0, 1).log(), 0)
        return (weight.unsqueeze(-1) * f(z)).sum(0)


def moments(z: Tensor) -> Tensor:
    return torch.stack([z[..., 0], z[..., 1], z[..., 1].square()], -1)


@pytest.fixture(scope="module")
def ring() -> tuple[Tensor, Posterior]:
    x = torch.linspace(0.8, 2.2, 40, dtype=torch.double).unsqueeze(-1)
    return x, posterior(Ring(), x, {}, 1024, tolerance=0.15, query=moments, generator=seeded(8))


def test_quadrature_itself():
    """At radius x the angle has density exp(-x cos(a) / 2), whose mean cosine is -I_1(x/2) / I_0(x/2)."""
    x = torch.tensor([[0.8], [2.0]], dtype=torch.double)
    mean = Ring().exact(x, moments)
    cosine = -torch.special.i1(x[:, 0] / 2) / torch.special.i0(x[:, 0] / 2)
    torch.testing.assert_close(mean[:, 0], 0.5 + x[:, 0] * cosine, atol=1e-3, rtol=0)
    assert mean[:, 1].abs().max() < 1e-9


def test_sequential_monte_carlo_answers_where_no_ellipse_fits(ring):
    x, answer = ring
    assert answer.record is not None
    by_smc = torch.tensor([r == "SMC" for r in answer.record.rung]) & (answer.verdict == Verdict.OK)
    assert by_smc.sum() > 20
    assert (answer.record.islands[by_smc] == 16).all()
    estimate, exact = answer.expect(moments), Ring().exact(x, moments)
    assert (estimate.mcse[by_smc] <= 0.15).all()
    torch.testing.assert_close(answer.record.mcse[by_smc].double(), estimate.mcse[by_smc].amax(-1), rtol=1e-5, atol=0)
    # from 16 islands the error is itself known to a fifth: Student's t with 15 degrees of freedom, not a normal
    score = ((estimate.value - exact) / estimate.mcse)[by_smc]
    assert 0.6 < score.square().mean() < 1.7  # 15/13 in the long run
    assert score.abs().max() < 6.5
    assert (answer.record.cost[by_smc] > 10 * 1024).all()
    for i in by_smc.nonzero().flatten().tolist():
        assert re.fullmatch(r"SMC: (k-hat -?\d\.\d+, )?Monte-Carlo error 0\.\d+ within 0\.15", answer.record.reason[i])


def test_no_part_of_a_ring_is_taken_for_the_whole(monkeypatch):
    """Draws around the modes see a piece of the ring, agree on it, and have small errors and k-hats."""
    ring = Ring()
    ring.sd = 0.01
    x = torch.linspace(0.8, 2.2, 40, dtype=torch.double).unsqueeze(-1)
    exact = ring.exact(x, lambda z: z)

    def far_off() -> int:
        answer = expect(ring, x, lambda z: z, None, 512, tolerance=0.2, budget=10_000, generator=seeded(0))  # no SMC
        return int(((answer.verdict == Verdict.OK) & ((answer.value - exact).abs().amax(-1) > 0.5)).sum())

    assert far_off() == 0
    monkeypatch.setattr(escalation, "_SHAPED", 0.0)
    assert far_off() > 1  # but for their weights they would be believed


def test_after_smc_a_query_without_a_mean_is_refused_all_the_same(ring):
    _, answer = ring
    assert answer.record is not None
    by_smc = (answer.record.islands > 0) & (answer.verdict == Verdict.OK)

    def heavy(z: Tensor) -> Tensor:
        return z[..., 1].abs().clamp_min(1e-9) ** -2.0  # infinite where the ring crosses the axis

    assert (answer.verdict_on(heavy)[by_smc] == Verdict.REFUSE).double().mean() > 0.9
    assert (answer.verdict_on(moments)[by_smc] == Verdict.OK).all()
    decision = answer.decide(lambda z: torch.stack([heavy(z), torch.full_like(z[..., 0], 1e9)], -1))
    assert (decision.verdict[by_smc] == Verdict.REFUSE).double().mean() > 0.9


def test_island_errors_are_those_of_independent_groups():
    """The standard error of 16 means of 40 numbers is that of 640, whatever the weights inside."""
    f = torch.randn(640, 50, 2, generator=seeded(9), dtype=torch.double)
    same = island_mcse(f, torch.zeros(640, 50), 16)
    assert same.shape == (50, 2)
    torch.testing.assert_close(same.mean(), torch.tensor(640**-0.5).double(), rtol=0.05, atol=0)
    dependent = f[:16].repeat(40, 1, 1)  # each island forty copies of one draw
    torch.testing.assert_close(island_mcse(dependent, torch.zeros(640, 50), 16).mean().item(), 0.25, rtol=0.05, atol=0)
    scaled = island_mcse(3 * f + 7, torch.full((640, 50), -900.0), 16)
    torch.testing.assert_close(scaled, 3 * same)


# ---------------------------------------------------------------------------------------------------- refusals
def test_an_unreachable_tolerance_is_refused_with_what_it_would_take():
    answer = expect(MODEL, X[:4], lambda z: z, Near(1.05), 128, tolerance=1e-3)
    assert (answer.verdict == Verdict.REFUSE).all()
    for reason, mcse in zip(answer.reason, answer.mcse.amax(-1).tolist(), strict=True):
        found = re.match(r"[A-Z]+: Monte-Carlo error \S+ exceeds 0\.001; about (\d+) times the draws would do", reason)
        assert found, reason
        assert 0.3 < int(found[1]) / (mcse / 1e-3) ** 2 < 3
    assert (answer.cost > 10 * 128).all()


def test_a_budget_ends_the_climb_and_says_so():
    answer = expect(MODEL, X, lambda z: z, Near(0.1), 500, tolerance=0.06, budget=1800)
    assert (answer.verdict == Verdict.REFUSE).all()
    why = "(PSIS|MIS).*(is not reliable|misses posterior mass|times the draws would do)"
    said = f"the budget of 1800 evaluations ends before (MIS|REFINED); {why}.*"
    assert all(re.fullmatch(said, reason) for reason in answer.reason), answer.reason
    enough = expect(MODEL, X, lambda z: z, Near(0.1), 500, tolerance=0.06, budget=5000)
    assert (enough.verdict == Verdict.OK).all()


def test_a_budget_that_pays_for_nothing_is_refused():
    message = r"budget=900 evaluations for each observation do not pay for PSIS, the first rung, which takes 1000"
    with pytest.raises(SettingError, match=message):
        expect(MODEL, X, positive, Near(1.05), 500, budget=900)
    with pytest.raises(SettingError, match="do not pay for REFINED, the first rung"):
        expect(MODEL, X, positive, None, 500, budget=10)


class Sensor:
    """Task noise about the latent, in single precision: 1e25 overflows wherever the latent is."""

    prior = StandardNormal(1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return -0.5 * (x - z).square().sum(-1) + self.prior.log_prob(z)


def blind(x: Tensor) -> Elliptical:
    """A proposal made for these observations, of which the last got no location."""
    loc = (x / 2).masked_fill(x > 1e20, torch.nan)
    return Elliptical(loc, Diagonal(torch.ones_like(x)), None)


@pytest.mark.parametrize("encoder", [False, True])
def test_one_impossible_observation_is_refused_and_the_others_answered(encoder):
    x = torch.tensor([[0.1], [1e25], [0.5]])
    proposals = {"blind": blind(x)} if encoder else {}
    answer = posterior(Sensor(), x, proposals, 512, tolerance=0.1, generator=seeded(0))
    assert answer.record is not None
    assert Verdict.names(answer.verdict) == ["OK", "REFUSE", "OK"]
    assert answer.record.rung[1] == ""
    tried = "REFINED gave no usable weights; IMPROVED gave no usable weights"
    assert answer.record.reason[1].endswith(f"{tried}; SMC did not reach the posterior")
    estimate = answer.expect(lambda z: z)
    assert_within(estimate.value[[0, 2]], x[[0, 2]] / 2, estimate.mcse[[0, 2]], rate=1e-6)
    for blank in (estimate.value, estimate.mcse, estimate.khat, answer.z[0]):
        assert blank.reshape(3, -1).isnan().any(-1).tolist() == [False, True, False]
    assert (estimate.ess[1], answer.ess[1], answer.log_evidence[1]) == (0, 0, -torch.inf)
    squares = answer.decide(lambda z: torch.cat([z.square(), (z - 2).square()], -1))
    states = answer.decide(torch.tensor([[0.0, 0.0], [1.0, 2.0]]), lambda z: torch.cat([z > 0, z <= 0], -1).double())
    for decision in (squares, states):
        assert Verdict.names(decision.verdict) == ["OK", "REFUSE", "OK"]
        assert decision.margin.isnan().tolist() == [False, True, False]


def test_an_impossible_observation_alone_is_refused_too():
    answer = expect(Sensor(), torch.tensor([[1e25]]), lambda z: z, n=64)
    assert Verdict.names(answer.verdict) == ["REFUSE"]
    assert answer.value.isnan().all()


def test_without_a_tolerance_the_impossible_observation_is_named():
    x = torch.tensor([[0.1], [1e25], [0.5]])
    with pytest.raises(WeightError, match=r"1 observations have no particle with positive weight \(at 1\)"):
        posterior(Sensor(), x, Prior(Sensor.prior), 100)


def test_an_infinite_khat_stays_infinite_and_is_said_so():
    """Weights of which one outweighs the rest while their tail looks light."""

    class Spike(Trainable):
        def draw(self, x: Tensor, k: int, *, generator: torch.Generator) -> Draws:
            z, log_q = self(x).draw(x, k, generator=generator)
            return Draws(z, torch.where(log_q == log_q.amax(0), log_q - 6.5, log_q))

        def forward(self, x: Tensor) -> Elliptical:
            return Elliptical(torch.zeros_like(x), Diagonal(torch.full_like(x, 2.0)), None)

    x = torch.zeros(20, 1, dtype=torch.double)
    answer = expect(Plain(), x, lambda z: z, Spike(), 500, budget=1001)
    assert answer.khat.isposinf().sum() > 10
    for khat, reason in zip(answer.khat.tolist(), answer.reason, strict=True):
        assert f"PSIS: k-hat {khat:.2f} with ESS" in reason
        assert len(reason) < 120


def test_latents_in_a_named_tuple_are_refused():
    class Pair(NamedTuple):
        a: Tensor
        b: Tensor

    class Both:
        event_shape = torch.Size(())

        def sample(self, shape: torch.Size) -> Pair:
            return Pair(torch.randn(*shape, 1), torch.randn(*shape, 1))

        def log_prob(self, z: Pair) -> Tensor:
            return -0.5 * (z.a.square() + z.b.square()).sum(-1)

    class Model:
        prior = Both()

        def log_joint(self, x: Tensor, z: Pair) -> Tensor:
            return self.prior.log_prob(z) - 0.5 * (x - z.a - z.b).square().sum(-1)

    x = torch.zeros(3, 1)
    assert posterior(Model(), x, Prior(Model.prior), 200).log_w.shape == (200, 3)
    with pytest.raises(ShapeError, match=r"latents are a Pair; escalation moves one tensor .* Concatenate them"):
        expect(Model(), x, lambda z: z.a[..., 0])


def test_bad_questions_are_refused():
    with pytest.raises(SettingError, match=r"tolerance=0 must be positive"):
        posterior(MODEL, X, Near(1.05), 500, tolerance=0)
    with pytest.raises(SettingError, match="n=63 draws are too few to escalate with; use 64 or more"):
        posterior(MODEL, X, Near(1.05), 63, tolerance=0.1)
    assert posterior(MODEL, X, Near(1.05), 64, tolerance=0.5).z.shape == (64, 60, 2)
    with pytest.raises(ShapeError, match=r"f of shape \(2,\) must begin with the shape of log_w, \(500, 60\)"):
        expect(MODEL, X, lambda z: z.mean((0, 1)), Near(1.05), 500)
