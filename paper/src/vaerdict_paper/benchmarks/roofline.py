r"""A roofline model: the measured ceilings of a device, and the demands of a training step.

Three shares relate a step to the ceilings: its FLOP/s to those of a large matrix product, its bytes/s to those of a
copy, and the shortest launch time of its kernels to its time. The largest share tells what bounds the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_LEAST_SECONDS = 0.2  # of work for every measured time
_LAUNCHES = 500


@dataclass(frozen=True)
class Ceilings:
    """Measured maxima: FLOP/s of a matrix product in TF32 and in float32, bytes/s of a copy, launches/s."""

    device: str
    flops_tf32: float
    flops_fp32: float
    bytes: float
    launches: float
    launches_recorded: float


class Demand(NamedTuple):
    """Demands of one step: FLOPs of its matrix products, bytes that its operators read and write, kernels.

    `kernel_s` is the summed time of the kernels on the device; None on a CPU, where operators are counted instead.
    """

    flop: int
    bytes: int
    kernels: int
    kernel_s: float | None


class Shares(NamedTuple):
    """A step's demands as shares of the ceilings."""

    compute: float
    memory: float
    launches: float

    @property
    def bound(self) -> str:
        """The ceiling that the step comes nearest to."""
        return max(self._asdict().items(), key=lambda item: item[1])[0]


def shares(demand: Demand, seconds: float, ceilings: Ceilings, *, tf32: bool, recorded: bool) -> Shares:
    """The shares of a step of this duration, with or without TF32, replayed from a CUDA graph or not."""
    flops = ceilings.flops_tf32 if tf32 else ceilings.flops_fp32
    launches = ceilings.launches_recorded if recorded else ceilings.launches
    rates = (demand.flop / flops, demand.bytes / ceilings.bytes, demand.kernels / launches)
    return Shares(*(rate / seconds for rate in rates))


# ----------------------------------------------------------------------------------------------------- ceilings
def ceilings(device: torch.device, *, quick: bool = False) -> Ceilings:
    """Measure the ceilings; a CPU has neither TF32 nor graphs, so both kinds are the same."""
    size = 256 if quick else 8192 if device.type == "cuda" else 1024
    fp32 = _matmul(size, device, tf32=False)
    launches = _LAUNCHES / seconds_of(_small_kernels(device), device)
    if device.type != "cuda":
        return Ceilings(f"CPU, {torch.get_num_threads()} threads", fp32, fp32, _copy(2**24, device), launches, launches)
    graph = torch.cuda.CUDAGraph()
    work = _small_kernels(device)
    work()
    with torch.cuda.graph(graph):
        work()
    recorded = _LAUNCHES / seconds_of(graph.replay, device)
    tf32, copied = _matmul(size, device, tf32=True), _copy(2**30, device)
    return Ceilings(torch.cuda.get_device_name(device), tf32, fp32, copied, launches, recorded)


def _matmul(n: int, device: torch.device, *, tf32: bool) -> float:
    a, b = torch.ones(2, n, n, device=device)
    with _tf32(tf32):
        return 2 * n**3 / seconds_of(lambda: a @ b, device)


@contextmanager
def _tf32(enabled: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _copy(n_bytes: int, device: torch.device) -> float:
    """Bytes read and written per second."""
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * n_bytes / seconds_of(lambda: target.copy_(source), device)


def _small_kernels(device: torch.device) -> Callable[[], None]:
    one = torch.zeros(1, device=device)

    def work() -> None:
        for _ in range(_LAUNCHES):
            one.add_(1.0)

    return work


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Mean seconds of one call, until the device has finished, after a warm-up call."""
    work()
    calls, seconds = 0, 0.0
    n = 1
    while seconds < _LEAST_SECONDS:
        _wait(device)
        started = time.perf_counter()
        for _ in range(n):
            work()
        _wait(device)
        calls, seconds = n, time.perf_counter() - started
        n *= 2
    return seconds / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------------------------------- demands
class _Counter(TorchDispatchMode):
    """Counts operators that are no views, their FLOPs, and the bytes of their input and output tensors.

    FLOPs are those of matrix products and convolutions, by torch's own formulas; its `FlopCounterMode` does not support
    gradients with respect to parameters. Every operator is assumed to read its inputs and write its outputs once, as
    unfused kernels do, cached or not. Memory that a tensor repeats counts once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flop, self.bytes, self.operators = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flop += formula(*args, **(kwargs or {}), out_val=out)
        if not func.is_view:
            self.operators += 1
            self.bytes += sum(_n_bytes(t) for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
        return out


def _n_bytes(t: Tensor) -> int:
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


def demand(step: Callable[[], Any], device: torch.device) -> Demand:
    """Demands of an eager step: FLOPs and bytes by counting operators, kernels and their time by the profiler."""
    step()
    with _Counter() as count:
        step()
    if device.type != "cuda":
        return Demand(count.flop, count.bytes, count.operators, None)
    _wait(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        _wait(device)
    kernels = [event for event in profile.events() or [] if event.device_type == DeviceType.CUDA]
    if not kernels:  # the driver does not permit profiling
        return Demand(count.flop, count.bytes, count.operators, None)
    busy = 1e-6 * sum(event.time_range.elapsed_us() for event in kernels)
    return Demand(count.flop, count.bytes, len(kernels), busy)
