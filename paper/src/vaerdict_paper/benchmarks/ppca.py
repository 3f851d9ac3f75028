"""The pPCA grid as stacked members against one model at a time, in the style of common scripts."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from vaerdict import objectives
from vaerdict.core import Progress, silent
from vaerdict.datasets import linear_gaussian
from vaerdict.noise import seeded
from vaerdict.training import Settings, train
from vaerdict_paper.benchmarks.timing import watched
from vaerdict_paper.experiments.ppca import Preset, Problem, member

NAMES = ("VAE", "IWAE", "WW", "CHI")
EPOCHS = 100


def run(*, quick: bool = False, progress: Progress = silent) -> list[dict[str, Any]]:
    """Seconds of both on the same grid, one row per particle count."""
    seeds, epochs = (1, 10) if quick else (5, EPOCHS)
    counts = (5,) if quick else (5, 30)
    rows = []
    for i, k in enumerate(counts):
        with watched() as ours:
            _stacked(k, seeds, epochs)
        with watched() as peer:
            for seed, name in product(range(seeds), NAMES):
                _one_at_a_time(name, k, seed, epochs)
        rows.append(
            {
                "case": f"{len(NAMES)} objectives x {seeds} seeds, {epochs} epochs, K = {k}",
                "ours_s": ours.wall,
                "peer": "one model at a time, eager",
                "peer_s": peer.wall,
                "ratio": peer.wall / ours.wall,
            }
        )
        progress(i + 1, len(counts), "particle counts")
    return rows


def _stacked(k: int, seeds: int, epochs: int) -> None:
    problem = Problem.of(Preset())
    members = [member(problem, name, seed) for name in NAMES for seed in range(seeds)]
    settings = Settings(n_particles=k, epochs=epochs, patience=None, lr_theta=1e-2, lr_phi=1e-2, check_every=epochs)
    train(members, problem.data.x_train, problem.data.x_train[:64], settings)


def _one_at_a_time(name: str, k: int, seed: int, epochs: int) -> None:
    """The same training as in common scripts: distributions, two Adams, a loop over batches."""
    data = linear_gaussian(0)
    generator = seeded(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 12))
        log_noise = nn.Parameter(torch.zeros(10))
        theta, phi = torch.optim.Adam([log_noise], 1e-2), torch.optim.Adam(encoder.parameters(), 1e-2)
        for _ in range(epochs):
            for index in torch.randperm(800, generator=generator)[:768].split(128):
                x = data.x_train[index]
                theta.zero_grad()
                log_w, _ = _log_weights(encoder, log_noise, data.weight, x, k)
                _theta_loss(name, log_w).mean().backward()
                theta.step()
                phi.zero_grad()
                log_w, log_q = _log_weights(encoder, log_noise, data.weight, x, k, wake=name in ("WW", "CHI"))
                _phi_loss(name, log_w, log_q).mean().backward()
                phi.step()


def _log_weights(
    encoder: nn.Module, log_noise: Tensor, weight: Tensor, x: Tensor, k: int, wake: bool = False
) -> tuple[Tensor, Tensor]:
    loc, log_scale = encoder(x).chunk(2, -1)
    q = Normal(loc, log_scale.exp())
    z = q.sample((k,)) if wake else q.rsample((k,))
    log_q = q.log_prob(z).sum(-1)
    log_p = Normal(z @ weight.mT, log_noise.exp()).log_prob(x).sum(-1) + Normal(0.0, 1.0).log_prob(z).sum(-1)
    return log_p - log_q, log_q


def _theta_loss(name: str, log_w: Tensor) -> Tensor:
    return objectives.elbo_loss(log_w) if name == "VAE" else objectives.iwelbo_loss(log_w)


def _phi_loss(name: str, log_w: Tensor, log_q: Tensor) -> Tensor:
    if name == "WW":
        return objectives.forward_kl_score_loss(log_w, log_q)
    if name == "CHI":
        return objectives.cubo_score_loss(log_w, log_q)
    return _theta_loss(name, log_w)
