"""Class probabilities of a given SCANVI model: those of its classifier, those of the model, and which to use.

The classifier is a part of the encoder. The posterior p(class | counts) of the model itself is *corrected*: importance
sampling with proposals refined per cell, summed over classes. A reliable corrected probability is that of the model,
but the model may be wrong: after a short training p(state | class) hardly depends on the class. Held-out labels decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vaerdict.annotation.calibration import ClassCalibration
from vaerdict.auditing.observed import Observed, space_of
from vaerdict.auditing.quantities import Quantity
from vaerdict.auditing.refined import STEP, refined, weigh
from vaerdict.core import Progress, SettingError, ShapeError, check_count, silent
from vaerdict.diagnostics import Verdict
from vaerdict.engines import Engine, Threads, ordered_results, started
from vaerdict.inference.assess import assess
from vaerdict.inference.target import Space
from vaerdict.models.scvi.door import from_scvi
from vaerdict.models.scvi.scanvi import Scanvi
from vaerdict.noise import KeyedNoise, row_keys

CLASSIFIER, CORRECTED = "classifier", "corrected"
"""The two estimates of class probabilities."""

_MORE = 4  # times as many draws for cells that were not answered
_READ, _REFINED = 1024, 64  # cells whose counts are dense, and cells that are refined, at a time
_LEAST_LABELS = 20  # held-out labels with which estimates can be compared
_LEAST_RELIABLE = 0.9  # share of cells that need a reliable answer


@dataclass(frozen=True, eq=False)
class ScanviClasses:
    """Class probabilities of cells by both estimates, and which one to use.

    ``corrected``, its Monte-Carlo error ``mcse`` and both k-hats (of the refined proposals and of the encoder) are NaN,
    and ``verdict`` is REFUSE, where the corrected estimate was not computed: all cells but those ``audited``, unless
    it was ``chosen``. ``calibration`` compares both estimates with held-out labels; it is empty without.

    Shapes: ``classes (C,)``, ``classifier, corrected, mcse (n, C)``, ``audited, verdict, khat, khat_encoder (n,)``.
    """

    classes: np.ndarray
    classifier: np.ndarray = field(repr=False)
    corrected: np.ndarray = field(repr=False)
    mcse: np.ndarray = field(repr=False)
    audited: np.ndarray = field(repr=False)
    verdict: np.ndarray = field(repr=False)
    khat: np.ndarray = field(repr=False)
    khat_encoder: np.ndarray = field(repr=False)
    calibration: Mapping[str, ClassCalibration] = field(repr=False)
    chosen: str
    message: str

    @property
    def prob(self) -> np.ndarray:
        """The chosen probabilities; the classifier's where a corrected one is refused. Shapes: ``-> (n, C)``."""
        if self.chosen == CLASSIFIER:
            return self.classifier
        return np.where((self.verdict == Verdict.REFUSE)[:, None], self.classifier, self.corrected)


def class_probabilities(
    model: Any,
    adata: Any = None,
    labels: Sequence[Any] | np.ndarray | str | None = None,
    *,
    n_audited: int = 300,
    n: int = 600,
    seed: int = 0,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> ScanviClasses:
    """Class probabilities of cells under a SCANVI model, by its classifier or corrected by importance sampling.

    The corrected probabilities of `n_audited` cells are computed first, of those with held-out labels before others.
    They are chosen, and then computed for all cells, if they are reliable (verdict OK) for nine cells in ten and the
    log score of the held-out labels is not lower than the classifier's. Otherwise the classifier's are used, and
    ``message`` says why.

    Parameters
    ----------
    model
        A trained ``scvi.model.SCANVI``, or what `vaerdict.from_scvi` made of it.
    adata
        The cells, with the fields that the model registered; by default those the model was trained with.
    labels
        Held-out labels, one per cell, or the column of ``adata.obs`` that has them. Values that are no class of the
        model mean that there is none. Labels that the model was trained with do not count.
    n_audited
        Number of cells whose corrected probabilities are computed before the choice.
    n
        Number of refined draws per cell, and four times as many where these are not reliable.
    seed
        Seed of everything random.
    engine
        Where blocks of cells are processed, by default one thread per core.
    progress
        Called after each block of cells.

    Returns
    -------
    ScanviClasses
        Both estimates ``(n_cells, classes)`` with verdict, k-hat and calibration, the choice and its reason.

    Raises
    ------
    SettingError
        If the model is not a trained SCANVI.
    ShapeError
        If there is not one label per cell.

    Examples
    --------
    >>> answer = class_probabilities(model, query, "cell_type")     # doctest: +SKIP
    >>> answer.chosen, answer.prob.shape                            # doctest: +SKIP
    ('classifier', (750, 5))
    """
    scanvi = model if isinstance(model, Scanvi) else from_scvi(model)
    if not isinstance(scanvi, Scanvi):
        raise SettingError(f"{type(model).__name__} has no classes; give a trained SCANVI.")
    n, n_audited = STEP * -(-check_count(n, name="n") // STEP), check_count(n_audited, name="n_audited")
    cells = _Cells(scanvi, adata, n, seed, engine, progress)
    classifier = cells.classifier()
    label = _held_out(scanvi, adata, labels, len(classifier))
    answers = _Answers.none(*classifier.shape)
    audited = _audited(label, n_audited, seed)
    cells.correct(audited, answers)
    compared = audited[label[audited] >= 0]
    compared = compared[~answers.corrected[compared].isnan().any(-1).numpy()]
    calibration = dict[str, ClassCalibration]()
    if len(compared) >= _LEAST_LABELS:
        estimates = {CLASSIFIER: classifier, CORRECTED: answers.corrected}
        truth = torch.from_numpy(label[compared])
        calibration = {name: ClassCalibration.of(prob[compared], truth) for name, prob in estimates.items()}
    chosen, message = _choice(answers, audited, calibration, len(compared))
    mask = np.zeros(len(label), dtype=bool)
    mask[audited] = True
    if chosen == CORRECTED:
        cells.correct(np.flatnonzero(~mask), answers)
    arrays = {name: t.numpy() for name, t in answers._asdict().items()}
    return ScanviClasses(
        scanvi.classes,
        classifier.numpy(),
        audited=mask,
        calibration=calibration,
        chosen=chosen,
        message=message,
        **arrays,
    )


class _Answers(NamedTuple):
    """Corrected probabilities with their evidence, one row per cell, filled in as they are computed."""

    corrected: Tensor
    mcse: Tensor
    verdict: Tensor
    khat: Tensor
    khat_encoder: Tensor

    @classmethod
    def none(cls, n: int, n_classes: int) -> _Answers:
        prob, mcse = torch.full((2, n, n_classes), torch.nan).double().unbind()
        khat, khat_encoder = torch.full((2, n), torch.nan).double().unbind()
        return cls(prob, mcse, torch.full((n,), int(Verdict.REFUSE)), khat, khat_encoder)

    def put(self, rows: Tensor, new: _Answers) -> None:
        for mine, theirs in zip(self, new, strict=True):
            mine[rows] = theirs.to(mine)


@dataclass(frozen=True, eq=False)
class _Cells:
    """The cells of an AnnData under a model, read and answered in blocks."""

    model: Scanvi
    adata: Any
    n: int
    seed: int
    engine: Engine | None
    progress: Progress

    def classifier(self) -> Tensor:
        """The classifier's probabilities of all cells. Shapes: ``-> (n_cells, C)``."""
        n_cells = (self.model.adata if self.adata is None else self.adata).n_obs
        parts = np.split(np.arange(n_cells), range(_READ, n_cells, _READ))
        prob = torch.cat([self.model.classifier_probabilities(self._read(part)).double().cpu() for part in parts])
        return prob / prob.sum(-1, keepdim=True)  # float32 rounding

    def correct(self, rows: np.ndarray, answers: _Answers) -> None:
        """Fill in the corrected probabilities of the cells at `rows`."""
        done, device = 0, next(self.model.parameters()).device
        engine = self.engine or Threads(1 if device.type == "cuda" else None)
        # the encoder of scvi-tools draws from the global state, which threads cannot restore one by one
        with started(self.engine), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for part in np.split(rows, range(_READ, len(rows), _READ)) if len(rows) else ():
                x = self._read(part)
                answer = partial(_answered, self.model, space_of(self.model, x), x, row_keys(x), self.n, self.seed)
                blocks = torch.arange(len(part)).split(_REFINED)
                for block, new in zip(blocks, ordered_results(engine.map(answer, blocks)), strict=True):
                    answers.put(torch.from_numpy(part)[block], new)
                    done += len(block)
                    self.progress(done, len(rows), "cells with corrected class probabilities")

    def _read(self, rows: np.ndarray) -> Tensor:
        return self.model.observations(self.adata, rows)


@torch.no_grad()
def _answered(model: Scanvi, space: Space, x: Tensor, keys: Tensor, n: int, seed: int, rows: Tensor) -> _Answers:
    """The corrected probabilities of some cells; those that are not reliable are repeated with more draws."""
    noise = partial(KeyedNoise, seed)
    observed = Observed.at(space, x, model.encoder, rows)
    encoder = weigh(observed, observed.encoder, n // 2, generator=noise(0, keys[rows]))
    answers = _refined(model, observed, n, noise(1, keys[rows]), encoder.khat)
    again = (answers.verdict != Verdict.OK).nonzero().flatten()
    if len(again):
        part = rows[again.cpu()]
        observed = Observed.at(space, x, model.encoder, part)
        answers.put(again, _refined(model, observed, _MORE * n, noise(2, keys[part]), encoder.khat[again]))
    return _Answers(*(t.cpu() for t in answers))


def _refined(model: Scanvi, observed: Observed, n: int, noise: KeyedNoise, khat_encoder: Tensor) -> _Answers:
    draws = refined(observed, n, generator=noise)
    prob = Quantity(lambda z: model.class_probabilities(z), continuous=True)
    values = torch.cat(list(observed.values(prob, draws.sample.z)))
    answer = assess(values, draws.sample.log_w, source=draws.source, probability=False)
    corrected, mcse = (torch.where(draws.sample.usable.unsqueeze(-1), t, torch.nan) for t in answer.estimate[:2])
    return _Answers(corrected, mcse, answer.verdict.maximum(draws.sample.verdict), draws.sample.khat, khat_encoder)


def _held_out(model: Scanvi, adata: Any, labels: Sequence[Any] | np.ndarray | str | None, n_cells: int) -> np.ndarray:
    """The code of every cell's held-out label, -1 where it has none. Shapes: ``-> (n_cells,)``."""
    if labels is None:
        return np.full(n_cells, -1)
    adata = model.adata if adata is None else adata
    names: Sequence[Any] | np.ndarray = adata.obs[labels] if isinstance(labels, str) else labels
    if len(names) != n_cells:
        raise ShapeError(f"labels= has {len(names)} entries for {n_cells} cells; give one each.")
    codes = {name: i for i, name in enumerate(model.classes)}
    label = np.array([codes.get(str(name), -1) for name in names])
    return np.where(model.labelled, -1, label) if adata is model.adata else label


def _audited(label: np.ndarray, n_audited: int, seed: int) -> np.ndarray:
    """The cells to audit, in order: those with held-out labels first, and others at random."""
    order = np.random.default_rng(seed).permutation(len(label))
    return np.sort(order[np.argsort(label[order] < 0, kind="stable")][:n_audited])


def _choice(
    answers: _Answers, audited: np.ndarray, calibration: Mapping[str, ClassCalibration], n_labels: int
) -> tuple[str, str]:
    """Which estimate to use, and why."""
    reliable = float((answers.verdict[audited] == Verdict.OK).double().mean())
    khat, khat_encoder = (float(t[audited].nanmedian()) for t in (answers.khat, answers.khat_encoder))
    evidence = f"{reliable:.0%} of {len(audited)} cells (median k-hat {khat:.2f})"
    used = "the classifier's probabilities are used"
    fitted = f"the encoder's k-hat is {khat_encoder:.2f}"
    if khat_encoder > 1:
        fitted += ": encoder and p(state | class) do not match, as after a short training; train past the KL warm-up"
    if reliable < _LEAST_RELIABLE:
        return CLASSIFIER, f"{used}: corrected ones are reliable for {evidence} only; {fitted}."
    if not calibration:
        return CLASSIFIER, (
            f"{used}: corrected ones are reliable for {evidence}, but {n_labels} held-out labels cannot show which are "
            f"better, give at least {_LEAST_LABELS}; {fitted}."
        )
    loss = {name: calibration[name].log_loss for name in (CORRECTED, CLASSIFIER)}
    losses = f"log loss {loss[CORRECTED]:.3f} on {n_labels} held-out labels, classifier {loss[CLASSIFIER]:.3f}"
    if loss[CORRECTED] > loss[CLASSIFIER]:
        return CLASSIFIER, f"{used}: corrected ones are reliable for {evidence}, but worse ({losses}); {fitted}."
    return CORRECTED, f"corrected probabilities are used: they are reliable for {evidence} and not worse ({losses})."
