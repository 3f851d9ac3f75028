"""The page of the pPCA experiment on made-up results whose right answers are known."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from page_checks import NASTY, Outline, outline, run_in
from vaerdict.core import DataError
from vaerdict.report import load, markdown, render, tables, text
from vaerdict_paper.pages.claims import ClaimVerdict, judged
from vaerdict_paper.pages.crossed import cross_blocks
from vaerdict_paper.pages.ppca_claims import further_claims, paper_claims
from vaerdict_paper.pages.ppca_tables import MAE, PROPOSALS, beyond_table, floors_table, models_table
from vaerdict_paper.pages.seed_statistics import where

HOLDS, FAILS, UNRESOLVED, TOO_FEW, NOT_RUN = ClaimVerdict
SEEDS = range(5)
WOBBLE = (-0.002, 0.001, 0.0, 0.002, -0.001)
"""Differences between seeds: mean zero, standard error 0.0007."""


def noise(seed: int, *names: object) -> float:
    """A difference between seeds of its own size for these names, so that no paired difference is constant."""
    return WOBBLE[seed] * (1 + crc32(repr(names).encode()) % 97 / 97)


def model_row(
    model: str, seed: int, k: int, log_p: float, training: str = "paper", mae_model: float = 0.01
) -> dict[str, Any]:
    return {
        "model": model, "seed": seed, "k_train": k, "training": training, "log_evidence": log_p + noise(seed, model, k),
        "log_evidence_gap": log_p + 16.6, "iwelbo": log_p - 0.01, "a_norm": 1.0, "n_draws": 200,
        "mae": OWN_ERROR.get(model, 0.03) + noise(seed, model) / 20, "mae_plugin": 0.034, "mae_inference": 0.02,
        "mae_model": mae_model + noise(seed, model, training) / 10, "within_2_mcse": 0.94,
        **khat_keys((0.98 if (model, k) == ("CHI", 200) else 0.4) + noise(seed, model)),
    }  # fmt: skip


def khat_keys(khat: float) -> dict[str, Any]:
    return {"khat": khat, "khat_share_ok": 0.9, "khat_quantiles": [khat + d for d in (-0.3, -0.1, 0, 0.1, 0.3)]}


def pair_row(model: str, proposal: str, seed: int, mae: float, khat: float, **keys: Any) -> dict[str, Any]:
    base = {
        "model": model,
        "proposal": proposal,
        "seed": seed,
        "k_train": 5,
        "training": "paper",
        "n_draws": 200,
        "ess": 90.0,
    }
    return {
        **base,
        "mae": mae + noise(seed, model, proposal, keys.get("noise"), keys.get("estimator")) / 100,
        "mae_inference": mae,
        "mae_model": 0.01,
        **khat_keys(khat + noise(seed, model, proposal)),
        **keys,
    }


LOG_P = {
    5: {"VAE": -17.0, "IWAE": -16.6, "WW": -16.65, "CHI": -16.62},
    200: {"VAE": -16.9, "IWAE": -16.63, "WW": -16.6, "CHI": -17.2},
}
REMEDIES = {"AGG": -16.8, "CYCLIC": -16.85, "CONSTANT": -16.9}
"""log p of the remedies of posterior collapse: the cyclical one is better than the constant one, both than the VAE."""
OWN_ERROR = {"VAE": 0.032, "AGG": 0.03, "CYCLIC": 0.029, "CONSTANT": 0.031, "CHI-t": 0.029}
"""By model with its own encoder."""
ERROR = {"VAE": 0.05, "IWAE": 0.031, "WW": 0.04, "CHI": 0.030, "CHI-t": 0.028, "MIS": 0.025}
"""By proposal: CHI is the best normal one, CHI-t the best single one, and MIS better still."""


def ppca_results(seeds: range = SEEDS, particles: Sequence[int] = (5, 200)) -> dict[str, Any]:
    """A run in which every claim of the paper holds."""
    names = {k: {**LOG_P[k], "CHI-t": LOG_P[k]["CHI"]} | (REMEDIES if k == 5 else {}) for k in particles}
    models = [model_row(m, s, k, level) for k in particles for m, level in names[k].items() for s in seeds]
    models += [model_row(m, s, 30, -16.6, "converged", 0.005) for m in ("VAE", "IWAE", "WW", "CHI") for s in seeds]
    cross = [
        pair_row(m, q, s, error, 0.8 if q == "VAE" and m != "VAE" else 0.4, k_train=k)
        for k in particles for m in LOG_P[k] for q, error in ERROR.items() for s in seeds
    ]  # fmt: skip
    full = {f"{name}-full": 0.0125 for name in ("IWAE", "WW", "CHI")}
    ours = {"IWAE": 0.02, **full, "MIS": 0.018, "MIS-full": 0.012, "MIS-full-optimal": 0.011, "REFINED": 0.013}
    base, kinds = {"k_train": 30, "training": "converged"}, (("snis", 1.0), ("psis", 0.95))
    gain = {"iid": 1.0, "sobol": 0.5, "aligned": 0.4}
    cross += [
        pair_row("WW", q, s, error * gain[noise] * smooth, 0.1, **base, noise=noise, estimator=kind)
        for q, error in ours.items() for noise in gain for kind, smooth in kinds for s in seeds
    ]  # fmt: skip
    curve = [
        {"proposal": "MIS", "noise": "iid", "seed": s, "n_draws": n, "mae": 1.0, "mae_inference": n**-0.5}
        for n in (64, 256) for s in seeds
    ]  # fmt: skip
    floors = [
        {"floor": f"exact posterior, {kind}", "n_draws": n, "mae": scale * n**-0.5, "mae_inference": scale * n**-0.5}
        for kind, scale in (("i.i.d.", 0.1), ("Sobol", 0.02), ("aligned Sobol", 0.01)) for n in (64, 200, 256)
    ]  # fmt: skip
    floors.append({"floor": "maximum likelihood", "mae_model": 0.004, "log_evidence_gap": 0.01})
    return {
        "experiment": "ppca", "preset": "paper", "settings": {"n_draws": 200, "khat_draws": 5000}, "seeds": list(seeds),
        "seconds": {}, "models": models, "cross": cross, "curve": curve, "floors": floors,
        "selection": [SCORE], "true_log_evidence": -16.6,
    }  # fmt: skip


SCORE = {
    "model": "IWAE", "seed": 0, "iwelbo": -16.8, "iwelbo_se": 0.2, "iwelbo_best": -16.7, "best_by": "refined",
    "gap": 0.1, "behind": 0.0, "behind_se": 0.01, "khat": None,
}  # fmt: skip


def verdicts(results: dict[str, Any]) -> list[ClaimVerdict]:
    return [judgement.verdict for judgement in judged(paper_claims(results["models"], results["cross"], {}))[0]]


def test_claims_that_hold_are_found_to_hold():
    assert verdicts(ppca_results()) == [HOLDS] * 14


def test_claims_turn_with_the_numbers():
    """Each planted change makes its own claim fail, and only claims that speak of it."""
    results = ppca_results()
    for row in where(results["cross"], training="paper", k_train=5, proposal="MIS"):
        row["mae"] = 0.0305  # worse than CHI by a twentieth of a hundredth, paired
    for row in where(results["models"], training="paper", k_train=200, model="CHI"):
        row["log_evidence"], row["khat"] = -16.61 + WOBBLE[row["seed"]], 0.3
    for row in where(results["cross"], k_train=5, proposal="VAE"):
        row["khat"] = 0.5 + WOBBLE[row["seed"]]
    better, plugin, chi, student, mis5, mis200, vae, three5, three200, *remedies, ww, collapse = verdicts(results)
    assert [mis5, three5, remedies[2], vae, collapse] == [FAILS] * 5
    assert [better, plugin, chi, student, mis200, three200, *remedies[:2]] == [HOLDS] * 8
    assert ww is HOLDS


def test_the_three_steps_keep_the_best_model_of_each_seed():
    results = ppca_results()
    for row in where(results["models"], training="paper", k_train=5, model="WW", seed=3):
        row["iwelbo"] = 0.0
    claim = paper_claims(results["models"], results["cross"], {})[7]
    assert "IWAE 4 times, WW once" in claim.note
    gaps = {evidence.what: evidence.difference.mean for evidence in claim.evidence}
    assert gaps == {
        f"error, three steps minus {name}": pytest.approx(100 * (0.025 - ERROR[name]), abs=1e-3)
        for name in ("VAE", "IWAE", "WW", "CHI")
    }


def test_the_weights_of_the_vae_change_its_error_by_at_most_the_margin():
    results = ppca_results()
    plugin = paper_claims(results["models"], results["cross"], {})[1].evidence[0]
    assert (plugin.difference.mean, plugin.margin) == (pytest.approx(0.2), 0.5)
    for row in where(results["models"], model="VAE", k_train=5):
        row["mae_plugin"] += 0.02
    assert verdicts(results)[1] is FAILS


def test_student_proposals_are_compared_with_normal_ones_on_their_own_and_on_fixed_models():
    results = ppca_results()
    own, fixed = paper_claims(results["models"], results["cross"], {})[3].evidence
    assert own.difference.mean == pytest.approx(-0.1)
    assert fixed.difference.mean == pytest.approx(-0.2)
    for row in where(results["cross"], proposal="CHI-t"):
        row["mae"] = 0.035
    assert verdicts(results)[3] is FAILS


def test_published_differences_stand_beside_ours():
    results = ppca_results()
    published = {"k5": {"log_evidence": {"VAE": -17.65, "IWAE": -16.91}}}
    first = paper_claims(results["models"], results["cross"], published)[0].evidence[0]
    assert first.published == pytest.approx(0.74)
    assert "+0.400 (se 0.000, 5 seeds, p < 0.0001; published +0.740)" in first.described()


def test_our_own_claims_are_put_to_the_same_rule():
    results = ppca_results()
    assert _further(results) == [HOLDS] * 7
    for row in where(results["cross"], proposal="MIS-full-optimal"):
        row["mae"] += 0.05
    assert _further(results).count(FAILS) == 1


def _further(results: dict[str, Any]) -> list[ClaimVerdict]:
    return [judgement.verdict for judgement in judged(further_claims(results["models"], results["cross"]))[0]]


def test_unequal_draws_are_not_compared():
    results = ppca_results()
    where(results["cross"], training="converged", proposal="MIS")[-1]["n_draws"] = 3750
    assert paper_claims(results["models"], results["cross"], {})
    with pytest.raises(DataError, match="200 or 3750 draws"):
        further_claims(results["models"], results["cross"])
    where(results["cross"], training="paper", proposal="MIS")[-1]["n_draws"] = 3750
    with pytest.raises(DataError, match="200 or 3750 draws"):
        paper_claims(results["models"], results["cross"], {})


def test_few_seeds_are_too_few():
    assert set(verdicts(ppca_results(range(2)))) == {TOO_FEW}
    assert set(verdicts({"models": [], "cross": []})) == {NOT_RUN}


def test_models_table_has_published_numbers_beside_ours():
    published = {"log_evidence": {"VAE": -17.65, "IWAE": -16.91}, "mae": {"VAE": 0.103}}
    table = models_table(ppca_results()["models"], 5, published)
    vae, iwae = (next(row for row in table.rows if row["model"] == name) for name in ("VAE", "IWAE"))
    assert [row["model"] for row in table.rows] == ["VAE", "AGG", "CYCLIC", "CONSTANT", "IWAE", "WW", "CHI", "CHI-t"]
    assert {row["n_draws"] for row in table.rows} == {200}
    assert (vae["behind"].value, vae["behind_paper"], vae["mae_paper"]) == (
        pytest.approx(0.4),
        pytest.approx(0.74),
        0.103,
    )
    assert iwae["gap"].best
    assert not vae["gap"].best
    assert models_table([], 5, published) is None


def test_cross_table_marks_the_best_proposal_of_each_model():
    rows = where(ppca_results()["cross"], k_train=5)
    table, picture = cross_blocks(rows, MAE, PROPOSALS, about="200 draws", name="-k5", draws="n_draws")
    assert (table.name, picture.name) == ("cross-mae-k5", "cross-mae-k5")
    assert "VAE: VAE 5.00, IWAE 3.10" in picture.alt
    assert [column.key for column in table.columns] == ["model", "VAE", "IWAE", "WW", "CHI", "CHI-t", "MIS", "n_draws"]
    assert {row["n_draws"] for row in table.rows} == {200}
    for row in table.rows:
        assert [key for key, value in row.items() if tables.is_best(value)] == ["MIS"]


def test_beyond_table_is_best_first_under_the_floor():
    results = ppca_results()
    table = beyond_table(results["cross"], results["floors"])
    names = [row["proposal"] for row in table.rows]
    full = ["MIS-full-optimal", "MIS-full", "IWAE-full", "WW-full", "CHI-full", "REFINED"]
    assert names == ["floor: exact posterior", *full, "MIS", "IWAE"]
    assert {row["n_draws"] for row in table.rows} == {200}
    assert table.rows[0]["aligned"].value == pytest.approx(0.01 * 200**-0.5)
    floors = floors_table(results["floors"])
    assert [row["n"] for row in floors.rows] == [64, 200, 256]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A rendered run, shared by the tests that only read it."""
    folder = run_in(tmp_path_factory.mktemp("ppca"), ppca_results(), {"command": ["vaerdict"]})
    render(folder)
    return folder


def test_page_starts_with_the_summary(run):
    seen, source = outline(run / "report.html")
    assert "Of 14 claims of the paper, tested with equal draws and corrected losses, 14 hold (5 seeds)." in seen.text
    assert source.index('class="summary"') < source.index("<table")
    assert "0.0120 with the full-rank mixture and 0.0180 with the paper's, both with i.i.d. draws" in seen.text
    assert "both with aligned Sobol draws" in seen.text
    assert "preset" not in seen.text.split("Claims of the paper")[0]
    assert seen.tags["table"] >= 8


def test_every_figure_is_also_a_file(run):
    names = {path.name for path in (run / "figures").iterdir()}
    stems = ("cross-mae-k5", "cross-khat-k5", "cross-mae-k200", "cross-khat-k200", "draws", "khat")
    assert names == {stem + suffix for stem in stems for suffix in (".svg", ".png")}


def test_names_of_any_kind_can_be_drawn(tmp_path):
    results = json.loads(json.dumps(ppca_results(range(1), [5])).replace('"IWAE"', json.dumps(NASTY)))
    page_path = render(run_in(tmp_path, results))
    assert "名前" in page_path.read_text(encoding="utf-8").split("<svg", 1)[1]
    assert Outline(page_path.read_text(encoding="utf-8")).tags["script"] == 1


@pytest.mark.parametrize(
    "empty", [("floors",), ("cross", "curve"), ("models", "cross", "curve", "floors", "selection")]
)
def test_a_run_without_some_stages_still_has_a_page(tmp_path, empty):
    results = ppca_results(range(1), [5]) | {name: [] for name in empty} | {"preset": "quick"}
    seen, _ = outline(render(run_in(tmp_path, results)))
    assert "This is the quick preset" in seen.text


def test_missing_numbers_are_shown_as_missing(tmp_path):
    results = ppca_results(range(2), [5])
    for row in results["cross"]:
        row["khat"] = row["khat_share_ok"] = row["khat_quantiles"] = None
    results["models"][0]["mae"] = None
    run = run_in(tmp_path, results)
    render(run)
    assert "(1 missing)" in markdown(load(run))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"experiment": "ppca", "models": 3}', "'models' in results.json is not a list"),
        (b'{"experiment": "ppca", "seeds": 3}', "lacks something that its report needs"),
    ],
)
def test_unusable_results_are_named(tmp_path, content, message):
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        render(tmp_path)


def test_results_are_not_changed_by_reporting(tmp_path):
    results = ppca_results(range(2))
    before = copy.deepcopy(results)
    text(load(run_in(tmp_path, results)))
    paper_claims(results["models"], results["cross"], {})
    assert results == before
