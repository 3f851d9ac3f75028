"""Proposals from what is at hand."""

from __future__ import annotations

from typing import Any

from vaerdict.core import Proposal, SettingError


def as_proposal(thing: Any, *, spread: str | None = None) -> Proposal:
    """The proposal itself."""
    if isinstance(thing, Proposal):
        return thing
    raise SettingError("not a proposal")
