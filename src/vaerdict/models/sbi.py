"""Neural posterior estimates of sbi as proposals for the model of a simulator with a known density (extra ``sbi``)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor, nn

from vaerdict.core import Draws, SettingError, ShapeError, check_count
from vaerdict.noise import Randomness, as_source, global_state_from, sampled, seeded
from vaerdict.optional import require
from vaerdict.priors import log_prior


def from_sbi(posterior: Any, likelihood: Callable[..., Any] | None = None, *, prior: Any = None) -> SbiModel:
    """Wrap a neural posterior estimate (NPE) of sbi as a proposal, with its prior and a likelihood as model.

    The density estimator is used as it is: draws outside the support of the prior, which sbi rejects ("leakage"), have
    the weight zero, so that no density needs to be normalised again.

    Parameters
    ----------
    posterior
        A ``DirectPosterior`` of sbi, as built from NPE, or its density estimator with `prior`. It is copied.
    likelihood
        The density of the simulator: a function of ``(x, theta)`` that returns log p(x | theta), or of ``theta`` that
        returns a torch distribution of x. Shapes: ``(n, ...), (K, n, d) -> (K, n)``.
    prior
        The prior of theta, by default that of the posterior.

    Returns
    -------
    SbiModel
        The model; the density estimator is its attribute ``encoder``.

    Raises
    ------
    SettingError
        If there is no likelihood or prior, or if the posterior has no density for all x (MCMC, rejection, variational
        inference, flow matching).

    References
    ----------
    Dax et al. (2023), Neural importance sampling for rapid and reliable gravitational-wave inference, PRL 130.

    Examples
    --------
    >>> wrapped = from_sbi(posterior, lambda theta: Independent(Normal(theta, 0.1), 1))  # doctest: +SKIP
    >>> vaerdict.posterior(wrapped, x, wrapped.encoder).khat                             # doctest: +SKIP
    """
    estimator = getattr(posterior, "posterior_estimator", posterior)
    base = require("sbi.neural_nets.estimators.base", "sbi").ConditionalDensityEstimator
    if not isinstance(estimator, base):
        raise SettingError(
            f"a {type(posterior).__name__} has no density q(theta | x) for every x; from_sbi needs the DirectPosterior "
            "of NPE, or its density estimator (for an ensemble: each of them, in a vaerdict.Mixture)."
        )
    prior = getattr(posterior, "prior", None) if prior is None else prior
    if prior is None:
        raise SettingError("a density estimator has no prior; pass that of the simulations as prior=.")
    if likelihood is None:
        raise SettingError(
            "from_sbi needs the density of the simulator: likelihood=, a function (x, theta) -> log p(x | theta) or "
            "theta -> torch distribution of x. Without it the weights of draws cannot be computed."
        )
    size = _size(prior)
    if size != estimator.input_shape.numel():
        raise ShapeError(f"the prior has {size} parameters, the density estimator {estimator.input_shape.numel()}.")
    return SbiModel(SbiEncoder(copy.deepcopy(estimator).eval().requires_grad_(False)), prior, likelihood)


def _size(prior: Any) -> int:
    """The number of parameters of a prior."""
    return (prior.batch_shape + prior.event_shape).numel()


class SbiModel(nn.Module):
    """The prior and the likelihood of a simulator, with its neural posterior estimate as proposal."""

    def __init__(self, encoder: SbiEncoder, prior: Any, likelihood: Callable[..., Any]) -> None:
        super().__init__()
        self.encoder, self.prior, self.likelihood = encoder, prior, likelihood
        self._returns_distribution = _n_arguments(likelihood) == 1
        with global_state_from(seeded(0)):
            self._inside = prior.sample()  # any parameters inside the support

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        """Log p(x, theta), minus infinity outside the support. Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        log_p = log_prior(self.prior, z, x)
        inside = log_p.isfinite()
        theta = torch.where(inside.unsqueeze(-1), z, self._inside.to(z))
        n = z.shape[1:-1].numel()
        x = x.reshape(n, *x.shape[z.dim() - 2 :])
        log_lik = self._log_likelihood(x, theta.reshape(len(z), n, -1)).reshape(z.shape[:-1])
        return torch.where(inside, log_p + log_lik, -torch.inf)

    def _log_likelihood(self, x: Tensor, theta: Tensor) -> Tensor:
        """Log p(x | theta). Shapes: ``(n, ...), (K, n, d) -> (K, n)``."""
        if self._returns_distribution:
            q = self.likelihood(theta)
            if not isinstance(q, td.Distribution):
                raise SettingError(
                    f"likelihood(theta) returned a {type(q).__name__}; it must return a torch distribution of x. A "
                    "simulator, which returns draws of x, has no density."
                )
            log_lik = q.log_prob(x)
            log_lik = log_lik.reshape(*log_lik.shape[:2], -1).sum(-1)  # independent features
        else:
            log_lik = self.likelihood(x, theta)
        if not isinstance(log_lik, Tensor) or log_lik.shape != theta.shape[:2]:
            found = tuple(log_lik.shape) if isinstance(log_lik, Tensor) else type(log_lik).__name__
            raise ShapeError(
                f"the likelihood gave {found} for x {tuple(x.shape)} and theta {tuple(theta.shape)}; it must give one "
                f"log-density per particle and observation, {tuple(theta.shape[:2])}."
            )
        return log_lik


def _n_arguments(likelihood: Any) -> int:
    if not callable(likelihood):
        raise SettingError(f"likelihood is a {type(likelihood).__name__}; pass a function of (x, theta) or of theta.")
    function = likelihood.forward if isinstance(likelihood, nn.Module) else likelihood
    parameters = inspect.signature(function).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(needed) not in (1, 2):
        raise SettingError(f"likelihood takes {len(needed)} arguments; pass a function of (x, theta) or of theta.")
    return len(needed)


class SbiEncoder(nn.Module):
    """A conditional density estimator of sbi as a proposal; its draws may be outside the support of the prior."""

    def __init__(self, estimator: Any) -> None:
        super().__init__()
        self.estimator = estimator

    @torch.no_grad()
    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k parameters for each observation. Shapes: ``(*batch, ...) -> (K, *batch, d), (K, *batch)``."""
        source, rows = as_source(generator), self._rows(x)
        batch = x.shape[: x.dim() - len(self.estimator.condition_shape)]
        noise = source.normal(check_count(k), batch, self.estimator.input_shape.numel(), like=rows)
        z = _from_noise(self.estimator, rows, noise.flatten(1, -2))
        if z is None:
            z = sampled(lambda row: self.estimator.sample(torch.Size((k,)), row), rows, source)
        z = z.reshape(noise.shape)
        return Draws(z, self.log_prob(z, x))

    def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
        """Log q(theta | x). Shapes: ``(K, *batch, d), (*batch, ...) -> (K, *batch)``."""
        rows = self._rows(x)
        theta = z.reshape(len(z), len(rows), *self.estimator.input_shape).to(rows.dtype)
        log_q = self.estimator.log_prob(theta, rows).reshape(z.shape[:-1])
        return torch.where(log_q.isnan(), -torch.inf, log_q)  # a flow overflows far from all data

    def _rows(self, x: Tensor) -> Tensor:
        """Observations in one axis. Shapes: ``(*batch, ...) -> (n, ...)``."""
        shape = self.estimator.condition_shape
        if x.shape[x.dim() - len(shape) :] != shape:
            raise ShapeError(f"x has shape {tuple(x.shape)}; the density estimator takes (n, *{tuple(shape)}).")
        return x.reshape(-1, *shape).to(next(self.estimator.parameters()).dtype)


def _from_noise(estimator: Any, x: Tensor, noise: Tensor) -> Tensor | None:
    """Draws from standard normals, by a flow of nflows; None for other estimators. Shapes: ``(K, n, d)``."""
    net = estimator.net
    if type(getattr(net, "_distribution", None)).__name__ != "StandardNormal":
        return None
    context = net._embedding_net(x)
    context = context.expand(len(noise), *context.shape).flatten(0, 1)
    return net._transform.inverse(noise.flatten(0, 1), context=context)[0].reshape(noise.shape)
