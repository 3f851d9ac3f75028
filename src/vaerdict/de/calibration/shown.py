"""How notebooks show a calibration: a few lines, a table, and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vaerdict.notebook import GREY, axes_or_new, counted, html

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN = 5


def text(results: Mapping[str, Any]) -> str:
    """The groups, the verdict, and achieved FDR and power of each method at the FDR asked for."""
    settings = results["settings"]
    lines = [f"Calibration: halves of {', '.join(settings['groups'][:_SHOWN])}; FDR {results['verdict']['fdr']}"]
    lines += [
        f"  {row['method']}, {row['replicates']}: {row['false or found']}" for row in _rows(results) if row["asked for"]
    ][:_SHOWN]
    return "\n".join(lines)


def as_html(results: Mapping[str, Any]) -> str:
    """The same with every level."""
    title = text(results).splitlines()[0]
    messages = results["verdict"]["messages"]
    rows = [{name: value for name, value in row.items() if name != "asked for"} for row in _rows(results)]
    return html(title, messages[:1], rows, [*messages[1:], *results["warnings"]])


def _rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    level = results["settings"]["level"]
    rows = [
        {
            "method": row["method"],
            "replicates": row["replicates"],
            "target FDR": f"{row['level']:.0%}",
            "splits": f"{row['splits']}, changes planted",
            "false or found": f"{row['fdp']:.1%} of the calls are false, {_share(row['tpr'])} of the changes are found",
            "asked for": row["level"] == level,
        }
        for row in results["spikes"]
    ]
    rows += [
        {
            "method": row["method"],
            "replicates": row["replicates"],
            "target FDR": f"{row['level']:.0%}",
            "splits": f"{row['splits']}, nothing changed",
            "false or found": f"{row['share']:.0%} of the splits have a false call",
            "asked for": row["level"] == level,
        }
        for row in results["null"]
    ]
    return rows


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.0%}"


def _error(row: Mapping[str, Any]) -> tuple[float, float]:
    """How far the range of a measure reaches below and above it: two standard errors, or a 95 % interval."""
    if "share_low" in row:
        return row["share"] - row["share_low"], row["share_high"] - row["share"]
    error = 2 * (row["fdp_se"] or 0.0)
    return min(error, row["fdp"]), error


def plot(results: Mapping[str, Any], ax: Axes | None) -> Axes:
    """Achieved against target FDR where changes were planted, else the share of splits with a false call."""
    ax, rows = axes_or_new(ax), results["spikes"] or results["null"]
    measure = "fdp" if results["spikes"] else "share"
    levels = sorted({row["level"] for row in rows})
    ax.plot([0, *levels], [0, *levels], color=GREY, linestyle="--", linewidth=1, label="as stated", zorder=0)
    for method, replicates in dict.fromkeys((row["method"], row["replicates"]) for row in rows):
        own = [row for row in rows if (row["method"], row["replicates"]) == (method, replicates)]
        values = [row[measure] for row in own]
        errors = [_error(row) for row in own]
        levels_of, both = [row["level"] for row in own], list(zip(*errors, strict=True))
        ax.errorbar(levels_of, values, both, marker="o", capsize=2, label=f"{method}, {replicates}")
    title = counted(max((row["splits"] for row in rows), default=0), "split")
    achieved = "share of false calls" if results["spikes"] else "share of splits with a false call"
    ax.set(xlabel="target FDR", ylabel=achieved, title=title)
    ax.set_ylim(bottom=0)
    ax.legend(fontsize="small")
    return ax
