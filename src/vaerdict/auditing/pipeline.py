"""The audit of an encoder: blocks of observations, more draws where they are needed, and a search from the prior."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vaerdict.auditing import summary
from vaerdict.auditing.blocks import Block, Work, escalated, examine
from vaerdict.auditing.observed import latent_names, n_states, space_of, state_coordinates
from vaerdict.auditing.quantities import LATENT, RECONSTRUCTION, Quantity, as_quantities
from vaerdict.auditing.refined import STEP
from vaerdict.auditing.result import Audit
from vaerdict.auditing.verdict import verdict
from vaerdict.core import (
    Latent,
    Model,
    Observations,
    Progress,
    Proposal,
    SettingError,
    ShapeError,
    check_count,
    check_dtype,
    check_model,
    check_observations,
    device_of,
    evaluating,
    map_latent,
    n_observations,
    silent,
)
from vaerdict.diagnostics import Verdict
from vaerdict.engines import Engine, Threads, ordered_results, started
from vaerdict.inference.check import SampleX, simulated
from vaerdict.noise import row_keys, seeded
from vaerdict.proposals import as_proposal

_LEAST_DRAWS = 80
_MORE = 4  # times as many draws for observations that were not answered
_DRAWS, _TOGETHER = 1000, 5  # draws of escalation, and observations escalated together
_BUDGET = 8000  # evaluations of a search from the prior
_BLOCK, _LEAST_BLOCK = {"cpu": 128, "cuda": 4096}, 32
_MISSING = 0.5  # nats of evidence that a search may find beyond errors before mass was missed
_UNLABELLED = "(no label)"


def audit(
    model: Model,
    x: Observations,
    proposal: Any = None,
    *,
    quantities: Mapping[str, Quantity | Callable[..., Tensor]] | None = None,
    groups: Sequence[Any] | None = None,
    names: Sequence[Any] | None = None,
    n: int = 600,
    n_neighbours: int = 15,
    n_retried: int = 1000,
    n_searched: int = 10,
    n_pairs: int = 200,
    sample_x: SampleX | None = None,
    seed: int = 0,
    block: int | None = None,
    engine: Engine | None = None,
    title: str | None = None,
    noun: str = "observations",
    progress: Progress = silent,
) -> Audit:
    """May the encoder of a model be trusted, for which observations and which quantities?

    The encoder's draws are weighted, and what people read off it (means of latents and of quantities under the
    encoder) is compared with the posterior by proposals refined per observation.

    Parameters
    ----------
    model
        Any object with ``log_joint(x, z)`` and ``prior``.
    x
        Observations: a tensor ``(n_obs, ...)``, or a tuple or mapping of tensors with one leading axis.
    proposal
        The encoder, or whatever `vaerdict.as_proposal` accepts; by default ``model.encoder`` or
        ``model.guide``.
    quantities
        Functions ``f(z)`` or ``f(z, x)``, or `Quantity`, by name; by default those that the model offers (normalised
        expression, class probabilities, accessibility). Latents and the log-likelihood of the observation are always
        compared.
    groups
        A label per observation, by which results are listed.
    names
        A name per observation, for the table of observations.
    n
        Number of refined draws per observation. Half as many are drawn from the encoder, and as many more are spent on
        fitting the refined proposal.
    n_neighbours
        Number of nearest neighbours whose change is measured.
    n_retried
        At most so many observations that were not answered reliably are repeated with four times as many draws.
    n_searched
        Number of observations, chosen at random, whose modes are searched from the prior too. As many of those still
        not answered are escalated.
    n_pairs
        Number of pairs (x, z) that the model simulates, for exact bounds on its evidence.
    sample_x
        Function ``(z, generator) -> x`` that draws an observation given each latent; by default pairs are from
        ``model.simulate(n_pairs, generator=...)``, and there are none without either.
    seed
        Seed of everything random.
    block
        Observations processed together, by default 128, or 4096 on a GPU, and fewer with discrete latents. Results do
        not depend on it.
    engine
        Where blocks are processed, by default one thread per core.
    title, noun
        The model's name and what its observations are called, for the report.
    progress
        Called after each block.

    Returns
    -------
    Audit
        The verdict with its evidence; ``audit.report(folder)`` writes a page, ``audit.to_markdown()`` a block for a
        model card.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> model = vd.models.PPCA(torch.eye(3, 1), noise_scale=1.0)
    >>> x, _ = model.simulate(100, generator=vd.seeded(0))
    >>> answer = vd.audit(model, x, model.posterior(x), groups=["a", "b"] * 50, n=200, n_searched=2)
    >>> answer.verdict.name, len(answer.results["groups"])
    ('OK', 2)
    """
    check_dtype(check_observations(x), check_model(model, x))
    if check_count(n, name="n") < _LEAST_DRAWS:
        raise SettingError(f"n={n} draws are too few to assess importance weights; use {_LEAST_DRAWS} or more.")
    n_obs, n = n_observations(x), STEP * math.ceil(n / STEP)
    codes, labels = _codes(groups, n_obs)
    if names is not None and len(names) != n_obs:
        raise ShapeError(f"names= has {len(names)} entries for {n_obs} observations; give one each.")
    encoder, device = _encoder(model, proposal), device_of(x)
    compared = as_quantities(quantities, model)
    # encoders of scvi-tools draw from the global state, which threads cannot restore one by one
    with (
        started(engine),
        evaluating(model, encoder),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
    ):
        space, keys = space_of(model, x), row_keys(x)
        work = Work(space, x, encoder, keys, compared, codes, len(labels), n // 2, n, seed)
        size = max(_LEAST_BLOCK, _BLOCK.get(device.type, _BLOCK["cpu"]) // n_states(space))
        size = size if block is None else check_count(block, name="block")
        run = _Run(work, size, engine or Threads(1 if device.type == "cuda" else None), progress)
        with run.timed("examining"):
            run.over(torch.arange(n_obs), partial(examine, work), f"{noun} examined")
        with run.timed("more draws"):
            n_repeated = run.repeat(n_retried, f"{noun} with more draws")
        with run.timed("searching"):
            search = run.search(n_searched, f"{noun} searched from the prior")
        with run.timed("simulating"):
            pairs = run.simulate(_pairs(model, encoder, sample_x, n_pairs, seed), "simulated pairs")
    settings = {"n": n, "n_neighbours": n_neighbours, "n_retried": n_retried, "n_searched": n_searched}
    results = {
        "experiment": "audit",
        "model": title or type(model).__name__,
        "noun": noun,
        **_results(run, labels, n_neighbours),
        "search": search,
        "simulated": pairs,
        "settings": {**settings, "n_pairs": n_pairs, "seed": seed},
        "seconds": run.seconds,
    }
    results["refined"]["n_repeated"] = n_repeated
    results = {"verdict": verdict(results)} | results
    return Audit(results, run.columns, [labels[i] for i in codes.tolist()] if groups is not None else None, names)


def _results(run: _Run, groups: Sequence[str], n_neighbours: int) -> dict[str, Any]:
    """Everything that is computed from the columns and sums of all observations."""
    work, columns = run.work, run.columns
    latent = Quantity(lambda z: z, features=latent_names(work.space))
    log_likelihood = Quantity(lambda z: z, "nats", features=["log-likelihood"])
    compared = {LATENT: latent, RECONSTRUCTION: log_likelihood, **work.quantities}
    quantities = [
        summary.quantity_record(name, quantity, columns[f"moved: {name}"], run.sums[name], groups)
        for name, quantity in compared.items()
    ]
    return {
        "n_observations": len(work.group),
        "n_latents": columns["mean"].shape[-1],
        "encoder": summary.proposal_record(columns, "_encoder", work.n_encoder),
        "refined": summary.proposal_record(columns, "", work.n),
        "quantities": quantities,
        "neighbours": summary.neighbours_record(columns, n_neighbours, state_coordinates(work.space)),
        "evidence": summary.evidence_record(columns, work.n_encoder),
        "groups": summary.group_records(columns, work.group, groups, list(compared)) if len(groups) > 1 else [],
        "histogram": summary.histogram(columns),
    }


@dataclass(eq=False)
class _Run:
    """The columns of all observations and the sums over them, filled block by block."""

    work: Work
    block: int
    engine: Engine
    progress: Progress
    columns: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Record the seconds of a stage."""
        begin = time.perf_counter()
        yield
        self.seconds[stage] = round(time.perf_counter() - begin, 2)

    def over(self, rows: Tensor, examine: Callable[[Tensor], Block], what: str, *, block: int | None = None) -> None:
        """Examine observations and record what was found."""
        done = 0
        for part in self._blocks(rows, examine, block):
            self._add(part)
            done += len(part.rows)
            self.progress(done, len(rows), what)

    def _blocks(self, rows: Tensor, examine: Callable[[Tensor], Block], block: int | None) -> Iterator[Block]:
        """The results of all blocks in order, so that sums do not depend on which is finished first."""
        parts = rows.split(block or self.block) if len(rows) else ()
        return ordered_results(self.engine.map(examine, parts))

    def _add(self, block: Block) -> None:
        for name, column in block.columns.items():
            if name not in self.columns:
                self.columns[name] = column.new_empty(len(self.work.group), *column.shape[1:])
            self.columns[name][block.rows] = column
        for name, sums in block.sums.items():
            self.sums[name] = self.sums[name] + sums if name in self.sums else sums

    def repeat(self, most: int, what: str) -> int:
        """Examine observations that were not answered with more draws, at most so many; returns their number."""
        rows = self._chosen(self._unanswered(), most, stream=1)
        work = self.work.with_draws(_MORE * self.work.n)
        self.over(rows, partial(examine, work), what, block=max(1, self.block // _MORE))
        return len(rows)

    def search(self, most: int, what: str) -> dict[str, Any]:
        """Escalate some of the observations not answered, and compare the evidence of others with a search's."""
        unanswered = self._chosen(self._unanswered(), most, stream=2)
        for part in self._blocks(unanswered, partial(escalated, self.work.with_draws(_DRAWS)), _TOGETHER):
            self._add(part.answered)
        rows = self._chosen(torch.arange(len(self.work.group)), most, stream=3)
        check = partial(escalated, replace(self.work, quantities={}).with_draws(_DRAWS), budget=_BUDGET)
        excess, done = [], 0
        for part in self._blocks(rows, check, _TOGETHER):
            other, mine = part.columns, {name: self.columns[name][part.rows] for name in ("lower", "lower_se")}
            error = 2 * (other["lower_se"] + mine["lower_se"])
            excess.append(other["lower"] - mine["lower"] - error)
            done += len(part.rows)
            self.progress(done, len(rows), what)
        n_missed = int((torch.cat(excess) > _MISSING).sum()) if excess else 0
        n_answered = int((self.columns["verdict"][unanswered] == Verdict.OK).sum())
        return {"n": len(rows), "n_missed": n_missed, "n_escalated": len(unanswered), "n_answered": n_answered}

    def simulate(self, pairs: tuple[Observations, Latent] | None, what: str) -> dict[str, Any] | None:
        """Bounds on the evidence of simulated pairs; None where there are none."""
        if pairs is None:
            return None
        x, z = pairs
        latents = self.work.space.vector(map_latent(lambda t: t.unsqueeze(0), z))[0]
        group = torch.zeros(len(latents), dtype=torch.long)
        work = replace(self.work, x=x, keys=row_keys(x), latents=latents, quantities={}, group=group, n_groups=1)
        run = _Run(work, self.block, self.engine, self.progress)
        run.over(torch.arange(len(latents)), partial(examine, work), what)
        return summary.simulated_record(run.columns, work.n_encoder)

    def _unanswered(self) -> Tensor:
        return (self.columns["verdict"] != Verdict.OK).nonzero().flatten()

    def _chosen(self, rows: Tensor, most: int, stream: int) -> Tensor:
        """At most so many of the observations, at random."""
        order = torch.randperm(len(rows), generator=seeded(1000 * self.work.seed + stream))
        return rows[order[:most]].sort().values


def _encoder(model: Any, proposal: Any) -> Proposal:
    encoder = getattr(model, "encoder", getattr(model, "guide", None)) if proposal is None else proposal
    if encoder is None:
        raise SettingError(
            f"{type(model).__name__} has no attribute `encoder` or `guide`; pass the encoder as proposal=."
        )
    return as_proposal(encoder)


def _pairs(
    model: Model, encoder: Proposal, sample_x: SampleX | None, n: int, seed: int
) -> tuple[Observations, Latent] | None:
    """Simulated pairs; None where the model cannot simulate, or the encoder is made for fixed observations."""
    possible = n > 0 and (sample_x is not None or hasattr(model, "simulate")) and not hasattr(encoder, "select")
    return simulated(model, sample_x, n, seeded(seed)) if possible else None


def _codes(groups: Sequence[Any] | None, n: int) -> tuple[Tensor, list[str]]:
    """The number of every observation's group, and the names of the groups, sorted. Shapes: ``-> (n,)``."""
    if groups is None:
        return torch.zeros(n, dtype=torch.long), ["all"]
    if len(groups) != n:
        raise ShapeError(f"groups= has {len(groups)} labels for {n} observations; give one each.")
    labels = [_UNLABELLED if label is None or label != label else str(label) for label in groups]
    names = sorted(set(labels))
    number = {name: i for i, name in enumerate(names)}
    return torch.tensor([number[label] for label in labels]), names
