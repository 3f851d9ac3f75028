r"""Covariates beside the groups, in the likelihood of the counts.

The rate of gene g in cell or sample i is :math:`m_g \exp(z_i^\top \gamma_g)`: a covariate acts as if the library of the
cell were :math:`N_i \exp(z_i^\top \gamma_g)`. For cells :math:`\gamma_g` maximises the likelihood of the counts of a
gene given their sum in each side and batch. For samples it is estimated together with their variance
(`vaerdict.de.counts_likelihood.samples_likelihood`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from vaerdict.core import DataError, SettingError
from vaerdict.de.data import column
from vaerdict.de.sums import GroupSums

_STEPS = 12
_LARGEST_STEP = 1.0
_AT_A_TIME = 2**22  # numbers, cells x genes, in memory together
_EXPLAINED = 1e-8  # share of a column that others leave unexplained: less is rounding
_MOST_CATEGORIES = 20


class Covariates(NamedTuple):
    """Covariates of all cells as centred columns, and the name of each. Shapes: ``values (cells, q)``."""

    names: list[str]
    values: np.ndarray

    @classmethod
    def read(cls, adata: Any, keys: Sequence[str]) -> Covariates:
        """Columns of obs: numbers in units of their standard deviation, categories as one column each but the first."""
        names, parts = [], []
        for key in dict.fromkeys(keys):
            column(adata, key, role="covariates")  # refused with the list of columns where it is not there
            values = adata.obs[key]
            missing = int(values.isna().sum())
            if missing:
                raise DataError(
                    f"covariate {key!r} is missing in {missing} of {len(values)} cells; fill it in, or leave the cells "
                    "or the covariate out."
                )
            part = _numbers(key, values) if values.dtype.kind in "iuf" else _categories(key, values)
            parts.append(part)
            names += [key] * part.shape[1]
        return cls(names, np.concatenate(parts, 1) if parts else np.zeros((adata.n_obs, 0)))

    def check(
        self, contrast: str, values: Tensor, first: Tensor, stratum: Tensor, weight: Tensor
    ) -> tuple[Tensor, float]:
        """The columns to adjust a contrast for, and the share of the information on the difference that they leave.

        Columns that are constant or explained by those before them are left out, as those of categories that do not
        occur are. A covariate without any other column, and covariates that explain the sides, are refused by name.

        Shapes: ``values (units, q)``; ``first`` bool, ``stratum`` numbers of batches and ``weight`` ``(units,)``;
        ``-> (units, columns)``.
        """
        root = weight.sqrt().unsqueeze(-1)
        batches = torch.nn.functional.one_hot(stratum).double() * root
        side, z = first.double().unsqueeze(-1) * root, values * root
        known, columns = batches, []
        for number, part in enumerate(z.T):
            if _unexplained(part.unsqueeze(-1), known) >= _EXPLAINED:
                known, columns = torch.cat([known, part.unsqueeze(-1)], -1), [*columns, number]
        lost = [name for name in dict.fromkeys(self.names) if name not in {self.names[i] for i in columns}]
        if lost:
            raise SettingError(
                f"covariate {lost[0]!r} is constant in the units of {contrast}, or explained by the batches and the "
                "covariates before it; leave it out."
            )
        if len(first) <= known.shape[1] + 1:
            raise SettingError(
                f"{contrast} has {len(first)} units for {known.shape[1] + 1} coefficients; leave covariates out."
            )
        left = _unexplained(side, known) / max(_unexplained(side, batches), 1e-300)
        if left < _EXPLAINED:
            raise SettingError(
                f"covariates {', '.join(dict.fromkeys(self.names))} explain the groups of {contrast} completely: they "
                "cannot be told apart; leave out the covariate that differs between the groups."
            )
        return values[:, columns], min(1.0, left)


def _numbers(key: str, values: Any) -> np.ndarray:
    """Shapes: ``(cells,) -> (cells, 1)``."""
    number = values.to_numpy(dtype=np.float64)
    if not np.isfinite(number).all():
        raise DataError(f"covariate {key!r} holds values that are not finite; repair them, or leave it out.")
    return (number - number.mean())[:, None] / max(float(number.std()), 1e-300)


def _categories(key: str, values: Any) -> np.ndarray:
    """Shapes: ``(cells,) -> (cells, categories - 1)``."""
    text = values.astype(str).to_numpy()
    kinds = sorted(set(text))
    if len(kinds) < 2:
        raise SettingError(f"covariate {key!r} has one value, {kinds[0]!r}, in all cells; leave it out.")
    if len(kinds) > _MOST_CATEGORIES:
        raise SettingError(
            f"covariate {key!r} has {len(kinds)} categories, more than {_MOST_CATEGORIES}; pair_by or batch_key "
            "compare within each of many."
        )
    dummies = (text[:, None] == np.array(kinds[1:])).astype(np.float64)
    return dummies - dummies.mean(0)


def _unexplained(column: Tensor, known: Tensor) -> float:
    """Sum of squares that regression leaves, over the column's own. Shapes: ``(n, 1), (n, p)``."""
    fitted = known @ torch.linalg.lstsq(known, column, driver="gelsd").solution
    return float((column - fitted).square().sum() / column.square().sum().clamp_min(1e-300))


class CellEffects(NamedTuple):
    """Effects of covariates on every gene, ``(genes, q)``, and the covariates of the cells, ``(cells, q)``."""

    gamma: Tensor
    values: Tensor


def fit_cell_effects(totals: Tensor, weighted: Tensor, values: Tensor, library: Tensor, stratum: Tensor) -> CellEffects:
    r"""The effects of highest likelihood given the sum of counts of every stratum, by Newton's method.

    Parameters
    ----------
    totals
        Counts of every gene in each stratum, a side of a batch. Shapes: ``(strata, genes)``.
    weighted
        Sums of :math:`x_{ig} z_i` over all cells. Shapes: ``(genes, q)``.
    values, library, stratum
        Covariates, library and stratum of each cell. Shapes: ``(cells, q)``, ``(cells,)``, ``(cells,)``.
    """
    genes, q = totals.shape[1], values.shape[1]
    gamma = torch.zeros(genes, q, dtype=torch.float64)
    for part in torch.arange(genes).split(max(1, _AT_A_TIME // len(values))):
        own, counts = gamma[part], totals[:, part]
        for _ in range(_STEPS):
            expected, information = torch.zeros_like(own), torch.zeros(len(part), q, q, dtype=torch.float64)
            for s in range(len(totals)):
                mine = stratum == s
                z, size = values[mine], library[mine].unsqueeze(-1) * (values[mine] @ own.T).exp()
                size = size / size.sum(0)
                mean = size.T @ z
                square = torch.einsum("cg,cp,cq->gpq", size, z, z) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
                expected += counts[s].unsqueeze(-1) * mean
                information += counts[s, :, None, None] * square
            information += torch.eye(q) * (0.5 + 1e-6 * information.diagonal(dim1=-2, dim2=-1).amax(-1))[:, None, None]
            score = weighted[part] - expected - 0.5 * own  # half a count holds back genes that are hardly seen
            step = torch.linalg.solve(information, score.unsqueeze(-1)).squeeze(-1)
            own = own + step.clamp(-_LARGEST_STEP, _LARGEST_STEP)
            if float(step.abs().max()) < 1e-8:
                break
        gamma[part] = own
    return CellEffects(gamma, values)


def adjusted(sums: GroupSums, effects: CellEffects, cells: Tensor, library: Tensor, cross: Tensor) -> GroupSums:
    """The sums of a group with libraries adjusted for covariates; `cross` are those of counts times such libraries.

    Shapes: ``cells (n,)`` rows of the covariates, ``library (n,)``, ``cross (genes,)``.
    """
    total, squares = torch.zeros_like(sums.total), torch.zeros_like(sums.total)
    for part in cells.split(max(1, _AT_A_TIME // len(total))):
        size = library[part].unsqueeze(-1) * (effects.values[part] @ effects.gamma.T).exp()
        total += size.sum(0)
        squares += size.square().sum(0)
    return sums._replace(library=total, library_squares=squares, cross=cross)


def scaled_by_effects(blocks: Iterable[Any], genes: np.ndarray, effects: CellEffects) -> Iterator[Any]:
    """Counts of some genes times the factors of their cells. Shapes: ``(c, all genes) -> (c, genes)``, sparse rows."""
    start, gamma = 0, effects.gamma.numpy()
    for block in blocks:
        z = effects.values[start : start + block.shape[0]].numpy()
        start += block.shape[0]
        part = block[:, genes].tocsr()
        rows = np.repeat(np.arange(part.shape[0]), np.diff(part.indptr))
        factor = np.exp(np.einsum("iq,iq->i", z[rows], gamma[part.indices]))
        yield sparse.csr_matrix((part.data * factor, part.indices, part.indptr), shape=part.shape)
