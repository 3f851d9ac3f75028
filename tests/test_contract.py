"""One contract for every model, proposal and objective: everything that implements the protocols works together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent
from torch.distributions import Normal as TorchNormal

from vaerdict import core
from vaerdict.inference import posterior
from vaerdict.models.ppca import PPCA, LambdaPPCA
from vaerdict.noise import seeded
from vaerdict.objectives import iwelbo_loss, legal_pairs, loss
from vaerdict.proposals import Family, Mixture, Normal, Prior, SplineFlow, Student, Trainable, defensive
from vaerdict.training import Member, Recipe, Settings, train

WEIGHT = torch.randn(4, 2, generator=seeded(0))


class UserModel(nn.Module):
    """A user's module with the methods of the protocol and `prepare`, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.prior = Independent(TorchNormal(torch.zeros(2), torch.ones(2)), 1)
        self.weight = nn.Parameter(WEIGHT.clone())

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.square().sum(-1)

    def log_joint(self, x: tuple[Tensor, Tensor], z: Tensor) -> Tensor:
        value, square = x
        mean = torch.tanh(z) @ self.weight.mT
        return (mean * value).sum(-1) - 0.5 * (square + mean.square().sum(-1)) + self.prior.log_prob(z)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "PPCA": lambda: PPCA(WEIGHT, 1.0),
    "LambdaPPCA": lambda: LambdaPPCA(WEIGHT, 0.3),
    "user": UserModel,
}
FAMILIES: dict[str, Family] = {
    "normal": Normal(),
    "normal-full": Normal(full=True),
    "student": Student(),
    "student-full": Student(full=True, learn_df=True),
    "flow": SplineFlow(transforms=1),
}
X = PPCA(WEIGHT, 0.7).simulate(24, generator=seeded(1))[0]
ONE_EPOCH = Settings(n_particles=3, epochs=1, batch_size=12, patience=None, score_particles=2)


def new_proposal(family: str, seed: int = 0) -> Trainable:
    return FAMILIES[family].make(X, 2, hidden=(4,), generator=seeded(seed))


def proposal(name: str, model: core.Model) -> core.Proposal:
    if name == "prior":
        return Prior(model.prior)
    if name == "mixture":
        families = {"a": "normal", "b": "student-full", "c": "flow"}
        return defensive({key: new_proposal(name) for key, name in families.items()}, model.prior, 0.2)
    return new_proposal(name)


@pytest.fixture(params=MODELS)
def model(request) -> nn.Module:
    return MODELS[request.param]()


def test_models_fit_the_protocol(model):
    assert isinstance(model, core.Model)
    assert isinstance(model.prior, core.PriorDistribution)
    z = torch.randn(3, 24, 2, generator=seeded(2))
    assert model.log_joint(core.prepared(model, X), z).shape == (3, 24)
    stacked = torch.stack([X, X])
    log_p = model.log_joint(core.prepared(model, stacked), z.unsqueeze(1).expand(3, 2, 24, 2))
    torch.testing.assert_close(log_p[:, 1], model.log_joint(core.prepared(model, X), z))


@pytest.mark.parametrize("name", [*FAMILIES, "prior", "mixture"])
@torch.no_grad()
def test_proposals_fit_the_protocol_and_serve_every_model(model, name):
    q = proposal(name, model)
    assert isinstance(q, core.Proposal)
    z, log_q = q.draw(X, 30, generator=seeded(3))
    assert (z.shape, log_q.shape, log_q.dtype) == ((30, 24, 2), (30, 24), torch.float32)
    torch.testing.assert_close(q.log_prob(z, X), log_q, rtol=1e-4, atol=1e-4)
    again, other = (q.draw(X, 30, generator=seeded(seed)) for seed in (3, 4))
    assert torch.equal(again.z, z)
    assert torch.equal(again.log_q, log_q)
    assert not torch.equal(other.z, z)
    sample = posterior(model, X, q, 30, seed=seeded(3))
    assert torch.equal(sample.z, z)
    torch.testing.assert_close(sample.log_w, model.log_joint(core.prepared(model, X), z) - log_q)
    assert sample.expect(lambda z: z).value.shape == (24, 2)
    assert (len(sample.names) > 1) == isinstance(q, Mixture)


@pytest.mark.parametrize("pair", legal_pairs(), ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_valid_objective_trains_every_family_for_every_model(model, family, pair):
    phi = loss(*pair, alpha=0.5 if pair[0] == "vr_iwelbo" else None)
    q = new_proposal(family)
    (fit,) = train([Member(model, q, Recipe("X", iwelbo_loss, phi), 0)], X, X[:6], ONE_EPOCH)
    assert isinstance(fit.proposal, type(q))
    ((epoch, bound),) = fit.history
    assert epoch == 1
    assert torch.isfinite(torch.tensor(bound))
    for before, after in ((model, fit.model), (q, fit.proposal)):
        old, new = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (before, after))
        assert new.isfinite().all()
        assert not torch.equal(old, new)
    z, log_q = fit.proposal.draw(X, 5, generator=seeded(1))
    assert torch.equal(z, fit.proposal.draw(X, 5, generator=seeded(1)).z)
    torch.testing.assert_close(fit.proposal.log_prob(z, X), log_q, rtol=1e-4, atol=1e-4)
