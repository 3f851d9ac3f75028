"""The supervised baseline: convolutional classifiers fitted to the labelled digits only, all seeds in parallel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vaerdict.networks import CNN, Dropout, stack
from vaerdict.noise import seeded
from vaerdict.training.optimiser import Adam, FlatParameters, allow_tf32, make_graphed_step
from vaerdict.training.semisupervised_stack import SemiData, shift_images

IMAGE = (28, 28)


class Classifiers:
    """A stack of classifiers, one per data set, with the architecture of the encoder and the classes as outputs."""

    def __init__(self, data: Sequence[SemiData], n_classes: int, *, shifts: int, batch: int, device: torch.device):
        self.shifts, self.batch = shifts, batch
        self.network = stack([CNN(IMAGE, n_classes, generator=seeded(i)) for i in range(len(data))]).to(device)
        self.adam = Adam(FlatParameters(self.network, len(data)), 1e-3)
        self.generators = [seeded(1000 + i, device) for i in range(len(data))]
        self.drop = Dropout(0.1, tuple(self.generators))
        self.x = torch.stack([d.x[d.labelled] for d in data]).to(device)
        self.y = torch.stack([d.labels for d in data]).to(device)

    def step(self, unused: Tensor) -> Tensor:
        """One step of all classifiers on random batches of their labels. Shapes: ``-> (members,)``."""
        pick = self._integers(self.y.shape[1], (self.batch,))
        x = self.x.gather(1, pick[..., None].expand(-1, -1, self.x.shape[-1]))
        if self.shifts:
            x = shift_images(x, self._integers(2 * self.shifts + 1, (self.batch, 2)) - self.shifts, self.shifts, IMAGE)
        log_p = torch.log_softmax(self.network(x, self.drop), -1)
        losses = -log_p.gather(-1, self.y.gather(1, pick).unsqueeze(-1)).mean((1, 2))
        self.adam.step(self.adam.flat.gradient(losses))
        return losses.detach()

    def _integers(self, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.stack([torch.randint(high, shape, generator=g, device=g.device) for g in self.generators])

    @torch.no_grad()
    def logits(self, x: Sequence[Tensor]) -> Tensor:
        """Outputs of each classifier for its images. Shapes: ``(n, p)`` each ``-> (members, n, out)``."""
        parts = zip(*(images.split(2048) for images in x), strict=True)
        return torch.cat([self.network(torch.stack(part).to(self.x.device)) for part in parts], 1)


def classifier_logits(
    data: Sequence[SemiData], x: Sequence[Tensor], n_classes: int, *, shifts: int, epochs: int, device: torch.device
) -> Tensor:
    """Train a classifier on the labels of each data set and return its logits for other images.

    Parameters
    ----------
    data
        The labelled data sets, with equally many labels.
    x
        Images to classify, ``(n, p)`` for each data set.
    n_classes, shifts, epochs, device
        The number of classes, the largest random shift in pixels, the epochs and the device of training.

    Returns
    -------
    Tensor
        Logits, ``(data sets, n, classes)``.
    """
    batch = min(128, len(data[0].labels))
    classifiers = Classifiers(data, n_classes, shifts=shifts, batch=batch, device=device)
    with allow_tf32(device):
        unused = torch.zeros(1, device=device)
        step = make_graphed_step(classifiers.step, (unused,), classifiers.generators, classifiers.adam.tensors())
        for _ in range(epochs * max(1, len(data[0].labels) // batch)):
            step(unused)
        return classifiers.logits(x).double()
