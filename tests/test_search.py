"""The search for modes: what is found from where, what its scope is, and the kernels where searches ended."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from inference_toys import MODEL, Folded, Modes, Plain
from vaerdict.distributions import StandardNormal
from vaerdict.inference import search
from vaerdict.inference.search import ModeSearch, Scope, _guided, _merged
from vaerdict.noise import Sobol, as_source, seeded

X = MODEL.simulate(8, generator=seeded(1))[0]


def searched(model, x: Tensor, d: int, seed: int = 0) -> ModeSearch:
    return ModeSearch(model, x, torch.zeros(len(x), d, dtype=torch.double), source=as_source(seeded(seed)))


def corners(n: int, d: int, radius: float = 3.0) -> Tensor:
    """Some corners of a cube."""
    return radius * torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * d).reshape(-1, d)[:n]


@pytest.mark.parametrize("generator", [seeded(0), Sobol(seeded(0))])
def test_a_single_mode_has_one_kernel_with_the_shape_of_the_posterior(generator):
    found = ModeSearch(MODEL, X, torch.zeros(8, 2, dtype=torch.double), source=as_source(generator))
    exact, kernels = MODEL.posterior(X), found.kernels
    heaviest = kernels.log_share.argmax(0)
    loc = kernels.loc[heaviest, torch.arange(8)]
    torch.testing.assert_close(loc, exact.loc, atol=0.02, rtol=0)
    tril = kernels.tril[heaviest, torch.arange(8)]
    torch.testing.assert_close(tril @ tril.mT, search._INFLATE**2 * exact.covariance(), rtol=1e-4, atol=1e-6)
    scope = found.scope
    assert scope.modes.tolist() == [1] * 8
    assert scope.searches.tolist() == [16 + 8 + 1] * 8
    assert scope.alone.tolist() == [0] * 8
    torch.testing.assert_close(scope.basin, torch.full((8,), 1 - 0.05 ** (1 / 16)).double())
    torch.testing.assert_close(scope.missing, scope.basin)
    assert scope.sufficient.all()
    assert (found.cost >= 1024 + 25).all()


@pytest.mark.parametrize(("n", "d"), [(2, 1), (3, 2), (8, 3)])
def test_separated_modes_are_all_found_in_more_rounds(n, d):
    """A mode with an eighth of the prior is missed by 112 random searches once in three million times."""
    model = Modes(corners(n, d), 0.3)
    found = searched(model, torch.zeros(5, d, dtype=torch.double), d)
    assert found.scope.modes.tolist() == [n] * 5
    assert (found.scope.searches >= 25 + 48).all()
    assert found.scope.sufficient.all()
    share = found.kernels.log_share.exp()
    torch.testing.assert_close(share.sum(0), torch.ones(5).double())
    nearest = (found.kernels.loc.unsqueeze(-2) - model.loc).norm(dim=-1).argmin(-1)
    mass = torch.stack([torch.where(nearest == j, share, 0).sum(0) for j in range(n)])
    assert (mass > 0.3 / n).all()


def test_only_observations_with_several_modes_are_searched_again():
    x = torch.tensor([[2.0, 0.0], [-3.0, 0.0]]).double()  # two modes; and one, because |z_0| cannot be negative
    found = searched(Folded(), x, 2)
    assert found.scope.modes.tolist() == [2, 1]
    assert found.scope.searches.tolist() == [25 + 48, 25]
    assert found.scope.basin[0] < found.scope.basin[1]


def test_more_modes_than_searches_are_not_sufficient():
    axis = 1.2 * (torch.arange(12, dtype=torch.double) - 5.5)
    found = searched(Modes(torch.cartesian_prod(axis, axis), 0.05, 4.0), torch.zeros(3, 2, dtype=torch.double), 2)
    assert (found.scope.alone > search.MAX_ALONE).all()
    assert not found.scope.sufficient.any()


def test_the_scope_in_words():
    two, share = torch.tensor([2, 1]), torch.tensor([0.1, 0.0], dtype=torch.double)
    scope = Scope(two, torch.tensor([50, 25]), share, torch.tensor([0.06, 0.17]).double(), share)
    assert scope.sentence(0) == (
        "2 modes found by 50 searches, 5 of which ended alone; "
        "a mode reached from less than 6% of the prior may be missing"
    )
    assert scope.sentence(1).startswith("1 mode found by 25 searches, 0 of which")
    assert scope.sufficient.tolist() == [True, True]
    assert Scope(two, two, share + 0.1, share, share).sufficient.tolist() == [False, True]
    assert Scope(two, two, share, share, 3 * share).sufficient.tolist() == [False, True]


class Spike:
    """Half of the posterior is a wide normal, half a normal of width 0.05 at (1.5, 0) with a small basin."""

    prior = StandardNormal(2)
    loc, sd = torch.tensor([1.5, 0.0]).double(), 0.05

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        spike = self.prior.log_prob((z - self.loc) / self.sd) - 2 * math.log(self.sd)
        return torch.logaddexp(self.prior.log_prob(z), spike) + 0 * x[..., 0]


def test_guided_starts_find_a_narrow_mode(monkeypatch):
    """Of 1024 draws of the prior about four are within three standard deviations of the spike, of 24 none."""
    x, start = torch.zeros(40, 1, dtype=torch.double), torch.zeros(40, 2, dtype=torch.double)
    guided = ModeSearch(Spike(), x, start, source=as_source(seeded(0))).scope.modes
    monkeypatch.setattr(search, "_guided", lambda z, log_lik, n: z[:n])
    blind = ModeSearch(Spike(), x, start, source=as_source(seeded(0))).scope.modes
    assert (guided == 2).double().mean() > 0.7
    assert (blind == 2).double().mean() < 0.4


def test_guided_draws_are_where_the_likelihood_is_and_several():
    z = torch.randn(1024, 3, 2, generator=seeded(0), dtype=torch.double)
    log_lik = -0.5 * (z - 2).square().sum(-1) / 0.1**2
    chosen = _guided(z, log_lik, 8)
    assert chosen.shape == (8, 3, 2)
    assert ((chosen - 2).norm(dim=-1) < 1.5).all()
    assert all(len(chosen[:, i].unique(dim=0)) >= 4 for i in range(3))
    unusable = _guided(z, torch.full_like(log_lik, torch.nan), 8)
    assert unusable.isfinite().all()


def test_more_starts_report_the_modes_they_gain():
    """The first observation is searched from the mode that the start had missed, the second from a known one."""
    model = Modes(corners(2, 1), 0.05, prior_sd=0.3)  # modes ten standard deviations of the prior away
    x = torch.zeros(2, 1, dtype=torch.double)
    found = ModeSearch(model, x, torch.full((2, 1), -3.0).double(), source=as_source(seeded(0)))
    before = found.scope.searches.clone()
    known = found.kernels.loc.min().item(), found.kernels.loc.max().item()
    gained = found.extend(torch.tensor([0]), torch.full((2, 1, 1), 3.0).double())
    again = found.extend(torch.tensor([0]), torch.full((2, 1, 1), 3.0).double())
    assert known[0] == pytest.approx(-3, abs=0.01)
    assert gained.tolist() == [known[1] < 2.9]
    assert again.tolist() == [False]
    assert (found.scope.searches - before).tolist() == [4, 0]
    assert found.scope.modes[0] == 2


def test_repeated_kernels_are_merged_and_keep_their_share():
    loc = torch.tensor([0.0, 1e-3, 5.0, 0.0]).double().reshape(4, 1, 1)
    tril = torch.tensor([1.0, 1.0, 1.0, 3.0]).double().reshape(4, 1, 1, 1)  # the last is wider
    merged = _merged(loc, tril, torch.tensor([0.1, 0.2, 0.4, 0.3]).double().reshape(4, 1))
    assert merged.log_share.exp().flatten().tolist() == pytest.approx([0.3, 0.4, 0.3])
    assert merged.loc.flatten().tolist() == pytest.approx([0.0, 5.0, 0.0])


def test_an_impossible_observation_has_kernels_too():
    class Impossible:
        prior = Plain.prior

        def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
            return torch.where(x[..., 0] > 0, -torch.inf, self.prior.log_prob(z))

    found = searched(Impossible(), torch.tensor([[0.0], [1.0]]).double(), 1)
    assert found.scope.modes.tolist()[0] == 1
    draws = found.kernels.draw(torch.zeros(2, 1), 100, generator=seeded(0))
    assert draws.z.isfinite().all()
    assert draws.log_q.isfinite().all()
