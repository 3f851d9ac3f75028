"""What a learned prior did, in sentences: shared by the terminal, notebooks and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MARK = "*"
"""Follows the name of a gene that is called only thanks to the prior, where text has no other marks."""

LEGEND = "called only thanks to the prior: not called by its counts alone"
"""What the mark means."""

_FROM = {"profile": "profiles of {n} other cells", "model": "a model trained on {n} other cells"}


def prior_messages(contrasts: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence or two on the prior of every contrast that has one; the name of the contrast first if several."""
    named = len(contrasts) > 1
    both = ((contrast, prior_message(contrast)) for contrast in contrasts)
    return [f"{contrast['name']}: {message}" if named else message for contrast, message in both if message]


def prior_message(contrast: Mapping[str, Any]) -> str:
    """How good the prediction was and what it changed, or why none was used; empty where none was asked for."""
    prior = contrast.get("prior")
    if prior is None:
        return ""
    if not prior["used"]:
        return f"The counts alone decide, without a prior: {prior['reason']}".rstrip(".") + "."
    source = _FROM[prior["kind"]].format(n=f"{prior['n_other']:,}")
    return (
        f"The prior predicts fold changes without the gene's own counts, from {source}. Predictions correlate "
        f"{prior['correlation']:.2f} with the fold changes of the counts (slope {prior['slope']:.2f}), and "
        f"{prior['share_following']:.0%} of the genes follow them. The counts alone call {prior['n_counts']:,} genes; "
        f"{prior['n_by_prior']:,} are called only thanks to the prior."
    )


def marks(rows: Any) -> list[str]:
    """The mark of each row of a table of genes that is called only thanks to the prior, otherwise nothing."""
    if "by_prior" not in rows:
        return [""] * len(rows)
    return [MARK if flag is True or flag == 1 else "" for flag in rows["by_prior"].tolist()]
