"""Where a stack's batches come from: one tensor for all members, one data set each, or sparse rows made dense.

What only walks over observations, whatever they consist of, asks for `Rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from scipy import sparse
from torch import Tensor

from vaerdict.core import DataError, SettingError, check_observations

_SHARE = 0.3  # of the device's free memory that data may take

Matrix = Any
"""A sparse matrix of scipy, whose types say less than its documentation."""


class Rows(Protocol):
    """Observations to walk over, some at a time."""

    @property
    def n(self) -> int:
        """How many there are."""
        ...

    @property
    def device(self) -> torch.device:
        """Where they are handed out."""
        ...

    def take(self, index: Tensor) -> Tensor:
        """The observations at `index`, dense and on the device. Shapes: ``(size,) -> (size, p)``."""
        ...

    def select(self, index: Tensor) -> Rows:
        """Those at `index` alone, to be kept or sent. Shapes: ``(size,)``."""
        ...


@runtime_checkable
class Observations(Protocol):
    """Observations a stack can take batches of."""

    @property
    def n(self) -> int:
        """How many observations each member has."""
        ...

    @property
    def shape(self) -> torch.Size:
        """The shape of one observation."""
        ...

    def of(self, group: Sequence[int]) -> Observations:
        """The observations of some of the members, those of a stack."""
        ...

    def take(self, index: Tensor) -> Tensor:
        """The observations at `index`. Shapes: ``(size,) -> (size, p)``, ``(members, size) -> (members, size, p)``."""
        ...

    def block(self, rows: slice, members: int | None = None) -> Tensor:
        """Observations in a row, for a stack of `members`. Shapes: ``-> (n, p)`` or ``(members, n, p)``."""
        ...

    def tensors(self) -> list[Tensor]:
        """Everything they consist of, to be digested."""
        ...


@dataclass(frozen=True, eq=False)
class Shared:
    """The same observations for every member. Shapes: ``x (n, p)``."""

    x: Tensor

    @property
    def n(self) -> int:
        """How many there are."""
        return self.x.shape[0]

    @property
    def device(self) -> torch.device:
        """The tensor's."""
        return self.x.device

    @property
    def shape(self) -> torch.Size:
        """The shape of one observation."""
        return self.x.shape[1:]

    def of(self, group: Sequence[int]) -> Shared:
        """These, whoever asks."""
        return self

    def take(self, index: Tensor) -> Tensor:
        """The observations at `index`."""
        return self.x[index]

    def select(self, index: Tensor) -> Shared:
        """Those at `index` alone."""
        return Shared(self.x[index])

    def block(self, rows: slice, members: int | None = None) -> Tensor:
        """Observations in a row."""
        return _spread(self.x[rows], members)

    def tensors(self) -> list[Tensor]:
        """The tensor itself."""
        return [self.x]


@dataclass(frozen=True, eq=False)
class Apart:
    """A data set of its own for each member: bootstrap samples, or simulations. Shapes: ``x (members, n, p)``."""

    x: Tensor

    @property
    def n(self) -> int:
        """How many each member has."""
        return self.x.shape[1]

    @property
    def shape(self) -> torch.Size:
        """The shape of one observation."""
        return self.x.shape[2:]

    def of(self, group: Sequence[int]) -> Apart | Shared:
        """The data sets of these members."""
        return Shared(self.x[group[0]]) if len(group) == 1 else Apart(self.x[list(group)])

    def take(self, index: Tensor) -> Tensor:
        """Of each member's data set the observations at its `index`."""
        return self.x[torch.arange(self.x.shape[0], device=self.x.device)[:, None], index]

    def block(self, rows: slice, members: int | None = None) -> Tensor:
        """Of each member's data set observations in a row."""
        return self.x[:, rows]

    def tensors(self) -> list[Tensor]:
        """The tensor itself."""
        return [self.x]


@dataclass(frozen=True, eq=False)
class Resampled:
    """For each member a sample of the same observations, by their numbers: a bootstrap without copies.

    Shapes: ``x (n, p)``, ``rows (members, size)``.
    """

    x: Tensor
    rows: Tensor

    @property
    def n(self) -> int:
        """How many each member has."""
        return self.rows.shape[1]

    @property
    def shape(self) -> torch.Size:
        """The shape of one observation."""
        return self.x.shape[1:]

    def of(self, group: Sequence[int]) -> Resampled:
        """The samples of these members."""
        return Resampled(self.x, self.rows[list(group)])

    def take(self, index: Tensor) -> Tensor:
        """Of each member's sample the observations at its `index`; of a single member there is no axis for it."""
        return self.x[self.rows[0][index] if index.dim() == 1 else self.rows.gather(1, index)]

    def block(self, rows: slice, members: int | None = None) -> Tensor:
        """Of each member's sample observations in a row."""
        return self.x[self.rows[0, rows] if members is None else self.rows[:, rows]]

    def tensors(self) -> list[Tensor]:
        """The observations, and which of them each member has."""
        return [self.x, self.rows]


@dataclass(frozen=True, eq=False)
class Sparse:
    """Rows of a sparse matrix, the same for every member, made dense a batch at a time."""

    matrix: Matrix
    device: torch.device

    @property
    def n(self) -> int:
        """How many there are."""
        return self.matrix.shape[0]

    @property
    def shape(self) -> torch.Size:
        """The shape of one observation."""
        return torch.Size(self.matrix.shape[1:])

    def of(self, group: Sequence[int]) -> Sparse:
        """These, whoever asks."""
        return self

    def take(self, index: Tensor) -> Tensor:
        """The observations at `index`."""
        return self._dense(index.flatten().cpu().numpy()).reshape(*index.shape, -1)

    def select(self, index: Tensor) -> Sparse:
        """Those at `index` alone."""
        return Sparse(self.matrix[index.cpu().numpy()], self.device)

    def block(self, rows: slice, members: int | None = None) -> Tensor:
        """Observations in a row."""
        return _spread(self._dense(rows), members)

    def tensors(self) -> list[Tensor]:
        """Values and where they stand."""
        return [torch.from_numpy(part) for part in (self.matrix.data, self.matrix.indices, self.matrix.indptr)]

    def _dense(self, rows: Any) -> Tensor:
        return torch.from_numpy(self.matrix[rows].toarray()).to(self.device, torch.get_default_dtype())


@dataclass(frozen=True, eq=False)
class Resident:
    """Sparse rows that lie on the device, the same for every member: no batch travels.

    Shapes: ``values (nnz,)``, ``columns (nnz,)`` and ``starts (n + 1,)`` as in a CSR matrix of `width` columns.
    """

    values: Tensor
    columns: Tensor
    starts: Tensor
    width: int

    @classmethod
    def brought(cls, matrix: Matrix, device: torch.device) -> Resident:
        """The rows of a sparse matrix, on the device from now on."""
        values = torch.from_numpy(matrix.data).to(device, torch.get_default_dtype())
        columns, starts = (torch.from_numpy(part).to(device) for part in (matrix.indices, matrix.indptr))
        return cls(values, columns, starts.long(), matrix.shape[1])

    @property
    def n(self) -> int:
        """How many there are."""
        return len(self.starts) - 1

    @property
    def shape(self) -> torch.Size:
        """The shape of one observation."""
        return torch.Size((self.width,))

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.values.device

    def of(self, group: Sequence[int]) -> Resident:
        """These, whoever asks."""
        return self

    def take(self, index: Tensor) -> Tensor:
        """The observations at `index`."""
        row, entry = self._entries(index.flatten())
        out = self.values.new_zeros(index.numel(), self.width)
        out[row, self.columns[entry].long()] = self.values[entry]
        return out.reshape(*index.shape, -1)

    def select(self, index: Tensor) -> Resident:
        """Those at `index` alone."""
        row, entry = self._entries(index)
        starts = torch.nn.functional.pad(torch.bincount(row, minlength=len(index)).cumsum(0), (1, 0))
        return Resident(self.values[entry], self.columns[entry], starts, self.width)

    def block(self, rows: slice, members: int | None = None) -> Tensor:
        """Observations in a row."""
        return _spread(self.take(torch.arange(self.n, device=self.device)[rows]), members)

    def tensors(self) -> list[Tensor]:
        """Values and where they stand."""
        return [self.values, self.columns, self.starts]

    def _entries(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Of every entry of these rows, which row it is in and where it stands. Shapes: ``-> (entries,)`` each."""
        index = index.to(self.device)
        first = self.starts[index]
        length = self.starts[index + 1] - first
        row = torch.repeat_interleave(length)
        before = length.cumsum(0) - length
        return row, torch.arange(len(row), device=self.device) + (first - before)[row]


def _spread(x: Tensor, members: int | None) -> Tensor:
    return x if members is None else x.expand(members, *x.shape)


def observations(
    x: Tensor | Matrix | Observations,
    *,
    name: str,
    device: torch.device,
    members: int | None = None,
) -> Observations:
    """What `train` was given, checked: with `members` a tensor of as many data sets, else one that all share."""
    if isinstance(x, Observations):
        return x
    if sparse.issparse(x):
        if members is not None:
            raise SettingError(f"{name} is sparse, which all members share; pass a tensor with a data set a member.")
        return sparse_rows(_checked(x, name), device)
    if members is None:
        return Shared(check_observations(x, name=name).to(device))
    if x.dim() < 3 or x.shape[0] != members:
        raise DataError(f"{name} has shape {tuple(x.shape)}; one data set a member is ({members}, n, features).")
    for part in x:
        check_observations(part, name=name)
    return Apart(x.to(device))


def sparse_rows(matrix: Matrix, device: torch.device) -> Sparse | Resident:
    """Rows of a CSR matrix: on the device where it has room for them, else in the host's memory."""
    if device.type == "cuda":
        size = sum(part.nbytes for part in (matrix.data, matrix.indices, matrix.indptr))
        if size < _SHARE * torch.cuda.mem_get_info(device)[0]:
            return Resident.brought(matrix, device)
    return Sparse(matrix, device)


def _checked(x: Matrix, name: str) -> Matrix:
    matrix: Any = sparse.csr_matrix(x)
    if 0 in matrix.shape:
        raise DataError(f"{name} of shape {matrix.shape} is empty; at least one observation and feature are needed.")
    if not torch.from_numpy(matrix.data).isfinite().all():
        raise DataError(f"{name} holds values that are not finite; remove or impute them first.")
    return matrix


def blocks(x: Observations, size: int, members: int | None) -> Iterator[Tensor]:
    """All observations, `size` at a time."""
    for start in range(0, x.n, size):
        yield x.block(slice(start, start + size), members)
