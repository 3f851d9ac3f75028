r"""Estimates of p(c | x) under an M1+M2 model, each with its evidence.

With latents :math:`(z_k, u_{kc})` drawn for every class from proposals given that class, the log-weights
:math:`\log w_{kc} = \log p(x, z_k, u_{kc}, c) - \log q(z_k, u_{kc} \mid x, c)` give

.. math:: p(c \mid x) \approx \frac{\sum_k w_{kc}}{\sum_k W_k}, \quad W_k = \sum_c w_{kc}:

self-normalised importance sampling of the class shares :math:`w_{kc} / W_k` with weights :math:`W_k`. So the standard
error, effective sample size and k-hat of `vaerdict.estimators` serve here as they are. All of it in log space.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vaerdict import diagnostics, estimators
from vaerdict.core import Progress, Proposal, SettingError, check_count, log_mean_exp, silent
from vaerdict.diagnostics import Verdict
from vaerdict.distributions import Elliptical
from vaerdict.models.m1m2 import M1M2, ClassPrior, ClassProposal, PerClass, Recognition, per_class
from vaerdict.noise import Randomness
from vaerdict.proposals import Mixture
from vaerdict.refinement import refine, refine_elbo

_PART = {"cpu": 2**24, "cuda": 2**30}  # numbers a likelihood spreads out at a time
_ROOM = {"cpu": 2**30, "cuda": 2**34}  # bytes that refinement works on at a time
_PRIOR_SHARE = 0.05


@dataclass(frozen=True, eq=False)
class ClassPosterior:
    """Class probabilities with what speaks for or against them.

    ``rung`` counts how far each observation was taken up the ladder given in ``rungs``.

    Shapes: ``prob, mcse (n, classes)``; ``ess, khat, verdict, log_evidence, rung (n,)``.
    """

    prob: Tensor
    mcse: Tensor
    ess: Tensor
    khat: Tensor
    verdict: Tensor
    log_evidence: Tensor
    rung: Tensor
    rungs: tuple[str, ...]

    @property
    def certified(self) -> Tensor:
        """Whether the verdict on each observation is OK. Shapes: ``-> (n,)``."""
        return self.verdict == Verdict.OK


Make = Callable[[Tensor], Proposal]
"""A proposal for the observations ``(classes, n, p)`` it is given."""


@torch.no_grad()
def plugin_classes(q: Recognition, x: Tensor, k: int, *, generator: Randomness) -> Tensor:
    r"""The mean of q(c | z) over :math:`z \sim q(z \mid x)`: what the recognition model itself says of c.

    Shapes: ``(n, p) -> (n, classes)``.
    """
    parts = []
    for part in x.split(part_size(x, k, q.n_classes)):
        z = q.z_given(part).draw(None, k, generator=generator).z
        parts.append(q.log_class(z).double().exp().mean(0))
    return torch.cat(parts)


def amortised(recognitions: Mapping[str, Recognition], model: M1M2 | None = None) -> Make:
    """One recognition model as proposal, or several in equal shares; with `model` its prior as one more of them."""
    components: dict[str, Proposal] = {name: ClassProposal(q) for name, q in recognitions.items()}
    if model is not None:
        components["PRIOR"] = ClassPrior(model)
    if len(components) == 1:
        return lambda x: next(iter(components.values()))
    return lambda x: Mixture(components)


def refined(model: M1M2, start: Recognition, *, improve: bool, generator: Randomness) -> Make:
    """A full-rank proposal over (z, u) of its own for each observation and class, with a small share of the prior.

    From where the recognition model points, to the mode and its curvature (`vaerdict.refinement.refine`); with
    `improve` on from there by gradient steps on the bound (`refine_elbo`).
    """
    view = PerClass(model)

    def make(x: Tensor) -> Mixture:
        with torch.no_grad():
            loc = ClassProposal(start).locate(x)
        room = _ROOM.get(x.device.type, _ROOM["cpu"])
        local: Elliptical = refine(view, x, loc, axis=1, inflate=1.0 if improve else 1.1, max_bytes=room).distribution
        if improve:
            local = refine_elbo(view, x, local, axis=1, generator=generator, max_bytes=room).distribution
        shares = {"REFINED": 1 - _PRIOR_SHARE, "PRIOR": _PRIOR_SHARE}
        return Mixture({"REFINED": local, "PRIOR": ClassPrior(model)}, shares)

    return make


def class_weights(model: M1M2, x: Tensor, make: Make, k: int, *, generator: Randomness) -> Tensor:
    """Log-weights of k particles for each observation and class. Shapes: ``(n, p) -> (K, n, classes)``."""
    view, repeated = PerClass(model), per_class(x, model.n_classes)
    q = make(repeated)
    with torch.no_grad():
        latent, log_q = q.draw(repeated, k, generator=generator)
        return (view.log_joint(repeated, latent) - log_q).movedim(1, -1)


def from_weights(log_w: Tensor, *, smooth: bool = True) -> ClassPosterior:
    """Class probabilities from log-weights by class. Shapes: ``(K, n, classes) -> ClassPosterior``."""
    marginal = torch.logsumexp(log_w.double(), -1)
    estimator = estimators.psis if smooth else estimators.snis
    found = estimator(torch.softmax(log_w.double(), -1), marginal)
    verdict = diagnostics.verdict(found.khat, found.ess, len(log_w))
    rung = torch.zeros_like(verdict)
    return ClassPosterior(found.value, found.mcse, found.ess, found.khat, verdict, log_mean_exp(marginal), rung, ("q",))


def class_posterior(
    model: M1M2,
    x: Tensor,
    ladder: Mapping[str, Make],
    k: int = 200,
    *,
    generator: Randomness,
    tolerance: float = 0.02,
    smooth: bool = True,
    progress: Progress = silent,
) -> ClassPosterior:
    """P(c | x) of each observation from the first rung of `ladder` whose answer can be trusted, else from the last.

    An answer can be trusted when its verdict is OK and no class's standard error exceeds `tolerance`. With a ladder of
    one rung that rung answers for all. Memory beyond the answer stays bounded however many observations there are.

    Shapes: ``x (n, p)``.
    """
    if not ladder:
        raise SettingError("the ladder has no rung; give at least one way to make a proposal.")
    answers: ClassPosterior | None = None
    todo = torch.arange(len(x), device=x.device)
    for number, make in enumerate(ladder.values()):
        found = _in_parts(model, x[todo], make, k, generator, smooth, progress, list(ladder)[number])
        found = replace(found, rung=torch.full_like(found.rung, number), rungs=tuple(ladder))
        answers = found if answers is None else _replaced(answers, todo, found)
        todo = (~(answers.certified & (answers.mcse.amax(-1) <= tolerance))).nonzero().flatten()
        if not len(todo):
            break
    assert answers is not None
    return answers


def _in_parts(
    model: M1M2, x: Tensor, make: Make, k: int, generator: Randomness, smooth: bool, progress: Progress, name: str
) -> ClassPosterior:
    parts = []
    for part in x.split(part_size(x, k, model.n_classes)):
        parts.append(from_weights(class_weights(model, part, make, k, generator=generator), smooth=smooth))
        progress(min(len(x), len(parts) * len(parts[0].ess)), len(x), f"p(c | x) by {name}")
    return joined(parts)


def joined(parts: Sequence[ClassPosterior]) -> ClassPosterior:
    """The answers on several batches of observations, all by one ladder, as one."""
    columns = {name: torch.cat([getattr(p, name) for p in parts]) for name in _tensors(parts[0])}
    return replace(parts[0], **columns)


def part_size(x: Tensor, k: int, n_classes: int) -> int:
    """How many observations are worked on at a time with k particles for each of their classes."""
    return max(1, _PART.get(x.device.type, _PART["cpu"]) // (check_count(k) * n_classes * x.shape[-1]))


def _replaced(old: ClassPosterior, index: Tensor, new: ClassPosterior) -> ClassPosterior:
    """The answers with those at `index` replaced by new ones."""
    return replace(
        old, **{name: value.index_copy(0, index, getattr(new, name)) for name, value in _tensors(old).items()}
    )


def _tensors(answers: ClassPosterior) -> dict[str, Tensor]:
    return {name: value for name, value in vars(answers).items() if isinstance(value, Tensor)}
