"""A classifier that knows when not to answer: scikit-learn's conventions around M1+M2 and the three steps."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vaerdict import selective
from vaerdict.classify.agreement import Agreement, agreement, log_score
from vaerdict.classify.labels import (
    FEWEST_HELD_OUT,
    Split,
    check_range,
    hold_out,
    likelihood_of,
    scaling,
    unlabelled,
    with_rejects,
)
from vaerdict.classify.storage import read, write
from vaerdict.core import DataError, SettingError
from vaerdict.diagnostics import Verdict
from vaerdict.inference.class_posterior import ClassPosterior
from vaerdict.inference.semisupervised import SemiSteps, fit_semisteps
from vaerdict.models.m1m2 import M1M2, Bernoulli, Gaussian, Recognition, recognition
from vaerdict.training.semibounds import rule
from vaerdict.training.semistack import SemiSettings

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.metrics import accuracy_score
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise SettingError("the classifier needs scikit-learn; install it with `pip install vaerdict[sklearn]`.") from error

LIKELIHOODS = {"bernoulli": Bernoulli(), "gaussian": Gaussian()}
ESTIMATORS = ("plugin", "corrected")
_SCORES = ("error", "entropy", "free")
_STEPS, _FEWEST_EPOCHS, _MOST_EPOCHS = 1200, 30, 200


@contextmanager
def threads(n_jobs: int | None) -> Iterator[None]:
    """Let torch use `n_jobs` CPU threads (None: one, -1: one a core), and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if n_jobs is None else n_jobs if n_jobs > 0 else os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Decisions(NamedTuple):
    """What to do with each row and what speaks for it.

    ``action`` is the class or the reject label, ``label`` the most probable class, ``score`` what rejection goes by
    (above ``threshold``; infinite where the estimate that decides is refused), ``prob`` p(c | x) given that c is a
    known class, ``free`` the probability that it is not. The rest is the evidence of the corrected p(c | x), whichever
    estimate decides: its largest Monte-Carlo error over classes, effective sample size, k-hat, `vaerdict.Verdict` and
    the rung that answered.

    Shapes: ``prob (n, classes)``, all others ``(n,)``.
    """

    action: np.ndarray
    label: np.ndarray
    score: np.ndarray
    prob: np.ndarray
    free: np.ndarray
    mcse: np.ndarray
    ess: np.ndarray
    khat: np.ndarray
    verdict: np.ndarray
    rung: np.ndarray
    threshold: float


class SelectiveClassifier(ClassifierMixin, BaseEstimator):
    """Classify, or reject, with a semi-supervised variational autoencoder (M1+M2), and say whom to blame for errors.

    Rows of y that are -1 (among strings -1, "-1" or "") have no label; they teach the model what data look like, and
    may belong to classes that no label names. `fit` takes the three steps: it trains by several `objectives` and keeps
    the model with the most held-out evidence, fits `proposals` for it, and answers with p(c | x) by multiple importance
    sampling, refined row by row where that is not enough.

    `predict` and `predict_proba` never reject. `decide` does, with `reject_label`: where the probability of an error
    exceeds `cost`, the cost of rejecting in units of that of an error (Bayes' rule); or, with `alpha`, where the score
    `reject_by` exceeds a conformal threshold, so that at most a share `alpha` of rows of known classes is rejected (see
    `vaerdict.selective.conformal_threshold` for the conditions). That is exact with one objective and the estimator
    named; otherwise the same held-out rows choose among a few first, which the guarantee does not count.

    With `reject_refused` a row whose verdict is `REFUSE` scores infinity where the corrected estimate decides: Bayes'
    rule trusts a probability, and nobody vouches for this one; more draws leave fewer of them. The plugin owes nothing
    to the weights that were refused and is judged by held-out labels; where it decides, look at the verdicts. Refused
    rows are the first to fill the share `alpha`; if more than that of the held-out ones are refused, none can be
    rejected within it.

    A share `held_out` of the labels is kept out of training to choose by: between the recognition model's own p(c | x)
    (``estimator="plugin"``) and the importance-sampled one (``"corrected"``) by their log score, unless `estimator`
    names one; for the conformal threshold; and for `agreement_`. With fewer than 20 of them, or 100 labels in all at
    the default share, nothing is held out: the first of `objectives` is taken, "auto" means "plugin", and the
    agreement stays unknown.

    Features in [0, 1] are taken for Bernoulli, others are standardised and taken for Gaussian, unless `likelihood`
    names one. With `image_shape` (height, width) rows are images: the encoder convolves them and training may move them
    by `shifts` pixels. `n_free` adds classes that only unlabelled rows can fill. `latents` are the sizes of z and u.
    `epochs=None` means enough for 1,200 steps, at least 30 and at most 200. Defaults were settled on scikit-learn's
    digits, in sight of their test rows. One CPU thread is quickest for data so small; larger ones may gain by
    `n_jobs=-1`, all of them.

    Parameters are checked in `fit`. Attributes: ``classes_``, ``selection_`` (the table of step one, best first),
    ``estimator_``, ``log_scores_`` (of both estimates on held-out labels), ``agreement_`` (an
    `vaerdict.classify.agreement.Agreement` or None), ``threshold_``, ``likelihood_``, ``n_held_out_``, ``steps_``
    (the model kept and its recognition models), ``seed_``.
    """

    n_features_in_: int

    def __init__(
        self,
        *,
        cost: float = 0.1,
        alpha: float | None = None,
        reject_by: str = "error",
        reject_label: Any = -1,
        reject_refused: bool = True,
        estimator: str = "auto",
        objectives: Sequence[str] = ("VAE", "IWAE", "WW"),
        proposals: Sequence[str] = ("WW", "CHI"),
        likelihood: str = "auto",
        image_shape: tuple[int, int] | None = None,
        shifts: int = 0,
        n_free: int = 0,
        latents: tuple[int, int] = (8, 2),
        hidden: Sequence[int] = (64,),
        epochs: int | None = None,
        batch_size: int = 128,
        n_particles: int = 5,
        learning_rate: float = 3e-3,
        classification_weight: float = 50.0,
        held_out: float = 0.2,
        n_draws: int = 200,
        device: str = "cpu",
        n_jobs: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.cost = cost
        self.alpha = alpha
        self.reject_by = reject_by
        self.reject_label = reject_label
        self.reject_refused = reject_refused
        self.estimator = estimator
        self.objectives = objectives
        self.proposals = proposals
        self.likelihood = likelihood
        self.image_shape = image_shape
        self.shifts = shifts
        self.n_free = n_free
        self.latents = latents
        self.hidden = hidden
        self.epochs = epochs
        self.batch_size = batch_size
        self.n_particles = n_particles
        self.learning_rate = learning_rate
        self.classification_weight = classification_weight
        self.held_out = held_out
        self.n_draws = n_draws
        self.device = device
        self.n_jobs = n_jobs
        self.random_state = random_state

    # -------------------------------------------------------------------------------------------- fitting
    def fit(self, X: Any, y: Any) -> SelectiveClassifier:
        """Take the three steps on rows X and labels y, -1 where there is none."""
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        self._check_parameters()
        labelled = np.flatnonzero(~unlabelled(y))
        if not len(labelled):
            raise DataError(f"none of {len(y)} rows has a label; at least one must (-1 means unlabelled).")
        check_classification_targets(y[labelled])
        self.classes_, codes = np.unique(y[labelled], return_inverse=True)
        self._check_classes(len(y) - len(labelled))
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.likelihood_ = self.likelihood if self.likelihood != "auto" else likelihood_of(X)
        split = hold_out(len(X), labelled, codes, self.held_out, np.random.RandomState(self.seed_))
        self.center_, self.spread_ = scaling(X[split.train], self.likelihood_)
        self.n_held_out_ = len(split.held_out)
        if self.alpha is not None and not self.n_held_out_:
            raise SettingError(
                f"alpha={self.alpha} needs {FEWEST_HELD_OUT} held-out labels or more, which a share of {self.held_out} "
                f"of {len(labelled)} is not; give more labels, a larger share, or a cost instead."
            )
        with threads(self.n_jobs):
            self.steps_ = self._fit_steps(self._seen(X), split)
            self.selection_ = self.steps_.selection
            self._settle(self._seen(X[split.held_out]), torch.as_tensor(split.held_out_codes))
        return self

    def _check_parameters(self) -> None:
        for name, legal in (
            ("estimator", ("auto", *ESTIMATORS)),
            ("reject_by", _SCORES),
            ("likelihood", ("auto", *LIKELIHOODS)),
        ):
            if getattr(self, name) not in legal:
                raise SettingError(f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(legal)}.")
        if not 0 <= self.cost <= 1 or not 0 < self.held_out < 1:
            raise SettingError(f"cost={self.cost} must lie in [0, 1] and held_out={self.held_out} between 0 and 1.")
        if self.alpha is not None and not 0 < self.alpha < 1:
            raise SettingError(
                f"alpha={self.alpha} must lie strictly between 0 and 1: the share of known rows rejected."
            )
        if self.reject_by != "error" and self.alpha is None:
            raise SettingError(f"reject_by={self.reject_by!r} has no cost to go by; give alpha, the share to reject.")
        if self.reject_by == "free" and not self.n_free:
            raise SettingError("reject_by='free' goes by the probability of free classes; give n_free=1 or more.")
        if self.n_free < 0:
            raise SettingError(f"n_free={self.n_free} must not be negative.")
        if self.n_jobs == 0:
            raise SettingError("n_jobs=0 leaves no thread to work; use None for one, -1 for all.")

    def _check_classes(self, n_unlabelled: int) -> None:
        if len(self.classes_) + self.n_free < 2:
            raise DataError(
                f"labels name one class only, {self.classes_[0]}, and -1 means unlabelled ({n_unlabelled} rows); at "
                "least two are needed: recode -1 and 1 as 0 and 1, or add a class that no label names by n_free=1."
            )

    def _fit_steps(self, x: Tensor, split: Split) -> SemiSteps:
        rows = torch.as_tensor(split.train)
        place = torch.full((len(x),), -1)
        place[rows] = torch.arange(len(rows))
        some = bool(len(split.valid))
        steps = fit_semisteps(
            self._fresh,
            x[rows].float().to(self.device),
            place[torch.as_tensor(split.labelled)].to(self.device),
            torch.as_tensor(split.codes).to(self.device),
            x[torch.as_tensor(split.valid)].float().to(self.device),
            objectives=[rule(name) for name in (self.objectives if some else self.objectives[:1])],
            proposals=[rule(name) for name in self.proposals] if some else [],
            settings=self._settings(len(rows)),
            k=self.n_draws,
            seed=self.seed_,
        )
        for module in (steps.model, *steps.recognitions.values()):
            module.double()  # answers then agree to the last digit that matters whatever rows are asked together
        return steps

    def _settings(self, n: int) -> SemiSettings:
        epochs = min(_MOST_EPOCHS, max(_FEWEST_EPOCHS, math.ceil(_STEPS / max(1, n // self.batch_size))))
        return SemiSettings(
            n_particles=self.n_particles,
            epochs=epochs if self.epochs is None else self.epochs,
            batch_size=self.batch_size,
            labelled_batch=max(1, self.batch_size // 2),
            lr=self.learning_rate,
            cooling=0.5,
            classification=self.classification_weight,
            shifts=self.shifts,
            image_shape=None if self.image_shape is None else (self.image_shape[0], self.image_shape[1]),
        )

    def _fresh(self, generator: torch.Generator) -> tuple[M1M2, Recognition]:
        d_z, d_u = self.latents
        model = M1M2(
            self.n_features_in_,
            len(self.classes_) + self.n_free,
            d_z=d_z,
            d_u=d_u,
            hidden=tuple(self.hidden),
            likelihood=LIKELIHOODS[self.likelihood_],
            generator=generator,
        )
        shape = None if self.image_shape is None else (self.image_shape[0], self.image_shape[1])
        return model, recognition(model, image_shape=shape, hidden=tuple(self.hidden), generator=generator)

    def _settle(self, x: Tensor, label: Tensor) -> None:
        """Choose the estimate and the threshold on held-out labels, and compare the model with them."""
        self.agreement_: Agreement | None = None
        self.log_scores_: dict[str, float] = {}
        self.estimator_ = "plugin" if self.estimator == "auto" else self.estimator
        self.threshold_ = float(self.cost)
        if not len(x):
            return
        corrected = self._corrected(x)
        prob = {"plugin": self._plugin(x), "corrected": corrected.prob}
        given = {name: self._among_known(p) for name, p in prob.items()}
        self.log_scores_ = {name: float(log_score(p, label).mean()) for name, p in given.items()}
        self.agreement_ = agreement(given["corrected"], label, corrected.verdict, plugin=given["plugin"])
        if self.estimator == "auto":
            self.estimator_ = max(ESTIMATORS, key=lambda name: self.log_scores_[name])
        if self.alpha is not None:
            score = self._score(prob[self.estimator_], corrected.verdict)
            self.threshold_ = selective.conformal_threshold(score, self.alpha)

    # -------------------------------------------------------------------------------------------- answering
    def predict_proba(self, X: Any) -> np.ndarray:
        """P(c | x) given that c is one of ``classes_``, by the estimate of ``estimator_``. Shapes: ``(n, classes)``."""
        x = self._checked(X)
        with threads(self.n_jobs):
            prob = self._plugin(x) if self.estimator_ == "plugin" else self._corrected(x).prob
        return self._among_known(prob).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row; never rejects."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def decide(self, X: Any) -> Decisions:
        """The class of each row, or ``reject_label``, with the evidence of the corrected p(c | x)."""
        x = self._checked(X)
        with threads(self.n_jobs):
            corrected = self._corrected(x)
            prob = self._plugin(x) if self.estimator_ == "plugin" else corrected.prob
        given, score = self._among_known(prob).numpy(), self._score(prob, corrected.verdict).numpy()
        label = self.classes_[given.argmax(1)]
        return Decisions(
            action=with_rejects(label, score > self.threshold_, self.reject_label),
            label=label,
            score=score,
            prob=given,
            free=selective.free_class(prob, self._free).numpy(),
            mcse=corrected.mcse.amax(-1).numpy(),
            ess=corrected.ess.numpy(),
            khat=corrected.khat.numpy(),
            verdict=corrected.verdict.numpy(),
            rung=np.asarray(corrected.rungs)[corrected.rung.numpy()],
            threshold=self.threshold_,
        )

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy of `predict` on the rows that have a label."""
        some = ~unlabelled(np.asarray(y))
        weight = None if sample_weight is None else np.asarray(sample_weight)[some]
        return float(accuracy_score(np.asarray(y)[some], self.predict(X)[some], sample_weight=weight))

    @property
    def _free(self) -> list[int]:
        return list(range(len(self.classes_), len(self.classes_) + self.n_free))

    def _among_known(self, prob: Tensor) -> Tensor:
        return selective.among_known(prob, self._free)

    def _score(self, prob: Tensor, verdict: Tensor) -> Tensor:
        if self.reject_by == "entropy":
            score = selective.entropy(prob)
        elif self.reject_by == "free":
            score = selective.free_class(prob, self._free)
        else:
            score = 1 - prob[:, : len(self.classes_)].amax(-1)
        refused = (verdict == Verdict.REFUSE) & (self.reject_refused and self.estimator_ == "corrected")
        return torch.where(refused, torch.inf, score)

    def _checked(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return self._seen(np.asarray(validate_data(self, X, dtype=np.float64, reset=False)))

    def _seen(self, X: np.ndarray) -> Tensor:
        check_range(X, self.likelihood_)
        return torch.tensor((X - self.center_) / self.spread_, dtype=torch.float64)

    def _plugin(self, x: Tensor) -> Tensor:
        return self.steps_.plugin(x.to(self.device), self.n_draws, seed=self.seed_).double().cpu()

    def _corrected(self, x: Tensor) -> ClassPosterior:
        found = self.steps_.posterior(x.to(self.device), self.n_draws, seed=self.seed_)
        return replace(found, **{name: t.cpu() for name, t in vars(found).items() if isinstance(t, Tensor)})

    # -------------------------------------------------------------------------------------------- keeping
    def save(self, path: str | Path) -> Path:
        """Write the fitted classifier to ``path.safetensors``: tensors, and the rest as JSON in its header."""
        check_is_fitted(self)
        return write(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, *, device: str | None = None) -> SelectiveClassifier:
        """The classifier that `save` wrote; reads numbers and strings, runs no code from the file.

        It works on `device`, by default the one it was fitted on; on the CPU where that was a GPU and there is none.
        """
        return read(cls, Path(path), device)
