"""Which cells are compared with which: pairs of groups, one against the rest, within types, and by sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from vaerdict.core import DataError, SettingError, VaerdictError
from vaerdict.de.data import check_group

FEWEST_CELLS = 3
"""Of a group, and of a sample: a bootstrap of fewer shows no spread."""

FEWEST_SAMPLES = 2
"""Of a group, where samples are the replicates."""

FEWEST_IN_BATCH = 2
"""Of either side, or of a sample of it, in a batch within which they are compared: one cell shows no spread."""

_REST = "rest"  # how all other groups together are called

Pair = tuple[str, str | None]
"""A group and the one it is compared with; None for all others."""


@dataclass(frozen=True, eq=False)
class Labels:
    """What is known of each cell: its group, and where asked for, its type, sample and batch. Shapes: ``(cells,)``."""

    column: str
    group: np.ndarray
    within: np.ndarray | None = None
    sample: np.ndarray | None = None
    batch: np.ndarray | None = None

    def take(self, rows: np.ndarray) -> Labels:
        """Those of some cells."""
        pick = (None if values is None else values[rows] for values in (self.within, self.sample, self.batch))
        return Labels(self.column, self.group[rows], *pick)

    def atoms(self) -> Tensor:
        """A number for each combination of labels that occurs; negative where a cell has no group."""
        parts = [self.group, *(values for values in (self.within, self.sample) if values is not None)]
        keys = ["\0".join(str(part[i]) for part in parts) for i in range(len(self.group))]
        number = np.unique(keys, return_inverse=True)[1]
        number[np.array([label is None for label in self.group], dtype=bool)] = -1
        return torch.from_numpy(number)

    @cached_property
    def parts(self) -> tuple[list[tuple[str | None, str | None]], np.ndarray]:
        """The batches that occur, and samples in them, and the number of each cell's. Shapes: ``-> (cells,)``."""
        nothing = [None] * len(self.group)
        keys = zip(*(nothing if v is None else v for v in (self.batch, self.sample)), strict=True)
        known: dict[tuple[str | None, str | None], int] = {}
        number = np.fromiter((known.setdefault(key, len(known)) for key in keys), dtype=int, count=len(nothing))
        return list(known), number


@dataclass(frozen=True, eq=False)
class Side:
    """The cells of one side of a contrast, and of each of its samples where samples are the replicates.

    No two sides of different cells have one name. Shapes: ``cells (n,)`` indices.
    """

    name: str
    cells: Tensor
    samples: dict[str, Tensor]

    def populations(self) -> dict[str, Tensor]:
        """What is averaged: the group, or each of its samples."""
        return {f"{self.name}\0{s}": cells for s, cells in self.samples.items()} or {self.name: self.cells}


@dataclass(frozen=True, eq=False)
class Contrast:
    """Group a over group b, or over the rest, within one type or in all cells.

    `used` are the cells of either side in batches that hold both, which are those whose counts are compared; `notes`
    say what was left out.
    """

    name: str
    group_a: str
    group_b: str
    rest: bool
    within: str | None
    a: Side
    b: Side
    used: tuple[int, int]
    notes: tuple[str, ...] = ()

    @property
    def paired(self) -> bool | None:
        """Whether the same samples are on both sides; None where samples are not the replicates."""
        return self.a.samples.keys() == self.b.samples.keys() if self.a.samples else None


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

    Of several contrasts those that cannot be made are left out, and `warnings` says so, and what the others lack.
    """
    types = [None] if labels.within is None else sorted({t for t in labels.within if t is not None})
    found: list[Contrast] = []
    lacking: list[VaerdictError] = []
    for within in types:
        for a, b in pairs:
            try:
                found.append(_contrast(labels, a, b, within))
            except VaerdictError as error:
                lacking.append(error)
    if not found:
        raise lacking[0] if lacking else SettingError("no cell has a type to compare within.")
    warnings += [f"left out: {reason}" for reason in lacking]
    warnings += [note for contrast in found for note in contrast.notes]
    return found


def _contrast(labels: Labels, a: str, b: str | None, within: str | None) -> Contrast:
    inside = np.ones(len(labels.group), dtype=bool) if within is None else labels.within == within
    known = np.array([label is not None for label in labels.group], dtype=bool)
    is_a = labels.group == a
    is_b = known & ~is_a if b is None else labels.group == b
    place = "" if within is None else f" within {_quoted(within)}"
    name_a, name_b = _quoted(a), f"not {_quoted(a)}" if b is None else _quoted(b)
    name = f"{name_a} vs {_REST if b is None else name_b}{place}"
    side_a, lost_a = _side(labels, f"{name_a}{place}", is_a & inside)
    side_b, lost_b = _side(labels, f"{name_b}{place}", is_b & inside)
    used = _used(labels, name, side_a, side_b)
    notes = [*lost_a, *lost_b, *_unpaired(name, side_a, side_b), *_alone(name, side_a, side_b, used)]
    return Contrast(name, a, _REST if b is None else b, b is None, within, side_a, side_b, used, tuple(notes))


def _quoted(name: str) -> str:
    """A name given by the user, in quotes where it could be taken for words that are put between names here."""
    like_ours = name == _REST or name.startswith(("not ", "'", '"')) or " vs " in name or " within " in name
    return repr(name) if like_ours or "\0" in name else name


def _side(labels: Labels, name: str, mask: np.ndarray) -> tuple[Side, list[str]]:
    """The cells of a side, and what is left out of it in words."""
    cells = np.flatnonzero(mask)
    if len(cells) < FEWEST_CELLS:
        raise SettingError(f"group {name} has {len(cells)} cells; at least {FEWEST_CELLS} are needed in each group.")
    if labels.sample is None:
        return Side(name, torch.from_numpy(cells), {}), []
    owners = labels.sample[cells]
    every = {sample: cells[owners == sample] for sample in sorted({s for s in owners if s is not None})}
    samples = {sample: torch.from_numpy(mine) for sample, mine in every.items() if len(mine) >= FEWEST_CELLS}
    if len(samples) < FEWEST_SAMPLES:
        raise SettingError(
            f"group {name} has {len(samples)} samples of {FEWEST_CELLS} cells or more; samples as "
            f"replicates need at least {FEWEST_SAMPLES} in each group: leave sample_key out to compare cells."
        )
    return Side(name, torch.cat(list(samples.values())).sort().values, samples), _lost(name, cells, every, samples)


def _lost(name: str, cells: np.ndarray, every: Mapping[str, np.ndarray], samples: Mapping[str, Tensor]) -> list[str]:
    """What of a side is in no sample, or in one that is too small."""
    small = {sample: len(mine) for sample, mine in every.items() if sample not in samples}
    nowhere = len(cells) - sum(map(len, every.values()))
    words = [f"{len(small)} samples of fewer than {FEWEST_CELLS} cells ({sum(small.values())} cells)"] if small else []
    words += [f"{nowhere} cells of no sample"] if nowhere else []
    return [f"left out of {name}: {' and '.join(words)}."] if words else []


def _unpaired(name: str, a: Side, b: Side) -> list[str]:
    """Where some samples, but not all, gave cells to both sides."""
    shared, every = a.samples.keys() & b.samples.keys(), a.samples.keys() | b.samples.keys()
    if not shared or len(shared) == len(every):
        return []
    return [f"{name}: {len(shared)} of {len(every)} samples gave cells to both sides, so that none are taken as pairs."]


def _used(labels: Labels, name: str, a: Side, b: Side) -> tuple[int, int]:
    """How many cells of either side are in batches that hold both; all where samples are pairs, which need none."""
    if labels.batch is None or (a.samples and a.samples.keys() == b.samples.keys()):
        return len(a.cells), len(b.cells)
    parts_a, parts_b = (_parts(labels, side) for side in (a, b))
    both = {batch for batch, _ in parts_a} & {batch for batch, _ in parts_b}
    sizes = [[n for (batch, _), n in parts.items() if batch in both] for parts in (parts_a, parts_b)]
    if not both:
        raise DataError(
            f"no batch holds {FEWEST_IN_BATCH} cells of both sides of {name}: groups and batches cannot be told apart; "
            "leave batch_key out, or compare other groups."
        )
    if a.samples and sum(map(len, sizes)) - 2 * len(both) < 1:
        raise DataError(
            f"no batch holds two samples of a side of {name} beside one of the other: samples and batches cannot be "
            "told apart; leave batch_key out, or sample_key."
        )
    return sum(sizes[0]), sum(sizes[1])


def _parts(labels: Labels, side: Side) -> dict[tuple[str, str | None], int]:
    """The cells of a side in each batch, and of each sample in it, where there are enough to show a spread."""
    names, number = labels.parts
    sizes = np.bincount(number[side.cells.numpy()], minlength=len(names))
    return {
        (batch, sample): int(n)
        for (batch, sample), n in zip(names, sizes, strict=True)
        if batch is not None and n >= FEWEST_IN_BATCH
    }


def _alone(name: str, a: Side, b: Side, used: tuple[int, int]) -> list[str]:
    """Where cells have none of the other side in their batch."""
    if used == (len(a.cells), len(b.cells)):
        return []
    lost = [f"{len(s.cells) - n} of {len(s.cells)} cells of {s.name}" for s, n in zip((a, b), used, strict=True)]
    return [f"{name}: the counts of {' and '.join(lost)} are not compared, for their batches do not hold both sides."]


def compared_cells(found: Sequence[Contrast]) -> np.ndarray:
    """Every cell of any contrast, once, in order."""
    return np.unique(np.concatenate([side.cells.numpy() for c in found for side in (c.a, c.b)]))


def rows_to_read(
    found: Sequence[Contrast], n_cells: int, most: int, seed: int, first: np.ndarray | None = None
) -> np.ndarray:
    """The rows of all cells compared, and of others at random to train on as long as there are fewer than `most`.

    Those of the mask `first` come before all others. Shapes: ``first (n_cells,)``.
    """
    part = compared_cells(found)
    others = np.random.default_rng([seed, 41]).permutation(np.setdiff1d(np.arange(n_cells), part))
    if first is not None:
        others = others[np.argsort(~first[others], kind="stable")]
    return np.sort(np.concatenate([part, others[: max(0, most - len(part))]]))
