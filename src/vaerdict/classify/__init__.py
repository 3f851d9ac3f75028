"""The selective classifier; importing it imports scikit-learn."""

from vaerdict.classify.decisions import ClassDecisions, ClassEvidence
from vaerdict.classify.estimator import SelectiveClassifier

__all__ = ["ClassDecisions", "ClassEvidence", "SelectiveClassifier"]
