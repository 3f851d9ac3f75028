r"""Halves of one group of cells, and known changes put between them.

Counts stay counts: to make gene g larger by :math:`2^{L_g}` in the first half, those of the second are thinned, each
molecule kept with probability :math:`2^{-L_g}`, and for a negative :math:`L_g` those of the first. Thinning keeps the
dispersion of a gene, and takes molecules out of a cell, so that its library shrinks as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vaerdict.core import SettingError

PATTERN = (0.0,) * 13 + (0.5, 0.9, 1.1, 1.5, 1.5, 2.0, 4.0)
"""True |LFC| of every twenty genes of like expression, in multiples of delta: most unchanged, some by too little."""

_TRIES = 100  # random draws for each split wanted, before the distinct ones are taken for all there are


def deal(strata: np.ndarray, rng: np.random.Generator, share: float = 0.5) -> np.ndarray:
    """Which items go to the first half: at random, but evenly in each stratum and over all, as cards are dealt.

    A `share` other than a half makes the first part smaller, or larger. Shapes: ``(n,) -> (n,)`` bool.
    """
    number = np.unique(strata.astype(str), return_inverse=True)[1]
    place = rng.permutation(int(number.max(initial=0)) + 1)[number]
    order = rng.permutation(len(strata))
    order = order[np.argsort(place[order], kind="stable")]
    first = np.zeros(len(strata), dtype=bool)
    count = np.ceil(share * np.arange(len(strata) + 1) - 1e-9)
    first[order[np.diff(count) > 0]] = True
    return first


def sample_splits(strata: Mapping[str, str], n: int, rng: np.random.Generator) -> list[list[str]]:
    """At most n different ways to halve samples, evenly in their strata; each the half that holds the first name.

    Which half is called the first makes no difference, so that four samples have three splits and six have ten.
    """
    names = sorted(strata)
    labels = np.array([strata[name] for name in names], dtype=object)
    found: dict[tuple[str, ...], None] = {}
    for _ in range(_TRIES * n):
        first = deal(labels, rng)
        found[tuple(name for name, mine in zip(names, first, strict=True) if mine == first[0])] = None
        if len(found) == n:
            break
    return [list(split) for split in found]


def planted(expression: np.ndarray, delta: float, rng: np.random.Generator) -> np.ndarray:
    """A log2 fold change for each gene by `PATTERN`, the same mix at every level of expression, of random sign.

    Shapes: ``(genes,) -> (genes,)``.
    """
    n, blocks = len(expression), math.ceil(len(expression) / len(PATTERN))
    size = rng.permuted(np.tile(PATTERN, (blocks, 1)), axis=1).ravel()[:n]
    lfc = np.empty(n)
    lfc[np.argsort(expression, kind="stable")] = delta * size * rng.choice([-1.0, 1.0], n)
    return lfc


def kept_shares(lfc: np.ndarray) -> np.ndarray:
    """Which share of a gene's molecules each half keeps. Shapes: ``(genes,) -> (2, genes)``.

    >>> kept_shares(np.array([0.0, 1.0, -2.0])).tolist()
    [[1.0, 1.0, 0.25], [1.0, 0.5, 1.0]]
    """
    return np.exp2(np.minimum(0.0, np.stack([lfc, -lfc])))


def thinned(counts: Any, half: np.ndarray, kept: np.ndarray, rng: np.random.Generator) -> Any:
    """Sparse rows of counts of which each half keeps its share, and cells of neither all.

    Shapes: ``counts (cells, genes)``, ``half (cells,)`` of 0, 1 or negative, ``kept (2, genes)``.
    """
    out = counts.copy()
    side = np.repeat(half, np.diff(out.indptr))
    share = np.where(side < 0, 1.0, kept[np.maximum(side, 0), out.indices])
    out.data = rng.binomial(out.data.astype(np.int64), share).astype(out.data.dtype)
    out.eliminate_zeros()
    return out


def true_lfc(counts: Any, kept: np.ndarray, owners: np.ndarray | None, *, centred: bool) -> np.ndarray:
    r"""The log2 fold change of mean proportions in the group, had all its cells been in both halves.

    With counts :math:`x_{ig}` before thinning and shares :math:`s` kept, the mean proportion of a gene in a half is

    .. math:: m_g(s) = \frac1n \sum_i \frac{s_g x_{ig}}{\sum_h s_h x_{ih}},

    and the truth :math:`\log_2 m_g(s^a) - \log_2 m_g(s^b)`, averaged over samples where `owners` names those of the
    cells, less its median over genes where `centred`. What was planted in one gene thus moves the proportions of all,
    which centring takes out again. A gene never seen has changed in nothing.

    Shapes: ``counts (cells, genes)``, ``kept (2, genes)``, ``owners (cells,)``; ``-> (genes,)``.
    """
    parts = [counts] if owners is None else [counts[owners == sample] for sample in np.unique(owners.astype(str))]
    change, seen = np.zeros(counts.shape[1]), np.zeros(counts.shape[1])
    for part in parts:
        first, second = (_mean_share(part, shares) for shares in kept)
        there = (first > 0) & (second > 0)
        change[there] += np.log2(first[there]) - np.log2(second[there])
        seen += there
    change /= np.maximum(seen, 1)
    return change - np.median(change) if centred else change


def _mean_share(counts: Any, shares: np.ndarray) -> np.ndarray:
    """Mean over cells of the proportion of each gene, cells without counts left out. Shapes: ``-> (genes,)``."""
    totals = counts @ shares
    weight = np.divide(1.0, totals, out=np.zeros_like(totals), where=totals > 0)
    return shares * (counts.T @ weight) / max(1, int((totals > 0).sum()))


def check_samples(strata: Mapping[str, str], group: str, fewest: int) -> None:
    """Refuse samples too few for `fewest` in each half."""
    if len(strata) < 2 * fewest:
        raise SettingError(
            f"group {group!r} has {len(strata)} samples of enough cells; halves of whole samples need at least "
            f"{2 * fewest}: leave sample_key out, or choose a groupby whose groups hold more samples."
        )
