"""Halves, planted changes and their truth; how many calls are false; the words; and the whole on made-up cells."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from test_de_analysis import simulated

from checks import assert_mean, assert_within
from vaerdict import de
from vaerdict.core import DataError, SettingError
from vaerdict.de.calibration import compare as work
from vaerdict.de.calibration import summary as words
from vaerdict.de.calibration.splits import PATTERN, deal, kept_shares, planted, sample_splits, thinned, true_lfc

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
    found = sample_splits(strata, 50, rng)
    assert len(found) == n_ways
    assert all("p" in first for first in found)
    assert len({frozenset(first) for first in found}) == n_ways
    assert all(abs(2 * len(first) - len(strata)) <= 1 for first in found)
    for name in set(strata.values()):
        assert all(
            abs(2 * sum(strata[s] == name for s in first) - list(strata.values()).count(name)) <= 1 for first in found
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


def test_truth_of_cells_of_one_kind_is_what_was_planted():
    counts = sparse.csr_matrix(np.tile([10.0, 20.0, 30.0, 40.0, 50.0, 0.0], (4, 1)))
    lfc = np.array([1.0, -2.0, 0.0, 0.0, 0.0, 1.0])
    kept = kept_shares(lfc)
    centred = true_lfc(counts, kept, None, centred=True)
    shift = math.log2(135 / 145)  # molecules left in the first half over those left in the second, turned round
    share = true_lfc(counts, kept, None, centred=False)
    assert share[:5] == pytest.approx(lfc[:5] - math.log2(135 / 145))
    assert share[5] == 0  # never seen: changed in nothing
    assert centred == pytest.approx(share - np.median(share))
    assert centred[2] == pytest.approx(0)
    owners = np.array(["s", "s", "t", "t"], dtype=object)
    assert true_lfc(counts, kept, owners, centred=True) == pytest.approx(centred)
    assert shift < 0


def test_truth_is_where_proportions_of_thinned_cells_go(rng):
    n = 4000
    rate = np.exp(rng.normal(1.0, 0.7, size=(1, 20))) * np.exp(rng.normal(0, 0.6, size=(n, 20)))
    x = sparse.csr_matrix(rng.poisson(rate).astype(np.float64))
    kept = kept_shares(planted(np.arange(20.0), 0.5, rng))
    truth = torch.from_numpy(true_lfc(x, kept, None, centred=False))
    shares = []
    for side in (0, 1):
        y = thinned(x, np.full(n, side), kept, rng).toarray()
        shares.append(torch.from_numpy(y / np.maximum(y.sum(1, keepdims=True), 1)))
    lfc = shares[0].mean(0).log2() - shares[1].mean(0).log2()
    error = sum(s.var(0) / n / s.mean(0).square() for s in shares).sqrt() / math.log(2)
    assert_within(lfc, truth, error, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_within(lfc, truth + 0.3, error, rate=1e-6)


# ------------------------------------------------------------------------------------------------------ measures
def test_calls_and_what_is_false_of_them():
    prob, lfc = torch.tensor([0.99, 0.95, 0.9, 0.1]).double(), torch.tensor([3.0, 2.0, 1.0, 0.1]).double()
    changed = torch.tensor([True, False, True, True])
    one, five, half = work.calls(prob, lfc, changed, (0.01, 0.06, 0.5))
    assert (one["n_called"], one["n_false"], one["fdp"], one["tpr"]) == (1, 0, 0.0, pytest.approx(1 / 3))
    assert (five["n_called"], five["n_false"], five["fdp"]) == (3, 1, pytest.approx(1 / 3))
    assert five["expected_fdr"] == pytest.approx(0.16 / 3)
    assert (half["n_called"], half["tpr"]) == (4, 1.0)
    (none,) = work.calls(torch.zeros(4).double(), lfc, torch.zeros(4, dtype=torch.bool), (0.05,))
    assert (none["n_called"], none["fdp"], none["tpr"], none["expected_fdr"]) == (0, 0.0, None, 0.0)
    expected = 100 * np.mean([abs(0 - 0.01), abs(1 / 2 - 0.03), abs(1 / 3 - 0.16 / 3), abs(1 / 4 - 1.06 / 4)])
    assert work.fdr_mae(prob, lfc, changed) == pytest.approx(expected)


def test_coverage_in_all_and_by_expression():
    table = pd.DataFrame(
        {"lfc_low": -1.0, "lfc_high": 1.0, "mean_a": np.arange(10.0), "mean_b": np.arange(10.0)}, index=range(10)
    )
    truth = np.array([0, 2, 0, 0, 0, 0, 0, 0, -3, 4.0])
    whole, bins = work.covered(table, truth)
    assert whole == pytest.approx(0.7)
    assert [b["coverage"] for b in bins] == [0.5, 1.0, 1.0, 1.0, 0.0]
    assert [b["expression"] for b in bins] == [0.5, 2.5, 4.5, 6.5, 8.5]


def test_estimates_fall_short_in_the_direction_of_the_change():
    rows = work.by_size(np.array([0.0, 1, -1]), np.array([0.0, 1, -1]), np.array([0.3, 0.8, -0.4]), np.array([0, 1, 0]))
    assert rows[0] == {"size": 0.0, "n": 1, "called": 0, "short": 0.0}
    assert rows[1] == {"size": 1.0, "n": 2, "called": 1, "short": pytest.approx(0.4)}


# ------------------------------------------------------------------------------------------------------ words
def test_the_test_behind_a_word_has_its_false_alarm_rate(rng):
    def alarms(shift: float) -> torch.Tensor:
        drawn = 0.3 + shift + 0.05 * rng.standard_normal((8000, 10))
        means = [words.Mean(row.mean(), row.std(ddof=1) / math.sqrt(10), 10) for row in drawn]
        return torch.tensor([float(words.side(mean, 0.3, 10**9) == 1) for mean in means])

    assert_mean(alarms(0.0), words.RATE, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(alarms(0.01), words.RATE, rate=1e-6)


def rows(kind: str, called: list[int], false: list[int], level: float = 0.05) -> list[dict[str, Any]]:
    names = {"kind": kind, "group": "g", "method": "model", "replicates": "cells", "level": level, "n_genes": 100}
    names |= {"n_true": 50, "expected_fdr": level}
    return [
        {**names, "split": i, "n_called": n, "n_false": w, "fdp": w / max(n, 1), "tpr": (n - w) / 50}
        for i, (n, w) in enumerate(zip(called, false, strict=True))
    ]


@pytest.mark.parametrize(
    ("hit", "splits", "word"),
    [
        (0, 20, words.COMPATIBLE),
        (4, 20, words.COMPATIBLE),
        (5, 20, words.TOO_MANY),
        (0, 4, words.OPEN),
        (4, 4, words.TOO_MANY),
    ],
)
def test_word_on_splits_without_change(hit, splits, word):
    counts = [3] * hit + [0] * (splits - hit)
    (found,) = words.null_summary(rows(work.NULL, counts, counts))
    assert found["word"] == word
    assert found["splits_with_any"] == hit
    assert found["discoveries"] == pytest.approx(3 * hit / splits)
    if (hit, splits) == (0, 20):  # exact: (1 - p)^20 = 0.025
        assert found["share_high"] == pytest.approx(1 - 0.025 ** (1 / 20))


@pytest.mark.parametrize(
    ("called", "false", "word"),
    [
        ([40] * 10, [2, 1, 3, 2, 2, 1, 3, 2, 2, 2], words.CALIBRATED),
        ([40] * 10, [9, 8, 10, 9, 9, 7, 8, 9, 9, 9], words.TOO_MANY),
        ([40] * 10, [0] * 10, words.CONSERVATIVE),
        ([4] * 10, [0] * 10, words.OPEN),  # forty calls cannot tell none from five percent
        ([40] * 10, [0, 6, 0, 0, 5, 0, 7, 0, 3, 0], words.OPEN),
        ([0] * 10, [0] * 10, words.OPEN),
        ([4000] * 4, [200, 190, 210, 200], words.OPEN),  # as good as can be, but four splits
        ([40] * 4, [9, 8, 10, 9], words.TOO_MANY),
        ([40], [40], words.OPEN),
    ],
)
def test_word_on_planted_changes(called, false, word):
    (found,) = words.spike_summary(rows(work.SPIKE, called, false))
    assert found["word"] == word


def test_verdict_takes_the_worse_of_both():
    good, bad = [40] * 10, [20] * 10
    null = words.null_summary(rows(work.NULL, good, good))
    fine = words.null_summary(rows(work.NULL, [0] * 10, [0] * 10))
    spikes = words.spike_summary(rows(work.SPIKE, good, [2] * 10))
    false = words.spike_summary(rows(work.SPIKE, good, bad))

    def said(*parts: Any) -> str:
        return words.verdict(*parts, [], level=0.05, replicates="cells")["word"]

    assert said(null, spikes) == said(fine, false) == words.TOO_MANY
    assert said(fine, spikes) == words.CALIBRATED
    assert said(fine, []) == words.OPEN


# ------------------------------------------------------------------------------------------------------ the whole
def answer_of(prob: Any, seen: list[dict[str, Any]]) -> Any:
    """A stand-in for the analysis that gives every gene `prob(counts of the halves)`, and notes what it was given."""

    def analysis(adata: Any, groupby: str, a: str, b: str, **options: Any) -> Any:
        half = adata.obs[groupby].astype(str).to_numpy()
        x = adata.X.toarray()
        means = [x[half == name].mean(0) for name in (a, b)]
        lfc = np.log2(means[0] + 1e-9) - np.log2(means[1] + 1e-9)
        seen.append({**options, "half": half, "obs": adata.obs})
        table = {"contrast": "c", "gene": adata.var_names, "lfc_mean": lfc, "prob_de": prob(lfc), "lfc_low": lfc - 1}
        table |= {"lfc_high": lfc + 1, "mean_a": means[0], "mean_b": means[1], "raw_lfc": lfc, "raw_prob_de": 0.0 * lfc}
        return SimpleNamespace(table=pd.DataFrame(table), results={"contrasts": [{"name": "c", "within": None}]})

    return analysis


@pytest.mark.parametrize(
    ("prob", "word"),
    [
        (lambda lfc: np.full(len(lfc), 0.99), words.TOO_MANY),
        (lambda lfc: (np.abs(lfc) > 0.7).astype(float), words.CALIBRATED),  # well above delta, for estimates err
        (lambda lfc: np.zeros(len(lfc)), words.OPEN),
    ],
    ids=["calls everything", "calls what changed", "calls nothing"],
)
def test_an_analysis_is_judged_by_what_it_calls(monkeypatch, prob, word):
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(work, "differential_expression", answer_of(prob, seen))
    adata = simulated(n=1500, genes=400, null=True)
    found = de.calibrate(adata, "group", ["B"], splits=6, spikes=6, seed=3)
    wanted = {words.CALIBRATED: (words.CALIBRATED, words.CONSERVATIVE)}.get(word, (word,))
    assert found.verdict["word"] in wanted
    assert len(seen) == 12
    for each in seen:
        sizes = {name: (each["half"] == name).sum() for name in (work.FIRST, work.SECOND)}
        assert sizes == {work.FIRST: 250, work.SECOND: 250}
        halved = np.isin(each["half"], [work.FIRST, work.SECOND])
        assert set(each["obs"]["group"][halved]) == {"B"}
        assert set(each["half"][~halved]) == {"of A", "of C"}  # known to be others
        assert (each["delta"], each["level"], each["n_top_genes"]) == (0.5, 0.05, 2000)
    assert len({each["half"].tobytes() for each in seen}) == 12
    assert sorted({each["seed"] for each in seen}) == list(range(3, 9))
    effects = {row["size"]: row for row in found.results["effects"] if row["method"] == "model"}
    assert effects[2.0]["short"] == pytest.approx(0, abs=0.1)


def test_the_same_seed_gives_the_same_table_and_a_stopped_run_goes_on(tmp_path):
    adata = simulated(n=120, null=True)
    options = {"splits": 2, "spikes": 1, **FAST}
    whole = de.calibrate(adata, "group", **options, out=tmp_path / "whole")
    parts = sorted((tmp_path / "whole" / "parts").glob("*.json"))
    assert len(parts) == 3
    parts[1].unlink()
    with pytest.raises(SettingError, match="--resume"):
        de.calibrate(adata, "group", **options, out=tmp_path / "whole")
    again = de.calibrate(adata, "group", **options, out=tmp_path / "whole", resume=True)
    pd.testing.assert_frame_equal(again.table, whole.table)
    written = (tmp_path / "whole" / "calibrate.csv").read_text()
    assert pd.read_csv(tmp_path / "whole" / "calibrate.csv").shape == (3 * 2 * 4, 13)
    other = de.calibrate(adata, "group", **options | {"seed": 1}, out=tmp_path / "other")
    assert (tmp_path / "other" / "calibrate.csv").read_text() != written
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert results["experiment"] == "calibrate"
    assert results["settings"]["groups"] == ["A"]
    assert json.loads((tmp_path / "whole" / "manifest.json").read_text())["data_sha256"] == whole.data_sha256
    assert other.results["verdict"]["word"] == words.OPEN


def test_whole_samples_are_split_with_cells_beside(monkeypatch):
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(work, "differential_expression", answer_of(lambda lfc: 0 * lfc, seen))
    adata = simulated(n=240, null=True)
    found = de.calibrate(adata, "group", ["A"], sample_key="sample", splits=9, spikes=0)
    assert len(seen) == 2 * 3
    assert [each["sample_key"] for each in seen[:2]] == ["sample", None]
    for each in seen:
        owners = pd.crosstab(each["obs"]["sample"].astype(str), each["half"])
        assert (owners[[work.FIRST, work.SECOND]] > 0).sum(axis=1).le(1).all()  # a sample is in one half
        assert ((owners[work.FIRST] > 0).sum(), (owners[work.SECOND] > 0).sum()) == (2, 2)
    assert set(found.table["replicates"]) == {"samples", "cells"}
    assert any("3 ways only" in warning for warning in found.results["warnings"])
    assert found.verdict["replicates"] == "samples"


def test_types_batches_and_samples_travel_to_the_real_analysis():
    found = de.calibrate(
        simulated(n=360, null=True),
        "group",
        ["A"],
        within="type",
        balance="batch",
        batch_key="batch",
        splits=1,
        spikes=1,
        **FAST,
    )
    assert set(found.table["n_genes"]) == {80}  # forty genes in each of two types
    assert found.table[found.table["kind"] == "spike"]["n_true"].min() > 0


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
        ({"splits": 0, "spikes": 0}, "at least one split"),
        ({"splits": -1}, "at least one split"),
        ({"layer": "raw"}, "layer='raw' is not there"),
        ({"groupby": "empty"}, "holds no label"),
    ],
)
def test_bad_settings_are_refused_with_the_remedy(changes, message):
    adata = simulated(n=60)
    adata.obs["few"] = ["x"] * 5 + ["y"] * 55
    adata.obs["empty"] = pd.Series([None] * 60, dtype=object, index=adata.obs.index)
    with pytest.raises(SettingError, match=message.replace("(", r"\(")):
        de.calibrate(adata, **{"groupby": "group", "splits": 1, "spikes": 0, **FAST, **changes})


def test_counts_are_asked_for():
    adata = simulated(n=60)
    adata.X = adata.X + 0.5
    with pytest.raises(DataError, match="no whole numbers"):
        de.calibrate(adata, "group", splits=1, spikes=0, **FAST)
