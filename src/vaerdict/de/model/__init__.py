"""The stage that trains or uses a model of the counts: optional, never on the default path.

Its pieces are listed in the stub beside this file: posteriors of cells, averages over groups, and fold changes.
"""

from vaerdict._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
