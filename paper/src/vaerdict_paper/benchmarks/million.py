r"""A million cells, or as many as asked for: training epochs on all of them, and differential expression in blocks.

Counts of two groups are simulated on the device and lie there as sparse rows; dense are a batch or a block of cells:

.. math:: x_{ng} \sim \mathrm{NB}\bigl(\ell_n \rho_{ng}, r_g\bigr), \qquad
          \rho_{n} \propto \exp\bigl(b + W u_n + \log 2\; a_n \beta\bigr), \qquad u_n \sim N(0, I),

with :math:`a_n` the group. One gene in five has a true log2 fold change :math:`\beta_g \sim N(0, 1)`, the others none;
a gene is differentially expressed where :math:`|\beta_g| \ge 0.5`. There are no refits: the model's own error is not in
the intervals, and what it does to the false discoveries is what ``fdp`` shows. Timed apart is the pass over the counts
that decides in `vaerdict de` (`vaerdict.de.counts_likelihood`); what follows it no longer depends on the
number of cells.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict.core import Progress, check_count, silent
from vaerdict.de import Compared, compare, streamed
from vaerdict.de.counts_likelihood import count_law, raw_shares
from vaerdict.de.metrics import measure
from vaerdict.models.counts import CountModel
from vaerdict.noise import seeded
from vaerdict.proposals import Normal, OfCounts
from vaerdict.training import IWAE, Fit, Member, Settings, train
from vaerdict.training.data import Resident

DELTA, LEVEL = 0.5, 0.05
LATENTS, HIDDEN = 10, (128,)
N_DRAWS = 50
"""Particles of a cell and joint draws of the groups: fewer than `vaerdict de` takes, many cells needing fewer."""

_LIBRARY, _FACTORS, _CHANGED = 500.0, 5, 0.2
_HELD_OUT, _START = 500, 5000  # cells that score, and that networks are started from
_BLOCK = 2**23  # counts simulated at a time
_BATCH = {"cpu": 128, "cuda": 2048}


class Simulated(NamedTuple):
    """Cells of two groups in turn, and the true log2 fold changes of the second over the first.

    Shapes: ``rows (cells, genes)``, ``lfc (genes,)``.
    """

    rows: Resident
    lfc: Tensor


def run(*, quick: bool = False, progress: Progress = silent) -> list[dict[str, Any]]:
    """One row: a million cells on a GPU, a hundred thousand on a CPU, with a thousand genes each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if quick:
        return [measured(2000, 100, epochs=2, device=device, progress=progress)]
    n_cells = 1_000_000 if device == "cuda" else 100_000
    return [measured(n_cells, 1000, epochs=2, device=device, progress=progress)]


def measured(
    n_cells: int,
    n_genes: int,
    *,
    epochs: int,
    device: torch.device | str,
    n_draws: int = N_DRAWS,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Simulate, train on all cells, compare the groups; seconds, peak memory and how right the answer is."""
    device, seconds = torch.device(device), dict[str, float]()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with _timed("seconds_simulation", seconds, device):
        data = simulate(n_cells, n_genes, device=device, seed=seed)
        held_out = simulate(_HELD_OUT, n_genes, device=device, seed=seed, first=n_cells)
    with _timed("seconds_training", seconds, device):
        fit = _fit(data.rows, held_out.rows, epochs, device, seed, progress)
    with _timed("seconds_de", seconds, device):
        found = _compared(fit, data.rows, n_draws, seed, progress)
    with _timed("seconds_counts", seconds, device):
        shares = raw_shares(data.rows, n_genes, _groups(n_cells))
        count_law([(shares["b"], shares["a"])])
    table, support = found.contrasts["b", "a"].table, found.support["a"]
    metrics = measure(table["prob_de"], table["lfc_mean"], data.lfc.cpu(), DELTA)
    return {
        "cells": n_cells,
        "genes": n_genes,
        "device": device.type,
        "epochs": epochs,
        "draws": n_draws,
        "batch_size": _BATCH.get(device.type, _BATCH["cpu"]),
        **seconds,
        "seconds_per_epoch": fit.seconds / epochs,
        "nonzero_share": len(data.rows.values) / (n_cells * n_genes),
        "peak_host_gb": _peak_host(),
        "peak_device_gb": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
        "khat": support.khat,
        "share_ok": support.share_ok,
        "n_true": metrics["n_true"],
        "n_discoveries": int(table["is_de"].sum()),
        "fdp": metrics["fdp"],
        "tpr": metrics["tpr"],
        "fdr_mae": metrics["fdr_mae"],
    }


def simulate(n_cells: int, n_genes: int, *, device: torch.device, seed: int, first: int = 0) -> Simulated:
    """Sparse counts of cells, the `first` one being of that number; the genes are those of the seed."""
    check_count(n_cells, name="n_cells")
    check_count(n_genes, name="n_genes")
    genes = seeded(seed)
    level, loading = torch.randn(n_genes, generator=genes), 0.4 * torch.randn(_FACTORS, n_genes, generator=genes)
    changed = torch.rand(n_genes, generator=genes) < _CHANGED
    lfc = torch.where(changed, torch.randn(n_genes, generator=genes), 0)
    dispersion = 2 * torch.exp(0.5 * torch.randn(n_genes, generator=genes))
    at = [t.to(device) for t in (level, loading, lfc, dispersion)]
    generator = seeded(seed + 1 + first, device)
    blocks = torch.arange(first, first + n_cells, device=device).split(max(1, _BLOCK // n_genes))
    parts = [_sparse(_counts(cells % 2, *at, generator=generator)) for cells in blocks]
    values, columns, lengths = (torch.cat(column) for column in zip(*parts, strict=True))
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return Simulated(Resident(values, columns, starts, n_genes), lfc)


def _counts(
    group: Tensor, level: Tensor, loading: Tensor, lfc: Tensor, dispersion: Tensor, *, generator: torch.Generator
) -> Tensor:
    """Counts of some cells, none without any. Shapes: ``group (c,) -> (c, genes)``."""
    n, how = len(group), {"generator": generator, "device": group.device}
    logits = level + torch.randn(n, _FACTORS, **how) @ loading + group[:, None] * lfc * torch.log(torch.tensor(2.0))
    library = _LIBRARY * torch.exp(0.3 * torch.randn(n, 1, **how))
    rate = library * logits.softmax(-1)
    shape = dispersion.expand_as(rate).contiguous()
    x = torch.poisson(rate * torch._standard_gamma(shape, generator=generator) / dispersion, generator=generator)
    x[:, 0] += x.sum(-1) == 0
    return x


def _sparse(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, columns and lengths of the rows. Shapes: ``(c, genes) -> (nnz,), (nnz,), (c,)``."""
    row, column = x.nonzero(as_tuple=True)
    return x[row, column], column.int(), torch.bincount(row, minlength=len(x))


def _fit(rows: Resident, held_out: Resident, epochs: int, device: torch.device, seed: int, progress: Progress) -> Fit:
    """A count model trained on all cells by the recipe of `vaerdict de`, for a fixed number of epochs."""
    generator, some = seeded(seed), rows.take(torch.arange(min(_START, rows.n), device=device))
    model = CountModel.start(some, LATENTS, generator=generator, hidden=HIDDEN)
    encoder = OfCounts(Normal()).make(some, LATENTS, hidden=HIDDEN, generator=generator)
    settings = Settings(
        n_particles=5,
        epochs=epochs,
        batch_size=_BATCH.get(device.type, _BATCH["cpu"]),
        lr_theta=3e-3,
        lr_phi=3e-3,
        patience=None,
        check_every=epochs,
        joint=True,
        graphs=True,
    )
    return train([Member(model, encoder, IWAE, seed)], rows, held_out, settings, device=device, progress=progress)[0]


def _compared(fit: Fit, rows: Resident, n_draws: int, seed: int, progress: Progress) -> Compared:
    """The second group over the first: modes of all cells, means of the groups, then particles and averages."""
    model: Any = fit.model
    posterior = streamed(model, rows, fit.proposal, labels=torch.arange(rows.n) % 2, progress=progress)
    how: Any = {"delta": DELTA, "level": LEVEL, "n_draws": n_draws, "seed": seed, "progress": progress}
    return compare(posterior, _groups(rows.n), [("b", "a")], **how)


def _groups(n_cells: int) -> dict[str, Tensor]:
    """Every second cell is of the second group. Shapes: ``(cells,)`` each."""
    return {name: torch.arange(first, n_cells, 2) for first, name in enumerate("ab")}


@contextmanager
def _timed(stage: str, seconds: dict[str, float], device: torch.device) -> Iterator[None]:
    started = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds[stage] = time.perf_counter() - started


def _peak_host() -> float:
    """The most memory that this process has had since it began, in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
