"""Models whose posteriors we decide with."""

from vaerdict.models.ppca import PPCA, LambdaPPCA

__all__ = ["PPCA", "LambdaPPCA"]
