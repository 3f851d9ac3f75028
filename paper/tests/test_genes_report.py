"""The report on genes from made-up rows whose right answers are known."""

from __future__ import annotations

import copy
import random
import re
from functools import partial
from typing import Any

import pytest
from scipy import stats

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
    reliability_target,
    share_evidence,
    targets,
)
from vaerdict_paper.pages.genes_rivals import COMPARED, IMPORTANCE, rival_claims, rivals_table, winners_table
from vaerdict_paper.pages.genes_rows import PROPOSALS, RIVALS, TRUE_RATES, behind_best, crossed, refined
from vaerdict_paper.pages.genes_tables import (
    MAE,
    annealing_table,
    donors_table,
    estimand_table,
    models_table,
    plugin_table,
    summary_table,
    uncertainty_table,
    with_baselines,
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
EMPTY = "\N{EN DASH}"
CALIBRATION = [[10.0, 10 * (i + 0.5) / 10, float(i)] for i in range(10)]


def noise(seed: int, *label: object) -> float:
    """A number with mean zero over the seeds, different for every label, so that differences vary over seeds too."""
    generator = random.Random(str(label))
    return generator.uniform(0.5, 1.5) * generator.sample(WOBBLE, len(WOBBLE))[seed]


def metrics(
    error: float, seed: int, *label: object, tpr: float = 0.99, fdp: float = 0.04, cover: float = 0.9
) -> dict[str, Any]:
    e = noise(seed, *label)
    return {
        "fdr_mae": error + e, "auprc": 0.99 + e / 10, "fdp": fdp + e / 10, "tpr": tpr + e / 10, "coverage": cover + e,
        "coverage_absolute": 0.5, "width": 0.3, "lfc_slope": 1.0, "seconds": 1.0, "calibration": CALIBRATION,
        "n_draws": 200, "brier": error / 100 + e / 10, "interval_score": 2 - cover + e,
    }  # fmt: skip


def about(simulator: str, seed: int) -> dict[str, Any]:
    return {"simulator": simulator, "seed": seed, "dataset": f"{simulator}-{seed}"}


def model_rows() -> list[dict[str, Any]]:
    return [
        {
            "model": m, **about(s, i), "iwelbo": EVIDENCE[m] - 1, "iwelbo_refined": EVIDENCE[m] + noise(i, m, s),
            "khat": 0.6, "khat_refined": 0.1, "ess_refined": 0.6, "ais": EVIDENCE[m] - 0.02 + noise(i, m, s, "AIS"),
            "iwelbo_refined_ais_cells": EVIDENCE[m], "seconds_ais": 30.0, "gradients_ais": 10_000_000,
        }
        for s in SIMULATORS for m in MODELS for i in SEEDS
    ]  # fmt: skip


def cross_rows() -> list[dict[str, Any]]:
    grid = [
        {
            "model": m, "proposal": q, **about(s, i), "n_cells": "all", "prior": "model", "weights": w, "ess": 0.6,
            "khat": 0.1 if q == "REFINED" else 0.7, "khat_share_ok": (0.99 if q == "REFINED" else 0.3) + WOBBLE[i],
            "uncertainty": "z+cells", "estimand": "centred",
            **metrics(ERROR[m] + d + (1 if w == "plugin" else 0), i, m, q, s, w),
            "auprc": (0.85 if m == "VAE" else 0.99) + WOBBLE[i],
        }
        for s in SIMULATORS for m in MODELS for q, d in PROPOSAL.items() for i in SEEDS for w in ("snis", "plugin")
        if w == "snis" or q in MODELS
    ]  # fmt: skip
    ais = [
        {"model": m, "proposal": q, **about(s, i), "n_cells": 50, "beside_ais": True, "weights": "snis",
         "prior": "model", "estimand": "centred", "uncertainty": "z+cells", **metrics(5.0, i, m, q, s)}
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
                   m, s, n, e, u, p, tpr=0.1 if e == "pair" else power[n], cover=cover[u])}
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
         **metrics(BASELINES.get(name, 8.0), i, name, s, n, e, tpr=0.7, cover=0.8), "auprc": 0.9 + noise(i, name, s, n)}
        for s in SIMULATORS for name, truths in estimands.items() for i in SEEDS for n in ("all", 50, 20)
        for e in truths if name != "scvi-importance" or n == "all"
    ]  # fmt: skip
    of_tests = ("fdr_mae", "brier", "coverage", "interval_score", "n_draws")
    return [{key: v for key, v in row.items() if "+lfc" not in row["model"] or key not in of_tests} for row in rows]


def donor_rows() -> list[dict[str, Any]]:
    return [
        {"model": m, "seed": i, "arm": arm, "replicates": r, "n_called_05": int(r == "cells" and i % 4 > 0),
         **metrics(1.0, i % 5, m, arm, r)}
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
    assert verdicts(run, targets) == [HOLDS] * 3
    assert of([reliability_target(run["cross"], SIMULATORS)]) == [HOLDS]
    assert verdicts(run, further_claims) == [HOLDS] * 5
    assert verdicts(run, rival_claims) == [HOLDS] * 2
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
    gaps = {e.what.removeprefix("AP, refined minus "): e.difference.mean for e in evidence}
    assert list(gaps) == ["raw counts", *COMPARED]
    assert {m for m, gap in gaps.items() if gap < 0} == set(BY_PROPORTIONS) - {IMPORTANCE}
    assert verdicts(run, rival_claims)[0] is FAILS


def test_raw_counts_are_a_rival_and_what_is_left_out_is_named_once(run):
    ranked = on_each(rival_claims, run["models"], run["cross"], SIMULATORS)[0]
    assert ranked.note.count(IMPORTANCE) == 1
    assert "appendix:" not in ranked.note
    for row in where(run["cross"], model="raw counts"):
        row["auprc"] = 0.999 + WOBBLE[row["seed"]] / 10
    assert verdicts(run, rival_claims) == [FAILS, HOLDS]


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


def test_refined_proposals_must_be_reliable_for_most_cells_of_every_simulator(run):
    """A median k-hat that is low for all does not hide a simulator where many cells are unreliable."""
    section5 = [
        {**row, "simulator": "section5", "khat_share_ok": 0.8 + WOBBLE[row["seed"]]}
        for row in crossed(run["cross"], "appendix")
    ]
    claim = reliability_target([*run["cross"], *section5], (*SIMULATORS, "section5", "graded"))
    assert [e.what.split(":")[0] for e in claim.evidence] == [*SIMULATORS, "section5"]  # graded has no such rows
    assert [round(e.difference.mean, 3) for e in claim.evidence] == [0.04, 0.04, -0.15]
    assert of([claim]) == [FAILS]
    assert of([reliability_target([], SIMULATORS)]) == [NOT_RUN]


def test_ais_is_the_bar_for_the_evidence_of_one_model(run):
    def verdict():
        return verdicts(run, further_claims)[3]

    for row in where(run["models"], model="CHI"):
        row["ais"] += 1.0
    for row in where(run["cross"], beside_ais=True, proposal="REFINED"):
        row["fdr_mae"] += 5.0
    assert verdict() is HOLDS
    for row in where(run["models"], model="VAE"):
        row["ais"] += 0.3 + WOBBLE[row["seed"]]
    assert verdict() is FAILS


def test_few_data_sets_resolve_nothing(run):
    for name in ("models", "cross"):
        run[name] = [row for row in run[name] if row["seed"] < 2]
    assert set(verdicts(run, PAPER)) == {TOO_FEW}
    assert set(verdicts({"models": [], "cross": []}, PAPER)) == {NOT_RUN}


def test_no_discovery_in_a_few_data_sets_proves_little():
    quiet = [row | {"n_called_05": 0} for row in donor_rows() if row["seed"] < 10]
    assert of(donor_claims(quiet)) == [UNRESOLVED, TOO_FEW]
    null = where(quiet, seed=0, arm="null")
    fifty = [row | {"seed": i} for row in null for i in range(50)]
    claim, _ = donor_claims(fifty)
    assert claim.evidence[0].p_values == pytest.approx((1.0, 0.95**50))  # 0.077; by a t test 0.0066
    assert of([claim]) == [UNRESOLVED]
    ((judgement,),) = judged([claim])
    assert re.search(r"interval .0\.05 to \+0\.0\d\)", judgement.lines[0])


@pytest.mark.parametrize(
    ("k", "n", "level"), [(0, 50, 0.05), (50, 50, 0.05), (3, 24, 0.05), (21, 24, 0.05), (2, 9, 0.5)]
)
def test_shares_have_exact_p_values_and_intervals(k, n, level):
    above, below = (stats.binomtest(k, n, level, side).pvalue for side in ("greater", "less"))
    assert share_evidence("share", k, n, level, +1).p_values == pytest.approx((above, below), rel=1e-9)
    assert share_evidence("share", k, n, level, -1).p_values == pytest.approx((below, above), rel=1e-9)
    exact = stats.binomtest(k, n).proportion_ci(0.9, "exact")
    interval = share_evidence("share", k, n, level, +1).interval(0.9)
    assert interval == pytest.approx((exact.low - level, exact.high - level), abs=1e-9)


def test_donors_and_cells_are_compared_by_the_data_sets_in_which_they_differ():
    rows = donor_rows()
    for row in where(rows, arm="null", replicates="cells"):
        row["n_called_05"] = int(row["seed"] < 4)
    for row in where(rows, arm="null", replicates="donors"):
        row["n_called_05"] = int(row["seed"] == 3)
    _, fewer = donor_claims(rows)
    assert [e.difference.n for e in fewer.evidence] == [3, 3]  # one data set has a discovery by both
    assert fewer.evidence[0].p_values == pytest.approx((1 / 8, 1.0))  # a t test would say 0.04
    assert of([fewer]) == [UNRESOLVED]
    for row in where(rows, arm="null"):
        row["n_called_05"] = int((row["replicates"] == "donors") == (row["seed"] < 18))
    assert of(donor_claims(rows))[1] is FAILS
    assert of(donor_claims(where(rows, replicates="donors"))) == [NOT_RUN, NOT_RUN]


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
    assert "minutes" not in table.note  # seconds stand in the table
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
    assert (winner(run)["finds"], winner(run)["tpr"], winner(run)["fdp"]) == ("none", None, None)
    assert winners_table([], ["appendix"]) is None


def test_an_empty_list_does_not_win(run):
    for row in run["cross"]:
        row["fdp"] = 0.2
    for row in where(run["cross"], model="vaerdict de"):
        row |= {"fdp": 0.0, "tpr": 0.0}
    assert (winner(run)["finds"], winner(run)["tpr"]) == ("none", None)
    for row in where(run["cross"], model="vaerdict de"):
        row["tpr"] = 0.02
    assert (winner(run)["finds"], winner(run)["tpr"]) == ("vaerdict de", 0.02)


def test_a_share_of_no_data_sets_says_that_there_are_none():
    evidence = share_evidence("share by donors", 0, 0, 0.5, -1)
    assert not evidence.decidable
    assert evidence.described() == "share by donors, minus 0.5: there are none"
    assert "(se" in share_evidence("share by donors", 1, 4, 0.5, -1).described()


@pytest.mark.parametrize(("fdp", "qualifies"), [(0.049, True), (0.051, False)])
def test_an_fdp_of_at_most_the_level_qualifies_whatever_its_spread(run, fdp, qualifies):
    """The standard error over five data sets is 0.01; the mean of the others is 0.04."""
    spread = dict(zip(SEEDS, (-0.02, -0.02, 0.0, 0.02, 0.02), strict=True))
    for row in where(run["cross"], model="deseq2+lfc"):
        row |= {"tpr": 1.0, "fdp": fdp + spread[row["seed"]] * 1.118}
    assert winner(run)["finds"] == ("deseq2+lfc" if qualifies else "refined, all models")
    assert winner(run)["fdp"] == pytest.approx(fdp if qualifies else 0.04, abs=1e-3)


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
    plugin = plugin_table(run["cross"], "appendix").rows[0]
    assert plugin["plugin"].value - plugin["snis"].value == pytest.approx(1.0)


def test_baselines_stand_in_a_column_of_their_own(run):
    table, _ = cross_blocks(crossed(run["cross"], "appendix"), MAE, PROPOSALS, about="200 draws", draws="n_draws")
    both = with_baselines(table, run["cross"], "appendix")
    titles = [column.title for column in both.columns]
    assert titles == ["model or baseline", *PROPOSAL, "without a proposal", "draws"]
    shown = {row[0][0]: [cell for cell, _ in row[1:]] for row in both.cells()}
    assert [*shown][-3:] == [f"{n} (baseline)" for n in ("raw counts", TRUE_RATES, "FDP floor")]
    *proposals, baseline, draws = shown["raw counts (baseline)"]
    assert (set(proposals), baseline, draws) == ({EMPTY}, "3.00 ± 0.00", "200")
    assert shown["VAE"][-2] == EMPTY
    assert with_baselines(table, [], "appendix") is table


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
    assert "different work" in annealing_table(run["models"], run["cross"], "appendix").note
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
