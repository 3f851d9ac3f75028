"""Calibration by two groups at a time: halves of groups mixed, and changes undone between groups."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from test_calibration import FAST, answer_of, rows
from test_de_pipeline import CHANGED, simulated
from vaerdict.de.calibration import calibrate, pipeline, summary, task
from vaerdict.de.calibration.undoing import undo_changes
from vaerdict.de.options import CalibrateOptions

pd = pytest.importorskip("pandas")


# ------------------------------------------------------------------------------------------------------ the verdict
def undone_rows(called: list[int], false: list[int], n_undone: int = 20) -> list[dict[str, Any]]:
    made = rows(task.UNDONE, called, false)
    return [row | {"n_unchanged": n_undone, "n_true": None, "tpr": None} for row in made]


@pytest.mark.parametrize(
    ("called", "false", "outcome"),
    [
        ([100] * 10, [1] * 10, summary.COMPATIBLE),
        ([100] * 10, [9, 11, 10, 12, 8, 10, 9, 11, 10, 10], summary.TOO_MANY),
        ([100] * 4, [0] * 4, summary.OPEN),
        ([0] * 10, [0] * 10, summary.OPEN),  # without calls nothing is known
    ],
)
def test_verdict_on_undone_changes(called, false, outcome):
    (row,) = summary.undone_summary(undone_rows(called, false))
    assert row["verdict"] == outcome
    assert row["share_called"] == pytest.approx(np.mean(false) / 20)
    assert row["share_of_calls"] == pytest.approx(np.mean(false) / max(*called, 1))
    (none,) = summary.undone_summary(undone_rows([100] * 10, [0] * 10, n_undone=0))
    assert (none["share_called"], none["verdict"]) == (None, summary.OPEN)


def test_mixed_groups_and_undone_changes_decide_the_verdict_and_are_in_the_headline():
    null, spikes = summary.null_summary(rows(task.NULL, [0] * 10, [0] * 10)), rows(task.SPIKE, [40] * 10, [2] * 10)
    spikes = summary.spike_summary(spikes)

    def verdict(mixed: list[int], undone: list[int]) -> dict[str, Any]:
        more = {
            "mixed": summary.null_summary(rows(task.MIXED, mixed, mixed), task.MIXED),
            "undone": summary.undone_summary(undone_rows([100] * 10, undone)),
        }
        return summary.verdict(null, spikes, [], **more, level=0.05, delta=0.5, replicates="cells")

    fine = verdict([0] * 9 + [2], [1] * 10)
    assert fine["fdr"] == summary.CALIBRATED
    assert fine["messages"][0].startswith(
        "Calibrated: an FDR of 5% means 5.0 % (se 0.00) false here, 0 of 10 splits where nothing changed have a "
        "discovery, 1 of 10 splits of mixed groups have a discovery, and 5.0 % (se 0.00) of the genes whose change was "
        "undone are called (1.0 % of the calls). Of the genes"
    )
    assert [message.partition(",")[0] for message in fine["messages"][1:]] == [
        "Nothing changed",
        "Nothing changed",
        "Changes planted",
        "Changes undone",
    ]
    assert "5.0 % (se 0.00) of the genes whose change was undone are called; they are 1.0 %" in fine["messages"][4]
    assert verdict([3] * 10, [1] * 10)["fdr"] == verdict([0] * 10, [12] * 10)["fdr"] == summary.TOO_MANY


# ------------------------------------------------------------------------------------------------------ whole runs
def test_mixed_groups_are_pooled_and_split_whatever_their_group(monkeypatch):
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(task, "differential_expression", answer_of(lambda lfc: 0 * lfc, seen))
    calibration = calibrate(simulated(n=300), "group", ["A", "B", "C"], splits=0, spikes=0, mixed=6, undone=0)
    assert list(dict.fromkeys(calibration.table["group"])) == ["A + B", "A + C", "B + C"]
    assert set(calibration.table["kind"]) == {"mixed"}
    shares = []
    for each, pair in zip(seen, 2 * ["AB", "AC", "BC"], strict=True):
        pooled = pd.crosstab(each["obs"]["group"].astype(str), each["half"])
        halves = pooled.loc[list(pair), [task.FIRST, task.SECOND]]
        assert halves.sum().tolist() == [100, 100]
        assert halves.to_numpy().sum() == 200
        shares.append(halves.iloc[0, 0])
    assert len(set(shares)) > 1  # half of either group in expectation, not in each split
    assert 35 < np.mean(shares) < 65


def test_undone_genes_agree_between_the_groups_and_no_others_do():
    adata = simulated(n=3000)
    adata.X = sparse.csr_matrix(adata.X)
    options = {"within": None, "batch_key": None, "covariates": [], "delta": 0.5, "min_cells": None}
    asked = {"groupby": "group", "groups": ["A", "B"], "options": options, "model": None}
    counts, undone = undo_changes(adata, asked, np.random.default_rng(1))
    (genes,) = undone.values()
    assert len(genes) == math.ceil(0.1 * CHANGED)
    assert (genes < CHANGED).all()
    others = np.setdiff1d(np.arange(adata.n_vars), genes)
    assert (counts != adata.X)[:, others].nnz == 0
    group = adata.obs["group"].to_numpy()
    assert (counts != adata.X)[group == "C"].nnz == 0
    a, b = (np.asarray(counts[group == name].sum(0)).ravel() for name in "AB")
    lfc = np.log2(a / b)
    lfc -= np.median(lfc[CHANGED:])
    assert np.abs(lfc[genes]).max() < 0.25  # four standard errors of the counts left
    assert np.abs(lfc[np.setdiff1d(np.arange(CHANGED), genes)]).min() > 1.5
    by_type = undo_changes(adata, asked | {"options": options | {"within": "type"}}, np.random.default_rng(1))[1]
    assert sorted(by_type) == ["t", "u"]


@pytest.mark.parametrize("ignores", [False, True])
def test_who_calls_what_was_undone_is_found_out(monkeypatch, ignores):
    """An analysis that knows how the groups differ calls the undone genes; one that looks at the counts does not."""
    seen: list[dict[str, Any]] = []
    known = np.arange(40) < CHANGED
    looks = lambda lfc: np.abs(lfc - np.median(lfc[CHANGED:])) > 1  # noqa: E731
    monkeypatch.setattr(
        task, "differential_expression", answer_of(lambda lfc: (known if ignores else looks(lfc)) * 0.99, seen)
    )
    adata = simulated(n=900)
    calibration = calibrate(adata, "group", ["A", "B"], splits=0, spikes=0, mixed=0, undone=6, seed=1)
    table = calibration.table[calibration.table["level"] == 0.05]
    assert set(table["group"]) == {"A vs B"}
    assert (table["n_unchanged"] == math.ceil(0.1 * CHANGED)).all()
    assert table[["n_true", "tpr"]].isna().all().all()
    (row,) = (row for row in calibration.results["undone"] if row["level"] == 0.05)
    assert row["share_called"] == (1 if ignores else 0)
    assert row["share_of_calls"] == pytest.approx(table["n_unchanged"].mean() / CHANGED if ignores else 0)
    for each in seen:  # as many cells as halves have; the other cells of both groups are not there to learn from
        assert pd.Series(each["half"]).value_counts().to_dict() == {task.FIRST: 150, task.SECOND: 150, "of C": 300}
        sides = pd.crosstab(each["obs"]["group"].astype(str), each["half"])
        assert (sides.loc["A", task.FIRST], sides.loc["B", task.SECOND]) == (150, 150)


def test_two_groups_with_a_prior_from_other_cells_are_mixed_and_undone_by_default():
    how = CalibrateOptions()

    def numbers(groups: str, how: CalibrateOptions = how, **changes: Any) -> tuple[int | None, int | None]:
        asked = {"sample_key": None, "pair_by": None, "scale": "centred", "prior": "profile"} | changes
        decided = pipeline._with_pairs(how, SimpleNamespace(**asked), list(groups))
        return decided.mixed, decided.undone

    assert numbers("AB") == numbers("ABC") == (10, 10)
    assert numbers("AB", prior="none") == numbers("A") == numbers("AB", sample_key="donor") == (0, 0)
    assert numbers("AB", scale="proportion") == (10, 0)
    assert numbers("AB", CalibrateOptions(mixed=2, undone=0)) == (2, 0)


def test_real_analyses_of_mixed_and_undone_groups(tmp_path):
    options = {"splits": 0, "spikes": 0, "mixed": 1, "undone": 1, "within": "type", "batch_key": "batch", **FAST}
    calibration = calibrate(simulated(n=360, genes=60), "group", ["A", "B"], out=tmp_path, **options)
    table = calibration.table[calibration.table["level"] == 0.05].set_index(["kind", "within"])
    assert list(table.index) == [("mixed", "t"), ("mixed", "u"), ("undone", "t"), ("undone", "u")]
    assert (table.loc["mixed", "n_unchanged"] == 60).all()
    assert table.loc["undone", "n_unchanged"].between(1, 2).all()
    assert (table.loc["undone", "n_called"] > table.loc["undone", "n_false"]).all()
    assert calibration.results["settings"]["mixed"] == calibration.results["settings"]["undone"] == 1
    source = calibration.report(tmp_path).read_text(encoding="utf-8")
    assert "Where groups were mixed" in source
    assert "Where changes were undone" in source
