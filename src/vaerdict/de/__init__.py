"""Differential expression: log2 fold changes between groups of cells with calibrated false discovery rates."""

from vaerdict.de.analysis import differential_expression
from vaerdict.de.answers import COLUMNS
from vaerdict.de.calibration import Calibration, calibrate
from vaerdict.de.cells import CellPosterior, Given, Particles, Proposed, Streamed, refined, streamed
from vaerdict.de.compare import Compared, Support, Uncertainty, compare
from vaerdict.de.contrast import (
    CENTRED,
    ESTIMANDS,
    PAIR,
    PROPORTION,
    Comparison,
    Effect,
    Estimand,
    comparison,
    joint_effect,
)
from vaerdict.de.grouped import Expressing, GroupedModel, GroupMeans, group_means
from vaerdict.de.plan import all_pairs
from vaerdict.de.results import DEResult
from vaerdict.de.streams import Averages, Population, averages, fixed_averages
from vaerdict.de.weighting import Bootstrap, Equal, OneCell, Weighting

__all__ = [
    "CENTRED",
    "COLUMNS",
    "ESTIMANDS",
    "PAIR",
    "PROPORTION",
    "Averages",
    "Bootstrap",
    "Calibration",
    "CellPosterior",
    "Compared",
    "Comparison",
    "DEResult",
    "Effect",
    "Equal",
    "Estimand",
    "Expressing",
    "Given",
    "GroupMeans",
    "GroupedModel",
    "OneCell",
    "Particles",
    "Population",
    "Proposed",
    "Streamed",
    "Support",
    "Uncertainty",
    "Weighting",
    "all_pairs",
    "averages",
    "calibrate",
    "compare",
    "comparison",
    "differential_expression",
    "fixed_averages",
    "group_means",
    "joint_effect",
    "refined",
    "streamed",
]
