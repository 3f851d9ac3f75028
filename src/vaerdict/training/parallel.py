r"""Data-parallel training: one process per rank, started by ``torchrun``.

All ranks are given the same members and data. Every batch is drawn alike on all ranks and split evenly between them.
Each rank draws its own noise, and every step averages gradients over ranks,

.. math:: \frac1R\sum_r \nabla \frac1{B/R}\sum_{i \in B_r} \ell_i = \nabla\frac1B\sum_{i\in B}\ell_i,

so that parameters stay equal on all ranks, and R ranks take the steps that one process would take.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from vaerdict.core import SettingError

T = TypeVar("T")


@dataclass(frozen=True)
class RankGroup:
    """The ranks that train together. In a group of one every operation is the identity."""

    rank: int = 0
    size: int = 1

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over ranks, equal to the bit on all of them. Shapes: as `tensor`."""
        if self.size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total / self.size

    def shard(self, index: Tensor) -> Tensor:
        """This rank's part of a batch along the last axis. Shapes: ``(..., size) -> (..., size / ranks)``."""
        size = index.shape[-1]
        if size % self.size:
            fewer = size - size % self.size
            raise SettingError(
                f"a batch of {size} cannot be split evenly over {self.size} ranks; use a batch_size of "
                f"{fewer or self.size} or {fewer + self.size}."
            )
        return index if self.size == 1 else index[..., self.rank :: self.size]

    def purpose(self, name: str) -> str:
        """The purpose that this rank's noise is seeded for: the name itself on the first rank."""
        return name if self.rank == 0 else f"{name} rank {self.rank}"

    def first(self, value: T) -> T:
        """The first rank's value, on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def check_equal(self, value: Callable[[], object], *, what: str) -> None:
        """Raise if the ranks were given different things: they would average gradients of different losses."""
        if self.size > 1 and len(set(self.gather(value()))) > 1:
            raise SettingError(f"{what} differ between ranks; give every rank the same, made from the same seeds.")


SINGLE = RankGroup()
"""A group of one."""


def current_group() -> RankGroup:
    """The ranks of ``torch.distributed`` that this process belongs to, or a group of one if it is not in use."""
    if not (dist.is_available() and dist.is_initialized()):
        return SINGLE
    return RankGroup(dist.get_rank(), dist.get_world_size())


@contextmanager
def process_group(device: torch.device | str = "cpu") -> Iterator[RankGroup]:
    """A context in which the ranks started by ``torchrun`` train together, over NCCL on GPUs and gloo elsewhere.

    If there are fewer GPUs than ranks, ranks share GPUs and communicate over gloo, because NCCL needs one GPU per
    rank. All machines must have the same number of GPUs. Without ``torchrun`` the process is a group of one, so that
    the same program runs either way.
    """
    if "LOCAL_RANK" not in os.environ:
        yield SINGLE
        return
    backend = "gloo"
    if torch.device(device).type == "cuda":
        n_gpus, n_ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if not n_gpus:
            raise SettingError(f"device={device!r}, but torch sees no GPU; use process_group('cpu').")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % n_gpus)
        backend = "nccl" if n_ranks <= n_gpus else "gloo"
    dist.init_process_group(backend)
    try:
        yield current_group()
    finally:
        dist.destroy_process_group()
