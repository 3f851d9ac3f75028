"""Statistics over seeds, tests of claims with a stated error rate, and comparisons paired by seed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from vaerdict.core import SettingError
from vaerdict.io import write_json
from vaerdict.report import load, read_record
from vaerdict.report.tables import Column
from vaerdict_paper.pages.claims import (
    ERROR_RATE,
    Claim,
    ClaimVerdict,
    Evidence,
    Judgement,
    judged,
    paired_evidence,
    rival_evidence,
    selected_models,
    selection_counts,
    tally,
)
from vaerdict_paper.pages.headline import RESULTS
from vaerdict_paper.pages.seed_statistics import (
    Summary,
    by_seed,
    cell,
    counts_of,
    difference,
    mean_of,
    minus,
    ordered,
    summarise,
    where,
)


def test_summary_is_mean_sd_and_se():
    summary = summarise([1.0, 2.0, 3.0, None, math.inf])
    assert summary == Summary(2.0, 1.0, 3, missing=2)
    assert summary.se == pytest.approx(1 / math.sqrt(3))
    assert summarise([4.0]) == Summary(4.0, None, 1)
    assert summarise([None]) is None


def test_seeds_weigh_the_same_however_many_rows_they_have():
    rows = [{"seed": 0, "a": 1.0}, {"seed": 0, "a": 3.0}, {"seed": 1, "a": 4.0}, {"seed": 1, "a": None}]
    assert by_seed(rows, "a") == {0: 2.0, 1: pytest.approx(math.nan, nan_ok=True)}  # in tables 4.0, one missing
    assert mean_of(rows, "a") == Summary(3.0, pytest.approx(math.sqrt(2)), 2, missing=1)
    assert where(rows, a=(1.0, 4.0), seed=1) == [rows[2]]


def test_counts_are_one_number_or_all_of_them():
    assert counts_of([{"n": 200}, {"n": 200.0}, {}], "n") == 200
    assert counts_of([{"n": 200}, {"n": 50}], "n") == "50 or 200"
    assert counts_of([{}], "n") is None


def test_differences_are_paired():
    a, b = {0: 10.0, 1: 20.0, 2: 30.0}, {0: 9.0, 1: 19.0, 7: 0.0}
    assert difference(a, b) == Summary(1.0, 0.0, 2)  # unpaired, the spread would be 7
    assert minus({0: 1.0, 1: 3.0}, 2.0) == Summary(0.0, pytest.approx(math.sqrt(2)), 2)


def test_names_are_ordered_and_cells_count_what_is_missing():
    assert ordered(["x", "CHI", "VAE", "CHI"], ("VAE", "IWAE", "CHI")) == ["VAE", "CHI", "x"]
    column = Column("a", "A", 2, 100, signed=True)
    assert column.text(cell(Summary(0.01, None, 1, missing=3))) == "+1.00 (3 missing)"


HOLDS, FAILS, UNRESOLVED, TOO_FEW, NOT_RUN = ClaimVerdict


def verdicts(*claims: Claim) -> list[ClaimVerdict]:
    return [judgement.verdict for judgement in judged(claims)[0]]


@pytest.mark.parametrize(
    ("gap", "verdict"),
    [
        (Summary(1.3, 1.0, 5), HOLDS),  # t = 2.91, where 5 % is 2.78
        (Summary(1.2, 1.0, 5), UNRESOLVED),  # t = 2.68
        (Summary(-1.3, 1.0, 5), FAILS),
        (Summary(-1.2, 1.0, 5), UNRESOLVED),
        (Summary(2.3, 1.0, 3), UNRESOLVED),  # t = 3.98, where 5 % is 4.30 with three seeds
        (Summary(0.1, 0.0, 3), UNRESOLVED),  # three equal signs
        (Summary(0.1, 0.0, 7), HOLDS),
        (Summary(0.0, 0.0, 3), UNRESOLVED),
        (Summary(9.0, 0.1, 2), TOO_FEW),
        (Summary(9.0, None, 1), TOO_FEW),
        (None, NOT_RUN),
    ],
)
def test_one_claim_is_decided_by_a_t_test(gap, verdict):
    assert verdicts(Claim("c", [Evidence("d", gap, +1)])) == [verdict]
    mirrored = gap and gap._replace(mean=-gap.mean)
    assert verdicts(Claim("c", [Evidence("d", mirrored, -1)])) == [verdict]


def test_p_values_are_those_of_scipy():
    values = [0.3, -0.2, 0.9, 0.4, 0.7]
    for sign, side in ((+1, "greater"), (-1, "less")):
        expected = stats.ttest_1samp(values, 0.0, alternative=side).pvalue
        assert Evidence("d", summarise(values), sign).p_values == pytest.approx((expected, 1 - expected))
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.97)
    assert Evidence("d", summarise(values), +1).interval(0.97) == pytest.approx((low, high))
    assert Evidence("d", summarise(values), +1).p == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)


@pytest.mark.parametrize(
    ("gap", "verdict"),
    [
        (Summary(0.1, 0.2, 5), HOLDS),
        (Summary(-0.1, 0.2, 5), HOLDS),
        (Summary(0.1, 0.6, 5), UNRESOLVED),  # may be larger than the margin
        (Summary(1.0, 0.2, 5), FAILS),
        (Summary(-1.0, 0.2, 5), FAILS),
    ],
)
def test_equality_is_within_a_margin(gap, verdict):
    evidence = Evidence("d", gap, 0, 2, margin=0.5)
    assert verdicts(Claim("c", [evidence])) == [verdict]
    assert "; margin 0.50)" in evidence.described()
    with pytest.raises(SettingError, match="use \\+1 or -1, or 0 with a margin"):
        Evidence("d", gap, 0)


def test_equality_is_tested_by_two_one_sided_tests():
    values = [0.3, -0.2, 0.9, 0.4, 0.7]
    below = stats.ttest_1samp(values, 0.8, alternative="less").pvalue
    above = stats.ttest_1samp(values, -0.8, alternative="greater").pvalue
    inside, _ = Evidence("d", summarise(values), 0, margin=0.8).p_values
    assert inside == pytest.approx(max(below, above))


GOOD, WEAK, BAD, NONE, FEW = (
    Evidence("d", d, +1)
    for d in (Summary(1.0, 0.1, 5), Summary(0.1, 1.0, 5), Summary(-1.0, 0.1, 5), None, Summary(1.0, 0.1, 2))
)


@pytest.mark.parametrize(
    ("evidence", "verdict", "tone"),
    [
        ([GOOD], HOLDS, "good"),
        ([GOOD, WEAK], UNRESOLVED, "open"),
        ([GOOD, BAD], FAILS, "bad"),
        ([GOOD, NONE], NOT_RUN, "open"),
        ([GOOD, FEW], TOO_FEW, "open"),
        ([BAD, NONE, FEW], FAILS, "bad"),
        ([], NOT_RUN, "open"),
    ],
)
def test_a_claim_needs_all_of_its_evidence_and_fails_by_any(evidence, verdict, tone):
    ((judgement,),) = judged([Claim("c", evidence)])
    assert (judgement.verdict, judgement.tone) == (verdict, tone)


def test_p_values_of_a_claim_are_the_largest_for_it_and_the_smallest_times_their_number_against_it():
    pieces = [Evidence("d", Summary(mean, 1.0, 5), +1) for mean in (2.0, 0.1, -0.7)]
    towards, against = zip(*(piece.p_values for piece in pieces), strict=True)
    assert Claim("c", pieces).p_values == (max(towards), 3 * min(against))


def test_p_values_are_adjusted_over_all_claims_of_the_page():
    rng = np.random.default_rng(0)
    gaps = [summarise(rng.normal(0.6, 1.0, 5)) for _ in range(12)]
    claims = [Claim(str(i), [Evidence("d", gap, +1)]) for i, gap in enumerate(gaps)]
    exact = Claim("exact", [Evidence("e", Summary(0.1, 0.0, 1), +1, over="")])
    first, second = judged(claims[:5], [*claims[5:], exact, Claim("c", [NONE])])
    judgements = [*first, *second]
    expected = stats.false_discovery_control([claim.evidence[0].p for claim in claims], method="bh")
    assert [judgement.p for judgement in judgements[:12]] == pytest.approx(list(expected))
    assert {judgement.n_claims for judgement in judgements} == {12}
    assert [judgement.verdict for judgement in second[-2:]] == [HOLDS, NOT_RUN]


def test_exact_differences_are_decided_by_their_sign():
    exact = [Evidence("e", Summary(mean, 0.0, 1), +1, over="") for mean in (0.1, -0.1)]
    assert verdicts(*(Claim("c", [evidence]) for evidence in exact)) == [HOLDS, FAILS]
    assert exact[0].described() == "e: +0.100 (exact)"


@pytest.mark.parametrize(("level", "expected"), [(0.98, (0.125, 1.0)), (1.0, (1.0, 1.0)), (1.1, (1.0, 0.125))])
def test_a_difference_without_spread_is_tested_by_its_signs(level, expected):
    """Three seeds at a ceiling are three signs, not infinitely many."""
    evidence = Evidence("found", minus(dict.fromkeys(range(3), 1.0), level), +1)
    assert evidence.difference.sd == 0
    assert evidence.p_values == expected
    ((judgement,),) = judged([Claim("c", [evidence])])
    assert judgement.verdict is UNRESOLVED
    assert "(se 0.000, 3 seeds, the same in all)" in judgement.lines[0]


def test_differences_that_are_equal_up_to_rounding_have_no_spread():
    gap = difference({0: 0.3, 1: 0.6, 2: 0.9}, {0: 0.1, 1: 0.4, 2: 0.7})
    assert gap.sd == 0
    assert Evidence("found", gap, +1).p_values == (0.5**3, 1.0)
    assert summarise([1.0, 1.0 + 1e-6, 1.0]).sd > 0  # a spread that is small


@pytest.mark.parametrize("stored", [False, True])
def test_seeds_that_are_not_finite_are_counted_and_nothing_is_decided(tmp_path, stored):
    """Files store them as null."""
    rows = [{"model": "a", "seed": i, "score": s} for i, s in enumerate((1.1, 1.2, math.nan, math.inf, 1.3))]
    rows.append({"model": "a", "seed": 1, "score": 1.3})
    if stored:
        write_json(tmp_path / "rows.json", {"rows": rows})
        rows = read_record(tmp_path / "rows.json")["rows"]
    scores = {"a": by_seed(rows, "score"), "b": dict.fromkeys(range(5), 1.0)}
    evidence = paired_evidence("score", scores, "a", "b", +1)
    assert (evidence.difference.n, evidence.difference.missing) == (3, 2)
    assert evidence.p_values == (1.0, 1.0)
    ((judgement,),) = judged([Claim("c", [evidence])])
    assert judgement.verdict is TOO_FEW
    assert "3 seeds, 2 not finite" in judgement.lines[0]
    assert mean_of(rows, "score").missing == 2
    assert by_seed([{"seed": 0}], "score") == {}  # not asked for


def test_a_model_that_is_unknown_in_all_seeds_is_not_left_out():
    """The other model alone would be enough for the claim."""
    good = [{"seed": seed, "score": 1.0 + 0.01 * seed} for seed in range(5)]
    zero, unknown = ([{"seed": seed, "score": value} for seed in range(5)] for value in (0.0, None))
    known = {"MIS": by_seed(good, "score"), "IWAE": by_seed(zero, "score")}
    by_model = {"a": known, "b": {**known, "MIS": by_seed(unknown, "score")}}
    for models, verdict in (({"a": known}, HOLDS), (by_model, NOT_RUN)):
        ((judgement,),) = judged([Claim("c", rival_evidence("score", models, "MIS", ["IWAE"], +1))])
        assert judgement.verdict is verdict


def test_a_model_without_evidence_is_not_selected():
    rows = [{"model": "CHI", "seed": 0, "iwelbo": math.nan}, {"model": "IWAE", "seed": 0, "iwelbo": -20.0}]
    assert selected_models(rows, "iwelbo") == {0: "IWAE"}


def test_a_tally_counts_every_verdict():
    claims = [Claim("c", [evidence]) for evidence in (GOOD, BAD, BAD, NONE, FEW, FEW)]
    assert tally(judged(claims)[0]) == ("1 holds, 2 do not hold, 2 have too few seeds to say and 1 was not run")
    assert tally([]) == "none could be examined"


@pytest.mark.parametrize("experiment", ["ppca", "audit"])
def test_a_page_judges_all_of_its_claims_at_once(experiment):
    blocks = [block for section in load(RESULTS / experiment).sections for block in section.blocks]
    judgements = [item for block in blocks if isinstance(block, list) for item in block if isinstance(item, Judgement)]
    tested = [j for j in judgements if not j.claim.exact and any(e.decidable for e in j.claim.evidence)]
    assert len(tested) > 1
    assert {judgement.n_claims for judgement in judgements} == {len(tested)}


def _n_refuting(judgement: Judgement) -> int:
    """The differences that alone, with Bonferroni's correction, lie on the other side at a two-sided 5 %."""
    evidence = judgement.claim.evidence
    n = sum(e.p_values[1] <= 0.025 / len(evidence) for e in evidence)
    assert n > 0
    return n


# ----------------------------------------------------------------------------------------------- the evidence in print
def test_lines_agree_with_the_verdict():
    """A resolved claim shows p-values, one that is not resolved shows intervals that include zero."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        shifts = rng.choice([0.0, 1.0, -1.0], 6)
        claims = [
            Claim("c", [Evidence("d", summarise(rng.normal(shift, 0.5, 5)), +1) for _ in range(1 + i % 3)])
            for i, shift in enumerate(shifts)
        ]
        for judgement in judged(claims)[0]:
            *lines, adjusted = judgement.lines
            if judgement.verdict is UNRESOLVED:
                ends = [[float(end) for end in _INTERVAL.findall(_plain(line))[0]] for line in lines]
                assert all(high > 0 for _, high in ends)
                assert any(low < 0 for low, _ in ends)
            else:
                refuted = [line for line in lines if line.startswith("Refuted by ")]
                lines = [line for line in lines if line not in refuted]
                assert all(", p " in line for line in lines)
                if judgement.verdict is FAILS and len(lines) > 1:
                    assert refuted == [f"Refuted by {_n_refuting(judgement)} of its {len(lines)} differences."]
                else:
                    assert not refuted
            assert adjusted.startswith("Adjusted for the 6 claims of this run: p ")


_INTERVAL = re.compile(r"% interval (\S+) to (\S+?)\)")


def _plain(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")


def test_the_evidence_is_printed_with_error_count_and_p_value_or_interval():
    values = [1.0, 2.0, 3.0, 1.5, 2.5]
    clear, open_ = (Evidence("d", minus(dict(enumerate(values)), level), +1, 2) for level in (0.0, 2.1))
    first, second = judged([Claim("c", [clear]), Claim("c", [open_], "A note.")])[0]
    assert first.lines == [
        "d: +2.00 (se 0.35, 5 seeds, p = 0.0048)",
        "Adjusted for the 2 claims of this run: p = 0.0096.",
    ]
    assert second.lines == [
        "d: \N{MINUS SIGN}0.10 (se 0.35, 5 seeds, 95% interval \N{MINUS SIGN}1.08 to +0.88)",
        "Adjusted for the 2 claims of this run: p = 0.79.",
        "A note.",
    ]
    assert FEW.described() == "d: +1.000 (se 0.071, 2 seeds)"
    assert Claim("c", [NONE], "A note.").evidence[0].described() == "d: not in this run"


# ------------------------------------------------------------------------------------------------------ the error rate
ALARM = 1e-6
"""The probability with which a check of an error rate fails although the rate holds."""


def assert_at_most(errors: int, n: int, rate: float) -> None:
    """Assert that errors among n are compatible with at most `rate`, at the false-alarm rate `ALARM`."""
    allowed = stats.binom.isf(ALARM, n, rate)
    assert errors <= allowed, f"{errors} of {n} are wrong (allowed {allowed:.0f} at a rate of {rate:g})"


def pages(n: int, effects: Sequence[float], pieces: int, seed: int) -> list[list[Claim]]:
    """Pages of claims on five seeds, whose pieces of evidence share half of their variance across the page."""
    rng = np.random.default_rng(seed)
    shape = (n, 5, len(effects), pieces)
    own, shared = rng.normal(size=shape), rng.normal(size=(n, 5, 1, 1))
    values = np.sqrt(0.5) * (own + shared * rng.choice([-1, 1], (1, 1, len(effects), 1)))
    values += np.asarray(effects)[:, None]
    return [
        [
            Claim("c", [Evidence("d", summarise(values[page, :, c, e]), +1) for e in range(pieces)])
            for c in range(len(effects))
        ]
        for page in range(n)
    ]


def two_standard_errors(claims: Sequence[Claim]) -> list[ClaimVerdict]:
    """The usual rule without correction, for comparison."""
    words = []
    for claim in claims:
        t = [gap.mean / gap.se for evidence in claim.evidence if (gap := evidence.difference) and gap.se]
        words.append(HOLDS if min(t) > 2 else FAILS if min(t) < -2 else UNRESOLVED)
    return words


@pytest.mark.parametrize("pieces", [1, 3])
def test_pages_on_which_nothing_differs_have_a_verdict_at_most_at_the_stated_rate(pieces):
    n = 800
    simulated = pages(n, [0.0] * 12, pieces, seed=pieces)
    wrong = sum(any(word is not UNRESOLVED for word in verdicts(*claims)) for claims in simulated)
    assert_at_most(wrong, n, ERROR_RATE)
    wrong = sum(any(word is not UNRESOLVED for word in two_standard_errors(claims)) for claims in simulated)
    with pytest.raises(AssertionError, match="are wrong"):
        assert_at_most(wrong, n, ERROR_RATE)


def test_at_most_the_stated_share_of_verdicts_is_wrong():
    """Claims that are clearly true, barely true, clearly and barely false, and with no difference."""
    n, effects = 600, [3.0, 3.0, 3.0, 0.1, 0.1, -0.1, -0.1, -3.0, 0.0, 0.0, 0.0, 0.0]
    shares, given = [], 0
    for claims in pages(n, effects, 1, seed=7):
        words = verdicts(*claims)
        resolved = [(word, effect) for word, effect in zip(words, effects, strict=True) if word is not UNRESOLVED]
        wrong = sum((word is HOLDS) != (effect > 0) or effect == 0 for word, effect in resolved)
        shares.append(wrong / max(1, len(resolved)))
        given += len(resolved)
    error = np.std(shares) / math.sqrt(n)
    assert np.mean(shares) <= ERROR_RATE + stats.norm.isf(ALARM) * error
    assert given > 3 * n  # the clear claims are resolved


# --------------------------------------------------------------------------------------------------------- comparisons
SCORES = {"VAE": {0: 3.0, 1: 5.0}, "IWAE": {0: 1.0, 1: 2.0}, "WW": {0: 2.0, 1: 1.5}}


def test_every_rival_is_compared_over_the_models_of_each_seed():
    by_model = {
        "m": SCORES,
        "n": {"VAE": {0: 1.0, 1: 1.0, 2: 9.0}, "IWAE": {0: 2.0, 1: 2.0}, "WW": {}},
    }
    vae, ww, chi = rival_evidence("error", by_model, "IWAE", ("VAE", "IWAE", "WW", "CHI"), -1)
    assert vae.what == "error, IWAE minus VAE"
    assert vae.difference == summarise([(-2.0 + 1.0) / 2, (-3.0 + 1.0) / 2])
    assert ww.difference == summarise([-1.0, 0.5])  # only the model that has both
    assert chi.difference is None
    (vae,) = rival_evidence("error", {"n": by_model["n"]}, "IWAE", ("VAE",), -1)
    assert vae.difference == summarise([1.0, 1.0])  # only the seeds that both have


def test_paired_evidence_has_the_published_difference():
    evidence = paired_evidence("error", SCORES, "VAE", "IWAE", +1, 2, {"VAE": 6.0, "IWAE": 4.5})
    assert evidence.described() == "error, VAE minus IWAE: +2.50 (se 0.50, 2 seeds; published +1.50)"
    assert paired_evidence("error", SCORES, "VAE", "CHI", +1).described() == "error, VAE minus CHI: not in this run"


def test_models_are_selected_in_each_seed():
    values = ((0, "A", 1), (0, "B", 2), (1, "A", 3), (2, "B", 4), (2, "A", None))
    rows = [{"seed": seed, "model": model, "a": a} for seed, model, a in values]
    assert selected_models(rows, "a") == {0: "B", 1: "A", 2: "B"}
    assert selection_counts(selected_models(rows, "a")) == "B 2 times, A once"
