"""A classifier with a reject option and novelty detection: M1+M2 as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vaerdict import selective
from vaerdict.classify.agreement import Agreement, agreement, log_score
from vaerdict.classify.checks import check_parameters
from vaerdict.classify.decisions import ClassDecisions, ClassEvidence
from vaerdict.classify.fitting import corrected, cross_fitted, fit_steps, plugin, threads
from vaerdict.classify.novelty import FROM_MODEL, check_calibration, find, n_calibration, rows_of
from vaerdict.classify.preprocessing import (
    MIN_HELD_OUT,
    Split,
    check_range,
    hold_out,
    likelihood_of,
    scaling,
    unlabelled,
    with_rejects,
    without_missing,
)
from vaerdict.classify.storage import read, write
from vaerdict.core import DataError, SettingError
from vaerdict.diagnostics import Verdict
from vaerdict.inference.class_probabilities import ClassPosterior
from vaerdict.inference.m1m2_steps import M1M2Steps
from vaerdict.selective import Novelty, NoveltyScore

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.metrics import accuracy_score
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise SettingError("the classifier needs scikit-learn; install it with `pip install vaerdict[sklearn]`.") from error

DEFAULT_SHARE = 0.1
"""Value of `cost` or `alpha` where neither is given."""


class SelectiveClassifier(ClassifierMixin, BaseEstimator):
    """Classify or reject with a semi-supervised variational autoencoder (M1+M2), and find rows of novel classes.

    Rows of y that are -1, None or NaN (among strings also "-1" or "") have no label. They are used in training and may
    belong to classes that no label names.

    `predict` and `predict_proba` never reject. `decide` rejects, with `reject_label`, by one of two rules. By novelty:
    a row of a labelled class is rejected with probability at most `alpha` if it is exchangeable with the labelled rows.
    By error: a row is rejected where the probability of an error exceeds `cost` (Bayes' rule). `novel` lists rows of
    novel classes with a false discovery rate, under the same condition.

    P(c | x) is that of the recognition model (plugin), or is estimated by the three steps (corrected): models are
    trained by several `objectives` and the one with the most held-out evidence is selected, `proposals` are fitted for
    it, and p(c | x) is estimated by multiple importance sampling, refined per row where that is not reliable. The
    latter takes much longer.

    Parameters
    ----------
    cost
        Cost of rejecting a row relative to that of an error, in [0, 1]; 0.1 by default.
    alpha
        Share of the rows of labelled classes that may be rejected; replaces `cost`. By default 0.1 with novelty.
    reject_by
        Reject score: "novelty", or a key of `vaerdict.selective.REJECT_SCORES` ("error", "entropy", "free"), or "auto":
        "error" if a `cost` and no `alpha` is given, else "novelty". With neither given and fewer labels than novelty
        needs (9 with diffusion and `alpha` 0.1), "auto" means "error" too. "entropy" and "free" need `alpha`.
    novelty
        Novelty score: a key of `vaerdict.classify.novelty.NOVELTY_SCORES` or a `vaerdict.selective.NoveltyScore`.
        "diffusion" (default) is calibrated by all labels if there are at most 500; otherwise, and with "neighbours",
        "class", "learned" and other objects, by a random half of them; "evidence" and "ambiguity" by held-out labels.
    reject_label
        The action of rejected rows.
    reject_refused
        Whether rows with the verdict `REFUSE` get an infinite score where the corrected estimate decides, because its
        probability is then unreliable. They are the first to count towards `alpha`; if more than that share of the
        held-out rows is refused, no row can be rejected. More draws leave fewer refused rows. Novelty and the plugin
        estimate do not use the weights, so their scores are unchanged.
    estimator
        "plugin" (p(c | x) of the recognition model), "corrected" (by importance sampling), or "auto": the one with the
        larger log score on held-out labels.
    objectives, proposals
        Names of the objectives of step one, and of the proposals of step two, which are fitted unless the plugin
        estimate is asked for.
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
        Number of epochs; by default enough for 300 steps, at least 30 and at most 200.
    n_particles
        Number of particles in training; by default 1 with the objective VAE and the plugin estimate, else 5.
    batch_size, learning_rate, classification_weight
        Settings of the training.
    held_out
        Share of the labels held out of training where a choice needs them: of one among several objectives, of the
        estimator ("auto"), of the threshold (`alpha` with a score other than novelty), or to calibrate the novelty
        scores "evidence" and "ambiguity". With fewer than 20 held-out labels (100 labels in all at the default share)
        nothing is held out: the first of `objectives` is used and "auto" means "plugin".
    n_draws
        Number of particles per row and class.
    device
        Where to train and answer.
    n_jobs
        Number of CPU threads: None for one, which is fastest for small data, -1 for all.
    verbose
        Whether progress is printed: 0 or 1.
    random_state
        Seed or random state of everything random.

    Attributes
    ----------
    classes_ : ndarray
        The classes that labels name.
    selection_ : tuple of M1M2Score
        The table of step one, best first; empty with one objective.
    estimator_ : str
        The estimator that decides.
    log_scores_ : dict of str to float
        Mean log score of the estimators on held-out labels.
    reject_by_ : str
        The reject score in use.
    threshold_ : float
        The score above which rows are rejected.
    likelihood_ : str
        The likelihood in use.
    n_held_out_ : int
        Number of held-out labels.
    rows_ : Rows
        Training rows that novelty and agreement need; `save` stores them.
    steps_ : M1M2Steps
        The selected model and its recognition models.
    seed_ : int
        The seed in use.

    Notes
    -----
    The default settings were chosen on scikit-learn's digits, wine and breast cancer, including their test rows. The
    share of rejected rows is exact with novelty by diffusion or a score of rows. Where held-out labels also select
    among a few objectives or estimators, the guarantee ignores that selection.

    Examples
    --------
    >>> import numpy as np
    >>> import vaerdict as vd
    >>> X = np.concatenate([np.random.RandomState(c).normal(4 * c, 1, (30, 2)) for c in (0, 1)])
    >>> y = np.repeat([0, 1], 30)
    >>> y[::3] = -1  # no label
    >>> classifier = vd.SelectiveClassifier(epochs=15, random_state=0).fit(X, y)
    >>> classifier.predict([[0.0, 0.0], [4.0, 4.0]]).tolist()
    [0, 1]
    >>> classifier.decide([[0.0, 0.0], [4.0, 4.0], [50.0, 0.0]]).action.tolist()
    [0, 1, -1]
    """

    n_features_in_: int

    def __init__(
        self,
        *,
        cost: float | None = None,
        alpha: float | None = None,
        reject_by: str = "auto",
        novelty: str | NoveltyScore = "diffusion",
        reject_label: Any = -1,
        reject_refused: bool = True,
        estimator: str = "plugin",
        objectives: Sequence[str] = ("VAE",),
        proposals: Sequence[str] = ("WW", "CHI"),
        likelihood: str = "auto",
        image_shape: tuple[int, int] | None = None,
        shifts: int = 0,
        n_free: int = 0,
        latents: tuple[int, int] = (8, 2),
        hidden: Sequence[int] = (64,),
        epochs: int | None = None,
        n_particles: int | None = None,
        batch_size: int = 128,
        learning_rate: float = 0.01,
        classification_weight: float = 50.0,
        held_out: float = 0.2,
        n_draws: int = 200,
        device: str = "cpu",
        n_jobs: int | None = None,
        verbose: int = 0,
        random_state: Any = None,
    ) -> None:
        self.cost = cost
        self.alpha = alpha
        self.reject_by = reject_by
        self.novelty = novelty
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
        self.n_particles = n_particles
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.classification_weight = classification_weight
        self.held_out = held_out
        self.n_draws = n_draws
        self.device = device
        self.n_jobs = n_jobs
        self.verbose = verbose
        self.random_state = random_state

    # -------------------------------------------------------------------------------------------- fitting
    def fit(self, X: Any, y: Any) -> SelectiveClassifier:
        """Train on rows X with labels y (-1, None or NaN: no label)."""
        X, y = validate_data(self, X, without_missing(y), dtype=np.float64, ensure_min_samples=2)
        check_parameters(self)
        labelled = np.flatnonzero(~unlabelled(y))
        if not len(labelled):
            raise DataError(f"none of {len(y)} rows has a label; at least one must (-1 means unlabelled).")
        check_classification_targets(y[labelled])
        self.classes_, codes = np.unique(y[labelled], return_inverse=True)
        self._check_classes(len(y) - len(labelled))
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.likelihood_ = self.likelihood if self.likelihood != "auto" else likelihood_of(X)
        random = np.random.RandomState(self.seed_)
        split = hold_out(len(X), labelled, codes, self.held_out if self._needs_held_out() else 0.0, random)
        self.n_held_out_ = len(split.held_out)
        self.rows_ = rows_of(X, labelled, codes, split.held_out, random)
        self._choose_score()
        self.center_, self.spread_ = scaling(X[split.train], self.likelihood_)
        with threads(self.n_jobs):
            self.steps_ = self._fit_steps(self._scaled(X), split)
            self.selection_ = self.steps_.selection
            self._choose(self._scaled(X[split.held_out]), torch.as_tensor(split.held_out_codes))
        return self

    def _check_classes(self, n_unlabelled: int) -> None:
        if len(self.classes_) + self.n_free < 2:
            raise DataError(
                f"labels name one class only, {self.classes_[0]}, and -1 means unlabelled ({n_unlabelled} rows); at "
                "least two are needed: recode -1 and 1 as 0 and 1, or add a class that no label names with n_free=1."
            )

    def _needs_held_out(self) -> bool:
        by_novelty = self.reject_by in ("auto", "novelty")
        model_score = isinstance(self.novelty, str) and self.novelty in FROM_MODEL
        threshold = self.alpha is not None and not by_novelty
        return len(self.objectives) > 1 or self.estimator == "auto" or threshold or model_score

    def _choose_score(self) -> None:
        """Choose the reject score, and raise if labels are too few to calibrate it."""
        self.reject_by_, by_default = self.reject_by, self.cost is None and self.alpha is None
        if self.reject_by == "auto":
            self.reject_by_ = "error" if self.cost is not None and self.alpha is None else "novelty"
        if self.reject_by_ == "novelty":
            try:
                self._check_calibration(self._alpha, "alpha")
            except SettingError:
                if self.reject_by != "auto" or not by_default:
                    raise
                self.reject_by_ = "error"
        elif self.alpha is not None and not self.n_held_out_:
            raise SettingError(
                f"alpha={self.alpha} needs at least {MIN_HELD_OUT} held-out labels, but held_out={self.held_out} of "
                f"{len(self.rows_.codes)} labels is fewer; give more labels, a larger held_out=, or a cost= instead."
            )

    def _check_calibration(self, share: float, name: str) -> None:
        n = n_calibration(self.novelty, len(self.rows_.codes), int(self.rows_.held_out.sum()))
        check_calibration(self.novelty, n, share, name)

    @property
    def _alpha(self) -> float:
        return DEFAULT_SHARE if self.alpha is None else self.alpha

    def _fit_steps(self, x: Tensor, split: Split) -> M1M2Steps:
        index_in_train = np.full(len(x), -1)
        index_in_train[split.train] = np.arange(len(split.train))
        can_select = bool(len(split.valid))
        proposes = self.estimator == "corrected" or (self.estimator == "auto" and can_select)
        return fit_steps(
            self,
            x[torch.as_tensor(split.train)],
            index_in_train[split.labelled],
            split.codes,
            x[torch.as_tensor(split.valid)] if len(self.objectives) > 1 else x[:0],
            objectives=self.objectives if can_select else self.objectives[:1],
            proposals=self.proposals if proposes else (),
        )

    def _choose(self, x: Tensor, label: Tensor) -> None:
        """Choose the estimator and the threshold, and compare the model with held-out labels if it was evaluated."""
        self._agreement: Agreement | None = None
        self.log_scores_: dict[str, float] = {}
        self.estimator_ = "plugin" if self.estimator == "auto" else self.estimator
        answer: ClassPosterior | None = None
        prob: dict[str, Tensor] = {}
        if len(x):
            prob["plugin"] = plugin(self, self.steps_, x)
            if self.estimator != "plugin":
                answer = corrected(self, self.steps_, x)
                prob["corrected"] = answer.prob
                self._agreement = self._compare(prob["plugin"], answer.prob, answer.verdict, label)
            self.log_scores_ = {name: float(log_score(self._known(p), label).mean()) for name, p in prob.items()}
        if self.estimator == "auto" and self.log_scores_:
            self.estimator_ = max(self.log_scores_, key=lambda name: self.log_scores_[name])
        if self.reject_by_ == "novelty":
            self.threshold_ = 1 - self._alpha * (1 + 1e-9)
        elif self.alpha is None:
            self.threshold_ = float(DEFAULT_SHARE if self.cost is None else self.cost)
        else:
            score = self._reject_score(prob[self.estimator_], None if answer is None else answer.verdict)
            self.threshold_ = selective.conformal_threshold(score, self.alpha)

    # -------------------------------------------------------------------------------------------- answering
    def predict_proba(self, X: Any) -> np.ndarray:
        """P(c | x) given that c is one of ``classes_``, by ``estimator_``. Shapes: ``-> (n, classes)``."""
        x = self._scaled(self._checked(X))
        with threads(self.n_jobs):
            by_plugin = self.estimator_ == "plugin"
            prob = plugin(self, self.steps_, x) if by_plugin else corrected(self, self.steps_, x).prob
        return self._known(prob).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def decide(self, X: Any, *, evidence: bool = False) -> ClassDecisions:
        """The class of each row, or ``reject_label``.

        Importance sampling is done where the corrected estimate decides, or where its `evidence` is asked for. The
        novelty of a row by diffusion or a learned score depends on the other rows asked about; a row must not be one of
        the labelled rows.
        """
        X = self._checked(X)
        x = self._scaled(X)
        with threads(self.n_jobs):
            answer = corrected(self, self.steps_, x) if evidence or self.estimator_ == "corrected" else None
            prob = answer.prob if answer and self.estimator_ == "corrected" else plugin(self, self.steps_, x)
            if self.reject_by_ == "novelty":
                score = 1 - find(self, X, self._alpha).p
            else:
                score = self._reject_score(prob, None if answer is None else answer.verdict).numpy()
        known = self._known(prob).numpy()
        label = self.classes_[known.argmax(1)]
        return ClassDecisions(
            action=with_rejects(label, score > self.threshold_, self.reject_label),
            label=label,
            score=score,
            prob=known,
            free=selective.free_class(prob, self._free).numpy(),
            threshold=self.threshold_,
            evidence=None if answer is None else ClassEvidence.of(answer),
        )

    def novel(self, X: Any, *, fdr: float = 0.1) -> Novelty:
        """Which rows belong to no labelled class, with an expected share of false calls of at most `fdr`.

        The bound holds if the labelled rows and the rows of labelled classes among X are exchangeable; it is on the
        mean over repetitions, not on every list (`vaerdict.selective.find_novel_by_diffusion` for the default score,
        `vaerdict.selective.find_novel` for the others). Rows of X may be unlabelled training rows if the score is one
        of rows ("diffusion", "neighbours", "class", "learned"). With few labels only large groups of novel rows can be
        called: at least ``fewest`` of the record.
        """
        X = self._checked(X)
        self._check_calibration(fdr, "fdr")
        with threads(self.n_jobs):
            return find(self, X, fdr)

    @property
    def agreement_(self) -> Agreement:
        """Whether the inference is certified and the model agrees with labels it was not trained on.

        With the estimators "auto" and "corrected" these are held-out labels, if there are any. Otherwise the model is
        refitted without each fifth of the labels when this is first asked for (`vaerdict.classify.agreement`).
        """
        check_is_fitted(self)
        if self._agreement is None:
            with threads(self.n_jobs):
                self._agreement = self._compare(*cross_fitted(self))
        return self._agreement

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy of `predict` on the rows that have a label."""
        y = np.asarray(without_missing(y))
        labelled = ~unlabelled(y)
        weight = None if sample_weight is None else np.asarray(sample_weight)[labelled]
        return float(accuracy_score(y[labelled], self.predict(X)[labelled], sample_weight=weight))

    @property
    def _free(self) -> list[int]:
        return list(range(len(self.classes_), len(self.classes_) + self.n_free))

    def _known(self, prob: Tensor) -> Tensor:
        return selective.among_known(prob, self._free)

    def _compare(self, plugin: Tensor, corrected: Tensor, verdict: Tensor, label: Tensor) -> Agreement:
        return agreement(self._known(corrected), label, verdict, plugin=self._known(plugin))

    def _reject_score(self, prob: Tensor, verdict: Tensor | None) -> Tensor:
        score = selective.REJECT_SCORES[self.reject_by_].function(prob, self._free)
        if verdict is None or not (self.reject_refused and self.estimator_ == "corrected"):
            return score
        return torch.where(verdict == Verdict.REFUSE, torch.inf, score)

    def _checked(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return np.asarray(validate_data(self, X, dtype=np.float64, reset=False))

    def _scaled(self, X: np.ndarray) -> Tensor:
        check_range(X, self.likelihood_)
        return torch.tensor((X - self.center_) / self.spread_, dtype=torch.float64)

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
