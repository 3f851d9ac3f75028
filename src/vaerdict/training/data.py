"""Sources of training batches: one data set for all members or one per member, dense or sparse.

`Observations` is what a stack takes batches from. `Rows` is the smaller protocol of code that only iterates over
observations, as differential expression does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from scipy import sparse
from torch import Tensor

from vaerdict.core import DataError, SettingError, check_observations

_MEMORY_FRACTION = 0.3  # of a GPU's free memory that sparse data may take

Matrix = Any
"""A scipy sparse matrix, which scipy does not type."""


class Rows(Protocol):
    """Observations that can be read some at a time."""

    @property
    def n(self) -> int:
        """The number of observations."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the tensors that `take` returns."""
        ...

    def take(self, index: Tensor) -> Tensor:
        """The observations at `index`, dense and on the device. Shapes: ``(size,) -> (size, p)``."""
        ...

    def select(self, index: Tensor) -> Rows:
        """The observations at `index` as rows of the same kind. Shapes: ``(size,)``."""
        ...


@runtime_checkable
class Observations(Protocol):
    """Observations that a stack can take batches of."""

    @property
    def n(self) -> int:
        """The number of observations per member."""
        ...

    @property
    def shape(self) -> torch.Size:
        """The shape of one observation."""
        ...

    def of(self, group: Sequence[int]) -> Observations:
        """The observations of the members in `group`, by their positions."""
        ...

    def take(self, index: Tensor) -> Tensor:
        """The observations at `index`. Shapes: ``(size,) -> (size, p)``, ``(members, size) -> (members, size, p)``."""
        ...

    def block(self, rows: slice, members: int | None = None) -> Tensor:
        """Consecutive observations for a stack of `members`. Shapes: ``-> (n, p)`` or ``(members, n, p)``."""
        ...

    def tensors(self) -> list[Tensor]:
        """All tensors the observations consist of, for their digest."""
        ...


class _CommonRows(ABC):
    """Rows that all members share."""

    def of(self, group: Sequence[int]) -> Self:
        """The same rows for every member."""
        return self

    def block(self, rows: slice, members: int | None = None) -> Tensor:
        """Consecutive observations, repeated for each member without a copy."""
        x = self._dense(rows)
        return x if members is None else x.expand(members, *x.shape)

    @abstractmethod
    def _dense(self, rows: Any) -> Tensor:
        """The observations at `rows`, dense. Shapes: ``-> (size, p)``."""


@dataclass(frozen=True, eq=False)
class SharedRows(_CommonRows):
    """A tensor that all members share. Shapes: ``x (n, p)``."""

    x: Tensor

    @property
    def n(self) -> int:
        """The number of observations."""
        return self.x.shape[0]

    @property
    def device(self) -> torch.device:
        """The tensor's device."""
        return self.x.device

    @property
    def shape(self) -> torch.Size:
        """The shape of one observation."""
        return self.x.shape[1:]

    def take(self, index: Tensor) -> Tensor:
        """The observations at `index`."""
        return self.x[index]

    def select(self, index: Tensor) -> SharedRows:
        """The observations at `index` as rows."""
        return SharedRows(self.x[index])

    def tensors(self) -> list[Tensor]:
        """The tensor."""
        return [self.x]

    def _dense(self, rows: Any) -> Tensor:
        return self.x[rows]


@dataclass(frozen=True, eq=False)
class PerMemberRows:
    """One data set per member: bootstrap samples, or simulations. Shapes: ``x (members, n, p)``."""

    x: Tensor

    @property
    def n(self) -> int:
        """The number of observations per member."""
        return self.x.shape[1]

    @property
    def shape(self) -> torch.Size:
        """The shape of one observation."""
        return self.x.shape[2:]

    def of(self, group: Sequence[int]) -> PerMemberRows | SharedRows:
        """The data sets of these members."""
        return SharedRows(self.x[group[0]]) if len(group) == 1 else PerMemberRows(self.x[list(group)])

    def take(self, index: Tensor) -> Tensor:
        """The observations at each member's `index` in its data set."""
        return self.x[torch.arange(self.x.shape[0], device=self.x.device)[:, None], index]

    def block(self, rows: slice, members: int | None = None) -> Tensor:
        """Consecutive observations of each member's data set."""
        return self.x[:, rows]

    def tensors(self) -> list[Tensor]:
        """The tensor."""
        return [self.x]


@dataclass(frozen=True, eq=False)
class ResampledRows:
    """A sample of the same observations per member, by row numbers: a bootstrap without copies.

    Shapes: ``x (n, p)``, ``rows (members, size)``.
    """

    x: Tensor
    rows: Tensor

    @property
    def n(self) -> int:
        """The number of observations per member."""
        return self.rows.shape[1]

    @property
    def shape(self) -> torch.Size:
        """The shape of one observation."""
        return self.x.shape[1:]

    def of(self, group: Sequence[int]) -> ResampledRows:
        """The samples of these members."""
        return ResampledRows(self.x, self.rows[list(group)])

    def take(self, index: Tensor) -> Tensor:
        """The observations at each member's `index` in its sample; the index of a single member has one axis."""
        return self.x[self.rows[0][index] if index.dim() == 1 else self.rows.gather(1, index)]

    def block(self, rows: slice, members: int | None = None) -> Tensor:
        """Consecutive observations of each member's sample."""
        return self.x[self.rows[0, rows] if members is None else self.rows[:, rows]]

    def tensors(self) -> list[Tensor]:
        """The observations and the row numbers."""
        return [self.x, self.rows]


@dataclass(frozen=True, eq=False)
class SparseRows(_CommonRows):
    """Rows of a scipy CSR matrix that all members share, made dense one batch at a time."""

    matrix: Matrix
    device: torch.device

    @property
    def n(self) -> int:
        """The number of observations."""
        return self.matrix.shape[0]

    @property
    def shape(self) -> torch.Size:
        """The shape of one observation."""
        return torch.Size(self.matrix.shape[1:])

    def take(self, index: Tensor) -> Tensor:
        """The observations at `index`."""
        return self._dense(index.flatten().cpu().numpy()).reshape(*index.shape, -1)

    def select(self, index: Tensor) -> SparseRows:
        """The observations at `index` as rows."""
        return SparseRows(self.matrix[index.cpu().numpy()], self.device)

    def tensors(self) -> list[Tensor]:
        """Values, columns and row starts."""
        return [torch.from_numpy(part) for part in (self.matrix.data, self.matrix.indices, self.matrix.indptr)]

    def _dense(self, rows: Any) -> Tensor:
        return torch.from_numpy(self.matrix[rows].toarray()).to(self.device, torch.get_default_dtype())


@dataclass(frozen=True, eq=False)
class DeviceRows(_CommonRows):
    """Sparse rows in the device's memory that all members share: no batch is transferred.

    Shapes: ``values (nnz,)``, ``columns (nnz,)`` and ``starts (n + 1,)`` as in a CSR matrix of `width` columns.
    """

    values: Tensor
    columns: Tensor
    starts: Tensor
    width: int

    @classmethod
    def from_matrix(cls, matrix: Matrix, device: torch.device) -> DeviceRows:
        """The rows of a CSR matrix, copied to the device."""
        values = torch.from_numpy(matrix.data).to(device, torch.get_default_dtype())
        columns, starts = (torch.from_numpy(part).to(device) for part in (matrix.indices, matrix.indptr))
        return cls(values, columns, starts.long(), matrix.shape[1])

    @property
    def n(self) -> int:
        """The number of observations."""
        return len(self.starts) - 1

    @property
    def shape(self) -> torch.Size:
        """The shape of one observation."""
        return torch.Size((self.width,))

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self.values.device

    def take(self, index: Tensor) -> Tensor:
        """The observations at `index`."""
        row, entry = self._entries(index.flatten())
        out = self.values.new_zeros(index.numel(), self.width)
        out[row, self.columns[entry].long()] = self.values[entry]
        return out.reshape(*index.shape, -1)

    def select(self, index: Tensor) -> DeviceRows:
        """The observations at `index` as rows."""
        row, entry = self._entries(index)
        starts = torch.nn.functional.pad(torch.bincount(row, minlength=len(index)).cumsum(0), (1, 0))
        return DeviceRows(self.values[entry], self.columns[entry], starts, self.width)

    def tensors(self) -> list[Tensor]:
        """Values, columns and row starts."""
        return [self.values, self.columns, self.starts]

    def _dense(self, rows: Any) -> Tensor:
        return self.take(torch.arange(self.n, device=self.device)[rows])

    def _entries(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The row (position in `index`) and the position in `values` of every entry. Shapes: ``-> (entries,)`` each."""
        index = index.to(self.device)
        first = self.starts[index]
        length = self.starts[index + 1] - first
        row = torch.repeat_interleave(length)
        before = length.cumsum(0) - length
        return row, torch.arange(len(row), device=self.device) + (first - before)[row]


def as_observations(
    x: Tensor | Matrix | Observations, *, name: str, device: torch.device, members: int | None = None
) -> Observations:
    """The data passed to `train`, checked and on the device.

    With `members`, x is a tensor with one data set per member; without, one data set that all members share. `name` is
    the argument's name in error messages.
    """
    if isinstance(x, Observations):
        return x
    if sparse.issparse(x):
        if members is not None:
            raise SettingError(f"{name} is sparse, which all members share; pass a tensor of one data set per member.")
        return sparse_rows(_checked(x, name), device)
    if members is None:
        return SharedRows(check_observations(x, name=name).to(device))
    if x.dim() < 3 or x.shape[0] != members:
        raise DataError(f"{name} has shape {tuple(x.shape)}; one data set per member is ({members}, n, features).")
    for data_set in x:
        check_observations(data_set, name=name)
    return PerMemberRows(x.to(device))


def sparse_rows(matrix: Matrix, device: torch.device) -> SparseRows | DeviceRows:
    """The rows of a CSR matrix, in the device's memory if they fit there and in the host's memory otherwise."""
    if device.type == "cuda":
        size = sum(part.nbytes for part in (matrix.data, matrix.indices, matrix.indptr))
        if size < _MEMORY_FRACTION * torch.cuda.mem_get_info(device)[0]:
            return DeviceRows.from_matrix(matrix, device)
    return SparseRows(matrix, device)


def _checked(x: Matrix, name: str) -> Matrix:
    matrix: Any = sparse.csr_matrix(x)
    if 0 in matrix.shape:
        raise DataError(f"{name} of shape {matrix.shape} is empty; at least one observation and feature are needed.")
    if not torch.from_numpy(matrix.data).isfinite().all():
        raise DataError(f"{name} holds values that are not finite; remove or impute them first.")
    return matrix


def blocks(x: Observations, size: int, members: int | None) -> Iterator[Tensor]:
    """All observations in order, `size` at a time."""
    for start in range(0, x.n, size):
        yield x.block(slice(start, start + size), members)
