"""Training the pPCA grid: what stacking its members saves, and what our trainer saves where nothing is stacked.

Both are ablations. The script in plain PyTorch stands for common scripts, and is ours too: the same networks, losses,
batches and steps with the distributions and optimisers of PyTorch, one model at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from vaerdict import objectives
from vaerdict.core import Progress, silent
from vaerdict.datasets import linear_gaussian
from vaerdict.noise import seeded
from vaerdict.training import Member, Settings, train
from vaerdict_paper.benchmarks.timing import ABLATION, comparison, interleaved, one_thread
from vaerdict_paper.experiments.ppca import Preset, Problem, member

NAMES = ("VAE", "IWAE", "WW", "CHI")
EPOCHS = 10
_STACKED, _SINGLY, _SCRIPT = "stacked", "one at a time", "script"


def run(*, quick: bool = False, progress: Progress = silent) -> Iterator[dict[str, Any]]:
    """CPU seconds of one thread for the same grid, two rows per particle count."""
    seeds, epochs, repeats = (1, 2, 1) if quick else (5, EPOCHS, 3)
    counts = (5,) if quick else (5, 30)
    for i, k in enumerate(counts):
        works = {
            _STACKED: lambda k=k: _trained(_members(seeds), k, epochs),
            _SINGLY: lambda k=k: [_trained([each], k, epochs) for each in _members(seeds)],
            _SCRIPT: lambda k=k: [_script(name, k, seed, epochs) for seed, name in product(range(seeds), NAMES)],
        }
        with one_thread():
            _trained(_members(1), k, 1)  # warm-ups
            for name in NAMES:
                _script(name, k, 0, 1)
            seconds = interleaved(works, repeats, cpu=True, warm=False)
        case = f"{len(NAMES)} objectives x {seeds} seeds, {epochs} epochs, K = {k}"
        stacking = f"{len(NAMES) * seeds} members as one stack per kind of loss"
        yield comparison(ABLATION, case, "one member at a time", seconds[_STACKED], seconds[_SINGLY], differs=stacking)
        trainer, script = "our trainer, one member at a time", "plain PyTorch script, one model at a time"
        yield comparison(ABLATION, case, script, seconds[_SINGLY], seconds[_SCRIPT], differs=trainer)
        progress(i + 1, len(counts), "particle counts")


def _members(seeds: int) -> list[Member]:
    problem = Problem.of(Preset())
    return [member(problem, name, seed) for name in NAMES for seed in range(seeds)]


def _trained(members: list[Member], k: int, epochs: int) -> None:
    data = Problem.of(Preset()).data
    settings = Settings(n_particles=k, epochs=epochs, patience=None, lr_theta=1e-2, lr_phi=1e-2, check_every=epochs)
    train(members, data.x_train, data.x_train[:64], settings)


def _script(name: str, k: int, seed: int, epochs: int) -> None:
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
