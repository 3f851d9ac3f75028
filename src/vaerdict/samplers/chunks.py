"""Chunks of observations that fit in memory, and the concatenation of their results."""

from __future__ import annotations

import os
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from vaerdict.core import SettingError, saved_bytes
from vaerdict.noise import Randomness, source_at
from vaerdict.samplers.tempering import AnnealingPath

Result = TypeVar("Result", bound=Any)

_FREE_FRACTION = 0.5
_DEFAULT_BYTES = {"cpu": 2**28, "cuda": 2**33}
_TEMPORARIES = 5  # ratio of peak memory of a gradient to what autograd saves, with room for the allocator
_STATES = 24  # copies of the latents in a move: states, gradients, velocities, noise
_UNKNOWN = 2**30


def free_bytes(device: torch.device | str) -> int:
    """Memory that is free now: of the GPU, or of the machine and the container around the process."""
    device = torch.device(device)
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return int(min(_machine_bytes(), _container_bytes()))


def _machine_bytes() -> int:
    """Available memory of the machine, with reclaimable caches where the system reports them."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    names = getattr(os, "sysconf_names", {})
    pages = next((os.sysconf(name) for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in names), None)
    return _UNKNOWN if pages is None else pages * os.sysconf("SC_PAGE_SIZE")


def _container_bytes() -> int | float:
    """Memory that the control group still allows; infinity without a limit."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return max(0, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return float("inf")


def bytes_per_particle(path: AnnealingPath, n_particles: int, *, generator: Randomness) -> int:
    """Memory needed per particle and observation, from the gradients of two and of four particles.

    The difference of the two excludes what does not grow with the particles: parameters, and what depends on x alone.
    `n_particles` are drawn because a stratified mixture cannot draw fewer.
    """
    first = torch.zeros(1, dtype=torch.long, device=path.x.device)
    one = path.select(first)
    z = one.draw(n_particles, generator=source_at(generator, first)).z[:1]
    starts = (z.repeat(k, *(1,) * (z.dim() - 1)) for k in (2, 4))
    two, four = (saved_bytes(partial(one.evaluate, start)) for start in starts)
    return _TEMPORARIES * max(0, four - two) // 2 + _STATES * z[0].numel() * z.element_size()


def default_budget(device: torch.device) -> int:
    """Default of `max_bytes`: 256 MiB on a CPU and 8 GiB on a GPU, but at most half of the free memory.

    More would not be faster: the data would no longer fit in the caches of a CPU, and a GPU is busy with less. Results
    depend on the chunks, and a fixed default repeats them from machine to machine.
    """
    return min(_DEFAULT_BYTES.get(device.type, _UNKNOWN), int(_FREE_FRACTION * free_bytes(device)))


def chunks(
    path: AnnealingPath, n_particles: int, *, generator: Randomness, max_bytes: int | None
) -> list[AnnealingPath]:
    """The path split along the observations so that each chunk needs at most `max_bytes` (None: `default_budget`)."""
    if max_bytes is not None and max_bytes <= 0:
        raise SettingError(f"max_bytes={max_bytes} must be positive, or None to choose by the device.")
    budget = default_budget(path.x.device) if max_bytes is None else max_bytes
    each = n_particles * bytes_per_particle(path, n_particles, generator=generator)
    size = max(1, int(budget // each))
    n = path.x.shape[-2]
    spans = torch.arange(n, device=path.x.device).tensor_split(-(-n // size))
    return [path] if len(spans) == 1 else [path.select(span) for span in spans]


def concat_results(results: list[Result]) -> Result:
    """Concatenate the observations of several results of one type; fields that are not tensors are shared."""
    first = results[0]
    if len(results) == 1:
        return first
    columns = {f.name: [getattr(r, f.name) for r in results] for f in fields(first)}
    return type(first)(**{name: _concat(name, column) for name, column in columns.items()})


def _concat(name: str, column: list[Any]) -> Any:
    # observations are along the last axis, except for the latents, whose last axis is their dimension
    return torch.cat(column, -2 if name in ("z", "tempered") else -1) if isinstance(column[0], Tensor) else column[0]
