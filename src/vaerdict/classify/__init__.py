"""The selective classifier; importing it imports scikit-learn."""

from vaerdict.classify.estimator import ClassDecisions, SelectiveClassifier

__all__ = ["ClassDecisions", "SelectiveClassifier"]
