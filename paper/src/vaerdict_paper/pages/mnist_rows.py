"""Selecting rows of the MNIST experiment: variants of the model, pairs with proposals, methods of rejection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vaerdict.report.records import Row, grouped
from vaerdict_paper.pages.claims import Scores, best_of
from vaerdict_paper.pages.crossed import CROSSED
from vaerdict_paper.pages.ppca_tables import PROPOSALS
from vaerdict_paper.pages.seed_statistics import by_seed, mean_of, ordered, where

NINE, FREE, SUPERVISED = "nine", "nine and a free one", "nine, supervised network"
"""The classes among which a method decides."""

SELECTED = "the selected model"
"""The name of the models selected by evidence, if the seeds selected different ones."""

AVERAGED = ", proposals averaged"
"""The mixture without weights: the mean of the class probabilities of its recognition networks."""

SIZES = {"ours": "our sizes", "released": "as released", "printed": "as printed"}
"""The sizes of the networks in print, first those that claims are about; rows of older runs do not name them."""

HALF_LABELLED = "as printed, labelled images half of the objective"
"""The models as printed whose labelled images have a bound of weight 1, in a run for bounds."""

SCORES = {"auprc": "1 \N{MINUS SIGN} max", "auprc_entropy": "entropy", "auprc_free": "free class"}
"""The reject scores, by the key of their average precision."""


def half_labelled(row: Row) -> bool:
    """Whether the bound of labelled images weighs as much as that of all images."""
    return row.get("labelled_bound") == 1.0


class Method(NamedTuple):
    """A way to reject digits: a model, its classes, a reject score, and the key of its average precision.

    Keys that end in ``_is`` are those of decisions with weights.
    """

    name: str
    kind: str
    score: str
    rows: list[Row]
    key: str = "auprc"

    def __str__(self) -> str:
        return f"{self.name} by {self.score}"

    @property
    def model(self) -> str:
        """The name of the model, or of a supervised network."""
        return str(self.rows[0]["model"])

    @property
    def proposal(self) -> str | None:
        """The proposal from several for the model; None if it is the model's own."""
        return self.rows[0].get("proposal")

    @property
    def precision(self) -> dict[Any, float]:
        """Average precision of rejecting the unseen digit, by seed."""
        return by_seed(self.rows, self.key)

    @property
    def points(self) -> dict[Any, float]:
        """Accuracy on seen digits in per cent, by seed."""
        return percent(self.rows, self.accuracy)

    @property
    def accuracy(self) -> str:
        """The key of the accuracy."""
        return "accuracy_is" if self.key.endswith("_is") else "accuracy"


def variant(row: Row) -> tuple[bool, bool, bool, int]:
    """How a model differs from the paper's: a free class, shifts, an exact sum over classes; the place of its sizes."""
    sizes = list(SIZES).index(row["sizes"]) if row.get("sizes") in SIZES else 0
    return bool(row.get("free")), bool(row.get("shifts")), row.get("relaxed") is False, sizes


def title(row: Row) -> str:
    """The model's name with how it differs from the paper's."""
    differences = zip(variant(row), ("free class", "shifts", "exact sum"), strict=False)
    names = [name for differs, name in differences if differs]
    names += [SIZES[row["sizes"]]] if row.get("sizes") in SIZES else []
    return f"{row['model']} ({', '.join(names)})" if names else str(row["model"])


def paper_variant(rows: Sequence[Row]) -> list[Row]:
    """The rows of the variant nearest to the paper's, with our sizes if there are several."""
    nearest = min(map(variant, rows), default=None)
    return [row for row in rows if variant(row) == nearest]


def by_title(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of each model and variant, in the paper's order of models."""
    groups = grouped(({**row, "title": title(row)} for row in rows), "model", "title")
    models = ordered((model for model, _ in groups), CROSSED)
    return {name: part for model in models for (of, name), part in groups.items() if of == model}


def by_selection(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by model and variant; under the name `SELECTED` if there is one model per seed, and not always the same."""
    named: dict[str, list[Row]] = {}
    for part in grouped(({**row, "difference": variant(row)} for row in rows), "difference").values():
        pairs = {(row["seed"], row["model"]) for row in part}
        one_each = len(pairs) == len({seed for seed, _ in pairs}) and len({model for _, model in pairs}) > 1
        named |= {title({**part[0], "model": SELECTED}): part} if one_each else by_title(part)
    return named


def percent(rows: Sequence[Row], key: str) -> dict[Any, float]:
    """`key` in per cent, by seed."""
    return {seed: 100 * value for seed, value in by_seed(rows, key).items()}


def model_scores(models: Sequence[Row], key: str) -> dict[str, dict[Any, float]]:
    """`key` by model and seed, in the variant nearest to the paper's."""
    rows = paper_variant(models)
    names = ordered((row["model"] for row in rows), CROSSED)
    return {name: values for name in names if (values := by_seed(where(rows, model=name), key))}


def best_model(models: Sequence[Row]) -> str | None:
    """The model of highest mean IWELBO."""
    return best_of(model_scores(models, "iwelbo"), max)


def of_model(rows: Sequence[Row], model: str | None) -> list[Row]:
    """The rows of `model`, or of the first model if there are none, in the variant nearest to the paper's.

    All rows, if they hold one selected model per seed (see `by_selection`).
    """
    rows = paper_variant(rows)
    if rows and title({**rows[0], "model": SELECTED}) in by_selection(rows):
        return rows
    return where(rows, model=model) or where(rows, model=rows[0]["model"] if rows else None)


def crossed(cross: Sequence[Row]) -> list[Row]:
    """The rows of a model with a proposal; rows without a proposal are baselines."""
    return paper_variant([row for row in cross if row.get("proposal") is not None])


def pairs(cross: Sequence[Row], key: str) -> dict[str, Scores]:
    """`key` by model, proposal and seed, in the paper's order."""
    rows = crossed(cross)
    proposals = ordered((row["proposal"] for row in rows), PROPOSALS)
    return {
        model: {q: values for q in proposals if (values := by_seed(where(rows, model=model, proposal=q), key))}
        for model in ordered((row["model"] for row in rows), CROSSED)
    }


def methods(models: Sequence[Row], cross: Sequence[Row] = ()) -> list[Method]:
    """Every model and variant with every score: by its own proposal, and by several networks of `cross` together."""
    named = by_title(models)
    for proposal, rows in together(cross).items():
        suffix = AVERAGED if proposal == "MIS" else f", {proposal} averaged"
        named |= {f"{name}{suffix}": part for name, part in by_title(rows).items()}
    return [method for name, part in named.items() for method in _scored(name, part)]


def weighted(cross: Sequence[Row]) -> list[Method]:
    """The mixture with its weights, the paper's third step, and its controls, with every score."""
    return [
        method
        for proposal, rows in together(cross).items()
        for name, part in by_title(rows).items()
        for method in _scored(f"{name} with {proposal} and weights", part, "_is")
    ]


def together(cross: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of several networks together: the mixture, and ensembles by one objective (``3 IWAE``)."""
    rows = [row for row in cross if row.get("proposal") == "MIS" or is_ensemble(row)]
    return {str(name): part for (name,), part in grouped(rows, "proposal").items()}


def is_ensemble(row: Row) -> bool:
    """Whether the row is of several networks by one objective."""
    return row.get("proposal") not in (None, "MIS") and (row.get("networks") or 1) > 1


def ensembles(cross: Sequence[Row]) -> dict[str, str]:
    """The ensembles by one objective in `cross`, by this objective: ``{"IWAE": "3 IWAE"}``."""
    names = dict.fromkeys(str(row["proposal"]) for row in cross if is_ensemble(row))
    return {name.split(maxsplit=1)[-1]: name for name in names}


def _scored(name: str, rows: Sequence[Row], suffix: str = "") -> list[Method]:
    kind = FREE if rows[0].get("free") else NINE
    return [
        Method(name, kind, score, list(rows), f"{key}{suffix}")
        for key, score in SCORES.items()
        if mean_of(rows, f"{key}{suffix}")
    ]


def baselines(cross: Sequence[Row]) -> list[Method]:
    """Every baseline with every score."""
    rows = [row for row in cross if row.get("proposal") is None and row.get("auprc") is not None]
    groups = grouped(({**row, "title": title(row)} for row in rows), "title", "score")
    return [Method(name, SUPERVISED, _score(score), part) for (name, score), part in groups.items()]


def _score(name: Any) -> str:
    """A reject score in print."""
    return SCORES["auprc"] if name is None else str(name).replace(" - ", " \N{MINUS SIGN} ")


def most_precise(candidates: Sequence[Method], kind: str) -> Method | None:
    """The method of one kind with the highest mean average precision."""
    means = [(mean.mean, i) for i, m in enumerate(candidates) if m.kind == kind and (mean := mean_of(m.rows, m.key))]
    return candidates[max(means)[1]] if means else None
