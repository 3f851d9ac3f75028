"""How much memory there is, how much a particle needs, and how many observations therefore go together."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path as File

import torch

from vaerdict.core import SettingError, saved_bytes
from vaerdict.noise import Randomness
from vaerdict.samplers.path import Path

_SHARE = 0.5
_ENOUGH = {"cpu": 2**28, "cuda": 2**33}
_TEMPORARIES = 5  # peak of a gradient over what autograd holds at its end, with room for the allocator
_STATES = 24  # copies of the latents in a move: states, gradients, velocities, noise
_UNKNOWN = 2**30


def free_bytes(device: torch.device | str) -> int:
    """Memory that could be taken now: of the GPU, or of the machine and the container around the process."""
    device = torch.device(device)
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return int(min(_machine_bytes(), _container_bytes()))


def _machine_bytes() -> int:
    """Available memory of the machine: reclaimable caches count where the system tells."""
    meminfo = File("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    names = getattr(os, "sysconf_names", {})
    pages = next((os.sysconf(name) for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in names), None)
    return _UNKNOWN if pages is None else pages * os.sysconf("SC_PAGE_SIZE")


def _container_bytes() -> int | float:
    """What the control group still allows, without bound where there is none."""
    limit, used = File("/sys/fs/cgroup/memory.max"), File("/sys/fs/cgroup/memory.current")
    try:
        return max(0, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no such file, or the word "max"
        return float("inf")


def bytes_per_particle(path: Path, n_particles: int, *, generator: Randomness) -> int:
    """Working set of one particle of one observation, from gradients of two and of four particles.

    The difference leaves out what does not grow with particles: parameters, and what depends on x alone. All particles
    are drawn because some starts, mixtures in strata, cannot draw fewer.
    """
    one = path.select(torch.zeros(1, dtype=torch.long, device=path.x.device))
    z = one.draw(n_particles, generator=generator).z[:1]
    starts = (z.repeat(k, *(1,) * (z.dim() - 1)) for k in (2, 4))
    two, four = (saved_bytes(partial(one.evaluate, start)) for start in starts)
    return _TEMPORARIES * max(0, four - two) // 2 + _STATES * z[0].numel() * z.element_size()


def default_budget(device: torch.device) -> int:
    """Bytes to work in when nobody says: a quarter GiB on a CPU, 8 GiB on a GPU, but at most half of what is free.

    More would not be faster: a processor falls out of its caches, a GPU is busy long before. And results that depend on
    the cut into chunks repeat from machine to machine.
    """
    return min(_ENOUGH.get(device.type, _UNKNOWN), int(_SHARE * free_bytes(device)))


def chunks(path: Path, n_particles: int, *, generator: Randomness, max_bytes: int | None) -> list[Path]:
    """The path cut along the observations so that each piece works within `max_bytes` (None: `default_budget`)."""
    if max_bytes is not None and max_bytes <= 0:
        raise SettingError(f"max_bytes={max_bytes} must be positive, or None to choose by the device.")
    budget = default_budget(path.x.device) if max_bytes is None else max_bytes
    each = n_particles * bytes_per_particle(path, n_particles, generator=generator)
    size = max(1, int(budget // each))
    n = path.x.shape[-2]
    spans = torch.arange(n, device=path.x.device).tensor_split(-(-n // size))
    return [path] if len(spans) == 1 else [path.select(span) for span in spans]
