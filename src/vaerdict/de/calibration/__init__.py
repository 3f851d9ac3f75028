"""Whether the false discovery rate of `vaerdict.differential_expression` holds on the user's own data."""

from vaerdict.de.calibration.pipeline import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]
