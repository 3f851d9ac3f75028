"""The page of the bivariate example: Figure 1 of the paper, panels A to D, and the paper's claims on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vaerdict.core import DataError
from vaerdict.report.document import Block, Document, Picture, Section, Statement
from vaerdict.report.records import Row, rows_of
from vaerdict.report.tables import Column, Table, Value
from vaerdict_paper.pages.bivariate_bounds import bounds_blocks
from vaerdict_paper.pages.bivariate_figures import MEANS, draw_approximation, draw_selection
from vaerdict_paper.pages.bivariate_random import random_blocks, random_claims, random_summary
from vaerdict_paper.pages.claims import RULE, Claim, Evidence, judged, tally
from vaerdict_paper.pages.seed_statistics import Summary, where

_HOW = (
    "Differences of closed forms are exact. Bounds are expectations over the true distribution of the observations, by "
    "scrambled Sobol points; their standard errors are over independent scramblings, which all proposals share, and "
    "include the numerical fit of the IWAE proposal."
)
_SEEDS = "Here scramblings, or random loadings, take the place of seeds."
_CHOICES = (
    "The paper does not give the loading matrix of its figure. It fits proposals at λ = 0, which leaves open whether "
    "their means follow λ; each choice is shown separately. The entangled loadings were chosen, among about thirty "
    "tried, because they give the paper's order. Two other loadings and random ones are shown beside them."
)


def document(results: dict[str, Any], manifest: dict[str, Any] | None) -> Document:
    """The report on a bivariate run; of several seeds the first is shown."""
    panels = rows_of(results, "panels", "stage", "loading", "seed")
    if not panels:
        raise DataError("results.json of the bivariate example holds no 'panels'; run the experiment again.")
    rows = where(panels, seed=panels[0]["seed"])
    n = int(results.get("settings", {}).get("n_scramblings", 0))
    random = where(rows_of(results, "random", "variance", "seed"), seed=rows[0]["seed"])
    loadings = list(dict.fromkeys(row["loading"] for row in rows))
    *chosen, over_random = judged(*(_claims(where(rows, loading=name), n) for name in loadings), random_claims(random))
    sections = [
        Section(f"Loadings: {name}", _blocks(where(rows, loading=name), claims))
        for name, claims in zip(loadings, chosen, strict=True)
    ]
    main = loadings[0]
    counts = f"Of the {len(chosen[0])} claims on the paper's Figure 1 with {main} loadings, {tally(chosen[0])}."
    drawn = [Section("Random loadings", random_blocks(random, rows, over_random))] if random else []
    shapes = where(rows, stage="approximation", loading=main)
    bounds = [Section("The bounds of the theory", bounds_blocks(shapes[0]))] if shapes else []
    return Document(
        "Bivariate pPCA: Figure 1 of the paper",
        [counts, *([random_summary(random)] if random else []), _CHOICES],
        [Section("How to read this", [_HOW, f"{RULE} {_SEEDS}"]), *sections, *drawn, *bounds],
        manifest,
    )


def _blocks(rows: Sequence[Row], claims: Sequence[Statement]) -> list[Block]:
    blocks: list[Block] = [claims]
    for row in where(rows, stage="approximation"):
        blocks += [_shape_picture(row), _shape_table(row)]
    for row in where(rows, stage="selection"):
        blocks += [_selection_picture(row), _selection_table(row)]
    return blocks


def _claims(rows: Sequence[Row], n: int) -> list[Claim]:
    shapes = [claim for row in where(rows, stage="approximation") for claim in _shape_claims(row)]
    return shapes + [_margin_claim(row, claim, n) for row in where(rows, stage="selection") for claim in row["claims"]]


def _shape_claims(row: Row) -> list[Claim]:
    """Closed forms, so the differences are exact."""
    ratio = {q["proposal"]: max(q["variance_ratio"]) for q in row["proposals"]}
    norm = {q["proposal"]: q["a_norm"] for q in row["proposals"]}
    below = [Evidence("variance of VAE over the posterior's, minus 1", _exact(ratio["VAE"] - 1), -1, 2, over="")]
    smaller = [Evidence(f"‖A‖₂ of {q} minus VAE", _exact(norm[q] - norm["VAE"]), -1, 2, over="") for q in ("WW", "CHI")]
    return [
        Claim("The VAE underestimates the variance.", below),
        Claim("The norm of A is smaller for WW and CHI than for the VAE.", smaller),
    ]


def _exact(value: float) -> Summary:
    return Summary(value, 0.0, 1)


def _margin_claim(row: Row, claim: Mapping[str, Any], n: int) -> Claim:
    """The claim that the stored margins are positive, with standard errors over n scramblings."""
    evidence = [
        Evidence(name.replace(" - ", " minus "), Summary(m["margin"], m["se"] * n**0.5, n), +1, 4, over="scramblings")
        for name, m in claim["margins"].items()
    ]
    return Claim(
        f"{claim['claim'][0].upper()}{claim['claim'][1:]} ({MEANS.get(row['means'], row['means'])}).", evidence
    )


def _shape_picture(row: Row) -> Picture:
    norms = ", ".join(f"{q['proposal']} {q['a_norm']:.2f}" for q in row["proposals"])
    return Picture(
        f"approximation-{row['loading']}",
        f"A: the posterior of x = 0 at λ = 0 and its mean-field approximations, two standard deviations; correlation "
        f"{row['posterior']['correlation']:.2f}. B: the norm of A of each.",
        f"Ellipses of the posterior and of four proposals, and a bar for each norm of A: {norms}.",
        lambda: draw_approximation(row),
    )


def _shape_table(row: Row) -> Table:
    body = [
        {
            "proposal": q["proposal"],
            "ratio": Value(max(q["variance_ratio"])),
            "a_norm": Value(q["a_norm"], q["a_norm_se"] or None),
        }
        for q in row["proposals"]
    ]
    columns = [
        Column("proposal", "proposal"),
        Column("ratio", "variance over the posterior's"),
        Column("a_norm", "‖A‖₂ (± se)"),
    ]
    return Table(f"approximation-{row['loading']}", "Mean-field proposals at λ = 0.", columns, body)


def _selection_picture(row: Row) -> Picture:
    maxima = ", ".join(f"{r['proposal']} {r['lambda']:.3f}" for r in row["selection"])
    return Picture(
        f"selection-{row['loading']}-{row['means']}",
        f"C: the bound as a function of λ with {MEANS.get(row['means'], row['means'])}. D: near the maxima.",
        f"Curves of the evidence and of four bounds against lambda; their maxima lie at {maxima}.",
        lambda: draw_selection(row),
    )


def _selection_table(row: Row) -> Table:
    body = [
        {
            "proposal": "exact evidence" if r["proposal"] == "EVIDENCE" else r["proposal"],
            "lambda": Value(r["lambda"], r["lambda_se"], " (at the edge)" if r.get("at_edge") else ""),
            "bias": Value(r["bias"]),
            "sensitivity": Value(r["sensitivity"], r["sensitivity_se"]),
        }
        for r in row["selection"]
    ]
    columns = [
        Column("proposal", "bound by"),
        Column("lambda", "λ selected (± se)", 3),
        Column("bias", "bias", 3, signed=True),
        Column("sensitivity", "slope of the slack in λ (± se)", 3),
    ]
    caption = f"The model each bound selects, {MEANS.get(row['means'], row['means'])}."
    return Table(f"selection-{row['loading']}-{row['means']}", caption, columns, body)
