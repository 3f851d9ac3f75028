"""The first lines of the page of a calibration: the rate of false discoveries and the power, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from vaerdict.de.calibration.summary import CALIBRATED, COMPATIBLE, CONSERVATIVE, TOO_MANY
from vaerdict.de.calibration.task import REPORTED
from vaerdict.de.page.live import Card
from vaerdict.report.records import Row, rows_of

_TONES = {TOO_MANY: "bad", CALIBRATED: "good", CONSERVATIVE: "good", COMPATIBLE: "good"}


def leading_cards(results: Row) -> list[Card]:
    """What the FDR means, how many changed genes are found, and what is called that did not change."""
    level, delta = results["settings"]["level"], results["settings"]["delta"]
    replicates = results["verdict"].get("replicates")
    planted, null, mixed, undone = (
        _asked_for(rows_of(results, name, "method", "replicates", "level", "verdict"), level, replicates)
        for name in ("spikes", "null", "mixed", "undone")
    )
    cards = []
    if planted is not None:
        share = _percent(planted["fdp"], planted["fdp_se"])
        called = f"{share} are false" if planted["called"] else "Nothing is called"
        rate = f"Of the genes called at an FDR of {level:.0%}, where changes were planted: {planted['verdict']}."
        cards.append(Card("What does the FDR mean here?", called, rate, _tone(planted)))
    if planted is not None and planted["tpr"] is not None:
        power = f"Of the {planted['true']:,.0f} genes of a split that changed by {delta:g} or more."
        answer = f"{_percent(planted['tpr'], planted['tpr_se'])} are found"
        cards.append(Card("How many changed genes are found?", answer, power, "plain"))
    if null is not None:
        cards.append(_unchanged("And where nothing changed?", null, level))
    if mixed is not None:
        cards.append(_unchanged("And between halves of mixed groups?", mixed, level))
    if undone is not None and undone["share_called"] is not None:
        answer = f"{_percent(undone['share_of_calls'], undone['share_of_calls_se'])} of the calls"
        meaning = f"These are genes whose change was undone, so that calling them is false: {undone['verdict']}."
        cards.append(Card("And where changes were undone?", answer, meaning, _tone(undone)))
    return cards


def _unchanged(question: str, row: Row, level: float) -> Card:
    answer = f"{row['splits_with_any']} of {row['splits']} splits have a call"
    meaning = f"Every one of them is false; the target allows {level:.0%} of the splits: {row['verdict']}."
    return Card(question, answer, meaning, _tone(row))


def _asked_for(rows: Sequence[Row], level: float, replicates: str | None) -> Row | None:
    """The row of the analysis asked for."""
    wanted = (REPORTED, replicates, level)
    return next((row for row in rows if (row["method"], row["replicates"], row["level"]) == wanted), None)


def _tone(row: Row) -> str:
    return _TONES.get(row["verdict"], "open")


def _percent(share: float, se: float | None) -> str:
    error = "" if se is None or se != se else f" \N{PLUS-MINUS SIGN} {100 * se:.1f}"
    return f"{100 * share:.1f}{error} %"
