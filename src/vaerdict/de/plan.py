"""Which cells are compared with which: pairs of groups, one against the rest, within types, and by sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.de.inputs import check_group

FEWEST_CELLS = 3
"""Of a group, and of a sample: a bootstrap of fewer shows no spread."""

FEWEST_SAMPLES = 2
"""Of a group, where samples are the replicates."""

Pair = tuple[str, str | None]
"""A group and the one it is compared with; None for all others."""


@dataclass(frozen=True, eq=False)
class Labels:
    """What is known of each cell: its group, and where asked for, its type and its sample. Shapes: ``(cells,)``."""

    column: str
    group: np.ndarray
    within: np.ndarray | None = None
    sample: np.ndarray | None = None

    def take(self, rows: np.ndarray) -> Labels:
        """Those of some cells."""
        pick = (None if values is None else values[rows] for values in (self.within, self.sample))
        return Labels(self.column, self.group[rows], *pick)

    def atoms(self) -> Tensor:
        """A number for each combination of labels that occurs; negative where a cell has no group."""
        parts = [self.group, *(values for values in (self.within, self.sample) if values is not None)]
        keys = ["\0".join(str(part[i]) for part in parts) for i in range(len(self.group))]
        number = np.unique(keys, return_inverse=True)[1]
        number[np.array([label is None for label in self.group], dtype=bool)] = -1
        return torch.from_numpy(number)


@dataclass(frozen=True, eq=False)
class Side:
    """The cells of one side of a contrast, and of each of its samples where samples are the replicates.

    Shapes: ``cells (n,)`` indices.
    """

    name: str
    cells: Tensor
    samples: dict[str, Tensor]

    def populations(self) -> dict[str, Tensor]:
        """What is averaged: the group, or each of its samples."""
        return {f"{self.name}\0{s}": cells for s, cells in self.samples.items()} or {self.name: self.cells}


@dataclass(frozen=True, eq=False)
class Contrast:
    """Group a over group b, within one type or in all cells."""

    name: str
    group_a: str
    group_b: str
    within: str | None
    a: Side
    b: Side


def asked(
    labels: Labels,
    group_a: str | None,
    group_b: str | None,
    pairs: Sequence[Pair] | None,
) -> list[Pair]:
    """The pairs to compare: those given, the one named, or every group against the rest."""
    if pairs is None:
        if group_a is None and group_b is not None:
            raise SettingError(f"group_b={group_b!r} without group_a; name both, or neither for one against the rest.")
        groups = sorted({g for g in labels.group if g is not None})
        pairs = [(group_a, group_b)] if group_a is not None else [(g, None) for g in groups]
    found: list[Pair] = []
    for a, b in pairs:
        a = check_group(a, labels.group, role="group_a", column=labels.column)
        b = None if b is None else check_group(b, labels.group, role="group_b", column=labels.column)
        if a == b:
            raise SettingError(f"group_a and group_b are both {a!r}; compare two different groups.")
        if (a, b) not in found:
            found.append((a, b))
    if not found:
        raise SettingError("nothing to compare; give at least one pair of groups.")
    return found


def all_pairs(groups: Sequence[str]) -> list[Pair]:
    """Every two of the groups, in the order given; of one group, against the rest."""
    return [(groups[0], None)] if len(groups) == 1 else list(combinations(groups, 2))


def contrasts(labels: Labels, pairs: Sequence[Pair], warnings: list[str]) -> list[Contrast]:
    """Every pair, within every type where types are given; what has too few cells or samples is refused.

    Of several types those with too few are left out, and `warnings` says so.
    """
    types = [None] if labels.within is None else sorted({t for t in labels.within if t is not None})
    found: list[Contrast] = []
    lacking: list[str] = []
    for within in types:
        for a, b in pairs:
            try:
                found.append(_contrast(labels, a, b, within))
            except SettingError as error:
                if len(types) * len(pairs) == 1:
                    raise
                lacking.append(str(error))
    if not found:
        raise SettingError(lacking[0])
    warnings += [f"left out: {reason}" for reason in lacking]
    return found


def _contrast(labels: Labels, a: str, b: str | None, within: str | None) -> Contrast:
    group_b = "rest" if b is None else b
    inside = np.ones(len(labels.group), dtype=bool) if within is None else labels.within == within
    known = np.array([label is not None for label in labels.group], dtype=bool)
    is_a = labels.group == a
    is_b = known & ~is_a if b is None else labels.group == b
    place = "" if within is None else f" within {within}"
    name_b = f"not {a}" if b is None else b
    sides = [_side(labels, name, mask & inside, place) for name, mask in ((a, is_a), (name_b, is_b))]
    return Contrast(f"{a} vs {group_b}{place}", a, group_b, within, *sides)


def _side(labels: Labels, name: str, mask: np.ndarray, place: str) -> Side:
    cells = np.flatnonzero(mask)
    if len(cells) < FEWEST_CELLS:
        raise SettingError(
            f"group {name!r}{place} has {len(cells)} cells; at least {FEWEST_CELLS} are needed in each group."
        )
    samples: dict[str, Tensor] = {}
    if labels.sample is not None:
        owners = labels.sample[cells]
        for sample in sorted({s for s in owners if s is not None}):
            mine = cells[owners == sample]
            if len(mine) >= FEWEST_CELLS:
                samples[sample] = torch.from_numpy(mine)
        if len(samples) < FEWEST_SAMPLES:
            raise SettingError(
                f"group {name!r}{place} has {len(samples)} samples of {FEWEST_CELLS} cells or more; samples as "
                f"replicates need at least {FEWEST_SAMPLES} in each group: leave sample_key out to compare cells."
            )
        cells = torch.cat(list(samples.values())).sort().values.numpy()
    return Side(f"{name}{place}", torch.from_numpy(cells), samples)


def compared_cells(found: Sequence[Contrast]) -> np.ndarray:
    """Every cell of any contrast, once, in order."""
    return np.unique(np.concatenate([side.cells.numpy() for c in found for side in (c.a, c.b)]))


def rows_to_read(found: Sequence[Contrast], n_cells: int, most: int, seed: int) -> np.ndarray:
    """The rows of all cells compared, and of others at random to train on as long as there are fewer than `most`."""
    part = compared_cells(found)
    others = np.setdiff1d(np.arange(n_cells), part)
    extra = min(len(others), max(0, most - len(part)))
    more = np.random.default_rng([seed, 41]).permutation(others)[:extra]
    return np.sort(np.concatenate([part, more]))
