from vaerdict.de.calibration import Calibration as Calibration
from vaerdict.de.calibration import calibrate as calibrate
from vaerdict.de.contrasts import all_pairs as all_pairs
from vaerdict.de.options import DEOptions as DEOptions
from vaerdict.de.pipeline import differential_expression as differential_expression
from vaerdict.de.result import DEResult as DEResult
from vaerdict.de.splitting import split_counts as split_counts

__all__: list[str]
