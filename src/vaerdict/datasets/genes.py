r"""Simulated gene counts with their true fold changes: the paper's Poisson log-normals, and cells from donors.

The paper draws :math:`h \sim \mathrm{LogNormal}(\mu, \Sigma)` with :math:`\mu` in (10, 100). On the log scale that
would be :math:`e^{100}` counts. It is read here, as the released code in effect does, as
:math:`\log h \sim N(\log \mu, \Sigma)`, with :math:`\mu` the median level. The covariance is equal in all states.
Therefore :math:`E[h_a] / E[h_b] = \mu_a / \mu_b`, and the log fold change of the means is the paper's :math:`\Delta`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import SettingError, check_count
from vaerdict.noise import seeded

_EFFECT, _EFFECT_SD = 1.0, 0.16
_TRUTH_CELLS, _TRUTH_CHUNK = 50_000, 2**21  # cells per state; numbers at a time
_TRUTH_SEED = 2**40  # added to the seed, so that the truth is not simulated with the noise of any data set


class CountData(NamedTuple):
    """Counts, the state of each cell, and the true expression of the states.

    `level` is log2 of a state's mean expression and `proportion` log2 of its mean proportion
    :math:`E[h_g / \\sum_j h_j]`. Both are of the population and of expression itself, without technical depth and
    dropout, which are common to all states. `rate` is each cell's expression h, for oracles. `donors` is the donor of
    each cell, or None.

    Shapes: ``counts (cells, genes)``, ``labels (cells,)``, ``level (states, genes)``, ``proportion (states, genes)``,
    ``rate (cells, genes)``, ``donors (cells,)``.
    """

    counts: Tensor
    labels: Tensor
    level: Tensor
    proportion: Tensor
    rate: Tensor
    donors: Tensor | None = None

    def lfc(self, a: int, b: int, *, proportions: bool = False) -> Tensor:
        """The true log2 fold change of state a over state b, of mean expression or of mean proportions.

        A group mean of normalised expression estimates that of proportions and, centred on its median over genes, that
        of mean expression.

        Shapes: ``-> (genes,)``.
        """
        log2_mean = self.proportion if proportions else self.level
        return log2_mean[a] - log2_mean[b]


Expression = Callable[[int, torch.Generator], Tensor]
"""Expression of n new cells in every state, with the same noise in all. Shapes: ``-> (states, n, genes)``."""


# ----------------------------------------------------------------------------------------- Poisson log-normal
def appendix(
    seed: int = 0, *, n_cells: int = 1000, n_genes: int = 100, group_weights: Sequence[float] = (1, 1)
) -> CountData:
    """The data of the paper's appendix: means in (10, 100), a third of the genes up and a third down.

    Parameters
    ----------
    seed
        The seed of counts and true fold changes.
    n_cells, n_genes
        The size of the data set.
    group_weights
        The relative numbers of cells of the states; their number is the number of states.

    Examples
    --------
    >>> data = appendix(0, n_cells=30, n_genes=5)
    >>> data.counts.shape, data.lfc(1, 0).shape
    (torch.Size([30, 5]), torch.Size([5]))
    """
    return _log_normal(seed, n_cells, n_genes, group_weights, means=(10, 100), changed=2 / 3, scale=1, zeroed=0)


def section5(
    seed: int = 0, *, n_cells: int = 10_000, n_genes: int = 100, group_weights: Sequence[float] = (1, 1, 1, 1, 1)
) -> CountData:
    """The data of the paper's section 5: five cell types, otherwise as `appendix`, whose parameters it has."""
    return _log_normal(seed, n_cells, n_genes, group_weights, means=(10, 100), changed=2 / 3, scale=1, zeroed=0)


def graded(
    seed: int = 0, *, n_cells: int = 1000, n_genes: int = 100, group_weights: Sequence[float] = (1, 1)
) -> CountData:
    """The data of `appendix`, whose parameters it has, but with changes that are uniform between -1 and 1.

    Many genes lie near any threshold. There stated probabilities must be neither 0 nor 1, which changes that are nearly
    0, -1 or 1 never ask for. For every gene that changes by an amount another changes by its negative, so that the
    median change is zero and a change relative to the median gene is the change itself.
    """
    return _log_normal(seed, n_cells, n_genes, group_weights, means=(10, 100), changed=None, scale=1, zeroed=0)


def released(
    seed: int = 0, *, n_cells: int = 1000, n_genes: int = 100, group_weights: Sequence[float] = (1, 1)
) -> CountData:
    """The data of the paper's released code, with the parameters of `appendix`.

    Means are in (10, 60), half of the genes change, the covariance is 0.08 times the printed one, and 30 % of entries
    are zeroed.
    """
    return _log_normal(seed, n_cells, n_genes, group_weights, means=(10, 60), changed=0.5, scale=0.08, zeroed=0.3)


def _log_normal(
    seed: int,
    n_cells: int,
    n_genes: int,
    group_weights: Sequence[float],
    *,
    means: tuple[float, float],
    changed: float | None,
    scale: float,
    zeroed: float,
) -> CountData:
    generator = seeded(seed)
    labels = _labels(n_cells, group_weights, generator)
    median = means[0] + (means[1] - means[0]) * _uniform(n_genes, generator)
    size = (len(group_weights), n_genes)
    change = _graded_changes(*size, generator) if changed is None else _changes(*size, changed, generator)
    log_mean = median.log() + math.log(2) * change
    # Sigma = scale ((0.5 + u) I + 2 a a'), by its root: independent noise per gene and one factor common to all genes
    gene_sd = (scale * (0.25 + 0.5 * _uniform(n_genes, generator))).sqrt()
    loading = math.sqrt(2 * scale) * (2 * _uniform(n_genes, generator) - 1)

    def noise(n: int, g: torch.Generator) -> Tensor:
        return gene_sd * _normal((n, n_genes), g) + loading * _normal((n, 1), g)

    def expression(n: int, g: torch.Generator) -> Tensor:
        return (log_mean[:, None] + noise(n, g)).exp()

    rate = (log_mean[labels] + noise(n_cells, generator)).exp()
    counts = torch.poisson(rate, generator=generator)
    counts = counts * (_uniform((n_cells, n_genes), generator) >= zeroed)
    level = log_mean + 0.5 * (gene_sd.square() + loading.square())
    return _record(counts, labels, level / math.log(2), _log2_proportion(expression, log_mean.numel(), seed), rate)


# ------------------------------------------------------------------------------- negative binomial with donors
def donors(
    seed: int = 0,
    *,
    n_cells: int = 2000,
    n_genes: int = 100,
    n_donors: Sequence[int] = (4, 4),
    group_weights: Sequence[float] = (1, 2),
    donor_sd: float = 0.2,
    depth_sd: float = 0.4,
    null: bool = False,
) -> CountData:
    r"""Negative-binomial counts of cells from donors, with every donor in one group.

    :math:`x \sim \mathrm{Poisson}(s_n h_{ng})` with depth :math:`\log s_n \sim N(0, \texttt{depth\_sd}^2)` and
    expression :math:`h_{ng} \sim \mathrm{Gamma}` of mean :math:`\mu_{cg} e^{b_{dg}}`, shape :math:`r_g` in (1, 10) and
    donor effect :math:`b_{dg} \sim N(0, \texttt{donor\_sd}^2)`. Levels are log-normal about 5 counts. A third of the
    genes goes up and a third down. The truth is that of the population of donors, not of the donors drawn.

    Parameters
    ----------
    seed
        The seed of counts and true fold changes.
    n_cells, n_genes
        The size of the data set.
    n_donors
        The number of donors per group. Within a group the numbers of cells per donor are in proportions 1, 2, ..., n.
    group_weights
        The relative numbers of cells of the groups.
    donor_sd, depth_sd
        Standard deviations of donor effects and of log depth.
    null
        If True, no gene differs between groups.

    Examples
    --------
    >>> data = donors(0, n_cells=40, n_genes=5, n_donors=(2, 3))
    >>> data.counts.shape, int(data.donors.max()) + 1
    (torch.Size([40, 5]), 5)
    """
    if len(n_donors) != len(group_weights):
        raise SettingError(
            f"n_donors names {len(n_donors)} groups, group_weights {len(group_weights)}; give each group both."
        )
    generator = seeded(seed)
    groups = torch.arange(len(group_weights)).repeat_interleave(
        torch.tensor([check_count(n, name="n_donors") for n in n_donors])
    )
    weight = torch.cat([w * _staircase(n) for w, n in zip(group_weights, n_donors, strict=True)])
    donor = _labels(n_cells, weight.tolist(), generator)
    base = math.log(5) + _normal((n_genes,), generator)
    log2_change = _changes(len(group_weights), n_genes, 2 / 3, generator)
    log_mean = base + (0 if null else math.log(2)) * log2_change
    shape = 1 + 9 * _uniform(n_genes, generator)
    effect = donor_sd * _normal((len(groups), n_genes), generator)

    def gamma(n: int, g: torch.Generator) -> Tensor:
        return torch._standard_gamma(shape.expand(n, -1).contiguous(), generator=g) / shape

    def expression(n: int, g: torch.Generator) -> Tensor:
        return (log_mean[:, None] + donor_sd * _normal((n, n_genes), g)).exp() * gamma(n, g)

    labels = groups[donor]
    rate = (log_mean[labels] + effect[donor]).exp() * gamma(n_cells, generator)
    depth = (depth_sd * _normal((n_cells, 1), generator)).exp()
    counts = torch.poisson(depth * rate, generator=generator)
    level = (log_mean + 0.5 * donor_sd**2) / math.log(2)
    return _record(counts, labels, level, _log2_proportion(expression, log_mean.numel(), seed), rate, donor)


def _staircase(n: int) -> Tensor:
    steps = torch.arange(1.0, n + 1)
    return steps / steps.sum()


# ----------------------------------------------------------------------------------------------------- helpers
def _labels(n_cells: int, weights: Sequence[float], generator: torch.Generator) -> Tensor:
    """A random state per cell with probabilities proportional to the weights; every state has at least one cell."""
    check_count(n_cells, name="n_cells")
    weight = torch.tensor(weights, dtype=torch.float64)
    if len(weights) < 1 or not bool((weight > 0).all()) or len(weights) > n_cells:
        raise SettingError(
            f"group_weights={tuple(weights)} must be positive, one per state, and no more than {n_cells} cells."
        )
    drawn = torch.multinomial(weight, n_cells, replacement=True, generator=generator)
    drawn[: len(weights)] = torch.arange(len(weights))
    return drawn[torch.randperm(n_cells, generator=generator)]


def _changes(n_states: int, n_genes: int, changed: float, generator: torch.Generator) -> Tensor:
    """Log2 fold changes of every state from the first: near -1 or 1 for a fraction `changed` of genes, else near 0.

    Shapes: ``-> (states, genes)``.
    """
    u = _uniform((n_states, n_genes), generator)
    status = (u < changed / 2).double() - (u >= 1 - changed / 2).double()
    change = _EFFECT * status + _EFFECT_SD * _normal((n_states, n_genes), generator)
    change[0] = 0
    return change


def _graded_changes(n_states: int, n_genes: int, generator: torch.Generator) -> Tensor:
    """Log2 fold changes of every state from the first: uniform in (-1, 1), in pairs of opposite sign, a last one zero.

    Shapes: ``-> (states, genes)``.
    """
    half = 2 * _uniform((n_states, n_genes // 2), generator) - 1
    pairs = torch.cat([half, -half, torch.zeros(n_states, n_genes % 2, dtype=half.dtype)], 1)
    change = torch.stack([one[torch.randperm(n_genes, generator=generator)] for one in pairs])
    change[0] = 0
    return change


@torch.no_grad()
def _log2_proportion(expression: Expression, size: int, seed: int) -> Tensor:
    """Log2 of each gene's mean proportion in each state, by a simulation of its own; exact to about 0.01.

    The states share their noise, which makes fold changes more exact. `size` is the number of values per cell over all
    states.
    """
    generator = seeded(_TRUTH_SEED + seed)
    total = torch.zeros(())
    for part in torch.arange(_TRUTH_CELLS).split(max(1, _TRUTH_CHUNK // size)):
        h = expression(len(part), generator)
        total = total + (h / h.sum(-1, keepdim=True)).sum(1)
    return (total / _TRUTH_CELLS).log2()


def _record(
    counts: Tensor, labels: Tensor, level: Tensor, proportion: Tensor, rate: Tensor, donor: Tensor | None = None
) -> CountData:
    return CountData(counts.float(), labels, level.float(), proportion.float(), rate.float(), donor)


def _uniform(shape: int | tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


SIMULATORS: dict[str, Callable[..., CountData]] = {
    "appendix": appendix,
    "section5": section5,
    "released": released,
    "graded": graded,
    "donors": donors,
}
"""The simulators by name; all take a seed, `n_cells`, `n_genes` and `group_weights`."""
