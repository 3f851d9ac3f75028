"""Discrete latents with few states, summed exactly: alone, or beside continuous ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vaerdict.core import (
    Draws,
    Latent,
    Model,
    Observations,
    SettingError,
    ShapeError,
    log_normalise,
    prepared,
    rows_of,
)
from vaerdict.noise import Randomness, Source, as_source
from vaerdict.priors import JointPrior, batch_of, is_discrete, latent_type

MAX_STATES = 1024
"""Largest number of joint states of the discrete latents."""


def discrete_latents(model: Model, x: Observations) -> dict[str, Tensor]:
    """The states of every discrete latent of a model, by name; the name is empty for a latent that is not named.

    Shapes: ``(S,)`` for a ``Categorical``, ``(S, C)`` for a one-hot latent.
    """
    prior = model.prior
    if not isinstance(prior, JointPrior):
        if not is_discrete(prior) and callable(prior) and not hasattr(prior, "log_prob"):
            prior = prior(rows_of(x, slice(0, 1)))
        return {"": _support(prior)} if is_discrete(prior) else {}
    one = rows_of(x, slice(0, 1))
    latents = prior.sample_at(one, 1, (1,), as_source(torch.Generator().manual_seed(0)))._asdict()
    at = {name: prior.at(name, latents, one) for name in prior.names}
    return {name: _support(dist) for name, dist in at.items() if is_discrete(dist)}


def _support(prior: Any) -> Tensor:
    states = prior.enumerate_support(expand=False)
    return states.reshape(len(states), *prior.event_shape)


class Enumerated(nn.Module):
    r"""A model whose discrete latents c are summed out: :math:`p(x, z) = \sum_c p(x, z, c)`.

    `vaerdict.expect` and `vaerdict.posterior` apply it to every model whose prior has a ``Categorical`` or
    ``OneHotCategorical`` latent. An expectation then averages over c exactly,
    :math:`E[f(z, c) \mid x] = E[\sum_c p(c \mid x, z) f(z, c) \mid x]`.

    The latent is the tensor z where one continuous latent remains, and a named tuple where several do. `average` and
    `probabilities` evaluate functions of all latents. A model whose decoder does not depend on c may set
    ``broadcasts_states = True``. It then gets the states on an additional first axis of c and decodes z once.

    Parameters
    ----------
    model
        A model with ``log_joint(x, z)`` of all latents, and a `JointPrior` or a discrete distribution as ``prior``.
    x
        Some observations, from which the states of conditional priors are read.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> from torch.distributions import Categorical, Normal
    >>> class Mixture:  # x = 3 c + z + noise, with c in {0, 1}
    ...     prior = vd.JointPrior(c=Categorical(torch.ones(2)), z=Normal(torch.zeros(1), torch.ones(1)))
    ...     def log_joint(self, x, latent):
    ...         mean = 3 * latent.c.unsqueeze(-1) + latent.z
    ...         return Normal(mean, 1.0).log_prob(x).sum(-1) + self.prior.log_prob(latent)
    >>> x = torch.tensor([[0.0], [3.0]])
    >>> answer = vd.expect(Mixture(), x, lambda latent: latent.c.double(), n=500, tolerance=0.05, seed=0)
    >>> [round(p, 1) for p in answer.value.tolist()]
    [0.1, 0.9]
    """

    def __init__(self, model: Model, x: Observations) -> None:
        super().__init__()
        supports = discrete_latents(model, x)
        if not supports:
            raise SettingError(
                f"the prior of {type(model).__name__} has no discrete latent; give it a Categorical or a "
                "OneHotCategorical, by name in a JointPrior."
            )
        self.model: Any = model
        self.n_states = math.prod(len(states) for states in supports.values())
        if self.n_states > MAX_STATES:
            raise SettingError(
                f"the discrete latents have {self.n_states} joint states, more than {MAX_STATES} that are summed over."
            )
        index = torch.cartesian_prod(*(torch.arange(len(s)) for s in supports.values())).reshape(self.n_states, -1)
        values = {name: states[index[:, i].to(states.device)] for i, (name, states) in enumerate(supports.items())}
        self.states = values
        prior = model.prior  # a property that may take as long as a small log_joint
        names = prior.names if isinstance(prior, JointPrior) else ("",)
        self.continuous = tuple(name for name in names if name not in values)
        self.Latent: Any = latent_type(*self.continuous) if len(self.continuous) > 1 else None
        self.Full: Any = prior.Latent if isinstance(prior, JointPrior) else None

    @property
    def prior(self) -> MarginalPrior:
        """The prior of the continuous latents."""
        return MarginalPrior(self)

    def prepare(self, x: Observations) -> Any:
        """What the model prepares."""
        return prepared(self.model, x)

    def log_joint(self, x: Any, z: Latent) -> Tensor:
        """Log p(x, z). Shapes: ``-> (K, *batch)``."""
        return self.log_joint_states(x, z).logsumexp(0)

    def log_joint_states(self, x: Any, z: Latent) -> Tensor:
        """Log p(x, z, c) in every state c. Shapes: ``-> (S, K, *batch)``."""
        batch = (z if isinstance(z, Tensor) else z[0]).shape[:-1]
        if getattr(self.model, "broadcasts_states", False):
            log_p = self.model.log_joint(x, self._latent(self.parts(z) | self._states_at(z)))
        else:
            log_p = self.model.log_joint(x, self.full(z))
        n, shape = self.n_states, tuple(log_p.shape)
        if shape not in ((n, *batch), (n * batch[0], *batch[1:])):
            raise ShapeError(
                f"log_joint returned shape {shape} for {n} states of the discrete latents and {batch[0]} particles; it "
                f"must return one number per state, particle and observation, shape {(n * batch[0], *batch[1:])}."
            )
        return log_p.reshape(n, *batch)

    def probabilities(self, x: Observations, z: Latent) -> Tensor:
        """P(c | x, z) of every state. Shapes: ``-> (S, K, *batch)``."""
        return log_normalise(self.log_joint_states(self.prepare(x), z).double()).exp()

    def average(self, f: Callable[[Latent], Tensor], x: Observations, z: Latent) -> Tensor:
        """The average of f over the discrete latents given z and x. Shapes: ``-> (K, *batch, *out)``."""
        weight, full = self.probabilities(x, z), f(self.full(z))
        if not isinstance(full, Tensor) or full.shape[: weight.dim() - 1] != weight.flatten(0, 1).shape:
            return full  # refused by its shape
        values = full.reshape(*weight.shape, *full.shape[weight.dim() - 1 :])
        weight = weight.reshape(weight.shape + (1,) * (values.dim() - weight.dim()))
        return torch.where(weight > 0, weight * values, 0).sum(0)

    def joined(self, continuous: dict[str, Tensor]) -> Latent:
        """The latent of this model from its parts."""
        return self.Latent(**continuous) if self.Latent else continuous[self.continuous[0]]

    def parts(self, z: Latent) -> dict[str, Tensor]:
        """The parts of a latent of this model, by name."""
        if not self.continuous:
            return {}
        return z._asdict() if self.Latent else {self.continuous[0]: z}

    def full(self, z: Latent) -> Latent:
        """All latents in every state; states take the place of particles. Shapes: ``(K, *batch, d) -> (S K, ...)``.

        Without continuous latents z is an empty tensor ``(K, *batch, 0)``.
        """
        repeated = {name: t.expand(self.n_states, *t.shape) for name, t in self.parts(z).items()}
        return self._latent({name: t.flatten(0, 1) for name, t in (repeated | self._states_at(z)).items()})

    def first(self, z: Latent) -> Latent:
        """All latents in the first state, for functions that do not depend on the discrete ones."""
        return self._latent(self.parts(z) | {name: t[0] for name, t in self._states_at(z).items()})

    def _states_at(self, z: Latent) -> dict[str, Tensor]:
        """The value of every discrete latent in every state. Shapes: ``-> (S, K, *batch, ...)`` each."""
        like = z if isinstance(z, Tensor) else z[0]
        batch, n = like.shape[:-1], self.n_states
        lead = {k: t.to(like.device).reshape(n, *(1,) * len(batch), *t.shape[1:]) for k, t in self.states.items()}
        return {name: t.expand(n, *batch, *t.shape[len(batch) + 1 :]) for name, t in lead.items()}

    def _latent(self, named: dict[str, Tensor]) -> Latent:
        return self.Full(**named) if self.Full else named[""]

    def _in_states(self, f: Callable[[Latent], Tensor], z: Latent) -> Tensor:
        values = f(self.full(z))
        return values.reshape(self.n_states, -1, *values.shape[1:])


class MarginalPrior:
    """The prior of the continuous latents of a model whose discrete ones are summed out."""

    def __init__(self, model: Enumerated) -> None:
        self.model = model

    @property
    def event_shape(self) -> torch.Size:
        """Empty: it may depend on the observations."""
        return torch.Size(())

    def draw(self, x: Observations, k: int, *, generator: Randomness) -> Draws:
        """Draw k latents for each observation."""
        z = self.sample_at(x, k, batch_of(x), as_source(generator))
        return Draws(z, self.log_prob(z, x))

    def sample_at(self, x: Observations, k: int, batch: Sequence[int], source: Source) -> Latent:
        """Draw k latents for each observation of a batch."""
        latents = self.model.model.prior.sample_at(x, k, batch, source)._asdict()
        return self.model.joined({name: latents[name] for name in self.model.continuous})

    def log_prob(self, z: Latent, x: Observations) -> Tensor:
        """Log p(z). Shapes: ``-> (K, *batch)``."""
        return self.model._in_states(lambda full: self.model.model.prior.log_prob(full, x), z).logsumexp(0)

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Latent:
        """Draw latents from torch's global random state."""
        latents = self.model.model.prior.sample(sample_shape)._asdict()
        return self.model.joined({name: latents[name] for name in self.model.continuous})
