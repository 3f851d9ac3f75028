from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vaerdict import core
from vaerdict.core import DataError, SettingError, ShapeError, WeightError
from vaerdict.distributions import StandardNormal
from vaerdict.models.ppca import PPCA


class Pair(NamedTuple):
    z: Tensor
    u: Tensor


def test_log_mean_exp_and_log_normalise_work_in_log_space():
    extreme = torch.tensor([[-900.0, 1e4], [-900.0, 1e4]])
    assert torch.equal(core.log_mean_exp(extreme), torch.tensor([-900.0, 1e4]))
    assert torch.equal(core.log_normalise(extreme).exp(), torch.full((2, 2), 0.5))
    log_w = torch.tensor([[0.0], [1.0], [-2.0]], dtype=torch.double)
    torch.testing.assert_close(core.log_mean_exp(log_w), log_w.exp().mean(0).log())
    torch.testing.assert_close(core.log_mean_exp(log_w.mT, dim=1), log_w.exp().mean(0).log())


def test_usable_log_weights_are_returned_unchanged():
    log_w = torch.tensor([[0.0, -torch.inf], [-torch.inf, 3.0]])
    assert core.check_log_weights(log_w) is log_w


@pytest.mark.parametrize(
    ("log_w", "error", "message"),
    [
        (torch.tensor(0.0), ShapeError, r"shape \(\) hold no particle; draw at least one"),
        (torch.zeros(0, 3), ShapeError, "hold no particle"),
        (torch.zeros(2, 3, dtype=torch.long), WeightError, "must be floating point"),
        (torch.tensor([0.0, torch.nan, torch.inf]), WeightError, "1 of 3 log-weights are NaN and 1 are .inf; look for"),
        (
            torch.full((4, 2), -torch.inf),
            WeightError,
            r"2 observations have no particle with positive weight \(at 0, 1\); .* defensive share of the prior",
        ),
        (torch.full((4, 3, 4), torch.nan), WeightError, r"0 are .inf \(at \(0, 0\), \(0, 1\), .*\(1, 0\), \.\.\.\)"),
    ],
)
def test_unusable_log_weights_raise_with_a_count(log_w, error, message):
    with pytest.raises(error, match=message):
        core.check_log_weights(log_w)


@pytest.mark.parametrize("k", [0, -1, 2.5, True, "3"])
def test_counts_must_be_positive_whole_numbers(k):
    with pytest.raises(SettingError, match=r"n_draws=.* must be a whole number of at least 1"):
        core.check_count(k, name="n_draws")
    assert core.check_count(3) == 3
    count = core.check_count(np.int64(3))  # NumPy integers
    assert (count, type(count)) == (3, int)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([[1.0]], DataError, "x is a list; pass a tensor"),
        (torch.zeros(3), ShapeError, r"shape \(3,\); expected \(observations, features\)"),
        (torch.zeros(0, 3), DataError, "is empty; at least one observation"),
        (torch.tensor([[1.0, torch.nan], [torch.inf, 0.0]]), DataError, "2 non-finite values of 4; remove or impute"),
    ],
)
def test_unusable_observations_raise(x, error, message):
    with pytest.raises(error, match=message):
        core.check_observations(x)


def test_usable_observations_are_returned_unchanged():
    x = torch.tensor([[1.0, 2.0], [1.0, 3.0]])  # a constant column is allowed
    assert core.check_observations(x) is x


def test_observations_have_the_floating_point_type_of_the_module():
    double, single = torch.zeros(2, 3, dtype=torch.double), torch.zeros(2, 3)
    layer = nn.ParameterList([torch.zeros(3)])
    with pytest.raises(
        DataError, match=r"x_train is torch.float64, .* ParameterList are torch.float32; .* x_train.float"
    ):
        core.check_dtype(double, layer, name="x_train")
    with pytest.raises(DataError, match=r"are torch.float64; pass x.double\(\)"):
        core.check_dtype(single, nn.ParameterList([double]))
    for x, module in ((single, layer), (single.long(), layer), (double, nn.Identity()), (double, StandardNormal(2))):
        assert core.check_dtype(x, module) is x


def test_integers_become_floating_point():
    x = torch.tensor([[1.5]], dtype=torch.double)
    assert core.floating(x) is x
    assert core.floating(torch.tensor([[3]])).dtype == torch.get_default_dtype()


def test_latents_may_be_tensors_or_named_tuples():
    pair = Pair(torch.zeros(2, 3), torch.ones(2, 1))
    doubled = core.map_latent(lambda t: 2 * t + 1, pair)
    assert isinstance(doubled, Pair)
    assert doubled.u.unique().tolist() == [3.0]
    assert core.map_latent(torch.exp, torch.zeros(1)).item() == 1
    both = core.concat_latents([pair, pair])
    assert isinstance(both, Pair)
    assert both.z.shape == (4, 3)
    assert core.concat_latents([pair.z, pair.z], dim=1).shape == (2, 6)


def test_broadcast_helpers():
    assert core.expand_trailing(torch.zeros(4, 3), torch.zeros(4, 3, 2, 5)).shape == (4, 3, 1, 1)
    assert core.expand_trailing(torch.zeros(4, 3), torch.zeros(4, 3)).shape == (4, 3)
    assert core.per_member(torch.zeros(5), 1).shape == (5,)
    assert core.per_member(torch.zeros(7, 5), 1).shape == (7, 1, 5)
    assert core.per_member(torch.zeros(7), 0).shape == (7, 1)


def test_models_proposals_and_priors_are_recognised():
    model = PPCA(torch.eye(3, 2), 1.0)
    assert isinstance(model, core.Model)
    assert isinstance(model.prior, core.PriorDistribution)
    assert isinstance(torch.distributions.Normal(0.0, 1.0), core.PriorDistribution)
    assert isinstance(StandardNormal(2), core.Proposal)
    assert not isinstance(torch.nn.Identity(), core.Model)


def test_prepared_calls_prepare_where_it_is_offered():
    class Model:
        def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x.sum(-1)

    x = torch.ones(2, 3)
    assert core.prepared(PPCA(torch.eye(3, 2), 1.0), x) is x
    assert core.prepared(Model(), x)[1].tolist() == [3, 3]  # type: ignore[arg-type]


def test_every_error_is_a_vaerdict_error_and_the_default_progress_is_silent():
    for error in (ShapeError, WeightError, DataError, SettingError, core.DivergenceError):
        assert issubclass(error, core.VaerdictError)
    assert core.silent(1, 2, "steps") is None


@pytest.mark.parametrize(
    ("log_p", "log_q", "z", "message"),
    [
        (torch.zeros(()), (5, 3), (5, 3, 2), r"log_joint returned shape \(\) for latents of shape \(5, 3, 2\)"),
        (torch.zeros(5, 3, 2), (5, 3), (5, 3, 2), r"one number per particle and observation, shape \(5, 3\)"),
        (0.0, (5, 3), (5, 3, 2), "log_joint returned a float"),
        (torch.zeros(5, 3), (5,), (5, 3, 2), r"need log q\(z \| x\) of shape \(5, 3\), not \(5,\)"),
    ],
)
def test_log_densities_that_would_broadcast_raise(log_p, log_q, z, message):
    with pytest.raises(ShapeError, match=message):
        core.check_log_joint(log_p, torch.zeros(log_q), torch.zeros(z))


def test_log_densities_of_a_named_tuple_have_the_shape_of_log_q():
    pair, log_p = Pair(torch.zeros(5, 3, 2), torch.zeros(5, 3, 1)), torch.zeros(5, 3)
    assert core.check_log_joint(log_p, log_p, pair) is log_p
    with pytest.raises(ShapeError, match="for latents Pair"):
        core.check_log_joint(log_p.sum(), log_p, pair)


def test_modules_are_in_evaluation_mode_inside_the_context_and_restored():
    class Owner:
        def __init__(self) -> None:
            self.net, self.others = torch.nn.Dropout(), {"q": torch.nn.Dropout()}

    owner, frozen = Owner(), torch.nn.Dropout().eval()
    stack = torch.nn.Sequential(torch.nn.Dropout(), frozen)
    modules = [owner.net, owner.others["q"], stack, stack[0]]
    with core.evaluating({"a": owner}, stack, None, 3):
        assert not any(m.training for m in modules)
    assert all(m.training for m in modules)
    assert not frozen.training
    with pytest.raises(ZeroDivisionError), core.evaluating(stack):
        _ = 1 / 0
    assert stack.training


def test_saved_bytes_count_each_storage_once():
    x = torch.zeros(10, requires_grad=True)
    assert core.saved_bytes(lambda: x + 1) == 0
    assert core.saved_bytes(lambda: x.exp()) == 40
    assert core.saved_bytes(lambda: x * x) == 40  # two factors with one storage
    assert core.saved_bytes(lambda: x.exp() * x.exp()) == 80  # two outputs, which are also factors
