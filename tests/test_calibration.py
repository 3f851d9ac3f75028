"""Halves, planted changes and their truth, counts of false calls, the verdict, and whole runs on simulated cells."""

from __future__ import annotations

import inspect
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse

from checks import assert_mean, assert_within
from test_de_pipeline import simulated
from vaerdict.core import DataError, SettingError
from vaerdict.de.calibration import calibrate, inputs, summary, task
from vaerdict.de.calibration.halves import PATTERN, deal, kept_shares, planted, sample_splits, thinned, true_lfc
from vaerdict.de.calibration.strata import (
    ALL,
    CHANGED,
    EXPRESSION,
    MEASURES,
    SIZE,
    STRATA,
    Intervals,
    by_stratum,
    stratify,
)
from vaerdict.de.metrics import measure
from vaerdict.de.options import CalibrateOptions, DEOptions
from vaerdict.de.rivals import ANY_CHANGE, BEYOND_DELTA, Comparison, rival_answers
from vaerdict.decisions import discoveries, q_values
from vaerdict.optional import isolated
from vaerdict.options import options_of

pd = pytest.importorskip("pandas")
FAST = {"quick": True, "n_draws": 100}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20200429)


# ------------------------------------------------------------------------------------------------------ halves
def test_halves_are_even_in_every_stratum_and_over_all(rng):
    strata = np.array(["a"] * 7 + ["b"] * 5 + [None] * 3, dtype=object)
    for _ in range(50):
        first = deal(strata, rng)
        assert first.sum() == 8
        for name in ("a", "b", None):
            mine = strata == name
            assert abs(2 * first[mine].sum() - mine.sum()) == 1


@pytest.mark.parametrize("share", [0.1, 0.25, 0.8])
def test_a_smaller_share_is_dealt_as_evenly(share, rng):
    strata = np.array(["a"] * 40 + ["b"] * 20, dtype=object)
    first = deal(strata, rng, share)
    assert first.sum() == round(60 * share)
    for name, n in (("a", 40), ("b", 20)):
        assert abs(first[strata == name].sum() - share * n) <= 1


def test_every_cell_is_as_likely_in_either_half(rng):
    strata = np.array(["a", "a", "a", "b", "b", "c"], dtype=object)
    first = torch.from_numpy(np.stack([deal(strata, rng) for _ in range(20_000)])).double()
    for cell in (0, 4, 5):
        assert_mean(first[:, cell], 0.5, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(first[:, 0], 0.52, rate=1e-6)  # the check can fail


@pytest.mark.parametrize(
    ("strata", "n_ways"),
    [
        (dict.fromkeys("pqrs", "all"), 3),
        (dict.fromkeys("pqrstu", "all"), 10),
        (dict.fromkeys("pqrst", "all"), 10),
        ({"p": "ctrl", "q": "ctrl", "r": "stim", "s": "stim"}, 2),
    ],
)
def test_samples_are_halved_in_all_different_ways(strata, n_ways, rng):
    splits = sample_splits(strata, 50, rng)
    assert len(splits) == n_ways
    assert all("p" in first for first in splits)
    assert len({frozenset(first) for first in splits}) == n_ways
    assert all(abs(2 * len(first) - len(strata)) <= 1 for first in splits)
    for name in set(strata.values()):
        assert all(
            abs(2 * sum(strata[s] == name for s in first) - list(strata.values()).count(name)) <= 1 for first in splits
        )
    assert len(sample_splits(strata, 2, rng)) == 2


# ------------------------------------------------------------------------------------------------------ planted changes
def test_changes_are_the_same_mix_at_every_expression(rng):
    expression = rng.permutation(200).astype(float)
    lfc = planted(expression, 0.5, rng)
    for block in np.argsort(expression).reshape(10, 20):
        assert sorted(np.abs(lfc[block])) == sorted(0.5 * np.array(PATTERN))
    assert {-1.0, 0.0, 1.0} == set(np.sign(lfc))
    assert len(planted(expression[:7], 0.5, rng)) == 7


def test_thinning_keeps_counts_and_their_share(rng):
    x = sparse.csr_matrix(rng.poisson(20.0, size=(6000, 2)).astype(np.float32))
    half = np.arange(6000) % 3 - 1
    kept = np.array([[1.0, 0.25], [0.5, 1.0]])
    y = thinned(x, half, kept, rng).toarray()
    assert (y == np.round(y)).all()
    assert (y <= x.toarray()).all()
    assert (y[half < 0] == x.toarray()[half < 0]).all()
    assert (y[half == 0, 0] == x.toarray()[half == 0, 0]).all()
    ratio = torch.from_numpy(y[half == 0, 1]).double() - 0.25 * torch.from_numpy(x.toarray()[half == 0, 1]).double()
    assert_mean(ratio, 0.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(ratio, 0.4, rate=1e-6)


def test_truth_is_what_was_planted_relative_to_genes_without_a_change():
    counts = sparse.csr_matrix(np.tile([10.0, 20.0, 30.0, 40.0, 50.0, 0.0], (4, 1)) * np.array([[1], [2], [1], [5]]))
    lfc = np.array([1.0, -2.0, 0.0, 0.0, 0.0, 1.0])
    kept = kept_shares(lfc)
    owners = np.array(["s", "s", "t", "t"], dtype=object)
    for samples in (None, owners):
        centred = true_lfc(counts, kept, samples, centred=True)
        proportion = true_lfc(counts, kept, samples, centred=False)
        assert centred[:5] == pytest.approx(lfc[:5])
        # molecules left in the second half over those left in the first
        assert proportion[:5] == pytest.approx(lfc[:5] + math.log2(145 / 135))
        assert centred[5] == proportion[5] == 0  # never seen: changed in nothing


def test_truth_of_samples_is_their_mean():
    counts = sparse.csr_matrix(np.array([[10.0, 10.0], [30.0, 10.0], [0.0, 0.0], [5.0, 35.0]]))
    kept = kept_shares(np.array([1.0, 0.0]))
    owners = np.array(["s", "s", "empty", "t"], dtype=object)
    left = {"s": (40, 60), "t": (37.5, 40)}  # molecules in the second and the first half
    assert true_lfc(counts, kept, None, centred=False)[1] == pytest.approx(math.log2(77.5 / 100))
    each = [math.log2(second / first) for second, first in left.values()]
    assert true_lfc(counts, kept, owners, centred=False)[1] == pytest.approx(np.mean(each))


def test_truth_is_where_rates_of_thinned_cells_go(rng):
    n = 4000
    rate = np.exp(rng.normal(1.0, 0.7, size=(1, 20))) * np.exp(rng.normal(0, 0.6, size=(n, 20)))
    x = sparse.csr_matrix(rng.poisson(rate).astype(np.float64))
    kept = kept_shares(planted(np.arange(20.0), 0.5, rng))
    truth = torch.from_numpy(true_lfc(x, kept, None, centred=False))
    halves = [torch.from_numpy(thinned(x, np.full(n, side), kept, rng).toarray()) for side in (0, 1)]
    rates = [y.sum(0) / y.sum() for y in halves]
    lfc = rates[0].log2() - rates[1].log2()
    # of the ratio of sums, by its linearisation
    residuals = [(y - m * y.sum(1, keepdim=True)) / (m * y.sum(1).mean()) for y, m in zip(halves, rates, strict=True)]
    error = sum(r.var(0) / n for r in residuals).sqrt() / math.log(2)
    assert_within(lfc, truth, error, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_within(lfc, truth + 0.3, error, rate=1e-6)


# ------------------------------------------------------------------------------------------------------ measures
def test_calls_and_what_is_false_of_them():
    prob, lfc = torch.tensor([0.99, 0.95, 0.9, 0.1]).double(), torch.tensor([3.0, 2.0, 1.0, 0.1]).double()
    changed = torch.tensor([True, False, True, True])
    at = lambda level: discoveries(prob, level).numpy()  # noqa: E731
    whole = {None: np.ones(4, dtype=bool)}
    one, five, half = task.calls(at, changed.numpy(), (0.01, 0.06, 0.5), whole, prob.numpy())
    assert (one["n_called"], one["n_false"], one["fdp"], one["tpr"]) == (1, 0, 0.0, pytest.approx(1 / 3))
    assert (five["n_called"], five["n_false"], five["fdp"]) == (3, 1, pytest.approx(1 / 3))
    assert five["expected_fdr"] == pytest.approx(0.16 / 3)
    assert (half["n_called"], half["tpr"]) == (4, 1.0)
    nothing = np.zeros(4, dtype=bool)
    (none,) = task.calls(lambda level: nothing, nothing, (0.05,), whole, np.zeros(4))
    assert (none["n_called"], none["fdp"], none["tpr"], none["expected_fdr"]) == (0, 0.0, None, 0.0)
    (p_values,) = task.calls(lambda level: changed.numpy(), changed.numpy(), (0.05,), whole)
    assert (p_values["n_called"], p_values["fdp"], p_values["expected_fdr"]) == (3, 0.0, None)
    expected = 100 * np.mean([abs(0 - 0.01), abs(1 / 2 - 0.03), abs(1 / 3 - 0.16 / 3), abs(1 / 4 - 1.06 / 4)])
    assert measure(prob, lfc, changed.double(), 0.5)["fdr_mae"] == pytest.approx(expected)


def test_strata_by_expression_and_by_size_are_measured_alike():
    size = np.array([0, 0, 0, 0, 1, -1, 1, -1, 0.2, 0.2])
    expression, truth = np.arange(10.0)[::-1], size
    called = np.array([1, 0, 0, 0, 1, 1, 0, 1, 1, 0], dtype=bool)
    changed = np.abs(truth) >= 0.5
    estimate = np.where(size == 1, 0.7, np.where(size == -1, -0.5, 0.1))
    covering = np.array([1, 1, 1, 1, 0, 0, 1, 1, 0, 1], dtype=bool)
    strata = stratify(expression, size, truth, 0.5)
    rows = by_stratum(strata, called, changed, size, Intervals(covering, truth - estimate))
    by = {(row["by"], row["stratum"]): row for row in rows}
    assert [len(s.genes) for s in strata] == [10, 4, 2, 2, 2, 2, 2, 4, 2, 4]
    everything, moved = by[ALL, 0], by[CHANGED, 0]
    assert (everything["n_called"], everything["n_false"], everything["n_true"]) == (5, 2, 4)
    assert (everything["fdp"], everything["tpr"], everything["coverage"]) == (0.4, 0.75, 0.7)
    assert (moved["fdp"], moved["fdr_part"], moved["tpr"], moved["coverage"]) == (None, 0.0, 0.75, 0.5)
    assert moved["short"] == pytest.approx((0.3 + 0.5) / 2)
    sizes = [by[SIZE, i] for i in range(3)]
    assert [row["value"] for row in sizes] == [0.0, 0.2, 1.0]
    assert [row["called"] for row in sizes] == [0.25, 0.5, 0.75]
    assert [row["tpr"] for row in sizes] == [None, None, 0.75]
    assert sizes[0]["short"] is None
    assert sizes[1]["short"] == pytest.approx(0.1)
    for kind in (EXPRESSION, SIZE):  # every false call is in one stratum
        assert sum(row["fdr_part"] for (k, _), row in by.items() if k == kind) == pytest.approx(everything["fdp"])
    assert [by[EXPRESSION, i]["value"] for i in range(5)] == [0.5, 2.5, 4.5, 6.5, 8.5]
    low = by[EXPRESSION, 0]  # the two genes that changed by less than delta
    assert (low["n_true"], low["n_called"], low["coverage"]) == (0, 1, 0.5)
    assert all(row["coverage"] is None and row["short"] is None for row in by_stratum(strata, called, changed, size))
    unchanged = stratify(expression, 0 * size, 0 * size, 0.5)
    assert [s.by for s in unchanged] == [ALL, *[EXPRESSION] * 5, SIZE]


def test_strata_have_standard_errors_over_splits():
    names = {"kind": task.SPIKE, "replicates": "cells", "method": task.REPORTED, "question": BEYOND_DELTA}
    size = np.repeat([0.0, 1.0], 5)
    strata = stratify(np.arange(10.0), size, size, 0.5)
    lists = np.arange(10) >= np.array([5, 3, 7])[:, None]  # the changed genes; two more; two fewer
    parts = [
        {**names, "split": i, **row}
        for i, called in enumerate(lists)
        for row in by_stratum(strata, called, size > 0, size, Intervals(called, 0 * size))
    ]
    summaries = {(row["by"], row["stratum"]): row for row in summary.strata_summary(parts)}
    everything = summaries[ALL, 0]
    fdp, tpr = np.array([0, 2 / 7, 0]), np.array([1, 1, 0.6])
    for key, values in (("fdp", fdp), ("tpr", tpr), ("fdr_part", fdp), ("called", lists.mean(1))):
        assert everything[key] == pytest.approx(values.mean())
        assert everything[f"{key}_se"] == pytest.approx(values.std(ddof=1) / math.sqrt(3))
    assert (everything["splits"], everything["n_genes"], everything["n_true"]) == (3, 10, 5)
    assert everything["n_called"] == pytest.approx(15 / 3)
    assert {column.name for column in STRATA} | {f"{m.name}_se" for m in MEASURES} == set(everything)
    (row,) = summary.interval_summary(list(summaries.values()))
    assert (row["coverage"], row["n_genes"]) == (everything["coverage"], 10)
    assert (row["coverage_changed"], row["n_changed"]) == (pytest.approx(tpr.mean()), 5)
    assert row["coverage_changed_se"] == pytest.approx(everything["tpr_se"])


# ------------------------------------------------------------------------------------------------------ the verdict
def test_the_test_behind_a_verdict_has_its_false_alarm_rate(rng):
    def alarms(shift: float) -> torch.Tensor:
        drawn = 0.3 + shift + 0.05 * rng.standard_normal((8000, 10))
        means = [summary.Mean(row.mean(), row.std(ddof=1) / math.sqrt(10), 10) for row in drawn]
        return torch.tensor([float(summary.significant_direction(mean, 0.3, 10**9) == 1) for mean in means])

    assert_mean(alarms(0.0), summary.RATE, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(alarms(0.01), summary.RATE, rate=1e-6)


def rows(kind: str, called: list[int], false: list[int], level: float = 0.05) -> list[dict[str, Any]]:
    names = {"kind": kind, "group": "g", "method": "reported", "replicates": "cells", "level": level, "n_genes": 100}
    names |= {"n_true": 50, "expected_fdr": level}
    return [
        {**names, "split": i, "n_called": n, "n_false": w, "fdp": w / max(n, 1), "tpr": (n - w) / 50}
        for i, (n, w) in enumerate(zip(called, false, strict=True))
    ]


@pytest.mark.parametrize(
    ("hit", "splits", "outcome"),
    [
        (0, 20, summary.COMPATIBLE),
        (4, 20, summary.COMPATIBLE),
        (5, 20, summary.TOO_MANY),
        (0, 4, summary.OPEN),
        (4, 4, summary.TOO_MANY),
    ],
)
def test_verdict_on_splits_without_change(hit, splits, outcome):
    counts = [3] * hit + [0] * (splits - hit)
    (row,) = summary.null_summary(rows(task.NULL, counts, counts))
    assert row["verdict"] == outcome
    assert row["splits_with_any"] == hit
    assert row["discoveries"] == pytest.approx(3 * hit / splits)
    if (hit, splits) == (0, 20):  # exact: (1 - p)^20 = 0.025
        assert row["share_high"] == pytest.approx(1 - 0.025 ** (1 / 20))


@pytest.mark.parametrize(
    ("called", "false", "outcome"),
    [
        ([40] * 10, [2, 1, 3, 2, 2, 1, 3, 2, 2, 2], summary.CALIBRATED),
        ([40] * 10, [9, 8, 10, 9, 9, 7, 8, 9, 9, 9], summary.TOO_MANY),
        ([40] * 10, [0] * 10, summary.CONSERVATIVE),
        ([4] * 10, [0] * 10, summary.OPEN),  # forty calls cannot tell none from five percent
        ([40] * 10, [0, 6, 0, 0, 5, 0, 7, 0, 3, 0], summary.OPEN),
        ([0] * 10, [0] * 10, summary.OPEN),
        ([4000] * 4, [200, 190, 210, 200], summary.OPEN),  # as good as can be, but four splits
        ([40] * 4, [9, 8, 10, 9], summary.TOO_MANY),
        ([40], [40], summary.OPEN),
    ],
)
def test_verdict_on_planted_changes(called, false, outcome):
    (row,) = summary.spike_summary(rows(task.SPIKE, called, false))
    assert row["verdict"] == outcome


def test_verdict_takes_the_worse_of_both():
    good, bad = [40] * 10, [20] * 10
    null = summary.null_summary(rows(task.NULL, good, good))
    fine = summary.null_summary(rows(task.NULL, [0] * 10, [0] * 10))
    spikes = summary.spike_summary(rows(task.SPIKE, good, [2] * 10))
    false = summary.spike_summary(rows(task.SPIKE, good, bad))

    def outcome(*parts: Any) -> str:
        return summary.verdict(*parts, [], level=0.05, delta=0.5, replicates="cells")["fdr"]

    assert outcome(null, spikes) == outcome(fine, false) == summary.TOO_MANY
    assert outcome(fine, spikes) == summary.CALIBRATED
    assert outcome(fine, []) == summary.OPEN


def test_the_headline_has_the_rate_and_the_power():
    null = summary.null_summary(rows(task.NULL, [0] * 19 + [3], [0] * 19 + [3]))
    spikes = summary.spike_summary(rows(task.SPIKE, [40] * 10, [2] * 10))
    names = {"kind": task.SPIKE, "replicates": "cells", "method": task.REPORTED, "splits": 10, "n_genes": 50.0}
    names |= {"tpr_se": 0.01, "coverage_se": 0.01}
    strata = [{**names, "by": SIZE, "value": value, "tpr": value / 3} for value in (0.0, 0.45, 0.6, 1.5, 3.0)]
    strata += [{**names, "by": by, "value": None, "coverage": c} for by, c in ((ALL, 0.91), (CHANGED, 0.6))]
    asked = {"level": 0.05, "delta": 0.5, "replicates": "cells"}
    verdict = summary.verdict(null, spikes, strata, **asked)
    assert verdict["messages"][0] == (
        "Calibrated: an FDR of 5% means 5.0 % (se 0.00) false here, and 1 of 20 splits where nothing changed have a "
        "discovery. Of the genes that changed by 0.5 or more 76.0 % (se 0.00) are found: 20.0 % (se 1.00) of those "
        "that changed by 0.6 and 100.0 % (se 1.00) of those that changed by 3."
    )
    assert (verdict["achieved_fdr"], verdict["power"]) == (pytest.approx(0.05), pytest.approx(0.76))
    assert verdict["messages"][3].endswith(
        "90% intervals cover the true LFC for 91.0 % (se 1.00) of all genes: as stated. The intervals are shrunken "
        "towards no change, as the estimates are, and cover the true LFC for 60.0 % (se 1.00) of the genes that "
        "changed by 0.5 or more."
    )
    none = summary.verdict(null, summary.spike_summary(rows(task.SPIKE, [0] * 10, [0] * 10)), strata, **asked)
    assert "too few: no gene is called at an FDR of 5%, and 1 of 20 splits" in none["messages"][0]
    only = summary.verdict(null, [], [], **asked)
    assert only["messages"][0].startswith("Not resolved, because splits or calls are too few: 1 of 20 splits where")
    assert only["messages"][0].endswith("No change was planted, so that nothing is known about power.")
    assert only["power"] is None


# ------------------------------------------------------------------------------------------------------ whole runs
def answer_of(prob: Any, seen: list[dict[str, Any]]) -> Any:
    """A stand-in for the analysis that gives every gene `prob(lfc)`, and notes its arguments."""

    def analysis(adata: Any, groupby: str, a: str, b: str, **options: Any) -> Any:
        half = adata.obs[groupby].astype(str).to_numpy()
        x = adata.X.toarray()
        means = [x[half == name].mean(0) for name in (a, b)]
        lfc = np.log2(means[0] + 1e-9) - np.log2(means[1] + 1e-9)
        seen.append({**options, "half": half, "obs": adata.obs})
        table = {"contrast": "c", "gene": adata.var_names, "lfc_mean": lfc, "prob_de": prob(lfc), "lfc_low": lfc - 1}
        q = q_values(torch.from_numpy(np.asarray(table["prob_de"])), ties=torch.from_numpy(lfc).abs()).numpy()
        table |= {
            "lfc_high": lfc + 1,
            "mean_a": means[0],
            "mean_b": means[1],
            "q_value": q,
            "is_de": q <= 0.05,
            "lfsr": 0.0,
        }
        return SimpleNamespace(table=pd.DataFrame(table), results={"contrasts": [{"name": "c", "within": None}]})

    return analysis


@pytest.mark.parametrize(
    ("prob", "outcome"),
    [
        (lambda lfc: np.full(len(lfc), 0.99), summary.TOO_MANY),
        (lambda lfc: (np.abs(lfc) > 0.7).astype(float), summary.CALIBRATED),  # above delta, because estimates err
        (lambda lfc: np.zeros(len(lfc)), summary.OPEN),
    ],
    ids=["calls everything", "calls what changed", "calls nothing"],
)
def test_an_analysis_is_judged_by_what_it_calls(monkeypatch, prob, outcome):
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(task, "differential_expression", answer_of(prob, seen))
    adata = simulated(n=1500, genes=400, null=True)
    calibration = calibrate(adata, "group", ["B"], splits=6, spikes=6, seed=3)
    allowed = {summary.CALIBRATED: (summary.CALIBRATED, summary.CONSERVATIVE)}.get(outcome, (outcome,))
    assert calibration.verdict["fdr"] in allowed
    assert len(seen) == 12
    for each in seen:
        sizes = {name: (each["half"] == name).sum() for name in (task.FIRST, task.SECOND)}
        assert sizes == {task.FIRST: 250, task.SECOND: 250}
        halved = np.isin(each["half"], [task.FIRST, task.SECOND])
        assert set(each["obs"]["group"][halved]) == {"B"}
        assert set(each["half"][~halved]) == {"of A", "of C"}  # labelled as others
        assert (each["delta"], each["level"], each["n_top_genes"]) == (0.5, 0.05, None)
    assert len({each["half"].tobytes() for each in seen}) == 12
    assert sorted({each["seed"] for each in seen}) == list(range(3, 9))
    sizes = {row["value"]: row for row in calibration.results["strata"] if (row["kind"], row["by"]) == ("spike", SIZE)}
    assert sizes[2.0]["short"] == pytest.approx(0, abs=0.1)


def test_the_same_seed_gives_the_same_table_and_a_stopped_run_goes_on(tmp_path):
    adata = simulated(n=120, null=True)
    options = {"splits": 2, "spikes": 1, **FAST}
    calibration = calibrate(adata, "group", **options, out=tmp_path / "whole")
    finished = sorted((tmp_path / "whole" / "tasks").glob("*.json"))
    assert len(finished) == 3
    finished[1].unlink()
    again = calibrate(adata, "group", **options, out=tmp_path / "whole")
    pd.testing.assert_frame_equal(again.table, calibration.table)
    written = (tmp_path / "whole" / "calibrate.csv").read_text()
    assert pd.read_csv(tmp_path / "whole" / "calibrate.csv").shape == (3 * 4, 16)
    other = calibrate(adata, "group", **options | {"seed": 1}, out=tmp_path / "other")
    assert (tmp_path / "other" / "calibrate.csv").read_text() != written
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert results["experiment"] == "calibrate"
    assert results["settings"]["groups"] == ["A"]
    assert json.loads((tmp_path / "whole" / "manifest.json").read_text())["data_sha256"] == calibration.data_sha256
    assert other.results["verdict"]["fdr"] == summary.OPEN


def test_whole_samples_are_split_with_cells_beside(monkeypatch):
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(task, "differential_expression", answer_of(lambda lfc: 0 * lfc, seen))
    adata = simulated(n=240, null=True)
    calibration = calibrate(adata, "group", ["A"], sample_key="sample", splits=9, spikes=0)
    assert len(seen) == 2 * 3
    assert [each["sample_key"] for each in seen[:2]] == ["sample", None]
    for each in seen:
        owners = pd.crosstab(each["obs"]["sample"].astype(str), each["half"])
        assert (owners[[task.FIRST, task.SECOND]] > 0).sum(axis=1).le(1).all()  # a sample is in one half
        assert ((owners[task.FIRST] > 0).sum(), (owners[task.SECOND] > 0).sum()) == (2, 2)
    assert set(calibration.table["replicates"]) == {"samples", "cells"}
    assert any("3 ways only" in warning for warning in calibration.results["warnings"])
    assert calibration.verdict["replicates"] == "samples"


def simulated_donors(n_donors: int, rng: np.random.Generator, genes: int = 150) -> Any:
    """Cells of donors between whom every gene varies by its own amount, of 30 to 90 cells each."""
    anndata = pytest.importorskip("anndata")
    donor = np.repeat(np.arange(n_donors), rng.integers(30, 91, n_donors))
    shape = 1 / rng.uniform(0.05, 0.4, genes) ** 2  # coefficients of variation between donors
    mean = 4 * np.exp(rng.normal(0, 0.8, genes)) * rng.gamma(shape, 1 / shape, (n_donors, genes))
    depth = np.exp(rng.normal(0, 0.3, (len(donor), 1)))
    counts = rng.poisson(depth * mean[donor] * rng.gamma(5.0, 0.2, (len(donor), genes))).astype(np.float32)
    obs = pd.DataFrame({"type": "T", "donor": [f"d{i}" for i in donor]}, index=[f"c{i}" for i in range(len(donor))])
    return anndata.AnnData(sparse.csr_matrix(counts), obs=obs)


def test_simulated_donors_are_calibrated_as_samples(tmp_path, rng):
    """Where nothing changed, cells as replicates call genes by which donors differ, and donors as replicates do not.

    Of ten independent splits four or more have a discovery at a rate of 5 % with a probability of 1.1e-3.
    """
    adata = simulated_donors(8, rng)
    calibration = calibrate(adata, "type", sample_key="donor", splits=10, spikes=3, out=tmp_path, **FAST)
    table = calibration.table[calibration.table["level"] == 0.05]
    null = table[table["kind"] == "null"].set_index("split")
    by_samples, by_cells = (null[null["replicates"] == name]["n_called"] > 0 for name in ("samples", "cells"))
    assert (len(by_samples), len(by_cells)) == (10, 10)
    assert by_samples.sum() <= 3
    assert by_cells.sum() >= 6
    spikes = table[table["kind"] == "spike"]
    assert set(spikes["replicates"]) == {"samples"}
    strata = [row for row in calibration.results["strata"] if (row["kind"], row["by"]) == ("spike", SIZE)]
    assert [row["value"] for row in strata] == sorted({0.5 * size for size in PATTERN})
    assert sum(row["n_genes"] for row in strata) == pytest.approx(spikes["n_genes"].mean())
    assert strata[-1]["tpr"] > 0.5  # a change of 2, four times that of most donors
    assert strata[-1]["tpr"] > strata[0]["called"]
    assert calibration.verdict["power"] == pytest.approx(spikes["tpr"].mean())
    assert calibration.report(tmp_path).is_file()


def test_rivals_are_asked_about_the_same_cells_and_genes(monkeypatch):
    pytest.importorskip("scanpy"), pytest.importorskip("edgepython")
    asked: list[Comparison] = []

    def noted(comparison: Comparison, names: Any, **keys: Any) -> Any:
        asked.append(comparison)
        return rival_answers(comparison, names, **keys)

    monkeypatch.setattr(task, "rival_answers", noted)
    adata = simulated(n=360, null=True)
    names = ["wilcoxon", "edger", "edger-treat"]
    options = {"splits": 1, "spikes": 2, "rivals": names, "n_top_genes": 30, **FAST}
    calibration = calibrate(adata, "group", ["A"], sample_key="sample", **options)
    assert [each.samples is None for each in asked] == [False, True, False, False]  # cells beside samples in the null
    calibrate(adata, "group", ["A"], within="type", batch_key="batch", **options | {"spikes": 0})
    assert [len(each.first) for each in asked[4:]] == [60, 60]  # each of two types
    assert all(set(each.pairs) == set(adata.obs["batch"]) for each in asked[4:])
    for each in asked:
        assert each.counts.shape[1] == 30
        assert (each.totals >= np.asarray(each.counts.sum(1)).ravel()).all()  # of all 40 genes
        assert 0 < each.first.sum() < len(each.first)
    table = calibration.table
    assert list(table["method"].unique()) == ["reported", *names]
    questions = table.groupby("method")["question"].unique().map(list).to_dict()
    assert questions == {
        **{"reported": [BEYOND_DELTA], "edger-treat": [BEYOND_DELTA]},
        **{"wilcoxon": [ANY_CHANGE], "edger": [ANY_CHANGE]},
    }
    assert table["expected_fdr"].isna().equals(table["method"] != "reported")
    true = table[table["kind"] == "spike"].groupby(["split", "method"])["n_true"].first().unstack()
    assert (true["edger"] == true["wilcoxon"]).all()
    assert (true["edger"] > true["edger-treat"]).all()  # changes of less than delta are changes
    assert (true["edger-treat"] == true["reported"]).all()
    (message,) = (m for m in calibration.verdict["messages"] if "own question" in m)
    assert message.endswith("Any change: wilcoxon, edger. Change beyond delta: edger-treat.")
    strata = calibration.results["strata"]
    assert {row["method"] for row in strata} == {"reported", *names}
    assert {row["method"] for row in strata if row["coverage"] is not None} == {"reported"}
    assert [row["method"] for row in calibration.results["fdr_mae"]] == ["reported"]


def test_rivals_call_what_was_planted_and_little_else():
    """With 250 deep cells a half nearly all changes are found; an FDP of 0.3 at 5 % has a probability below 1e-6."""
    pytest.importorskip("edgepython")
    adata = simulated(n=1500, genes=200, null=True)
    calibration = calibrate(adata, "group", ["B"], splits=0, spikes=2, rivals=["edger", "edger-treat"], **FAST)
    rows = calibration.table[(calibration.table["level"] == 0.05) & (calibration.table["method"] != "reported")]
    assert (rows["fdp"] < 0.3).all()
    assert (rows["tpr"] > 0.4).all()


def test_calibrate_takes_every_option_of_the_analysis(monkeypatch):
    signature = inspect.signature(calibrate)
    for option in (*options_of(CalibrateOptions), *options_of(DEOptions)):
        assert signature.parameters[option.name].default == option.default
        assert f"{option.name} : " in (calibrate.__doc__ or "")
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(task, "differential_expression", answer_of(lambda lfc: 0 * lfc, seen))
    options = {"prior": "none", "check_model": True, "keep_genes": ("g1",), "objectives": ("VAE",), "min_cells": 2}
    settings = calibrate(simulated(n=120), "group", ["A"], splits=1, spikes=0, **options).results["settings"]
    expected = options | {"keep_genes": ["g1"], "objectives": ["VAE"]}
    assert {name: seen[0][name] for name in options} == {name: settings[name] for name in options} == expected
    with pytest.raises(TypeError, match="nonsense"):
        calibrate(simulated(n=60), "group", nonsense=1)


def test_genes_go_by_their_symbols():
    adata = simulated(n=120, null=True)
    adata.var["symbol"] = [f"S{i // 2}" for i in range(adata.n_vars)]  # each twice
    options = {"gene_symbols": "symbol", "keep_genes": ("S3",), "n_top_genes": 10, "splits": 0, "spikes": 1, **FAST}
    with_symbols = calibrate(adata, "group", ["A"], **options)
    plain = calibrate(adata, "group", ["A"], **options | {"gene_symbols": None, "keep_genes": ("g6",)})
    assert set(with_symbols.table["n_genes"]) <= {10, 11}
    pd.testing.assert_frame_equal(with_symbols.table, plain.table)
    with pytest.raises(SettingError, match="keep_genes names 1 genes that are not there"):
        calibrate(adata, "group", ["A"], **options | {"keep_genes": ("nothing",)})


@pytest.mark.parametrize(("prior", "n_others"), [("none", 50), ("profile", 120)])
def test_cells_to_learn_from_reach_an_analysis_with_a_prior(monkeypatch, prior, n_others):
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(task, "differential_expression", answer_of(lambda lfc: 0 * lfc, seen))
    monkeypatch.setattr(inputs, "OTHER_CELLS", 50)
    monkeypatch.setattr(inputs, "MOST_OTHER", 120)
    adata = simulated(n=360)
    adata.obs["known"] = np.where(adata.obs["group"] == "B", None, adata.obs["group"])
    calibrate(adata, "known", ["A"], splits=1, spikes=0, prior=prior)
    half = seen[0]["half"]
    assert (np.isin(half, [task.FIRST, task.SECOND])).sum() == 120
    others = half[~np.isin(half, [task.FIRST, task.SECOND])]
    assert len(others) == n_others
    assert set(map(str, others)) == {"of C", "nan"}  # with a label and without


def test_genes_that_no_other_cell_shows_are_calibrated_too():
    """Nothing predicts such a gene: its prediction is zero, without an error."""
    adata = simulated(n=360, genes=60, null=True)
    adata.X[(adata.obs["group"] != "A").to_numpy(), :10] = 0
    calibration = calibrate(adata, "group", ["A"], splits=1, spikes=1, **FAST)
    assert set(calibration.table["n_genes"]) == {60}
    assert calibration.table["expected_fdr"].notna().all()


@pytest.fixture(scope="module")
def scvi_model() -> Any:
    """A small model, hardly trained, which reads its counts from a layer, and its cells."""
    scvi = pytest.importorskip("scvi")
    adata = simulated(n=180, null=True)
    adata.layers["counts"] = adata.X.copy()
    adata.X = np.log1p(adata.X)
    with isolated(0):
        scvi.model.SCVI.setup_anndata(adata, layer="counts", batch_key="batch", labels_key="type")
        model = scvi.model.SCVI(adata, n_hidden=8, n_latent=2)
        model.train(max_epochs=2, accelerator="cpu", enable_progress_bar=False, logger=False)
    return model, adata


def test_a_fitted_model_is_calibrated_as_an_object_and_from_its_folder(scvi_model, tmp_path):
    model, adata = scvi_model
    model.save(str(tmp_path / "model"))
    options = {"splits": 1, "spikes": 1, "n_draws": 100}
    by_object = calibrate(adata, "group", ["A"], model=model, out=tmp_path / "run", **options)
    by_folder = calibrate(adata, "group", ["A"], model=tmp_path / "model", **options)
    pd.testing.assert_frame_equal(by_object.table, by_folder.table)
    assert (tmp_path / "run" / "inputs").is_dir()
    assert set(by_object.table["n_genes"]) == {40}  # all genes of the model
    assert by_object.results["settings"]["model"] == "SCVI"
    again = calibrate(adata, "group", ["A"], model=model, out=tmp_path / "run", **options)
    pd.testing.assert_frame_equal(by_object.table, again.table)
    assert again.results["seconds"] == by_object.results["seconds"]  # nothing was done again
    pairs = calibrate(
        adata, "group", ["A", "B"], model=model, mixed=1, undone=1, **options | {"splits": 0, "spikes": 0}
    )
    assert set(pairs.table["kind"]) == {"mixed", "undone"}  # within the batches of the model
    without = calibrate(adata, "group", ["A"], layer="counts", **options)
    assert not without.table.equals(by_object.table)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(DataError, match=r"holds no model\.pt"):
        calibrate(simulated(n=60), "group", ["A"], model=tmp_path, splits=1, spikes=0)


@pytest.mark.parametrize("joint", [False, True])
def test_types_and_batches_travel_to_the_real_analysis(joint):
    options = {"within": "type", "balance": "batch", "batch_key": "batch", "joint_fdr": joint}
    calibration = calibrate(simulated(n=360, null=True), "group", ["A"], splits=1, spikes=1, **options, **FAST)
    table = calibration.table
    lists = table.groupby(["kind", "level"])["within"].agg(list)
    assert all(types == ([None] if joint else ["t", "u"]) for types in lists)  # an FDR each, or one
    assert set(table["n_genes"]) == {80 if joint else 40}  # forty genes in each of two types
    assert table[table["kind"] == "spike"]["n_true"].min() > 0
    (row,) = (row for row in calibration.results["null"] if row["level"] == 0.05)
    assert row["splits"] == (1 if joint else 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groupby": "grp"}, "groupby='grp' is no column"),
        ({"groups": ["Z"]}, "groups='Z' is no group of 'group'"),
        ({"groupby": "few", "groups": ["x"]}, "'x' has 5 cells; two halves need at least 6"),
        ({"sample_key": "type"}, "2 samples of enough cells; halves of whole samples need at least 4"),
        ({"sample_key": "sample", "balance": "batch"}, "holds several values of 'batch'"),
        ({"balance": "nothing"}, "balance='nothing' is no column"),
        ({"scale": "pair"}, "no truth to calibrate against"),
        ({"rivals": ["limma"]}, "no rival limma; there are wilcoxon, ttest, deseq2, edger"),
        ({"splits": 0, "spikes": 0}, "at least one split"),
        ({"splits": -1}, "splits=-1: at least 0"),
        ({"mixed": 1}, "mixed=1 is about pairs of groups; name two or more with groups"),
        ({"undone": 1, "groups": ["A", "B"], "sample_key": "sample"}, "undone=1 splits cells"),
        ({"undone": 1, "groups": ["A", "B"], "scale": "proportion"}, "undone=1 with scale='proportion'"),
        ({"layer": "raw"}, "layer='raw' is not there"),
        ({"groupby": "empty"}, "holds no label"),
    ],
)
def test_bad_settings_are_refused_with_the_remedy(changes, message):
    adata = simulated(n=60)
    adata.obs["few"] = ["x"] * 5 + ["y"] * 55
    adata.obs["empty"] = pd.Series([None] * 60, dtype=object, index=adata.obs.index)
    with pytest.raises(SettingError, match=message.replace("(", r"\(")):
        calibrate(adata, **{"groupby": "group", "splits": 1, "spikes": 0, **FAST, **changes})


def test_counts_are_asked_for():
    adata = simulated(n=60)
    adata.X = adata.X + 0.5
    with pytest.raises(DataError, match="no whole numbers"):
        calibrate(adata, "group", splits=1, spikes=0, **FAST)
