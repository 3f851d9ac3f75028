"""Batched PSIS against arviz's loop over observations, on the same weights in the same run.

Both have one thread and float64, and normalise no weights. The loop of arviz is in Python and has no faster setting:
its optional compilation by numba does not cover it. The ablations are of our own code: the loop, the precision, the
task and the device, each changed alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vaerdict import diagnostics
from vaerdict.core import Progress, silent
from vaerdict.noise import seeded
from vaerdict.optional import require
from vaerdict_paper.benchmarks.timing import ABLATION, LIKE, comparison, interleaved, one_thread

PACKAGES = ("arviz",)

_ARVIZ, _OURS, _LOOP, _SINGLE, _KHAT = "arviz", "psis", "loop", "float32", "khat"


def run(*, quick: bool = False, progress: Progress = silent) -> Iterator[dict[str, Any]]:
    """The row of the peer, and one per ablation, each with the largest difference of k-hat from the peer.

    All are timed in turn on the CPU; the GPU, if there is one, in turn with the CPU.
    """
    n, k, repeats = (200, 900, 2) if quick else (2000, 5000, 5)
    log_w = _weights(k, n)
    name, arviz = arviz_psis()
    rows = log_w.t().contiguous().numpy()  # the layout that is fastest for the peer
    single = log_w.float()
    works: dict[str, Callable[[], Any]] = {
        _ARVIZ: lambda: arviz(rows)[1],
        _OURS: lambda: diagnostics.psis(log_w)[1],
        _LOOP: lambda: torch.cat([diagnostics.psis(column)[1] for column in log_w.split(1, -1)]),
        _SINGLE: lambda: diagnostics.psis(single)[1],
        _KHAT: lambda: diagnostics.khat(log_w),
    }
    progress(0, 2, "Pareto smoothing on the CPU")
    with one_thread():
        expected = torch.as_tensor(works[_ARVIZ]())
        seconds = interleaved(works, repeats, cpu=True)
        differences = {key: _difference(works[key](), expected) for key in (_OURS, _SINGLE, _KHAT, _LOOP)}
    case = f"psis {n}x{k}, float64"
    row = comparison(LIKE, case, name, seconds[_OURS], seconds[_ARVIZ])
    yield {**row, "max_khat_difference": differences[_OURS]}
    for fast, slow, what, peer in (
        (_OURS, _LOOP, "all observations at once", "one observation at a time"),
        (_SINGLE, _OURS, "single precision", "float64"),
        (_KHAT, _OURS, "k-hat alone, without smoothed weights", "k-hat and weights"),
    ):
        row = comparison(ABLATION, case, peer, seconds[fast], seconds[slow], differs=what)
        yield {**row, "max_khat_difference": differences[fast]}
    progress(1, 2, "Pareto smoothing on the GPU")
    if torch.cuda.is_available():
        yield _on_gpu(log_w, case, expected, repeats)
    progress(2, 2, "done")


def _on_gpu(log_w: Tensor, case: str, expected: Tensor, repeats: int) -> dict[str, Any]:
    """The device changed alone; seconds by the clock, with one thread on the CPU."""
    moved = log_w.cuda()
    works = {
        "gpu": lambda: diagnostics.psis(moved)[1].cpu(),  # waits for the device
        "cpu": lambda: diagnostics.psis(log_w)[1],
    }
    with one_thread():
        seconds = interleaved(works, repeats)
    device = f"{torch.cuda.get_device_name()} in place of one CPU thread"
    row = comparison(ABLATION, case, "CPU, 1 thread", seconds["gpu"], seconds["cpu"], differs=device)
    return {**row, "max_khat_difference": _difference(works["gpu"](), expected)}


def _difference(khat: Tensor, expected: Tensor) -> float:
    return (khat - expected).abs().max().item()


def _weights(k: int, n: int) -> Tensor:
    """Log-weights of N(0, 1) under N(0, s^2) with s^2 from 0.3 to 1.2: k from 0.7 down to none. Shapes: ``(K, n)``."""
    variance = torch.linspace(0.3, 1.2, n, dtype=torch.float64)
    noise = torch.randn(k, n, generator=seeded(0), dtype=torch.float64)
    return 0.5 * (1 - variance) * noise.square()


def arviz_psis() -> tuple[str, Callable[[Any], tuple[Any, Any]]]:
    """Name of the peer, and its smoothed log-weights and k-hat of an array of log-weights, draws last.

    Up to arviz 0.23 the tail has ceil(min(K/5, 3 sqrt(K))) weights, without ties, as here. Arviz 1 rounds down, keeps
    ties, and takes log-likelihoods, whose negatives are the weights of leave-one-out.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        arviz = require("arviz", "arviz")
    psislw = vars(arviz).get("psislw")
    if psislw is None:
        array_stats = require("arviz_stats.base", "arviz").array_stats
        return f"arviz {arviz.__version__} psislw", lambda log_w: array_stats.psislw(-log_w)
    return f"arviz {arviz.__version__} psislw", partial(psislw, normalize=False)  # weights as ours, which are not
