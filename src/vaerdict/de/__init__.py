"""Differential expression: log2 fold changes between groups of cells with calibrated false discovery rates."""

from vaerdict._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
