"""The work of an audit on a block of observations: what the encoder and refined inference say about each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.auditing.evidence import exact_upper_bound, upper_bound
from vaerdict.auditing.movement import in_sds, movement, tally
from vaerdict.auditing.observed import Observed
from vaerdict.auditing.quantities import LATENT, RECONSTRUCTION, Quantity
from vaerdict.auditing.refined import Sample, refined, weigh
from vaerdict.core import Observations, Proposal
from vaerdict.diagnostics import Verdict
from vaerdict.inference.target import Space
from vaerdict.noise import KeyedNoise


@dataclass(frozen=True, eq=False)
class Work:
    """What every block needs: `n_encoder` draws of the encoder and `n` of the refined proposal per observation.

    `latents` ``(n_obs, d)`` are those that x was simulated from, if it was. The noise of an observation depends on the
    seed and its key; refined draws of another `stream` are independent.

    Shapes: ``x (n_obs, ...)``, ``keys, group (n_obs,)``.
    """

    space: Space
    x: Observations
    encoder: Proposal
    keys: Tensor
    quantities: Mapping[str, Quantity]
    group: Tensor
    n_groups: int
    n_encoder: int
    n: int
    seed: int
    stream: int = 1
    latents: Tensor | None = None

    def with_draws(self, n: int) -> Work:
        """The same with another number of refined draws, which are new."""
        return replace(self, n=n, stream=self.stream + 1)

    def at(self, rows: Tensor) -> tuple[Observed, Sample]:
        """The observations at `rows`, and the encoder's draws for them, which are always the same."""
        observed = Observed.at(self.space, self.x, self.encoder, rows)
        return observed, weigh(observed, observed.encoder, self.n_encoder, generator=self.noise(rows, 0))

    def noise(self, rows: Tensor, stream: int) -> KeyedNoise:
        """Noise of the observations at `rows`."""
        return KeyedNoise(self.seed, stream, self.keys[rows.to(self.keys.device)])


class Block(NamedTuple):
    """Results of the observations ``rows (m,)``: columns by name, ``(m, ...)`` each, and sums by quantity."""

    rows: Tensor
    columns: dict[str, Tensor]
    sums: dict[str, Tensor]

    @property
    def answered(self) -> Block:
        """The observations with a reliable answer; sums are over these alone anyway."""
        reliable = self.columns["verdict"] == Verdict.OK
        return Block(self.rows[reliable], {name: t[reliable] for name, t in self.columns.items()}, self.sums)


@torch.no_grad()
def examine(work: Work, rows: Tensor) -> Block:
    """Weight draws of the encoder and of the refined proposal, bound the evidence, and compare all quantities."""
    observed, own = work.at(rows)
    draws = refined(observed, work.n, generator=work.noise(rows, work.stream))
    columns = {
        "khat_encoder": own.khat,
        "ess_encoder": own.ess / len(own.z),
        "verdict_encoder": own.verdict,
        "elbo": torch.where(own.usable, own.log_w.mean(0), torch.nan),
        "iwelbo": own.log_evidence,
        "mean_encoder": _encoder_mean(observed, own),
    }
    if work.latents is None:
        columns["upper"] = upper_bound(draws)
    else:
        latents = work.latents[rows].to(observed.device)
        columns["upper"], columns["latent_log_w"] = exact_upper_bound(observed, draws, latents)
    return _compared(work, rows, observed, own, draws.sample, columns)


@torch.no_grad()
def escalated(work: Work, rows: Tensor, budget: int | None = None) -> Block:
    """Answer by all stages of escalation that the budget covers."""
    observed, own = work.at(rows)
    z, answer = observed.escalated(work.n, budget, work.seed)
    failed = answer.failed
    log_w = torch.where(failed, 0.0, answer.log_w.double())
    khat = torch.where(failed, torch.inf, answer.khat)
    sample = Sample(z, observed.log_joint(z), log_w, khat, answer.ess, answer.verdict)
    columns = {
        "draws": answer.record.draws.to(z.device).clamp_min(1).double(),
        "lower": answer.log_evidence,
        "upper": torch.full_like(khat, torch.nan),
    }
    return _compared(work, rows, observed, own, sample, columns)


def _compared(
    work: Work, rows: Tensor, observed: Observed, own: Sample, sample: Sample, columns: dict[str, Tensor]
) -> Block:
    """The columns of refined inference, and the movement of every quantity where that is reliable."""
    n, latents = columns.get("draws", torch.full_like(sample.ess, len(sample.z))), observed.latents(sample.z)
    columns = {
        "lower": sample.log_evidence,
        "draws": n,
        **columns,
        "lower_se": (1 / sample.ess.clamp_min(1) - 1 / n).clamp_min(0).sqrt(),
        "khat": sample.khat,
        "ess": sample.ess / n,
        "verdict": sample.verdict,
        "mean": _mean(latents, sample.log_w),
        "mean_even": _mean(latents[::2], sample.log_w[::2]),
        "mean_odd": _mean(latents[1::2], sample.log_w[1::2]),
    }
    answered, sums = sample.verdict == Verdict.OK, dict[str, Tensor]()
    for name, values in _quantities(work, observed):
        moved = movement(values(own), values(sample), own, sample)
        columns[f"moved: {name}"] = torch.where(answered, in_sds(moved).mean(-1), torch.nan)
        sums[name] = tally(moved.select(answered), work.group[rows][answered.cpu()], work.n_groups)
    return Block(rows, {name: column.cpu() for name, column in columns.items()}, sums)


def _quantities(work: Work, observed: Observed) -> Iterator[tuple[str, Callable[[Sample], Iterable[Tensor]]]]:
    """Every quantity with its values at the draws of a sample: latents, the log-likelihood, and those asked for."""
    yield LATENT, lambda sample: [observed.latents(sample.z)]
    yield RECONSTRUCTION, lambda sample: [(sample.log_p - observed.log_prior(sample.z)).unsqueeze(-1)]
    for name, quantity in work.quantities.items():
        yield name, partial(_values, observed, quantity)


def _values(observed: Observed, quantity: Quantity, sample: Sample) -> Iterable[Tensor]:
    return observed.values(quantity, sample.z)


def _encoder_mean(observed: Observed, own: Sample) -> Tensor:
    """Mean of the latents under the encoder: its location, or that of its possible draws. Shapes: ``-> (m, d)``."""
    exact = observed.exact_location()
    possible = torch.where(own.log_w.isneginf(), own.log_w, 0.0)
    return _mean(observed.latents(own.z), possible) if exact is None else exact.double()


def _mean(latents: Tensor, log_w: Tensor) -> Tensor:
    """Weighted mean. Shapes: ``(n, m, d), (n, m) -> (m, d)``."""
    return torch.einsum("nm,nmd->md", torch.softmax(log_w, 0), latents.double())
