"""Claims of the gene experiment: those of the paper, the targets of this project, and further findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from vaerdict.report.records import Row
from vaerdict_paper.pages.claims import (
    Claim,
    Evidence,
    paired_evidence,
    rival_evidence,
    selected_models,
    selection_counts,
)
from vaerdict_paper.pages.genes_rows import MODELS, UNCERTAINTIES, beside_ais, crossed, floor, refined, scores
from vaerdict_paper.pages.seed_statistics import Summary, by_seed, difference, minus, where

Published = Mapping[str, Any]

SCALES = (
    "FDR errors are in hundredths; evidence is in nats per cell, on cells used neither for training nor for early "
    "stopping, by proposals refined for each of them. Every seed has its own data set. Rivals were fixed before the "
    "run: what is said to be best must beat each of them."
)
_HIGH, _LOW = +1, -1


def on_each(
    make: Callable[[Sequence[Row], Sequence[Row], str], list[Claim]],
    models: Sequence[Row],
    cross: Sequence[Row],
    names: Sequence[str],
) -> list[Claim]:
    """The claims of several simulators as one list: each claim must hold on all of them."""
    merged = []
    for same in zip(*(make(models, cross, name) for name in names), strict=True):
        pairs = list(zip(names, same, strict=True))
        evidence = [replace(e, what=f"{name}: {e.what}") for name, claim in pairs for e in claim.evidence]
        notes = dict.fromkeys(f"{name}: {claim.note}" for name, claim in pairs if claim.note)
        merged.append(Claim(same[0].text, evidence, " ".join(notes)))
    return merged


# --------------------------------------------------------------------------------------------------- the paper
def paper_claims(models: Sequence[Row], cross: Sequence[Row], simulator: str, printed: Published) -> list[Claim]:
    """The paper's claims on one simulator."""
    rows, pairs = where(models, simulator=simulator), crossed(cross, simulator)
    return [
        _vae_is_worst(rows, printed),
        _chi_is_best(rows, printed),
        _vae_cannot_control(pairs, printed),
        _ranking(pairs),
        _mixture_is_best(pairs),
        _three_steps_win(rows, pairs),
        _weights_needed(cross, simulator),
    ]


def _vae_is_worst(rows: Sequence[Row], printed: Published) -> Claim:
    iwelbo, levels = scores(rows, MODELS, "model", "iwelbo_refined"), printed.get("iwelbo")
    evidence = [paired_evidence("evidence", iwelbo, m, "VAE", _HIGH, 2, levels) for m in MODELS[1:]]
    return Claim("The VAE fits the worst model.", evidence)


def _chi_is_best(rows: Sequence[Row], printed: Published) -> Claim:
    iwelbo, levels = scores(rows, MODELS, "model", "iwelbo_refined"), printed.get("iwelbo")
    evidence = [paired_evidence("evidence", iwelbo, "CHI", m, _HIGH, 2, levels) for m in MODELS[:3]]
    return Claim("CHI fits the best model.", evidence)


def _vae_cannot_control(pairs: Sequence[Row], printed: Published) -> Claim:
    """With the same mixture of proposals for each model, so that only the models differ."""
    errors, levels = scores(where(pairs, proposal="MIS"), MODELS, "model", "fdr_mae"), printed.get("fdr_mae")
    evidence = [paired_evidence("FDR error with MIS", errors, "VAE", m, _HIGH, 2, levels) for m in MODELS[1:]]
    return Claim("The VAE's model controls the FDR worse than the others.", evidence)


def _ranking(pairs: Sequence[Row]) -> Claim:
    precision = scores(where(pairs, proposal="MIS"), MODELS, "model", "auprc")
    above = [Evidence(f"AP of {m} minus 0.95", minus(precision.get(m, {}), 0.95), _HIGH, 3) for m in MODELS[1:]]
    below = Evidence("AP of VAE minus 0.95", minus(precision.get("VAE", {}), 0.95), _LOW, 3, 0.85 - 0.95)
    return Claim("Genes are ranked well by IWAE, WW and CHI and badly by the VAE.", [*above, below])


def _mixture_is_best(pairs: Sequence[Row]) -> Claim:
    by_model = {m: scores(where(pairs, model=m), (*MODELS, "MIS"), "proposal", "fdr_mae") for m in MODELS}
    return Claim(
        "For a fixed model MIS has the smallest FDR error.",
        rival_evidence("FDR error, mean over models", by_model, "MIS", MODELS, _LOW, 2),
    )


def _three_steps_win(rows: Sequence[Row], pairs: Sequence[Row]) -> Claim:
    """The model of highest evidence in each data set with MIS, against each model with its own kind of encoder."""
    selected = selected_models(rows, "iwelbo_refined")
    mixed = {m: by_seed(where(pairs, model=m, proposal="MIS"), "fdr_mae") for m in MODELS}
    combined = {seed: mixed[m][seed] for seed, m in selected.items() if seed in mixed.get(m, {})}
    singles = {m: by_seed(where(pairs, model=m, proposal=m), "fdr_mae") for m in MODELS}
    evidence = [
        Evidence(f"FDR error, three steps minus {m} with its own encoder", difference(combined, errors), _LOW, 2)
        for m, errors in singles.items()
    ]
    note = f"The model of highest evidence was {selection_counts(selected)}." if selected else ""
    return Claim("The three steps beat every single method.", evidence, note)


def _weights_needed(cross: Sequence[Row], simulator: str) -> Claim:
    kinds = {kind: crossed(cross, simulator, weights=kind) for kind in ("plugin", "snis")}
    evidence = []
    for m in MODELS:
        unweighted, weighted = (by_seed(where(part, model=m, proposal=m), "fdr_mae") for part in kinds.values())
        evidence.append(
            Evidence(f"FDR error of {m}, without weights minus with", difference(unweighted, weighted), _HIGH, 2)
        )
    return Claim("Without weights the FDR error is larger.", evidence)


# ---------------------------------------------------------------------------------------------------- targets
TARGETS: dict[str, dict[int | str, tuple[float, float]]] = {
    "appendix": {"all": (0.6, 0.98), 50: (2.0, 0.90)},
    "released": {"all": (0.3, 0.98), 50: (0.5, 0.98)},
}
"""Largest FDR error in hundredths and smallest share of genes found, by simulator and cells per group."""

_MOST_FDP = 0.06


def targets(models: Sequence[Row], cross: Sequence[Row], simulator: str) -> list[Claim]:
    """Targets of refined proposals with the group prior, over models, with all sources of uncertainty."""
    claims = []
    for n, (error, power) in TARGETS.get(simulator, {}).items():
        rows = refined(cross, simulator, n)
        evidence = [
            Evidence(f"FDR error minus {error:g}", minus(by_seed(rows, "fdr_mae"), error), _LOW, 2),
            Evidence(f"share found minus {power:g}", minus(by_seed(rows, "tpr"), power), _HIGH, 3),
            Evidence(f"FDP minus {_MOST_FDP:g}", minus(by_seed(rows, "fdp"), _MOST_FDP), _LOW, 3),
        ]
        if n != "all":
            half = {s: v / 2 for s, v in by_seed(floor(cross, simulator, "raw counts", n), "fdr_mae").items()}
            gap = difference(by_seed(rows, "fdr_mae"), half)
            evidence.append(Evidence("FDR error minus half that of raw counts", gap, _LOW, 2))
        cells = "all cells" if n == "all" else f"{n} cells per group"
        claims.append(Claim(f"FDR controlled and genes found, {cells}.", evidence))
    return [*claims, _coverage_target(cross, simulator), _proposal_target(cross, simulator)]


def _coverage_target(cross: Sequence[Row], simulator: str) -> Claim:
    many, few = (by_seed(refined(cross, simulator, n), "coverage") for n in ("all", 50))
    evidence = [
        Evidence("coverage at 50 cells minus 0.85", minus(few, 0.85), _HIGH, 2),
        Evidence("coverage at 50 cells minus 0.95", minus(few, 0.95), _LOW, 2),
        Evidence("coverage with all cells minus 0.75", minus(many, 0.75), _HIGH, 2),
    ]
    return Claim("90 % intervals cover, with refits of the model.", evidence)


def _proposal_target(cross: Sequence[Row], simulator: str) -> Claim:
    rows = where(crossed(cross, simulator), proposal="REFINED")
    evidence = [
        Evidence("median k-hat minus 0.55", minus(by_seed(rows, "khat"), 0.55), _LOW, 2),
        Evidence("ESS as a share of draws, minus 0.15", minus(by_seed(rows, "ess"), 0.15), _HIGH, 2),
    ]
    return Claim("Refined proposals are reliable.", evidence)


# -------------------------------------------------------------------------------------------------- further
def further_claims(models: Sequence[Row], cross: Sequence[Row], simulator: str) -> list[Claim]:
    """Claims of our own, beyond the paper."""
    without_model = {
        prior: by_seed(refined(cross, simulator, 50, prior=prior, uncertainty="z+cells"), "fdr_mae")
        for prior in ("group", "model")
    }
    ais = [row for row in where(models, simulator=simulator) if row.get("ais") is not None]
    gap = by_seed([{**row, "gap": row["iwelbo_refined_ais_cells"] - row["ais"]} for row in ais], "gap")
    by_sampler = {q: by_seed(where(beside_ais(cross, simulator), proposal=q), "fdr_mae") for q in ("REFINED", "AIS")}
    error_gap = {s: v - by_sampler["AIS"][s] for s, v in by_sampler["REFINED"].items() if s in by_sampler["AIS"]}
    ours, raw = refined(cross, simulator, 50), floor(cross, simulator, "raw counts", 50)
    groups, pairs = (refined(cross, simulator, "all", estimand=e) for e in ("proportion", "pair"))
    return [
        Claim(
            "A prior centred at each group's own mean lowers the FDR error at 50 cells per group.",
            [
                Evidence(
                    "group prior minus common prior, latents and cells",
                    difference(without_model["group"], without_model["model"]),
                    _LOW,
                    2,
                )
            ],
        ),
        Claim(
            "With 50 cells per group a model does better than raw counts.",
            [
                _gap("FDR error, refined minus raw", ours, raw, "fdr_mae", _LOW, 2),
                _gap("share found, refined minus raw", ours, raw, "tpr", _HIGH, 3),
                _gap("Brier score, refined minus raw", ours, raw, "brier", _LOW, 3),
            ],
        ),
        Claim(
            "Comparing random pairs of cells finds fewer genes than comparing groups.",
            [_gap("share found, pairs minus groups, all cells", pairs, groups, "tpr", _LOW, 3)],
        ),
        Claim(
            "Refined proposals reach the evidence of AIS, to a tenth of a nat, and its FDR error, to a hundredth.",
            [
                Evidence("evidence, refined minus AIS, plus 0.1", minus(gap, -0.1), _HIGH, 3),
                Evidence("FDR error, refined minus AIS, minus 1", minus(error_gap, 1.0), _LOW, 2),
            ],
        ),
        _intervals_need_the_model(cross, simulator),
    ]


def _gap(what: str, a: Sequence[Row], b: Sequence[Row], key: str, sign: int, digits: int) -> Evidence:
    return Evidence(what, difference(by_seed(a, key), by_seed(b, key)), sign, digits)


def _intervals_need_the_model(cross: Sequence[Row], simulator: str) -> Claim:
    """Each source of uncertainty against the one before it, with all cells and with 50 per group."""
    kinds, key = list(UNCERTAINTIES), "interval_score"
    evidence = []
    for n, size in (("all", "all cells"), (50, "50 per group")):
        rows = {kind: refined(cross, simulator, n, uncertainty=kind) for kind in kinds}
        for less, more in pairwise(kinds):
            what = f"interval score, {UNCERTAINTIES[more]} minus {UNCERTAINTIES[less]}, {size}"
            evidence.append(_gap(what, rows[more], rows[less], key, _LOW, 2))
    return Claim("Intervals improve with each source of uncertainty.", evidence)


def graded_claims(cross: Sequence[Row]) -> list[Claim]:
    """Claims on changes about delta, where a stated probability that is too sure is seen."""
    kinds = {kind: refined(cross, "graded", 50, uncertainty=kind) for kind in UNCERTAINTIES}
    latents, everything = kinds["z"], kinds["z+cells+model"]
    what = f"{UNCERTAINTIES['z+cells+model']} minus {UNCERTAINTIES['z']}"
    evidence = [
        _gap(f"graded: Brier score, {what}", everything, latents, "brier", _LOW, 3),
        _gap(f"graded: FDR error, {what}", everything, latents, "fdr_mae", _LOW, 2),
    ]
    return [
        Claim("Where changes lie about delta, uncertainty of cells and model makes probabilities better.", evidence)
    ]


def donor_claims(donors: Sequence[Row]) -> list[Claim]:
    """How often anything is called if nothing differs between the groups except their donors."""
    null = where(donors, arm="null")
    names = list(dict.fromkeys(row["model"] for row in where(null, replicates="donors") if "replicates" in row))
    called = {
        (m, kind): {row["seed"]: float(row["n_called_05"] > 0) for row in where(null, model=m, replicates=kind)}
        for m in names
        for kind in ("cells", "donors")
    }
    too_often = [
        Evidence(f"share of data sets, {m}, minus 0.05", _share(called[m, "cells"], 0.05), _HIGH, 2, over="data sets")
        for m in names
    ]
    less_often = [
        Evidence(
            f"share of data sets, donors minus cells, {m}",
            difference(called[m, "donors"], called[m, "cells"]),
            _LOW,
            2,
            over="data sets",
        )
        for m in names
    ]
    return [
        Claim("With cells as replicates more than 5 % of data sets without any change have a discovery.", too_often),
        Claim("With donors as replicates fewer of them have one.", less_often),
    ]


def _share(called: Mapping[Any, float], level: float) -> Summary | None:
    """A share minus a level; by the rule of succession its error is not zero if all data sets agree."""
    if not called:
        return None
    n, k = len(called), sum(called.values())
    p = (k + 1) / (n + 2)
    return Summary(k / n - level, math.sqrt(p * (1 - p)), n)
