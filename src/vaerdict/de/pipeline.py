"""One analysis, stage by stage, each stored so that a run that was stopped goes on.

Memory stays bounded however many cells there are: see `vaerdict.de.data` for what is held of the counts. Dense are at
most `MOST_TRAINING` cells while models train, and a block of cells for each worker while posteriors are refined and
averaged; of every cell some hundred numbers are kept.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from vaerdict.core import Progress, Proposal, SettingError, check_count
from vaerdict.de import contrasts as plan
from vaerdict.de import data as inputs
from vaerdict.de import tables as answers
from vaerdict.de.counts_likelihood import raw_shares
from vaerdict.de.draws import kept
from vaerdict.de.effects import ESTIMANDS, INTERVAL, Effect
from vaerdict.de.model.checks import predictive, predictive_checks
from vaerdict.de.model.fitting import MOST_TRAINING, SCORED, Effort, Fitted, encoder_khat, evidence, fit
from vaerdict.de.model.group_prior import Expressing
from vaerdict.de.model.posterior import Modes, Streamed, find_modes, streamed
from vaerdict.de.result import DEResult
from vaerdict.de.stage_cache import Parts
from vaerdict.de.verdict import CELLS, verdict
from vaerdict.engines import Engine
from vaerdict.models.adapters import ScviModel
from vaerdict.noise import seeded
from vaerdict.optional import require
from vaerdict.training import RECIPES
from vaerdict.training.checkpoint import digest
from vaerdict.training.data import Rows, sparse_rows

TRAINING_CELLS = 2000
"""Where fewer cells are compared, others at random join the training up to this many: they know the genes too."""

_RAW_DRAWS = 500
_FEWEST_GENES = 2  # a fold change of one gene alone has nothing to be relative to
_STAGES = 3  # how finished stages are stored; those of another way are refused


@dataclass(frozen=True)
class Options:
    """Everything that was asked for, as results.json and the manifest say it."""

    groupby: str
    pairs: tuple[plan.Pair, ...]
    layer: str | None
    batch_key: str | None
    sample_key: str | None
    within: str | None
    delta: float
    level: float
    scale: str
    min_cells: int
    n_top_genes: int | None
    quick: bool
    effort: Effort
    seed: int
    model: str | None
    borrow: bool = False
    keep_genes: tuple[str, ...] = ()
    gene_symbols: str | None = None

    def __post_init__(self) -> None:
        if self.scale not in ESTIMANDS:
            raise SettingError(f"scale={self.scale!r} is not one of {', '.join(ESTIMANDS)}.")
        if self.scale == "pair" and self.sample_key is not None:
            raise SettingError("scale='pair' compares single cells, sample_key whole samples; choose one of them.")
        if not self.delta > 0 or not 0 < self.level < 1:
            raise SettingError(f"delta={self.delta} must be positive and level={self.level} strictly between 0 and 1.")
        unknown = [name for name in self.effort.recipes if name not in RECIPES]
        if unknown or not self.effort.recipes:
            raise SettingError(f"objectives {unknown} are none of {', '.join(RECIPES)}; name at least one of these.")
        if check_count(self.effort.n_draws, name="n_draws") < 2:
            raise SettingError("n_draws=1: one draw shows no spread; give at least two.")
        if self.n_top_genes is not None and self.n_top_genes < _FEWEST_GENES:
            raise SettingError(
                f"n_top_genes={self.n_top_genes}: at least {_FEWEST_GENES} genes are needed to compare; 0 for all."
            )
        if self.effort.refits == 1 or self.effort.refits < 0:
            raise SettingError(f"refits={self.effort.refits}: one shows no spread; give at least two, or 0 for none.")

    @property
    def model_decides(self) -> bool:
        """Whether the model may decide a gene; else it is held against the counts, and its refits are of no use."""
        return self.scale == "pair" or (self.borrow and self.sample_key is None)

    @property
    def question(self) -> answers.Question:
        """What is asked of every gene."""
        return answers.Question(ESTIMANDS[self.scale], self.delta, self.level, self.seed)


@dataclass(eq=False)
class Run:
    """One analysis: its data, and what is known so far."""

    adata: Any
    options: Options
    labels: plan.Labels
    given: ScviModel | None
    device: str
    out: Path | None
    progress: Progress
    engine: Engine | None = None
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def result(self) -> DEResult:
        """Do everything."""
        options, question = self.options, self.options.question
        with self._timed("reading"):
            wanted = plan.contrasts(self.labels, options.pairs, self.warnings)
            counts, rows, n_batches = self._data(wanted)
        known = self.labels.take(counts.cells)
        place = plan.compared_cells(plan.contrasts(known, options.pairs, []))
        here = rows if len(place) == rows.n else rows.select(torch.from_numpy(place))
        labels = known.take(place)
        contrasts = plan.contrasts(labels, options.pairs, [])
        left = {c.name for c in wanted} - {c.name for c in contrasts}
        self.warnings += [f"left out: {name}, for too few of its cells have counts." for name in sorted(left)]
        sha = _digest(counts, known)
        weights = None if self.given is None else digest(self.given.state_dict().values())
        parts = Parts.of(self.out, {"settings": asdict(options), "data": sha, "model": weights, "stages": _STAGES})
        with self._timed("training"):
            fitted = self._fitted(rows, n_batches, parts)
        del rows
        with self._timed("refining"):
            fits = ((fitted.model, fitted.proposal), *fitted.refits)
            posteriors = [self._posterior(i, *fit, here, labels.atoms(), parts) for i, fit in enumerate(fits)]
        with self._timed("averaging"):
            found = parts.stage("averages", self._averages(posteriors[0], contrasts))
            others = [
                parts.stage(f"averages-{i}", self._still(p, contrasts, f"cells, refit {i + 1}"))
                for i, p in enumerate(posteriors[1:])
            ]
        with self._timed("comparing"):
            n_genes, totals = len(counts.genes), torch.from_numpy(counts.totals[place])
            means = answers.raw_averages(here, totals, n_genes, contrasts, question, _RAW_DRAWS, self.engine)
            batches = self._batches(counts.cells[place])
            shares = raw_shares(here, n_genes, answers.Raw.strata(contrasts, batches))
            raw = answers.Raw(shares, means, len(batches))
            own = [answers.model_effect(c, found, others, question) for c in contrasts]
            effects = [
                answers.held(c, effect, raw, question, self._new_cells(c, known))
                for c, effect in zip(contrasts, own, strict=True)
            ]
            tables = self._tables(raw, contrasts, found, own, [each.effect for each in effects])
        with self._timed("checking"):
            supports = answers.supports(found, contrasts, options.effort.n_draws)
            checks = predictive_checks(*predictive(_sampler(fitted), here, posteriors[0], n_genes, seed=options.seed))
            diagnostics = self._diagnostics(fitted, here, contrasts, supports)
        rows_of_file = counts.cells[place]
        table = answers.frame(contrasts, tables, counts.genes, counts.ids)
        results = self._results(counts, fitted, contrasts, effects, tables, supports, checks, diagnostics)
        obs, latent = self._obs(rows_of_file), found[answers.LATENT].numpy()
        return DEResult(table, results, obs, rows_of_file, latent, sha, kept([each.effect for each in effects]))

    def _results(
        self,
        counts: inputs.Counts,
        fitted: Fitted,
        contrasts: Sequence[plan.Contrast],
        effects: Sequence[answers.Held],
        tables: Sequence[dict[str, Tensor]],
        supports: dict[str, Any],
        checks: list[dict[str, Any]],
        diagnostics: list[dict[str, Any]],
    ) -> dict[str, Any]:
        """What results.json holds."""
        options, question = self.options, self.options.question
        rows = [answers.contrast_row(*each, question) for each in zip(contrasts, effects, tables, strict=True)]
        words = verdict(supports, checks, rows, samples=options.sample_key is not None, refits=len(fitted.refits))
        return {
            "experiment": "de",
            "settings": asdict(options),
            "seed": options.seed,
            "seconds": self.seconds,
            "scale": options.scale,
            "scale_words": question.estimand.target,
            "interval": INTERVAL,
            "genes_words": counts.selection,
            "model_role": "decides" if options.model_decides else "checks",
            "verdict": words,
            "contrasts": rows,
            "diagnostics": diagnostics,
            "selection": fitted.selection,
            "checks": checks,
            "truth": None,
            "warnings": self._warned(counts),
        }

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started

    def _data(self, wanted: Sequence[plan.Contrast]) -> tuple[inputs.Counts, Rows, int]:
        """Counts of the cells compared and of some others; with batches behind them, or as the given model wants."""
        options, device = self.options, torch.device(self.device)
        if self.given is not None:
            return *_of_given(self.given, self.adata, wanted, options.gene_symbols, device), 0
        alike = np.array([label is None for label in self.labels.group]) if options.borrow else None
        most = MOST_TRAINING if options.borrow else TRAINING_CELLS
        rows = plan.rows_to_read(wanted, self.adata.n_obs, most, options.seed, alike)
        counts = inputs.read_counts(
            self.adata,
            rows,
            _groups(self.labels.group[rows], wanted),
            layer=options.layer,
            min_cells=options.min_cells,
            n_top_genes=options.n_top_genes,
            keep_genes=options.keep_genes,
            gene_symbols=options.gene_symbols,
        )
        if self.labels.batch is None:
            return counts, counts.rows(device), 0
        hot, names = inputs.one_hot(self.labels.batch[counts.cells], role="batch_key")
        return counts, counts.rows(device, hot), len(names)

    def _batches(self, cells: np.ndarray) -> list[Tensor]:
        """Which of the cells are of each batch; all of one where none are named. Shapes: ``(cells,)`` each."""
        if self.labels.batch is None:
            return [torch.ones(len(cells), dtype=torch.bool)]
        batch = self.labels.batch[cells]
        return [torch.from_numpy((batch == name).astype(bool)) for name in sorted(set(batch) - {None})]

    def _obs(self, rows: np.ndarray) -> Any:
        """The labels that were used, of some cells of the file, as a pandas data frame."""
        pandas, options, labels = require("pandas", "bio"), self.options, self.labels.take(rows)
        keys = (options.groupby, options.within, options.sample_key, options.batch_key)
        known = zip(keys, (labels.group, labels.within, labels.sample, labels.batch), strict=True)
        columns = {key: pandas.Categorical(values) for key, values in known if key is not None}
        return pandas.DataFrame(columns, index=self.adata.obs_names[rows].astype(str))

    def _new_cells(self, contrast: plan.Contrast, known: plan.Labels) -> float:
        """Cells of the kinds compared that the model learned from, for each compared: with `borrow` unlabelled too."""
        if not self.options.borrow:
            return 1.0
        labels, most = (self.labels, np.inf) if self.given is not None else (known, MOST_TRAINING)
        unlabelled = np.array([label is None for label in labels.group])
        if contrast.within is not None and labels.within is not None:
            unlabelled &= labels.within == contrast.within
        others = unlabelled.sum() * min(1.0, most / max(1, len(labels.group)))
        return 1 + float(others) / (len(contrast.a.cells) + len(contrast.b.cells))

    def _fitted(self, rows: Rows, n_batches: int, parts: Parts) -> Fitted:
        options = self.options
        if self.given is None:
            if rows.n > MOST_TRAINING:
                self.warnings.append(f"models were trained on {MOST_TRAINING} of {rows.n} cells, chosen at random.")
            return fit(
                rows,
                n_batches,
                options.effort if options.model_decides else replace(options.effort, refits=0),
                seed=options.seed,
                device=self.device,
                folder=parts.below("training"),
                progress=self.progress,
            )
        self.warnings.append("the model was given: its own error is not assessed and not in the intervals.")
        some = rows.take(torch.randperm(rows.n, generator=seeded(options.seed))[:SCORED])
        row = {"model": options.model, "seed": None, **evidence(self.given, self.given.encoder, some)}
        return Fitted(self.given, self.given.encoder, [row | {"epochs": None, "chosen": True}], [])

    def _posterior(
        self, number: int, model: Expressing, proposal: Proposal, rows: Rows, labels: Tensor, parts: Parts
    ) -> Streamed:
        def listen(done: int, total: int, what: str, /) -> None:
            self.progress(done, total, what if number == 0 else f"{what}, refit {number}")

        def find() -> dict[str, Tensor]:
            return find_modes(model, rows, proposal, engine=self.engine, progress=listen)._asdict()

        modes = Modes(**parts.stage(f"modes-{number}", find))
        return streamed(model, rows, proposal, labels=labels, modes=modes)

    def _averages(self, posterior: Streamed, contrasts: Sequence[plan.Contrast]) -> Callable[[], dict[str, Tensor]]:
        n, question = self.options.effort.n_draws, self.options.question
        return lambda: answers.joint_averages(posterior, contrasts, question, n, self.engine, self.progress)

    def _still(
        self, posterior: Streamed, contrasts: Sequence[plan.Contrast], what: str
    ) -> Callable[[], dict[str, Tensor]]:
        n, question = self.options.effort.refit_draws, self.options.question

        def listen(done: int, total: int, _: str, /) -> None:
            self.progress(done, total, what)

        return lambda: answers.still_averages(posterior, contrasts, question, n, self.engine, listen)

    def _tables(
        self,
        raw: answers.Raw,
        contrasts: Sequence[plan.Contrast],
        found: dict[str, Tensor],
        own: Sequence[Effect],
        effects: Sequence[Effect],
    ) -> list[dict[str, Tensor]]:
        """The genes of every contrast, by the model and by raw counts."""
        question = self.options.question
        tables = [
            answers.compared(c, e, found, question).table
            | answers.model_columns(c, effect, found)
            | answers.raw_columns(c, raw, question)
            for c, effect, e in zip(contrasts, own, effects, strict=True)
        ]
        return answers.together(tables, question.level)

    def _diagnostics(
        self, fitted: Fitted, rows: Rows, contrasts: Sequence[plan.Contrast], supports: dict[str, Any]
    ) -> list[dict[str, Any]]:
        sides = {side.name: side for c in contrasts for side in (c.a, c.b)}
        seed = self.options.seed
        return [
            {
                "group": name,
                "n_cells": supports[name].n_cells,
                "khat_encoder": encoder_khat(fitted.model, fitted.proposal, rows.take(side.cells[:SCORED]), seed=seed),
                "khat": supports[name].khat,
                "share_ok": supports[name].share_ok,
                "ess": supports[name].ess / self.options.effort.n_draws,
            }
            for name, side in sides.items()
        ]

    def _warned(self, counts: inputs.Counts) -> list[str]:
        cells = [] if self.options.sample_key else [CELLS]
        known = {self.options.groupby: self.labels.group, self.options.within: self.labels.within}
        missing = {key: sum(label is None for label in values) for key, values in known.items() if values is not None}
        lost = [f"{n} cells have no {key} and were not compared." for key, n in missing.items() if n]
        return [*cells, *lost, *counts.warnings, *self.warnings]


def _groups(labels: np.ndarray, wanted: Sequence[plan.Contrast]) -> np.ndarray:
    """A number for each group that is compared, negative for cells of others. Shapes: ``(cells,) -> (cells,)``."""
    rest = any(c.rest for c in wanted)
    names = sorted({g for c in wanted for g in (c.group_a, c.group_b)} | set(labels if rest else ()) - {None})
    number = {name: i for i, name in enumerate(names)}
    return np.array([number.get(label, -1) for label in labels])


def _of_given(
    model: ScviModel, adata: Any, wanted: Sequence[plan.Contrast], symbols: str | None, device: torch.device
) -> tuple[inputs.Counts, Rows]:
    """The cells compared as a given model wants them, all its genes, covariates behind; dense a block at a time."""
    rows, n_genes = plan.rows_to_read(wanted, adata.n_obs, 0, 0), model.columns["X"]
    blocks = np.array_split(rows, -(-len(rows) // inputs.BLOCK))
    matrix: Any = sparse.vstack(
        [sparse.csr_matrix(model.observations(adata, some).cpu().numpy()) for some in blocks], format="csr"
    )
    warnings: list[str] = []
    genes, ids = inputs.gene_names(adata, symbols, warnings), [str(name) for name in adata.var_names]
    counts = inputs.whole(matrix[:, :n_genes], genes, rows, f"all {n_genes} of the model")
    counts = replace(counts, ids=ids if symbols else None, warnings=warnings)
    model.to(device)
    return counts, sparse_rows(matrix, device)


def _sampler(fitted: Fitted) -> Any:
    """The fitted model, which also draws counts."""
    return fitted.model


def _digest(counts: inputs.Counts, labels: plan.Labels) -> str:
    """A hash of the counts, genes and labels that were used."""
    sha = hashlib.sha256(counts.digest.encode())
    sha.update(np.ascontiguousarray(counts.cells).tobytes())
    for names in (counts.genes, labels.group, labels.within, labels.sample, labels.batch):
        sha.update("\0".join(map(str, [] if names is None else names)).encode())
    return sha.hexdigest()
