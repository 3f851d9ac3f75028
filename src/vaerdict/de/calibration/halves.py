r"""Halves of one group of cells, and known changes planted between them.

To make gene g larger by :math:`2^{L_g}` in the first half, the counts of the second half are thinned: each molecule is
kept with probability :math:`2^{-L_g}`. For a negative :math:`L_g` the counts of the first half are thinned. Thinned
counts are counts, with the dispersion of the gene, and the library size of a thinned cell shrinks accordingly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

PATTERN = (0.0,) * 13 + (0.5, 0.9, 1.1, 1.5, 1.5, 2.0, 4.0)
"""True |LFC| of every twenty genes of similar expression, in multiples of delta."""

_TRIES = 100  # random draws per split wanted; the distinct splits among them are taken as all that exist


def deal(strata: np.ndarray, rng: np.random.Generator, share: float = 0.5) -> np.ndarray:
    """A random mask of the first half, balanced within each stratum and overall, as cards are dealt.

    `share` is the share of the first half. Shapes: ``(n,) -> (n,)`` bool.
    """
    number = np.unique(strata.astype(str), return_inverse=True)[1]
    stratum = rng.permutation(int(number.max(initial=0)) + 1)[number]
    order = rng.permutation(len(strata))
    order = order[np.argsort(stratum[order], kind="stable")]
    first = np.zeros(len(strata), dtype=bool)
    count = np.ceil(share * np.arange(len(strata) + 1) - 1e-9)
    first[order[np.diff(count) > 0]] = True
    return first


def sample_splits(strata: Mapping[str, str], n: int, rng: np.random.Generator) -> list[list[str]]:
    """At most n different ways to halve samples, balanced in their strata; each is the half with the first name.

    The order of the halves makes no difference, so that four samples have three splits and six have ten.
    """
    names = sorted(strata)
    labels = np.array([strata[name] for name in names], dtype=object)
    splits: dict[tuple[str, ...], None] = {}
    for _ in range(_TRIES * n):
        first = deal(labels, rng)
        splits[tuple(name for name, side in zip(names, first, strict=True) if side == first[0])] = None
        if len(splits) == n:
            break
    return [list(split) for split in splits]


def planted(expression: np.ndarray, delta: float, rng: np.random.Generator) -> np.ndarray:
    """A log2 fold change per gene by `PATTERN`, the same mix at every level of expression, of random sign.

    Shapes: ``(genes,) -> (genes,)``.
    """
    n, blocks = len(expression), math.ceil(len(expression) / len(PATTERN))
    size = rng.permuted(np.tile(PATTERN, (blocks, 1)), axis=1).ravel()[:n]
    lfc = np.empty(n)
    lfc[np.argsort(expression, kind="stable")] = delta * size * rng.choice([-1.0, 1.0], n)
    return lfc


def kept_shares(lfc: np.ndarray) -> np.ndarray:
    """The share of the molecules of a gene that each half keeps. Shapes: ``(genes,) -> (2, genes)``.

    >>> kept_shares(np.array([0.0, 1.0, -2.0])).tolist()
    [[1.0, 1.0, 0.25], [1.0, 0.5, 1.0]]
    """
    return np.exp2(np.minimum(0.0, np.stack([lfc, -lfc])))


def thinned(counts: Any, half: np.ndarray, shares: np.ndarray, rng: np.random.Generator) -> Any:
    """Sparse rows of counts of which each half keeps its shares; cells of neither half keep all.

    Shapes: ``counts (cells, genes)``, ``half (cells,)`` of 0, 1 or negative, ``shares (2, genes)``.
    """
    out = counts.copy()
    side = np.repeat(half, np.diff(out.indptr))
    share = np.where(side < 0, 1.0, shares[np.maximum(side, 0), out.indices])
    out.data = rng.binomial(out.data.astype(np.int64), share).astype(out.data.dtype)
    out.eliminate_zeros()
    return out


def true_lfc(counts: Any, shares: np.ndarray, owners: np.ndarray | None, *, centred: bool) -> np.ndarray:
    r"""The log2 fold change of rates if all cells of the group were in both halves.

    With counts :math:`x_{ig}` of all genes before thinning and shares :math:`s` kept, the rate of a gene in a half is

    .. math:: m_g(s) = \frac{\sum_i s_g x_{ig}}{\sum_i N_i(s)}, \qquad N_i(s) = \sum_h s_h x_{ih},

    and the truth is :math:`\log_2 m_g(s^a) - \log_2 m_g(s^b)`, averaged over samples where `owners` names the samples
    of the cells. Because libraries shrink where counts are thinned, it is the change planted plus a shift that all
    genes have in common, those without a change too. Where `centred`, that shift is subtracted, so that a gene without
    a change has a truth of zero. A gene that is never seen has a change of zero.

    Shapes: ``counts (cells, genes)``, ``shares (2, genes)``, ``owners (cells,)``; ``-> (genes,)``.
    """
    change = np.log2(shares[0]) - np.log2(shares[1])
    if not centred:
        library = counts @ shares.T
        number = np.zeros(len(library), dtype=int) if owners is None else np.unique(owners, return_inverse=True)[1]
        first, second = (np.bincount(number, half) for half in library.T)
        counted = (first > 0) & (second > 0)
        change += np.mean(np.log2(second[counted]) - np.log2(first[counted]))
    return np.where(np.asarray(counts.sum(0)).ravel() > 0, change, 0.0)
