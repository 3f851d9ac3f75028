from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vaerdict import networks
from vaerdict.core import SettingError, ShapeError
from vaerdict.networks import MLP, Linear, linear, stack, unstack
from vaerdict.noise import seeded


def members(n: int = 3, **settings: Tensor) -> list[MLP]:
    return [MLP(4, 2, (8, 8), generator=seeded(s), **settings).double() for s in range(n)]  # type: ignore[arg-type]


@pytest.mark.parametrize("lead", [(), (5,), (5, 6)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_stacked_linear_map_is_one_map_a_member(lead, with_bias, generator):
    x = torch.randn(*lead, 3, 7, 4, generator=generator, dtype=torch.double)
    weight = torch.randn(3, 2, 4, generator=generator, dtype=torch.double)
    bias = torch.randn(3, 2, generator=generator, dtype=torch.double) if with_bias else None
    out = linear(x, weight, bias)
    assert out.shape == (*lead, 3, 7, 2)
    for m in range(3):
        alone = linear(x[..., m, :, :], weight[m], None if bias is None else bias[m])
        torch.testing.assert_close(out[..., m, :, :], alone)


@pytest.mark.parametrize("differ", [False, True])
def test_a_stack_gives_what_its_members_give(differ, generator):
    parts = members()
    for i, part in enumerate(parts):
        part.center.fill_(0.5 + i * differ)
        part.spread.fill_(2.0 + i * differ)
    whole = stack(parts)
    assert whole.center.shape == ((3, 4) if differ else (4,))  # equal buffers are shared
    x = torch.randn(6, 3, 7, 4, generator=generator, dtype=torch.double)
    out = whole(x)
    for m, part in enumerate(parts):
        torch.testing.assert_close(out[:, m], part(x[:, m]), rtol=1e-12, atol=1e-12)


def test_stack_and_unstack_are_inverse_and_share_nothing():
    parts = members()
    parts[1].center.fill_(3.0)
    parts[0].layers[0].bias.requires_grad_(False)
    whole = stack(parts)
    assert not whole.get_parameter("layers.0.bias").requires_grad
    assert whole.get_parameter("layers.0.weight").requires_grad
    for m, part in enumerate(parts):
        back = unstack(whole, parts[0], m)
        for name, value in part.state_dict().items():
            assert torch.equal(back.state_dict()[name], value), name
    before = parts[0].layers[0].weight.clone()
    with torch.no_grad():
        whole.get_parameter("layers.0.weight").zero_()
    assert torch.equal(parts[0].layers[0].weight, before)


def test_gradients_of_a_stack_stay_with_their_member(generator):
    whole = stack(members())
    x = torch.randn(3, 7, 4, generator=generator, dtype=torch.double)
    whole(x)[1].sum().backward()
    gradient = whole.get_parameter("layers.0.weight").grad
    assert gradient is not None
    assert gradient[1].abs().sum() > 0
    assert gradient[[0, 2]].abs().sum() == 0


def test_what_cannot_be_stacked_is_refused():
    with pytest.raises(SettingError, match="needs at least one module"):
        stack([])
    with pytest.raises(SettingError, match="one stackable kind can be stacked, not Identity; keep them apart"):
        stack([nn.Identity()])
    with pytest.raises(SettingError, match="not Identity, MLP"):
        stack([members(1)[0], nn.Identity()])
    with pytest.raises(ShapeError, match=r"'layers.0.weight' differs in shape between members"):
        stack([MLP(4, 2, (8,), generator=seeded(0)), MLP(4, 2, (9,), generator=seeded(0))])
    assert not networks.stackable(nn.Identity())


@pytest.mark.parametrize("shape", [(7, 4), (2, 7, 4)])
def test_input_without_the_member_axis_is_refused(shape):
    with pytest.raises(ShapeError, match=r"a stack of 3 members needs input \(\.\.\., 3, n, in\), got"):
        stack(members())(torch.zeros(*shape, dtype=torch.double))


@pytest.mark.parametrize("features", [1, 5])
def test_input_with_other_features_is_refused(features):
    with pytest.raises(ShapeError, match=f"x has {features} features, the network takes 4"):
        members(1)[0](torch.zeros(7, features))
    with pytest.raises(ShapeError, match=f"input has {features} features, the layer takes 4"):
        Linear(4, 2, generator=seeded(0))(torch.zeros(7, features))


def test_networks_start_from_their_generator_within_reach(generator):
    first, again, other = (Linear(16, 200, generator=seeded(s)) for s in (0, 0, 1))
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    assert first.weight.abs().max() <= 0.25
    assert first.weight.abs().max() > 0.24


def test_an_mlp_standardises_and_alternates_maps_and_activations(generator):
    x = torch.randn(5, 3, generator=generator)
    net = MLP(
        3, 2, (4,), generator=generator, activation=torch.tanh, center=torch.ones(3), spread=torch.full((3,), 2.0)
    )
    by_hand = net.layers[1](torch.tanh(net.layers[0]((x - 1) / 2)))
    torch.testing.assert_close(net(x), by_hand)
    flat = MLP(3, 2, (), generator=generator)
    assert len(flat.layers) == 1
    torch.testing.assert_close(flat(x), flat.layers[0](x))
