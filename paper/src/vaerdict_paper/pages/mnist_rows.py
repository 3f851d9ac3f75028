"""Which rows of the MNIST experiment are of what: variants of the model, pairs with proposals, ways to decide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vaerdict.report.summary import Row, Summary, by_seed, grouped, in_order, mean_of, where
from vaerdict_paper.pages.ppca_tables import CROSSED, PROPOSALS
from vaerdict_paper.pages.rivals import Scores, best_of

NINE, FREE, PLAIN = "nine", "nine and a free one", "nine, plain network"
"""Among which classes a method decides."""

KEPT = "the kept model"
"""Who is looked at closer, where seeds kept models of different objectives."""

AVERAGED = ", proposals averaged"
"""The mixture without weights: the mean of the class probabilities of its recognition networks."""

SCORES = {"auprc": "1 \N{MINUS SIGN} max", "auprc_entropy": "entropy", "auprc_free": "free class"}
"""The reject scores, by the key of their average precision."""


class Method(NamedTuple):
    """A way to reject digits: who decides among which classes, by which score, and the key of its average precision."""

    name: str
    kind: str
    score: str
    rows: list[Row]
    key: str = "auprc"

    def __str__(self) -> str:
        return f"{self.name} by {self.score}"

    @property
    def precision(self) -> dict[Any, float]:
        """Average precision of rejecting the unseen digit, by seed."""
        return by_seed(self.rows, self.key)

    @property
    def points(self) -> dict[Any, float]:
        """Accuracy on seen digits in per cent, by seed."""
        return percent(self.rows, "accuracy")


def variant(row: Row) -> tuple[bool, bool, bool]:
    """What sets a model apart from the paper's: a free class, random shifts, an exact sum over classes."""
    return bool(row.get("free")), bool(row.get("shifts")), row.get("relaxed") is False


def title(row: Row) -> str:
    """The model's name with what sets it apart."""
    words = [word for apart, word in zip(variant(row), ("free class", "shifts", "exact sum"), strict=True) if apart]
    return f"{row['model']} ({', '.join(words)})" if words else str(row["model"])


def nearest(rows: Sequence[Row]) -> list[Row]:
    """The rows of the one variant that is nearest to the paper's."""
    first = min(map(variant, rows), default=None)
    return [row for row in rows if variant(row) == first]


def by_title(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of each model and variant, in the paper's order of models."""
    groups = grouped(({**row, "title": title(row)} for row in rows), "model", "title")
    order = in_order((model for model, _ in groups), CROSSED)
    return {name: part for model in order for (of, name), part in groups.items() if of == model}


def kept(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by model and variant; under one name where every seed kept a model of its own, whichever it was."""
    named: dict[str, list[Row]] = {}
    for part in grouped(({**row, "apart": variant(row)} for row in rows), "apart").values():
        pairs = {(row["seed"], row["model"]) for row in part}
        one_each = len(pairs) == len({seed for seed, _ in pairs}) and len({model for _, model in pairs}) > 1
        named |= {title({**part[0], "model": KEPT}): part} if one_each else by_title(part)
    return named


def percent(rows: Sequence[Row], key: str) -> dict[Any, float]:
    """`key` in per cent, by seed."""
    return {seed: 100 * value for seed, value in by_seed(rows, key).items()}


def levels(models: Sequence[Row], key: str) -> dict[str, dict[Any, float]]:
    """`key` by model and seed, in the variant nearest to the paper's."""
    rows = nearest(models)
    names = in_order((row["model"] for row in rows), CROSSED)
    return {name: by for name in names if (by := by_seed(where(rows, model=name), key))}


def best_model(models: Sequence[Row]) -> str | None:
    """The model of highest mean IWELBO."""
    return best_of(levels(models, "iwelbo"), max)


def of_model(rows: Sequence[Row], model: str | None) -> list[Row]:
    """The rows of `model`, or of the first one where there are none, in the variant nearest to the paper's.

    Where every seed kept one model, whichever it was, all of these.
    """
    rows = nearest(rows)
    if rows and title({**rows[0], "model": KEPT}) in kept(rows):
        return rows
    return where(rows, model=model) or where(rows, model=rows[0]["model"] if rows else None)


def crossed(cross: Sequence[Row]) -> list[Row]:
    """The rows of a model with a proposal; those without are baselines."""
    return nearest([row for row in cross if row.get("proposal") is not None])


def pairs(cross: Sequence[Row], key: str) -> dict[str, Scores]:
    """`key` by model, proposal and seed, in the paper's order."""
    rows = crossed(cross)
    proposals = in_order((row["proposal"] for row in rows), PROPOSALS)
    return {
        model: {q: by for q in proposals if (by := by_seed(where(rows, model=model, proposal=q), key))}
        for model in in_order((row["model"] for row in rows), CROSSED)
    }


def pair_means(cross: Sequence[Row], key: str) -> dict[str, dict[str, Summary | None]]:
    """`key` over seeds for every model and proposal; empty where no row has it."""
    rows = [row for row in crossed(cross) if row.get(key) is not None]
    proposals = in_order((row["proposal"] for row in rows), PROPOSALS)
    models = in_order((row["model"] for row in rows), CROSSED)
    return {m: {q: mean_of(where(rows, model=m, proposal=q), key) for q in proposals} for m in models}


def methods(models: Sequence[Row], cross: Sequence[Row] = ()) -> list[Method]:
    """Every model and variant with every score it has, by its own proposal and by a mixture of those in `cross`."""
    mixed = by_title(row for row in cross if row.get("proposal") == "MIS")
    named = by_title(models) | {f"{name}{AVERAGED}": rows for name, rows in mixed.items()}
    return [
        Method(name, FREE if part[0].get("free") else NINE, score, part, key)
        for name, part in named.items()
        for key, score in SCORES.items()
        if by_seed(part, key)
    ]


def weighted(cross: Sequence[Row]) -> list[Method]:
    """The mixture with its weights, as the paper's third step has it, with every score."""
    mixed = by_title(row for row in cross if row.get("proposal") == "MIS")
    return [
        Method(f"{name} with MIS and weights", FREE if part[0].get("free") else NINE, score, part, f"{key}_is")
        for name, part in mixed.items()
        for key, score in SCORES.items()
        if by_seed(part, f"{key}_is")
    ]


def baselines(cross: Sequence[Row]) -> list[Method]:
    """Every baseline with every score."""
    rows = [row for row in cross if row.get("proposal") is None and row.get("auprc") is not None]
    groups = grouped(({**row, "title": title(row)} for row in rows), "title", "score")
    return [Method(name, PLAIN, _score(score), part) for (name, score), part in groups.items()]


def _score(name: Any) -> str:
    """A reject score as it is printed."""
    return SCORES["auprc"] if name is None else str(name).replace(" - ", " \N{MINUS SIGN} ")


def most_precise(among: Sequence[Method], kind: str) -> Method | None:
    """The method of one kind with the highest mean average precision."""
    means = [(mean.mean, i) for i, m in enumerate(among) if m.kind == kind and (mean := mean_of(m.rows, m.key))]
    return among[max(means)[1]] if means else None


def counts_of(rows: Sequence[Row], key: str) -> str | None:
    """The different values of a count, in words."""
    values = sorted({row[key] for row in rows if row.get(key) is not None})
    return " or ".join(f"{value:,}" for value in values) or None
