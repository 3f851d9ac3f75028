"""Escalation: which stage answers, at what cost, with which error and verdict, and what is refused and why."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.distributions import Independent, Uniform

from checks import assert_within, chi_square_rate
from inference_toys import MODEL, Folded, Modes, Near, Plain
from vaerdict import diagnostics
from vaerdict.core import Estimate, SettingError, ShapeError, WeightError
from vaerdict.diagnostics import Verdict
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal
from vaerdict.inference import Answer, Posterior, blocks, escalation, expect, posterior, sampling
from vaerdict.inference.sampling import ADAPTED, MAX_GROWTH, REFINED, SMC, STAGES, TILTED
from vaerdict.noise import Sobol, seeded
from vaerdict.proposals import Prior, Trainable

X = MODEL.simulate(60, generator=seeded(1))[0]
EXACT = MODEL.posterior(X)
SD = EXACT.covariance().diagonal(dim1=-2, dim2=-1).sqrt()
ORIGIN = torch.zeros(20, 1, dtype=torch.double)


def positive(z: Tensor) -> Tensor:
    return (z[..., 0] > 0).double()


def stages(answer: Posterior | Answer) -> set[str]:
    record = answer.record if isinstance(answer, Posterior) else answer
    assert record is not None
    return set(record.stage)


def ok(answer: Posterior | Answer) -> Tensor:
    return answer.verdict == Verdict.OK


# -------------------------------------------------------------------------------- pPCA, whose posterior is known
PROPOSALS = {
    "good": Near(1.05),
    "narrow and off": Near(0.3, 3.0),
    "far too narrow": Near(0.1),
    "wide and off": Near(9.0, 2.0),
    "none": {},
}


@pytest.mark.parametrize("name", PROPOSALS)
def test_answers_are_within_tolerance_and_calibrated_for_any_encoder(name):
    answer = posterior(MODEL, X, PROPOSALS[name], 500, tolerance=0.12, seed=seeded(2))
    assert ok(answer).all()
    assert stages(answer) == {REFINED}
    mean = answer.expect(lambda z: z)
    assert (2 * mean.mcse <= 0.12 * SD * (1 + 0.2)).all()  # the standard deviations are estimated too
    assert_within(mean.value / SD, EXACT.loc / SD, torch.full_like(SD, 0.06), rate=1e-6)
    score = (mean.value - EXACT.loc) / mean.mcse
    assert 1e-6 < chi_square_rate(score) < 1 - 1e-4  # errors neither too small nor too large
    with pytest.raises(AssertionError, match="standard errors off"):
        assert_within(mean.value + 0.3 * SD, EXACT.loc, mean.mcse, rate=1e-6)


def test_a_conjugate_gaussian_is_answered_by_default():
    x = MODEL.simulate(100, generator=seeded(11))[0]
    answer = expect(MODEL, x, lambda z: z)
    assert ok(answer).all()
    assert (2 * answer.mcse <= 0.02).all()
    assert_within(answer.value, MODEL.posterior(x).loc, answer.mcse, rate=1e-6)
    assert (answer.scope.modes == 1).all()
    assert (answer.scope.alone == 0).all()
    assert answer.scope.basin.tolist() == pytest.approx([0.17] * 100, abs=0.005)


def test_a_prior_among_the_proposals_is_not_added_twice():
    with_prior = posterior(MODEL, X, {"q": Near(0.1), "PRIOR": Prior(MODEL.prior)}, 500, tolerance=0.2)
    without = posterior(MODEL, X, {"q": Near(0.1)}, 500, tolerance=0.2)
    assert torch.equal(with_prior.log_w, without.log_w)


def test_a_proposal_made_for_these_observations_is_restricted_to_the_open_ones():
    """Some observations need more draws than others, so later draws are for a part of them."""
    wide = torch.arange(60) % 3 == 0
    scale = torch.where(wide, 1.05, 0.05).double().sqrt()[:, None, None]
    local = replace(EXACT, root=type(EXACT.root)(EXACT.root.tril * scale))
    answer = posterior(MODEL, X, local, 500, tolerance=0.05, query=positive, seed=seeded(2))
    assert answer.record is not None
    assert ok(answer).all()
    assert len(set(answer.record.draws.tolist())) > 1
    mean = answer.expect(lambda z: z)
    assert_within(mean.value, EXACT.loc, mean.mcse, rate=1e-6)


def test_costs_are_counted():
    n, searches = 500, 25
    record = posterior(MODEL, X, {}, n, tolerance=0.2, seed=seeded(0)).record
    assert record is not None
    # 1024 candidates, a few Newton steps of 1 + 2 backward passes per search, and n draws
    assert (record.scope.searches == searches).all()
    assert (record.cost >= 1024 + n + searches * 3).all()
    assert (record.cost <= 1024 + n + searches * 3 * 20).all()


def test_the_same_seed_gives_the_same_record():
    first, again = (posterior(MODEL, X, Near(0.3, 3.0), 300, tolerance=0.2, seed=seeded(4)) for _ in range(2))
    other = posterior(MODEL, X, Near(0.3, 3.0), 300, tolerance=0.2, seed=seeded(5))
    assert torch.equal(first.z, again.z)
    assert torch.equal(first.log_w, again.log_w)
    assert str(first.record) == str(again.record)
    assert not torch.equal(first.log_w, other.log_w)


def test_expect_returns_the_answer_with_its_evidence():
    calls: list[tuple[int, int, str]] = []
    answer = expect(MODEL, X, positive, Near(0.3, 3.0), 1000, tolerance=0.06, progress=lambda *args: calls.append(args))
    exact = MODEL.tail_probability(X, torch.zeros(1))[:, 0]
    assert_within(answer.value, exact, torch.full_like(exact, 0.03), rate=1e-6)
    assert (2 * answer.mcse <= 0.06).all()
    assert ok(answer).all()
    assert len(answer.stage) == len(answer.reason) == len(answer.cost) == 60
    assert stages(answer) <= set(STAGES)
    assert [number for number, _, _ in calls] == list(range(1, len(STAGES) + 1))
    assert calls[0] == (1, len(STAGES), "REFINED: 60 observations")
    assert calls[-1][2] == "SMC: 0 observations"
    pattern = (
        r"(REFINED|TILTED): (k-hat -?\d\.\d\d, )?twice the error is \S+ of the tolerance with \d+ draws"
        r"(, \d+\.\d effective draws inside the event)?; 1 mode found by 25 searches, 0 of which ended alone; "
        r"a mode reached from less than 17% of the prior may be missing"
    )
    assert all(re.fullmatch(pattern, reason) for reason in answer.reason), answer.reason


# ------------------------------------------------------------------------------------------- number of draws
def test_draws_grow_until_twice_the_error_is_within_the_tolerance():
    answers = [expect(MODEL, X, lambda z: z, None, 256, tolerance=t, seed=seeded(3)) for t in (0.2, 0.06, 0.03)]
    for answer, tolerance in zip(answers, (0.2, 0.06, 0.03), strict=True):
        assert ok(answer).all()
        assert (2 * answer.mcse <= tolerance).all()
        assert_within(answer.value, EXACT.loc, answer.mcse, rate=1e-6)
    assert (answers[0].draws == 256).all()
    assert (answers[1].draws <= answers[2].draws).all()
    # errors fall as n^-1/2; the numbers of draws are multiples of n that are up to 1.5 apart, planned 1.15 too large
    needed = 256 * (2 * answers[0].mcse.amax(-1) / 0.03) ** 2
    assert ((answers[2].draws > 0.5 * needed) & (answers[2].draws < 4 * needed)).all()
    assert all(f"with {n} draws" in r for n, r in zip(answers[2].draws.tolist(), answers[2].reason, strict=True))


def test_draws_grow_no_further_than_sixteen_times_n():
    """The mean of N(0, 1) has twice its error below 0.056 with 1300 draws or a few more, that is 10 times n."""
    enough = expect(Plain(), ORIGIN, lambda z: z, None, 128, tolerance=0.056, seed=seeded(3))
    too_few = expect(Plain(), ORIGIN, lambda z: z, None, 128, tolerance=0.02, seed=seeded(3))
    assert MAX_GROWTH == 16
    assert (enough.draws >= 12 * 128).sum() > 10
    assert ok(enough).sum() > 10
    assert (too_few.verdict == Verdict.REFUSE).all()
    assert max(enough.draws.max(), too_few.draws.max()) <= 16 * 128


def test_the_larger_of_the_two_tolerances_counts():
    def shifted(z: Tensor) -> Tensor:
        return z + 10

    relative = expect(MODEL, X, shifted, n=256, tolerance=1e-4, rtol=0.02, seed=seeded(3))
    assert ok(relative).all()
    assert (2 * relative.mcse <= 0.02 * relative.value).all()
    assert (relative.mcse.amax(-1) > 1e-3).all()
    absolute = expect(MODEL, X, shifted, n=256, tolerance=0.2, rtol=1e-6, seed=seeded(3))
    torch.testing.assert_close(absolute.value, expect(MODEL, X, shifted, n=256, tolerance=0.2).value, atol=0.2, rtol=0)
    assert ok(absolute).all()


def test_an_unreachable_tolerance_is_refused_with_the_number_of_draws_it_needs():
    answer = expect(MODEL, X[:8], lambda z: z, Near(1.05), 256, tolerance=1e-3)
    assert (answer.verdict == Verdict.REFUSE).all()
    for reason, mcse, draws in zip(answer.reason, answer.mcse.amax(-1).tolist(), answer.draws.tolist(), strict=True):
        match = re.match(r"[A-Z]+: twice the error is \S+ times the tolerance; use about (\d+) times n=256", reason)
        assert match, reason
        assert 0.3 < int(match[1]) * 256 / draws / (2 * mcse / 1e-3) ** 2 < 3


def test_a_budget_is_kept_and_ends_escalation_with_a_reason():
    answer = expect(MODEL, X, lambda z: z, Near(0.1), 500, tolerance=0.02, budget=2000, seed=seeded(0))
    assert (answer.cost <= 2000).all()
    assert (answer.verdict == Verdict.REFUSE).all()
    pattern = r"REFINED: twice the error is \S+ times.*; the budget of 2000 evaluations ends before TILTED"
    assert all(re.fullmatch(pattern, reason) for reason in answer.reason), answer.reason
    enough = expect(MODEL, X, lambda z: z, Near(0.1), 500, tolerance=0.02, budget=10_000, seed=seeded(0))
    assert (enough.cost <= 10_000).all()
    assert ok(enough).all()
    with pytest.raises(
        SettingError, match=r"budget=400 evaluations per observation do not cover n=500 draws; raise it"
    ):
        expect(MODEL, X, positive, Near(1.05), 500, budget=400)


# -------------------------------------------------------------------------------------------- Sobol points
def test_errors_with_sobol_points_are_calibrated_and_smaller():
    """120 scores from 16 randomisations, Student's t with 15 degrees of freedom: variance 15/13, hence 0.9 to 1.4."""
    net, iid = (
        posterior(MODEL, X, {}, 1024, tolerance=0.2, seed=g).expect(lambda z: z) for g in (Sobol(seeded(5)), seeded(5))
    )
    score = (net.value - EXACT.loc) / net.mcse
    # 15/13 +- 0.16 for 120 independent scores: outside once in 10,000 runs
    assert 0.6 < score.square().mean() < 1.9
    assert (net.mcse.median() / iid.mcse.median()) < 0.5
    assert (net.value - EXACT.loc).square().mean().sqrt() < 0.5 * (iid.value - EXACT.loc).square().mean().sqrt()


# --------------------------------------------------------------------------- what is reported is what was judged
def both(z: Tensor) -> Tensor:
    return torch.cat([z, z.square(), positive(z).unsqueeze(-1)], -1)


JUDGED = {
    "n draws": (1.0, seeded),
    "grown": (0.1, seeded),
    "Sobol": (1.0, lambda seed: Sobol(seeded(seed))),
    "Sobol, grown": (0.06, lambda seed: Sobol(seeded(seed))),
    "refused": (1e-4, seeded),
}


def judged_and_reported(case: str) -> tuple[Tensor, Tensor]:
    """The errors by which escalation judged a query, and those that `Posterior` and `expect` report for it."""
    tolerance, source = JUDGED[case]
    uneven = {"wide": Near(4.0, 1.0), "narrow": Near(0.5, 1.0)}
    particles = posterior(MODEL, X[:20], uneven, 200, tolerance=tolerance, query=both, seed=source(3))
    record, estimate = particles.record, particles.expect(both)
    answer = expect(MODEL, X[:20], both, uneven, 200, tolerance=tolerance, seed=source(3))
    assert record is not None
    assert ok(particles).any() != (case == "refused")
    assert "grown" not in case or len(set(record.draws.tolist())) > 1
    for reported, judged in ((answer.mcse, record.mcse), (answer.value, record.value), (estimate.value, record.value)):
        torch.testing.assert_close(reported, judged, rtol=1e-12, atol=0)
    torch.testing.assert_close(particles.ess, record.ess, rtol=1e-9, atol=0)
    assert torch.equal(record.khat, answer.khat)
    assert torch.equal(particles.verdict_on(both)[ok(particles)], record.verdict[ok(particles)])
    return record.mcse, estimate.mcse


@pytest.mark.parametrize("case", JUDGED)
def test_the_reported_error_is_the_one_an_answer_was_judged_by(case):
    judged, reported = judged_and_reported(case)
    torch.testing.assert_close(reported, judged, rtol=1e-12, atol=0)


def smoothed_error_only(self: Posterior, f) -> Estimate:
    """An expectation whose error is that of the smoothed weights, as if they hid nothing."""
    return self.assess(f).estimate._replace(mcse=diagnostics.mcse_snis(f(self.z), diagnostics.psis(self.log_w)[0]))


@pytest.mark.parametrize("case", JUDGED)
def test_another_rule_for_the_reported_error_would_be_noticed(case, monkeypatch):
    monkeypatch.setattr(Posterior, "expect", smoothed_error_only)
    judged, reported = judged_and_reported(case)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(reported, judged, rtol=1e-12, atol=0)


# ------------------------------------------------------------------------------------------------ confirmation
def test_a_confirmed_answer_is_the_first_at_twice_the_cost():
    once, twice = (expect(MODEL, X, lambda z: z, n=256, tolerance=0.2, confirm=c) for c in (False, True))
    assert torch.equal(once.value, twice.value)
    assert ok(twice).all()
    assert (twice.cost >= 1.5 * once.cost).all()
    assert twice.reason == once.reason


def test_a_second_answer_that_differs_is_a_refusal(monkeypatch):
    """The second answer to the first observation is off by half a standard deviation, that to the second refused."""
    records = []

    def second_differs(*args, **kwargs):
        record, groups = escalation.escalate(*args, **kwargs)
        if records:
            record.value[0] += 0.5
            record.verdict[1], record.reason[1] = Verdict.REFUSE, "for a test"
        records.append(record)
        return record, groups

    monkeypatch.setattr(blocks, "escalate", second_differs)
    answer = expect(MODEL, X[:3], lambda z: z, n=256, tolerance=0.2, confirm=True)
    assert len(records) == 2
    assert Verdict.names(answer.verdict) == ["REFUSE", "REFUSE", "OK"]
    assert re.search(r"; a second answer differs by \d+\.\d errors$", answer.reason[0])
    assert answer.reason[1].endswith("; a second answer was not accepted (for a test)")
    assert "second answer" not in answer.reason[2]


# ------------------------------------------------------------------------------------------------ several modes
class PositiveHalf(Trainable):
    """An encoder that has learned only one of the two modes."""

    def forward(self, x: Tensor) -> Elliptical:
        loc = x.clamp_min(torch.tensor([0.0, -torch.inf])) / torch.tensor([1.01, 1.09])
        return Elliptical(loc, Diagonal(torch.tensor([0.11, 0.32]).to(loc).expand_as(loc)))


def test_weights_do_not_reveal_a_missed_mode():
    x = Folded().simulate(120)
    x = x[x[:, 0] > 0.5]  # modes that do not touch
    answer = posterior(Folded(), x, PositiveHalf(), 500)
    assert len(x) > 60
    assert (answer.khat < 0.5).all()
    assert (answer.ess > 350).all()
    assert ok(answer).all()
    assert (answer.expect(positive).value - 0.5).min() > 0.499


def test_escalation_never_certifies_half_a_posterior():
    """16 searches from the prior all end on the encoder's side once in 2^16 times: 0.2 % in 120 observations."""
    answer = expect(Folded(), Folded().simulate(120), positive, PositiveHalf(), 500, tolerance=0.1, seed=seeded(7))
    assert ok(answer).sum() > 110
    half = torch.full((120,), 0.5).double()
    assert_within(answer.value[ok(answer)], half[ok(answer)], answer.mcse[ok(answer)], rate=1e-6)


def test_the_unit_of_the_query_does_not_matter():
    """The verdict is the same for a query and a tolerance a hundred times as large, because evidence has no unit."""
    x = Folded().simulate(40)
    x = x[x[:, 0] > 0.5]
    plain = expect(Folded(), x, positive, PositiveHalf(), 500, tolerance=0.1, seed=seeded(8))
    scaled = expect(Folded(), x, lambda z: 100 * positive(z), PositiveHalf(), 500, tolerance=10, seed=seeded(8))
    assert scaled.stage == plain.stage
    assert torch.equal(scaled.verdict, plain.verdict)
    torch.testing.assert_close(scaled.value, 100 * plain.value)


def test_more_modes_than_searches_can_find_are_not_ok():
    axis = 1.2 * (torch.arange(12, dtype=torch.double) - 5.5)
    lattice = Modes(torch.cartesian_prod(axis, axis), 0.05, prior_sd=4.0)
    x = 0.2 * torch.randn(6, 2, generator=seeded(0), dtype=torch.double)
    answer = expect(lattice, x, lambda z: z, n=500, tolerance=2.0, seed=seeded(0))
    assert not ok(answer).any()
    assert (answer.scope.alone > 0.1).all()
    assert (answer.scope.modes > 50).all()
    assert (answer.scope.searches >= 16 + 32 + 64).all()
    few = expect(Modes(lattice.loc[:2], 0.05, 4.0), x, lambda z: z, n=500, tolerance=2.0, seed=seeded(0))
    assert (few.scope.modes == 2).all()


class Fourfold:
    """The moduli of two latents are measured: four modes of equal mass."""

    prior = StandardNormal(2)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return -0.5 * ((x - z.abs()) / 0.1).square().sum(-1) + self.prior.log_prob(z)


def test_four_modes_are_answered():
    x = 0.6 + torch.rand(20, 2, generator=seeded(1), dtype=torch.double)
    answer = expect(Fourfold(), x, lambda z: (z > 0).all(-1).double(), n=500, tolerance=0.1, seed=seeded(1))
    assert (answer.scope.modes == 4).all()
    assert ok(answer).sum() >= 19
    assert_within(answer.value[ok(answer)], torch.tensor(0.25).double(), answer.mcse[ok(answer)], rate=1e-6)


# ------------------------------------------------------------------------------------ errors that draws hide
@pytest.mark.parametrize("p", [1e-3, 1e-6])
def test_the_probability_of_a_rare_event_is_found_by_tilted_draws(p):
    """Four errors were exceeded by 1 of 1300 answers; two of 20 are expected once in 10,000 runs."""
    cut = stats.norm.isf(p)

    def event(z: Tensor) -> Tensor:
        return (z[..., 0] > cut).double()

    absolute = expect(Plain(), ORIGIN, event, n=1000, tolerance=0.2 * p, seed=seeded(0))
    relative = expect(Plain(), ORIGIN, event, n=1000, tolerance=0.0, rtol=0.2, seed=seeded(1))
    for answer in (absolute, relative):
        assert TILTED in stages(answer)
        assert ok(answer).double().mean() > 0.8
        assert ((answer.value - p).abs() > 4 * answer.mcse).sum() <= 1
        assert (2 * answer.mcse[ok(answer)] <= 0.2 * 1.3 * p).all()
        assert (answer.inside[ok(answer)] >= diagnostics.FEW_HITS).all()
    assert ((absolute.value - 2 * p).abs() > 4 * absolute.mcse)[ok(absolute)].all()  # the check can fail


def test_an_event_that_no_draw_has_hit_is_not_certain():
    answer = expect(Plain(), ORIGIN, lambda z: (z[..., 0] > 1e4).double(), n=500, tolerance=1e-6, seed=seeded(0))
    assert (answer.verdict == Verdict.REFUSE).all()
    assert (answer.mcse > 1e-3).all()
    assert (answer.inside == 0).all()


def test_a_query_with_a_heavier_tail_than_the_weights_is_refused():
    """E |z|^-1 is infinite, but the mean over draws is finite and its error within a large tolerance."""
    heavy = expect(Plain(), ORIGIN, lambda z: 1 / z[..., 0].abs(), n=1000, tolerance=1e9, seed=seeded(0))
    # of 20 answers one or two may pass: a k-hat near 1 is estimated from the 95 largest of 1000
    assert (heavy.verdict == Verdict.REFUSE).double().mean() > 0.8
    refused = [r for r, v in zip(heavy.reason, heavy.verdict, strict=True) if v == Verdict.REFUSE]
    assert all("a moment of the query may be infinite" in reason for reason in refused)
    # draws from a wide Student-t reach latents at which this overflows, with a weight of zero
    tame = expect(Plain(), ORIGIN, lambda z: (0.1 * z[..., 0] ** 2).exp(), n=1000, tolerance=0.1, seed=seeded(0))
    assert ok(tame).all()


def test_a_decision_with_a_rare_costly_state_is_not_certain():
    """The first action costs 1000 beyond 3.3 standard deviations, 0.48 on average; few of 300 draws get there."""
    x = torch.zeros(40, 1, dtype=torch.double)
    answer = posterior(Plain(), x, {}, 300, tolerance=0.3, seed=seeded(0))

    def loss(z: Tensor) -> Tensor:
        return torch.stack([1000 * (z[..., 0] > 3.3).double(), torch.full_like(z[..., 0], 0.2)], -1)

    decision = answer.decide(loss)
    assert (decision.action == 0).any()
    assert (decision.verdict[decision.action == 0] != Verdict.OK).all()
    cheap = answer.decide(lambda z: loss(z) * torch.tensor([1e-4, 1.0]).to(z))
    assert (cheap.action == 0).all()
    assert (cheap.verdict == Verdict.OK).all()


# ------------------------------------------------------------------------------------- bent posteriors and boxes
class Ring:
    """x is the distance of z from (1/2, 0), up to noise: the posterior is a thin ring, which no ellipse fits."""

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


def test_quadrature_itself():
    """At radius x the angle has density exp(-x cos(a) / 2), whose mean cosine is -I_1(x/2) / I_0(x/2)."""
    x = torch.tensor([[0.8], [2.0]], dtype=torch.double)
    mean = Ring().exact(x, moments)
    cosine = -torch.special.i1(x[:, 0] / 2) / torch.special.i0(x[:, 0] / 2)
    torch.testing.assert_close(mean[:, 0], 0.5 + x[:, 0] * cosine, atol=1e-3, rtol=0)
    assert mean[:, 1].abs().max() < 1e-9


@pytest.fixture(scope="module")
def ring() -> tuple[Tensor, Posterior]:
    x = torch.linspace(0.8, 2.2, 24, dtype=torch.double).unsqueeze(-1)
    return x, posterior(Ring(), x, {}, 512, tolerance=0.3, query=moments, seed=seeded(8))


def test_kernels_answer_where_no_ellipse_fits(ring):
    """Errors are of the right size for most answers, not for all: a known limit of thin rings with so few draws.

    In five runs the median of the absolute scores was 0.55 to 0.91 (0.67 for normal ones), 7 of 174 were beyond three
    errors and the largest was 7.5.
    """
    x, answer = ring
    assert answer.record is not None
    accepted = answer.verdict != Verdict.REFUSE
    assert accepted.sum() >= 12
    assert {answer.record.stage[i] for i in accepted.nonzero().flatten()} <= {REFINED, ADAPTED, SMC}
    estimate, exact = answer.expect(moments), Ring().exact(x, moments)
    assert (2 * estimate.mcse[accepted] <= 0.3).all()
    torch.testing.assert_close(answer.record.mcse, estimate.mcse, rtol=1e-12, atol=0)
    score = ((estimate.value - exact) / estimate.mcse)[ok(answer)]
    assert 0.3 < score.abs().median() < 1.3
    assert (score.abs() > 3).double().mean() <= 0.2
    assert (answer.record.cost[accepted] > 10 * 512).all()


def test_a_query_without_a_mean_is_refused_after_kernels_too(ring):
    _, answer = ring
    accepted = answer.verdict != Verdict.REFUSE

    def heavy(z: Tensor) -> Tensor:
        return z[..., 1].abs().clamp_min(1e-9) ** -2.0  # infinite where the ring crosses the axis

    assert (answer.verdict_on(heavy)[accepted] == Verdict.REFUSE).double().mean() > 0.6
    assert (answer.verdict_on(moments)[accepted] != Verdict.REFUSE).all()
    decision = answer.decide(lambda z: torch.stack([heavy(z), torch.full_like(z[..., 0], 1e9)], -1))
    assert (decision.verdict[accepted] == Verdict.REFUSE).double().mean() > 0.6


def test_a_part_of_a_ring_is_not_accepted_for_the_whole(monkeypatch):
    """Draws around the modes cover a part of the ring, agree on it, and have small errors and k-hats."""
    ring = Ring()
    ring.sd = 0.01
    x = torch.linspace(0.8, 2.2, 24, dtype=torch.double).unsqueeze(-1)
    exact = ring.exact(x, lambda z: z)

    def far_off() -> int:
        budget = 13_500  # too little for sequential Monte Carlo
        answer = expect(ring, x, lambda z: z, None, 512, tolerance=0.4, budget=budget, seed=seeded(0))
        return int(((answer.verdict != Verdict.REFUSE) & ((answer.value - exact).abs().amax(-1) > 0.5)).sum())

    assert far_off() == 0
    monkeypatch.setitem(sampling._LEAST_ESS, REFINED, 0.0)
    monkeypatch.setattr("vaerdict.inference.search._ROUNDS", (2,))
    assert far_off() > 1  # with few searches and without the condition on the ESS they would be accepted


class Banana:
    """x = z_1 + 1.5 z_0^2 + 0.1 e: the posterior bends along a parabola."""

    prior = StandardNormal(2)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return -0.5 * ((x[..., 0] - z[..., 1] - 1.5 * z[..., 0] ** 2) / 0.1).square() + self.prior.log_prob(z)

    def exact(self, x: Tensor, f) -> Tensor:
        """Posterior mean of f by quadrature over z_0 and the noise e. Shapes: ``(m, 1) -> (m, out)``."""
        first, noise = (torch.linspace(-6, 6, n, dtype=x.dtype) for n in (600, 121))
        a, e = (t.reshape(-1, 1) for t in torch.meshgrid(first, noise, indexing="ij"))
        z = torch.stack([a.expand(-1, len(x)), x.T - 1.5 * a**2 - 0.1 * e], -1)
        return (torch.softmax(self.log_joint(x, z), 0).unsqueeze(-1) * f(z)).sum(0)


def test_a_banana_is_answered():
    """Of 36 scores at rate 1e-6 none exceeds 5.5 errors. In eight runs 3 to 9 of the 12 observations were answered."""
    x = torch.linspace(-1.0, 2.0, 12, dtype=torch.double).unsqueeze(-1)
    answer = expect(Banana(), x, moments, None, 2000, tolerance=0.2, seed=seeded(2))
    answered = answer.verdict != Verdict.REFUSE
    assert answered.sum() >= 2
    assert stages(answer) <= {REFINED, ADAPTED, SMC}
    exact = Banana().exact(x, moments)
    assert_within(answer.value[answered], exact[answered], answer.mcse[answered], rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors off"):
        assert_within(answer.value[answered] + 0.3, exact[answered], answer.mcse[answered], rate=1e-6)


def test_a_prior_on_a_box_is_answered():
    """z is uniform on the unit square, and z_0 + z_1 is measured: by symmetry E z_0 = E z_1 = E (z_0 + z_1) / 2."""

    class Box:
        prior = Independent(Uniform(torch.zeros(2).double(), torch.ones(2).double()), 1)

        def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
            return -0.5 * ((x[..., 0] - z.sum(-1)) / 0.2).square() + self.prior.log_prob(z)

    x = torch.linspace(0.3, 1.7, 8, dtype=torch.double).unsqueeze(-1)
    answer = expect(Box(), x, lambda z: z, None, 1000, tolerance=0.04, seed=seeded(3))
    assert ok(answer).sum() >= 6
    points = (torch.arange(400).double() + 0.5) / 400
    grid = torch.cartesian_prod(points, points)
    weight = torch.softmax(-0.5 * ((x - grid.sum(-1)) / 0.2).square(), -1)
    assert_within(answer.value, weight @ grid, answer.mcse, rate=1e-6)


# ---------------------------------------------------------------------------------------------------- refusals
class Sensor:
    """Unit noise about the latent in single precision: an observation of 1e25 overflows for any latent."""

    prior = StandardNormal(1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return -0.5 * (x - z).square().sum(-1) + self.prior.log_prob(z)


def blind(x: Tensor) -> Elliptical:
    """A proposal made for these observations, without a location for the impossible one."""
    loc = (x / 2).masked_fill(x > 1e20, torch.nan)
    return Elliptical(loc, Diagonal(torch.ones_like(x)), None)


@pytest.mark.parametrize("encoder", [False, True])
def test_one_impossible_observation_is_refused_and_the_others_answered(encoder):
    x = torch.tensor([[0.1], [1e25], [0.5]])
    proposals = {"blind": blind(x)} if encoder else {}
    answer = posterior(Sensor(), x, proposals, 512, tolerance=0.1, seed=seeded(0))
    assert answer.record is not None
    assert Verdict.names(answer.verdict) == ["OK", "REFUSE", "OK"]
    assert answer.record.stage[1] == ""
    assert answer.failed.tolist() == [False, True, False]
    assert answer.record.reason[1] == (
        "REFINED gave no usable weights; ADAPTED gave no usable weights; SMC did not reach the posterior"
    )
    estimate = answer.expect(lambda z: z)
    assert_within(estimate.value[[0, 2]], x[[0, 2]] / 2, estimate.mcse[[0, 2]], rate=1e-6)
    for column in (estimate.value, estimate.mcse, estimate.khat, answer.z[0]):
        assert column.reshape(3, -1).isnan().any(-1).tolist() == [False, True, False]
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
    with pytest.raises(ShapeError, match=r"latents are a Pair; escalation needs one tensor .* JointPrior"):
        expect(Model(), x, lambda z: z.a[..., 0])


def test_settings_and_queries_that_cannot_be_used_are_refused():
    for tolerance, rtol in ((0, 0), (-1.0, 0.1), (0.1, -1.0), (math.nan, 0.0)):
        with pytest.raises(SettingError, match=r"must not be negative, and one must be positive"):
            posterior(MODEL, X, Near(1.05), 500, tolerance=tolerance, rtol=rtol)
    with pytest.raises(SettingError, match="n=63 draws are too few to escalate with; use 64 or more"):
        posterior(MODEL, X, Near(1.05), 63, tolerance=0.1)
    assert posterior(MODEL, X, Near(1.05), 64, tolerance=5.0, seed=seeded(0)).z.shape == (64, 60, 2)
    with pytest.raises(
        ShapeError, match=r"f returned \(2,\); it must return one value per particle, shape \(250, 60\)"
    ):
        expect(MODEL, X, lambda z: z.mean((0, 1)), Near(1.05), 500)
