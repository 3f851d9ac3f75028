"""Selective prediction: reject scores and thresholds, novel rows with a false discovery rate, exchangeability."""

from vaerdict._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
