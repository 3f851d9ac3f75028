"""Records of what the classifier decided, and of the evidence behind it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vaerdict.inference.class_probabilities import ClassPosterior


class ClassEvidence(NamedTuple):
    """Evidence of the corrected p(c | x) of each row.

    The largest Monte-Carlo error over classes, effective sample size, k-hat, `vaerdict.Verdict`, the stage that
    answered, and log p(x). Shapes: all ``(n,)``.
    """

    mcse: np.ndarray
    ess: np.ndarray
    khat: np.ndarray
    verdict: np.ndarray
    stage: np.ndarray
    log_evidence: np.ndarray

    @classmethod
    def of(cls, answer: ClassPosterior) -> ClassEvidence:
        """The evidence of an answer."""
        return cls(
            mcse=answer.mcse.amax(-1).numpy(),
            ess=answer.ess.numpy(),
            khat=answer.khat.numpy(),
            verdict=answer.verdict.numpy(),
            stage=np.asarray(answer.stages)[answer.stage.numpy()],
            log_evidence=answer.log_evidence.numpy(),
        )


class ClassDecisions(NamedTuple):
    """The decision on each row.

    ``action`` is the class or the reject label, ``label`` the most probable class. Rows with ``score`` above
    ``threshold`` are rejected. With ``reject_by_ = "novelty"`` the score is one minus the conformal p-value of novelty;
    it is infinite where the estimate that decides is refused. ``prob`` is p(c | x) given that c is one of the labelled
    classes, ``free`` the probability that it is not. ``evidence`` is that of the corrected estimate: None where the
    plugin estimate decides, unless it was asked for.

    Shapes: ``prob (n, classes)``, the other arrays ``(n,)``.
    """

    action: np.ndarray
    label: np.ndarray
    score: np.ndarray
    prob: np.ndarray
    free: np.ndarray
    threshold: float
    evidence: ClassEvidence | None
