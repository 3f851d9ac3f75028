"""Cells to be compared: real cells of one kind split at random, halves of samples, and simulated donors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from vaerdict.de.calibration.halves import deal, kept_shares, sample_splits, thinned, true_lfc
from vaerdict.optional import isolated, require
from vaerdict_paper.mnist_data import find_data

PBMC, KANG, GLIOBLASTOMA = "pbmc3k", "kang_muscat_example", "glioblastoma_lemur_example"
_SOURCES = {
    PBMC: "10x Genomics (`scanpy.datasets.pbmc3k()`, with cell types)",
    KANG: "the example data of muscat",
    GLIOBLASTOMA: "the example data of lemur",
}

KINDS: dict[str, tuple[str, dict[str, str], str | None]] = {
    "PBMC 3k, naive CD4 T": (PBMC, {"cell_type": "Naive CD4 T"}, None),
    "PBMC 3k, B": (PBMC, {"cell_type": "B"}, None),
    "Kang, control CD14+ monocytes": (KANG, {"cell_type": "CD14+ Monocytes", "condition": "ctrl"}, "sample"),
}
"""Kinds of cells: their file, the labels that choose them, and the column that both sides have in equal parts."""

CONTROLS, PERMUTED = "control samples halved", "conditions permuted within patients"
GLIOMA, DONORS = "glioblastoma", "simulated donors"
N_GENES = 2000  # of simulated donors

Plant = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""Changes to plant, given the mean count of every gene. Shapes: ``(genes,) -> (genes,)``."""


class Split(NamedTuple):
    """Cells of two sides, of all genes; `samples` are the replicates where there are any, else the cells are.

    A sample with cells on both sides is a pair. `lfc` are the changes planted and `truth` those that resulted, on the
    scale of proportions.

    Shapes: ``counts (cells, genes)`` sparse, ``first, samples (cells,)``, ``lfc, truth (genes,)``.
    """

    counts: Any
    first: np.ndarray
    samples: np.ndarray | None
    lfc: np.ndarray
    truth: np.ndarray


def cells_of(kind: str) -> tuple[Any, np.ndarray]:
    """Counts ``(cells, genes)`` of a kind of `KINDS`, and the stratum of each cell ``(cells,)``."""
    name, labels, balance = KINDS[kind]
    adata = read_cells(name)
    chosen = np.all([adata.obs[key].astype(str) == value for key, value in labels.items()], axis=0)
    strata = np.full(adata.n_obs, "all") if balance is None else adata.obs[balance].astype(str).to_numpy()
    return sparse.csr_matrix(adata.X[chosen]), strata[chosen]


@lru_cache(maxsize=1)
def read_cells(name: str) -> Any:
    """The AnnData of a file of cells."""
    with isolated(0):
        return require("anndata", "bio").read_h5ad(find_data(f"scrna/{name}.h5ad", source=_SOURCES[name]))


# ------------------------------------------------------------------------------------------------------ splits
def split_cells(kind: str, design: str, rng: np.random.Generator, plant: Plant | None = None) -> Split:
    """Random sides of a kind of cells: ``20`` cells a side, ``all`` in halves, or ``1:9``.

    With `plant` changes are planted between them; their truth is that of all cells of the kind.
    """
    counts, strata = cells_of(kind)
    n, share = len(strata), 0.1 if design == "1:9" else 0.5
    chosen = rng.permutation(n)[: n if design in ("all", "1:9") else 2 * int(design)]
    first = deal(strata[chosen], rng, share)
    return _planted(counts, None, chosen, first, None, plant, rng)


def fits(kind: str, design: str) -> bool:
    """Whether there are enough cells for a design."""
    return design in ("all", "1:9") or 2 * int(design) <= len(cells_of(kind)[1])


def split_glioblastoma(design: str, seed: int) -> Split | None:
    """The control samples in halves, or the conditions exchanged in two of the five patients; None beyond the last."""
    adata = read_cells(GLIOBLASTOMA)
    control = (adata.obs["condition"] == "ctrl").to_numpy()
    patients = adata.obs["patient_id"].astype(str).to_numpy()  # each with one sample of either condition
    names = sorted(set(patients))
    halved = design == CONTROLS
    ways: list[Any] = list(combinations(names, 2))  # two exchanged of five leave the smallest part of the true change
    if halved:
        ways = sample_splits(dict.fromkeys(names, "all"), len(ways), np.random.default_rng(0))
    if seed >= len(ways):
        return None
    named = np.isin(patients, ways[seed])
    chosen, first = (control, named) if halved else (np.ones(len(named), dtype=bool), control ^ named)
    zero = np.zeros(adata.n_vars)
    return Split(sparse.csr_matrix(adata.X[chosen]), first[chosen], patients[chosen], zero, zero)


def split_donors(n: int, rng: np.random.Generator, plant: Plant | None = None) -> Split:
    """New simulated donors, n on each side."""
    counts, donor = simulated_donors(2 * n, rng)
    first = np.isin(donor, rng.permutation(2 * n)[:n])
    samples = np.array([f"donor {i}" for i in donor], dtype=object)
    return _planted(counts, samples, np.arange(len(donor)), first, samples, plant, rng)


def _planted(
    counts: Any,
    owners: np.ndarray | None,
    chosen: np.ndarray,
    first: np.ndarray,
    samples: np.ndarray | None,
    plant: Plant | None,
    rng: np.random.Generator,
) -> Split:
    """The chosen cells, with changes planted where they are given. Shapes: ``chosen, first, samples (chosen,)``."""
    zero = np.zeros(counts.shape[1])
    if plant is None:
        return Split(counts[chosen], first, samples, zero, zero)
    lfc = plant(np.asarray(counts.mean(0)).ravel(), rng)
    shares = kept_shares(lfc)
    thinner = thinned(counts[chosen], np.where(first, 0, 1), shares, rng)
    return Split(thinner, first, samples, lfc, true_lfc(counts, shares, owners, centred=False))


# ------------------------------------------------------------------------------------------------------ donors
def simulated_donors(n_donors: int, rng: np.random.Generator) -> tuple[Any, np.ndarray]:
    r"""Negative binomial cells of donors between whom genes vary, each gene by its own amount.

    Gene g has the proportion :math:`\mu_g \gamma_{dg}` in donor d, with log-normal :math:`\mu_g` as in blood cells and
    gamma donor effects of mean one, whose variance is drawn per gene (coefficients of variation of 0.08 to 0.5 for most
    genes). Cells are negative binomial around it with a dispersion per gene. Donors have 20 to 400 cells, and depths
    that differ.

    Shapes: ``counts (cells, N_GENES)`` sparse, ``donor (cells,)`` integers.
    """
    mean = np.exp(rng.normal(0.0, 1.6, N_GENES))
    mean /= mean.sum()
    donor_variance = np.exp(rng.normal(np.log(0.04), 0.9, N_GENES))
    shape = 1 / np.exp(rng.normal(np.log(0.3), 0.6, N_GENES))  # of the cells of one donor
    sizes = np.clip(np.exp(rng.normal(np.log(90), 0.8, n_donors)), 20, 400).astype(int)
    blocks = []
    for size in sizes:
        rate = mean * rng.gamma(1 / donor_variance, donor_variance)
        depth = 2500 * np.exp(rng.normal(0, 0.25)) * np.exp(rng.normal(0, 0.4, (size, 1)))
        blocks.append(sparse.csr_matrix(rng.poisson(depth * rate * rng.gamma(shape, 1 / shape, (size, N_GENES)))))
    return sparse.vstack(blocks, format="csr").astype(np.float32), np.repeat(np.arange(n_donors), sizes)
