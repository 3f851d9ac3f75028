"""Statistics over seeds, the two-standard-error rule, and comparisons paired by seed."""

from __future__ import annotations

import math

import pytest

from vaerdict.report.tables import Column
from vaerdict_paper.pages.claims import (
    Claim,
    ClaimVerdict,
    Evidence,
    against_best,
    best_of,
    mean_gap,
    paired_evidence,
    rival_names,
    selected_models,
    selection_counts,
    tally,
)
from vaerdict_paper.pages.seed_statistics import (
    Summary,
    by_seed,
    cell,
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
    assert by_seed(rows, "a") == {0: 2.0, 1: 4.0}
    assert mean_of(rows, "a") == Summary(3.0, pytest.approx(math.sqrt(2)), 2, missing=1)
    assert where(rows, a=(1.0, 4.0), seed=1) == [rows[2]]


def test_differences_are_paired():
    a, b = {0: 10.0, 1: 20.0, 2: 30.0}, {0: 9.0, 1: 19.0, 7: 0.0}
    assert difference(a, b) == Summary(1.0, 0.0, 2)  # unpaired, the spread would be 7
    assert minus({0: 1.0, 1: 3.0}, 2.0) == Summary(0.0, pytest.approx(math.sqrt(2)), 2)


def test_names_are_ordered_and_cells_count_what_is_missing():
    assert ordered(["x", "CHI", "VAE", "CHI"], ("VAE", "IWAE", "CHI")) == ["VAE", "CHI", "x"]
    column = Column("a", "A", 2, 100, signed=True)
    assert column.text(cell(Summary(0.01, None, 1, missing=3))) == "+1.00 (3 missing)"


HOLDS, FAILS, UNRESOLVED, NOT_RUN = ClaimVerdict


@pytest.mark.parametrize(
    ("gap", "verdict"),
    [
        (Summary(1.0, 1.0, 5), HOLDS),  # 2.2 standard errors
        (Summary(0.8, 1.0, 5), UNRESOLVED),  # 1.8
        (Summary(-1.0, 1.0, 5), FAILS),
        (Summary(9.0, 0.1, 2), UNRESOLVED),  # two seeds resolve nothing
        (Summary(9.0, None, 1), UNRESOLVED),
        (None, NOT_RUN),
    ],
)
def test_two_standard_errors(gap, verdict):
    assert Evidence("d", gap, +1).verdict is verdict
    mirrored = gap and gap._replace(mean=-gap.mean)
    assert Evidence("d", mirrored, -1).verdict is verdict


def test_a_claim_needs_all_of_its_evidence():
    good, bad, none = (Evidence("d", d, +1) for d in (Summary(1.0, 0.1, 5), Summary(-1.0, 0.1, 5), None))
    assert [(c.verdict, c.tone) for c in (Claim("c", e) for e in ([good], [good, bad], [good, none], [none]))] == [
        (HOLDS, "good"),
        (FAILS, "bad"),
        (UNRESOLVED, "open"),
        (NOT_RUN, "open"),
    ]
    assert tally([Claim("c", [good]), Claim("c", [bad]), Claim("c", [bad]), Claim("c", [none])]) == (
        "1 holds, 2 do not hold and 1 was not run"
    )
    assert tally([]) == "none could be examined"
    assert Evidence("exact", Summary(0.1, 0.0, 1), +1, over="").verdict is HOLDS
    assert Claim("c", [none], "A note.").lines == ["d: not in this run", "A note."]


SCORES = {"VAE": {0: 3.0, 1: 5.0}, "IWAE": {0: 1.0, 1: 2.0}, "WW": {0: 2.0, 1: 1.5}}


def test_the_best_rival_is_the_best_on_average():
    assert (best_of(SCORES), best_of(SCORES, max), best_of({})) == ("IWAE", "VAE", None)
    assert against_best(SCORES, "VAE", ("IWAE", "WW", "CHI")) == ("IWAE", {0: 2.0, 1: 3.0})
    assert against_best(SCORES, "CHI", ("IWAE",)) == (None, {})


def test_gaps_are_averaged_over_models_within_each_seed():
    gaps = {"VAE": ("IWAE", {0: 1.0, 1: 2.0}), "WW": ("CHI", {0: 3.0}), "CHI": (None, {})}
    assert mean_gap(gaps) == Summary(2.0, None, 1)
    assert rival_names(gaps) == " (IWAE on VAE, CHI on WW)"
    assert mean_gap({}) is None


def test_paired_evidence_has_the_published_difference():
    evidence = paired_evidence("error", SCORES, "VAE", "IWAE", +1, 2, {"VAE": 6.0, "IWAE": 4.5})
    assert evidence.sentence == "error, VAE minus IWAE: +2.50 (se 0.50, 2 seeds; published +1.50)"
    assert (
        paired_evidence("error", SCORES, "VAE", None, +1).sentence == "error, VAE minus the best other: not in this run"
    )


def test_models_are_selected_in_each_seed():
    values = ((0, "A", 1), (0, "B", 2), (1, "A", 3), (2, "B", 4), (2, "A", None))
    rows = [{"seed": seed, "model": model, "a": a} for seed, model, a in values]
    assert selected_models(rows, "a") == {0: "B", 1: "A", 2: "B"}
    assert selection_counts(selected_models(rows, "a")) == "B 2 times, A once"
