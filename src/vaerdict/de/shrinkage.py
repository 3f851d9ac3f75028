r"""Adaptive shrinkage: a prior for fold changes estimated from all genes, and each gene's posterior under it.

The prior is a mixture of normals about the centre c of all fold changes,

.. math:: \lambda_g \sim \pi_0\, \delta_c + \sum_k \pi_k\, N(c, \tau_k^2),

with shares :math:`\pi_k` of highest marginal likelihood over all genes (empirical Bayes). Without it a gene of few
counts would look changed because its likelihood is wide. Posteriors are integrals over nodes of the gene's own, dense
about the centre and about its mode: probabilities are exact down to the smallest numbers, and no two genes tie because
draws are few. Reference: Stephens (2017), False discovery rates: a new deal, Biostatistics 18(2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vaerdict.de.counts_likelihood import LfcLikelihood

WIDTHS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 1.6, 2.5, 4.0)
"""Standard deviations of the mixture's components, in log2 units; the first is none at all."""

_ITERATIONS = 300
_CLOSE, _FAR = 0.1, 1.0  # widths for genes that do not change and that do, when the centre is sought
_KNOWN = 0.5  # standard error up to which a gene counts as well known
_STARTS = (0.1, 0.3, 0.5, 0.7, 0.9)  # quantiles of fold changes from which a balance is sought
_BALANCE_STEPS = 100
_ABOUT_CENTRE = 0.06 * torch.sinh(torch.linspace(-6.2, 6.2, 101, dtype=torch.float64))
_ABOUT_CENTRE[50] = 0.0
_STEEP = 0.5  # of the logarithm of a density, from node to node
_ABOUT_MODE = 0.8 * torch.sinh(torch.linspace(-3.0, 3.0, 61, dtype=torch.float64))
_ABOUT_OTHER = 0.06 * torch.sinh(torch.linspace(-5.5, 5.5, 61, dtype=torch.float64))


class NodeLikelihood(NamedTuple):
    """The likelihood of every gene's fold change at rising nodes, as differences from the centre.

    `log_lik` is at most zero. Shapes: ``nodes`` and ``log_lik`` ``(genes, r)``, ``mode`` and ``error`` ``(genes,)``.
    """

    nodes: Tensor
    log_lik: Tensor
    mode: Tensor
    error: Tensor

    @classmethod
    def of(
        cls, likelihood: LfcLikelihood, centre: float, exact: Sequence[float], about: Tensor | None = None
    ) -> NodeLikelihood:
        """With nodes about zero and about the mode, and at the values `exact`, whose tails are asked for.

        More nodes lie about another value of each gene where `about` names one. Shapes: ``about (genes,)``.
        """
        mode, error = likelihood.mode - centre, likelihood.error
        wanted = torch.tensor(exact, dtype=torch.float64).expand(len(mode), -1)
        local = [mode.unsqueeze(-1) + error.unsqueeze(-1) * _ABOUT_MODE]
        local += [] if about is None else [about.unsqueeze(-1) + _ABOUT_OTHER]
        nodes = torch.cat([_ABOUT_CENTRE.expand(len(mode), -1), *local, wanted], -1).sort(-1).values
        log_lik = likelihood.at(nodes + centre)
        return cls(nodes, log_lik - log_lik.amax(-1, keepdim=True), mode, error)

    def take(self, genes: Tensor) -> NodeLikelihood:
        """That of some genes."""
        return NodeLikelihood(*(part[genes] for part in self))

    @property
    def weights(self) -> Tensor:
        """The weights of the nodes in an integral by the trapezoidal rule. Shapes: ``-> (genes, r)``."""
        half = 0.5 * self.nodes.diff(dim=-1)
        none = torch.zeros_like(half[:, :1])
        return torch.cat([half, none], -1) + torch.cat([none, half], -1)

    def at_zero(self) -> Tensor:
        """The likelihood at the centre, which is a node. Shapes: ``-> (genes,)``."""
        place = (self.nodes >= 0).to(torch.uint8).argmax(-1, keepdim=True)
        return self.log_lik.gather(-1, place).squeeze(-1).exp()


def centre_of(mode: Tensor, error: Tensor) -> float:
    """The fold change about which most genes lie close: the likeliest centre of a narrow and a wide normal.

    Of the genes, given by the modes and standard errors of their fold changes, the better known half counts. Unlike
    the median, the centre does not move where many genes change in one direction. Shapes: ``(genes,)`` each.
    """
    known = error <= float(error.median())
    mode, error = mode[known], error[known]
    low, high = (float(mode.quantile(q)) for q in (0.05, 0.95))
    best = 0.5 * (low + high)
    for n in (401, 41, 41):  # finer about the best; the same from both ends
        centres = torch.linspace(low, high, n, dtype=torch.float64)
        best = float(centres[_log_closeness(centres, mode, error).argmax()])
        step = (high - low) / (n - 1)
        low, high = best - step, best + step
    return best


def well_known(error: Tensor) -> Tensor:
    """The genes known to half a log2 unit, at least the better known half. Shapes: ``(genes,) -> (genes,)`` bool."""
    return error <= max(float(error.median()), _KNOWN)


def balance_of(mode: Tensor, error: Tensor, centre: float, *, most: int = 2000) -> tuple[float, float]:
    """The centre about which the prior, which is symmetric, fits the changes of the well-known genes best.

    It comes with its standard error, that of an M-estimator with known shares (Huber, 1967), which is too small where
    several centres fit about as well. The likelihood is maximised over shares and centre by EM from `centre` and from
    quantiles of the fold changes; up to `most` genes are used. The balance differs from `centre_of` where the changes
    about the largest set of genes do not balance: then one of the two assumptions is wrong. It also differs where the
    better known half of the genes, which decides the centre, changed otherwise than the rest.

    Shapes: ``(genes,)`` each.
    """
    places = well_known(error).nonzero().squeeze(-1)
    places = places[:: -(-len(places) // most)]
    mode, error = mode[places], error[places]
    variance = error.square().unsqueeze(-1) + torch.tensor(WIDTHS, dtype=torch.float64).square()  # (genes, widths)
    starts = mode.quantile(torch.tensor(_STARTS, dtype=torch.float64))
    centres = torch.cat([torch.tensor([centre], dtype=torch.float64), starts]).unsqueeze(-1)
    shares = torch.full((len(centres), len(WIDTHS)), 1 / len(WIDTHS), dtype=torch.float64)
    log_lik = information = torch.zeros(len(centres), dtype=torch.float64)
    scores = torch.zeros(len(centres), len(mode), dtype=torch.float64)
    for _ in range(_BALANCE_STEPS):
        apart = (mode - centres).square().unsqueeze(-1)  # (starts, genes, 1)
        joint = -0.5 * (apart / variance + variance.log()) + shares.log().unsqueeze(1)
        total = joint.logsumexp(-1, keepdim=True)
        belongs = (joint - total).exp()
        log_lik, shares = total.squeeze(-1).sum(-1), belongs.mean(1).clamp_min(1e-12)
        weight = (belongs / variance).sum(-1)
        scores, curved = weight * (mode - centres), (belongs * apart / variance.square()).sum(-1)
        information = (weight - curved + scores.square()).sum(-1)
        centres = (weight * mode).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True)
    best, n = log_lik.argmax(), len(mode)
    if n < 2 or information[best] <= 0:
        return float(centres[best]), math.inf
    return float(centres[best]), float((n / (n - 1) * scores[best].square().sum()).sqrt() / information[best])


def _log_closeness(centres: Tensor, mode: Tensor, error: Tensor) -> Tensor:
    """Log-likelihood of centres. Shapes: ``(c,), (genes,), (genes,) -> (c,)``."""
    total = torch.zeros_like(centres)
    for some_mode, some_error in zip(mode.split(2000), error.split(2000), strict=True):
        parts = []
        for width in (_CLOSE, _FAR):
            sd = (some_error.square() + width**2).sqrt()
            parts.append(-0.5 * ((centres.unsqueeze(-1) - some_mode) / sd).square() - sd.log())
        total += torch.logaddexp(*parts).sum(-1)
    return total


# --------------------------------------------------------------------------------------------------- the prior
def normal_density(nodes: Tensor, centre: Tensor | float, sd: Tensor | float) -> Tensor:
    """Shapes: ``nodes (genes, r)``, others broadcast ``-> (genes, r)``."""
    return torch.exp(-0.5 * ((nodes - centre) / sd).square()) / (sd * math.sqrt(2 * math.pi))


def fit_shares(likelihood: NodeLikelihood) -> Tensor:
    """Shares of the components about the centre, of highest marginal likelihood, by EM. Shapes: ``-> (widths,)``."""
    scaled = likelihood.log_lik.exp() * likelihood.weights
    columns = [(scaled * normal_density(likelihood.nodes, 0.0, width)).sum(-1) for width in WIDTHS[1:]]
    return em_shares(torch.stack([likelihood.at_zero(), *columns], -1))


def em_shares(marginal: Tensor, pseudo: Tensor | None = None) -> Tensor:
    """The shares of components with these marginal likelihoods.

    `pseudo` are numbers of genes that are counted as of each component beside those seen. Shapes: ``(genes, widths),
    (widths,) -> (widths,)``.
    """
    marginal = marginal.clamp_min(1e-300)
    pseudo = torch.zeros_like(marginal[0]) if pseudo is None else pseudo
    shares = torch.full((marginal.shape[1],), 1 / marginal.shape[1], dtype=marginal.dtype)
    for _ in range(_ITERATIONS):
        shares = (shares * (marginal.mT @ (1 / (marginal @ shares))) + pseudo) / (len(marginal) + pseudo.sum())
    return shares


def prior_density(nodes: Tensor, shares: Tensor) -> Tensor:
    """The density of the prior's components of positive width. Shapes: ``(genes, r), (widths,) -> (genes, r)``."""
    parts = zip(shares[1:].tolist(), WIDTHS[1:], strict=True)
    return sum((share * normal_density(nodes, 0.0, width) for share, width in parts), torch.tensor(0.0))


# ----------------------------------------------------------------------------------------------- the posterior
class PosteriorOfChange(Protocol):
    """The posterior of every gene's difference from the centre."""

    mean: Tensor

    def below(self, value: float, *, or_equal: bool = False) -> Tensor:
        """Probability of a difference below a value that is a node. Shapes: ``-> (genes,)``."""
        ...

    def above(self, value: float, *, or_equal: bool = False) -> Tensor:
        """Probability of a difference above a value that is a node. Shapes: ``-> (genes,)``."""
        ...

    def quantile(self, level: float) -> Tensor:
        """Shapes: ``-> (genes,)``."""
        ...


class LfcPosterior:
    """The posterior of every gene's difference from the centre: a density at nodes, and a probability of the centre."""

    def __init__(self, likelihood: NodeLikelihood, shares: Tensor | None) -> None:
        """Under a prior of these shares, or under a flat one. Shapes: ``shares (widths,)``."""
        nodes, scaled = likelihood.nodes, likelihood.log_lik.exp()
        if shares is None:
            density, atom = scaled, torch.zeros_like(likelihood.mode)
        else:
            density = scaled * prior_density(nodes, shares)
            atom = shares[0] * likelihood.at_zero()
        mass = _mean_between(density) * nodes.diff(dim=-1)
        total = mass.sum(-1) + atom
        none = torch.zeros_like(total).unsqueeze(-1)
        self._nodes, self._atom = nodes, atom / total
        self._below = torch.cat([none, mass.cumsum(-1)], -1) / total.unsqueeze(-1)
        self._above = torch.cat([mass.flip(-1).cumsum(-1).flip(-1), none], -1) / total.unsqueeze(-1)
        weighted = density * likelihood.weights
        self.mean = (weighted * nodes).sum(-1) / (weighted.sum(-1) + atom)

    def below(self, value: float, *, or_equal: bool = False) -> Tensor:
        """Probability of a difference below a value that is a node. Shapes: ``-> (genes,)``."""
        return self._at(self._below, value) + self._atom * float(value > 0 or (or_equal and value == 0))

    def above(self, value: float, *, or_equal: bool = False) -> Tensor:
        """Probability of a difference above a value that is a node. Shapes: ``-> (genes,)``."""
        return self._at(self._above, value) + self._atom * float(value < 0 or (or_equal and value == 0))

    def _at(self, mass: Tensor, value: float) -> Tensor:
        place = (self._nodes >= value).to(torch.uint8).argmax(-1, keepdim=True)
        return mass.gather(-1, place).squeeze(-1).clamp_max(1)

    def up_to(self, value: Tensor) -> Tensor:
        """Probability of a difference of at most a value, between nodes by a line. Shapes: ``(genes,) -> (genes,)``."""
        value = value.unsqueeze(-1)
        place = torch.searchsorted(self._nodes, value).clamp(1, self._nodes.shape[1] - 1)
        (x_0, x_1), (p_0, p_1) = ([v.gather(-1, i) for i in (place - 1, place)] for v in (self._nodes, self._below))
        share = ((value - x_0) / (x_1 - x_0).clamp_min(1e-300)).clamp(0, 1)
        return (p_0 + share * (p_1 - p_0)).squeeze(-1) + self._atom * (value.squeeze(-1) >= 0)

    def quantile(self, level: float) -> Tensor:
        """Shapes: ``-> (genes,)``."""
        up_to = self._below + self._atom.unsqueeze(-1) * (self._nodes >= 0)
        place = (up_to >= level).to(torch.uint8).argmax(-1, keepdim=True).clamp_min(1)
        x_0, x_1 = self._nodes.gather(-1, place - 1), self._nodes.gather(-1, place)
        p_0 = up_to.gather(-1, place - 1)
        p_1 = torch.where(x_1 == 0, self._below.gather(-1, place), up_to.gather(-1, place))
        share = ((level - p_0) / (p_1 - p_0).clamp_min(1e-300)).clamp(0, 1)
        return (x_0 + share * (x_1 - x_0)).squeeze(-1)


def _mean_between(density: Tensor) -> Tensor:
    """The mean between neighbouring nodes: linear where a density changes little, exponential where it is steep.

    Shapes: ``(genes, r) -> (genes, r - 1)``.
    """
    left, right = density[:, :-1], density[:, 1:]
    rise = right.clamp_min(1e-300).log() - left.clamp_min(1e-300).log()
    return torch.where(rise.abs() < _STEEP, 0.5 * (left + right), (right - left) / rise)
