"""Models of scvi-tools as models of this library: one adapter per class behind one protocol, and `from_scvi`."""

from vaerdict.models.scvi.base import Cells, JointEncoder, ScviEncoder, ScviModel
from vaerdict.models.scvi.door import ADAPTERS, from_scvi
from vaerdict.models.scvi.peakvi import Peakvi
from vaerdict.models.scvi.scvi import Scvi

__all__ = ["ADAPTERS", "Cells", "JointEncoder", "Peakvi", "Scvi", "ScviEncoder", "ScviModel", "from_scvi"]
