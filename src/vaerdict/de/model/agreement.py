r"""How many genes' counts contradict a model, whose fold changes they are compared with.

A model that was trained on the cells compared knows no more than their counts do, may miss what differs, and may repeat
their noise; nothing in its own posterior shows it. Therefore the counts are asked: with the fold change
:math:`\mu_g` and variance :math:`v_g` of the model, that of the counts is

.. math:: \sum_k \pi_k\, N(\mu_g + c,\; v_g + \tau_k^2),

with shares :math:`\pi_k` of misfits :math:`\tau_k` of highest marginal likelihood over all genes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vaerdict.core import DataError
from vaerdict.de.shrinkage import WIDTHS, NodeLikelihood, centre_of, em_shares, normal_density

_SMALL_MISFIT = 0.3


def share_contradicted(model: Tensor, likelihood: NodeLikelihood) -> float:
    """The share of genes whose fold changes the model misses by more than a little.

    `model` are draws of the fold changes by the model. Shapes: ``model (draws, genes)``.
    """
    model = model.double()
    if not model.isfinite().all():
        raise DataError("the model gives fold changes that are not finite; train it again, or with other objectives.")
    variance = model.var(0)
    shift = centre_of(model.mean(0) - likelihood.mode, (variance + likelihood.error.square()).sqrt())
    centre = (model.mean(0) - shift).unsqueeze(-1)
    widths = torch.tensor(WIDTHS, dtype=torch.float64)
    sds = ((variance + width.square()).sqrt().unsqueeze(-1) for width in widths)
    scaled = likelihood.log_lik.exp() * likelihood.weights
    marginal = [(scaled * normal_density(likelihood.nodes, centre, sd)).sum(-1) for sd in sds]
    return float(em_shares(torch.stack(marginal, -1))[widths > _SMALL_MISFIT].sum())
