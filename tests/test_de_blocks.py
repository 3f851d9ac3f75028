"""Cells in blocks: the same answer from memory and disk, by any engine and block, and never all of them dense."""

from __future__ import annotations

import importlib.util
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import Tensor

from checks import Largest
from vaerdict.datasets import appendix
from vaerdict.de import analysis, data, differential_expression
from vaerdict.de import model as de
from vaerdict.de.model import checks, fitting, stage
from vaerdict.de.model.posterior import find_modes
from vaerdict.engines import Engine, Local, Ray, Threads
from vaerdict.models import CountModel
from vaerdict.noise import seeded
from vaerdict.proposals import OfCounts
from vaerdict.training.data import DeviceRows, Rows, SharedRows, SparseRows

CPU = torch.device("cpu")
CELLS, GENES = 90, 25


@pytest.fixture(scope="module")
def counts() -> Tensor:
    return appendix(0, n_cells=CELLS, n_genes=GENES).counts


@pytest.fixture(scope="module")
def model(counts) -> tuple[CountModel, Any]:
    """Untrained, with a decoder that spreads: what a posterior is of does not matter here."""
    start = CountModel.start(counts, 3, generator=seeded(0), hidden=(8,))
    return start, OfCounts().make(counts, 3, hidden=(8,), generator=seeded(1))


def averaged(model: Any, rows: Rows, **how: Any) -> de.Averages:
    labels = torch.arange(CELLS) % 3 - 1  # a third of the cells is in no group
    first = {key: how.get(key) for key in ("block", "engine")}
    posterior = de.streamed(model[0], rows, model[1], labels=labels, **first)
    groups = {"a": de.Population(torch.arange(0, 40)), "b": de.Population(torch.arange(30, 80), de.Equal())}
    return de.averages(posterior, groups, 50, seed=1, **how)


@pytest.fixture(scope="module")
def answer(model, counts) -> de.Averages:
    return averaged(model, SharedRows(counts), engine=Threads(1), block=32)


def close(one: de.Averages, other: de.Averages, **tolerance: float) -> None:
    for name in ("a", "b"):
        torch.testing.assert_close(one.expression[name], other.expression[name], **tolerance)
    for a, b in zip(one[1:], other[1:], strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)


@pytest.mark.parametrize("block", [7, 90])
def test_blocks_change_nothing_but_rounding(model, counts, answer, block):
    """Which now and then makes a draw take a neighbouring particle."""
    found = averaged(model, SharedRows(counts), block=block, chunk=1000)
    for name, values in found.expression.items():
        assert ((values / answer.expression[name] - 1).abs() < 1e-3).double().mean() > 0.95
        torch.testing.assert_close(values.mean(0), answer.expression[name].mean(0), rtol=1e-3, atol=1e-5)
    for a, b in zip(found[1:], answer[1:], strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        # modes are found to 1e-6 nats, and k-hat of so few draws hangs on every one of the largest weights
        assert torch.isclose(a, b, equal_nan=True, rtol=0.05, atol=0.05).double().mean() > 0.95
        torch.testing.assert_close(a.nanmedian(), b.nanmedian(), rtol=0.01, atol=0.01)
    assert answer.khat[:80].isfinite().all()
    assert answer.latent[80:].isnan().all()


@pytest.mark.parametrize("engine", [Threads(3), Local(2)], ids=["threads", "processes"])
def test_engines_agree_to_the_last_bit(model, counts, answer, engine: Engine):
    close(averaged(model, SharedRows(counts), engine=engine, block=32), answer, rtol=0, atol=0)


KINDS = {
    "sparse": lambda x: SparseRows(sparse.csr_matrix(x.numpy()), CPU),
    "resident": lambda x: DeviceRows.from_matrix(sparse.csr_matrix(x.numpy()), CPU),
}


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_rows_are_dense_ones(model, counts, answer, kind):
    close(averaged(model, KINDS[kind](counts), engine=Threads(1), block=32), answer, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_taken_in_any_order_and_selected(counts, kind):
    rows = KINDS[kind](counts)
    index = torch.tensor([5, 0, 5, 89])
    assert (rows.n, rows.device) == (CELLS, CPU)
    assert torch.equal(rows.take(index), counts[index])
    assert torch.equal(rows.take(index.reshape(2, 2)), counts[index].reshape(2, 2, GENES))
    assert torch.equal(rows.select(index).take(torch.arange(4)), counts[index])
    assert torch.equal(rows.block(slice(3, 9)), counts[3:9])


def test_refined_at_once_is_refined_in_blocks(model, counts):
    labels = torch.arange(CELLS) % 2
    whole = de.refined(model[0], counts, model[1], labels=labels)
    parts = de.streamed(model[0], SharedRows(counts), model[1], labels=labels, block=40)
    mine = torch.arange(20, 60)
    some, same = parts.select(mine).proposed, whole.select(mine)
    torch.testing.assert_close(some.means.mean, same.means.mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(some.means.root, same.means.root, rtol=1e-2, atol=1e-3)
    z = whole.proposal.draw(counts, 30, generator=seeded(0)).z[:, mine]
    expected = same.proposal.log_prob(z, same.x)
    torch.testing.assert_close(some.proposal.log_prob(z, some.x), expected, rtol=1e-3, atol=1e-2)


def test_locations_to_start_from_are_those_of_the_cells(model, counts):
    start = 0.1 * torch.randn(CELLS, 3, generator=seeded(3))
    found = find_modes(model[0], SharedRows(counts), start, block=30)
    torch.testing.assert_close(found.loc, find_modes(model[0], SharedRows(counts), start).loc, rtol=1e-2, atol=1e-3)


# ------------------------------------------------------------------------------------------------ from file to table
ad = pytest.importorskip("anndata")
simulated = pytest.importorskip("test_de_pipeline").simulated
TINY = {"quick": True, "n_draws": 60, "check_model": True}


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    adata = simulated(n=330)
    adata.X = sparse.csr_matrix(adata.X)
    adata.write_h5ad(path := tmp_path_factory.mktemp("stored") / "a.h5ad")
    return path


@pytest.fixture(scope="module")
def table(stored) -> bytes:
    return written(stored)


def written(stored: Path, engine: Engine | None = None, **options: Any) -> bytes:
    found = differential_expression(stored, "group", "A", engine=engine, batch_key="batch", **TINY, **options)
    return found.table.to_csv().encode()


def test_a_file_that_is_read_again_gives_the_same_table(stored, table, monkeypatch):
    monkeypatch.setattr(data, "MEMORY", 0)
    assert written(stored, Threads(1)) == table


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'vaerdict[ray]'")
@pytest.mark.filterwarnings("ignore:.*accelerator visible devices:FutureWarning", "ignore::ResourceWarning")
def test_ray_gives_the_same_table(stored, table, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    assert written(stored, Ray(workers=2)) == table


def test_no_tensor_grows_with_the_cells(monkeypatch):
    """With as many cells to train on, three times as many cells make no larger tensor."""
    for module in (fitting, stage):
        monkeypatch.setattr(module, "MOST_TRAINING", 120)
        monkeypatch.setattr(module, "SCORED", 30)
    monkeypatch.setitem(data._BLOCK, "cpu", 64)
    monkeypatch.setattr(checks, "_CELLS", 30)
    monkeypatch.setattr(analysis, "OTHER_CELLS", 0)
    sizes = []
    for n in (150, 450):
        with Largest() as seen:
            differential_expression(
                simulated(n=n), "group", "A", engine=Threads(1), quick=True, check_model=True, n_draws=40
            )
        sizes.append(seen.numel)
    assert sizes[1] < 1.3 * sizes[0]  # one is of the non-zero counts of a batch


def test_reading_a_large_file_keeps_a_block_of_it(tmp_path, monkeypatch):
    """Of 20,000 cells and 500 genes, 16 MB of counts, no more than some blocks are in memory."""
    n, genes, rng = 20_000, 500, np.random.default_rng(0)
    counts: Any = sparse.random(n, genes, 0.2, format="csr", dtype=np.float32, random_state=rng)
    counts.data[:] = 1 + rng.integers(5, size=len(counts.data))
    ad.AnnData(counts).write_h5ad(tmp_path / "large.h5ad")
    peaks = {}
    for held in (0, 2**30):
        monkeypatch.setattr(data, "MEMORY", held)
        adata = data.open_data(tmp_path / "large.h5ad")
        tracemalloc.start()
        found = data.read_counts(adata, np.arange(n), np.arange(genes))
        peaks[held] = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        assert len(found.cells) == n
    assert peaks[0] < 15
    assert peaks[2**30] > 30
