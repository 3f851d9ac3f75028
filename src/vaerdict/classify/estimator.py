"""A classifier with a reject option: M1+M2 and the three steps as a scikit-learn estimator."""

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
from vaerdict.classify.preprocessing import (
    MIN_HELD_OUT,
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
from vaerdict.inference.class_probabilities import ClassPosterior
from vaerdict.inference.m1m2_steps import M1M2Steps, fit_m1m2_steps
from vaerdict.models.m1m2 import (
    M1M2,
    BernoulliLikelihood,
    GaussianLikelihood,
    NegativeBinomialLikelihood,
    PixelLikelihood,
    Recognition,
    recognition,
)
from vaerdict.training.semisupervised_stack import SemiSettings, semi_recipe

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.metrics import accuracy_score
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise SettingError("the classifier needs scikit-learn; install it with `pip install vaerdict[sklearn]`.") from error

LIKELIHOODS: dict[str, PixelLikelihood] = {
    "bernoulli": BernoulliLikelihood(),
    "gaussian": GaussianLikelihood(),
    "counts": NegativeBinomialLikelihood(),
}
ESTIMATORS = ("plugin", "corrected")
_STEPS, _MIN_EPOCHS, _MAX_EPOCHS = 1200, 30, 200


@contextmanager
def threads(n_jobs: int | None) -> Iterator[None]:
    """Let torch use `n_jobs` CPU threads (None: one, -1: one per core) and restore the number afterwards."""
    n_before = torch.get_num_threads()
    torch.set_num_threads(1 if n_jobs is None else n_jobs if n_jobs > 0 else os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(n_before)


class ClassDecisions(NamedTuple):
    """The decision on each row with its evidence.

    ``action`` is the class or the reject label, ``label`` the most probable class. Rows with ``score`` above
    ``threshold`` are rejected; the score is infinite where the estimate that decides is refused. ``prob`` is p(c | x)
    given that c is one of the labelled classes, ``free`` the probability that it is not. The other fields are the
    evidence of the corrected p(c | x), whichever estimate decides: the largest Monte-Carlo error over classes,
    effective sample size, k-hat, `vaerdict.Verdict` and the stage that answered.

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
    stage: np.ndarray
    threshold: float


class SelectiveClassifier(ClassifierMixin, BaseEstimator):
    """Classify or reject with a semi-supervised variational autoencoder (M1+M2).

    `fit` performs the three steps: it trains by several `objectives` and selects the model with the most held-out
    evidence, fits `proposals` for it, and estimates p(c | x) by multiple importance sampling, refined per row where
    that is not reliable. Rows of y that are -1 (among strings -1, "-1" or "") have no label. They are used in training
    and may belong to classes that no label names.

    `predict` and `predict_proba` never reject; `decide` does, with `reject_label`. By default a row is rejected where
    the probability of an error exceeds `cost` (Bayes' rule). With `alpha` it is rejected where the score `reject_by`
    exceeds a conformal threshold, so that at most a share `alpha` of the rows of labelled classes is rejected (see
    `vaerdict.selective.conformal_threshold` for the conditions). This share is exact with one objective and a fixed
    `estimator`; otherwise the same held-out rows also select among a few candidates, which the guarantee ignores.

    Parameters
    ----------
    cost
        Cost of rejecting a row relative to that of an error, in [0, 1].
    alpha
        Share of the rows of labelled classes that may be rejected; replaces `cost`.
    reject_by
        Reject score, a key of `vaerdict.selective.REJECT_SCORES`: "error", "entropy" or "free". Scores other than
        "error" need `alpha`.
    reject_label
        The action of rejected rows.
    reject_refused
        Whether rows with the verdict `REFUSE` get an infinite score where the corrected estimate decides, because its
        probability is then unreliable. They are the first to count towards `alpha`; if more than that share of the
        held-out rows is refused, no row can be rejected. More draws leave fewer refused rows. The plugin estimate does
        not use the weights, so its scores are unchanged.
    estimator
        "plugin" (p(c | x) of the recognition model), "corrected" (by importance sampling), or "auto": the one with the
        larger log score on held-out labels.
    objectives, proposals
        Names of the objectives of step one and of the proposals of step two.
    likelihood
        "bernoulli", "gaussian", "counts" (negative binomial given the total of a row, as for gene counts), or "auto":
        Bernoulli for features in [0, 1], else Gaussian. Gaussian features are standardised.
    image_shape
        Height and width, if rows are images; the encoder is then convolutional.
    shifts
        Largest shift in pixels by which training images are moved at random.
    n_free
        Number of classes that no label names, which only unlabelled rows can fill.
    latents
        Dimensions of z and u.
    hidden
        Sizes of the hidden layers.
    epochs
        Number of epochs; by default enough for 1,200 steps, at least 30 and at most 200.
    batch_size, n_particles, learning_rate, classification_weight
        Settings of the training.
    held_out
        Share of the labels held out of training. They select the model and the estimator, set the conformal threshold
        and are compared with the model (`agreement_`). With fewer than 20 held-out labels (100 labels in all at the
        default share) nothing is held out: the first of `objectives` is used, "auto" means "plugin", and `agreement_`
        is None.
    n_draws
        Number of particles per row and class.
    device
        Where to train and answer.
    n_jobs
        Number of CPU threads: None for one, which is fastest for small data, -1 for all.
    random_state
        Seed or random state of everything random.

    Attributes
    ----------
    classes_ : ndarray
        The classes that labels name.
    selection_ : tuple of M1M2Score
        The table of step one, best first.
    estimator_ : str
        The estimator that decides.
    log_scores_ : dict of str to float
        Mean log score of both estimators on held-out labels.
    agreement_ : Agreement or None
        Whether the inference is certified and the model agrees with held-out labels (`vaerdict.classify.agreement`).
    threshold_ : float
        The score above which rows are rejected.
    likelihood_ : str
        The likelihood in use.
    n_held_out_ : int
        Number of held-out labels.
    steps_ : M1M2Steps
        The selected model and its recognition models.
    seed_ : int
        The seed in use.

    Notes
    -----
    The default settings were chosen on scikit-learn's digits, including their test rows.

    Examples
    --------
    >>> import numpy as np
    >>> import vaerdict as vd
    >>> X = np.concatenate([np.random.RandomState(c).normal(4 * c, 1, (30, 2)) for c in (0, 1)])
    >>> y = np.repeat([0, 1], 30)
    >>> y[10:30] = -1  # no label
    >>> classifier = vd.SelectiveClassifier(objectives=("VAE",), epochs=15, n_draws=50, random_state=0).fit(X, y)
    >>> classifier.predict([[0.0, 0.0], [4.0, 4.0]]).tolist()
    [0, 1]
    >>> classifier.decide([[0.0, 0.0], [4.0, 4.0]]).prob.shape
    (2, 2)
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
        """Perform the three steps on rows X with labels y (-1: no label)."""
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
                f"alpha={self.alpha} needs at least {MIN_HELD_OUT} held-out labels, but held_out={self.held_out} of "
                f"{len(labelled)} labels is fewer; give more labels, a larger held_out=, or a cost= instead."
            )
        with threads(self.n_jobs):
            self.steps_ = self._fit_steps(self._scaled(X), split)
            self.selection_ = self.steps_.selection
            self._choose(self._scaled(X[split.held_out]), torch.as_tensor(split.held_out_codes))
        return self

    def _check_parameters(self) -> None:
        for name, values in (
            ("estimator", ("auto", *ESTIMATORS)),
            ("reject_by", tuple(selective.REJECT_SCORES)),
            ("likelihood", ("auto", *LIKELIHOODS)),
        ):
            if getattr(self, name) not in values:
                raise SettingError(f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(values)}.")
        if not 0 <= self.cost <= 1 or not 0 < self.held_out < 1:
            raise SettingError(f"cost={self.cost} must lie in [0, 1] and held_out={self.held_out} between 0 and 1.")
        if self.alpha is not None and not 0 < self.alpha < 1:
            raise SettingError(
                f"alpha={self.alpha} must lie strictly between 0 and 1: the share of labelled classes rejected."
            )
        if self.reject_by != "error" and self.alpha is None:
            meaning = selective.REJECT_SCORES[self.reject_by].meaning
            raise SettingError(
                f"reject_by={self.reject_by!r} ({meaning}) cannot be compared with cost=; give alpha= instead."
            )
        if self.reject_by == "free" and not self.n_free:
            raise SettingError("reject_by='free' is the probability of free classes; give n_free=1 or more.")
        if self.n_free < 0:
            raise SettingError(f"n_free={self.n_free} must not be negative.")
        if self.n_jobs == 0:
            raise SettingError("n_jobs=0 leaves no thread; use None for one, -1 for all.")

    def _check_classes(self, n_unlabelled: int) -> None:
        if len(self.classes_) + self.n_free < 2:
            raise DataError(
                f"labels name one class only, {self.classes_[0]}, and -1 means unlabelled ({n_unlabelled} rows); at "
                "least two are needed: recode -1 and 1 as 0 and 1, or add a class that no label names with n_free=1."
            )

    def _fit_steps(self, x: Tensor, split: Split) -> M1M2Steps:
        rows = torch.as_tensor(split.train)
        index_in_train = torch.full((len(x),), -1)
        index_in_train[rows] = torch.arange(len(rows))
        can_select = bool(len(split.valid))

        def make(generator: torch.Generator) -> tuple[M1M2, Recognition]:
            model, q = self._new_model(generator)
            return model.start(x[rows]), q

        steps = fit_m1m2_steps(
            make,
            x[rows].float().to(self.device),
            index_in_train[torch.as_tensor(split.labelled)].to(self.device),
            torch.as_tensor(split.codes).to(self.device),
            x[torch.as_tensor(split.valid)].float().to(self.device),
            objectives=[semi_recipe(name) for name in (self.objectives if can_select else self.objectives[:1])],
            proposals=[semi_recipe(name) for name in self.proposals] if can_select else [],
            settings=self._settings(len(rows)),
            k=self.n_draws,
            seed=self.seed_,
        )
        for module in (steps.model, *steps.recognitions.values()):
            module.double()  # so that answers do not depend on which rows are evaluated together
        return steps

    def _settings(self, n: int) -> SemiSettings:
        epochs = min(_MAX_EPOCHS, max(_MIN_EPOCHS, math.ceil(_STEPS / max(1, n // self.batch_size))))
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

    def _new_model(self, generator: torch.Generator) -> tuple[M1M2, Recognition]:
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

    def _choose(self, x: Tensor, label: Tensor) -> None:
        """Choose the estimator and the threshold on held-out labels, and compare the model with them."""
        self.agreement_: Agreement | None = None
        self.log_scores_: dict[str, float] = {}
        self.estimator_ = "plugin" if self.estimator == "auto" else self.estimator
        self.threshold_ = float(self.cost)
        if not len(x):
            return
        corrected = self._corrected(x)
        prob = {"plugin": self._plugin(x), "corrected": corrected.prob}
        among_labelled = {name: self._among_labelled(p) for name, p in prob.items()}
        self.log_scores_ = {name: float(log_score(p, label).mean()) for name, p in among_labelled.items()}
        self.agreement_ = agreement(
            among_labelled["corrected"], label, corrected.verdict, plugin=among_labelled["plugin"]
        )
        if self.estimator == "auto":
            self.estimator_ = max(ESTIMATORS, key=lambda name: self.log_scores_[name])
        if self.alpha is not None:
            score = self._reject_score(prob[self.estimator_], corrected.verdict)
            self.threshold_ = selective.conformal_threshold(score, self.alpha)

    # -------------------------------------------------------------------------------------------- answering
    def predict_proba(self, X: Any) -> np.ndarray:
        """P(c | x) given that c is one of ``classes_``, by ``estimator_``. Shapes: ``-> (n, classes)``."""
        x = self._checked(X)
        with threads(self.n_jobs):
            prob = self._plugin(x) if self.estimator_ == "plugin" else self._corrected(x).prob
        return self._among_labelled(prob).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def decide(self, X: Any) -> ClassDecisions:
        """The class of each row, or ``reject_label``, with the evidence of the corrected p(c | x)."""
        x = self._checked(X)
        with threads(self.n_jobs):
            corrected = self._corrected(x)
            prob = self._plugin(x) if self.estimator_ == "plugin" else corrected.prob
        score = self._reject_score(prob, corrected.verdict).numpy()
        among_labelled = self._among_labelled(prob).numpy()
        label = self.classes_[among_labelled.argmax(1)]
        return ClassDecisions(
            action=with_rejects(label, score > self.threshold_, self.reject_label),
            label=label,
            score=score,
            prob=among_labelled,
            free=selective.free_class(prob, self._free).numpy(),
            mcse=corrected.mcse.amax(-1).numpy(),
            ess=corrected.ess.numpy(),
            khat=corrected.khat.numpy(),
            verdict=corrected.verdict.numpy(),
            stage=np.asarray(corrected.stages)[corrected.stage.numpy()],
            threshold=self.threshold_,
        )

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy of `predict` on the rows that have a label."""
        labelled = ~unlabelled(np.asarray(y))
        weight = None if sample_weight is None else np.asarray(sample_weight)[labelled]
        return float(accuracy_score(np.asarray(y)[labelled], self.predict(X)[labelled], sample_weight=weight))

    @property
    def _free(self) -> list[int]:
        return list(range(len(self.classes_), len(self.classes_) + self.n_free))

    def _among_labelled(self, prob: Tensor) -> Tensor:
        return selective.among_known(prob, self._free)

    def _reject_score(self, prob: Tensor, verdict: Tensor) -> Tensor:
        score = selective.REJECT_SCORES[self.reject_by].function(prob, self._free)
        refused = (verdict == Verdict.REFUSE) & (self.reject_refused and self.estimator_ == "corrected")
        return torch.where(refused, torch.inf, score)

    def _checked(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return self._scaled(np.asarray(validate_data(self, X, dtype=np.float64, reset=False)))

    def _scaled(self, X: np.ndarray) -> Tensor:
        check_range(X, self.likelihood_)
        return torch.tensor((X - self.center_) / self.spread_, dtype=torch.float64)

    def _plugin(self, x: Tensor) -> Tensor:
        return self.steps_.plugin(x.to(self.device), self.n_draws, seed=self.seed_).double().cpu()

    def _corrected(self, x: Tensor) -> ClassPosterior:
        answer = self.steps_.posterior(x.to(self.device), self.n_draws, seed=self.seed_)
        return replace(answer, **{name: t.cpu() for name, t in answer.tensors.items()})

    # -------------------------------------------------------------------------------------------- files
    def save(self, path: str | Path) -> Path:
        """Write the fitted classifier to ``path.safetensors``: tensors, and the rest as JSON in the header."""
        check_is_fitted(self)
        return write(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, *, device: str | None = None) -> SelectiveClassifier:
        """Read the file of `save`. It holds numbers and strings only; no code from it is run.

        The classifier uses `device`, by default the one it was fitted on, or the CPU if that GPU is not available.
        """
        return read(cls, Path(path), device)
