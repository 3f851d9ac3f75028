r"""The likelihood of every gene's log2 fold change given the counts alone.

The counts of a side follow a negative binomial of mean :math:`\mu = E m`, for the exposure E of the side and its rate
m, and variance :math:`\mu + a \mu^2`. At a fold change :math:`\lambda` the rates of the sides are :math:`2^\lambda m`
and m; the m of highest likelihood solves a quadratic equation. What varies beyond divides the deviance
(quasi-likelihood). No logarithm of a count is taken: a gene unseen in a small group is weak evidence, in both
directions alike.

Cells are exchangeable within a group, or within a group of a batch where batches are named; where samples are the
replicates, samples are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from scipy import stats
from torch import Tensor
from torch.nn.functional import softplus

from vaerdict.core import SettingError
from vaerdict.de.dispersion import Bins, Dispersion, dispersions, where_one
from vaerdict.de.sums import GroupSums

LOG2 = math.log(2)

_LEAST_SPREAD = 1e-12
_PER_BIN = 100  # genes that the variance between samples is estimated from
_MOST_VARIANCE = 4.0  # between samples, of logarithms: a factor of seven is one standard deviation
_MULTIPLES = tuple(2.0**k for k in range(-4, 5))
"""Variances between samples of a gene, in multiples of what is usual at its abundance."""

_LEAST_VARIANCE = 1e-4
_EM_STEPS = 100
_BINOMIAL_STEPS = 30
_SCORING_STEPS = 8
_LARGEST_STEP, _SMALLEST_STEP = 1.0, 1e-9  # of a coefficient


@dataclass(frozen=True, eq=False)
class LfcLikelihood:
    """Log-likelihood of every gene's log2 fold change up to a constant, its mode and its standard error, about.

    Shapes: ``at: (genes, r) -> (genes, r)``, ``mode`` and ``error`` ``(genes,)``.
    """

    at: Callable[[Tensor], Tensor]
    mode: Tensor
    error: Tensor


class SideCounts(NamedTuple):
    """Counts of one side with their exposure, the spread a, and the factor of their variance.

    Shapes: ``(genes,)`` each.
    """

    counts: Tensor
    exposure: Tensor
    spread: Tensor
    factor: Tensor

    @classmethod
    def of(cls, cells: GroupSums, dispersion: Dispersion, informative: float = 1.0) -> SideCounts:
        """Those of the cells of a group; the share `informative` is left of them by what covariates explain.

        The variance is never taken to be below Poisson's.
        """
        exposure = (informative * cells.library).expand_as(cells.total)
        spread = dispersion.trend * (cells.library_squares / cells.library.square() / informative)
        counts = informative * cells.total
        return cls(counts, exposure, spread, torch.maximum(dispersion.factor, 1 / (1 + counts * spread)))


Opposed = Sequence[tuple[SideCounts, SideCounts]]
"""Both sides in each batch."""


class _Deviance(NamedTuple):
    """Deviance of fold changes over the dispersion, and variances of both log-rates. Shapes: ``(genes, r)`` each."""

    value: Tensor
    variance_a: Tensor
    variance_b: Tensor


def _deviance(a: SideCounts, b: SideCounts, lfc: Tensor) -> _Deviance:
    """Of two sides, at the rate of highest likelihood for each fold change. Shapes: ``lfc (genes, r)``.

    Variances are those at this rate: a side without counts shows no dispersion of its own, and where both rates were
    equal it would vary as it would then.
    """
    y_a, y_b, s_a, s_b = (part.unsqueeze(-1) for part in (a.counts, b.counts, a.spread, b.spread))
    s_a, s_b = s_a.clamp_min(_LEAST_SPREAD), s_b.clamp_min(_LEAST_SPREAD)
    e_a, e_b = a.exposure.unsqueeze(-1) * torch.exp2(lfc), b.exposure.unsqueeze(-1).expand_as(lfc)
    square, linear = e_a * e_b * (s_a + s_b), y_a * s_b * e_b + y_b * s_a * e_a - e_a - e_b
    root = (linear.square() + 4 * square * (y_a + y_b)).sqrt()
    rate = torch.where(linear < 0, 2 * (y_a + y_b) / (root - linear), (linear + root) / (2 * square))
    mu_a, mu_b = e_a * rate, e_b * rate
    fitted = _negative_binomial(y_a, mu_a, s_a) + _negative_binomial(y_b, mu_b, s_b)
    best = _negative_binomial(y_a, y_a, s_a) + _negative_binomial(y_b, y_b, s_b)
    v_a, v_b = 1 / mu_a.clamp_min(1e-300) + s_a, 1 / mu_b.clamp_min(1e-300) + s_b
    u_a, u_b = a.factor.unsqueeze(-1) * v_a, b.factor.unsqueeze(-1) * v_b
    return _Deviance(2 * (best - fitted).clamp_min(0) * (v_a + v_b) / (u_a + u_b), u_a, u_b)


def _welch_df(parts: Sequence[_Deviance], df_a: Tensor, df_b: Tensor) -> Tensor:
    """Welch's degrees of freedom of the mean of all batches, for one dispersion per side in all of them.

    Shapes: ``df (genes,)``, ``-> (genes, r)``.
    """
    precision = torch.stack([1 / (part.variance_a + part.variance_b) for part in parts])
    share_a = (precision * (precision * torch.stack([part.variance_a for part in parts]))).sum(0) / precision.sum(0)
    return 1 / (share_a.square() / df_a.unsqueeze(-1) + (1 - share_a).square() / df_b.unsqueeze(-1))


def _negative_binomial(y: Tensor, mu: Tensor, spread: Tensor) -> Tensor:
    """Log-likelihood of the mean, up to a constant. Shapes: ``-> (genes, r)``."""
    return torch.special.xlogy(y, mu) - (y + 1 / spread) * torch.log1p(spread * mu)


def _mode(opposed: Opposed) -> tuple[Tensor, Tensor]:
    """About the likeliest fold change, and its standard error, both from one count more in all.

    The count is shared by exposure, so that it favours neither side. Shapes: ``(genes,)`` each.
    """
    every = torch.stack([side.exposure for pair in opposed for side in pair]).sum(0)
    modes, precisions = [], []
    for pair in opposed:
        more = [side.counts + side.exposure / every for side in pair]
        log = [(counts / side.exposure).log2() for counts, side in zip(more, pair, strict=True)]
        variance = [side.factor * (1 / counts + side.spread) for counts, side in zip(more, pair, strict=True)]
        modes.append(log[0] - log[1])
        precisions.append(1 / (variance[0] + variance[1]))
    precision = torch.stack(precisions)
    return (torch.stack(modes) * precision).sum(0) / precision.sum(0), precision.sum(0).rsqrt() / LOG2


# ----------------------------------------------------------------------------------------- cells as replicates
def cells_likelihood(pairs: Sequence[tuple[GroupSums, GroupSums]], informative: float = 1.0) -> LfcLikelihood:
    r"""With cells as replicates: `pairs` are group a and group b in each batch, whose deviances add up.

    The dispersion of a group is that within all its batches, moderated (`vaerdict.de.dispersion`). With few degrees of
    freedom :math:`\nu` the deviance D is that of Student's t, :math:`(\nu + 1) \ln(1 + D / \nu)`. `informative` is the
    share of the information that covariates leave to the difference between the groups.
    """
    of_a, of_b = dispersions(list(zip(*pairs, strict=True)))
    opposed = [(SideCounts.of(a, of_a, informative), SideCounts.of(b, of_b, informative)) for a, b in pairs]

    def log_likelihood(lfc: Tensor) -> Tensor:
        parts = [_deviance(a, b, lfc) for a, b in opposed]
        df = _welch_df(parts, of_a.df, of_b.df)
        deviance = torch.stack([part.value for part in parts]).sum(0)
        if len(parts) > 1:  # batches that disagree: their least deviance is that at the best of the nodes
            deviance = deviance - deviance.amin(-1, keepdim=True)
        return -0.5 * (df + 1) * torch.log1p(deviance / df)

    return LfcLikelihood(log_likelihood, *_mode(opposed))


# --------------------------------------------------------------------------------------- samples as replicates
@dataclass(frozen=True, eq=False)
class SampleDesign:
    """Samples of both sides: the number of each one's batch, whether it is on side a, and its covariates.

    Shapes: ``batch (samples,)``, ``first (samples,)`` bool, ``covariates (samples, q)``.
    """

    batch: Tensor
    first: Tensor
    covariates: Tensor

    @property
    def sides(self) -> Tensor:
        """A column for each side of each batch: batch 0 side a, batch 0 side b, and so on. Shapes: ``(samples, p)``."""
        number = 2 * self.batch + (~self.first).long()
        return torch.nn.functional.one_hot(number, 2 * (int(self.batch.max()) + 1)).double()

    @property
    def matrix(self) -> Tensor:
        """All columns: sides and covariates. Shapes: ``-> (samples, p + q)``."""
        return torch.cat([self.sides, self.covariates], -1)

    def informative(self, weight: Tensor) -> Tensor:
        """Share of the information that covariates leave the fold change. Shapes: ``(samples, genes) -> (genes,)``."""
        if not self.covariates.shape[1]:
            return torch.ones(weight.shape[1], dtype=torch.float64)
        batches = torch.nn.functional.one_hot(self.batch).double()
        plain = torch.cat([self.first.double().unsqueeze(-1), batches], -1)
        full = torch.cat([plain, self.covariates], -1)
        error = [torch.linalg.inv(_information(design, weight))[:, 0, 0] for design in (plain, full)]
        return (error[0] / error[1]).clamp(1e-6, 1.0)


def _information(design: Tensor, weight: Tensor) -> Tensor:
    """Shapes: ``(samples, p), (samples, genes) -> (genes, p, p)``."""
    return torch.einsum("sp,sg,sq->gpq", design, weight, design)


class _Fit(NamedTuple):
    """Samples fitted at a variance between them: side rates, covariate effects, precisions, and their evidence.

    Shapes: ``log_rate (genes, p)``, ``effect (samples, genes)``, ``weight (samples, genes)``, ``squares`` and
    ``evidence`` ``(genes,)``.
    """

    log_rate: Tensor
    effect: Tensor
    weight: Tensor
    squares: Tensor
    evidence: Tensor


@dataclass(frozen=True, eq=False)
class _Samples:
    """Rates of samples with exposures that count their cells at their own dispersion, ``(samples, genes)`` each."""

    rate: Tensor
    exposure: Tensor
    design: SampleDesign

    @classmethod
    def of(cls, samples: Sequence[GroupSums], design: SampleDesign) -> _Samples:
        dispersion = torch.empty(len(samples), len(samples[0].total), dtype=torch.float64)
        for first in (True, False):
            side = [s for s, is_a in zip(samples, design.first.tolist(), strict=True) if is_a == first]
            dispersion[design.first == first] = _beyond_poisson(side)
        library = torch.stack([s.library for s in samples]).unsqueeze(-1)
        return cls(torch.stack([s.rate for s in samples]), library / dispersion, design)

    def take(self, genes: Tensor) -> _Samples:
        """Those of some genes."""
        return _Samples(self.rate[:, genes], self.exposure[:, genes], self.design)

    def fit(self, variance: Tensor) -> _Fit:
        """Side rates and covariate effects by Fisher scoring, for variances between samples. Shapes: ``(genes,)``."""
        design, sides = self.design.matrix, self.design.sides
        counts, exposure = sides.T @ (self.rate * self.exposure), sides.T @ self.exposure
        start = ((counts + exposure / exposure.sum(0)) / exposure).log().T
        beta = torch.cat([start, start.new_zeros(len(start), design.shape[1] - sides.shape[1])], -1)
        for _ in range(_SCORING_STEPS if self.design.covariates.shape[1] else 2):
            mean = (design @ beta.T).exp()
            weight = 1 / (1 / (mean * self.exposure) + variance)
            score = torch.einsum("sp,sg->gp", design, weight * (self.rate / mean - 1))
            step = torch.linalg.solve(_information(design, weight), score.unsqueeze(-1)).squeeze(-1)
            beta = beta + step.clamp(-_LARGEST_STEP, _LARGEST_STEP)
        mean = (design @ beta.T).exp()
        weight = 1 / (1 / (mean * self.exposure) + variance)
        squares = (weight * (self.rate / mean - 1).square()).sum(0)
        log_det = torch.linalg.slogdet(_information(design, weight)).logabsdet
        p = sides.shape[1]
        evidence = 0.5 * (weight.log().sum(0) - log_det - squares)
        return _Fit(beta[:, :p], self.design.covariates @ beta[:, p:].T, weight, squares, evidence)

    def opposed(self, fit: _Fit, variance: Tensor) -> Opposed:
        """Both sides in each batch as counts: samples of many cells count alike, those of few by their cells."""
        informative, sides = self.design.informative(fit.weight), []
        for p in range(fit.log_rate.shape[1]):
            mine = self.design.sides[:, p] > 0
            share = fit.weight[mine] / fit.weight[mine].sum(0)
            exposure = informative / (share.square() / (self.exposure[mine] * fit.effect[mine].exp())).sum(0)
            spread = variance * share.square().sum(0) / informative
            sides.append(SideCounts(fit.log_rate[:, p].exp() * exposure, exposure, spread, torch.ones_like(exposure)))
        return list(zip(sides[::2], sides[1::2], strict=True))


def samples_likelihood(samples: Sequence[GroupSums], design: SampleDesign) -> LfcLikelihood:
    r"""With samples as replicates.

    The rate of a sample varies by its cells and between samples, :math:`\mathrm{var}(m_i) / m^2 = 1 / (m E_i) +
    \alpha_g`, with the exposure :math:`E_i` over the dispersion between its cells. The variance :math:`\alpha_g` of
    a gene is a multiple of what is usual at its abundance; how often each multiple occurs is estimated from all
    genes, and the likelihood of the fold change is the mixture over multiples, each weighted by how well it explains
    the deviations of the gene's samples from their sides (and covariates).
    """
    units, df = _Samples.of(samples, design), len(samples) - design.matrix.shape[1]
    if df < 1:
        raise SettingError(
            f"{len(samples)} samples with {design.matrix.shape[1]} coefficients leave no deviation between samples; "
            "give more samples, or leave batch_key or covariates out."
        )
    bins = Bins.of((units.rate * units.exposure).mean(0).clamp_min(1e-9), _PER_BIN)
    usual = _usual_variance(lambda genes, v: units.take(genes).fit(v).squares, bins, df)
    components = []
    for multiple in _MULTIPLES:
        variance = _LEAST_VARIANCE + multiple * usual
        fit = units.fit(variance)
        components.append(_of_samples(fit.evidence, units.opposed(fit, variance)))
    return _mixed(components, bins)


class _Component(NamedTuple):
    """The likelihood at one variance between samples, a density of the estimates, and the evidence for this variance.

    Shapes: ``evidence (genes,)``.
    """

    evidence: Tensor
    likelihood: LfcLikelihood


def _of_samples(evidence: Tensor, opposed: Opposed) -> _Component:
    """The density of the fold changes of all batches at one variance."""
    log_error = torch.stack([_mode([pair])[1].log() for pair in opposed]).sum(0).unsqueeze(-1)

    def at(lfc: Tensor) -> Tensor:
        return -0.5 * torch.stack([_deviance(a, b, lfc).value for a, b in opposed]).sum(0) - log_error

    return _Component(evidence, LfcLikelihood(at, *_mode(opposed)))


def paired_likelihood(pairs: Sequence[tuple[GroupSums, GroupSums]]) -> LfcLikelihood:
    r"""With samples as replicates that all have cells on both sides: `pairs` are both sides of each sample.

    The counts of side a given the sum of a sample are binomial, over-dispersed between cells; fold changes vary from
    sample to sample with a variance :math:`\tau_g` that takes the place of :math:`\alpha_g` in `samples_likelihood`.
    """
    if len(pairs) < 2:
        raise SettingError("one sample shows no variance between samples; give at least two.")
    units = _Pairs.of(pairs)
    bins = Bins.of((units.a + units.b).mean(0).clamp_min(1e-9), _PER_BIN)
    usual = _usual_variance(lambda genes, tau: units.take(genes).fit(tau).squares, bins, len(pairs) - 1)
    return _mixed([units.component(_LEAST_VARIANCE + multiple * usual) for multiple in _MULTIPLES], bins)


class _PairFit(NamedTuple):
    """Pairs at a variance between them: their precisions, as a power of their likelihoods too, and squared deviations.

    Shapes: ``weight`` and ``power`` ``(samples, genes)``, ``squares (genes,)``.
    """

    weight: Tensor
    power: Tensor
    squares: Tensor


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Both sides of each sample: counts over their dispersion between cells, and the log-ratio of their exposures.

    `lfc` is the fold change common to all samples of highest likelihood. Shapes: ``(samples, genes)`` each,
    ``lfc (genes,)``.
    """

    a: Tensor
    b: Tensor
    log_ratio: Tensor
    lfc: Tensor

    @classmethod
    def of(cls, pairs: Sequence[tuple[GroupSums, GroupSums]]) -> _Pairs:
        phi = _beyond_poisson([side for pair in pairs for side in pair])
        a, b = (torch.stack([pair[side].total for pair in pairs]) / phi for side in (0, 1))
        log_ratio = torch.stack([(x.library / y.library).log().expand_as(phi) for x, y in pairs])
        return cls(a, b, log_ratio, _common_lfc(a, b, log_ratio, torch.ones_like(a)))

    def take(self, genes: Tensor) -> _Pairs:
        """Those of some genes."""
        return _Pairs(self.a[:, genes], self.b[:, genes], self.log_ratio[:, genes], self.lfc[genes])

    def fit(self, tau: Tensor) -> _PairFit:
        """Samples about their mean, for variances between them. Shapes: ``(genes,)``."""
        share = torch.sigmoid(self.log_ratio + self.lfc * LOG2)
        information = ((self.a + self.b) * share * (1 - share)).clamp_min(1e-12)
        weight = 1 / (1 / information + tau)
        deviation = (self.a - (self.a + self.b) * share) / information
        mean = (weight * deviation).sum(0) / weight.sum(0)
        return _PairFit(weight, weight / information, (weight * (deviation - mean).square()).sum(0))

    def component(self, tau: Tensor) -> _Component:
        """The likelihood at a variance between samples: each binomial to the power that leaves it its precision."""
        fit = self.fit(tau)
        mode, precision = _common_lfc(self.a, self.b, self.log_ratio, fit.power), fit.weight.sum(0)
        error = precision.clamp_min(1e-3).rsqrt() / LOG2

        def log_lik(lfc: Tensor) -> Tensor:
            odds = self.log_ratio.unsqueeze(-1) + lfc * LOG2
            terms = self.a.unsqueeze(-1) * odds - (self.a + self.b).unsqueeze(-1) * softplus(odds)
            return (fit.power.unsqueeze(-1) * terms).sum(0)

        offset = log_lik(mode.unsqueeze(-1)) + error.log().unsqueeze(-1)
        evidence = 0.5 * (fit.weight.log().sum(0) - precision.log() - fit.squares)
        return _Component(evidence, LfcLikelihood(lambda lfc: log_lik(lfc) - offset, mode, error))


def _common_lfc(a: Tensor, b: Tensor, log_ratio: Tensor, power: Tensor) -> Tensor:
    """The likeliest fold change common to all samples, with one count more in all, shared by exposure.

    Shapes: ``(samples, genes)`` each, ``power`` of the binomial of each sample, ``-> (genes,)``.
    """
    more = torch.sigmoid(log_ratio) / len(a)
    a, b = a + more, b + 1 / len(a) - more
    lfc = torch.zeros_like(a[0])
    for _ in range(_BINOMIAL_STEPS):
        share = torch.sigmoid(log_ratio + lfc * LOG2)
        score, information = a - (a + b) * share, (a + b) * share * (1 - share)
        step = (power * score).sum(0) / (power * information).sum(0) / LOG2
        lfc = lfc + step.clamp(-_LARGEST_STEP, _LARGEST_STEP)
        if float(step.abs().max()) < _SMALLEST_STEP:
            break
    return lfc


def _beyond_poisson(groups: Sequence[GroupSums]) -> Tensor:
    """Squared deviations of cells over those of Poisson counts, one at least. Shapes: ``-> (genes,)``."""
    observed, poisson = (
        torch.stack(part).sum(0) for part in zip(*((g.deviations, g.total) for g in groups), strict=True)
    )
    return torch.where(poisson > 0, observed / poisson.clamp_min(1e-300), 1.0).clamp_min(1.0)


def _usual_variance(squares: Callable[[Tensor, Tensor], Tensor], bins: Bins, df: int) -> Tensor:
    """In each class of genes the variance at which the median gene deviates as a chi-square. Shapes: ``(genes,)``."""
    expected = float(stats.chi2.median(df))

    def median(genes: Tensor) -> Callable[[float], float]:
        return lambda v: float(squares(genes, torch.full((len(genes),), v, dtype=torch.float64)).median()) / expected

    return bins.curve([where_one(median(genes), _MOST_VARIANCE) for genes in bins.genes])


def _mixed(components: Sequence[_Component], bins: Bins) -> LfcLikelihood:
    """The likelihood over components whose shares are estimated in each class of genes."""
    evidence = torch.stack([component.evidence for component in components], -1)
    scaled = (evidence - evidence.amax(-1, keepdim=True)).exp()
    weight = torch.empty_like(scaled)
    for genes in bins.genes:
        weight[genes] = _shares_of(scaled[genes])
    parts = [component.likelihood for component in components]

    def log_likelihood(lfc: Tensor) -> Tensor:
        total = torch.full_like(lfc, -math.inf)
        for part, log_weight in zip(parts, weight.clamp_min(1e-300).log().T, strict=True):
            total = torch.logaddexp(total, part.at(lfc) + log_weight.unsqueeze(-1))
        return total

    mode, error = (torch.stack(values, -1) for values in zip(*((p.mode, p.error) for p in parts), strict=True))
    return LfcLikelihood(log_likelihood, (weight * mode).sum(-1), (weight * error).sum(-1))


def _shares_of(evidence: Tensor) -> Tensor:
    """Posterior shares of components for each gene, their prior by EM with one gene more. Shapes: ``(genes, k)``."""
    n, k = evidence.shape
    prior, posterior = torch.full((k,), 1 / k, dtype=evidence.dtype), evidence
    for _ in range(_EM_STEPS):
        posterior = prior * evidence
        posterior = posterior / posterior.sum(-1, keepdim=True)
        prior = (posterior.sum(0) + 1 / k) / (n + 1)
    return posterior
