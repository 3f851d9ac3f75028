"""Models of scvi-tools as models of this library: one adapter per class behind one protocol, and `from_scvi`."""

from vaerdict.models.scvi.base import JointEncoder, ScviEncoder, ScviModel
from vaerdict.models.scvi.door import ADAPTERS, from_scvi
from vaerdict.models.scvi.multivi import Multivi
from vaerdict.models.scvi.peakvi import Peakvi
from vaerdict.models.scvi.registered import Cells
from vaerdict.models.scvi.scanvi import Scanvi
from vaerdict.models.scvi.scvi import Scvi
from vaerdict.models.scvi.totalvi import Totalvi

__all__ = [
    "ADAPTERS",
    "Cells",
    "JointEncoder",
    "Multivi",
    "Peakvi",
    "Scanvi",
    "Scvi",
    "ScviEncoder",
    "ScviModel",
    "Totalvi",
    "from_scvi",
]
