"""Observations answered in blocks: bounded memory, any engine, and noise that belongs to the observation."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict.core import (
    Model,
    Observations,
    Progress,
    Proposal,
    SettingError,
    check_count,
    device_of,
    evaluating,
    n_observations,
    restricted,
    rows_of,
    silent,
)
from vaerdict.engines import Engine, LazySequence, Local, ordered_results
from vaerdict.inference.escalation import escalate
from vaerdict.inference.sampling import Escalation, Group, joined
from vaerdict.inference.target import UserQuery
from vaerdict.noise import KeyedNoise, KeyedSobol, Randomness, Source, as_source, fresh_seed, row_keys
from vaerdict.proposals import as_proposal, by_rows

BLOCK = {"cpu": 250, "cuda": 1000}
"""Observations that are answered at a time, by device."""


class Settings(NamedTuple):
    """What is asked of every observation; see `vaerdict.posterior`."""

    n: int
    query: UserQuery | None
    tolerance: float
    rtol: float
    budget: int | None
    smooth: bool
    keep: bool


class _Block(NamedTuple):
    """Some observations with their proposals and noise."""

    x: Observations
    proposals: dict[str, Any]
    source: Source


def noise_for(seed: int | Randomness | None, x: Observations, stream: int = 0) -> Source:
    """The source of noise behind ``seed=``: keyed by the values of the observations, or the source that was given."""
    if seed is None or isinstance(seed, (int, Integral)):
        return KeyedNoise(fresh_seed() if seed is None else int(seed), stream, row_keys(x))
    if isinstance(seed, (KeyedNoise, KeyedSobol)):
        raise SettingError("keyed noise belongs to some observations; give seed= a whole number.")
    return as_source(seed)


def named_proposals(proposals: Any) -> dict[str, Proposal]:
    """The proposals by name; a single one is called q."""
    named = {} if proposals is None else proposals if isinstance(proposals, Mapping) else {"q": proposals}
    return {name: by_rows(as_proposal(q)) for name, q in named.items()}


def answered(
    model: Model,
    x: Observations,
    proposals: Any,
    settings: Settings,
    *,
    seed: int | Randomness | None,
    stream: int = 0,
    block: int | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> tuple[Escalation, list[Group]]:
    """Escalate all observations, block by block; the parameters are those of `vaerdict.expect`."""
    named = named_proposals(proposals)
    source, n = noise_for(seed, x, stream), n_observations(x)
    device = device_of(x)
    block = BLOCK.get(device.type, BLOCK["cpu"]) if block is None else check_count(block, name="block")
    spans = torch.arange(n, device=device).split(block)
    if engine is not None and not isinstance(source, KeyedNoise):
        raise SettingError("an engine needs noise that belongs to each observation; give seed= a whole number.")

    def block_of(span: Tensor) -> _Block:
        part = source.select(span) if isinstance(source, KeyedNoise) else source
        return _Block(rows_of(x, span), {name: restricted(q, span) for name, q in named.items()}, part)

    with evaluating(model, named):  # also because threads must not change the mode of a module they share
        if len(spans) == 1:
            return _escalated(model, settings, progress, block_of(spans[0]))
        work, blocks = partial(_escalated, model, settings, silent), LazySequence(spans, block_of)
        results = []
        for result in _mapped(engine, work, blocks):
            results.append(result)
            progress(min(n, len(results) * block), n, "observations")
    groups = [
        Group(rows + int(span[0]), draws)
        for span, (_, part) in zip(spans, results, strict=True)
        for rows, draws in part
    ]
    return joined([record for record, _ in results]), groups


def _mapped(engine: Engine | None, work: Any, blocks: LazySequence[Any]) -> Any:
    if engine is None:
        yield from (work(block) for block in blocks)
        return
    if isinstance(engine, Local):
        try:
            pickle.dumps(work)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise SettingError(
                f"the model or the query cannot be sent to other processes ({error}); define functions at the top of a "
                "module, or use vaerdict.engines.Threads()."
            ) from error
    with closing(engine.map(work, blocks)) as results:
        yield from ordered_results(results)


def _escalated(model: Model, settings: Settings, progress: Progress, block: _Block) -> tuple[Escalation, list[Group]]:
    return escalate(
        model,
        block.x,
        block.proposals,
        settings.n,
        query=settings.query,
        tolerance=settings.tolerance,
        rtol=settings.rtol,
        budget=settings.budget,
        generator=block.source,
        smooth=settings.smooth,
        keep=settings.keep,
        progress=progress,
    )
