"""Decisions you can trust from variational autoencoders.

Everything passes log-weights ``log p(x, z) - log q(z | x)`` of shape ``(particles, *batch)``; every answer carries its
Monte-Carlo error, effective sample size, k-hat and a verdict. Start with `ThreeStep`, `posterior` or `expect`.

Names are imported when they are first used, so that ``vaerdict --help`` does not wait for torch.
"""

from vaerdict._lazy import attach

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = attach(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
