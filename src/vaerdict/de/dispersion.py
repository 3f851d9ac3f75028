r"""How much counts of cells vary beyond Poisson, moderated across genes by empirical Bayes.

Within a group the counts of cell i vary by

.. math:: \mathrm{var}(x_i) = \psi_g\,(\mu_i + \alpha\, \mu_i^2), \qquad \mu_i = m_g N_i,

with :math:`\alpha` a function of abundance alone (the trend) and a factor :math:`\psi_g` per gene and group. The factor
is estimated from the squared deviations and moved towards those of genes of like abundance, with as many degrees of
freedom as these genes agree (Smyth, 2004; Lun, Chen and Smyth, 2016). How much an estimate varies by chance follows no
chi-square where counts are few or skewed: it is simulated, from counts of the trend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vaerdict.de.moderation import inverse_trigamma
from vaerdict.de.sums import GroupSums

_PER_BIN = 150  # genes that a point of a trend is estimated from
_MOST_BINS = 20
_LARGEST = 20.0  # of the trend: more than a thousandfold between cells
_SIMULATED, _CELLS = 200, 200  # genes and cells at most of a simulation
_MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of the trend, that genes are simulated with
_SEED = 5
_APART, _SHARE_APART = 3.0, 0.02  # standard deviation, on the logarithm, of genes unlike the others; their share
_STEPS = 25


class Dispersion(NamedTuple):
    """The trend and the moderated factor of a group, with its degrees of freedom. Shapes: ``(genes,)`` each."""

    trend: Tensor
    factor: Tensor
    df: Tensor


class Bins(NamedTuple):
    """Genes in classes of like abundance, and the log-abundance of each class. Shapes: ``genes (n,)`` each."""

    log_abundance: Tensor
    genes: Sequence[Tensor]
    centres: Sequence[float]

    @classmethod
    def of(cls, abundance: Tensor, per_bin: int = _PER_BIN) -> Bins:
        """Classes of about equal numbers of genes; genes of one abundance are in one class, in whatever order."""
        log = abundance.log()
        rising, size, edges, start = log.sort().values, max(per_bin, len(log) / _MOST_BINS), [], 0
        while len(log) - start >= 1.5 * size:
            start = int(torch.searchsorted(rising, rising[start + math.ceil(size) - 1], right=True))
            edges += [float(rising[start])] if len(log) - start >= 0.5 * size else []
        number = torch.searchsorted(log.new_tensor(edges), log, right=True)
        genes = [(number == i).nonzero().squeeze(-1) for i in range(len(edges) + 1)]
        return cls(log, genes, [float(log[part].median()) for part in genes])

    def curve(self, values: Sequence[float]) -> Tensor:
        """A value per class, interpolated to every gene. Shapes: ``-> (genes,)``."""
        return torch.from_numpy(np.interp(self.log_abundance.numpy(), self.centres, values))


Batches = Sequence[GroupSums]
"""The cells of one group in each batch."""


def dispersions(groups: Sequence[Batches]) -> list[Dispersion]:
    """The dispersion of each of two groups within its batches, with one trend for both."""
    abundance = torch.stack([_per_cell(group) for group in groups]).mean(0).clamp_min(1e-9)
    trend = _trend(groups, Bins.of(abundance))
    return _moderated([_Logs.of(group, trend) for group in groups], trend)


def _n_cells(group: Batches) -> int:
    return sum(part.n_cells for part in group)


def _per_cell(group: Batches) -> Tensor:
    return torch.stack([part.total for part in group]).sum(0) / _n_cells(group)


def _factors(group: Batches, trend: Tensor) -> Tensor:
    """Squared deviations over those that the trend expects, one where nothing is seen. Shapes: ``-> (genes,)``."""
    observed = torch.stack([part.deviations for part in group]).sum(0)
    expected = torch.stack([part.total + trend * part.rate.square() * part.library_squares for part in group]).sum(0)
    return torch.where(expected > 0, observed / expected.clamp_min(1e-300), 1.0)


def _trend(groups: Sequence[Batches], bins: Bins) -> Tensor:
    """In each class of genes the value at which the median factor is one. Shapes: ``-> (genes,)``."""
    values = []
    for genes in bins.genes:
        parts = [[part.take(genes) for part in group] for group in groups]
        seen = torch.cat([_per_cell(group) > 0 for group in parts])

        def median(value: float, parts: Sequence[Batches] = parts, seen: Tensor = seen) -> float:
            trend = torch.full((len(parts[0][0].total),), value, dtype=torch.float64)
            return float(torch.cat([_factors(group, trend) for group in parts])[seen].median())

        values.append(where_one(median, _LARGEST) if seen.any() else 0.0)
    return bins.curve(values)


def where_one(function: Callable[[float], float], largest: float) -> float:
    """Where a falling function is one, by bisection up to `largest`; zero where it is below one from the start."""
    low, high = 0.0, largest
    if function(0.0) <= 1:
        return 0.0
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if function(middle) > 1 else (low, middle)
    return high


class _Chance(NamedTuple):
    """Mean and variance, by chance, of the logarithm of each factor over its true value. Shapes: ``(genes,)`` each."""

    mean: Tensor
    variance: Tensor


def _by_chance(bins: Bins, log_factor: Tensor, trend: Tensor, group: Batches) -> _Chance:
    """Of genes like those of each class whose dispersion is a multiple of the trend, as the factor at hand suggests.

    They are simulated in at most `_CELLS` cells, with libraries that vary as the group's; both shrink in proportion to
    the number of cells. Shapes: ``log_factor (genes,)``.
    """
    rng, n_cells = np.random.default_rng(_SEED), _n_cells(group)
    n = min(n_cells, _CELLS)
    size = rng.lognormal(0.0, math.sqrt(math.log1p(_library_variation(group))), n)
    mean, variance = torch.zeros_like(log_factor), torch.zeros_like(log_factor)
    for genes in bins.genes:
        per_cell, alpha = float(bins.log_abundance[genes].median().exp()), max(1e-3, float(trend[genes].median()))
        simulated = [_simulated(rng, per_cell * size / size.mean(), alpha, multiple) for multiple in _MULTIPLES]
        rows = sorted(row for row in simulated if row is not None)
        if rows:
            shown, offset, spread = zip(*rows, strict=True)
            mean[genes] = torch.from_numpy(np.interp(log_factor[genes].numpy(), shown, offset)) * n / n_cells
            variance[genes] = torch.from_numpy(np.interp(log_factor[genes].numpy(), shown, spread)) * n / n_cells
    return _Chance(mean, variance.clamp_min(1e-6))


def _simulated(
    rng: np.random.Generator, mu: np.ndarray, alpha: float, multiple: float
) -> tuple[float, float, float] | None:
    """Mean of the logarithm of factors, its offset from the true one, and their variance, at a multiple of the trend.

    None where no two of them show any variance. Shapes: ``mu (cells,)``.
    """
    own = alpha * multiple
    x = torch.from_numpy(rng.poisson(mu[:, None] * rng.gamma(1 / own, own, (len(mu), _SIMULATED)))).double()
    factor = _factors([_sums(x, torch.from_numpy(mu))], torch.full((_SIMULATED,), alpha, dtype=torch.float64))
    log, true = factor[factor > 0].log(), math.log((mu + own * mu**2).sum() / (mu + alpha * mu**2).sum())
    return None if len(log) < 2 else (float(log.mean()), float(log.mean()) - true, float(log.var()))


def _library_variation(group: Batches) -> float:
    """Squared coefficient of variation of the libraries within batches."""
    shares = [float((p.n_cells * p.library_squares / p.library.square()).mean()) * p.n_cells for p in group]
    return max(1e-6, sum(shares) / _n_cells(group) - 1)


def _sums(x: Tensor, library: Tensor) -> GroupSums:
    """The sums of dense counts. Shapes: ``x (cells, genes)``, ``library (cells,)``."""
    cross, seen = (x * library.unsqueeze(-1)).sum(0), (x > 0).double().sum(0)
    return GroupSums(x.sum(0), x.square().sum(0), cross, seen, library.sum(), library.square().sum(), len(x))


class _Logs(NamedTuple):
    """Logarithms of the factors of a group about the curve of their mean, with the variance that chance gives them.

    Shapes: ``(genes,)`` each; the variance is infinite where a factor cannot be seen.
    """

    mean: Tensor
    deviation: Tensor
    variance: Tensor

    @classmethod
    def of(cls, group: Batches, trend: Tensor) -> _Logs:
        bins = Bins.of(_per_cell(group).clamp_min(1e-6))
        factor = _factors(group, trend)
        shown = (factor > 1e-12) & (_per_cell(group) > 0)
        log = torch.where(shown, factor, 1.0).log()
        chance = _by_chance(bins, log, trend, group)
        log = log - chance.mean
        classes = [genes[shown[genes]] for genes in bins.genes]
        mean = bins.curve([float(log[genes].mean()) if len(genes) else 0.0 for genes in classes])
        return cls(mean, torch.where(shown, log - mean, 0.0), torch.where(shown, chance.variance, math.inf))


def _moderated(groups: Sequence[_Logs], trend: Tensor) -> list[Dispersion]:
    """The factors of two groups, moved towards those of genes of like abundance and towards each other.

    Deviations have a variance V over genes, and a covariance C between the groups, in which chance has no part: a gene
    that varies much in one group does so in the other as far as the genes at large do.
    """
    a, b = groups
    shown = [log.variance < math.inf for log in groups]
    excess = [
        (log.deviation.square() - log.variance)[s].mean() for log, s in zip(groups, shown, strict=True) if s.any()
    ]
    variance = max(1e-6, float(sum(excess)) / max(1, len(excess)))
    both = shown[0] & shown[1]
    covariance = float((a.deviation * b.deviation)[both].mean()) if both.any() else 0.0
    covariance = min(max(0.0, covariance), (1 - 1e-6) * variance)
    return [_posterior(own, other, variance, covariance, trend) for own, other in ((a, b), (b, a))]


class _Updated(NamedTuple):
    """A normal after an observation: mean, variance and log-evidence up to a constant. Shapes: ``(genes,)`` each."""

    mean: Tensor
    variance: Tensor
    log_evidence: Tensor


def _updated(mean: Tensor, variance: Tensor, observed: Tensor, precision: Tensor) -> _Updated:
    gain = variance * precision / (1 + variance * precision)
    surprise = precision * (observed - mean).square() / (1 + variance * precision)
    evidence = -0.5 * (surprise + torch.log1p(variance * precision))
    return _Updated(mean + gain * (observed - mean), variance * (1 - gain), evidence)


def _posterior(own: _Logs, other: _Logs, variance: float, covariance: float, trend: Tensor) -> Dispersion:
    """The factor of one group given the deviations of both."""
    precision, p_other = 1 / own.variance, 1 / other.variance
    # normal, two observations: first the other group, then the own
    gain = covariance * p_other / (1 + variance * p_other)
    mean, left = gain * other.deviation, variance - covariance * gain
    usual, apart = (_updated(mean, left + more, own.deviation, precision) for more in (0.0, _APART**2))
    # one gene in fifty may vary far more than the others, as one does whose counts are nearly all in one cell
    odds = _SHARE_APART / (1 - _SHARE_APART) * (apart.log_evidence - usual.log_evidence).exp()
    share = torch.where(own.deviation > mean, odds / (1 + odds), 0.0).nan_to_num(1.0)
    mean = usual.mean + share * (apart.mean - usual.mean)
    left = usual.variance + share * (apart.variance - usual.variance)
    df = _df_of(left)
    return Dispersion(trend, (own.mean + mean + torch.special.digamma(df / 2) - (df / 2).log()).exp(), df)


def _df_of(variance: Tensor) -> Tensor:
    """Degrees of freedom of a chi-square whose logarithm has this variance. Shapes: ``(genes,) -> (genes,)``."""
    at = np.geomspace(1e-6, 10.0, 200)
    df = np.array([2 * inverse_trigamma(float(v)) for v in at])
    return torch.from_numpy(np.exp(np.interp(variance.clamp(1e-6, 10).log().numpy(), np.log(at), np.log(df))))
