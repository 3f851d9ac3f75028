"""Rows of the gene experiment: a contrast of two groups of cells, measured against the truth behind them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict import de, diagnostics
from vaerdict.core import Proposal, log_mean_exp
from vaerdict.datasets.genes import CountData
from vaerdict.de.metrics import LEVELS, coverage, fdr_curve, measure
from vaerdict.models.counts import CountModel
from vaerdict.noise import seeded
from vaerdict_paper.experiments.rivals import side_cells

DELTA = 0.5
"""A gene counts as changed from this true |log2 fold change| on."""

INTERVAL = 0.9
UNCERTAINTIES = ("z", "z+cells", "z+cells+model")
_BINS = 10


def true_lfc(data: CountData, estimand: str, states: tuple[int, int] = (0, 1)) -> Tensor:
    """What an estimand is after, and by which genes are labelled: for `centred` the change of expression itself.

    Shapes: ``-> (genes,)``.
    """
    return data.lfc(*states, proportions=estimand != de.CENTRED.name).double()


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
        """All cells of two states, or `n_cells` of each at random, another choice for every `subset`."""
        a, b = (side_cells(data.labels, state, n_cells, seed=seed + 1000 * subset) for state in states)
        return cls(data, a, b, states)

    @property
    def cells(self) -> Tensor:
        """All cells, indices into the data."""
        return torch.cat([self.a, self.b])

    @property
    def groups(self) -> dict[str, Tensor]:
        """Each group's places in `cells`."""
        n = len(self.a)
        return {"a": torch.arange(n), "b": torch.arange(n, n + len(self.b))}

    @property
    def labels(self) -> Tensor:
        """The group of each of `cells`."""
        return torch.cat([torch.zeros_like(self.a), torch.ones_like(self.b)])

    def populations(self, weighting: de.Weighting, suffix: str = "") -> dict[str, de.Population]:
        """Both groups under one way to weight their cells."""
        return {name + suffix: de.Population(cells, weighting) for name, cells in self.groups.items()}


def measured(effect: de.Effect, sides: Sides, estimand: de.Estimand) -> dict[str, Any]:
    """The metrics of one set of joint draws."""
    zero = effect.lfc.new_zeros(effect.lfc.shape[1])
    table = de.comparison(effect, zero, zero, estimand=estimand, delta=DELTA, level=LEVELS[0], interval=INTERVAL).table
    truth = true_lfc(sides.data, estimand.name, sides.states)
    # expression is known up to a factor, so a centred change is relative to the median gene's
    target = truth - truth.quantile(0.5) if estimand.centred else truth
    low, high, mean = table["lfc_low"], table["lfc_high"], table["lfc_mean"]
    return {
        "estimand": estimand.name,
        "delta": DELTA,
        **measure(table["prob_de"], mean, truth, DELTA),
        "coverage": coverage(low, high, target),
        "coverage_absolute": coverage(low, high, truth),
        "width": (high - low).mean().item(),
        "lfc_rmse": (mean - target).square().mean().sqrt().item(),
        "lfc_slope": ((mean * target).sum() / target.square().sum()).item(),
        "mcse": table["mcse"].mean().item(),
    }


def calibration(effect: de.Effect, sides: Sides, estimand: de.Estimand) -> list[list[float]]:
    """For ten bins of the probability: how many genes, the sum of their probabilities, and how many are changed."""
    prob = (effect.lfc.abs() >= DELTA).double().mean(0)
    truth = true_lfc(sides.data, estimand.name, sides.states)
    place = (prob * _BINS).long().clamp_max(_BINS - 1)
    changed = (truth.abs() >= DELTA).double()
    columns = (torch.ones_like(prob), prob, changed)
    return [[c[place == i].sum().item() for c in columns] for i in range(_BINS)]


def curve(effect: de.Effect, sides: Sides, estimand: de.Estimand) -> dict[str, Any]:
    """Realised and expected FDR along the ranking, thinned."""
    lfc = effect.lfc
    prob = (lfc.abs() >= DELTA).double().mean(0)
    return fdr_curve(prob, lfc.mean(0), true_lfc(sides.data, estimand.name, sides.states), DELTA)


Made = Callable[[], de.CellPosterior]
"""A posterior still to be made."""


def averaged(rows: Sequence[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """One row for each combination of `keys`: numbers averaged, lists added up, the rest as in the first row."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [
        {name: same[0][name] if name in keys else _average([row[name] for row in same]) for name in same[0]}
        | {"subsets": len(same)}
        for same in groups.values()
    ]


def _average(values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return torch.tensor(values).sum(0).tolist()
    if isinstance(values[0], (int, float)) and not isinstance(values[0], bool):
        return sum(values) / len(values)
    return values[0]


class Drawn(NamedTuple):
    """Group averages of a contrast by every way to weight cells, by the fit and by its refits, and what they cost."""

    sides: Sides
    fit: de.Averages
    refits: list[dict[str, Tensor]]
    n_draws: int
    seconds: float
    seconds_refits: float = 0.0

    def effect(self, estimand: de.Estimand, uncertainty: str) -> de.Effect:
        """Joint draws of the fold changes with some of the uncertainty in them."""

        def lfc(found: dict[str, Tensor], suffix: str) -> Tensor:
            return estimand.lfc(found["a" + suffix], found["b" + suffix])

        equal = lfc(self.fit.expression, "")
        full = equal if uncertainty == "z" else lfc(self.fit.expression, " cells")
        full = lfc(self.fit.expression, " pair") if estimand.pairs else full
        refits = [lfc(found, "").mean(0) for found in self.refits] if uncertainty == "z+cells+model" else []
        ess = 1 / (1 / self.fit.ess).mean().item()
        return de.joint_effect(full, equal, ess, refits)

    def diagnostics(self) -> dict[str, Any]:
        """Median k-hat and effective share of the cells' draws."""
        return {
            "n_draws": self.n_draws,
            "khat_decision": self.fit.khat.nanmedian().item(),
            "ess_decision": (self.fit.ess / self.n_draws).median().item(),
            "seconds": self.seconds,
        }


def draw(sides: Sides, posterior: Made, n_draws: int, *, seed: int, refits: Sequence[Made] = ()) -> Drawn:
    """One pass over the cells of a contrast for every way to weight them, and one for each refit.

    Posteriors are made here, so that the seconds include what making them takes.
    """
    equal = sides.populations(de.Equal())
    every = equal | sides.populations(de.Bootstrap(), " cells") | sides.populations(de.OneCell(), " pair")
    started = time.perf_counter()
    fit = de.averages(posterior(), every, n_draws, seed=seed)
    between = time.perf_counter()
    others = [de.averages(make(), equal, n_draws, seed=seed).expression for make in refits]
    return Drawn(sides, fit, others, n_draws, between - started, time.perf_counter() - between)


def answers(drawn: Drawn, uncertainties: Sequence[str]) -> Iterator[tuple[de.Estimand, str, de.Effect]]:
    """Joint draws by estimand and uncertainty; pairs of cells know only one kind."""
    for estimand in de.ESTIMANDS.values():
        for uncertainty in uncertainties[:1] if estimand.pairs else uncertainties:
            yield estimand, uncertainty, drawn.effect(estimand, uncertainty)


@torch.no_grad()
def assessed(model: CountModel, q: Proposal, x: Tensor, n: int, *, seed: int) -> dict[str, Any]:
    """Held-out evidence, k-hat and effective share of a proposal with many draws. Shapes: ``x (cells, genes)``."""
    generators = [seeded(40_000 + seed + i) for i in range(len(x))]
    log_w = de.Proposed(model, x, q).particles(n, generators).log_w.double()
    khat, ess = diagnostics.khat(log_w), diagnostics.ess(log_w)
    ok = diagnostics.verdict(khat, ess, n) == diagnostics.Verdict.OK
    return {
        "iwelbo": log_mean_exp(log_w).mean().item(),
        "khat": khat.nanmedian().item(),
        "khat_share_ok": ok.double().mean().item(),
        "khat_quantiles": khat.nanquantile(torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95]).to(khat)).tolist(),
        "ess": (ess / n).median().item(),
    }
