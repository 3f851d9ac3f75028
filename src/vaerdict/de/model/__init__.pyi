from vaerdict.de.model.averaging import Averages as Averages
from vaerdict.de.model.averaging import Population as Population
from vaerdict.de.model.averaging import Support as Support
from vaerdict.de.model.averaging import averages as averages
from vaerdict.de.model.averaging import fixed_averages as fixed_averages
from vaerdict.de.model.averaging import support as support
from vaerdict.de.model.cell_weights import Bootstrap as Bootstrap
from vaerdict.de.model.cell_weights import Equal as Equal
from vaerdict.de.model.cell_weights import OneCell as OneCell
from vaerdict.de.model.cell_weights import Weighting as Weighting
from vaerdict.de.model.effect import joint_effect as joint_effect
from vaerdict.de.model.group_prior import Expressing as Expressing
from vaerdict.de.model.group_prior import GroupedModel as GroupedModel
from vaerdict.de.model.group_prior import GroupMeans as GroupMeans
from vaerdict.de.model.group_prior import group_means as group_means
from vaerdict.de.model.posterior import CellPosterior as CellPosterior
from vaerdict.de.model.posterior import Given as Given
from vaerdict.de.model.posterior import Particles as Particles
from vaerdict.de.model.posterior import Proposed as Proposed
from vaerdict.de.model.posterior import Streamed as Streamed
from vaerdict.de.model.posterior import refined as refined
from vaerdict.de.model.posterior import streamed as streamed

__all__: list[str]
