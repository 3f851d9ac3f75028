"""Tables with classes, and the problem of a hidden class: few labels, unlabelled rows and query rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from vaerdict.optional import require
from vaerdict_paper.mnist_data import find_data, mnist

DIGITS, WINE, CANCER, PBMC, MNIST = "digits", "wine", "breast cancer", "PBMC 3k, 30 PCs", "MNIST"


class Design(NamedTuple):
    """Rows of training and query, and the numbers of labels in training; ``classes`` of the table."""

    n_train: int
    n_query: int
    labels: tuple[int, ...]
    classes: int


DESIGNS = {
    DIGITS: Design(1197, 600, (200, 600), 10),
    WINE: Design(119, 59, (60,), 3),
    CANCER: Design(379, 190, (100,), 2),
    PBMC: Design(1758, 880, (60, 600), 9),
    MNIST: Design(3000, 1000, (500,), 10),
}

_GENES, _COMPONENTS = 2000, 30  # variable genes and principal components of PBMC
_IMAGES = 20_000  # of MNIST, from which seeds draw


class Problem(NamedTuple):
    """Labelled rows of all classes but the hidden one, unlabelled rows of all classes, and query rows to be judged.

    Rows are in random order, and standardised unless all features lie in [0, 1], as by `vaerdict.SelectiveClassifier`.
    The unlabelled rows alone set the scale, so that it treats labelled and query rows alike.

    Shapes: ``labelled (n, d)``, ``classes (n,)`` codes, ``unlabelled (u, d)``, ``query (m, d)``, ``hidden (m,)`` bool.
    """

    labelled: np.ndarray
    classes: np.ndarray
    unlabelled: np.ndarray
    query: np.ndarray
    hidden: np.ndarray
    seed: int


class Answer(NamedTuple):
    """Novelty of the query rows, which of them are called, and the rule that calls them. Shapes: ``(m,)``, ``(m,)``."""

    score: np.ndarray
    called: np.ndarray
    rule: str


def problem(data: str, n_labels: int, hidden: int, seed: int) -> Problem:
    """Hide one class of a table; rows and labels are drawn without regard to the other classes."""
    x, y, _ = table(data)
    design = DESIGNS[data]
    rng = np.random.default_rng([seed, hidden, n_labels, *data.encode()])
    train, query = np.split(rng.permutation(len(x))[: design.n_train + design.n_query], [design.n_train])
    labelled = train[y[train] != hidden][:n_labels]
    unlabelled = rng.permutation(np.setdiff1d(train, labelled))
    center, spread = _scaling(x[unlabelled]) if x.min() < 0 or x.max() > 1 else (0.0, 1.0)
    rows = [(x[i] - center) / spread for i in (labelled, unlabelled, query)]
    return Problem(rows[0], y[labelled], rows[1], rows[2], y[query] == hidden, seed)


def _scaling(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    spread = x.std(0)
    return x.mean(0), np.where(spread > 0, spread, 1.0)


@lru_cache(maxsize=1)
def table(data: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Features, class codes and names of classes. Shapes: ``(n, d), (n,)``."""
    if data == PBMC:
        return _pbmc()
    if data == MNIST:
        images = mnist()
        return images.x_train[:_IMAGES].double().numpy(), images.y_train[:_IMAGES].numpy(), list("0123456789")
    load = {DIGITS: "load_digits", WINE: "load_wine", CANCER: "load_breast_cancer"}[data]
    loaded = getattr(require("sklearn.datasets", "sklearn"), load)()
    x = loaded.data / 16 if data == DIGITS else loaded.data
    return x, loaded.target, [str(name) for name in loaded.target_names]


def _pbmc() -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Principal components of the log-normalised counts of the most variable genes; unassigned cells are dropped."""
    path = find_data("scrna/pbmc3k.h5ad", source="10x Genomics (`scanpy.datasets.pbmc3k()`, with cell types)")
    with require("h5py", "bio").File(path) as file:
        counts, types = _counts(file["X"]), _categories(file["obs/cell_type"])
    chosen = types != "unassigned"
    counts, types = counts[chosen], types[chosen]
    logs = sparse.diags(1e4 / np.asarray(counts.sum(1)).ravel()) @ counts
    logs.data = np.log1p(logs.data)
    variance = np.asarray(logs.multiply(logs).mean(0) - np.square(logs.mean(0))).ravel()
    dense = logs[:, np.argsort(-variance, kind="stable")[:_GENES]].toarray()
    pca = require("sklearn.decomposition", "sklearn").PCA(_COMPONENTS, random_state=0)
    names, codes = np.unique(types, return_inverse=True)
    return pca.fit_transform(dense), codes, names.tolist()


def _counts(group: Any) -> sparse.csr_matrix:
    """The matrix X of an h5ad file, read without anndata."""
    if "data" not in group:
        return sparse.csr_matrix(group[:], dtype=np.float64)
    made = sparse.csr_matrix if group.attrs["encoding-type"] == "csr_matrix" else sparse.csc_matrix
    parts = group["data"][:].astype(np.float64), group["indices"][:], group["indptr"][:]
    return sparse.csr_matrix(made(parts, shape=tuple(group.attrs["shape"])))


def _categories(group: Any) -> np.ndarray:
    """A categorical column of an h5ad file as strings."""
    return group["categories"].asstr()[:].astype(str)[group["codes"][:]]
