"""Tables of benchmarks with two sides, by kind: peers like for like, peers that do something else, and ablations.

The kinds are those of `vaerdict_paper.benchmarks.timing`. Rows of `COMPARISONS` are comparisons themselves; those
of samplers, de and de-scale are paired here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vaerdict.report.tables import Column, Table
from vaerdict_paper.benchmarks.de import CENTRED_MEANS, COUNTS, MEANS, MODEL_STAGE, PAIRS
from vaerdict_paper.benchmarks.de_scale import OURS, WITHOUT_PRIOR
from vaerdict_paper.benchmarks.samplers import changes
from vaerdict_paper.benchmarks.timing import ABLATION, LIKE, OTHER

Row = dict[str, Any]

COMPARISONS = ("psis", "ppca", "counts")
"""The benchmarks whose rows are comparisons."""

CAPTIONS = {
    LIKE: "Like for like: a peer that does the same task on the same data and device.",
    OTHER: "Peers as they are commonly used, which do something else as well or instead.",
    ABLATION: "Ablations: our own code with one thing changed. The slower side is no peer.",
}
_NAMES = {LIKE: "like-for-like", OTHER: "peers", ABLATION: "ablations"}
_OF_PEERS = (
    Column("case", "case"),
    Column("ours_s", "ours, s", 3),
    Column("peer", "peer"),
    Column("peer_s", "peer, s", 3),
    Column("ratio", "peer / ours"),
    Column("range", "range"),
)
_COLUMNS = {
    LIKE: (*_OF_PEERS, Column("differs", "what differs")),
    OTHER: (*_OF_PEERS, Column("differs", "what the peer does")),
    ABLATION: (
        Column("case", "case"),
        Column("differs", "what is changed"),
        Column("ours_s", "with it, s", 3),
        Column("peer", "in place of"),
        Column("peer_s", "s", 3),
        Column("ratio", "ratio"),
        Column("range", "range"),
    ),
}


def tables(rows: Sequence[Row], name: str, caption: str = "", *, about: Sequence[Column] = ()) -> list[Table]:
    """One table per kind that has rows; `about` are columns in front and behind, by `Column.key`.

    Parameters
    ----------
    rows
        Comparisons; keys besides those of `_COLUMNS` are for `about`.
    name
        Starts the names of the tables.
    caption
        Follows the caption of each kind, such as the machine.
    about
        More columns: ``benchmark`` comes first, others last.
    """
    front, back = ([column for column in about if (column.key == "benchmark") == first] for first in (True, False))
    made = []
    for kind, columns in _COLUMNS.items():
        of_kind = [{**row, "range": _range(row)} for row in rows if row["kind"] == kind]
        if of_kind:
            text = f"{CAPTIONS[kind]}{caption}"
            made.append(Table(f"{name}-{_NAMES[kind]}", text, [*front, *columns, *back], of_kind))
    return made


def _range(row: Row) -> str | None:
    """The smallest and the largest ratio of the rounds; None for a single round."""
    if row.get("repeats", 1) < 2:
        return None
    return f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"


def comparisons(result: Mapping[str, Any]) -> Iterator[Row]:
    """The comparisons in the rows of a benchmark; none for a benchmark of one side."""
    if result["benchmark"] in COMPARISONS:
        yield from result["rows"]
    elif result["benchmark"] in _PAIRED:
        yield from _PAIRED[result["benchmark"]](result["rows"])


def _pair(kind: str, case: str, ours: float, peer: str, peer_s: float, differs: str | None) -> Row:
    times = {"ours_s": ours, "peer": peer, "peer_s": peer_s, "ratio": peer_s / ours}
    return {"kind": kind, "case": case, "differs": differs, **times}


# ------------------------------------------------------------------------------------------------------ samplers
def _of_samplers(rows: Sequence[Row]) -> Iterator[Row]:
    """Both samplers are ours, so that each change is an ablation.

    Seconds of a GPU are left out: they depend on the sizes of batches, which differ between samplers.
    """
    for change in changes([row for row in rows if row.get("device", "CPU").startswith("CPU")]):
        what = f"{change['change']}: {change['after']}"
        yield _pair(ABLATION, change["case"], change["after_s"], change["before"], change["before_s"], what)


# ------------------------------------------------------------------------------------------------------ de
_PAIRS = (
    (MODEL_STAGE, PAIRS, "scvi-tools, importance", OTHER, "weights draws of the encoder; other numbers of draws"),
    (
        MODEL_STAGE,
        PAIRS,
        "scvi-tools, importance, 100 anchors",
        OTHER,
        "weights draws of the encoder, by a tenth of the anchors; other numbers of draws",
    ),
    (MODEL_STAGE, PAIRS, "scvi-tools, default", OTHER, "takes the latents of the encoder as they are"),
    (MODEL_STAGE, MEANS, "scvi-tools, means", OTHER, "takes the latents of the encoder as they are"),
    (
        MODEL_STAGE,
        CENTRED_MEANS,
        "scvi-tools, centred means",
        OTHER,
        "takes the latents of the encoder as they are",
    ),
    (COUNTS, CENTRED_MEANS, "scvi-tools, default", OTHER, "compares two random cells, by a model"),
    (COUNTS, CENTRED_MEANS, "scvi-tools, centred means", OTHER, "uses a model, whose training is not counted"),
)
"""Our method, what is compared, and the peer; of rows with several numbers of draws the one with the most."""


def _of_de(rows: Sequence[Row]) -> Iterator[Row]:
    by_method = {(row["method"], row["between"]): row for row in rows}  # more draws come later
    peers = {row["method"]: row for row in rows}
    for method, between, peer, kind, differs in _PAIRS:
        ours, theirs = by_method.get((method, between)), peers.get(peer)
        if ours is not None and theirs is not None:
            draws = f", {ours['lfc_draws']} joint draws" if ours["lfc_draws"] else ""
            case = f"{method}, {between}{draws}"
            yield _pair(kind, case, ours["cpu_s"], peer, theirs["cpu_s"], differs)


# ------------------------------------------------------------------------------------------------------ de-scale
def _of_scale(rows: Sequence[Row]) -> Iterator[Row]:
    finished = {(row["cells"], row["method"]): row for row in rows if row["stopped"] is None}
    for (cells, method), row in finished.items():
        ours = finished.get((cells, OURS))
        if method == OURS or ours is None:
            continue
        case = f"{OURS}, {cells:,} cells"
        if method == WITHOUT_PRIOR:
            yield _pair(ABLATION, case, ours["cpu_s"], method, row["cpu_s"], "the default prior")
        else:
            trains = "; its training is not counted" if row.get("training_s") else ""
            yield _pair(OTHER, case, ours["cpu_s"], method, row["cpu_s"], f"asks for {row['question']}{trains}")


_PAIRED: dict[str, Callable[[Sequence[Row]], Iterator[Row]]] = {
    "samplers": _of_samplers,
    "de": _of_de,
    "de-scale": _of_scale,
}
