"""Weighted draws that were made elsewhere, by NumPyro for example, as a posterior with its diagnostics."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vaerdict.core import DataError, Latent, ShapeError, check_log_weights
from vaerdict.inference.posterior import Posterior


def from_weights(log_w: Any, z: Any = None) -> Posterior:
    """The posterior of weighted draws from any library: k-hat, effective sample size, verdict and expectations.

    Parameters
    ----------
    log_w
        Log-weights log p(x, z) - log q(z | x) as an array of NumPy, JAX or torch, ``(K,)`` for the draws of one
        posterior or ``(K, n)`` for n observations.
    z
        The draws or any functions of them, ``(K, ...)`` or ``(K, n, ...)``: an array, or a mapping of arrays by name,
        which becomes a named tuple. Without it only the weights are assessed.

    Returns
    -------
    Posterior
        ``khat``, ``ess``, ``verdict`` and ``log_evidence``; with z also ``expect(f)``, ``verdict_on(f)``,
        ``decide(loss)`` and ``resample(n)``.

    Raises
    ------
    DataError, ShapeError, WeightError
        If an array is not numeric or does not begin with the shape of the weights, or if weights are NaN, infinite or
        all zero.

    Examples
    --------
    >>> answer = from_weights([0.1, -0.2, 0.0] * 40, {"slope": [1.0, 2.0, 3.0] * 40})
    >>> f"{answer.expect(lambda z: z.slope).value:.2f}, {answer.ess:.0f} effective draws"
    '1.96, 118 effective draws'

    The log-weights of a NumPyro guide; ``examples/numpyro_guide.py`` is the whole program.

    >>> def log_weight(key):                                                             # doctest: +SKIP
    ...     log_q, trace = log_density(seed(guide, key), data, {}, params)
    ...     z = {name: site["value"] for name, site in trace.items() if site["type"] == "sample"}
    ...     return log_density(model, data, {}, z)[0] - log_q, z
    >>> answer = from_weights(*jax.vmap(log_weight)(jax.random.split(key, 4000)))        # doctest: +SKIP
    """
    weights = check_log_weights(_tensor(log_w, "log_w"))
    if z is None:
        z = weights.new_empty(*weights.shape, 0)
    elif isinstance(z, Mapping):
        names = [str(name).replace(".", "_").lstrip("_") for name in z]
        z = namedtuple("Latent", names)(*(_draws(part, f"z[{name!r}]", weights) for name, part in z.items()))
    else:
        z = _draws(z, "z", weights)
    return Posterior(z, weights, torch.zeros(len(weights), dtype=torch.long))


def _draws(array: Any, name: str, weights: Tensor) -> Latent:
    draws = _tensor(array, name)
    if draws.shape[: weights.dim()] != weights.shape:
        raise ShapeError(
            f"{name} has shape {tuple(draws.shape)}, the log-weights {tuple(weights.shape)}; draws must begin with "
            "the shape of the log-weights, particles first."
        )
    return draws


def _tensor(array: Any, name: str) -> Tensor:
    """A float64 copy of an array."""
    if isinstance(array, Tensor):
        return array.detach().double()
    try:
        return torch.from_numpy(np.array(array, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} is no array of numbers: {error}.") from error
