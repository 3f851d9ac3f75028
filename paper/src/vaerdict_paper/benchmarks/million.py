r"""A million cells: training epochs on all of them, and the model stage of differential expression in blocks.

Counts of two groups are simulated and stored on the device as sparse rows; only a batch or block of cells is dense:

.. math:: x_{ng} \sim \mathrm{NB}\bigl(\ell_n \rho_{ng}, r_g\bigr), \qquad
          \rho_{n} \propto \exp\bigl(b + W u_n + \log 2\; a_n \beta\bigr), \qquad u_n \sim N(0, I),

with :math:`a_n` the group. One gene in five has a true log2 fold change :math:`\beta_g \sim N(0, 1)`, the others none;
a gene is differentially expressed if :math:`|\beta_g| \ge 0.5`. There are no refits, so the intervals leave out the
error of the model; ``fdp`` shows its effect. ``seconds_de`` is the time of the model stage. The pass over the counts by
which `vaerdict de` calls genes by default (`vaerdict.de.counts_likelihood`) is timed separately as ``seconds_counts``;
the steps after it do not depend on the number of cells.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from scipy import sparse
from torch import Tensor

from vaerdict import diagnostics
from vaerdict.core import Progress, check_count, silent
from vaerdict.de.counts_likelihood import cells_likelihood
from vaerdict.de.metrics import measure
from vaerdict.de.model import streamed
from vaerdict.de.sums import CellGroups
from vaerdict.models.counts import CountModel
from vaerdict.noise import seeded
from vaerdict.proposals import Normal, OfCounts
from vaerdict.training import IWAE, Fit, Member, Settings, train
from vaerdict.training.data import DeviceRows
from vaerdict_paper.benchmarks.timing import peak_gib
from vaerdict_paper.experiments.genes_contrasts import GroupComparison, compare_groups

DELTA, LEVEL = 0.5, 0.05
LATENTS, HIDDEN = 10, (128,)
N_DRAWS = 50
"""Particles per cell and joint draws of the groups: fewer than in `vaerdict de`, because there are many cells."""

_LIBRARY, _FACTORS, _CHANGED = 500.0, 5, 0.2
_HELD_OUT, _START = 500, 5000  # cells for scoring, and for initialising the networks
_BLOCK = 2**23  # counts simulated at a time
_BATCH = {"cpu": 128, "cuda": 2048}


class Simulated(NamedTuple):
    """Cells of two alternating groups, and the true log2 fold changes of the second over the first.

    Shapes: ``rows (cells, genes)``, ``lfc (genes,)``.
    """

    rows: DeviceRows
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
    """Simulate, train on all cells, compare the groups; seconds, peak memory and accuracy.

    Parameters
    ----------
    n_cells, n_genes
        The size of the data.
    epochs
        Epochs of training.
    device
        Where to compute.
    n_draws
        Particles per cell and joint draws.
    seed
        The seed of data and training.
    progress
        Called during training and inference.
    """
    device, seconds = torch.device(device), dict[str, float]()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with _timed("seconds_simulation", seconds, device):
        data = simulate(n_cells, n_genes, device=device, seed=seed)
        held_out = simulate(_HELD_OUT, n_genes, device=device, seed=seed, first=n_cells)
    with _timed("seconds_training", seconds, device):
        fit = _fit(data.rows, held_out.rows, epochs, device, seed, progress)
    with _timed("seconds_de", seconds, device):
        table, averages = _compared(fit, data.rows, n_draws, seed, progress)
    with _timed("seconds_counts", seconds, device):
        groups = CellGroups({name: cells.numpy() for name, cells in zip("ab", _groups(n_cells), strict=True)}, n_cells)
        sums = groups.sums(_blocks(data.rows), n_genes)
        cells_likelihood([(sums["b"], sums["a"])])
    khat, ess = (values[_groups(n_cells)[0]] for values in (averages.khat, averages.ess))
    ok = diagnostics.verdict(khat, ess, n_draws) == diagnostics.Verdict.OK
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
        "peak_host_gb": peak_gib(),
        "peak_device_gb": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
        "khat": khat.nanmedian().item(),
        "share_ok": ok.double().mean().item(),
        "n_true": metrics["n_true"],
        "n_discoveries": int(table["is_de"].sum()),
        "fdp": metrics["fdp"],
        "tpr": metrics["tpr"],
        "fdr_mae": metrics["fdr_mae"],
    }


def simulate(n_cells: int, n_genes: int, *, device: torch.device, seed: int, first: int = 0) -> Simulated:
    """Sparse counts of the cells from number `first` on; the genes are those of the seed."""
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
    return Simulated(DeviceRows(values, columns, starts, n_genes), lfc)


def _counts(
    group: Tensor, level: Tensor, loading: Tensor, lfc: Tensor, dispersion: Tensor, *, generator: torch.Generator
) -> Tensor:
    """Counts of cells, at least one count per cell. Shapes: ``group (c,) -> (c, genes)``."""
    n, options = len(group), {"generator": generator, "device": group.device}
    logits = level + torch.randn(n, _FACTORS, **options) @ loading + group[:, None] * lfc * torch.log(torch.tensor(2.0))
    library = _LIBRARY * torch.exp(0.3 * torch.randn(n, 1, **options))
    rate = library * logits.softmax(-1)
    shape = dispersion.expand_as(rate).contiguous()
    x = torch.poisson(rate * torch._standard_gamma(shape, generator=generator) / dispersion, generator=generator)
    x[:, 0] += x.sum(-1) == 0
    return x


def _sparse(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, columns and lengths of the rows. Shapes: ``(c, genes) -> (nnz,), (nnz,), (c,)``."""
    row, column = x.nonzero(as_tuple=True)
    return x[row, column], column.int(), torch.bincount(row, minlength=len(x))


def _fit(
    rows: DeviceRows, held_out: DeviceRows, epochs: int, device: torch.device, seed: int, progress: Progress
) -> Fit:
    """A count model trained on all cells by the recipe of `vaerdict de`, for a fixed number of epochs."""
    generator, sample = seeded(seed), rows.take(torch.arange(min(_START, rows.n), device=device))
    model = CountModel.start(sample, LATENTS, generator=generator, hidden=HIDDEN)
    encoder = OfCounts(Normal()).make(sample, LATENTS, hidden=HIDDEN, generator=generator)
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


def _compared(fit: Fit, rows: DeviceRows, n_draws: int, seed: int, progress: Progress) -> GroupComparison:
    """The second group over the first: modes of all cells, means of the groups, then particles and averages."""
    model: Any = fit.model
    posterior = streamed(model, rows, fit.proposal, labels=torch.arange(rows.n) % 2, progress=progress)
    first, second = _groups(rows.n)
    return compare_groups(
        posterior, second, first, delta=DELTA, level=LEVEL, n_draws=n_draws, seed=seed, progress=progress
    )


def _groups(n_cells: int) -> tuple[Tensor, Tensor]:
    """The cells of each group, which alternate. Shapes: ``(cells,)`` each."""
    return torch.arange(0, n_cells, 2), torch.arange(1, n_cells, 2)


def _blocks(rows: DeviceRows) -> Iterator[Any]:
    """The counts, some cells at a time. Shapes: ``-> (c, genes)``, sparse rows."""
    size = max(1, _BLOCK // rows.width)
    for first in range(0, rows.n, size):
        starts = rows.starts[first : first + size + 1].cpu()
        entries = slice(int(starts[0]), int(starts[-1]))
        values, columns = rows.values[entries].cpu().double().numpy(), rows.columns[entries].cpu().numpy()
        yield sparse.csr_matrix((values, columns, (starts - starts[0]).numpy()), shape=(len(starts) - 1, rows.width))


@contextmanager
def _timed(stage: str, seconds: dict[str, float], device: torch.device) -> Iterator[None]:
    started = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds[stage] = time.perf_counter() - started
