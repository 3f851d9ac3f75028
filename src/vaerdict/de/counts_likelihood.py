r"""The likelihood of every gene's log2 fold change given the counts alone, on a grid.

Counts of two sides given their sum are binomial if they are Poisson, with log-odds :math:`\lambda \ln 2 + \ln(E_a /
E_b)` for exposures E. Counts of cells and of samples are over-dispersed. Dividing the log-likelihood by the dispersion
:math:`\phi` gives it the right width (quasi-likelihood), and a dispersion estimated with few degrees of freedom turns
its deviance into that of Student's t. No logarithm of a count is taken: a gene unseen in a small group is weak
evidence, in both directions alike.

Cells are exchangeable within a group, or within a group of a batch where batches are named; where samples are the
replicates, samples are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from scipy import stats
from torch import Tensor
from torch.nn.functional import softplus

from vaerdict.core import SettingError
from vaerdict.de.data import block_size, chunk_size
from vaerdict.de.moderation import moderate
from vaerdict.training.data import Rows

K = TypeVar("K")

STEP = 0.05
"""Step of the grid of fold changes, in log2 units."""

_LARGEST = 16.0
_MOST_VARIANCE = 4.0  # between samples, of logarithms: a factor of seven is one standard deviation
_ENOUGH = 3.0  # counts expected of a sample, over their dispersion: fewer hardly show how samples vary
_FEWEST = 20  # genes that the variance between samples is estimated from


class LfcLikelihood(NamedTuple):
    """Log-likelihood of every gene's log2 fold change on a grid, with its mode and standard error.

    Shapes: ``grid (r,)``, ``log_lik (genes, r)``, ``mode`` and ``error`` ``(genes,)``.
    """

    grid: Tensor
    log_lik: Tensor
    mode: Tensor
    error: Tensor


# ------------------------------------------------------------------------------------------------------- counts
@dataclass(frozen=True, eq=False)
class GroupProportions:
    """Proportions of the genes in some cells: mean and variance between cells, mean of 1 / library, number of cells.

    `seen` is the share of cells in which a gene is seen. Shapes: ``mean``, ``variance`` and ``seen`` ``(genes,)``.
    """

    mean: Tensor
    variance: Tensor
    inverse_library: float
    n_cells: int
    seen: Tensor | None = None

    @property
    def exposure(self) -> float:
        """Factor between a mean proportion and its equivalent counts."""
        return self.n_cells / self.inverse_library

    @property
    def counts(self) -> Tensor:
        """Equivalent counts of the mean proportions. Shapes: ``(genes,)``."""
        return (self.mean * self.exposure).double()

    @property
    def dispersion(self) -> Tensor:
        """Variance between cells over that of Poisson counts, at least one. Shapes: ``(genes,)``."""
        poisson = self.mean * self.inverse_library
        return torch.where(poisson > 0, self.variance / poisson.clamp_min(1e-300), 1.0).clamp_min(1.0).double()


@torch.no_grad()
def group_proportions(rows: Rows, n_genes: int, cells: Mapping[K, Tensor]) -> dict[K, GroupProportions]:
    """Proportions of groups of cells, in one pass over the rows, whose first columns are genes.

    Shapes: ``rows (all cells, p)``, ``cells (n,)`` each.
    """
    sums = {name: torch.zeros(3, n_genes, dtype=torch.float64) for name in cells}
    inverse = dict.fromkeys(cells, 0.0)
    inside = {name: torch.zeros(rows.n, dtype=torch.bool).index_fill_(0, group, True) for name, group in cells.items()}
    size = max(1, min(block_size(rows.device), chunk_size(rows.device) // n_genes))
    for block in torch.arange(rows.n).split(size):
        x = rows.take(block)[:, :n_genes].double()
        totals = x.sum(-1)
        proportion = x / totals.unsqueeze(-1)
        parts = (proportion, proportion.square(), (x > 0).double())
        for name in cells:
            mask = inside[name][block]
            if mask.any():
                weight = mask.to(x.device).double()
                sums[name] += torch.stack([weight @ part for part in parts]).cpu()
                inverse[name] += float(weight @ totals.reciprocal())
    return {name: _proportions(sums[name], inverse[name], len(group)) for name, group in cells.items()}


def _proportions(sums: Tensor, inverse: float, n: int) -> GroupProportions:
    """From sums of proportions, of their squares and of cells in which genes are seen. Shapes: ``sums (3, genes)``."""
    mean = sums[0] / n
    variance = (sums[1] - n * mean.square()).clamp_min(0) / max(n - 1, 1)
    return GroupProportions(mean, variance, inverse / n, n, sums[2] / n)


# ----------------------------------------------------------------------------------------- cells as replicates
def cells_likelihood(pairs: Sequence[tuple[GroupProportions, GroupProportions]]) -> LfcLikelihood:
    r"""With cells as replicates, of the equivalent counts :math:`O_a` and :math:`O_b` of a gene given their sum,

    .. math:: \log L(\lambda) = \tfrac{1}{\phi}\bigl(O_a \lambda \ln 2 - (O_a + O_b) \ln(E_a 2^\lambda + E_b)\bigr),

    with :math:`\phi` the dispersion between the cells of both groups. `pairs` are group a and group b in each batch;
    their log-likelihoods add up, so that differences between batches are no change. The dispersion of a group is that
    of all its batches, and the degrees of freedom are Welch's: a small group estimates its own dispersion from few
    cells, however many the other has.
    """
    sides = [_PooledDispersion.of(side) for side in zip(*pairs, strict=True)]
    terms = [(a, b, _combined_dispersion([(sides[0].phi, a.counts), (sides[1].phi, b.counts)])) for a, b in pairs]
    return _likelihood(_dispersed_terms(terms), _welch(*sides).unsqueeze(-1))


class _PooledDispersion(NamedTuple):
    """Dispersion of a group over all its batches, its counts and degrees of freedom. Shapes: ``(genes,)``."""

    phi: Tensor
    counts: Tensor
    df: int

    @classmethod
    def of(cls, parts: Sequence[GroupProportions]) -> _PooledDispersion:
        observed = sum(((p.n_cells - 1) * p.variance.double() for p in parts), torch.tensor(0.0))
        poisson = sum(((p.n_cells - 1) * p.inverse_library * p.mean.double() for p in parts), torch.tensor(0.0))
        phi = torch.where(poisson > 0, observed / poisson.clamp_min(1e-300), 1.0).clamp_min(1.0)
        return cls(phi, torch.stack([p.counts for p in parts]).sum(0), sum(p.n_cells - 1 for p in parts))


def _welch(a: _PooledDispersion, b: _PooledDispersion) -> Tensor:
    """Degrees of freedom of a difference between sides of few degrees each. Shapes: ``-> (genes,)``."""
    k_a, k_b = (side.phi / (side.counts + 0.5) for side in (a, b))
    return (k_a + k_b).square() / (k_a.square() / max(1, a.df) + k_b.square() / max(1, b.df))


def _combined_dispersion(sides: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    r"""From dispersions and counts :math:`\sum_i (\phi_i / O_i) / \sum_i (1 / O_i)`, or their mean if larger.

    The first is right where dispersions differ. The second guards a gene that is seen in one cell of one group only: a
    group without counts shows no dispersion. Shapes: ``-> (genes,)``.
    """
    phi, weight = torch.stack([phi for phi, _ in sides]), torch.stack([1 / (counts + 0.5) for _, counts in sides])
    return torch.maximum((phi * weight).sum(0) / weight.sum(0), phi.mean(0))


class _Term(NamedTuple):
    """Counts of two sides that are compared given their sum, divided by their dispersion.

    `log_ratio` is that of the exposures, to base 2; `mode` is about the likeliest fold change and `information` that of
    its natural logarithm, both from one count more, shared by exposure so that it favours neither side.

    Shapes: ``(genes,)``.
    """

    a: Tensor
    b: Tensor
    log_ratio: Tensor
    mode: Tensor
    information: Tensor

    @classmethod
    def of(cls, a: Tensor, b: Tensor, e_a: Tensor, e_b: Tensor, total: Tensor, phi: Tensor | float = 1.0) -> _Term:
        """From counts over-dispersed by phi, with their exposures and the `total` exposure of all terms."""
        more_a, more_b, log_ratio = a + e_a / total, b + e_b / total, (e_a / e_b).log2()
        mode = more_a.log2() - more_b.log2() - log_ratio
        return cls(a / phi, b / phi, log_ratio, mode, 1 / (phi * (1 / more_a + 1 / more_b)))

    def log_lik(self, grid: Tensor) -> Tensor:
        """Binomial given the sum. Shapes: ``grid (r,) -> (genes, r)``."""
        odds = (self.log_ratio.unsqueeze(-1) + grid) * math.log(2)
        return self.a.unsqueeze(-1) * odds - (self.a + self.b).unsqueeze(-1) * softplus(odds)


def _dispersed_terms(pairs: Sequence[tuple[GroupProportions, GroupProportions, Tensor]]) -> list[_Term]:
    """Pairs of groups of cells whose counts are over-dispersed by phi. Shapes: ``phi (genes,)``."""
    exposure = [[torch.full_like(phi, side.exposure) for side in (a, b)] for a, b, phi in pairs]
    total = sum((e for pair in exposure for e in pair), torch.tensor(0.0))
    both = zip(pairs, exposure, strict=True)
    return [_Term.of(a.counts, b.counts, e_a, e_b, total, phi) for (a, b, phi), (e_a, e_b) in both]


def _likelihood(terms: Sequence[_Term], df: Tensor | float) -> LfcLikelihood:
    """All terms together, with the deviance of Student's t on `df` degrees of freedom. Shapes: ``df (genes, 1)``."""
    information = torch.stack([term.information for term in terms])
    mode = (torch.stack([term.mode for term in terms]) * information).sum(0) / information.sum(0)
    grid = grid_about(mode)
    log_lik = sum((term.log_lik(grid) for term in terms), torch.tensor(0.0))
    deviance = 2 * (log_lik.amax(-1, keepdim=True) - log_lik)
    error = information.sum(0).rsqrt() / math.log(2)
    return LfcLikelihood(grid, -0.5 * (df + 1) * torch.log1p(deviance / df), mode, error)


def grid_about(mode: Tensor) -> Tensor:
    """A grid about zero that reaches beyond all modes. Shapes: ``(genes,) -> (r,)``."""
    n = math.ceil(min(_LARGEST, float(mode.abs().max()) + 4.0) / STEP)
    return torch.arange(-n, n + 1, dtype=torch.float64) * STEP


# --------------------------------------------------------------------------------------- samples as replicates
Samples = Sequence[GroupProportions]
"""The proportions of each sample of one side."""


def samples_likelihood(batches: Sequence[tuple[Samples, Samples]]) -> LfcLikelihood:
    r"""With samples as replicates: `batches` are the samples of group a and those of group b, in each batch.

    The mean :math:`m_i` of a sample varies by its cells and between samples,

    .. math:: \mathrm{var}(m_i) / m^2 = \psi \Bigl(\frac{\phi}{m E_i} + \alpha\Bigr),

    with the dispersion :math:`\phi` between cells, a variance :math:`\alpha` common to all genes, at which the median
    gene varies as expected, and a factor :math:`\psi` per gene, moderated across genes (`moderate`). Samples of many
    cells count alike, those of few in proportion to their cells. The equivalent counts of a side follow from its
    variance, and never exceed those of its cells alone.
    """
    sides = [_SideSamples.of(samples) for pair in batches for samples in pair]
    df = sum(side.df for side in sides)
    if df < 1:
        raise SettingError("one sample per side and batch shows no variance between samples; leave batch_key out.")
    alpha, psi, df = _sample_variance(lambda alpha: [side.deviations(alpha) for side in sides], df)
    equivalent = [side.equivalent_counts(alpha, psi) for side in sides]
    total = torch.stack([exposure for _, exposure in equivalent]).sum(0)
    opposed = zip(equivalent[::2], equivalent[1::2], strict=True)
    return _likelihood([_Term.of(a, b, e_a, e_b, total) for (a, e_a), (b, e_b) in opposed], df)


def paired_likelihood(pairs: Sequence[tuple[GroupProportions, GroupProportions]]) -> LfcLikelihood:
    r"""With samples as replicates that all have cells on both sides: `pairs` are both sides of each sample.

    Fold changes vary from sample to sample: the counts of side a given the sum :math:`n_i` of a sample have variance
    :math:`\psi (\phi\, v_i + \tau v_i^2)` with :math:`v_i = n_i \pi_i (1 - \pi_i)`, and :math:`\tau` and :math:`\psi`
    take the places of :math:`\alpha` and :math:`\psi` in `samples_likelihood`.
    """
    if len(pairs) < 2:
        raise SettingError("one sample shows no variance between samples; give at least two.")
    phi = _PooledDispersion.of([side for pair in pairs for side in pair]).phi
    terms = _dispersed_terms([(a, b, phi) for a, b in pairs])
    pooled = _likelihood(terms, len(pairs))
    lfc = pooled.grid[pooled.log_lik.argmax(-1)]
    tau, psi, df = _sample_variance(lambda tau: [_residual(term, lfc, tau) for term in terms], len(pairs) - 1)
    return _likelihood([_downweighted(term, lfc, tau, psi) for term in terms], df)


class _Deviation(NamedTuple):
    """Deviations between samples: their sum of squares over the expected one, and expected counts over dispersion.

    Shapes: ``(genes,)`` each.
    """

    squares: Tensor
    expected: Tensor


class _SampleVariance(NamedTuple):
    """Variance between samples common to all genes, each gene's factor, and the degrees of freedom of the factor."""

    variance: float
    factor: Tensor
    df: float


def _sample_variance(deviations: Callable[[float], Sequence[_Deviation]], df: int) -> _SampleVariance:
    """The variance at which the median of sufficiently seen genes deviates as a chi-square does; each gene's factor."""
    expected = torch.stack([d.expected for d in deviations(0.0)]).amin(0)
    # of rare genes, or tiny samples, the best there are: little evidence of variance does not make samples alike
    enough = expected >= min(_ENOUGH, float(expected.topk(min(_FEWEST, len(expected))).values[-1]))

    def squares(variance: float) -> Tensor:
        return torch.stack([d.squares for d in deviations(variance)]).sum(0)

    target, low, high = float(stats.chi2.median(df)), 0.0, _MOST_VARIANCE
    if float(squares(0.0)[enough].median()) <= target:
        high = 0.0
    for _ in range(40 if high else 0):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if float(squares(middle)[enough].median()) > target else (low, middle)
    # genes of few counts show no variance of their own, and do not enter its moderation
    ratio = squares(high) / df
    moderated = moderate(torch.where(enough, ratio, 0.0), df)
    factor = torch.where(enough, moderated.variance, torch.maximum(ratio, torch.ones_like(ratio)))
    return _SampleVariance(high, factor, moderated.df)


@dataclass(frozen=True, eq=False)
class _SideSamples:
    """Samples of one side in one batch; `mean` is that of all their cells with half a count, and never zero.

    Shapes: ``rate (samples, genes)``, ``exposure (samples, 1)``, ``mean`` and ``phi`` ``(genes,)``.
    """

    rate: Tensor
    exposure: Tensor
    mean: Tensor
    phi: Tensor

    @classmethod
    def of(cls, samples: Samples) -> _SideSamples:
        rate = torch.stack([s.mean.double() for s in samples])
        exposure = torch.tensor([s.exposure for s in samples], dtype=torch.float64).unsqueeze(-1)
        mean = ((rate * exposure).sum(0) + 0.5) / exposure.sum()
        return cls(rate, exposure, mean, _PooledDispersion.of(samples).phi)

    @property
    def df(self) -> int:
        return len(self.rate) - 1

    def precision(self, alpha: float) -> Tensor:
        """Precision of each sample's mean, in units of the side's. Shapes: ``-> (samples, genes)``."""
        return 1 / (self.phi / (self.mean * self.exposure) + alpha)

    def centre(self, alpha: float) -> Tensor:
        """The side's mean proportion, samples weighted by their precision. Shapes: ``-> (genes,)``."""
        weight = self.precision(alpha)
        return (weight * self.rate).sum(0) / weight.sum(0)

    def deviations(self, alpha: float) -> _Deviation:
        relative = (self.rate - self.centre(alpha)) / self.mean
        expected = (self.mean * self.exposure / self.phi).amin(0)
        return _Deviation((self.precision(alpha) * relative.square()).sum(0), expected)

    def equivalent_counts(self, alpha: float, psi: Tensor) -> tuple[Tensor, Tensor]:
        """Equivalent counts of the mean, and the exposure they were made at. Shapes: ``(genes,)`` each."""
        precision = torch.minimum(self.precision(alpha).sum(0) / psi, self.precision(0.0).sum(0))
        exposure = precision / self.mean
        return self.centre(alpha) * exposure, exposure


def _residual(term: _Term, lfc: Tensor, tau: float) -> _Deviation:
    """Deviation of a sample's counts on side a from those expected at a fold change. Shapes: ``lfc (genes,)``."""
    share, v = _binomial(term, lfc)
    squares = (term.a - (term.a + term.b) * share).square() / (v + tau * v.square()).clamp_min(1e-300)
    return _Deviation(torch.where(v > 0, squares, 0.0), v)


def _downweighted(term: _Term, lfc: Tensor, tau: float, psi: Tensor) -> _Term:
    """The term with the weight that the variance between samples leaves it."""
    scale = (1 / (psi * (1 + tau * _binomial(term, lfc)[1]))).clamp_max(1.0)
    return term._replace(a=term.a * scale, b=term.b * scale, information=term.information * scale)


def _binomial(term: _Term, lfc: Tensor) -> tuple[Tensor, Tensor]:
    """The share of side a at a fold change, and the variance of its counts. Shapes: ``(genes,)`` each."""
    share = torch.sigmoid((term.log_ratio + lfc) * math.log(2))
    return share, (term.a + term.b) * share * (1 - share)
