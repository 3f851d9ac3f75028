"""Batched PSIS against arviz's loop over observations, on the same weights in the same run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vaerdict import diagnostics
from vaerdict.core import Progress, silent
from vaerdict.noise import seeded
from vaerdict.optional import require
from vaerdict_paper.benchmarks.timing import median_seconds

PACKAGES = ("arviz",)


def run(*, quick: bool = False, progress: Progress = silent) -> list[dict[str, Any]]:
    """One row per case: median seconds of ours and of the peer, their ratio and the largest difference of k-hat.

    The cases are `psis` (smoothed weights and k-hat) and `khat` alone, in two dtypes, on the CPU and on a CUDA device
    if there is one. The peer always computes `psis` in float64 on the CPU.
    """
    n, k, repeats = (200, 900, 2) if quick else (2000, 5000, 7)
    log_w = _weights(k, n)
    cases = [(name, device, dtype) for device in _devices() for dtype in _DTYPES for name in _CASES]
    progress(0, 1 + len(cases), "arviz")
    peer_s, peer_khat, peer = _time_arviz(log_w, repeats)
    rows = []
    for done, (name, device, dtype) in enumerate(cases):
        progress(1 + done, 1 + len(cases), f"{name} on {device}")
        ours_s, khat = _time_ours(_CASES[name], log_w.to(device, dtype), repeats)
        rows.append(
            {
                "case": f"{name} {n}x{k}",
                "device": _device_name(device),
                "dtype": str(dtype).removeprefix("torch."),
                "ours_s": ours_s,
                "peer": peer,
                "peer_s": peer_s,
                "ratio": peer_s / ours_s,
                "max_khat_difference": (khat - peer_khat).abs().max().item(),
            }
        )
    progress(1 + len(cases), 1 + len(cases), "done")
    return rows


_DTYPES = (torch.float64, torch.float32)
_CASES: dict[str, Callable[[Tensor], Tensor]] = {"psis": lambda w: diagnostics.psis(w)[1], "khat": diagnostics.khat}


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _weights(k: int, n: int) -> Tensor:
    """Log-weights of N(0, 1) under N(0, s^2) with s^2 from 0.3 to 1.2: k from 0.7 down to none. Shapes: ``(K, n)``."""
    variance = torch.linspace(0.3, 1.2, n, dtype=torch.float64)
    noise = torch.randn(k, n, generator=seeded(0), dtype=torch.float64)
    return 0.5 * (1 - variance) * noise.square()


def _time_ours(work: Callable[[Tensor], Tensor], log_w: Tensor, repeats: int) -> tuple[float, Tensor]:
    def finished() -> Tensor:
        return work(log_w).cpu()  # waits for the device

    return median_seconds(finished, repeats), finished()


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
    return f"arviz {arviz.__version__} psislw", psislw


def _time_arviz(log_w: Tensor, repeats: int) -> tuple[float, Tensor, str]:
    """Seconds, k-hat and name of the peer, in the memory layout that is fastest for it."""
    name, psis = arviz_psis()
    rows = log_w.t().contiguous().numpy()
    seconds = median_seconds(lambda: psis(rows), min(repeats, 3))
    return seconds, torch.as_tensor(psis(rows)[1]), name
