"""The benchmark of the learned prior: its designs, measures, rows and tables."""

from __future__ import annotations

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from vaerdict.core import SettingError
from vaerdict.report import text
from vaerdict_paper import benchmarks
from vaerdict_paper.benchmarks import prior
from vaerdict_paper.benchmarks.de_methods.cells import GLIOBLASTOMA, KANG, PBMC, read_cells
from vaerdict_paper.benchmarks.prior import designs, methods, simulated
from vaerdict_paper.benchmarks.prior.designs import FIRST, OTHER, OTHER_KINDS, SAME_KINDS, SECOND, WRONG_KINDS, Cells
from vaerdict_paper.benchmarks.prior.measures import LOOSER, Answer, Truth, at_looser_levels, judged
from vaerdict_paper.pages import bench
from vaerdict_paper.pages import prior as page

for package in prior.PACKAGES:
    pytest.importorskip(package)

ABOUT = {"benchmark": "prior", "hardware": {"threads": 1, "cores": 2}, "versions": {"torch": "2"}}
N, GENES = 480, 90
TYPES = ("Naive CD4 T", "CD8 T", "CD14+ Mono", "FCGR3A+ Mono", "B", "NK", "unassigned", "DC")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2)


@pytest.fixture
def files(tmp_path, monkeypatch, rng):
    """Small files in place of the real ones; the counts of the first gene are the number of the cell, from 1."""
    number = np.arange(N)
    kind = number % 4
    rate = np.exp(rng.normal(0.5, 0.8, GENES) + rng.normal(0, 0.8, (4, GENES)))
    counts = rng.poisson(rate[kind]).astype(np.float32)
    counts[:, 0] = number + 1
    columns = {
        PBMC: {"cell_type": np.array(TYPES)[number % 8]},
        KANG: {
            "cell_type": np.where(number // 4 % 2, "CD14+ Monocytes", "CD4 T cells"),
            "condition": np.where(number % 2, "stim", "ctrl"),
            "sample": [f"{'stim' if i % 2 else 'ctrl'}{101 if i // 2 % 2 else 107}" for i in number],
        },
        GLIOBLASTOMA: {
            "patient_id": [f"p{i}" for i in number // 96],
            "condition": np.where(number % 2, "panobinostat", "ctrl"),
        },
    }
    (tmp_path / "scrna").mkdir()
    for name, obs in columns.items():
        made = anndata.AnnData(
            sparse.csr_matrix(counts), obs=pd.DataFrame(obs, index=pd.Index([f"c{i}" for i in number]))
        )
        made.write_h5ad(tmp_path / "scrna" / f"{name}.h5ad")
    monkeypatch.setenv("VAERDICT_DATA", str(tmp_path))
    _forget()
    yield columns
    _forget()


def _forget() -> None:
    read_cells.cache_clear()
    designs._read.cache_clear()


def numbers(cells: Cells | None, side: str | None = None) -> set[int]:
    """The numbers of the cells of a side, or of all."""
    assert cells is not None
    rows = cells.counts if side is None else cells.counts[cells.side == side]
    return {int(value) - 1 for value in rows[:, 0].toarray().ravel()}


# ------------------------------------------------------------------------------------------------------ designs
def test_cells_compared_and_of_the_truth_are_the_same_whichever_others_there_are(files):
    cases = {
        others: designs.contrast(designs.PBMC_T, others, 15, np.random.default_rng(0))
        for others in (OTHER_KINDS, SAME_KINDS, WRONG_KINDS)
    }
    types = files[PBMC]["cell_type"]
    for others, case in cases.items():
        compared, truth = (numbers(case.analysed, side) for side in (FIRST, SECOND)), numbers(case.truth)
        first, second = compared
        assert len(first) == len(second) == 15
        assert set(types[list(first)]) == {"Naive CD4 T"}
        assert set(types[list(second)]) == {"CD8 T"}
        other = numbers(case.analysed, OTHER)
        assert not (first | second) & truth
        assert not other & (first | second | truth)
        assert (first, second, truth) == tuple(
            numbers(cells, side)
            for cells, side in (
                (cases[OTHER_KINDS].analysed, FIRST),
                (cases[OTHER_KINDS].analysed, SECOND),
                (cases[OTHER_KINDS].truth, None),
            )
        )
        kinds = set(types[list(other)])
        assert ({"CD8 T", "Naive CD4 T"} <= kinds) == (others == SAME_KINDS)
        assert "unassigned" not in kinds
        if others == WRONG_KINDS:
            assert kinds == {"B", "DC"}


def test_donors_are_in_equal_parts(files, rng):
    case = designs.contrast(designs.KANG_MONOCYTES, OTHER_KINDS, 16, rng)
    sample = np.array(files[KANG]["sample"])
    for side, condition in ((FIRST, "stim"), (SECOND, "ctrl")):
        names, sizes = np.unique(sample[list(numbers(case.analysed, side))], return_counts=True)
        assert names.tolist() == [f"{condition}101", f"{condition}107"]
        assert sizes.tolist() == [8, 8]
    assert len(numbers(case.truth)) == 2 * (120 - 16)  # none is given away
    assert set(files[KANG]["cell_type"][list(numbers(case.analysed, OTHER))]) == {"CD4 T cells"}


@pytest.mark.parametrize(
    ("data", "per_side", "role"), [(designs.ONE_PATIENT, 10, None), (designs.TWO_PATIENTS, 10, designs.BATCHES)]
)
def test_other_patients_are_not_compared(files, rng, data, per_side, role):
    case = designs.patients(data, 10, 3, rng)
    patient = np.array(files[GLIOBLASTOMA]["patient_id"])
    own = {side: set(patient[list(numbers(case.analysed, side))]) for side in (FIRST, SECOND, OTHER)}
    assert own[FIRST] == own[SECOND] == set(patient[list(numbers(case.truth))])
    assert not own[FIRST] & own[OTHER]
    assert len(own[FIRST] | own[OTHER]) == 5
    assert (case.analysed.side == FIRST).sum() == per_side
    assert case.analysed.role == role
    assert not numbers(case.truth) & numbers(case.analysed)


def test_samples_are_pairs(files, rng):
    case = designs.patients(designs.PAIRED, 12, 0, rng)
    unit, side = case.analysed.unit, case.analysed.side
    assert unit is not None
    assert case.analysed.role == designs.PAIRS
    for patient in set(unit[side != OTHER]):
        assert [int(((unit == patient) & (side == s)).sum()) for s in (FIRST, SECOND)] == [12, 12]
    assert case.truth is not None
    assert case.truth.role == designs.BATCHES


def test_a_mixed_population_has_equal_parts_on_no_side(files, rng):
    types = files[PBMC]["cell_type"]
    first = []
    for _ in range(20):
        case = designs.null("PBMC 3k, B and NK", 20, rng)
        assert case is not None
        sides = [types[list(numbers(case.analysed, side))] for side in (FIRST, SECOND)]
        assert [len(side) for side in sides] == [20, 20]
        assert (np.concatenate(sides) == "B").sum() == 20
        first.append((sides[0] == "B").sum())
    assert len(set(first)) > 1  # by chance
    assert designs.null("PBMC 3k, B and NK", 61, rng) is None
    uneven = designs.null("PBMC 3k, B", 30, rng)
    assert uneven is not None
    assert not {"B"} & set(types[list(numbers(uneven.analysed, OTHER))])


def test_undone_changes_are_thinned_on_the_higher_side_alone(rng):
    counts = sparse.csr_matrix(np.full((90, 3), 400.0))
    side = np.repeat([FIRST, SECOND, OTHER], 30)
    thin = designs.undone(Cells(counts, side), np.array([1.0, -2.0, 0.0]), rng)
    mean = {name: np.asarray(thin.counts[side == name].mean(0)).ravel() / 400 for name in (FIRST, SECOND)}
    np.testing.assert_allclose(mean[FIRST], [0.5, 1, 1], atol=0.02)  # 12,000 molecules: six standard errors are 0.03
    np.testing.assert_allclose(mean[SECOND], [1, 0.25, 1], atol=0.02)
    assert (thin.counts[side == OTHER] != counts[side == OTHER]).nnz == 0


# --------------------------------------------------------------------------------------------------- simulations
@pytest.fixture
def small(monkeypatch):
    for name, value in {"N_GENES": 100, "TRUTH_CELLS": 60, "OTHER_CELLS": 30, "UNLABELLED": 20}.items():
        monkeypatch.setattr(simulated, name, value)
    monkeypatch.setattr(simulated, "TRUTH_DONORS", 3)
    monkeypatch.setattr(simulated, "DONOR_CELLS", 20)
    monkeypatch.setattr(simulated, "SECTION5_GENES", 40)
    monkeypatch.setattr(simulated, "SECTION5_CELLS", 500)


def test_simulated_truth_is_that_of_many_cells(small, monkeypatch, rng):
    monkeypatch.setattr(simulated, "TRUTH_CELLS", 3000)
    case = simulated.modules(OTHER_KINDS, 5, rng)
    assert case.truth is not None
    assert case.exact is not None
    sums = [np.asarray(case.truth.counts[case.truth.side == side].sum(0)).ravel() for side in (FIRST, SECOND)]
    seen = np.minimum(*sums) > 1500
    lfc = np.log2(sums[0][seen] / sums[1][seen])
    exact = case.exact[seen]
    unchanged = exact == 0
    assert 5 < unchanged.sum() < seen.sum() - 5
    np.testing.assert_allclose(lfc - np.median(lfc[unchanged]), exact, atol=0.25)


@pytest.mark.parametrize("data", list(simulated.SIMULATED))
def test_simulated_cells_compared_do_not_depend_on_others(small, data):
    made = {others: simulated.SIMULATED[data](others, 6, np.random.default_rng(1)) for others in simulated.OTHERS[data]}
    cases = list(made.values())
    for case in cases:
        compared = case.analysed.side != OTHER
        before = cases[0].analysed
        assert (case.analysed.counts[compared] != before.counts[before.side != OTHER]).nnz == 0
        assert case.truth is not None
        assert cases[0].truth is not None
        assert (case.truth.counts != cases[0].truth.counts).nnz == 0
        assert (case.exact == cases[0].exact).all()
        assert len(case.analysed.side) == case.analysed.counts.shape[0]
    n_other = {others: (case.analysed.side == OTHER).sum() for others, case in made.items()}
    if SAME_KINDS in n_other:
        assert n_other[SAME_KINDS] > n_other[WRONG_KINDS]


# ------------------------------------------------------------------------------------------------------ measures
def _truth() -> Truth:
    """Changed up, changed down, unchanged, uncertain, and one that is not told."""
    low, high = np.array([0.8, -2.0, -0.2, -0.3, np.nan]), np.array([1.2, -1.0, 0.2, 0.9, np.nan])
    up, down = np.array([1.0, 0.0, 0.0, 0.25, np.nan]), np.array([0.0, 0.9, 0.0, 0.0, np.nan])
    return Truth((low + high) / 2, low, high, up, down)


def _answer(lfc: list[float], called: list[bool]) -> Answer:
    n = len(lfc)
    interval = (np.array(lfc) - 0.1, np.array(lfc) + 0.1)
    q = np.linspace(0.01, 0.4, n)
    return Answer(np.arange(n), np.array(called), np.array(lfc), q, np.arange(n), interval)


def test_measures_by_hand():
    row = judged(_answer([1.0, -1.5, 0.2, 0.3, 2.0], [True, False, True, True, True]), _truth(), 0.5)
    assert (row["n_genes"], row["n_true"], row["n_called"]) == (4, 2, 3)
    assert row["fdp_hard"] == pytest.approx(1 / 3)
    assert row["fdp_soft"] == pytest.approx((0 + 1 + 0.75) / 3)
    assert row["tpr"] == 0.5
    assert row["tpr_matched"] == 1  # both come first
    assert row["auprc"] == 1
    assert row["coverage"] == 1
    far = judged(_answer([1.0, -1.5, 0.5, 0.3, 2.0], [True] * 5), _truth(), 0.5)
    assert far["coverage"] == 0.75


def test_a_call_on_the_other_side_is_false():
    row = judged(_answer([-1.0, -1.5, 0.3, 0.3, 0.0], [True, True, False, False, False]), _truth(), 0.5)
    assert (row["fdp_hard"], row["tpr"], row["tpr_matched"]) == (0.5, 0.5, 0)
    assert row["fdp_soft"] == pytest.approx((1 + 0.1) / 2)
    assert row["auprc"] == pytest.approx((1 / 2) / 2)


def test_by_an_exact_truth_all_shares_are_one():
    exact = Truth.exactly(np.array([1.0, -1.0, 0.3, 0.0, -0.6]), 0.5)
    row = judged(_answer([0.8, 0.9, 0.2, 0.6, -0.7], [True] * 5), exact, 0.5)
    assert row["fdp_hard"] == row["fdp_soft"] == pytest.approx(3 / 5)
    assert row["tpr"] == pytest.approx(2 / 3)


def test_levels_call_by_q_values():
    rows = at_looser_levels(_answer([1.0, -1.5, 0.3, 0.3, 2.0], [False] * 5), _truth(), 0.5)
    assert [row["level"] for row in rows] == list(LOOSER)
    assert rows[0]["n_called"] == 1
    assert rows[-1]["n_called"] == 4


# --------------------------------------------------------------------------------------------------------- rows
def test_every_repetition_is_a_task_once():
    names = [tuple(task.values()) for task in prior.tasks()]
    assert len(names) == len(set(names))
    asked = [task for task in prior.tasks() if task["methods"] == prior.TESTED]
    assert {task["stage"] for task in asked} == {prior.CONTRAST}
    assert len({(task["data"], task["n"], task["seed"]) for task in asked}) == len(asked)
    quick = prior.tasks(quick=True)
    assert {task["stage"] for task in quick} == {task["stage"] for task in prior.tasks()}


def _task(stage: str, data: str, others: str, methods: str = prior.CHEAP, n: int = 15) -> prior.Task:
    return {"stage": stage, "data": data, "others": others, "n": n, "methods": methods, "seed": 0}


def test_both_answers_are_judged_on_the_same_cells(files):
    counts, profile = prior.work(_task("contrast", designs.KANG_MONOCYTES, OTHER_KINDS))["rows"]
    assert (counts["method"], profile["method"]) == ("none", "profile")
    assert counts["n_true"] == profile["n_true"] > 0
    assert profile["prior_kind"] == "profile"
    assert "prior_kind" not in counts
    assert [row["level"] for row in counts["looser"]] == list(LOOSER)
    assert counts["looser"][0]["n_called"] >= counts["n_called"]


def test_simulated_contrasts_have_an_exact_truth(small):
    for package in prior.PEERS:
        pytest.importorskip(package)
    for asked, expected in ((prior.CHEAP, ["none", "profile"]), (prior.TESTED, list(methods.TESTS))):
        rows = prior.work(_task("contrast", simulated.MODULES, SAME_KINDS, asked))["rows"]
        assert [row["method"] for row in rows] == expected
        assert all(0 <= row["fdp_exact"] <= 1 for row in rows)
        assert all(row["n_true_exact"] == rows[0]["n_true_exact"] > 0 for row in rows)
        assert all(("fdp_any_exact" in row) == (row["question"] == "any change") for row in rows)


def test_nothing_differs_or_is_undone(files):
    task = _task("null", "PBMC 3k, B and NK", OTHER_KINDS)
    for row in prior.work(task)["rows"]:
        assert 0 <= row["n_called"] <= row["n_genes"]
    assert prior.work({**task, "n": 200}) == {"rows": []}
    for row in prior.work(_task("undone", designs.PBMC_T, SAME_KINDS))["rows"]:
        assert 0 <= row["undone_called"] <= min(row["undone"], row["n_called"])
    timed = prior.work(_task("cost", designs.PBMC_T, OTHER_KINDS))["rows"]
    assert [row["n_other"] for row in timed] == [300, 300]
    assert all(row["seconds"] > 0 for row in timed)


def test_what_is_missing_is_skipped(files, monkeypatch, tmp_path):
    def absent(names):
        raise SettingError("edgepython is needed")

    monkeypatch.setattr(methods, "check_rivals", absent)
    with pytest.raises(prior.Skipped, match="edgepython"):
        prior.work(_task("contrast", designs.PBMC_T, OTHER_KINDS, prior.TESTED))
    monkeypatch.setenv("VAERDICT_DATA", str(tmp_path / "nothing"))
    _forget()
    with pytest.raises(prior.Skipped, match="does not exist"):
        prior.work(_task("contrast", designs.PBMC_T, OTHER_KINDS))


def test_a_stopped_run_goes_on(files, monkeypatch, tmp_path):
    chosen = [
        _task("null", "PBMC 3k, B", OTHER_KINDS),
        _task("cost", designs.KANG_CD4, OTHER_KINDS),
    ]
    monkeypatch.setattr(prior, "tasks", lambda *, quick: chosen)
    monkeypatch.setattr(prior, "WORKERS", 1)
    rows = benchmarks.run("prior", folder=tmp_path)["rows"]
    assert [row["stage"] for row in rows] == ["null", "null", "cost", "cost"]
    monkeypatch.setattr(prior, "work", None)  # nothing is left to do
    assert benchmarks.run("prior", folder=tmp_path)["rows"] == rows


# ------------------------------------------------------------------------------------------------------- tables
def _row(method: str, **values: object) -> dict[str, object]:
    about = {"stage": "contrast", "data": "cells", "others": OTHER_KINDS, "n": 15, "seed": 0, "n_true": 10}
    return {**about, "method": method, **values}


def _at(level: float, hard: float, tpr: float) -> dict[str, float]:
    return {"level": level, "n_called": 4.0, "fdp_hard": hard, "fdp_soft": hard, "tpr": tpr}


def test_the_looser_level_has_the_false_share_of_the_profile():
    curve = [_at(0.05, 0.01, 0.2), _at(0.1, 0.03, 0.4), _at(0.2, 0.02, 0.5), _at(0.3, 0.2, 0.7)]
    counts = _row("none", fdp_hard=0.01, looser=curve)
    at = page.looser_level([counts, _row("profile", fdp_hard=0.02)])
    assert at is not None
    assert at["method"].endswith("(7.5%)")
    assert at["tpr"] == pytest.approx(0.3)
    assert at["fdp_hard"] == pytest.approx(0.02)
    assert page.looser_level([counts, _row("profile", fdp_hard=0.5)])["tpr"] == 0.7  # type: ignore[index]
    assert page.looser_level([counts, _row("profile", fdp_hard=0.001)]) is None
    assert page.looser_level([counts]) is None


def test_tables_and_sentences():
    scored = {"n_called": 4, "fdp_hard": 0.0, "fdp_soft": 0.1, "tpr": 0.25, "tpr_matched": 0.5, "auprc": 0.9}
    contrasts = [
        _row("none", **scored, looser=[_at(0.05, 0.0, 0.2)]),
        _row("profile", **{**scored, "tpr": 0.5}, prior_used=True, prior_correlation=0.6),
        _row("wilcoxon", **scored, fdp_exact=0.05),
    ]
    null = [
        {"stage": "null", "data": data, "others": OTHER_KINDS, "n": 15, "seed": i, "method": "profile", "n_called": n}
        for data in ("one", "one and two")
        for i, n in enumerate((0, 3))
    ]
    undone = [
        {**row, "stage": "undone", "undone": 5, "undone_called": 1, "n_called": 20, "method": method}
        for row, method in ((contrasts[0], "none"), (contrasts[1], "profile"))
    ]
    cost = [{**contrasts[0], "stage": "cost", "seconds": 1.5, "n_genes": 9, "n_other": 100}]
    document = bench.document([{**ABOUT, "rows": [*contrasts, *null, *undone, *cost]}])
    output = text(document)
    for part in ("1 of 2 (1.50)", "counts, looser level (5.0%)", "20.0", "1.50", "Wilcoxon", "mixed"):
        assert part in output
    assert any("counts 25.0% with a hard FDP of 0.0%, prior: profile 50.0%" in line for line in document.summary)
    assert any(
        "mixed cells in which nothing differs, with a call: prior: profile 1 of 2" in s for s in document.summary
    )
    assert any("counts 5.0%, prior: profile 5.0%" in line for line in document.summary)
