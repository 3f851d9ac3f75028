"""The report on genes from made-up rows whose right answers are known."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest

from page_checks import run_in
from vaerdict.core import DataError
from vaerdict.report import load, markdown, render, text
from vaerdict.report.tables import is_best
from vaerdict_paper.pages.claims import ClaimVerdict, judged
from vaerdict_paper.pages.crossed import cross_blocks
from vaerdict_paper.pages.genes_claims import (
    donor_claims,
    further_claims,
    graded_claims,
    on_each,
    paper_claims,
    targets,
)
from vaerdict_paper.pages.genes_rivals import COMPARED, rival_claims, rivals_table, winners_table
from vaerdict_paper.pages.genes_rows import PROPOSALS, RIVALS, TRUE_RATES, behind_best, crossed, refined
from vaerdict_paper.pages.genes_tables import (
    MAE,
    annealing_table,
    donors_table,
    estimand_table,
    floor_rows,
    models_table,
    plugin_table,
    summary_table,
    uncertainty_table,
)
from vaerdict_paper.pages.seed_statistics import where

HOLDS, FAILS, UNRESOLVED, TOO_FEW, NOT_RUN = ClaimVerdict
SEEDS = range(5)
MODELS = ("VAE", "IWAE", "WW", "CHI")
SIMULATORS = ("appendix", "released")
WOBBLE = (-0.002, 0.001, 0.0, 0.002, -0.001)
EVIDENCE = {"VAE": -380.0, "IWAE": -373.0, "WW": -372.5, "CHI": -371.0}
ERROR = {"VAE": 6.0, "IWAE": 0.4, "WW": 0.5, "CHI": 0.3}
PROPOSAL = {"VAE": 0.3, "IWAE": 0.1, "WW": 0.12, "CHI": 0.08, "IWAE-full": 0.05, "MIS": 0.0, "REFINED": -0.05}
CALIBRATION = [[10.0, 10 * (i + 0.5) / 10, float(i)] for i in range(10)]


def metrics(error: float, seed: int, *, tpr: float = 0.99, fdp: float = 0.04, cover: float = 0.9) -> dict[str, Any]:
    return {
        "fdr_mae": error + WOBBLE[seed], "auprc": 0.99, "fdp": fdp + WOBBLE[seed] / 10, "tpr": tpr + WOBBLE[seed] / 10,
        "coverage": cover + WOBBLE[seed], "coverage_absolute": 0.5, "width": 0.3, "lfc_slope": 1.0, "seconds": 1.0,
        "calibration": CALIBRATION, "n_draws": 200, "brier": error / 100 + WOBBLE[seed] / 10,
        "interval_score": 2 - cover + WOBBLE[seed],
    }  # fmt: skip


def about(simulator: str, seed: int) -> dict[str, Any]:
    return {"simulator": simulator, "seed": seed, "dataset": f"{simulator}-{seed}"}


def model_rows() -> list[dict[str, Any]]:
    return [
        {
            "model": m, **about(s, i), "iwelbo": EVIDENCE[m] - 1, "iwelbo_refined": EVIDENCE[m] + WOBBLE[i],
            "khat": 0.6, "khat_refined": 0.1, "ess_refined": 0.6, "ais": EVIDENCE[m] - 0.02,
            "iwelbo_refined_ais_cells": EVIDENCE[m], "seconds_ais": 30.0, "gradients_ais": 10_000_000,
        }
        for s in SIMULATORS for m in MODELS for i in SEEDS
    ]  # fmt: skip


def cross_rows() -> list[dict[str, Any]]:
    grid = [
        {
            "model": m, "proposal": q, **about(s, i), "n_cells": "all", "prior": "model", "weights": w, "ess": 0.6,
            "khat": 0.1 if q == "REFINED" else 0.7, "uncertainty": "z+cells", "estimand": "centred",
            **metrics(ERROR[m] + d + (1 if w == "plugin" else 0), i),
            "auprc": (0.85 if m == "VAE" else 0.99) + WOBBLE[i],
        }
        for s in SIMULATORS for m in MODELS for q, d in PROPOSAL.items() for i in SEEDS for w in ("snis", "plugin")
        if w == "snis" or q in MODELS
    ]  # fmt: skip
    ais = [
        {"model": m, "proposal": q, **about(s, i), "n_cells": 50, "beside_ais": True, "weights": "snis",
         "prior": "model", "estimand": "centred", "uncertainty": "z+cells", **metrics(5.0, i)}
        for s in SIMULATORS for m in MODELS for q in ("AIS", "REFINED") for i in SEEDS
    ]  # fmt: skip
    return [*grid, *ais, *few_rows(), *baseline_rows()]


def few_rows() -> list[dict[str, Any]]:
    error, power = {"all": 0.2, 50: 0.4, 20: 1.5}, {"all": 0.99, 50: 0.99, 20: 0.9}
    cover = {"z": 0.2, "z+cells": 0.8, "z+cells+model": 0.9}
    kinds = [(e, u, "group") for e in ("centred", "proportion") for u in cover]
    kinds += [("pair", u, "group") for u in list(cover)[1:]]
    return [
        {"model": m, "proposal": "REFINED", **about(s, i), "n_cells": n, "subsets": 2, "weights": "snis", "estimand": e,
         "uncertainty": u, "prior": p, "seconds_refits": 14.0,
         **metrics(error[n] + (0.5 if p == "model" else 0) + (1 if s == "graded" and u == "z" else 0), i,
                   tpr=0.1 if e == "pair" else power[n], cover=cover[u])}
        for s in (*SIMULATORS, "graded") for m in MODELS for i in SEEDS for n in error
        for e, u, p in [*kinds, ("centred", "z+cells", "model")]
    ]  # fmt: skip


BASELINES = {"raw counts": 3.0, "true rates": 0.3, "FDP floor": 0.1}
BY_PROPORTIONS = ("scvi-uniform", "scvi-importance", "scvi-means", "wilcoxon+lfc", "ttest+lfc")


def baseline_rows() -> list[dict[str, Any]]:
    estimands = dict.fromkeys(BASELINES, ("centred", "proportion"))
    estimands |= {name: ("proportion" if name in BY_PROPORTIONS else "centred",) for name in RIVALS}
    rows = [
        {"model": name, "proposal": None, **about(s, i), "n_cells": n, "estimand": e, "seconds_train": 60.0,
         **metrics(BASELINES.get(name, 8.0), i, tpr=0.7, cover=0.8), "auprc": 0.9 + WOBBLE[i]}
        for s in SIMULATORS for name, truths in estimands.items() for i in SEEDS for n in ("all", 50, 20)
        for e in truths if name != "scvi-importance" or n == "all"
    ]  # fmt: skip
    of_tests = ("fdr_mae", "brier", "coverage", "interval_score", "n_draws")
    return [{key: v for key, v in row.items() if "+lfc" not in row["model"] or key not in of_tests} for row in rows]


def donor_rows() -> list[dict[str, Any]]:
    return [
        {"model": m, "seed": i, "arm": arm, "replicates": r, "n_called_05": int(r == "cells" and i % 4 > 0),
         **metrics(1.0, i % 5)}
        for m in ("raw counts", "VAE") for r in ("cells", "donors") for arm, n in (("null", 24), ("effect", 5))
        for i in range(n)
    ]  # fmt: skip


def results(**changes: Any) -> dict[str, Any]:
    curve = {"k": [1, 50, 100], "fdp": [0.0, 0.01, 0.4], "fdr": [0.0, 0.02, 0.41]}
    curves = [
        {"model": m, **about(s, i), "n_cells": n, "uncertainty": u, **curve}
        for s in SIMULATORS for m, u in (("VAE", "z+cells"), ("raw counts", "cells")) for i in SEEDS
        for n in ("all", 50)
    ]  # fmt: skip
    return {
        "experiment": "genes", "preset": "paper", "seeds": list(SEEDS),
        "settings": {"n_draws": 200, "khat_draws": 1000},
        "models": model_rows(), "cross": cross_rows(), "curves": curves, "donors": donor_rows(), **changes,
    }  # fmt: skip


@pytest.fixture
def run() -> dict[str, Any]:
    return results()


def verdicts(run: dict[str, Any], make: Any) -> list[ClaimVerdict]:
    return of(on_each(make, run["models"], run["cross"], SIMULATORS))


def of(claims: list[Any]) -> list[ClaimVerdict]:
    return [judgement.verdict for judgement in judged(claims)[0]]


PAPER = partial(paper_claims, printed={})


# ----------------------------------------------------------------------------------------------------- claims
def test_claims_that_hold_are_found_to_hold(run):
    assert verdicts(run, PAPER) == [HOLDS] * 7
    assert verdicts(run, targets) == [HOLDS] * 4
    assert verdicts(run, further_claims) == [HOLDS] * 5
    assert verdicts(run, rival_claims) == [HOLDS] * 3
    assert of(graded_claims(run["cross"])) == [HOLDS]
    assert of(donor_claims(run["donors"])) == [HOLDS] * 2


def test_a_claim_must_hold_on_every_simulator(run):
    for row in where(run["models"], simulator="released", model="VAE"):
        row["iwelbo_refined"] = -370.0 + WOBBLE[row["seed"]]
    worst, chi, *rest = verdicts(run, PAPER)
    assert (worst, chi) == (FAILS, FAILS)
    assert rest[0] is HOLDS


def test_claims_turn_with_the_numbers(run):
    for row in where(run["cross"], proposal="MIS"):
        row["fdr_mae"] += 2
    for row in where(run["cross"], weights="plugin"):
        row["fdr_mae"] -= 2
    _, _, vae, ranking, mixture, three, weights = verdicts(run, PAPER)
    assert (mixture, three, weights) == (FAILS,) * 3
    assert (vae, ranking) == (HOLDS, HOLDS)


def test_what_is_best_must_beat_each_rival(run):
    mixture = on_each(PAPER, run["models"], run["cross"], SIMULATORS)[4]
    assert [e.what.split(" minus ")[1] for e in mixture.evidence] == [*MODELS] * 2
    for row in where(run["cross"], proposal="CHI", weights="snis"):
        row["fdr_mae"] -= 0.2
    assert verdicts(run, PAPER)[4] is FAILS


def test_rivals_are_compared_by_their_own_truth(run):
    for row in where(run["cross"], estimand="proportion", proposal="REFINED"):
        row["auprc"] = 0.5 + WOBBLE[row["seed"]]
    evidence = rival_claims(run["models"], run["cross"], "appendix")[0].evidence
    gaps = dict(zip(COMPARED, (e.difference.mean for e in evidence), strict=True))
    assert {m for m, gap in gaps.items() if gap < 0} == set(BY_PROPORTIONS) - {"scvi-importance"}
    assert verdicts(run, rival_claims)[0] is FAILS


def test_overconfident_probabilities_are_seen_where_changes_are_graded(run):
    for row in where(run["cross"], simulator="graded", uncertainty="z"):
        row["brier"] -= 0.5
    assert of(graded_claims(run["cross"])) == [FAILS]


@pytest.mark.parametrize(
    ("key", "value", "failing"),
    [("fdr_mae", 5.0, [0, 1]), ("fdp", 0.2, [0, 1]), ("tpr", 0.5, [0, 1]), ("coverage", 0.3, [2])],
)
def test_targets_that_are_missed_are_reported(run, key, value, failing):
    for row in run["cross"]:
        if "subsets" in row:
            row[key] = value + WOBBLE[row["seed"]]
    assert [i for i, verdict in enumerate(verdicts(run, targets)) if verdict is FAILS] == failing


def test_unreliable_proposals_miss_their_target(run):
    for row in where(run["cross"], proposal="REFINED"):
        row["khat"] = 0.9 + WOBBLE[row["seed"]]
    assert verdicts(run, targets)[3] is FAILS


def test_few_data_sets_resolve_nothing(run):
    for name in ("models", "cross"):
        run[name] = [row for row in run[name] if row["seed"] < 2]
    assert set(verdicts(run, PAPER)) == {TOO_FEW}
    assert set(verdicts({"models": [], "cross": []}, PAPER)) == {NOT_RUN}


def test_no_discovery_in_a_few_data_sets_proves_little():
    quiet = [row | {"n_called_05": 0} for row in donor_rows() if row["seed"] < 10]
    assert of(donor_claims(quiet))[0] is UNRESOLVED


def test_published_differences_stand_beside_ours(run):
    printed = {"iwelbo": {"VAE": -380.42, "IWAE": -372.86}}
    first = paper_claims(run["models"], run["cross"], "appendix", printed)[0].evidence[0]
    assert first.published == pytest.approx(7.56)


# ----------------------------------------------------------------------------------------------------- tables
def test_headlines_have_all_uncertainty_with_coverage_and_draws(run):
    table = summary_table(run["cross"], "appendix")
    all_cells = [row for row in table.rows if row["cells"] == "all cells"]
    assert [row["method"] for row in all_cells] == [
        *(f"{m}, refined" for m in MODELS),
        *("raw counts", TRUE_RATES, "FDP floor"),
    ]
    vae = next(row for row in table.rows if row["cells"] == "50 per group")
    assert (round(vae["fdr_mae"].value, 2), round(vae["coverage"].value, 2), vae["n_draws"]) == (0.4, 0.9, 200)
    assert "latents, cells and model" in table.note
    without_refits = [row for row in run["cross"] if row.get("uncertainty") != "z+cells+model"]
    assert {row["uncertainty"] for row in refined(without_refits, "appendix", 50)} == {"z+cells"}
    assert "uncertainty of latents and cells." in summary_table(without_refits, "appendix").note
    assert summary_table([], "appendix") is None


def test_rivals_stand_with_their_own_truth(run):
    rows = [row for row in rivals_table(run["cross"], "appendix").rows if row["cells"] == "50 per group"]
    shown = {row["method"]: row for row in rows if row["method"] in RIVALS}
    assert set(shown) == set(COMPARED)  # the importance mode compares all cells alone
    assert {m for m, row in shown.items() if row["estimand"] == "proportions"} == {*BY_PROPORTIONS} & {*COMPARED}
    wilcoxon = shown["wilcoxon+lfc"]
    assert (wilcoxon["fdr_mae"], wilcoxon["brier"], wilcoxon["n_draws"]) == (None, None, None)
    assert wilcoxon["auprc"].value == pytest.approx(0.9)
    ours = [row for row in rows if row["method"] == "refined, all models"]
    assert [row["estimand"] for row in ours] == ["expression", "proportions", "proportions, by random pairs"]
    assert ours[0]["seconds"].value == pytest.approx(15.0)  # with the refits, as in the table of uncertainty
    table = rivals_table(run["cross"], "appendix")
    assert "all cells of 5 data sets" in table.note
    assert rivals_table([row for row in run["cross"] if row["proposal"]], "appendix") is None


def winner(run, truth="expression", cells="50 per group"):
    (row,) = where(winners_table(run["cross"], ["appendix"]).rows, estimand=truth, cells=cells)
    return row


def test_a_table_says_who_wins(run):
    first = winner(run)
    assert (first["ranks"], first["finds"]) == ("refined, all models", "refined, all models")
    assert (first["auprc"], first["tpr_ours"], first["fdp_ours"]) == pytest.approx((0.99, 0.99, 0.04), abs=0.005)
    for row in where(run["cross"], model="deseq2+lfc"):
        row |= {"auprc": 1.0, "tpr": 1.0, "fdp": 0.02}
    assert (winner(run)["ranks"], winner(run)["finds"]) == ("deseq2+lfc", "deseq2+lfc")
    assert winner(run)["auprc_ours"] == pytest.approx(0.99, abs=0.005)
    for row in where(run["cross"], model="deseq2+lfc"):
        row["fdp"] = 0.2
    assert winner(run)["finds"] == "refined, all models"
    for row in where(run["cross"], model=("deseq2+lfc", "edger+lfc")):
        row |= {"auprc": 1.0, "tpr": 1.0, "fdp": 0.02}
    assert winner(run)["ranks"] == "deseq2+lfc and 1 other"
    for row in run["cross"]:
        row["fdp"] = 0.2
    assert (winner(run)["finds"], winner(run)["tpr"]) == (None, None)
    assert winners_table([], ["appendix"]) is None


def test_winners_are_among_methods_of_one_truth(run):
    """A rival that is scored by proportions is compared with ours by proportions."""
    for row in where(run["cross"], model="scvi-means"):
        row |= {"auprc": 0.999}
    assert winner(run)["ranks"] == "refined, all models"
    assert winner(run, "proportions")["ranks"] == "scvi-means"


def test_a_simulator_with_one_model_has_no_table_of_models_and_names_it(run):
    assert models_table(where(run["models"], model="VAE"), run["cross"], "appendix", {}) is None
    cross = [row for row in run["cross"] if row.get("proposal") is None or row["model"] == "VAE"]
    assert rivals_table(cross, "appendix").rows[0]["method"] == "refined, VAE"
    (first, *_) = winners_table(cross, ["appendix"]).rows
    assert first["ranks"] == "refined, VAE"
    assert first["auprc_ours"] == first["auprc"]


def test_models_are_compared_within_their_data_set():
    rows = [{"seed": 0, "iwelbo_refined": v} for v in (-3.0, -1.0)] + [{"seed": 1, "iwelbo_refined": -9.0}]
    assert [row["behind"] for row in behind_best(rows)] == [2.0, 0.0, 0.0]
    assert behind_best([{"seed": 0, "iwelbo_refined": None}])[0]["behind"] is None


def test_models_table_has_the_papers_numbers_beside_ours(run):
    printed = {"iwelbo": {"VAE": -380.42, "CHI": -371.69}, "fdr_mae": {"VAE": 5.78}, "khat": {"VAE": 0.71}}
    table = models_table(run["models"], run["cross"], "appendix", printed)
    vae, chi = table.rows[0], table.rows[3]
    assert vae["behind"].value == pytest.approx(9.0)
    assert vae["behind_paper"] == pytest.approx(8.73)
    assert (vae["fdr_mae_paper"], vae["khat_paper"], chi["fdr_mae_paper"]) == (5.78, 0.71, None)
    assert vae["fdr_mae"].value == pytest.approx(6.3)
    assert is_best(chi["iwelbo_refined"])


def test_cross_tables_mark_the_best_proposal_and_show_the_floors(run):
    table, _ = cross_blocks(crossed(run["cross"], "appendix"), MAE, PROPOSALS, about="200 draws")
    assert [c.key for c in table.columns] == ["model", *PROPOSAL]
    assert all(is_best(row["REFINED"]) for row in table.rows)
    assert [row["model"] for row in floor_rows(run["cross"], "appendix")] == [
        f"{n} (no proposal)" for n in ("raw counts", TRUE_RATES, "FDP floor")
    ]
    plugin = plugin_table(run["cross"], "appendix").rows[0]
    assert plugin["plugin"].value - plugin["snis"].value == pytest.approx(1.0)


def test_uncertainty_adds_up_with_its_cost(run):
    rows = uncertainty_table(run["cross"], "appendix").rows
    all_cells = [row for row in rows if row["cells"] == "all cells"]
    assert [row["what"] for row in all_cells] == [
        "the latents",
        "latents and cells",
        "latents, cells and model",
        "latents and cells, common prior",
        "raw counts, cells",
        f"{TRUE_RATES}, cells",
    ]
    assert [round(row["coverage"].value, 2) for row in all_cells[:3]] == [0.2, 0.8, 0.9]
    assert (all_cells[1]["seconds"].value, all_cells[2]["seconds"].value) == (1.0, 15.0)


def test_other_tables(run):
    assert [row["estimand"] for row in estimand_table(run["cross"], "appendix").rows] == [
        "centred", "proportion", "pair", "centred", "proportion",
    ] * 3  # fmt: skip
    ais = annealing_table(run["models"], run["cross"], "appendix").rows[0]
    assert ais["ais"].value == pytest.approx(-380.02)
    assert ais["gradients_ais"].value == 10_000_000
    assert annealing_table([], [], "appendix") is None
    rows = donors_table(run["donors"]).rows
    assert [(r["method"], r["replicates"], round(r["any"].value, 2)) for r in rows[:2]] == [
        ("raw counts", "cells", 0.75),
        ("raw counts", "donors", 0.0),
    ]
    assert donors_table([]) is None


# ------------------------------------------------------------------------------------------------------- page
def test_a_run_renders_to_a_page_a_text_and_a_table(tmp_path, run):
    folder = run_in(tmp_path, run)
    page = render(folder).read_text()
    assert "Genes: differential expression with a controlled false discovery rate" in page
    figures = {path.stem for path in (folder / "figures").glob("*.svg")}
    assert figures == {
        f"{name}-{s}"
        for s in SIMULATORS
        for name in ("fdr", "calibration", "cross-fdr-mae", "cross-auprc", "cross-khat", "cross-ess")
    } | {"calibration-graded"}
    assert "Of 7 claims of the paper" in text(load(folder))
    assert "7 hold" in markdown(load(folder))
    assert "draws of each" in page


def test_a_partial_run_renders_too(tmp_path, run):
    part = copy.deepcopy(run)
    part["cross"] = [row for row in part["cross"] if row["proposal"] is None]
    part |= {"models": [], "curves": [], "donors": [], "skipped": ["rivals-0"], "preset": "quick"}
    shown = text(load(run_in(tmp_path, part)))
    assert "The other tools were not installed" in shown
    assert "quick preset" in shown
    render(tmp_path)


def test_rows_that_lack_their_keys_are_refused(tmp_path, run):
    del run["cross"][0]["simulator"]
    with pytest.raises(DataError, match=r"record 0 of 'cross' in results\.json lacks simulator"):
        load(run_in(tmp_path, run))
