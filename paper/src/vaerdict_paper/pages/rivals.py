"""One name against the best of its rivals, paired by seed; `pick` says whether low (`min`) or high (`max`) is best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vaerdict.report.summary import Row, Summary, difference, summarise, where

Scores = Mapping[str, Mapping[Any, float]]
"""A score by name, then by seed."""

Gaps = Mapping[str, tuple[str | None, dict[Any, float]]]
"""By model: the rival, and the difference from it in each seed."""


def best_of(scores: Scores, pick: Callable[..., Any] = min) -> str | None:
    """The name with the best mean over seeds."""
    means = {name: mean.mean for name, by in scores.items() if (mean := summarise(by.values()))}
    return pick(means, key=means.__getitem__, default=None)


def against_best(
    scores: Scores, name: str, rivals: Sequence[str], pick: Callable[..., Any] = min
) -> tuple[str | None, dict[Any, float]]:
    """The best rival's name, and `name` minus it in each seed."""
    rival = best_of({q: scores[q] for q in rivals if q in scores}, pick)
    if rival is None or name not in scores:
        return None, {}
    return rival, {seed: value - scores[rival][seed] for seed, value in scores[name].items() if seed in scores[rival]}


def average(gaps: Gaps) -> Summary | None:
    """Differences averaged over models within each seed, then over seeds."""
    every = [by for _, by in gaps.values() if by]
    seeds = set.intersection(*map(set, every)) if every else set()
    return summarise(sum(by[seed] for by in every) / len(every) for seed in sorted(seeds))


def named(gaps: Gaps) -> str:
    """The rivals in brackets: `` (IWAE on VAE, CHI on WW)``."""
    words = [f"{rival} on {model}" for model, (rival, _) in gaps.items() if rival]
    return f" ({', '.join(words)})" if words else ""


def highest(rows: Sequence[Row], key: str) -> dict[Any, str]:
    """The model of highest `key` in each seed."""
    known = [row for row in rows if row.get(key) is not None]
    seeds = dict.fromkeys(row["seed"] for row in known)
    return {seed: max(where(known, seed=seed), key=lambda row: row[key])["model"] for seed in seeds}


def counted(kept: Mapping[Any, str]) -> str:
    """How often each was kept: ``IWAE 4 times, WW once``."""
    return ", ".join(
        f"{name} {n} times" if n > 1 else f"{name} once" for name, n in Counter(kept.values()).most_common()
    )


def between(scores: Scores, a: str | None, b: str | None) -> Summary | None:
    """The paired difference of two names, where both are."""
    return difference(scores.get(a or "", {}), scores.get(b or "", {}))


def printed_gap(levels: Mapping[str, float], a: str | None, b: str | None) -> float | None:
    """The difference of two published numbers, where both are."""
    one, other = levels.get(a or ""), levels.get(b or "")
    return None if one is None or other is None else one - other
