"""SCANVI: the state of a cell depends on its class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical, Independent

from vaerdict.core import Latent, SettingError
from vaerdict.distributions import StandardNormal
from vaerdict.models.scvi.base import normal, without_draws
from vaerdict.models.scvi.registered import LABELS, Cells
from vaerdict.models.scvi.scvi import Scvi
from vaerdict.noise import Source


class Scanvi(Scvi):
    r"""Counts of genes given a cell state whose prior depends on the class of the cell.

    .. math:: y \sim \mathrm{Cat}(\pi), \quad z_2 \sim N(0, I), \quad
              z_1 \mid z_2, y \sim N\bigl(\mu(z_2, y), \sigma^2(z_2, y)\bigr), \quad x \mid z_1 \text{ as in SCVI}

    Latents are the named tuple ``(y, z2, z1)``, with ``l`` behind them if the library size is a latent. The class y is
    a latent of every cell, labelled or not. This is the model that scvi-tools fits: its evidence bound averages over
    the classes of labelled cells too, and labels train the classifier alone. The posterior of y is the class
    probability under the generative model (`class_probabilities`), whereas ``predict`` is that of the classifier,
    which is part of the encoder here. To condition on a label, evaluate `log_joint` at that class.

    A dispersion per label is refused, because the likelihood would then depend on the label that was registered, and
    so is ``latent_distribution="ln"``, where scvi-tools evaluates the normal density of :math:`z_1` at its softmax.

    Reference: Xu et al. (2021), Probabilistic harmonization and annotation of single-cell transcriptomics data with
    deep generative models, Molecular Systems Biology 17.
    """

    state = "z1"
    broadcasts_states = True

    @classmethod
    def check(cls, module: Any) -> None:
        """Refuse settings under which the model has no joint density of counts, states and class."""
        super().check(module)
        if module.dispersion == "gene-label":
            raise SettingError(
                "dispersion='gene-label' of a SCANVI takes the registered label, but the class is a latent; "
                "train it with another dispersion."
            )
        if module.latent_distribution != "normal":
            raise SettingError(
                "a SCANVI with latent_distribution='ln' evaluates the density of its cell state at another point; "
                "train it with latent_distribution='normal'."
            )

    @property
    def classes(self) -> np.ndarray:
        """The names of the classes. Shapes: ``(C,)``."""
        names = self._source.model.adata_manager.get_state_registry(LABELS).categorical_mapping
        return np.array([str(name) for name in names[: self.module.n_labels]], dtype=object)

    @property
    def labelled(self) -> np.ndarray:
        """Whether each cell of the model's AnnData had a label in training. Shapes: ``-> (cells,)``."""
        return np.ravel(self._source.model.adata_manager.get_from_registry(LABELS)) < self.module.n_labels

    def latents(self) -> Mapping[str, Any]:
        """The class, the two states, and the log library size if it is not observed."""
        library = {"l": self.library_prior} if self.latent_library else {}
        inner = StandardNormal(self.module.n_latent)
        return {"y": self._class_prior(), "z2": inner, "z1": self.state_prior, **library}

    def state_prior(self, z2: Tensor, y: Tensor) -> Independent:
        """The prior of z1 given z2 and the class; leading axes broadcast. Shapes: ``(K, *batch, d), (K, *batch)``."""
        lead = torch.broadcast_shapes(z2.shape[:-1], y.shape)
        loc, variance = self.module.decoder_z1_z2(_rows(z2, lead), y.expand(lead).reshape(-1, 1))
        return normal(loc.reshape(*lead, -1), variance.sqrt().reshape(*lead, -1))

    def encode(self, cells: Cells) -> Mapping[str, Any]:
        """The encoder's normals of z1 and l, and of z2 given z1 a mixture over the classes of the classifier."""
        q = super().encode(cells)
        return {"z1": q["z"], **{name: q[name] for name in q if name != "z"}, "z2": self._encode_inner}

    @torch.no_grad()
    def classifier_probabilities(self, x: Tensor | Cells) -> Tensor:
        """The classifier's probabilities at the encoder's mean, as ``predict(soft=True)`` of scvi-tools returns them.

        Shapes: ``(*batch, sum of columns) -> (*batch, C)``.
        """
        return self._log_classifier(super().encode(self.cells(x))["z"].loc).exp()

    def class_probabilities(self, z: Latent) -> Tensor:
        """The probability of each class given the two states; its posterior mean is that given the counts.

        Shapes: ``(K, *batch, d) -> (K, *batch, C)``.
        """
        y = self._every_class(z.z1)
        log_p = self._class_prior().log_prob(y) + self.state_prior(z.z2, y).log_prob(z.z1)
        return log_p.softmax(0).movedim(0, -1)

    def _class_prior(self) -> Categorical:
        return Categorical(probs=self.module.y_prior.flatten(), validate_args=False)

    def _every_class(self, z: Tensor) -> Tensor:
        """Every class for every particle. Shapes: ``(K, *batch, d) -> (C, K, *batch)``."""
        classes = torch.arange(self.module.n_labels, device=z.device)
        return classes.reshape(-1, *(1 for _ in z.shape[:-1])).expand(-1, *z.shape[:-1])

    def _encode_inner(self, latents: Mapping[str, Tensor]) -> ClassMixture:
        z1, y = latents["z1"], self._every_class(latents["z1"])
        with without_draws(z1):
            q, _ = self.module.encoder_z2_z1(_rows(z1, y.shape), y.reshape(-1, 1))
        loc, scale = (t.reshape(*y.shape, -1) for t in (q.loc, q.scale))
        return ClassMixture(self._log_classifier(z1).movedim(-1, 0), loc, scale)

    def _log_classifier(self, z1: Tensor) -> Tensor:
        """Log q(y | z1) of every class. Shapes: ``(*lead, d) -> (*lead, C)``."""
        out = self.module.classifier(_rows(z1, z1.shape[:-1]))
        log_prob = out.log_softmax(-1) if self.module.classifier.logits else out.log()
        return log_prob.reshape(*z1.shape[:-1], -1)


class ClassMixture(NamedTuple):
    """A mixture of diagonal normals, one per class.

    Shapes: ``log_weight (C, K, *batch)``, ``loc`` and ``scale (C, K, *batch, d)``.
    """

    log_weight: Tensor
    loc: Tensor
    scale: Tensor

    def particles(self, k: int, batch: Sequence[int], source: Source) -> Tensor:
        """Draw one latent per particle and cell: a class, then the latent. Shapes: ``-> (K, *batch, d)``."""
        noise = source.normal(k, batch, self.loc.shape[-1] + 1, like=self.loc)
        below = torch.special.ndtr(noise[..., -1]) > self.log_weight.exp().cumsum(0)[:-1]
        chosen = below.sum(0)[None, ..., None].expand(1, *self.loc.shape[1:])
        return self.loc.gather(0, chosen)[0] + self.scale.gather(0, chosen)[0] * noise[..., :-1]

    def log_prob(self, z: Tensor) -> Tensor:
        """Log-density, summed over classes. Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        return (self.log_weight + normal(self.loc, self.scale).log_prob(z)).logsumexp(0)


def _rows(z: Tensor, lead: torch.Size) -> Tensor:
    return z.expand(*lead, z.shape[-1]).reshape(-1, z.shape[-1])
