"""Posteriors of small models trained on simulated data: Gaussian, Bernoulli and negative-binomial decoders."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vaerdict as vd
from vaerdict.core import per_member
from vaerdict.distributions import StandardNormal
from vaerdict.networks import MLP
from vaerdict_paper.benchmarks.escalation import SmallCountModel, counts_case
from vaerdict_paper.benchmarks.verdicts.questions import N_OBS, Target, generator_of, log_joint, oblique
from vaerdict_paper.benchmarks.verdicts.reference import reference

GROUP = "realistic"
_N_TRAIN, _N_HELD_OUT = 900, 100


def targets(seed: int) -> list[Target]:
    """All targets of the group."""
    counts = counts_case(seed=seed)
    with_encoder = of_model("small count model, 5 latents, encoder", counts.model, counts.proposals["IWAE"], counts.x)
    return [
        trained("Gaussian VAE, tanh, 2 latents", seed, "gaussian", 2, 12, torch.tanh),
        trained("Bernoulli VAE, ReLU, 2 latents, encoder", seed, "bernoulli", 2, 40, F.relu, encoder=True),
        trained("count VAE, 2 latents, encoder", seed, "counts", 2, 30, F.relu, encoder=True),
        trained("Gaussian VAE, ReLU, 5 latents, encoder", seed, "gaussian", 5, 20, F.relu, encoder=True),
        trained("Bernoulli VAE, tanh, 4 latents", seed, "bernoulli", 4, 30, torch.tanh),
        trained("Bernoulli VAE, tanh, 10 latents, encoder", seed, "bernoulli", 10, 60, torch.tanh, encoder=True),
        trained("count VAE, 8 latents", seed, "counts", 8, 40, F.relu),
        with_encoder,
        replace(with_encoder, name="small count model, 5 latents", proposals=None),
    ]


class SmallVAE(nn.Module):
    """A decoder of one hidden layer with Gaussian or Bernoulli features and a standard normal prior."""

    stackable = True

    def __init__(
        self,
        kind: str,
        n_features: int,
        d: int,
        activation: Callable[[Tensor], Tensor],
        *,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.kind, self.d = kind, d
        self.decoder = MLP(d, n_features, (32,), generator=generator, activation=activation)
        self.log_noise = nn.Parameter(torch.zeros(n_features))

    @property
    def prior(self) -> StandardNormal:
        """The prior of z."""
        return StandardNormal(self.d)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        """Log p(x, z). Shapes: ``(*batch, p), (K, *batch, d) -> (K, *batch)``."""
        decoded = self.decoder(z)
        if self.kind == "bernoulli":
            return (x * decoded - F.softplus(decoded)).sum(-1) + self.prior.log_prob(z)
        log_noise = per_member(self.log_noise, 1)
        log_lik = -0.5 * ((x - decoded) * (-log_noise).exp()).square() - log_noise
        return log_lik.sum(-1) + self.prior.log_prob(z)


def trained(
    name: str,
    seed: int,
    kind: str,
    d: int,
    n_features: int,
    activation: Callable[[Tensor], Tensor],
    *,
    encoder: bool = False,
) -> Target:
    """Train a model on data simulated from a random network, and ask about observations that were held out.

    Parameters
    ----------
    name, seed
        Name of the target and seed of everything.
    kind
        "gaussian", "bernoulli" or "counts".
    d, n_features
        Numbers of latents and of features.
    activation
        Of the decoder.
    encoder
        Whether the encoder is passed as the proposal.
    """
    g = generator_of(seed, name)
    x = _simulated(kind, n_features, min(d, 5), g)
    if kind == "counts":
        model: nn.Module = SmallCountModel(n_features, d, generator=g)
    else:
        model = SmallVAE(kind, n_features, d, activation, generator=g)
    start = vd.Normal().make(x, d, hidden=(32,), generator=g)
    settings = vd.Settings(n_particles=8, epochs=40, patience=None, lr_phi=3e-3, check_every=40)
    (fitted,) = vd.train([vd.Member(model, start, vd.IWAE, seed)], x[:_N_TRAIN], x[_N_TRAIN:], settings)
    target = of_model(name, fitted.model, fitted.proposal, x[_N_TRAIN:])
    return target if encoder else replace(target, proposals=None)


def _simulated(kind: str, n_features: int, d: int, g: torch.Generator) -> Tensor:
    """Data of three clusters in d dimensions, seen through a random network. Shapes: ``-> (n, features)``."""
    n = _N_TRAIN + _N_HELD_OUT
    centres = 1.5 * torch.randn(3, d, generator=g)
    state = centres[torch.randint(3, (n,), generator=g)] + torch.randn(n, d, generator=g)
    hidden = torch.tanh(state @ torch.randn(d, 20, generator=g))
    signal = hidden @ torch.randn(20, n_features, generator=g) / 20**0.5
    if kind == "gaussian":
        return signal + 0.7 * torch.randn(n, n_features, generator=g)
    if kind == "bernoulli":
        return torch.bernoulli(torch.sigmoid(2 * signal), generator=g)
    return torch.poisson((0.5 + 0.7 * signal).exp(), generator=g)


def _alike(proposal: Any, x: Tensor) -> Tensor:
    """The observations in the middle by the score of their encoded means: one threshold then suits all of them."""
    scores = oblique(proposal(x).loc)
    middle = (len(x) - 2 * N_OBS) // 2
    return x[scores.argsort()[middle : middle + 2 * N_OBS : 2]]


def of_model(name: str, model: Any, proposal: Any, x: Tensor) -> Target:
    """A target in double precision: by quadrature for two latents, by importance sampling for more."""
    model, proposal = (copy.deepcopy(module).double().requires_grad_(False) for module in (model, proposal))
    x = _alike(proposal, x.double())
    if model.d == 2:
        return Target(GROUP, name, model, x, box=((-7, 7),) * 2, proposals=proposal)

    @cache
    def weighted(i: int) -> tuple[Tensor, Tensor]:
        return reference(partial(log_joint, model, x[i : i + 1]), model.d, generator_of(i, "reference"))

    return Target(GROUP, name, model, x, reference=weighted, proposals=proposal)
