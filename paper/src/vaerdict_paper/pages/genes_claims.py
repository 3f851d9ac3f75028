"""Claims of the gene experiment: those of the paper, the targets of this project, and further findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from scipy import special

from vaerdict.de.verdict import CERTIFIED
from vaerdict.report.records import Row
from vaerdict_paper.pages.claims import (
    Claim,
    Evidence,
    paired_evidence,
    rival_evidence,
    selected_models,
    selection_counts,
)
from vaerdict_paper.pages.genes_rows import MODELS, UNCERTAINTIES, crossed, floor, refined, scores
from vaerdict_paper.pages.seed_statistics import Summary, by_seed, difference, minus, where

Published = Mapping[str, Any]

SCALES = (
    "FDR errors are in hundredths; evidence is in nats per cell, on cells used neither for training nor for early "
    "stopping, by proposals refined for each of them. Every seed has its own data set. Claims and rivals were revised "
    "after earlier runs on these simulators and seeds. What is said to be best must beat each of its rivals."
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
        merged.append(Claim(same[0].text, evidence, _merged_note({name: claim.note for name, claim in pairs})))
    return merged


def _merged_note(notes: Mapping[str, str]) -> str:
    """A note that all simulators share once, others with the name of their simulator."""
    if len({*notes.values()}) == 1:
        return next(iter(notes.values()))
    return " ".join(f"{name}: {note}" for name, note in notes.items() if note)


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
    return [*claims, _coverage_target(cross, simulator)]


def _coverage_target(cross: Sequence[Row], simulator: str) -> Claim:
    many, few = (by_seed(refined(cross, simulator, n), "coverage") for n in ("all", 50))
    evidence = [
        Evidence("coverage at 50 cells minus 0.85", minus(few, 0.85), _HIGH, 2),
        Evidence("coverage at 50 cells minus 0.95", minus(few, 0.95), _LOW, 2),
        Evidence("coverage with all cells minus 0.75", minus(many, 0.75), _HIGH, 2),
    ]
    return Claim("90 % intervals cover, with refits of the model.", evidence)


def reliability_target(cross: Sequence[Row], names: Sequence[str]) -> Claim:
    """The share of cells whose weights are reliable, by refined proposals, on every simulator with such rows."""
    shares = {name: by_seed(where(crossed(cross, name), proposal="REFINED"), "khat_share_ok") for name in names}
    evidence = [
        Evidence(f"{name}: share of cells with reliable weights, minus {CERTIFIED:g}", gap, _HIGH, 3)
        for name, share in shares.items()
        if (gap := minus(share, CERTIFIED)) is not None
    ]
    note = (
        "Test cells, mean over models. Weights are reliable if k-hat is at most its threshold for the number of draws, "
        "with an ESS of 10 or more."
    )
    return Claim(f"Refined proposals are reliable for at least {100 * CERTIFIED:.0f} % of the cells.", evidence, note)


# -------------------------------------------------------------------------------------------------- further
ANNEALED = "VAE"
"""The model of the claim on AIS, which takes too long for every model."""


def further_claims(models: Sequence[Row], cross: Sequence[Row], simulator: str) -> list[Claim]:
    """Claims of our own, beyond the paper."""
    without_model = {
        prior: by_seed(refined(cross, simulator, 50, prior=prior, uncertainty="z+cells"), "fdr_mae")
        for prior in ("group", "model")
    }
    ais = [row for row in where(models, simulator=simulator, model=ANNEALED) if row.get("ais") is not None]
    gap = by_seed([{**row, "gap": row["iwelbo_refined_ais_cells"] - row["ais"]} for row in ais], "gap")
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
            "With 50 cells per group compared, a model of all cells does better than raw counts.",
            [
                _gap("FDR error, refined minus raw", ours, raw, "fdr_mae", _LOW, 2),
                _gap("share found, refined minus raw", ours, raw, "tpr", _HIGH, 3),
                _gap("Brier score, refined minus raw", ours, raw, "brier", _LOW, 3),
            ],
        ),
        Claim(
            "Comparing random pairs of cells finds fewer of the genes that differ between groups.",
            [_gap("share found, pairs minus groups, all cells", pairs, groups, "tpr", _LOW, 3)],
        ),
        Claim(
            f"On the {ANNEALED}'s model refined proposals reach the evidence of AIS, to a tenth of a nat.",
            [Evidence("evidence, refined minus AIS, plus 0.1", minus(gap, -0.1), _HIGH, 3)],
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


# -------------------------------------------------------------------------------------------- shares of data sets
@dataclass(frozen=True, kw_only=True)
class ShareEvidence(Evidence):
    """A share of data sets minus a level, by the exact binomial test (see `share_evidence`).

    Parameters
    ----------
    count
        The data sets that count, of the ``difference.n``.
    level
        The share that is compared with.
    """

    count: int
    level: float

    @property
    def p_values(self) -> tuple[float, float]:
        """One-sided p-values for the claimed side and for the opposite one; both 1 if nothing can be decided."""
        if self.difference is None or not self.decidable:
            return 1.0, 1.0
        k, n = self.count, self.difference.n
        above, below = float(special.bdtrc(k - 1, n, self.level)), float(special.bdtr(k, n, self.level))
        return (above, below) if self.sign > 0 else (below, above)

    def described(self, coverage: float | None = None) -> str:
        """The share with its standard error, and its interval of a coverage or else its p-value."""
        if self.difference is not None and not self.difference.n:
            return f"{self.what}: there are none"
        return super().described(coverage)

    def interval(self, coverage: float) -> tuple[float, float]:
        """The interval of Clopper and Pearson, minus the level."""
        assert self.difference is not None
        k, n, tail = self.count, self.difference.n, (1 - coverage) / 2
        low = float(special.betaincinv(k, n - k + 1, tail)) if k else 0.0
        high = float(special.betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0
        return low - self.level, high - self.level


def share_evidence(what: str, count: int, n: int, level: float, sign: int) -> ShareEvidence:
    """The share `count` / `n` minus a level; by the rule of succession its printed error is not zero if all agree."""
    p = (count + 1) / (n + 2)
    gap = Summary(count / n - level if n else 0.0, math.sqrt(p * (1 - p)) if n else None, n)
    return ShareEvidence(f"{what}, minus {level:g}", gap, sign, 2, over="data sets", count=count, level=level)


def donor_claims(donors: Sequence[Row]) -> list[Claim]:
    """How often anything is called if nothing differs between the groups except their donors."""
    null = where(donors, arm="null")
    names = list(dict.fromkeys(row["model"] for row in where(null, replicates="donors") if "replicates" in row))
    called = {
        (m, kind): {row["seed"]: row["n_called_05"] > 0 for row in where(null, model=m, replicates=kind)}
        for m in names
        for kind in ("cells", "donors")
    }
    too_often = [_too_often(m, called[m, "cells"]) for m in names]
    less_often = [_less_often(m, called[m, "cells"], called[m, "donors"]) for m in names]
    return [
        Claim(
            "With cells as replicates more than 5 % of data sets without any change have a discovery.",
            too_often,
            "By exact binomial tests.",
        ),
        Claim(
            "With donors as replicates fewer of them have one.",
            less_often,
            "By exact sign tests on the data sets in which the two differ.",
        ),
    ]


def _too_often(model: str, cells: Mapping[Any, bool]) -> Evidence:
    what = f"share of data sets, {model}"
    if not cells:
        return Evidence(what, None, _HIGH, 2, over="data sets")
    return share_evidence(what, sum(cells.values()), len(cells), 0.05, _HIGH)


def _less_often(model: str, cells: Mapping[Any, bool], donors: Mapping[Any, bool]) -> Evidence:
    """The sign test: of the data sets with a discovery by one kind of replicate alone, how many have it by donors."""
    what = f"of data sets with a discovery by cells or by donors alone, share by donors, {model}"
    both = [seed for seed in cells if seed in donors]
    if not both:
        return Evidence(what, None, _LOW, 2, over="data sets")
    alone = [donors[seed] for seed in both if cells[seed] != donors[seed]]
    return share_evidence(what, sum(alone), len(alone), 0.5, _LOW)
