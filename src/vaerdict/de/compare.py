"""Differential expression between groups of cells under a fitted model: the whole way from cells to genes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from vaerdict import diagnostics
from vaerdict.core import Progress, SettingError, ShapeError, silent
from vaerdict.de.effects import CENTRED, Comparison, Estimand, comparison, joint_effect
from vaerdict.de.model.averages import Population, averages
from vaerdict.de.model.cell_weights import Bootstrap, Equal, OneCell, Weighting
from vaerdict.de.model.posterior import CellPosterior
from vaerdict.engines import Engine


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """Where a fold change's uncertainty comes from beside the posterior of the latents, which is always in it.

    With `cells` the cells of a group are a sample of its population, and with `replicates` ``(cells,)`` the donors
    named there are, each counting the same. The model's own uncertainty comes from
    giving refits.
    """

    cells: bool = True
    replicates: Tensor | None = None

    def weighting(self, estimand: Estimand) -> Weighting:
        """How the cells of a group are weighted in a joint draw."""
        if estimand.pairs:
            return OneCell()
        return Bootstrap(self.replicates) if self.cells or self.replicates is not None else Equal()


class Support(NamedTuple):
    """How well the cells of a group were sampled: medians of k-hat and of ESS, and the share of cells in order."""

    n_cells: int
    khat: float
    ess: float
    share_ok: float


class Compared(NamedTuple):
    """Every contrast's genes, and every group's support."""

    contrasts: dict[tuple[str, str], Comparison]
    support: dict[str, Support]


def compare(
    posterior: CellPosterior,
    groups: Mapping[str, Tensor],
    contrasts: Sequence[tuple[str, str]],
    *,
    refits: Sequence[CellPosterior] = (),
    estimand: Estimand = CENTRED,
    uncertainty: Uncertainty | None = None,
    median: bool = False,
    delta: float = 0.5,
    level: float = 0.05,
    interval: float = 0.9,
    n_draws: int = 1000,
    seed: int = 0,
    block: int | None = None,
    chunk: int | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> Compared:
    """Compare groups of cells gene by gene, all contrasts in one pass over the cells.

    `groups` maps names to indices of cells ``(n,)`` and `contrasts` names pairs (a, b), fold changes being of a over b.
    `refits` are the same cells under models fitted to bootstrap resamples; with them the model's own error counts.
    `median` compares group medians instead of means. For `block`, `chunk` and `engine` see `averages`.
    """
    _check([posterior, *refits], groups, contrasts)
    weighting = (uncertainty or Uncertainty()).weighting(estimand)
    wanted = {name: groups[name] for pair in contrasts for name in pair}
    still = {_still(name): Population(cells, Equal(), median) for name, cells in wanted.items()}
    populations = {name: Population(cells, weighting, median) for name, cells in wanted.items()} | still
    how: Any = {"seed": seed, "block": block, "chunk": chunk, "engine": engine, "progress": progress}
    found = averages(posterior, populations, n_draws, **how)
    others = [averages(r, still, n_draws, **how).expression for r in refits]
    ess = _harmonic_mean(found.ess)

    def genes(a: str, b: str) -> Comparison:
        full = estimand.lfc(found.expression[a], found.expression[b])
        equal, *means = (estimand.lfc(one[_still(a)], one[_still(b)]) for one in (found.expression, *others))
        effect = joint_effect(full, equal, ess, [mean.mean(0) for mean in means])
        mean_a, mean_b = (found.expression[name].mean(0) for name in (a, b))
        return comparison(effect, mean_a, mean_b, estimand=estimand, delta=delta, level=level, interval=interval)

    return Compared(
        {(a, b): genes(a, b) for a, b in contrasts},
        {name: support(found.khat[cells], found.ess[cells], n_draws) for name, cells in wanted.items()},
    )


def _still(name: str) -> str:
    """The name of a group whose cells all count the same."""
    return f"{name} with equal cells"


def _harmonic_mean(ess: Tensor) -> float:
    """Of the cells looked at: errors of cells add up like 1 / ESS."""
    return 1 / (1 / ess[~ess.isnan()]).mean().item()


def support(khat: Tensor, ess: Tensor, n_draws: int) -> Support:
    """How well a group's cells were sampled. Shapes: ``khat (n,)``, ``ess (n,)``."""
    ok = diagnostics.verdict(khat, ess, n_draws) == diagnostics.Verdict.OK
    return Support(len(khat), khat.nanmedian().item(), ess.median().item(), ok.double().mean().item())


def _check(fits: Sequence[CellPosterior], groups: Mapping[str, Tensor], contrasts: Sequence[tuple[str, str]]) -> None:
    if not contrasts:
        raise SettingError("nothing to compare; give at least one contrast (a, b).")
    unknown = sorted({name for pair in contrasts for name in pair} - groups.keys())
    if unknown:
        raise SettingError(f"no group {', '.join(unknown)}; there are {', '.join(groups)}.")
    sizes = {fit.n_cells for fit in fits}
    if len(sizes) > 1:
        raise ShapeError(f"the posteriors are of {sorted(sizes)} cells; refits must all be asked about the same cells.")
