r"""Data-parallel training: one program a rank, started by ``torchrun``, each on its share of every batch.

All ranks are given the same members and data. Every batch is drawn alike on all of them and split evenly; each rank
draws noise of its own, and every step descends the mean of their gradients,

.. math:: \frac1R\sum_r \nabla \frac1{B/R}\sum_{i \in B_r} \ell_i = \nabla\frac1B\sum_{i\in B}\ell_i,

so that parameters stay equal on all ranks and R of them take the steps that one would take.
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
class Group:
    """The ranks that train together; a group of one does nothing."""

    rank: int = 0
    size: int = 1

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over ranks, with the same bits on all of them. Shapes: as `tensor`."""
        if self.size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total / self.size

    def shard(self, index: Tensor) -> Tensor:
        """This rank's share of a batch along the last axis. Shapes: ``(..., size) -> (..., size / ranks)``."""
        size = index.shape[-1]
        if size % self.size:
            fewer = size - size % self.size
            raise SettingError(
                f"a batch of {size} cannot be split evenly over {self.size} ranks; use a batch_size of "
                f"{fewer or self.size} or {fewer + self.size}."
            )
        return index if self.size == 1 else index[..., self.rank :: self.size]

    def purpose(self, name: str) -> str:
        """What a rank's own randomness is seeded for: the name itself on the first rank."""
        return name if self.rank == 0 else f"{name} rank {self.rank}"

    def first(self, value: T) -> T:
        """The first rank's value, on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def every(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def check_alike(self, value: Callable[[], object], *, what: str) -> None:
        """Refuse ranks that were given different things: they would average gradients of different losses."""
        if self.size > 1 and len(set(self.every(value()))) > 1:
            raise SettingError(f"{what} differ between ranks; give every rank the same, made from the same seeds.")


ALONE = Group()
"""A group of one."""


def current() -> Group:
    """The ranks this process belongs to by ``torch.distributed``; one alone where that is not in use."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    return Group(dist.get_rank(), dist.get_world_size())


@contextmanager
def joined(device: torch.device | str = "cpu") -> Iterator[Group]:
    """Within, the ranks that ``torchrun`` started train together, by NCCL on GPUs and gloo elsewhere.

    Where there are fewer GPUs than ranks these share them, and talk by gloo too, since NCCL wants one for each; all
    machines must have as many. Without ``torchrun`` the process is a group of one, so that the same program runs
    either way.
    """
    if "LOCAL_RANK" not in os.environ:
        yield ALONE
        return
    backend = "gloo"
    if torch.device(device).type == "cuda":
        n_gpus, n_ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if not n_gpus:
            raise SettingError("ranks were to train on GPUs, and torch sees none; use joined('cpu').")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % n_gpus)
        backend = "nccl" if n_ranks <= n_gpus else "gloo"
    dist.init_process_group(backend)
    try:
        yield current()
    finally:
        dist.destroy_process_group()
