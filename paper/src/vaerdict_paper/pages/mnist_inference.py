"""Tables of the MNIST experiment on inference: its rungs, what they decide, and whether the model agrees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from vaerdict.report.summary import Row, in_order, mean_of, seeds_of, where
from vaerdict.report.tables import Column, Table, cell, cells
from vaerdict_paper.pages.mnist_rows import counts_of, kept
from vaerdict_paper.pages.mnist_tables import (
    ACCURACY,
    ACCURACY_IS,
    ENTROPY_IS,
    ESS,
    KHAT,
    PRECISION,
    PRECISION_IS,
    PRECISION_NOTE,
    SHARE,
)

RUNGS = ("encoder", "MIS", "REFINED", "IMPROVED", "SMC")


def refinement_table(refined: Sequence[Row]) -> Table | None:
    """Every rung of inference for every model: the weights, the distance to a gold run, the cost."""
    if not refined:
        return None
    gold = counts_of(refined, "gold_images")
    near = (
        f" Distance to gold: total variation between p(c|x) and that of a long run, mean of {gold} digits."
        if gold
        else ""
    )
    note = (
        "encoder: the model's own proposal; MIS: the mixture; REFINED: a law of full covariance fitted for each digit "
        f"and class; IMPROVED: the same after gradient steps on its bound.{near}"
    )
    measured = (SHARE, KHAT, ESS, Column("gold_distance", "distance to gold", 4), Column("seconds", "seconds", 0))
    return _by_rung(refined, "refinement", "Better and better inference", measured, note)


def better_table(refined: Sequence[Row]) -> Table | None:
    """What every rung of inference decides, beside no weights on the same digits."""
    if not refined:
        return None
    without = (replace(ACCURACY, title="accuracy without weights, %"), replace(PRECISION, title="AP without weights"))
    measured = (without[0], ACCURACY_IS, without[1], PRECISION_IS, ENTROPY_IS)
    return _by_rung(
        refined, "better", "What it decides", measured, f"{PRECISION_NOTE} Without weights: by the encoder alone."
    )


def _by_rung(refined: Sequence[Row], name: str, caption: str, measured: Sequence[Column], note: str) -> Table:
    body = [
        {"model": who, "rung": rung, **cells(part, measured)}
        for who, rows in kept(refined).items()
        for rung in in_order((str(row["rung"]) for row in rows), RUNGS)
        for part in [where(rows, rung=rung)]
    ]
    n, draws = counts_of(refined, "n_images"), counts_of(refined, "n_draws")
    drawn = f", {draws} draws" if draws else ""
    caption = f"{caption} on the same {n or 'test'} digits{drawn}: mean ± sd over {seeds_of(refined)}."
    return Table(name, caption, [Column("model", "model"), Column("rung", "inference"), *measured], body, note)


def agreement_table(agreement: Sequence[Row]) -> Table | None:
    """Whether the inference is certified and whether the model agrees with held-out labels."""
    if not agreement:
        return None
    measured = (
        Column("certified_share", "certified, % of digits", 1, 100),
        Column("confidence", "accuracy the model expects, %", 1, 100),
        replace(ACCURACY, title="accuracy it has, %"),
        Column("log_score", "log score", 3),
        Column("log_score_plugin", "log score without weights", 3),
        Column("ece", "calibration error, %", 1, 100),
    )
    body = [
        {"model": name, **{key: said_of(rows, key) for key in ("inference", "model_word")}, **cells(rows, measured)}
        for name, rows in kept(agreement).items()
    ]
    names = {"model": "model", "inference": "inference", "model_word": "model and labels"}
    held = counts_of(agreement, "n_held_out")
    return Table(
        "agreement",
        f"Two questions kept apart: is p(c|x) known, and is it right? On {held or 'the'} held-out labels, mean ± sd "
        f"over {seeds_of(agreement)}.",
        [*(Column(key, words) for key, words in names.items()), *measured],
        body,
        f"{_gaps(agreement)}The model agrees when accuracy and log score are what labels drawn from its own p(c|x) "
        "would give, by a test with simulated labels.",
    )


def _gaps(agreement: Sequence[Row]) -> str:
    """How far each model is from what it expects of itself, with the error that the count of labels leaves."""
    gap = Column("gap", "", 2, 100, signed=True)
    said = [
        f"{name} {gap.text(cell(mean))} points"
        + (f" (se {replace(gap, signed=False).text(error.mean)} over digits)" if error else "")
        for name, rows in kept(agreement).items()
        for mean, error in [(mean_of(rows, "gap"), mean_of(rows, "gap_se"))]
        if mean
    ]
    return f"Expected minus had: {'; '.join(said)}. " if said else ""


def said_of(rows: Sequence[Row], key: str) -> str | None:
    """The word the seeds say most often, with the count where they differ."""
    words = Counter(str(row[key]) for row in rows if row.get(key) is not None)
    if not words:
        return None
    (word, n), total = words.most_common(1)[0], words.total()
    return word if n == total else f"{word} ({n} of {total} seeds)"
