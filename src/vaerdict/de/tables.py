"""Step three: joint draws of every group's mean expression, and from them the table of genes of every contrast."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict.core import Progress
from vaerdict.de.compare import Support, Uncertainty, support
from vaerdict.de.contrasts import FEWEST_IN_BATCH, Contrast, Side
from vaerdict.de.counts_likelihood import Law, Shares, count_law, paired_law, sample_law
from vaerdict.de.effects import Comparison, Effect, Estimand, comparison, joint_effect
from vaerdict.de.model.averages import Population, averages, fixed_averages
from vaerdict.de.model.cell_weights import Equal
from vaerdict.de.model.posterior import CellPosterior
from vaerdict.de.replicates import group_lfc, replicate_effect, spread
from vaerdict.de.shrinkage import anchor
from vaerdict.decisions import discoveries, expected_fdr, q_values, ranking
from vaerdict.engines import Engine
from vaerdict.optional import require
from vaerdict.training.data import Rows

COLUMNS = {
    "contrast": "which groups are compared, a over b",
    "gene": "the gene",
    "lfc_mean": "mean of the log2 fold change, on the scale named",
    "lfc_median": "its median",
    "lfc_low": "lower end of its 90 % credible interval",
    "lfc_high": "upper end",
    "prob_de": "probability that |LFC| is at least delta",
    "prob_up": "probability that LFC is at least delta",
    "prob_down": "probability that LFC is at most minus delta",
    "q_value": "smallest posterior expected FDR, over all contrasts, at which the gene is called",
    "is_de": "whether it is called at the FDR asked for",
    "mcse": "Monte-Carlo error of prob_de",
    "mean_a": "mean proportion of the gene in the cells of group a, by the raw counts",
    "mean_b": "in those of group b",
    "seen_a": "share of the cells of group a in which the gene is seen",
    "seen_b": "of those of group b",
    "model_lfc": "mean of the log2 fold change by the model, before it is held against the counts",
    "model_mean_a": "mean proportion of the gene in group a by the model",
    "model_mean_b": "in group b",
    "raw_lfc": "log2 fold change by a plain bootstrap of the raw counts",
    "raw_prob_de": "its probability that |LFC| is at least delta",
    "raw_is_de": "whether that bootstrap calls it",
    "q_value_contrast": "as q_value, in this contrast alone",
}
"""The columns of the table of genes, and what they hold."""

KHAT, ESS, LATENT = "\0k-hat", "\0ess", "\0latent"
"""What is known of the cells, beside the averages of populations, whose names the user gave."""

_EQUAL = "\0equal cells"  # behind the name of a population whose cells all count the same
_PSEUDOCOUNT = 0.5
_CURVE = 200  # points of a curve at most


@dataclass(frozen=True)
class Question:
    """What is asked of every gene: which fold change, how large, and at which FDR."""

    estimand: Estimand
    delta: float
    level: float
    seed: int


def populations(contrasts: Sequence[Contrast]) -> dict[str, Tensor]:
    """The cells of everything that is averaged, each once."""
    return {k: v for c in contrasts for side in (c.a, c.b) for k, v in side.populations().items()}


def joint_averages(
    posterior: CellPosterior,
    contrasts: Sequence[Contrast],
    question: Question,
    n_draws: int,
    engine: Engine | None,
    progress: Progress,
) -> dict[str, Tensor]:
    """Averages of every population, its cells sampled and all the same; k-hat, ESS and latent of every cell."""
    weighting = Uncertainty().weighting(question.estimand)
    cells = populations(contrasts)
    wanted = {name: Population(c, weighting) for name, c in cells.items()} | _still(cells)
    found = averages(posterior, wanted, n_draws, seed=question.seed, engine=engine, progress=progress)
    return {KHAT: found.khat, ESS: found.ess, LATENT: found.latent} | _stored(found.expression)


def still_averages(
    posterior: CellPosterior,
    contrasts: Sequence[Contrast],
    question: Question,
    n_draws: int,
    engine: Engine | None,
    progress: Progress,
) -> dict[str, Tensor]:
    """Averages of every population under a refit, all cells counting the same."""
    wanted = _still(populations(contrasts))
    found = averages(posterior, wanted, n_draws, seed=question.seed, engine=engine, progress=progress)
    return _stored(found.expression)


def raw_averages(
    rows: Rows,
    totals: Tensor,
    n_genes: int,
    contrasts: Sequence[Contrast],
    question: Question,
    n_draws: int,
    engine: Engine | None = None,
) -> dict[str, Tensor]:
    """Bootstrapped mean proportions of raw counts; half a count in a total keeps every mean above zero.

    Shapes: ``rows (cells, p)``, the first `n_genes` columns being counts, ``totals (cells,)``.
    """
    cells, weighting = populations(contrasts), Uncertainty().weighting(question.estimand)
    wanted = {name: Population(c, weighting) for name, c in cells.items()}
    drawn = fixed_averages(rows, wanted, n_draws, seed=question.seed, n_genes=n_genes, engine=engine)
    return {name: mean + _PSEUDOCOUNT / totals[cells[name]].sum().item() for name, mean in drawn.items()}


def _still(cells: Mapping[str, Tensor]) -> dict[str, Population]:
    return {name + _EQUAL: Population(c, Equal()) for name, c in cells.items()}


def _stored(expression: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In single precision, whether or not they went to disk in between."""
    return {name: values.float() for name, values in expression.items()}


# ------------------------------------------------------------------------------------------------------- genes
def model_effect(
    contrast: Contrast, found: Mapping[str, Tensor], refits: Sequence[Mapping[str, Tensor]], question: Question
) -> Effect:
    """Draws of the fold changes of a contrast from the posterior, its cells or samples, and the refits of the model."""
    estimand, ess = question.estimand, found[ESS]
    ess = 1 / (1 / ess[~ess.isnan()]).mean().item()
    means = [_lfc(contrast, one, estimand, _EQUAL).mean(0) for one in refits]
    if contrast.a.samples:
        full = _between(contrast, found, question).lfc
        given_cells = full[:1].expand_as(full)  # the error between samples is not one of particles
    else:
        full, given_cells = _lfc(contrast, found, estimand), _lfc(contrast, found, estimand, _EQUAL)
    n_effective = joint_effect(full, given_cells, ess, means).n_effective
    return Effect(full + spread(means, len(full), seed=question.seed) if means else full, n_effective)


class Held(NamedTuple):
    """An effect held against the counts: the share of genes the model decided, and of those it misses.

    Neither is known of a comparison of single cells, which has no such check.
    """

    effect: Effect
    by_model: float | None = None
    missed: float | None = None


Stratum = tuple[str, int | None, str | None]
"""A side, or its cells of a batch, or of a sample, or of both."""


class Raw(NamedTuple):
    """Raw counts of what is compared: proportions by side, batch and sample, and bootstrapped means by population."""

    shares: Mapping[Stratum, Shares]
    means: Mapping[str, Tensor]
    n_batches: int

    @staticmethod
    def strata(contrasts: Sequence[Contrast], batches: Sequence[Tensor]) -> dict[Stratum, Tensor]:
        """The cells that are looked at together, where there are at least two. Shapes: ``batches (cells,)`` masks."""
        parts: dict[Stratum, Tensor] = {}
        for side in (side for c in contrasts for side in (c.a, c.b)):
            parts[side.name, None, None] = side.cells
            parts |= {(side.name, None, sample): cells for sample, cells in side.samples.items()}
            for i, mask in enumerate(batches):
                parts[side.name, i, None] = side.cells[mask[side.cells]]
                parts |= {(side.name, i, sample): cells[mask[cells]] for sample, cells in side.samples.items()}
        return {name: cells for name, cells in parts.items() if len(cells) >= FEWEST_IN_BATCH}

    def law(self, contrast: Contrast) -> Law:
        """What the counts say of a contrast, by cells, by samples, or by samples that have cells on both sides."""
        a, b = contrast.a, contrast.b
        if not a.samples:
            pairs = [(self._of(a, i), self._of(b, i)) for i in range(self.n_batches)]
            return count_law([(x[0], y[0]) for x, y in pairs if x and y])
        if a.samples.keys() == b.samples.keys():
            return paired_law([(self.shares[a.name, None, s], self.shares[b.name, None, s]) for s in sorted(a.samples)])
        sides = [tuple(self._of(side, i, *sorted(side.samples)) for side in (a, b)) for i in range(self.n_batches)]
        return sample_law([(x, y) for x, y in sides if x and y])

    def _of(self, side: Side, batch: int, *samples: str) -> list[Shares]:
        """The side in a batch, or those of its samples that are in it."""
        names: list[Stratum] = [(side.name, batch, sample) for sample in samples or (None,)]
        return [self.shares[name] for name in names if name in self.shares]


def held(contrast: Contrast, effect: Effect, raw: Raw, question: Question, new_cells: float) -> Held:
    """The fold changes of a contrast by the counts or by the model, shrunk (see `vaerdict.de.shrinkage`)."""
    if question.estimand.pairs:
        return Held(effect)
    # contrasts that share a group must not share their noise
    seed = zlib.crc32(f"{question.seed} {contrast.name}".encode())
    found = anchor(effect.lfc, raw.law(contrast), new_cells=1.0 if contrast.a.samples else new_cells, seed=seed)
    n = torch.full_like(effect.n_effective, float(len(found.lfc)))
    return Held(Effect(question.estimand.of(found.lfc), n), found.by_model, found.missed)


def raw_effect(contrast: Contrast, found: Mapping[str, Tensor], question: Question) -> Effect:
    """The same of raw counts."""
    if contrast.a.samples:
        return _between(contrast, found, question)
    lfc = _lfc(contrast, found, question.estimand)
    return Effect(lfc, torch.full_like(lfc[0], float(len(lfc))))


def _lfc(contrast: Contrast, found: Mapping[str, Tensor], estimand: Estimand, kind: str = "") -> Tensor:
    return group_lfc(_samples(contrast.a, found, kind), _samples(contrast.b, found, kind), estimand)


def _between(contrast: Contrast, found: Mapping[str, Tensor], question: Question) -> Effect:
    a, b = (_samples(side, found) for side in (contrast.a, contrast.b))
    return replicate_effect(a, b, question.estimand, seed=question.seed)


def _samples(side: Side, found: Mapping[str, Tensor], kind: str = "") -> dict[str, Tensor]:
    """Averages of a side by sample, in double precision; of the whole side where there are no samples."""
    names = list(side.samples) or [side.name]
    return {s: found[name + kind].double() for s, name in zip(names, side.populations(), strict=True)}


def compared(contrast: Contrast, effect: Effect, found: Mapping[str, Tensor], question: Question) -> Comparison:
    """The genes of a contrast."""
    mean_a, mean_b = _model_means(contrast, found)
    return comparison(effect, mean_a, mean_b, estimand=question.estimand, delta=question.delta, level=question.level)


def _model_means(contrast: Contrast, found: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean expression of both sides over draws and samples. Shapes: ``-> (genes,)`` each."""
    a, b = (torch.stack(list(_samples(side, found).values())).mean((0, 1)) for side in (contrast.a, contrast.b))
    return a, b


def model_columns(contrast: Contrast, effect: Effect, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the model alone says of every gene."""
    mean_a, mean_b = _model_means(contrast, found)
    return {"model_lfc": effect.lfc.mean(0), "model_mean_a": mean_a, "model_mean_b": mean_b}


def fdr_curve(effect: Effect, question: Question) -> dict[str, list[float]]:
    """Expected FDR of the first k genes, and the range in which the share of false ones lies with 90 % probability."""
    null = (effect.lfc.abs() < question.delta).double()
    prob = 1 - null.mean(0)
    order = ranking(prob, effect.lfc.mean(0).abs())
    n = len(prob)
    k = torch.linspace(1, n, min(n, _CURVE)).round().long().unique()
    shares = null[:, order].cumsum(1)[:, k - 1] / k
    low, high = shares.quantile(torch.tensor([0.05, 0.95]).to(shares), 0)
    expected = expected_fdr(prob)[k - 1]
    return {"k": k.tolist(), "expected": expected.tolist(), "low": low.tolist(), "high": high.tolist()}


def together(parts: Sequence[dict[str, Tensor]], level: float) -> list[dict[str, Tensor]]:
    """The tables of all contrasts with q-values and calls over all of them, and those of each alone beside."""
    sizes = [len(part["prob_de"]) for part in parts]
    whole = {key: torch.cat([part[key] for part in parts]) for key in ("prob_de", "lfc_mean", "raw_prob_de", "raw_lfc")}
    for prefix, q in (("", "q_value"), ("raw_", None)):
        prob, ties = whole[f"{prefix}prob_de"], whole["raw_lfc" if prefix else "lfc_mean"].abs()
        whole[f"{prefix}is_de"] = discoveries(prob, level, ties=ties)
        if q:
            whole[q] = q_values(prob, ties=ties)
    split = {key: whole[key].split(sizes) for key in ("q_value", "is_de", "raw_is_de")}
    return [
        {**part, "q_value_contrast": part["q_value"], **{key: values[i] for key, values in split.items()}}
        for i, part in enumerate(parts)
    ]


def supports(found: Mapping[str, Tensor], contrasts: Sequence[Contrast], n_draws: int) -> dict[str, Support]:
    """How well the cells of every group were sampled."""
    khat, ess = found[KHAT], found[ESS]
    return {s.name: support(khat[s.cells], ess[s.cells], n_draws) for c in contrasts for s in (c.a, c.b)}


def raw_columns(contrast: Contrast, raw: Raw, question: Question) -> dict[str, Tensor]:
    """What the raw counts say of every gene."""
    effect = raw_effect(contrast, raw.means, question)
    prob = (effect.lfc.abs() >= question.delta).double().mean(0)
    a, b = (raw.shares[side.name, None, None] for side in (contrast.a, contrast.b))
    means = {"mean_a": a.mean, "mean_b": b.mean, "seen_a": a.seen, "seen_b": b.seen}
    return {**means, "raw_lfc": effect.lfc.mean(0), "raw_prob_de": prob}


def contrast_row(contrast: Contrast, found: Held, table: dict[str, Tensor], question: Question) -> dict[str, Any]:
    """What results.json says of a contrast."""
    called, up = table["is_de"], table["lfc_mean"] > 0
    n = int(called.sum())
    return {
        "name": contrast.name,
        "group_a": contrast.group_a,
        "group_b": contrast.group_b,
        "against_rest": contrast.rest,
        "within": contrast.within,
        "n_cells_a": len(contrast.a.cells),
        "n_cells_b": len(contrast.b.cells),
        "n_cells_a_used": contrast.used[0],
        "n_cells_b_used": contrast.used[1],
        "n_samples_a": len(contrast.a.samples) or None,
        "n_samples_b": len(contrast.b.samples) or None,
        "paired": contrast.paired,
        "n_discoveries": n,
        "n_up": int((called & up).sum()),
        "n_down": int((called & ~up).sum()),
        "expected_fdr": (1 - table["prob_de"][called]).mean().item() if n else 0.0,
        "level": question.level,
        "delta": question.delta,
        "by_model": found.by_model,
        "missed": found.missed,
        "fdr_curve": fdr_curve(found.effect, question),
    }


def frame(
    contrasts: Sequence[Contrast], tables: Sequence[dict[str, Tensor]], genes: list[str], ids: list[str] | None
) -> Any:
    """The table of all contrasts as a pandas data frame; with `ids` of the genes a column ``gene_id`` of them."""
    pandas = require("pandas", "bio")
    names = {"gene": genes} | ({} if ids is None else {"gene_id": ids})
    frames = [
        pandas.DataFrame({"contrast": c.name, **names, **{k: v.numpy() for k, v in table.items()}})
        for c, table in zip(contrasts, tables, strict=True)
    ]
    return pandas.concat(frames, ignore_index=True)[list(dict.fromkeys(("contrast", *names, *COLUMNS)))]
