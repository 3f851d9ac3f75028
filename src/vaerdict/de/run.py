"""One analysis, stage by stage, each stored so that a run that was stopped goes on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from vaerdict.core import Progress, SettingError, check_count
from vaerdict.de import answers, inputs, plan
from vaerdict.de.cells import Proposed, refined
from vaerdict.de.checks import latent_means, predictive, predictive_checks
from vaerdict.de.contrast import ESTIMANDS, Effect
from vaerdict.de.fitting import MOST_TRAINING, Effort, Fitted, encoder_khat, evidence, fit
from vaerdict.de.parts import Parts
from vaerdict.de.results import DEResult
from vaerdict.de.verdict import CELLS, verdict
from vaerdict.models.adapters import ScviModel
from vaerdict.noise import seeded
from vaerdict.training import RECIPES
from vaerdict.training.checkpoint import digest

TRAINING_CELLS = 2000
"""Where fewer cells are compared, others at random join the training up to this many: they know the genes too."""

_RAW_DRAWS = 500


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
        check_count(self.effort.n_draws, name="n_draws")
        if self.effort.refits == 1 or self.effort.refits < 0:
            raise SettingError(f"refits={self.effort.refits}: one shows no spread; give at least two, or 0 for none.")

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
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def result(self) -> DEResult:
        """Do everything."""
        options, question = self.options, self.options.question
        with self._timed("reading"):
            counts, x, n_batches = self._data()
        known = self.labels.take(counts.cells)
        place = plan.compared_cells(plan.contrasts(known, options.pairs, []))
        here, labels = x[torch.from_numpy(place)], known.take(place)
        contrasts = plan.contrasts(labels, options.pairs, self.warnings)
        sha = _digest(counts, known)
        weights = None if self.given is None else digest(self.given.state_dict().values())
        parts = Parts.of(self.out, {"settings": asdict(options), "data": sha, "model": weights})
        with self._timed("training"):
            fitted = self._fitted(x, n_batches, parts)
        with self._timed("refining"):
            fits = ((fitted.model, fitted.proposal), *fitted.refits)
            posteriors = [refined(model, here, proposal, labels=labels.atoms()) for model, proposal in fits]
        with self._timed("averaging"):
            found = parts.stage("averages", self._averages(posteriors[0], contrasts))
            others = [
                parts.stage(f"averages-{i}", self._still(p, contrasts, f"cells, refit {i + 1}"))
                for i, p in enumerate(posteriors[1:])
            ]
        with self._timed("comparing"):
            n_genes = len(counts.genes)
            effects = [answers.model_effect(c, found, others, question) for c in contrasts]
            tables = self._tables(here[:, :n_genes], contrasts, found, effects)
        with self._timed("checking"):
            supports = answers.supports(found, contrasts, options.effort.n_draws)
            checks = predictive_checks(*predictive(_sampler(fitted), here, posteriors[0], n_genes, seed=options.seed))
            diagnostics = self._diagnostics(fitted, here, contrasts, supports)
            latent = parts.stage("latent", lambda: {"z": latent_means(posteriors[0], seed=options.seed)})["z"]
        rows = [answers.contrast_row(*each, question) for each in zip(contrasts, effects, tables, strict=True)]
        words = verdict(supports, checks, rows, samples=options.sample_key is not None, refits=len(fitted.refits))
        results = {
            "experiment": "de",
            "settings": asdict(options),
            "seed": options.seed,
            "seconds": self.seconds,
            "scale": options.scale,
            "scale_words": question.estimand.target,
            "genes_words": counts.selection,
            "verdict": words,
            "contrasts": rows,
            "diagnostics": diagnostics,
            "selection": fitted.selection,
            "checks": checks,
            "truth": None,
            "warnings": self._warned(counts),
        }
        rows_of_file = counts.cells[place]
        table = answers.frame(contrasts, tables, counts.genes)
        return DEResult(table, results, self.adata.obs.iloc[rows_of_file].copy(), rows_of_file, latent.numpy(), sha)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started

    def _data(self) -> tuple[inputs.Counts, Tensor, int]:
        """Counts of the cells compared and of some others; with batches behind them, or as the given model wants."""
        options = self.options
        wanted = plan.contrasts(self.labels, options.pairs, [])
        if self.given is not None:
            return *_of_given(self.given, self.adata, wanted), 0
        rows = plan.rows_to_read(wanted, self.adata.n_obs, TRAINING_CELLS, options.seed)
        atoms = _groups(self.labels.group[rows], wanted)
        counts = inputs.read_counts(
            self.adata,
            rows,
            atoms,
            layer=options.layer,
            min_cells=options.min_cells,
            n_top_genes=options.n_top_genes,
        )
        x, names = counts.tensor(), []
        if options.batch_key is not None:
            batch = inputs.column(self.adata, options.batch_key, role="batch_key")[counts.cells]
            hot, names = inputs.one_hot(batch, role="batch_key")
            x = torch.cat([x, hot], 1)
        return counts, x, len(names)

    def _fitted(self, x: Tensor, n_batches: int, parts: Parts) -> Fitted:
        options = self.options
        if self.given is None:
            if len(x) > MOST_TRAINING:
                self.warnings.append(f"models were trained on {MOST_TRAINING} of {len(x)} cells, chosen at random.")
            return fit(
                x,
                n_batches,
                options.effort,
                seed=options.seed,
                device=self.device,
                folder=parts.below("training"),
                progress=self.progress,
            )
        self.warnings.append("the model was given: its own error is not assessed and not in the intervals.")
        some = x[torch.randperm(len(x), generator=seeded(options.seed))[:200]]
        row = {"model": options.model, "seed": None, **evidence(self.given, self.given.encoder, some)}
        return Fitted(self.given, self.given.encoder, [row | {"epochs": None, "chosen": True}], [])

    def _averages(self, posterior: Proposed, contrasts: Sequence[plan.Contrast]) -> Callable[[], dict[str, Tensor]]:
        n, question = self.options.effort.n_draws, self.options.question
        return lambda: answers.joint_averages(posterior, contrasts, question, n, self.progress)

    def _still(
        self, posterior: Proposed, contrasts: Sequence[plan.Contrast], what: str
    ) -> Callable[[], dict[str, Tensor]]:
        n, question = self.options.effort.refit_draws, self.options.question

        def listen(done: int, total: int, _: str, /) -> None:
            self.progress(done, total, what)

        return lambda: answers.still_averages(posterior, contrasts, question, n, listen)

    def _tables(
        self,
        counts: Tensor,
        contrasts: Sequence[plan.Contrast],
        found: dict[str, Tensor],
        effects: Sequence[Effect],
    ) -> list[dict[str, Tensor]]:
        """The genes of every contrast, by the model and by raw counts ``(cells, genes)``."""
        question, totals = self.options.question, counts.sum(-1)
        raw = answers.raw_averages(counts / totals[:, None], totals, contrasts, question, _RAW_DRAWS)
        tables = [
            answers.compared(c, e, found, question).table | answers.raw_columns(c, raw, question)
            for c, e in zip(contrasts, effects, strict=True)
        ]
        return answers.together(tables, question.level)

    def _diagnostics(
        self, fitted: Fitted, x: Tensor, contrasts: Sequence[plan.Contrast], supports: dict[str, Any]
    ) -> list[dict[str, Any]]:
        sides = {side.name: side for c in contrasts for side in (c.a, c.b)}
        seed = self.options.seed
        return [
            {
                "group": name,
                "n_cells": supports[name].n_cells,
                "khat_encoder": encoder_khat(fitted.model, fitted.proposal, x[side.cells], seed=seed),
                "khat": supports[name].khat,
                "share_ok": supports[name].share_ok,
                "ess": supports[name].ess / self.options.effort.n_draws,
            }
            for name, side in sides.items()
        ]

    def _warned(self, counts: inputs.Counts) -> list[str]:
        cells = [] if self.options.sample_key else [CELLS]
        missing = sum(label is None for label in self.labels.group)
        lost = [f"{missing} cells have no {self.options.groupby} and were not compared."] if missing else []
        return [*cells, *lost, *counts.warnings, *self.warnings]


def _groups(labels: np.ndarray, wanted: Sequence[plan.Contrast]) -> np.ndarray:
    """A number for each group that is compared, negative for cells of others. Shapes: ``(cells,) -> (cells,)``."""
    rest = any(c.group_b == "rest" for c in wanted)
    names = sorted({g for c in wanted for g in (c.group_a, c.group_b)} | set(labels if rest else ()) - {None})
    number = {name: i for i, name in enumerate(names)}
    return np.array([number.get(label, -1) for label in labels])


def _of_given(model: ScviModel, adata: Any, wanted: Sequence[plan.Contrast]) -> tuple[inputs.Counts, Tensor]:
    """The cells compared as a given model wants them, all its genes."""
    adata = adata.to_memory() if getattr(adata, "isbacked", False) else adata
    rows = plan.rows_to_read(wanted, adata.n_obs, 0, 0)
    x, n_genes = model.observations(adata, rows), model.columns["X"]
    counts = inputs.Counts(
        sparse.csr_matrix(x[:, :n_genes].numpy()),
        [str(g) for g in adata.var_names],
        rows,
        f"all {n_genes} of the model",
    )
    return counts, x


def _sampler(fitted: Fitted) -> Any:
    """The fitted model, which also draws counts."""
    return fitted.model


def _digest(counts: inputs.Counts, labels: plan.Labels) -> str:
    """A hash of the counts, genes and labels that were used."""
    sha = hashlib.sha256()
    for array in (counts.matrix.data, counts.matrix.indices, counts.matrix.indptr, counts.cells):
        sha.update(np.ascontiguousarray(array).tobytes())
    for names in (counts.genes, labels.group, labels.within, labels.sample):
        sha.update("\0".join(map(str, [] if names is None else names)).encode())
    return sha.hexdigest()
