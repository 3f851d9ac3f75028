"""Proposals, from the encoder to sequential Monte Carlo, on two small posteriors of realistic kinds.

The models are small: a negative-binomial count model fitted to Poisson log-normal counts, and an M1+M2 model whose
posterior over (z, u) is computed for each class in turn. All stages are ours, each after the one before it, so that the
rows are ablations. Seconds are those of one processor. Evaluations are of the model or its gradient; stages use more of
them for a draw that is worth more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vaerdict import diagnostics
from vaerdict.core import Model, Progress, Proposal, per_member, prepared, silent
from vaerdict.distributions import StandardNormal
from vaerdict.networks import MLP
from vaerdict.noise import seeded
from vaerdict.proposals import Mixture, Normal, Prior, defensive
from vaerdict.refinement import refine, refine_elbo
from vaerdict.samplers import smc
from vaerdict.training import CHI, IWAE, WW, Member, Settings, train
from vaerdict_paper.benchmarks.timing import median_seconds, one_thread

N_DRAWS = 1000
_REPEATS = 3


class SmallCountModel(nn.Module):
    """Negative-binomial counts with an observed library size, a dispersion per gene and a latent cell state z."""

    stackable = True

    def __init__(self, n_genes: int, d: int, *, generator: torch.Generator) -> None:
        super().__init__()
        self.d = d
        self.decoder = MLP(d, n_genes, (64,), generator=generator)
        self.log_dispersion = nn.Parameter(torch.full((n_genes,), 1.5))

    @property
    def prior(self) -> StandardNormal:
        """The prior of z."""
        return StandardNormal(self.d)

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Counts, log library size, and the part of the likelihood that does not depend on z."""
        r = per_member(self.log_dispersion, 1).exp()
        constant = (torch.lgamma(x + r) - torch.lgamma(r) - torch.lgamma(x + 1)).sum(-1)
        return x, x.sum(-1, keepdim=True).clamp_min(1).log(), constant

    def log_joint(self, x: tuple[Tensor, Tensor, Tensor], z: Tensor) -> Tensor:
        """Log p(x, z). Shapes: ``(*batch, genes), (K, *batch, d) -> (K, *batch)``."""
        counts, library, constant = x
        log_r = per_member(self.log_dispersion, 1)
        log_mean = library + torch.log_softmax(self.decoder(z), -1)
        log_total = torch.logaddexp(log_mean, log_r)
        varying = counts * (log_mean - log_total) + log_r.exp() * (log_r - log_total)
        return constant + varying.sum(-1) + self.prior.log_prob(z)


class SmallM1M2(nn.Module):
    """p(x | z) p(z | c, u) p(u) with z = m(c, u) + s(c, u) e; the class c is appended to the pixels of x."""

    def __init__(self, n_pixels: int, n_classes: int, d_z: int, d_u: int, *, generator: torch.Generator) -> None:
        super().__init__()
        self.n_classes, self.d_z, self.d_u = n_classes, d_z, d_u
        self.decoder = MLP(d_z, n_pixels, (64,), generator=generator, activation=torch.tanh)
        self.between = MLP(n_classes + d_u, 2 * d_z, (32,), generator=generator, activation=torch.tanh)
        with torch.no_grad():  # an informative prior: distinct classes, pixels that depend on z
            for network, gain in ((self.decoder, 4.0), (self.between, 3.0)):
                for name, parameter in network.named_parameters():
                    parameter.mul_(gain if name.endswith("weight") else 1.0)

    @property
    def prior(self) -> StandardNormal:
        """The prior of (e, u), the same for every class."""
        return StandardNormal(self.d_z + self.d_u)

    def logits(self, label: Tensor, latent: Tensor) -> Tensor:
        """Log-odds of the pixels. Shapes: ``(*batch, classes), (K, *batch, d) -> (K, *batch, pixels)``."""
        e, u = latent.tensor_split([self.d_z], -1)
        shared = torch.cat([label.expand(*u.shape[:-1], self.n_classes), u], -1)
        mean, raw = self.between(shared).chunk(2, -1)
        return self.decoder(mean + 0.5 * torch.sigmoid(raw) * e)

    def log_joint(self, x: Tensor, latent: Tensor) -> Tensor:
        """Log p(x, z, u | c). Shapes: ``(*batch, pixels + classes), (K, *batch, d) -> (K, *batch)``."""
        pixels, label = x.tensor_split([x.shape[-1] - self.n_classes], -1)
        logits = self.logits(label, latent)
        log_lik = (pixels * logits - nn.functional.softplus(logits)).sum(-1)
        return log_lik + self.prior.log_prob(latent)


class Case(NamedTuple):
    """A model with amortised proposals and observations."""

    name: str
    model: Model
    proposals: dict[str, Proposal]
    x: Tensor


def run(*, quick: bool = False, progress: Progress = silent) -> list[dict[str, Any]]:
    """One row per model and stage: encoder, mixture, refinement by curvature and by gradient, SMC."""
    cases = (counts_case(quick), _m1m2(quick))
    rows = []
    for done, case in enumerate(cases, 1):
        rows += [_row(case, stage, infer) for stage, infer in _STAGES.items()]
        progress(done, len(cases), "models")
    return rows


def _row(case: Case, stage: str, infer: Callable[[Case, torch.Generator], tuple[Tensor, float]]) -> dict[str, Any]:
    log_w, cost = infer(case, seeded(7))
    with one_thread():
        seconds = median_seconds(lambda: infer(case, seeded(7)), _REPEATS, cpu=True)
    khat, ess = diagnostics.khat(log_w), diagnostics.ess(log_w)
    moved = stage == "SMC"  # k-hat does not apply to particles that were resampled and moved
    return {
        "model": case.name,
        "stage": stage,
        "share_ok": None if moved else (khat <= diagnostics.khat_threshold(len(log_w))).double().mean().item(),
        "khat": None if moved else khat.nanmedian().item(),
        "ess_share": (ess / len(log_w)).mean().item(),
        "log_evidence": (torch.logsumexp(log_w.double(), 0).mean() - torch.tensor(len(log_w)).log()).item(),
        "draws": len(log_w),
        "evaluations": cost,
        "seconds": seconds,
        "observations": case.x.shape[0],
    }


def _log_weights(case: Case, q: Proposal, generator: torch.Generator) -> Tensor:
    with torch.no_grad():
        z, log_q = q.draw(case.x, N_DRAWS, generator=generator)
        return case.model.log_joint(prepared(case.model, case.x), z) - log_q


def _encoder(case: Case, generator: torch.Generator) -> tuple[Tensor, float]:
    return _log_weights(case, case.proposals["IWAE"], generator), N_DRAWS


def _mixture(case: Case, generator: torch.Generator) -> tuple[Tensor, float]:
    return _log_weights(case, defensive(case.proposals, case.model.prior), generator), N_DRAWS


def _refined(case: Case, generator: torch.Generator) -> tuple[Tensor, float]:
    local = refine(case.model, case.x, case.proposals["IWAE"])
    q = Mixture({"REFINED": local.distribution, "PRIOR": Prior(case.model.prior)}, {"REFINED": 0.95, "PRIOR": 0.05})
    return _log_weights(case, q, generator), N_DRAWS + local.n_gradients.double().mean().item()


def _improved(case: Case, generator: torch.Generator) -> tuple[Tensor, float]:
    local = refine(case.model, case.x, case.proposals["IWAE"], inflate=1.0)
    better = refine_elbo(case.model, case.x, local.distribution, generator=generator)
    q = Mixture({"REFINED": better.distribution, "PRIOR": Prior(case.model.prior)}, {"REFINED": 0.95, "PRIOR": 0.05})
    return _log_weights(case, q, generator), N_DRAWS + local.n_gradients.double().mean().item() + better.n_gradients


def _smc(case: Case, generator: torch.Generator) -> tuple[Tensor, float]:
    result = smc(case.model, case.x, Prior(case.model.prior), n_particles=1024, generator=generator)
    return result.log_w, result.n_gradients.double().mean().item()


_STAGES = {"encoder": _encoder, "MIS": _mixture, "REFINED": _refined, "IMPROVED": _improved, "SMC": _smc}


def counts_case(quick: bool = False, *, seed: int = 0) -> Case:
    """Two cell states, Poisson log-normal counts of fifty genes; the model is fitted to them by IWAE."""
    generator = seeded(seed)
    n, genes, d = 1000, 50, 5
    state = torch.randint(2, (n, 1), generator=generator)
    effect = torch.randn(genes, generator=generator)
    loading = 0.5 * torch.randn(3, genes, generator=generator)
    log_rate = 1.5 + 0.7 * state * effect + torch.randn(n, 3, generator=generator) @ loading
    depth = 0.3 * torch.randn(n, 1, generator=generator)
    x = torch.poisson((log_rate + depth).exp(), generator=generator)
    model = SmallCountModel(genes, d, generator=generator)
    settings = Settings(n_particles=10, epochs=10 if quick else 60, patience=None, lr_phi=2e-3, check_every=60)
    start = Normal().make(x, d, hidden=(64,), generator=generator)
    (fit,) = train([Member(model, start, IWAE, 0)], x[:900], x[900:], settings)
    model.load_state_dict(fit.model.state_dict())
    return Case("counts", model, _encoders(model, x[:900], x[900:], d, settings), x[900 : 920 if quick else 1000])


def _m1m2(quick: bool) -> Case:
    """Images of 64 binary pixels simulated from the model; every image is combined with each of four classes."""
    generator = seeded(1)
    n, classes = 1000, 4
    model = SmallM1M2(64, classes, 5, 3, generator=generator).requires_grad_(False)
    label = torch.nn.functional.one_hot(torch.randint(classes, (n,), generator=generator), classes).float()
    latent = torch.randn(1, n, 8, generator=generator)
    pixels = torch.bernoulli(torch.sigmoid(model.logits(label, latent))[0], generator=generator)
    x = torch.cat([pixels.repeat_interleave(classes, 0), torch.eye(classes).repeat(n, 1)], -1)
    settings = Settings(n_particles=10, epochs=5 if quick else 20, patience=None, lr_phi=2e-3, check_every=60)
    proposals = _encoders(model, x[:3600], x[3600:], 8, settings)
    return Case("M1+M2, each class", model, proposals, x[3600 : 3680 if quick else 4000])


def _encoders(model: nn.Module, x: Tensor, x_valid: Tensor, d: int, settings: Settings) -> dict[str, Proposal]:
    recipes = (IWAE, WW, CHI)
    members = [Member(model, Normal().make(x, d, hidden=(64,), generator=seeded(2)), r, 2) for r in recipes]
    fits = train(members, x, x_valid, settings, learn_model=False)
    return {r.name: fit.proposal for r, fit in zip(recipes, fits, strict=True)}  # type: ignore[misc]
