"""All targets of the battery by group."""

from __future__ import annotations

from collections.abc import Sequence

from vaerdict_paper.benchmarks.verdicts import benign, curved, realistic, separated
from vaerdict_paper.benchmarks.verdicts.questions import Target

GROUPS = {module.GROUP: module.targets for module in (benign, curved, separated, realistic)}


def targets(seed: int = 0, groups: Sequence[str] | None = None) -> list[Target]:
    """The targets of some groups, or of all; their parameters and observations are drawn with `seed`.

    Seed 0 is the battery that was used during development.
    """
    return [target for group in groups or GROUPS for target in GROUPS[group](seed)]
