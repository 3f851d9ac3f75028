"""The page of the bivariate example: Figure 1 of the paper, panels A to D, and the paper's claims on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vaerdict.core import DataError
from vaerdict.report.document import Block, Document, Picture, Section
from vaerdict.report.figures import GREY, INK, OKABE_ITO, label
from vaerdict.report.records import Row, rows_of
from vaerdict.report.tables import Column, Table, Value
from vaerdict_paper.pages.claims import Claim, Evidence, tally
from vaerdict_paper.pages.seed_statistics import Summary, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MEANS = {"exact": "means at the λ in question", "frozen": "means kept at λ = 0"}
_RULE = (
    "A claim holds when each of its differences lies more than two standard errors on the claimed side of zero, and "
    "does not hold when one lies as far on the other side. Standard errors are over the observations; all proposals "
    "share the same noise."
)
_CHOICES = (
    "The paper gives neither the loading matrix of its figure nor whether the means of the proposals follow λ; each "
    "choice is shown separately. The entangled loadings were chosen, among about thirty tried, because they give the "
    "paper's order; the claims are tested on two others too. Standard errors leave out the numerical fit of the IWAE "
    "proposal."
)


def document(results: dict[str, Any], manifest: dict[str, Any] | None) -> Document:
    """The report on a bivariate run; of several seeds the first is shown."""
    panels = rows_of(results, "panels", "stage", "loading", "seed")
    if not panels:
        raise DataError("results.json of the bivariate example holds no 'panels'; run the experiment again.")
    rows = where(panels, seed=panels[0]["seed"])
    n = int(results.get("settings", {}).get("n_data", 0))
    loadings = list(dict.fromkeys(row["loading"] for row in rows))
    claims = {loading: _claims(where(rows, loading=loading), n) for loading in loadings}
    sections = [
        Section(f"Loadings: {loading}", _blocks(where(rows, loading=loading), claims[loading])) for loading in loadings
    ]
    main = loadings[0]
    counts = f"Of the {len(claims[main])} claims on the paper's Figure 1 with {main} loadings, {tally(claims[main])}."
    return Document(
        "Bivariate pPCA: Figure 1 of the paper",
        [counts, _CHOICES],
        [Section("How to read this", [_RULE]), *sections],
        manifest,
    )


def _blocks(rows: Sequence[Row], claims: Sequence[Claim]) -> list[Block]:
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
    """The claim that the stored margins are positive, with standard errors over n observations."""
    evidence = [
        Evidence(name.replace(" - ", " minus "), Summary(m["margin"], m["se"] * n**0.5, n), +1, 4, over="observations")
        for name, m in claim["margins"].items()
    ]
    return Claim(
        f"{claim['claim'][0].upper()}{claim['claim'][1:]} ({_MEANS.get(row['means'], row['means'])}).", evidence
    )


def _shape_picture(row: Row) -> Picture:
    norms = ", ".join(f"{q['proposal']} {q['a_norm']:.2f}" for q in row["proposals"])
    return Picture(
        f"approximation-{row['loading']}",
        f"A: the posterior at λ = 0 and its mean-field approximations, two standard deviations; correlation "
        f"{row['posterior']['correlation']:.2f}. B: the norm of A of each.",
        f"Ellipses of the posterior and of four proposals, and a bar for each norm of A: {norms}.",
        lambda: _draw_approximation(row),
    )


def _shape_table(row: Row) -> Table:
    body = [
        {"proposal": q["proposal"], "ratio": Value(max(q["variance_ratio"])), "a_norm": Value(q["a_norm"])}
        for q in row["proposals"]
    ]
    columns = [
        Column("proposal", "proposal"),
        Column("ratio", "variance over the posterior's"),
        Column("a_norm", "‖A‖₂"),
    ]
    return Table(f"approximation-{row['loading']}", "Mean-field proposals at λ = 0.", columns, body)


def _selection_picture(row: Row) -> Picture:
    maxima = ", ".join(f"{r['proposal']} {r['lambda']:.3f}" for r in row["selection"])
    return Picture(
        f"selection-{row['loading']}-{row['means']}",
        f"C: the bound as a function of λ with {_MEANS.get(row['means'], row['means'])}. D: near the maxima.",
        f"Curves of the evidence and of four bounds against lambda; their maxima lie at {maxima}.",
        lambda: _draw_selection(row),
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
    caption = f"The model each bound selects, {_MEANS.get(row['means'], row['means'])}."
    return Table(f"selection-{row['loading']}-{row['means']}", caption, columns, body)


# ------------------------------------------------------------------------------------------------------- panels
_LOOKS = {
    "VAE": (OKABE_ITO[0], "-", "o"),
    "IWAE": (OKABE_ITO[1], "--", "s"),
    "WW": (OKABE_ITO[2], "-.", "D"),
    "CHI": (OKABE_ITO[3], ":", "^"),
    "EVIDENCE": (INK, "-", "*"),
}
_OTHER = (GREY, "-", "o")


def _two_panels(height: float = 3.3) -> tuple[Figure, Axes, Axes]:
    """A figure with two panels side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.8, height), layout="constrained")
    left, right = figure.subplots(1, 2)
    return figure, left, right


def _draw_approximation(row: Mapping[str, Any]) -> Figure:
    """Panels A and B: the posterior and its approximations as ellipses, and the norm of A of each."""
    figure, left, right = _two_panels()
    _ellipse(left, row["posterior"], "posterior", INK, "-", fill=True)
    for q in row["proposals"]:
        colour, style, _ = _LOOKS.get(q["proposal"], _OTHER)
        _ellipse(left, q, q["proposal"], colour, style)
    left.autoscale_view()
    left.set(title="A", xlabel="z₁", ylabel="z₂", aspect="equal")
    left.title.set_fontweight("bold")
    names = [q["proposal"] for q in row["proposals"]]
    right.bar(
        range(len(names)), [q["a_norm"] for q in row["proposals"]], color=[_LOOKS.get(n, _OTHER)[0] for n in names]
    )
    right.set_xticks(range(len(names)), [label(name, 10) for name in names])
    right.set(title="B", ylabel="‖A‖₂")
    right.title.set_fontweight("bold")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9, handlelength=1.8)
    return figure


def _ellipse(axes: Axes, normal: Mapping[str, Any], name: str, colour: str, style: str, *, fill: bool = False) -> None:
    """The contour of a normal distribution at two standard deviations."""
    import numpy as np

    angle = np.linspace(0, 2 * np.pi, 181)
    root = np.linalg.cholesky(np.asarray(normal["covariance"]))
    x, y = np.asarray(normal["mean"])[:, None] + 2 * root @ np.stack([np.cos(angle), np.sin(angle)])
    if fill:
        axes.fill(x, y, color=GREY, alpha=0.25, linewidth=0)
    axes.plot(x, y, color=colour, linestyle=style, label=label(name))


def _draw_selection(row: Mapping[str, Any]) -> Figure:
    """Panels C and D: every bound as a function of lambda, and a zoom at the maxima."""
    figure, left, right = _two_panels()
    _bounds(left, row["grid"], row["curves"])
    _bounds(right, row["zoom_grid"], row["zoom"])
    for choice in row["selection"]:
        colour, _, marker = _LOOKS.get(choice["proposal"], _OTHER)
        curve = row["zoom"].get(choice["proposal"], {"value": []})["value"]
        right.plot(choice["lambda"], max(curve, default=0), marker=marker, color=colour, markersize=6, clip_on=False)
    for axes, name in ((left, "C"), (right, "D")):
        axes.set(title=name, xlabel="λ")
        axes.title.set_fontweight("bold")
    left.set_ylabel("bound, mean over observations")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9, handlelength=1.8)
    return figure


def _bounds(axes: Axes, grid: Sequence[float], curves: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    for name, curve in curves.items():
        colour, style, _ = _LOOKS.get(name, _OTHER)
        axes.plot(
            grid, curve["value"], color=colour, linestyle=style, label="evidence" if name == "EVIDENCE" else label(name)
        )
