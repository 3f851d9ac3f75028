"""The verdict of an audit: may the encoder's numbers be used, in one word and one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vaerdict.diagnostics import Verdict

NEAR = 0.5
"""An average is near if it is within so many posterior standard deviations of refined inference (root mean square)."""

MOST, HALF = 0.95, 0.5
"""Shares of observations from which a verdict is ok, and from which it is caution."""

_ADVICE = {
    Verdict.OK: "its numbers can be used as they are",
    Verdict.CAUTION: "weight its draws (vaerdict.posterior) where an answer matters",
    Verdict.REFUSE: "do not use its numbers, but refined inference (vaerdict.posterior, vaerdict.expect)",
}


def of_share(share: float | None) -> Verdict:
    """The verdict on something that holds for this share of the observations; refuse where it is not known."""
    known = share or 0.0
    return Verdict.OK if known >= MOST else Verdict.CAUTION if known >= HALF else Verdict.REFUSE


def verdict(results: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict as results.json holds it, from the rest of the results.

    ========================  =====================================================================================
    verdict                   if
    ========================  =====================================================================================
    REFUSE                    refined inference answers for less than half of the observations, an average is near
                              for less than half of them, or for less than 95 % and the encoder is reliable for less
                              than half
    OK                        refined inference, the encoder and all averages hold for at least 95 % of the
                              observations, and no mass was missed where modes were searched from the prior
    CAUTION                   otherwise
    ========================  =====================================================================================
    """
    n, noun = results["n_observations"], results["noun"]
    encoder, answered = results["encoder"]["share_reliable"], results["refined"]["share_reliable"]
    worst = min(results["quantities"], key=lambda row: row["share_near"])
    near, missed = worst["share_near"], results["search"]["n_missed"]
    by_part = {
        "encoder": of_share(encoder),
        "averages": of_share(near),
        "refined": max(of_share(answered), Verdict.CAUTION if missed else Verdict.OK),
    }
    if of_share(answered) is Verdict.REFUSE:
        reason = (
            f"Refined inference is reliable for {percent(answered)} of {n:,} {noun} only, so the encoder could not be "
            "checked; do not rely on it."
        )
        return _record(Verdict.REFUSE, reason, by_part)
    averages_wrong = by_part["averages"] is Verdict.REFUSE
    if averages_wrong or (by_part["averages"] is Verdict.CAUTION and by_part["encoder"] is Verdict.REFUSE):
        overall = Verdict.REFUSE
    else:
        overall = Verdict.OK if set(by_part.values()) == {Verdict.OK} else Verdict.CAUTION
    found = (
        f"The importance weights of the encoder are reliable for {percent(encoder)} of {n:,} {noun}, and its averages "
        f"({worst['name']}) are within {NEAR:g} posterior standard deviations of refined inference for {percent(near)}"
    )
    modes = (
        f", but modes were missed for {missed} of {results['search']['n']} searched from the prior" if missed else ""
    )
    return _record(overall, f"{found}{modes}: {_ADVICE[overall]}.", by_part)


def _record(overall: Verdict, reason: str, by_part: Mapping[str, Verdict]) -> dict[str, Any]:
    return {"verdict": overall.name, "reason": reason, **{name: part.name for name, part in by_part.items()}}


def percent(share: float | None) -> str:
    """A share in per cent; 0 % and 100 % are written only where they are exact.

    >>> percent(0.999), percent(1.0), percent(0.0004), percent(0.52)
    ('over 99 %', '100 %', 'under 1 %', '52 %')
    """
    if share is None or share != share:
        return "an unknown share"
    if 0 < share < 0.005:
        return "under 1 %"
    return "over 99 %" if 0.995 <= share < 1 else f"{100 * share:.0f} %"


def moved_most(quantities: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """The quantity that moved most, and its feature that moved most."""
    worst = min(quantities, key=lambda row: (row["share_near"] or 0.0, -(row["median_sd"] or 0.0)))
    return worst, worst["features"][0] if worst["features"] else None
