"""The gene experiment at toy size: metrics by hand, every stage, and that tasks repeat and can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from vaerdict.core import SettingError, ShapeError
from vaerdict.de import model as de_model
from vaerdict.de.effects import CENTRED, PAIR, Effect
from vaerdict.de.metrics import coverage, fdp_floor, fdr_curve, interval_score, measure, measure_ranked
from vaerdict.engines import one_thread
from vaerdict.io import finite
from vaerdict.tasks import run_tasks
from vaerdict_paper.experiments import genes, genes_grid, mnist, reproduce
from vaerdict_paper.experiments.genes import Preset, preset_of, tasks, work
from vaerdict_paper.experiments.genes_arms import TRUE_RATES, contrast_rows, donor_arm, floors
from vaerdict_paper.experiments.genes_contrasts import Sides, contrasts, draw_contrast
from vaerdict_paper.experiments.genes_fit import Problem, Training, as_counts, fit_model, fit_refits
from vaerdict_paper.experiments.genes_measure import averaged, calibration, measured, true_lfc
from vaerdict_paper.experiments.genes_models import Measures, measure_model
from vaerdict_paper.experiments.ppca import published

TINY = Training(n_particles=3, epochs=2, proposal_epochs=2, refit_epochs=2, batch_size=64)
METRICS = {"fdr_mae", "brier", "auprc", "fdp", "tpr", "fdp_05", "tpr_05", "fdp_10", "tpr_10", "fdp_20", "tpr_20"}


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem.of("appendix", 0, n_cells=160, n_genes=20)


# --------------------------------------------------------------------------------------------------- metrics
TRUTH = torch.tensor([2.0, -1.0, 0.1, 0.6, 0.0])


def test_metrics_by_hand():
    """Ranked 0, 2, 1, 3, 4: hits 1 0 1 1 0, so FDP 0, 1/2, 1/3, 1/4, 2/5 against FDR 0, .05, .1, .2, .36."""
    prob = torch.tensor([1.0, 0.8, 0.9, 0.5, 0.0], dtype=torch.float64)
    lfc = torch.tensor([2.0, -1.0, 1.0, 0.5, 0.0])
    row = measure(prob, lfc, TRUTH, 0.5)
    fdr = [0.0, 0.05, 0.1, 0.2, 0.36]
    fdp = [0.0, 1 / 2, 1 / 3, 1 / 4, 2 / 5]
    assert row["fdr_mae"] == pytest.approx(100 * sum(abs(a - b) for a, b in zip(fdp, fdr, strict=True)) / 5)
    assert row["auprc"] == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    assert row["brier"] == pytest.approx((0.2**2 + 0.9**2 + 0.5**2) / 5)
    assert (row["fdp"], row["tpr"]) == (row["fdp_05"], row["tpr_05"]) == (0.5, pytest.approx(1 / 3))
    assert (row["fdp_10"], row["tpr_10"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert (row["fdp_20"], row["n_called_20"], row["n_true"]) == (0.25, 4, 3)


def test_equal_probabilities_are_ranked_by_effect():
    same = torch.ones(5)
    best = measure(same, TRUTH, TRUTH, 0.5)
    assert best["auprc"] == 1
    assert measure(same, 1 / (TRUTH.abs() + 1), TRUTH, 0.5)["auprc"] < 0.7


def test_adjusted_p_values_call_genes_and_are_no_estimate_of_the_fdr():
    q = torch.tensor([0.01, 0.04, 0.15, 0.3, torch.nan])
    row = measure_ranked(torch.tensor([0, 1, 3, 2, 4]), q, TRUTH.abs() >= 0.5)
    assert (row["n_called_05"], row["n_called_20"], row["fdp_20"]) == (2, 3, 0)
    assert not {"fdr_mae", "brier"} & row.keys()
    with pytest.raises(ShapeError, match="one value per gene is needed"):
        measure_ranked(torch.arange(5), q, torch.ones(3).bool())


def test_nothing_called_and_nothing_true():
    empty = measure(torch.full((5,), 0.5), TRUTH, TRUTH, 0.5)
    assert (empty["fdp"], empty["tpr"], empty["n_called_05"]) == (0, 0, 0)
    none = measure(torch.ones(5), TRUTH, torch.zeros(5), 0.5)
    assert none["fdp"] == 1
    assert finite(none)["tpr"] is None
    with pytest.raises(ShapeError, match="one value per gene is needed"):
        measure(torch.ones(5), TRUTH, TRUTH[:3], 0.5)


def test_the_floor_is_the_error_of_probabilities_that_are_right(generator):
    """For two genes of probability p the FDP of the first is 0 or 1: |FDP - FDR| has mean 2p(1-p)."""
    prob = torch.tensor([0.8, 0.8])
    floor = fdp_floor(prob, torch.zeros(2), repeats=40_000, generator=generator)
    one, two = 2 * 0.8 * 0.2, 0.64 * 0.2 + 2 * 0.16 * 0.3 + 0.04 * 0.8
    assert floor == pytest.approx(50 * (one + two), rel=0.03)
    assert fdp_floor(torch.tensor([1.0, 0.0]), torch.zeros(2), generator=generator) == 0


def test_curves_are_thinned_and_coverage_counts():
    curve = fdr_curve(torch.linspace(1, 0, 50), torch.zeros(50), torch.ones(50), 0.5, points=5)
    assert curve["k"] == [1, 13, 25, 38, 50] or len(curve["k"]) == 5
    assert curve["fdp"] == [0.0] * 5
    assert curve["fdr"][-1] == pytest.approx(0.5)
    assert coverage(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 2.0])) == 0.5


# a posterior N(m, v) of each change, with m = truth + error, and the same with a sd of 0.37 of it: its 90 % intervals
# cover 46 %. Changes nearly 0, -1 or 1 as those of the paper, or graded.
NARROW, ERROR = 0.37, 0.2


def _gaussian(truth: torch.Tensor, error: torch.Tensor, sd: float) -> dict[str, float]:
    """FDR error, Brier score and interval score of Gaussian posteriors of the given sd about truth + error."""
    mean, z = truth + error, 1.6448536
    tail = torch.distributions.Normal(mean, sd)
    row = measure(1 - tail.cdf(torch.tensor(0.5)) + tail.cdf(torch.tensor(-0.5)), mean, truth, 0.5)
    intervals = interval_score(mean - z * sd, mean + z * sd, truth)
    return {"fdr_mae": row["fdr_mae"], "brier": row["brier"], "interval_score": intervals}


def _worse_by_confidence(changes: Callable[[torch.Generator], torch.Tensor]) -> dict[str, float]:
    """In how many standard errors over 200 data sets each metric is worse for the over-confident posterior."""
    generator, gaps = torch.Generator().manual_seed(0), []
    for _ in range(200):
        truth = changes(generator)
        error = ERROR * torch.randn(100, generator=generator, dtype=torch.float64)
        right, narrow = (_gaussian(truth, error, sd) for sd in (ERROR, NARROW * ERROR))
        gaps.append([narrow[key] - right[key] for key in right])
    gap = torch.tensor(gaps, dtype=torch.float64)
    return dict(zip(right, (gap.mean(0) / (gap.std(0) / len(gap) ** 0.5)).tolist(), strict=True))


def test_proper_scores_see_overconfidence_and_the_fdr_error_does_not():
    """False-alarm rate below 1e-6: each gap is more than five standard errors on its side."""
    in_three = _worse_by_confidence(
        lambda g: (torch.randint(-1, 2, (100,), generator=g) + 0.16 * torch.randn(100, generator=g)).double()
    )
    assert in_three["fdr_mae"] < -5  # the over-confident posterior looks better
    assert in_three["interval_score"] > 5
    in_grades = _worse_by_confidence(lambda g: 2 * torch.rand(100, generator=g, dtype=torch.float64) - 1)
    assert min(in_grades.values()) > 5


def test_the_interval_score_is_least_for_the_right_quantiles():
    truth = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    score = {
        k: interval_score(-k * 1.6449 * torch.ones(4000), k * 1.6449 * torch.ones(4000), truth) for k in (0.5, 1, 2)
    }
    assert score[1] == pytest.approx(4 * 0.10314 / 0.1, rel=0.05)  # 4 phi(1.645) / 0.1
    assert score[1] < min(score[0.5], score[2])


# -------------------------------------------------------------------------------------------------- contrasts
def test_sides_are_the_cells_of_the_states(problem):
    sides = Sides.of(problem.data, 7, seed=0, subset=2)
    assert len(sides.a) == len(sides.b) == 7
    assert (problem.data.labels[sides.cells] == sides.labels).all()
    assert torch.equal(sides.cells[sides.groups["b"]], sides.b)
    other = Sides.of(problem.data, 7, seed=0, subset=1)
    assert not torch.equal(other.a, sides.a)
    assert [(name, j) for name, j, _ in contrasts(problem.data, 0, 2)] == [
        *[("all", 0), (50, 0), (50, 1), (20, 0), (20, 1)]
    ]


def test_splits_do_not_overlap(problem):
    cells = torch.cat([problem.train, problem.valid, problem.test])
    assert torch.equal(cells.sort().values, torch.arange(160))
    assert len(problem.valid) == len(problem.test) == 16


def test_a_perfect_answer_is_measured_as_perfect(problem):
    sides = Sides.of(problem.data, None, seed=0)
    truth = true_lfc(problem.data, "centred")
    noise = 0.01 * torch.randn(200, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    row = measured(Effect(truth + noise, torch.full((20,), 200.0)), sides, CENTRED)
    assert (row["auprc"], row["tpr"]) == (1, 1)
    assert row["coverage_absolute"] == 1
    shifted = measured(Effect(truth - truth.quantile(0.5) + noise, torch.full((20,), 200.0)), sides, CENTRED)
    assert shifted["coverage"] == 1
    assert shifted["lfc_slope"] == pytest.approx(1, abs=0.01)
    bins = calibration(Effect(truth + noise, torch.full((20,), 200.0)), sides, CENTRED)
    assert sum(n for n, _, _ in bins) == 20
    assert bins[-1][0] == bins[-1][2]
    assert not torch.allclose(truth, true_lfc(problem.data, "proportion"))


def test_subsets_of_cells_are_averaged_into_one_row():
    rows = [{"model": "VAE", "a": a, "bins": [[1.0, a]], "ok": True, "kind": "k"} for a in (1.0, 3.0)]
    merged = averaged([*rows, {**rows[0], "model": "CHI"}], "model")
    assert merged[0] == {"model": "VAE", "a": 2.0, "bins": [[2.0, 4.0]], "ok": True, "kind": "k", "subsets": 2}
    assert merged[1]["subsets"] == 1


@pytest.fixture(scope="module")
def fit(problem):
    return fit_model(problem, "VAE", TINY)


def test_uncertainty_grows_with_its_sources(problem, fit):
    sides = Sides.of(problem.data, 20, seed=0)
    x = problem.counts(sides.cells)
    refits = fit_refits(problem, fit, replace(TINY, lr=0.05), 3)
    one, *others = (partial(de_model.refined, as_counts(f), x, f.proposal, labels=sides.labels) for f in (fit, *refits))
    drawn = draw_contrast(sides, one, 50, seed=0, refits=others)
    width = {u: drawn.effect(CENTRED, u).lfc.std(0).mean().item() for u in ("z", "z+cells", "z+cells+model")}
    assert width["z"] < width["z+cells"] < width["z+cells+model"]
    assert drawn.effect(CENTRED, "z+cells+model").lfc.shape == (150, 20)
    assert drawn.effect(PAIR, "z+cells").lfc.std(0).mean().item() > width["z+cells"]


def test_refits_differ_from_each_other_and_leave_the_fit_unchanged(problem, fit):
    before = [p.clone() for p in fit.model.parameters()]
    first, second = fit_refits(problem, fit, TINY, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, fit.model.parameters(), strict=True))
    assert not torch.equal(as_counts(first).log_dispersion, as_counts(second).log_dispersion)


# ----------------------------------------------------------------------------------------------------- stages
@pytest.fixture(scope="module")
def result(problem):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(genes_grid, "TEMPERATURES", 4)
        patch.setattr(genes_grid, "CHAINS", 30)
        return measure_model(problem, "IWAE", TINY, Measures(30, 60, refits=2, subsets=1, ais_cells=4))


def test_the_grid_measures_every_proposal_with_equal_draws(result):
    (model,) = result["models"]
    assert {"iwelbo", "iwelbo_refined", "ais", "khat", "ess", "seconds_ais", "gradients_ais"} <= model.keys()
    assert model["gradients_ais"] == 8 * (30 + 16) * (1 + 4 * genes_grid.LEAPFROG)
    rows = [row for row in result["cross"] if row["n_cells"] == "all" and "subsets" not in row]
    weighted = [row["proposal"] for row in rows if row["weights"] == "snis"]
    assert weighted == ["VAE", "IWAE", "WW", "CHI", "IWAE-full", "MIS", "REFINED"]
    assert [row["proposal"] for row in rows if row["weights"] == "plugin"] == ["VAE", "IWAE", "WW", "CHI"]
    assert {row["n_draws"] for row in rows} == {30}
    for row in rows:
        assert METRICS | {"khat", "ess", "coverage", "interval_score"} <= row.keys()
        assert row["estimand"] == "centred"
    beside = [row for row in result["cross"] if row.get("beside_ais")]
    assert [(row["proposal"], row["n_cells"], row["n_draws"]) for row in beside] == [("AIS", 4, 30), ("REFINED", 4, 30)]


def test_contrasts_by_estimand_and_uncertainty(problem, result, fit):
    contrasted = [row for row in result["cross"] if "subsets" in row]
    for n in ("all", 50, 20):
        of_size = [row for row in contrasted if row["n_cells"] == n]
        kinds = [(row["estimand"], row["uncertainty"]) for row in of_size if row["prior"] == "group"]
        three = ["z", "z+cells", "z+cells+model"]
        pairs = [("pair", u) for u in three[1:]]
        assert kinds == [(e, u) for e in ("centred", "proportion") for u in three] + pairs
        assert [(r["estimand"], r["uncertainty"]) for r in of_size if r["prior"] == "model"] == [("centred", "z+cells")]
        assert {row["n_draws"] for row in of_size} == {30}
    assert len(result["curves"]) == 9
    rows, _ = contrast_rows(problem, fit, [], {"model": "VAE", **problem.labels}, n_draws=30, subsets=1)
    assert {row["uncertainty"] for row in rows} == {"z", "z+cells"}


def test_what_is_not_asked_for_is_left_out(problem):
    result = measure_model(problem, "VAE", TINY, Measures(30, 60, refits=0, subsets=0, proposals=False))
    assert {row["proposal"] for row in result["cross"]} == {"REFINED"}
    assert {row["n_cells"] for row in result["cross"]} == {"all"}
    assert "ais" not in result["models"][0]


def test_floors_have_every_size_and_estimand(problem):
    rows = floors(problem, subsets=2)["cross"]
    names = {(row["model"], row["n_cells"], row["estimand"]) for row in rows}
    assert names == {
        (m, n, e)
        for m in ("raw counts", TRUE_RATES, "FDP floor")
        for n in ("all", 50, 20)
        for e in ("centred", "proportion")
    }
    assert all(row["proposal"] is None for row in rows)
    best, raw = (
        next(r["lfc_rmse"] for r in rows if (r["model"], r["n_cells"], r["estimand"]) == (m, "all", "proportion"))
        for m in (TRUE_RATES, "raw counts")
    )
    assert best < 1.05 * raw


def test_replicates_have_priors_of_their_own(monkeypatch):
    """With a common mean, donors look more alike than they are, and the null arm has discoveries."""
    used, refined = [], de_model.refined
    monkeypatch.setattr(de_model, "refined", lambda *args, labels: used.append(labels) or refined(*args, labels=labels))
    donor_arm(1, "null", "VAE", TINY, n_draws=20, n_cells=200)
    assert [len(labels.unique()) for labels in used] == [2, 8]  # groups, then donors


def test_donors_as_replicates_widen_the_answer():
    rows = donor_arm(1, "null", "VAE", TINY, n_draws=40, n_cells=300)["donors"]
    assert [(row["model"], row["replicates"]) for row in rows] == [
        ("raw counts", "cells"),
        ("raw counts", "donors"),
        ("VAE", "cells"),
        ("VAE", "donors"),
    ]
    assert all(row["n_true"] == 0 and row["arm"] == "null" for row in rows)
    width = {(row["model"], row["replicates"]): row["width"] for row in rows}
    assert width["raw counts", "donors"] > width["raw counts", "cells"]
    assert width["VAE", "donors"] > width["VAE", "cells"]


# ------------------------------------------------------------------------------------------------------ tasks
SMALL = Preset(
    simulators=("appendix",),
    other_simulators=("graded",),
    models=("VAE",),
    seeds=1,
    training=TINY,
    n_draws=20,
    khat_draws=40,
    refits=2,
    subsets=1,
    ais_cells=0,
    section5_seeds=1,
    null_sets=1,
    effect_sets=1,
    donor_cells=200,
)


def test_tasks_hold_their_preset_and_the_longest_come_first():
    stored = tasks(SMALL)
    assert [t["stage"] for t in stored] == [
        *["section5", "models", "graded"],
        *["donors"] * 2,
        *["floors"] * 2,
        *["rivals"] * 4,
    ]
    assert preset_of(json.loads(json.dumps(stored[0]))) == SMALL
    assert len(tasks(replace(SMALL, stages=("models",), simulators=("appendix", "released")), seeds=3)) == 6
    with pytest.raises(SettingError, match="no stage nothing"):
        tasks(replace(SMALL, stages=("nothing",)))
    assert len(list(genes.data(SMALL, range(2)))) == 4


def test_the_paper_has_five_seeds_of_everything_but_ais_and_the_importance_mode():
    of_paper = tasks(genes.PRESETS["paper"])
    seeds = {key: {t["seed"] for t in of_paper if (t["stage"], t.get("simulator")) == key} for key in STAGES}
    assert all(found == set(range(5)) for found in seeds.values())
    names = {(t["simulator"], t["seed"]): t["names"] for t in of_paper if t["stage"] == "rivals" and "seed" in t}
    assert [seed for (name, seed), tools in names.items() if name == "released" and "scvi-importance" in tools] == [
        *range(3)
    ]
    assert "vaerdict de" in names["section5", 4]
    assert "scvi-means" not in names["graded", 0]


STAGES = [("section5", "section5"), ("models", "appendix"), ("models", "released"), ("graded", "graded")]


def test_ais_runs_for_one_model_on_the_first_seeds(monkeypatch):
    asked = {}
    monkeypatch.setattr(genes, "_problem_of", lambda task, preset: None)
    monkeypatch.setattr(
        genes, "measure_model", lambda problem, name, training, measures: asked.setdefault(name, []).append(measures)
    )
    for task in tasks(replace(SMALL, stages=("models",), models=("VAE", "CHI"), ais_cells=50, ais_seeds=2), seeds=3):
        work(task)
    assert [m.ais_cells for m in asked["VAE"]] == [50, 50, 0]
    assert [m.ais_cells for m in asked["CHI"]] == [0, 0, 0]


def test_a_device_reaches_training_and_leaves_no_trace_on_the_cpu(monkeypatch):
    (on_cpu, *_), (on_gpu, *_) = (tasks(replace(Preset(), device=device)) for device in ("cpu", "cuda"))
    assert "device" not in json.dumps(on_cpu)
    assert preset_of(on_cpu) == Preset()
    assert preset_of(on_gpu).training.device == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert reproduce._device("auto", Preset()) == "cpu"  # many small models: cores are faster
    assert reproduce._device("cuda", Preset()) == "cuda"
    assert reproduce._device("auto", mnist.PRESETS["paper"]) == "cuda"


def test_tasks_of_rivals_do_not_depend_on_the_preset():
    of_paper = [t for t in tasks(genes.PRESETS["paper"]) if t["stage"] == "rivals"]
    assert of_paper == tasks(genes.PRESETS["rivals"])


def test_every_stage_runs_and_repeats(problem, tmp_path, monkeypatch):
    monkeypatch.setattr(genes, "_problem", lambda simulator, seed, preset: problem)
    todo = tasks(replace(SMALL, stages=("section5", "graded", "models", "floors", "donors")))
    first = run_tasks(work, todo, tmp_path / "first", workers=1)
    assert [sorted(r) for r in first.results[:3]] == [["cross", "curves", "models"]] * 3
    kinds = [{row["proposal"] for row in r["cross"]} for r in first.results[:3]]
    assert ["MIS" in proposals for proposals in kinds] == [True, False, True]
    with one_thread():  # as run_tasks does: sums split over threads differ in their last digits
        again = work(todo[1])
    repeated, stored = (
        [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]
        for rows in (finite(again["cross"]), first.results[1]["cross"])
    )
    assert repeated == stored


def test_rivals_are_skipped_where_they_are_not_installed_and_added_later(tmp_path, monkeypatch):
    todo = tasks(replace(SMALL, stages=("rivals",)))
    monkeypatch.setattr(genes, "_installed", lambda package: False)
    run = run_tasks(work, todo, tmp_path, workers=1)
    assert run.results == []
    assert len(run.skipped) == len(todo)
    assert not list((tmp_path / "tasks").glob("*.json"))
    monkeypatch.setattr(genes, "_installed", lambda package: True)
    row = {"model": "wilcoxon", "estimand": "centred", "n_cells": "all", "n_called_05": 0}
    monkeypatch.setattr(genes, "rival_rows", lambda compared, **keys: [row] * len(compared))
    monkeypatch.setattr(genes, "Problem", type("P", (), {"of": staticmethod(partial(_small_problem))}))
    later = run_tasks(work, todo, tmp_path, workers=1)
    assert later.skipped == []
    assert len(list((tmp_path / "tasks").glob("*.json"))) == len(todo)
    assert [sorted(r) for r in later.results] == [["cross"]] * 2 + [["donors"]] * 2
    (averaged_row,) = later.results[0]["cross"]
    assert (averaged_row["dataset"], averaged_row["subsets"]) == ("appendix-0", 3)  # all cells, and one subset of each
    assert later.results[2]["donors"][0]["arm"] == "null"


def _small_problem(simulator: str, seed: int, **sizes: object) -> Problem:
    return Problem.of(simulator, seed, n_genes=10, **({"n_cells": 160} | sizes))


def test_the_papers_numbers_are_available():
    printed = published()["genes"]["printed"]
    assert printed["fdr_mae"] == {"VAE": 5.78, "IWAE": 0.39, "WW": 0.51, "CHI": 0.27}
    assert printed["ais"] == printed["iwelbo"]
