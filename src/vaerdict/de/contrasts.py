"""Which cells are compared with which: pairs of groups, one against the rest, within types, and by sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from vaerdict.core import DataError, SettingError, VaerdictError
from vaerdict.de.data import check_group
from vaerdict.de.options import Pair

FEWEST_CELLS = 3
"""Least number of cells of a group, and of a sample: fewer show no spread."""

FEWEST_SAMPLES = 2
"""Least number of samples of a group, where samples are the replicates."""

FEWEST_IN_BATCH = 2
"""Least number of cells of either side, or of a sample of it, in a batch within which they are compared."""

_REST = "rest"  # the name of all other groups together


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels of each cell: its group and, where they are named, its type, sample and batch. Shapes: ``(cells,)``.

    With `by_pairs` samples are compared within themselves, and those without cells on both sides are left out.
    """

    column: str
    group: np.ndarray
    within: np.ndarray | None = None
    sample: np.ndarray | None = None
    batch: np.ndarray | None = None
    by_pairs: bool = False

    def take(self, rows: np.ndarray) -> Labels:
        """The labels of some cells."""
        pick = (None if values is None else values[rows] for values in (self.within, self.sample, self.batch))
        return Labels(self.column, self.group[rows], *pick, by_pairs=self.by_pairs)

    def atoms(self) -> Tensor:
        """A number for each combination of labels that occurs; negative where a cell has no group."""
        parts = [self.group, *(values for values in (self.within, self.sample) if values is not None)]
        keys = ["\0".join(str(part[i]) for part in parts) for i in range(len(self.group))]
        number = np.unique(keys, return_inverse=True)[1]
        number[np.array([label is None for label in self.group], dtype=bool)] = -1
        return torch.from_numpy(number)

    @cached_property
    def batch_samples(self) -> tuple[list[tuple[str | None, str | None]], np.ndarray]:
        """The pairs of batch and sample that occur, and the number of each cell's pair. Shapes: ``-> (cells,)``."""
        absent = [None] * len(self.group)
        keys = zip(*(absent if v is None else v for v in (self.batch, self.sample)), strict=True)
        numbers: dict[tuple[str | None, str | None], int] = {}
        number = np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), dtype=int, count=len(absent))
        return list(numbers), number


@dataclass(frozen=True, eq=False)
class Side:
    """The cells of one side of a contrast, and of each of its samples where samples are the replicates.

    Sides of different cells have different names. Shapes: ``cells (n,)`` indices.
    """

    name: str
    cells: Tensor
    samples: dict[str, Tensor]

    def populations(self) -> dict[str, Tensor]:
        """The sets of cells that are averaged: the group, or each of its samples."""
        return {f"{self.name}\0{s}": cells for s, cells in self.samples.items()} or {self.name: self.cells}


@dataclass(frozen=True, eq=False)
class Contrast:
    """Group a over group b, or over the rest, within one type or in all cells.

    `used` are the numbers of cells of either side in batches that hold both, whose counts are compared; `notes` say
    what was left out.
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


def pairs_to_compare(
    labels: Labels, group_a: str | None, group_b: str | None, pairs: Sequence[Pair] | None
) -> list[Pair]:
    """The pairs to compare: those listed, the one named, or every group against the rest."""
    if pairs is None:
        if group_a is None and group_b is not None:
            raise SettingError(f"group_b={group_b!r} without group_a; name both, or neither for one against the rest.")
        groups = sorted({g for g in labels.group if g is not None})
        pairs = [(group_a, group_b)] if group_a is not None else [(g, None) for g in groups]
    elif (group_a, group_b) != (None, None):
        raise SettingError("pairs takes the place of group_a and group_b; leave these out.")
    checked: list[Pair] = []
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2:
            raise SettingError(f"pairs holds {pair!r}; give pairs of groups such as ('A', 'B') or ('A', None).")
        a, b = pair
        a = check_group(a, labels.group, role="group_a", column=labels.column)
        b = None if b is None else check_group(b, labels.group, role="group_b", column=labels.column)
        if a == b:
            raise SettingError(f"group {a!r} is compared with itself; name two different groups.")
        if (a, b) not in checked:
            checked.append((a, b))
    if not checked:
        raise SettingError("nothing to compare; give at least one pair of groups.")
    return checked


def all_pairs(groups: Sequence[str]) -> list[Pair]:
    """Every two of the groups, in their order; a single group against the rest."""
    return [(groups[0], None)] if len(groups) == 1 else list(combinations(groups, 2))


def contrasts(labels: Labels, pairs: Sequence[Pair], warnings: list[str], which: str = "") -> list[Contrast]:
    """The contrasts of all pairs, within every type where types are named; too few cells or samples are refused.

    Of several contrasts those that cannot be made are left out with a warning. Messages say `which` cells are counted.
    """
    types = [None] if labels.within is None else sorted({t for t in labels.within if t is not None})
    made: list[Contrast] = []
    errors: list[VaerdictError] = []
    for within in types:
        for a, b in pairs:
            try:
                made.append(_contrast(labels, a, b, within, which))
            except VaerdictError as error:
                errors.append(error)
    if not made:
        raise errors[0] if errors else SettingError("no cell has a type to compare within.")
    warnings += [f"left out: {error}" for error in errors]
    warnings += [note for contrast in made for note in contrast.notes]
    return made


def _contrast(labels: Labels, a: str, b: str | None, within: str | None, which: str) -> Contrast:
    inside = np.ones(len(labels.group), dtype=bool) if within is None else labels.within == within
    labelled = np.array([label is not None for label in labels.group], dtype=bool)
    is_a = labels.group == a
    is_b = labelled & ~is_a if b is None else labels.group == b
    place = "" if within is None else f" within {_quoted(within)}"
    name_a, name_b = _quoted(a), f"not {_quoted(a)}" if b is None else _quoted(b)
    name = f"{name_a} vs {_REST if b is None else name_b}{place}"
    side_a, lost_a = _side(labels, f"{name_a}{place}", is_a & inside, which)
    side_b, lost_b = _side(labels, f"{name_b}{place}", is_b & inside, which)
    if labels.by_pairs:
        side_a, side_b, lost = _pairs(name, side_a, side_b)
        lost_b = [*lost_b, *lost]
    used = _used(labels, name, side_a, side_b)
    notes = [*lost_a, *lost_b, *_unpaired(name, side_a, side_b), *_alone(name, side_a, side_b, used)]
    return Contrast(name, a, _REST if b is None else b, b is None, within, side_a, side_b, used, tuple(notes))


def _quoted(name: str) -> str:
    """A user's name, in quotes where it could be mistaken for the words that join names in a contrast."""
    ambiguous = name == _REST or name.startswith(("not ", "'", '"')) or " vs " in name or " within " in name
    return repr(name) if ambiguous or "\0" in name else name


def _side(labels: Labels, name: str, mask: np.ndarray, which: str) -> tuple[Side, list[str]]:
    """The cells of a side, and messages about what is left out of it."""
    cells = np.flatnonzero(mask)
    if len(cells) < FEWEST_CELLS:
        n = len(cells)
        raise SettingError(
            f"group {name} has {n} {'cell' if n == 1 else 'cells'}{which}; at least {FEWEST_CELLS} are needed in each "
            "group."
        )
    if labels.sample is None:
        return Side(name, torch.from_numpy(cells), {}), []
    owners = labels.sample[cells]
    every = {sample: cells[owners == sample] for sample in sorted({s for s in owners if s is not None})}
    samples = {sample: torch.from_numpy(own) for sample, own in every.items() if len(own) >= FEWEST_CELLS}
    if len(samples) < FEWEST_SAMPLES:
        kind, key = ("pairs", "pair_by") if labels.by_pairs else ("samples", "sample_key")
        raise SettingError(
            f"group {name} has {len(samples)} {kind} of {FEWEST_CELLS} cells or more; {kind} as replicates need at "
            f"least {FEWEST_SAMPLES} in each group: leave {key} out to compare cells."
        )
    return Side(name, torch.cat(list(samples.values())).sort().values, samples), _lost(name, cells, every, samples)


def _pairs(name: str, a: Side, b: Side) -> tuple[Side, Side, list[str]]:
    """Both sides with the samples that have cells on both, and a message about the others."""
    shared, every = a.samples.keys() & b.samples.keys(), a.samples.keys() | b.samples.keys()
    if len(shared) < FEWEST_SAMPLES:
        raise SettingError(
            f"{name} has {len(shared)} pairs with {FEWEST_CELLS} cells or more on both sides; at least "
            f"{FEWEST_SAMPLES} are needed: leave pair_by out."
        )
    lost = [f"{name}: {len(every) - len(shared)} of {len(every)} pairs have cells on one side only and are left out."]
    return _only(a, shared), _only(b, shared), lost if len(shared) < len(every) else []


def _only(side: Side, names: Set[str]) -> Side:
    samples = {sample: cells for sample, cells in side.samples.items() if sample in names}
    return Side(side.name, torch.cat(list(samples.values())).sort().values, samples)


def _lost(name: str, cells: np.ndarray, every: Mapping[str, np.ndarray], samples: Mapping[str, Tensor]) -> list[str]:
    """Cells of a side that are in no sample, or in one that is too small."""
    small = {sample: len(own) for sample, own in every.items() if sample not in samples}
    nowhere = len(cells) - sum(map(len, every.values()))
    lost = [f"{len(small)} samples of fewer than {FEWEST_CELLS} cells ({sum(small.values())} cells)"] if small else []
    lost += [f"{nowhere} cells of no sample"] if nowhere else []
    return [f"left out of {name}: {' and '.join(lost)}."] if lost else []


def _unpaired(name: str, a: Side, b: Side) -> list[str]:
    """A message where some samples, but not all, have cells on both sides."""
    shared, every = a.samples.keys() & b.samples.keys(), a.samples.keys() | b.samples.keys()
    if not shared or len(shared) == len(every):
        return []
    return [f"{name}: {len(shared)} of {len(every)} samples have cells on both sides; none are paired."]


def _used(labels: Labels, name: str, a: Side, b: Side) -> tuple[int, int]:
    """Number of cells of either side in batches that hold both; all of them where samples are paired."""
    if labels.batch is None or (a.samples and a.samples.keys() == b.samples.keys()):
        return len(a.cells), len(b.cells)
    sizes_a, sizes_b = (_batch_sizes(labels, side) for side in (a, b))
    both = {batch for batch, _ in sizes_a} & {batch for batch, _ in sizes_b}
    sizes = [[n for (batch, _), n in side.items() if batch in both] for side in (sizes_a, sizes_b)]
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


def _batch_sizes(labels: Labels, side: Side) -> dict[tuple[str, str | None], int]:
    """Number of cells of a side in each batch and sample, where there are enough to show a spread."""
    names, number = labels.batch_samples
    sizes = np.bincount(number[side.cells.numpy()], minlength=len(names))
    return {
        (batch, sample): int(n)
        for (batch, sample), n in zip(names, sizes, strict=True)
        if batch is not None and n >= FEWEST_IN_BATCH
    }


def _alone(name: str, a: Side, b: Side, used: tuple[int, int]) -> list[str]:
    """A message where cells have none of the other side in their batch."""
    if used == (len(a.cells), len(b.cells)):
        return []
    lost = [f"{len(s.cells) - n} of {len(s.cells)} cells of {s.name}" for s, n in zip((a, b), used, strict=True)]
    return [f"{name}: {' and '.join(lost)} are not compared because their batches do not hold both sides."]


def compared_cells(contrasts: Sequence[Contrast]) -> np.ndarray:
    """Every cell of any contrast, once, in order."""
    return np.unique(np.concatenate([side.cells.numpy() for c in contrasts for side in (c.a, c.b)]))


def rows_to_read(compared: np.ndarray, n_cells: int, most: int, seed: int) -> np.ndarray:
    """The rows of all cells compared, and of random others as long as there are fewer than `most`.

    Shapes: ``compared (c,)``, ``-> (n,)``.
    """
    others = others_at_random(compared, n_cells, max(0, most - len(compared)), seed)
    return np.sort(np.concatenate([compared, others]))


def others_at_random(compared: np.ndarray, n_cells: int, most: int, seed: int) -> np.ndarray:
    """Rows of cells that are not compared, at most so many. Shapes: ``compared (c,)``, ``-> (n,)``."""
    others = np.random.default_rng([seed, 41]).permutation(np.setdiff1d(np.arange(n_cells), compared))
    return np.sort(others[:most])
