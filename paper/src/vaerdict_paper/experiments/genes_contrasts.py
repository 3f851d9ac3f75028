"""Contrasts of two groups of cells under a fitted model: joint draws of their log fold changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.datasets.genes import CountData
from vaerdict.de import model as de_model
from vaerdict.de.effects import CENTRED, ESTIMANDS, Effect, Estimand, probability_error, summarise_draws
from vaerdict.decisions import q_values
from vaerdict.noise import seeded

UNCERTAINTIES = ("z", "z+cells", "z+cells+model")
"""Sources of uncertainty: the latents; with the sample of cells; with the model, by refits to bootstrap resamples."""

FEW = (50, 20)
"""Cells per group of the small contrasts."""

MakePosterior = Callable[[], de_model.CellPosterior]
"""Makes a posterior, so that its cost can be timed."""


def sample_cells(labels: Tensor, group: int, n_cells: int | None, *, seed: int) -> Tensor:
    """The cells of a group that take part in a contrast: all, or `n_cells` of them at random."""
    cells = (labels == group).nonzero().flatten()
    if n_cells is None:
        return cells
    if n_cells > len(cells):
        raise SettingError(f"n_cells={n_cells} exceeds the {len(cells)} cells of group {group}.")
    return cells[torch.randperm(len(cells), generator=seeded(seed))[:n_cells]].sort().values


@dataclass(frozen=True, eq=False)
class Sides:
    """The cells of a contrast, those of group a first. Shapes: ``a (n_a,)``, ``b (n_b,)``, indices into the data."""

    data: CountData
    a: Tensor
    b: Tensor
    states: tuple[int, int] = (0, 1)

    @classmethod
    def of(
        cls, data: CountData, n_cells: int | None, *, seed: int, subset: int = 0, states: tuple[int, int] = (0, 1)
    ) -> Sides:
        """All cells of two states, or `n_cells` of each at random, different ones for every `subset`."""
        a, b = (sample_cells(data.labels, state, n_cells, seed=seed + 1000 * subset) for state in states)
        return cls(data, a, b, states)

    @property
    def cells(self) -> Tensor:
        """All cells, indices into the data."""
        return torch.cat([self.a, self.b])

    @property
    def groups(self) -> dict[str, Tensor]:
        """The positions of each group in `cells`."""
        n = len(self.a)
        return {"a": torch.arange(n), "b": torch.arange(n, n + len(self.b))}

    @property
    def labels(self) -> Tensor:
        """The group of each of `cells`."""
        return torch.cat([torch.zeros_like(self.a), torch.ones_like(self.b)])

    def populations(self, weighting: de_model.Weighting, suffix: str = "") -> dict[str, de_model.Population]:
        """Both groups with one weighting of their cells."""
        return populations(self.groups, weighting, suffix)


def contrasts(data: CountData, seed: int, subsets: int) -> list[tuple[int | str, int, Sides]]:
    """All cells once, and several random subsets of few: cells per group, index of the subset, and the cells.

    Every method compares the same cells.
    """
    sizes = [("all", None, 0), *((n, n, j) for n in FEW for j in range(subsets))]
    return [(name, j, Sides.of(data, n, seed=seed, subset=j)) for name, n, j in sizes]


def populations(
    groups: Mapping[str, Tensor], weighting: de_model.Weighting, suffix: str = ""
) -> dict[str, de_model.Population]:
    """Groups of cells with one weighting, their names followed by `suffix`."""
    return {name + suffix: de_model.Population(cells, weighting) for name, cells in groups.items()}


def joint_lfc(
    fit: de_model.Averages, estimand: Estimand, suffix: str = "", refits: Sequence[Mapping[str, Tensor]] = ()
) -> Effect:
    """Joint draws of the log fold change of group a over group b.

    `fit` has populations ``a`` and ``b`` of equally weighted cells, and ``a`` and ``b`` followed by `suffix` with the
    weighting in question. `refits` are averages of equally weighted cells under refitted models.
    """

    def lfc(expression: Mapping[str, Tensor], suffix: str = "") -> Tensor:
        return estimand.lfc(expression["a" + suffix], expression["b" + suffix])

    ess = 1 / (1 / fit.ess[~fit.ess.isnan()]).mean().item()  # errors of cells add up like 1 / ESS
    means = [lfc(expression).mean(0) for expression in refits]
    return de_model.joint_effect(lfc(fit.expression, suffix), lfc(fit.expression), ess, means)


# ----------------------------------------------------------------------------------------- every kind of uncertainty
class ContrastDraws(NamedTuple):
    """Averages of a contrast for every weighting of cells, by the fit and by its refits, and their cost in seconds."""

    sides: Sides
    fit: de_model.Averages
    refits: list[dict[str, Tensor]]
    n_draws: int
    seconds: float
    seconds_refits: float = 0.0

    def effect(self, estimand: Estimand, uncertainty: str) -> Effect:
        """Joint draws of the fold changes that include the given sources of uncertainty."""
        suffix = " pair" if estimand.pairs else "" if uncertainty == "z" else " cells"
        return joint_lfc(self.fit, estimand, suffix, self.refits if uncertainty == "z+cells+model" else ())

    def effects(self, uncertainties: Sequence[str]) -> Iterator[tuple[Estimand, str, Effect]]:
        """Joint draws by estimand and uncertainty; a random pair of cells always has the uncertainty of the cells."""
        for estimand in ESTIMANDS.values():
            for uncertainty in uncertainties[1:] if estimand.pairs else uncertainties:
                yield estimand, uncertainty, self.effect(estimand, uncertainty)

    def diagnostics(self) -> dict[str, Any]:
        """Median k-hat and effective share of the draws of the cells."""
        return {
            "n_draws": self.n_draws,
            "khat_decision": self.fit.khat.nanmedian().item(),
            "ess_decision": (self.fit.ess / self.n_draws).median().item(),
            "seconds": self.seconds,
        }


def draw_contrast(
    sides: Sides, posterior: MakePosterior, n_draws: int, *, seed: int, refits: Sequence[MakePosterior] = ()
) -> ContrastDraws:
    """One pass over the cells of a contrast for every weighting, and one for each refit.

    Posteriors are made here, so that the seconds include making them.
    """
    equal = sides.populations(de_model.Equal())
    weighted = sides.populations(de_model.Bootstrap(), " cells") | sides.populations(de_model.OneCell(), " pair")
    started = time.perf_counter()
    fit = de_model.averages(posterior(), equal | weighted, n_draws, seed=seed)
    fitted = time.perf_counter()
    others = [de_model.averages(make(), equal, n_draws, seed=seed).expression for make in refits]
    return ContrastDraws(sides, fit, others, n_draws, fitted - started, time.perf_counter() - fitted)


# ------------------------------------------------------------------------------------------------- one comparison
def compared(effect: Effect, *, delta: float, level: float, interval: float) -> dict[str, Tensor]:
    """The columns of `vaerdict.de.effects.summarise_draws` with `prob_de`, as in the paper, of a change either way.

    ``q_value`` and ``is_de`` follow from it: the smallest posterior expected FDR at which a gene is called, genes of
    equal probability ranked by the mean fold change.
    """
    table = summarise_draws(effect, delta=delta, interval=interval)
    prob = (table["prob_up"] + table["prob_down"]).clamp_max(1)
    q = q_values(prob, ties=table["lfc_mean"].abs())
    return table | {
        "prob_de": prob,
        "q_value": q,
        "is_de": q <= level,
        "mcse": probability_error(prob, effect.n_effective),
    }


class GroupComparison(NamedTuple):
    """The genes of group a against those of group b (see `compared`), and the averages behind them."""

    table: dict[str, Tensor]
    averages: de_model.Averages


def compare_groups(
    posterior: de_model.CellPosterior,
    a: Tensor,
    b: Tensor,
    *,
    estimand: Estimand = CENTRED,
    weighting: de_model.Weighting | None = None,
    refits: Sequence[de_model.CellPosterior] = (),
    delta: float = 0.5,
    level: float = 0.05,
    interval: float = 0.9,
    n_draws: int = 1000,
    seed: int = 0,
    **streaming: Any,
) -> GroupComparison:
    """Compare two groups of cells gene by gene under a fitted model, in one pass over the cells.

    Parameters
    ----------
    posterior
        The posterior of all cells.
    a, b
        Indices of the cells of each group ``(n,)``; fold changes are of a over b.
    estimand
        What the log2 fold change is of.
    weighting
        How the cells of a group are weighted in a joint draw; by default bootstrapped, or one random cell if the
        estimand compares pairs.
    refits
        Posteriors of the same cells under models refitted to bootstrap resamples; they add the model's uncertainty.
    delta, level, interval
        The threshold of |LFC|, the target FDR and the probability of the credible interval.
    n_draws, seed
        The number of joint draws and the seed of their randomness.
    **streaming
        `block`, `chunk`, `engine` and `progress` of `vaerdict.de.averages`.
    """
    groups = {"a": a, "b": b}
    equal = populations(groups, de_model.Equal())
    weighting = weighting or (de_model.OneCell() if estimand.pairs else de_model.Bootstrap())
    weighted = populations(groups, weighting, " weighted")
    fit = de_model.averages(posterior, weighted | equal, n_draws, seed=seed, **streaming)
    others = [de_model.averages(refit, equal, n_draws, seed=seed, **streaming).expression for refit in refits]
    effect = joint_lfc(fit, estimand, " weighted", others)
    means = {f"mean_{name[0]}": fit.expression[name].mean(0) for name in weighted}
    return GroupComparison(compared(effect, delta=delta, level=level, interval=interval) | means, fit)
