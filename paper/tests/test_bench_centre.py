"""The benchmark of the centre of fold changes: what is planted, what is measured, and what is said of it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from vaerdict.report import text
from vaerdict_paper import benchmarks
from vaerdict_paper.benchmarks import centre
from vaerdict_paper.benchmarks.de_methods.cells import Split
from vaerdict_paper.pages import bench

pytest.importorskip("anndata")

ABOUT = {"benchmark": "centre", "hardware": {"threads": 1, "cores": 2}, "versions": {"torch": "2"}}


def split(n_down: int, n_same: int, n_up: int, *, shift: float = 0.0) -> Split:
    """Cells of two sides, of genes that go down by one, stay and go up by one, and change by `shift` more."""
    rng = np.random.default_rng(0)
    lfc = np.repeat([-1.0, 0.0, 1.0], (n_down, n_same, n_up))
    first = np.arange(200) % 2 == 0
    rate = np.exp(rng.normal(3, 0.3, len(lfc))) * np.where(first[:, None], 2.0**lfc, 1.0)
    truth = lfc + shift
    return Split(sparse.csr_matrix(rng.poisson(rate).astype(np.float32)), first, None, lfc, truth)


def proportions(made: Split) -> float:
    """The change of the proportion of genes that do not change, because others do."""
    sums = [np.asarray(made.counts[side].sum(0)).ravel() for side in (made.first, ~made.first)]
    share = [s[made.lfc == 0].sum() / s.sum() for s in sums]
    return float(np.log2(share[0] / share[1]))


def test_a_centre_at_the_unchanged_genes_is_right_and_one_at_others_is_wrong():
    right = split(10, 60, 10)
    right = right._replace(truth=right.lfc + proportions(right))
    row = centre.measured(right, 0)
    assert row["off"] < 0.1
    assert not row["wrong"]
    assert not row["doubted"]
    assert row["fdp"] <= 0.1
    assert row["tpr"] == 1
    assert row["n_true"] == 20

    most_up = split(0, 30, 70)  # all of them by as much, which nothing but the truth can tell from unchanged genes
    most_up = most_up._replace(truth=most_up.lfc + proportions(most_up))
    row = centre.measured(most_up, 0)
    assert row["off"] == pytest.approx(1, abs=0.1)
    assert row["wrong"]
    assert not row["doubted"]
    assert row["fdp"] == 1
    assert row["coverage"] < 0.1


def test_genes_that_no_cell_has_do_not_count():
    seen = split(0, 90, 10)
    shift = proportions(seen)
    unseen = 200
    counts = sparse.hstack([seen.counts, sparse.csr_matrix((200, unseen))]).tocsr().astype(np.float32)
    lfc = np.r_[seen.lfc, np.tile([0.0, 1.0], unseen // 2)]
    made = Split(counts, seen.first, None, lfc, np.r_[seen.lfc + shift, np.zeros(unseen)])
    row = centre.measured(made, 0)
    assert (row["n_true"], row["tpr"]) == (10, 1)
    assert row["off"] == centre.measured(seen._replace(truth=seen.lfc + shift), 0)["off"] < 0.1


def test_shares_and_directions_are_as_asked():
    rng = np.random.default_rng(1)
    for share, up in ((0.1, 0.5), (0.5, 0.75), (0.7, 1.0)):
        lfc = centre.one_sided(np.ones(20_000), rng, share=share, up=up)
        changed = lfc != 0
        # six standard errors of 20,000 or more than 1,500 draws: below 1e-8 each
        assert abs(changed.mean() - share) < 6 * (share * (1 - share) / 20_000) ** 0.5
        assert abs((lfc[changed] > 0).mean() - up) <= 6 * (up * (1 - up) / changed.sum()) ** 0.5
        assert 0.5 <= np.abs(lfc[changed]).min() <= np.abs(lfc[changed]).max() <= 2


def test_simulators_are_asked_and_a_run_goes_on(tmp_path, monkeypatch):
    assert {t["data"] for t in centre.tasks(quick=True) if t["stage"] == centre.SIMULATED} == set(centre.SIMULATORS)
    todo = [t for t in centre.tasks(quick=True) if t["data"] in ("released", "donors")]
    monkeypatch.setattr(centre, "tasks", lambda *, quick: todo)
    result = benchmarks.run("centre", quick=True, folder=tmp_path)
    assert [(r["data"], r["size"]) for r in result["rows"]] == [
        *(("released", size) for size in ("all", "50", "20")),
        ("donors", "all"),
    ]
    assert all(row["share"] is None and 0 <= row["fdp"] <= 1 for row in result["rows"])
    monkeypatch.setattr(centre, "work", None)  # all is stored
    assert benchmarks.run("centre", quick=True, folder=tmp_path)["rows"] == result["rows"]


def test_full_runs_have_all_seeds_and_plans():
    todo = centre.tasks()
    seeds = {task["seed"] for task in todo if task["stage"] == centre.SIMULATED}
    assert seeds == set(range(4100, 4120))
    plans = {(t["share"], t["direction"]) for t in todo if t["stage"] == centre.PLANTED}
    assert len(plans) == len(centre.SHARES) * len(centre.DIRECTIONS)


def test_missing_cells_are_skipped_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("VAERDICT_DATA", str(tmp_path))
    task = {"stage": "planted", "data": "PBMC 3k, B", "share": 0.5, "direction": "all up", "seed": 0}
    from vaerdict_paper.benchmarks.de_methods import cells

    cells.read_cells.cache_clear()
    with pytest.raises(centre.Skipped, match="does not exist; download it"):
        centre.work(task)


def row(**values) -> dict:
    base = {"stage": "simulated", "data": "appendix", "share": None, "direction": None, "size": "all"}
    base |= {"off": 0.1, "wrong": False}
    return base | {"doubted": False, "fdp": 0.02, "tpr": 0.5, "n_called": 10, "coverage": 0.9} | values


def test_the_page_counts_wrong_and_doubted_centres():
    rows = [
        row(),
        row(doubted=True, fdp=0.3),
        row(wrong=True, doubted=True, fdp=0.5, off=0.7),
        row(wrong=True, fdp=0.1),
        row(stage="planted", data="B", share=0.5, direction="all up", size="50", doubted=True),
        row(stage="planted", data="B", share=0.3, direction="all up", size="50"),
        row(stage="planted", data="B", share=0.7, direction="all up", size="50", wrong=True, fdp=0.4),
    ]
    document = bench.document([{**ABOUT, "rows": rows}])
    assert document.summary[1:] == [
        "Simulators, all cells: the verdict doubts 1 of 2 wrong centres and 1 of 2 right ones. The mean FDP is 23.0% "
        "of all lists, 6.0% of those not doubted.",
        "Real cells, changes planted in at most half of the genes: the verdict doubts 0 of 0 wrong centres and 1 of 2 "
        "right ones. The mean FDP is 2.0% of all lists, 2.0% of those not doubted.",
        "Real cells, changes planted in 70% of the genes, all up: the verdict doubts 0 of 1 wrong centres and 0 of 0 "
        "right ones. The mean FDP is 40.0% of all lists, 40.0% of those not doubted.",
    ]
    printed = text(document)
    assert "by the simulator" in printed
    (block,) = (b for b in bench.centre.tables({"rows": rows[:4]}, "here"))
    (body,) = block.rows
    assert (body["lists"], body["wrong"], body["seen"], body["falsely"]) == (4, 2, 1, 1)
    assert body["fdp_kept"].value == pytest.approx(0.06)
