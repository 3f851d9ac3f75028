"""The cells of the page, packed for its script."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from vaerdict.de.cells import ShownCells
from vaerdict.report.tables import clipped

_GRID = 4000  # places on the map are rounded to so many steps


def packed_cells(cells: ShownCells | None, contrasts: Sequence[str]) -> dict[str, Any] | None:
    """What the script reads of the cells, None where there are none.

    Counts of a gene are the steps from one cell in which it is seen to the next, each followed by its count, in bytes
    of seven bits as base64. Sides are a digit for each cell, None for a contrast of which there are no cells.
    """
    if cells is None:
        return None
    sides = {name: "".join(map(str, row)) for name, row in zip(cells.contrasts, cells.sides.tolist(), strict=True)}
    map_of = {} if cells.place is None else dict(zip("xy", map(_on_grid, cells.place.T), strict=True))
    counts = cells.counts
    parts = [slice(start, end) for start, end in zip(counts.indptr[:-1], counts.indptr[1:], strict=True)]
    return {
        "groups": list(map(clipped, cells.groups)),
        "group": cells.group.tolist(),
        "samples": list(map(clipped, cells.samples)),
        "sample": cells.sample.tolist(),
        "totals": cells.totals.tolist(),
        "sides": [sides.get(name) for name in contrasts],
        "map": cells.map_name,
        "khat": None if cells.khat is None else [round(k, 3) if np.isfinite(k) else None for k in cells.khat.tolist()],
        "genes": [
            (clipped(gene), _bytes(counts.indices[part], counts.data[part]))
            for gene, part in zip(cells.genes, parts, strict=True)
        ],
        **map_of,
    }


def _on_grid(values: np.ndarray) -> list[int]:
    low, high = float(values.min()), float(values.max())
    return np.round((values - low) / max(high - low, 1e-9) * _GRID).astype(int).tolist()


def _bytes(cells: np.ndarray, counts: np.ndarray) -> str:
    """Shapes: ``cells (seen,)`` in rising order, ``counts (seen,)``."""
    order = np.argsort(cells)
    steps = np.diff(cells[order].astype(int), prepend=-1)
    written = bytearray()
    for value in np.column_stack([steps, counts[order]]).ravel().tolist():
        rest = int(value)
        while rest > 127:
            written.append(rest & 127 | 128)
            rest >>= 7
        written.append(rest)
    return base64.b64encode(bytes(written)).decode()
