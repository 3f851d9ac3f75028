"""The bivariate example over random loadings: how often each claim on Figure 1 holds, and which bound errs least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from scipy import stats

from vaerdict.report.document import Block, Picture, Statement
from vaerdict.report.records import Row
from vaerdict.report.tables import Column, Table, Value
from vaerdict_paper.experiments.bivariate import CLAIMS, PAIRS, PROPOSALS
from vaerdict_paper.pages.bivariate_figures import MEANS, draw_errors, draw_widths
from vaerdict_paper.pages.claims import Claim, Evidence
from vaerdict_paper.pages.seed_statistics import Summary, where

_SHOWN = 1.0  # the variance of the loadings in the summary and in the figure of errors
_PERCENT = Column("share", "share", 0, 100)

Test = Callable[[Row], bool]
"""Whether a statement is true of one loading matrix."""


def random_blocks(random: Sequence[Row], panels: Sequence[Row], claims: Sequence[Statement]) -> list[Block]:
    """Claims, figures and tables over random loadings, with the chosen loadings of `panels` marked."""
    return [
        claims,
        _widths_picture(random, panels),
        _claims_table(random),
        _errors_picture(_shown(random), panels),
        _errors_table(random),
    ]


def random_summary(random: Sequence[Row]) -> str:
    """How often the claim on the error of lambda holds, in one sentence."""
    shown = _shown(random)
    shares = [
        f"{_PERCENT.text(_share([_all_pairs('bias', means)(row) for row in shown]))} with {text}"
        for means, text in MEANS.items()
    ]
    return (
        f"The paper's order of panel D, in which WW and CHI err more than VAE and IWAE, in percent of {len(shown)} "
        f"random loadings with entries N(0, {shown[0]['variance']:g}) and with 95 % interval: {', '.join(shares)}."
    )


def _variances(random: Sequence[Row]) -> list[float]:
    return list(dict.fromkeys(row["variance"] for row in random))


def _shown(random: Sequence[Row]) -> list[Row]:
    return where(random, variance=_SHOWN) or list(random)


# ---------------------------------------------------------------------------------------------------------- claims
def _value(row: Row, key: str, name: str, means: str | None = None) -> float:
    """A number of one proposal for one loading matrix."""
    return (row if means is None else row[means])[key][PROPOSALS.index(name)]


def _larger(key: str, wide: str, narrow: str, means: str | None = None) -> Test:
    return lambda row: _value(row, key, wide, means) > _value(row, key, narrow, means)


def _all_pairs(key: str, means: str) -> Test:
    tests = [_larger(key, wide, narrow, means) for wide, narrow in PAIRS]
    return lambda row: all(test(row) for test in tests)


def random_claims(random: Sequence[Row]) -> list[Claim]:
    """The claims of section 3.2 about most loadings: a share above one half, with the standard error of one half."""
    return [
        Claim(f"On most random loadings, {text} ({MEANS[means]}).", _more_than_half(random, _all_pairs(key, means)))
        for means in MEANS
        for key, text in CLAIMS.items()
    ]


def _more_than_half(random: Sequence[Row], test: Test) -> list[Evidence]:
    evidence = []
    for variance in _variances(random):
        true = [test(row) for row in where(random, variance=variance)]
        what = f"share of loadings with entries N(0, {variance:g}), minus one half"
        evidence.append(Evidence(what, Summary(sum(true) / len(true) - 0.5, 0.5, len(true)), +1, 3, over="loadings"))
    return evidence


def _claims_table(random: Sequence[Row]) -> Table:
    """The share of loadings for which each statement holds, with its interval."""
    statements: dict[str, Test] = {
        "variance: VAE < WW < CHI": lambda r: (
            _larger("variance_ratio", "WW", "VAE")(r) and _larger("variance_ratio", "CHI", "WW")(r)
        ),
        "variance: IWAE < WW": _larger("variance_ratio", "WW", "IWAE"),
        "‖A‖₂: WW and CHI < VAE": lambda r: all(_larger("a_norm", "VAE", q)(r) for q in ("WW", "CHI")),
    }
    short = {"slope": "slope of the slack", "range": "range of the bound", "bias": "error of λ"}
    for means, text in MEANS.items():
        for key in CLAIMS:
            statements[f"{short[key]}: WW and CHI > VAE and IWAE ({text})"] = _all_pairs(key, means)
        for wide, narrow in PAIRS:
            statements[f"error of λ: {wide} > {narrow} ({text})"] = _larger("bias", wide, narrow, means)
    body = [
        {
            "statement": text,
            **{f"{v:g}": _share([test(row) for row in where(random, variance=v)]) for v in _variances(random)},
        }
        for text, test in statements.items()
    ]
    columns = [Column("statement", "statement")]
    columns += [Column(f"{v:g}", f"entries N(0, {v:g}), %", 0, 100) for v in _variances(random)]
    n = len(where(random, variance=_variances(random)[0]))
    caption = f"Share of {n} random loadings for which each statement of Figure 1 holds, with its 95 % interval."
    note = "Where the correlation is close to zero, bounds differ by less than the error of their integration."
    return Table("random-claims", caption, columns, body, note)


def _share(true: Sequence[bool]) -> Value:
    """A share with the exact interval of Clopper and Pearson."""
    interval = stats.binomtest(sum(true), len(true)).proportion_ci(0.95, method="exact")
    return Value(sum(true) / len(true), None, f" ({100 * interval.low:.0f} to {100 * interval.high:.0f})")


# ---------------------------------------------------------------------------------------------------------- errors
def _errors_table(random: Sequence[Row]) -> Table:
    """The median error of the selected lambda, and how often each proposal has the smallest."""
    body, columns = [], [Column("proposal", "bound by")]
    for means, text in MEANS.items():
        for index, name in enumerate(PROPOSALS):
            row: dict[str, object] = {"proposal": f"{name} ({text})"}
            for variance in _variances(random):
                errors = [r[means]["bias"] for r in where(random, variance=variance)]
                row[f"error-{variance:g}"] = Value(median(e[index] for e in errors))
                row[f"least-{variance:g}"] = _share([e[index] == min(e) for e in errors])
            body.append(row)
    for variance in _variances(random):
        columns += [
            Column(f"error-{variance:g}", f"N(0, {variance:g}): median error", 4),
            Column(f"least-{variance:g}", "smallest, %", 0, 100),
        ]
    caption = (
        "Error of the selected λ over random loadings, and the share on which each proposal has the smallest error, "
        "with its 95 % interval."
    )
    return Table("random-errors", caption, columns, body)


# -------------------------------------------------------------------------------------------------------- pictures
def _widths_picture(random: Sequence[Row], panels: Sequence[Row]) -> Picture:
    return Picture(
        "random-widths",
        "E: the variance of each proposal against the correlation of the posterior, over random loadings. F: how often "
        "such correlations occur. The chosen loadings are marked; the order of the paper's figure needs the IWAE "
        "proposal to be narrower than that of WW.",
        "Curves of the variance of four proposals against correlation, and distribution functions of the correlation.",
        lambda: draw_widths(random, panels),
    )


def _errors_picture(random: Sequence[Row], panels: Sequence[Row]) -> Picture:
    return Picture(
        "random-errors",
        f"G, H: the error of the λ that each bound selects over that of the VAE, its distribution over random loadings "
        f"with entries N(0, {random[0]['variance']:g}); left of the line the error is smaller. Points: the chosen "
        "loadings.",
        "Distribution functions of three ratios of errors, with points for the chosen loadings.",
        lambda: draw_errors(random, panels),
    )
