"""Sums over groups of cells: the same as from all counts at once, however they are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import sparse

from checks import assert_mean
from de_toys import LIBRARY, cells, group_sums
from vaerdict.de.sums import CellGroups, CountSums
from vaerdict.noise import seeded

CELLS, GENES = 50, 7


@pytest.fixture(scope="module")
def matrix() -> np.ndarray:
    counts = np.random.default_rng(0).poisson(0.8, size=(CELLS, GENES)).astype(np.float64)
    counts[9] = 0  # a cell without counts
    counts[:, 3] = 0  # a gene without
    return counts


MEMBERS = {
    "some": np.arange(0, 30),
    "others": np.arange(20, 45),  # overlaps
    "of some": np.arange(5, 12),
    "none": np.zeros(0, dtype=int),
    "all": np.arange(CELLS),
}


def scanned(matrix: np.ndarray, size: int) -> CountSums[str]:
    blocks = (sparse.csr_matrix(matrix[start : start + size]) for start in range(0, CELLS, size))
    return CellGroups(MEMBERS, CELLS).sums(blocks, GENES)


@pytest.mark.parametrize("size", [1, 7, CELLS])
def test_sums_are_those_of_the_cells_of_each_group(matrix, size):
    sums = scanned(matrix, size)
    for name, rows in MEMBERS.items():
        x = torch.from_numpy(matrix[rows])
        expected = group_sums(x, x.sum(1))
        for part, value in zip(sums[name][:-1], expected[:-1], strict=True):
            assert torch.equal(part, value), name
        assert sums[name].n_cells == sums.n_cells(name) == int((x.sum(1) > 0).sum())
    assert "some" in sums
    assert "somebody" not in sums


def test_no_group_at_all_is_no_error(matrix):
    assert CellGroups({}, CELLS).sums([sparse.csr_matrix(matrix)], GENES).sums.sum(1)[0].tolist() == (
        matrix.sum(0).tolist()
    )


def test_crossed_sums_take_libraries_from_elsewhere(matrix):
    """Counts that were scaled have no library of their own."""
    library = np.random.default_rng(1).uniform(1, 2, CELLS)
    apart = {"first": np.arange(20), "second": np.arange(20, 45)}
    blocks = (sparse.csr_matrix(matrix[start : start + 8]) for start in range(0, CELLS, 8))
    crossed = CellGroups(apart, CELLS).crossed(blocks, library, GENES)
    for name, rows in apart.items():
        np.testing.assert_allclose(crossed[name].numpy(), library[rows] @ matrix[rows], rtol=1e-12)


def test_some_genes_are_taken_with_the_libraries_of_all(matrix):
    sums, genes = scanned(matrix, 7)["some"], torch.tensor([4, 1])
    part = sums.take(genes)
    assert torch.equal(part.rate, sums.rate[genes])
    assert torch.equal(part.deviations, sums.deviations[genes])
    assert part.library == sums.library
    adjusted = sums._replace(library=sums.library.expand(GENES) + torch.arange(GENES))
    assert torch.equal(adjusted.take(genes).library, adjusted.library[genes])


def test_squared_deviations_are_unbiased():
    """Of negative binomial counts in three cells of unequal libraries; false alarms at a rate of 1e-6."""
    rate, alpha = torch.full((20_000,), 1.5 / LIBRARY, dtype=torch.float64), torch.full((20_000,), 0.4).double()
    sums = cells(seeded(3), rate, 3, alpha)
    expected = float(1.5 / LIBRARY * sums.library + 0.4 * (1.5 / LIBRARY) ** 2 * sums.library_squares)
    assert_mean(sums.deviations, expected, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(sums.deviations * 2 / 3, expected, rate=1e-6)  # without n / (n - 1)
