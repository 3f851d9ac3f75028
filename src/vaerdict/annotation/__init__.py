"""Cell types by a labelled reference, or none of them: labels, and novel cells with a false discovery rate."""

from vaerdict._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
