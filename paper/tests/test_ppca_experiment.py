from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from vaerdict.models.ppca import PPCA
from vaerdict.proposals import defensive
from vaerdict.tasks import TaskResults, run_tasks
from vaerdict.training import Settings
from vaerdict_paper.experiments import ppca, ppca_extensions
from vaerdict_paper.experiments.ppca import Preset, Problem, measure, preset_of, tasks, work

TINY = Preset(
    seeds=1,
    particles=(3,),
    epochs=2,
    score_draws=50,
    khat_draws=100,
    khat_observations=8,
    flow=False,
    curve=(32, 256),
)
MODEL_KEYS = {"log_evidence", "iwelbo", "a_norm", "khat", "mae", "mae_inference", "mae_model", "mae_plugin"}
CROSS_KEYS = {"n_draws", "khat", "mae", "mae_inference", "mae_model", "mae_plugin"}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TaskResults:
    """Every task of the tiny preset, in the order of `tasks`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppca_extensions, "CONVERGED", Settings(n_particles=3, epochs=2, score_particles=5))
        out = tmp_path_factory.mktemp("ppca")
        return run_tasks(work, tasks(TINY), out, workers=1)


def test_tasks_are_named_by_stage_and_hold_their_preset():
    both = tasks(replace(TINY, particles=(3, 4)), seeds=2)
    assert [(t["stage"], t.get("k"), t["seed"]) for t in both] == [
        ("grid", 4, 0),
        ("grid", 4, 1),
        ("grid", 3, 0),
        ("grid", 3, 1),
        ("beyond", None, 0),
        ("beyond", None, 1),
        ("floors", None, 0),
        ("floors", None, 1),
    ]
    stored = json.loads(json.dumps(both[0]))
    assert preset_of(stored) == replace(TINY, particles=(3, 4), seeds=Preset.seeds)
    assert tasks(replace(TINY, particles=(3, 4)), seeds=1)[0] == both[0]  # more seeds leave the others as they are
    assert [t["stage"] for t in tasks(Preset(seeds=1, particles=(5,), beyond=False))] == ["grid", "floors"]


def test_the_grid_has_a_row_for_every_model_and_every_pair(run):
    result = run.results[0]
    assert [r["model"] for r in result["models"]] == ["VAE", "IWAE", "WW", "CHI", "AGG", "CYCLIC", "CONSTANT", "CHI-t"]
    proposals = ("VAE", "IWAE", "WW", "CHI", "CHI-t", "MIS")
    pairs = [(r["model"], r["proposal"]) for r in result["cross"]]
    assert pairs == [(m, q) for m in ("VAE", "IWAE", "WW", "CHI") for q in proposals]
    assert all(r["seed"] == 0 and r["k_train"] == 3 for r in result["models"] + result["cross"])


def test_rows_hold_the_metrics_of_the_contract_as_finite_numbers(run):
    models = [r for result in run.results for r in result.get("models", [])]
    cross = [r for result in run.results for r in result.get("cross", []) if r["proposal"] != "REFINED"]
    assert len(models) == 8 + 4
    for rows, keys in ((models, MODEL_KEYS), (cross, CROSS_KEYS)):
        for row in rows:
            missing = [key for key in keys if not isinstance(row.get(key), (int, float))]
            assert not missing, f"{row['model']}, {row.get('proposal')}: {missing}"
    for row in models:
        assert row["iwelbo"] <= row["log_evidence"] + 0.5  # a lower bound, by so few draws that it is noisy
        assert len(row["log_noise"]) == 10


def test_errors_split_into_those_of_the_model_and_of_the_sampler(run):
    """The triangle inequality ties the three; the model's own error does not depend on the proposal."""
    cross = run.results[0]["cross"]
    for row in cross:
        assert abs(row["mae_inference"] - row["mae_model"]) <= row["mae"] + 1e-9
        assert row["mae"] <= row["mae_inference"] + row["mae_model"] + 1e-9
    for model in ("VAE", "IWAE", "WW", "CHI"):
        assert len({r["mae_model"] for r in cross if r["model"] == model}) == 1


def test_extensions_of_the_paper_have_their_rows(run):
    result = run.results[1]
    proposals = {r["proposal"] for r in result["cross"]}
    full = {f"{r}{f}" for r in ("IWAE", "WW", "CHI") for f in ("", "-full", "-full-t")}
    assert proposals >= full | {"MIS", "MIS-full", "MIS-full-optimal", "REFINED"}
    for name in ("IWAE", "IWAE-full"):
        kinds = {(r["noise"], r["estimator"]) for r in result["cross"] if r["proposal"] == name}
        assert kinds == {(n, e) for n in ("iid", "sobol", "aligned") for e in ("snis", "psis")}
    assert {r["n_draws"] for r in result["curve"]} == {32, 256}
    assert [s["iwelbo_best"] for s in result["selection"]] == sorted(
        (s["iwelbo_best"] for s in result["selection"]), reverse=True
    )


def test_the_floors_are_those_of_exact_sampling(run):
    """The error of the mean of n indicators has standard deviation sqrt(p (1 - p) / n), its size sqrt(2/pi) of that."""
    floors = {(r["floor"], r.get("n_draws")): r for r in run.results[2]["floors"]}
    problem = Problem.of(TINY)
    p = problem.truth
    for n in (200, 256):
        expected = ((p * (1 - p) / n).sqrt() * (2 / torch.pi) ** 0.5).mean().item()
        got = floors["exact posterior, i.i.d.", n]["mae_inference"]
        assert got == pytest.approx(expected, rel=0.1)
        assert floors["exact posterior, Sobol", n]["mae_inference"] < 0.8 * got
        assert floors["exact posterior, aligned Sobol", n]["mae_inference"] < 0.3 * got
    best = floors["maximum likelihood", None]
    assert 0 < best["mae_model"] < 0.02
    assert best["log_evidence_gap"] < 0.05


def test_measuring_the_exact_posterior_of_the_generator_shows_no_model_error():
    problem = Problem.of(TINY)
    true = PPCA(problem.data.weight, problem.data.noise_sd)
    q = true.posterior(problem.data.x_test)
    row = measure(problem, TINY, true, q, seed=0)
    assert row["mae_model"] < 1e-5
    assert row["mae"] == pytest.approx(row["mae_inference"], abs=1e-5)
    assert row["ess"] == pytest.approx(200, abs=0.1)
    mixed = measure(problem, TINY, true, defensive({"exact": q}, true.prior), seed=0, with_khat=False)
    assert mixed["mae_inference"] == pytest.approx(row["mae_inference"], rel=0.2)
    assert row["within_2_mcse"] > 0.9


def test_the_papers_numbers_are_available():
    assert "ppca" in ppca.published()


def test_data_of_every_seed_are_hashed():
    x = [ppca.Problem.of(TINY, seed).data.x_train for seed in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(ppca.data(TINY, [0, 1]), x, strict=True))
