"""The selective classifier for scikit-learn; importing it imports scikit-learn."""

from vaerdict.classify.estimator import Decisions, SelectiveClassifier

__all__ = ["Decisions", "SelectiveClassifier"]
