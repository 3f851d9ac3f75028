"""Differential expression under one fitted scvi-tools model: the model stage against the modes of scvi-tools.

The data are those of the paper's appendix. Both sides use the same model, trained by scvi-tools with its defaults, the
same cells and one thread; everything after training is timed. The model stage weights draws of the latents by their
importance. scvi-tools does so in its importance mode, with its default numbers of draws (5,000 pairs of cells from as
many latents per group, weighted by up to 1,024 anchor cells and 500 draws each for their evidence), and once with 100
anchors. Its default mode, and group means of its normalised expression, take the latents of the encoder as they are,
which is much cheaper. Ours draws latents for every cell, more in total than the peer; rows have the numbers.

`vaerdict de` by default uses no model: its row is the whole of `vaerdict.differential_expression`, from the counts of
the same cells, of which an AnnData is made, to the table. All cells are compared, so that there are none from which it
could learn a prior. As in the other rows a gene's probability is that of a change either way; a gene that is not tested
has probability zero.

Three settings of the model stage were chosen for speed on data sets 0 to 2, whose error hardly depends on them: modes
are found to a tenth of a nat in at most three steps, and a cell has 25 draws (other rows: 100). The rows are of other
data sets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict.core import Progress, Proposal, restricted, silent
from vaerdict.datasets.genes import CountData, appendix
from vaerdict.de.effects import CENTRED, PAIR, PROPORTION, Estimand
from vaerdict.de.metrics import measure
from vaerdict.de.model import Proposed
from vaerdict.de.model.stage import as_scvi
from vaerdict.inference import posterior
from vaerdict.models.scvi import Scvi
from vaerdict.noise import seeded
from vaerdict.proposals import defensive
from vaerdict.refinement import refine
from vaerdict_paper.benchmarks.timing import Watch, one_thread, watched
from vaerdict_paper.experiments.genes_contrasts import Sides, compare_groups, sample_cells
from vaerdict_paper.experiments.rivals import (
    BOOTSTRAP,
    LATENT_DRAWS,
    ScviAnswer,
    ScviContrast,
    counts_answer,
    scvi_means,
    scvi_mode,
    timed_scvi,
    train_scvi,
)
from vaerdict_paper.experiments.rivals import PAIRS as THEIR_DRAWS

PACKAGES = ("scvi", "anndata")

DELTA = 0.5
TOLERANCE, STEPS = 0.1, 3  # nats, and Newton steps at most
FEW, MANY = 25, 100  # joint draws
FIRST = 20  # first data set
CASES: tuple[tuple[Estimand, int], ...] = ((CENTRED, FEW), (CENTRED, MANY), (PROPORTION, FEW), (PAIR, MANY))
"""Estimands of our rows, with their numbers of draws."""
ASSESSED_CELLS, ASSESSED_DRAWS = 200, 1000

_METRICS = ("fdr_mae", "auprc", "fdp", "tpr")
PAIRS, MEANS, CENTRED_MEANS = "two random cells", "group means", "group means, centred"
"""What a fold change is between."""

_ENCODER, _WEIGHTED, _NO_LATENTS = "of the encoder", "importance-weighted", "none: counts"


class Mode(NamedTuple):
    """A way to ask scvi-tools: what is compared, how its latents are treated, and the truth that it is scored by."""

    answer: Callable[[ScviContrast], ScviAnswer]
    between: str
    latents: str
    estimand: Estimand


MODES = {
    "scvi-tools, default": Mode(scvi_mode, PAIRS, _ENCODER, PAIR),
    "scvi-tools, importance": Mode(partial(scvi_mode, weights="importance"), PAIRS, _WEIGHTED, PAIR),
    "scvi-tools, importance, 100 anchors": Mode(
        partial(scvi_mode, weights="importance", max_cells=100), PAIRS, _WEIGHTED, PAIR
    ),
    "scvi-tools, means": Mode(scvi_means, MEANS, _ENCODER, PROPORTION),
    "scvi-tools, centred means": Mode(partial(scvi_means, centred=True), CENTRED_MEANS, _ENCODER, CENTRED),
}
MODEL_STAGE, COUNTS = "model stage", "vaerdict de"

_BETWEEN = {PAIR.name: PAIRS, PROPORTION.name: MEANS, CENTRED.name: CENTRED_MEANS}


def run(*, quick: bool = False, progress: Progress = silent) -> list[dict[str, Any]]:
    """One row per method: seconds and metrics, means over the data sets.

    CPU seconds are not inflated by other load on the machine. `lfc_draws` fold changes per gene come from `n_latents`
    per group. `khat` (median) and `ess_share` are of the proposal of a method (the encoder of scvi-tools, or our
    refinement of it) with a thousand draws, which are not timed.
    """
    n_data, n_cells, n_genes, epochs = (1, 200, 30, 100) if quick else (2, 1000, 100, None)
    first = 0 if quick else FIRST
    by_data_set = []
    for seed in range(first, first + n_data):
        data = appendix(seed, n_cells=n_cells, n_genes=n_genes)
        model = train_scvi(data.counts, seed=seed, max_epochs=epochs).model
        with one_thread():
            _warm_up(model, data)
            by_data_set.append([*_theirs(data, model, seed), *_ours(data, model, seed), _by_counts(data, seed)])
        progress(seed + 1 - first, n_data, "data sets")
    return [{**_averaged(same), "datasets": n_data} for same in zip(*by_data_set, strict=True)]


def _warm_up(model: Any, data: CountData) -> None:
    """What is timed with one call has its imports and first allocations done."""
    a, b = (cells[:20] for cells in _sides(data))
    few = partial(scvi_mode, weights="importance", max_cells=5)
    for answer in (MODES["scvi-tools, default"].answer, MODES["scvi-tools, means"].answer, few):
        timed_scvi(answer, ScviContrast(model, a, b, DELTA), 0)
    wrapped = as_scvi(model, None)
    _answer(wrapped, wrapped.observations(), data, CENTRED, FEW, 0)
    counts_answer(Sides.of(appendix(0, n_cells=60, n_genes=10), None, seed=0), DELTA)


def _theirs(data: CountData, model: Any, seed: int) -> list[dict[str, Any]]:
    """The modes of scvi-tools."""
    a, b = _sides(data)
    wrapped = as_scvi(model, None)
    assessed = _assessed(wrapped, wrapped.observations(), wrapped.encoder)
    rows = []
    for name, mode in MODES.items():
        with watched() as watch:
            answer = timed_scvi(mode.answer, ScviContrast(model, a, b, DELTA), seed)
        pairs = mode.between == PAIRS
        drawn = {
            "lfc_draws": THEIR_DRAWS if pairs else BOOTSTRAP,
            "n_latents": (THEIR_DRAWS // len(a) + 1 if pairs else LATENT_DRAWS) * len(a),
        }
        metrics = measure(answer.prob, answer.lfc, _truth(data, mode.estimand), DELTA)
        asked = {"method": name, "between": mode.between, "latents": mode.latents}
        rows.append({**asked, **_seconds(watch), **drawn, **assessed, **_selected(metrics)})
    return rows


def _ours(data: CountData, model: Any, seed: int) -> list[dict[str, Any]]:
    """The answer of the model stage for each estimand, scored by its own truth."""
    rows = []
    for estimand, n_draws in CASES:
        with watched() as watch:
            wrapped = as_scvi(model, None)
            x = wrapped.observations()
            q, prob, lfc = _answer(wrapped, x, data, estimand, n_draws, seed)
        metrics = measure(prob, lfc, _truth(data, estimand), DELTA)
        asked = {"method": MODEL_STAGE, "between": _BETWEEN[estimand.name], "latents": _WEIGHTED}
        drawn = {"lfc_draws": n_draws, "n_latents": n_draws * len(_sides(data)[0])}
        rows.append({**asked, **_seconds(watch), **drawn, **_assessed(wrapped, x, q), **_selected(metrics)})
    return rows


def _by_counts(data: CountData, seed: int) -> dict[str, Any]:
    """The default path of `vaerdict de`: all genes, by the counts."""
    sides = Sides.of(data, None, seed=0)
    with watched() as watch:
        answer = counts_answer(sides, DELTA, seed=seed)
    metrics = measure(answer["prob_de"], answer["lfc_mean"], _truth(data, CENTRED), DELTA)
    asked = {"method": COUNTS, "between": CENTRED_MEANS, "latents": _NO_LATENTS}
    nothing = {"lfc_draws": None, "n_latents": None, "khat": None, "ess_share": None}
    return {**asked, **_seconds(watch), **nothing, **_selected(metrics)}


def _truth(data: CountData, estimand: Estimand) -> Tensor:
    return data.lfc(0, 1, proportions=not estimand.centred)


def _answer(
    model: Scvi, x: Tensor, data: CountData, estimand: Estimand, n_draws: int, seed: int
) -> tuple[Proposal, Tensor, Tensor]:
    local = refine(model, x, model.encoder, tolerance=TOLERANCE, n_steps=STEPS).distribution
    q = defensive({"REFINED": local}, model.prior)
    posterior = Proposed(model, x, q)
    table = compare_groups(posterior, *_sides(data), estimand=estimand, delta=DELTA, n_draws=n_draws, seed=seed).table
    return q, table["prob_de"], table["lfc_mean"]


def _sides(data: CountData) -> tuple[Tensor, Tensor]:
    return sample_cells(data.labels, 0, None, seed=0), sample_cells(data.labels, 1, None, seed=0)


def _seconds(watch: Watch) -> dict[str, float]:
    return {"seconds": watch.wall, "cpu_s": watch.cpu}


def _assessed(model: Scvi, x: Tensor, q: Proposal) -> dict[str, float]:
    cells = torch.arange(min(ASSESSED_CELLS, len(x)))
    part = posterior(model, x[cells], restricted(q, cells), ASSESSED_DRAWS, seed=seeded(0))
    return {"khat": part.khat.nanmedian().item(), "ess_share": part.ess.mean().item() / ASSESSED_DRAWS}


def _selected(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: metrics[key] for key in _METRICS}


def _averaged(rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """The mean of every float; other values are the same in all rows."""

    def merged(values: list[Any]) -> Any:
        return sum(values) / len(values) if isinstance(values[0], float) else values[0]

    return {key: merged([row[key] for row in rows]) for key in rows[0]}
