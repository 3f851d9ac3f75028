"""What an experiment runs its units by, and writes its results with."""

from vaerdict.files import finite, hardware, manifest, versions, write_json
from vaerdict.units import Run, Skipped, Unit, Work, run_units, unit_name

__all__ = [
    "Run",
    "Skipped",
    "Unit",
    "Work",
    "finite",
    "hardware",
    "manifest",
    "run_units",
    "unit_name",
    "versions",
    "write_json",
]
