from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checks import assert_mean
from vaerdict import networks
from vaerdict.core import SettingError, ShapeError
from vaerdict.networks import CNN, MLP, Dropout, Joint, Linear, linear, stack, unstack
from vaerdict.noise import seeded


def members(n: int = 3, **settings: Tensor) -> list[MLP]:
    return [MLP(4, 2, (8, 8), generator=seeded(s), **settings).double() for s in range(n)]  # type: ignore[arg-type]


@pytest.mark.parametrize("lead", [(), (5,), (5, 6)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_stacked_linear_map_is_one_map_per_member(lead, with_bias, generator):
    x = torch.randn(*lead, 3, 7, 4, generator=generator, dtype=torch.double)
    weight = torch.randn(3, 2, 4, generator=generator, dtype=torch.double)
    bias = torch.randn(3, 2, generator=generator, dtype=torch.double) if with_bias else None
    out = linear(x, weight, bias)
    assert out.shape == (*lead, 3, 7, 2)
    for m in range(3):
        alone = linear(x[..., m, :, :], weight[m], None if bias is None else bias[m])
        torch.testing.assert_close(out[..., m, :, :], alone)


@pytest.mark.parametrize("differ", [False, True])
def test_a_stack_gives_the_outputs_of_its_members(differ, generator):
    nets = members()
    for i, net in enumerate(nets):
        net.center.fill_(0.5 + i * differ)
        net.spread.fill_(2.0 + i * differ)
    stacked = stack(nets)
    assert stacked.center.shape == ((3, 4) if differ else (4,))  # equal buffers are shared
    x = torch.randn(6, 3, 7, 4, generator=generator, dtype=torch.double)
    out = stacked(x)
    for m, net in enumerate(nets):
        torch.testing.assert_close(out[:, m], net(x[:, m]), rtol=1e-12, atol=1e-12)


def test_stack_and_unstack_are_inverse_and_share_no_memory():
    nets = members()
    nets[1].center.fill_(3.0)
    nets[0].layers[0].bias.requires_grad_(False)
    stacked = stack(nets)
    assert not stacked.get_parameter("layers.0.bias").requires_grad
    assert stacked.get_parameter("layers.0.weight").requires_grad
    for m, net in enumerate(nets):
        member = unstack(stacked, nets[0], m)
        for name, value in net.state_dict().items():
            assert torch.equal(member.state_dict()[name], value), name
    before = nets[0].layers[0].weight.clone()
    with torch.no_grad():
        stacked.get_parameter("layers.0.weight").zero_()
    assert torch.equal(nets[0].layers[0].weight, before)


def test_gradients_of_a_stack_stay_with_their_member(generator):
    stacked = stack(members())
    x = torch.randn(3, 7, 4, generator=generator, dtype=torch.double)
    stacked(x)[1].sum().backward()
    gradient = stacked.get_parameter("layers.0.weight").grad
    assert gradient is not None
    assert gradient[1].abs().sum() > 0
    assert gradient[[0, 2]].abs().sum() == 0


def test_modules_that_cannot_be_stacked_raise():
    with pytest.raises(SettingError, match="needs at least one module"):
        stack([])
    with pytest.raises(SettingError, match="one stackable class can be stacked, not Identity; train them one by one"):
        stack([nn.Identity()])
    with pytest.raises(SettingError, match="not Identity, MLP"):
        stack([members(1)[0], nn.Identity()])
    with pytest.raises(ShapeError, match=r"'layers.0.weight' differs in shape between members"):
        stack([MLP(4, 2, (8,), generator=seeded(0)), MLP(4, 2, (9,), generator=seeded(0))])
    assert not networks.stackable(nn.Identity())


@pytest.mark.parametrize("shape", [(7, 4), (2, 7, 4)])
def test_input_without_the_member_axis_raises(shape):
    with pytest.raises(ShapeError, match=r"a stack of 3 members needs input \(\.\.\., 3, n, in\), got"):
        stack(members())(torch.zeros(*shape, dtype=torch.double))


@pytest.mark.parametrize("features", [1, 5])
def test_input_with_another_number_of_features_raises(features):
    with pytest.raises(ShapeError, match=f"x has {features} features, the network takes 4"):
        members(1)[0](torch.zeros(7, features))
    with pytest.raises(ShapeError, match=f"input has {features} features, the layer takes 4"):
        Linear(4, 2, generator=seeded(0))(torch.zeros(7, features))


def test_initial_weights_are_bounded_and_drawn_from_the_generator(generator):
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


# -------------------------------------------------------------------------------------------- affine maps on a GPU
@pytest.mark.parametrize("rows", [2 * networks._SPLITS, 5])
def test_the_affine_map_of_a_gpu_has_the_values_and_derivatives_of_products(rows, generator):
    x = torch.randn(2, rows, 3, generator=generator, dtype=torch.double, requires_grad=True)
    weight = torch.randn(2, 4, 3, generator=generator, dtype=torch.double, requires_grad=True)
    bias = torch.randn(2, 4, generator=generator, dtype=torch.double, requires_grad=True)
    affine, arguments = networks._Affine.apply, (x, weight, bias)
    plain = x @ weight.mT + bias.unsqueeze(1)
    torch.testing.assert_close(affine(*arguments), plain)
    up = torch.randn(2, rows, 4, generator=generator, dtype=torch.double)
    gradients = torch.autograd.grad(affine(*arguments), arguments, up)
    for gradient, expected in zip(gradients, torch.autograd.grad(plain, arguments, up), strict=True):
        torch.testing.assert_close(gradient, expected)
    few = tuple(t.detach().requires_grad_() for t in (x[:, :5, :2], weight[:, :2, :2], bias[:, :2]))
    with torch.random.fork_rng():  # the checks draw their directions from the global state
        assert torch.autograd.gradcheck(affine, few)
        assert torch.autograd.gradgradcheck(affine, few)
    fixed = affine(x, weight.detach(), bias.detach())  # only the gradients that are needed
    assert torch.equal(torch.autograd.grad(fixed, x, up)[0], gradients[0])


# -------------------------------------------------------------------------------------------------------- dropout
def test_dropout_preserves_the_mean(generator):
    h = torch.full((400, 500), 3.0, dtype=torch.double)
    dropped = Dropout(0.3, (generator,))(h)
    torch.testing.assert_close(dropped.unique(), torch.tensor([0, 3 / 0.7], dtype=torch.double), rtol=1e-6, atol=0)
    assert_mean(dropped, 3.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(0.98 * dropped, 3.0, rate=1e-6)


def test_dropout_of_rate_zero_uses_no_random_numbers(generator):
    before, h = generator.get_state(), torch.ones(3, 4)
    assert Dropout(0.0, (generator,))(h) is h
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("lead", [(), (5,), (2, 5)])
def test_each_member_of_a_stack_has_its_dropout_generator(lead):
    h = torch.ones(*lead, 3, 7, 4)
    stacked = Dropout(0.5, tuple(seeded(s) for s in range(3)))(h)
    for m in range(3):
        assert torch.equal(stacked[..., m, :, :], Dropout(0.5, (seeded(m),))(h[..., m, :, :]))
    assert not torch.equal(stacked[..., 0, :, :], stacked[..., 1, :, :])


def test_an_mlp_applies_dropout_after_every_hidden_layer_only(generator):
    net, x = members(1)[0], torch.randn(7, 4, generator=generator, dtype=torch.double)
    halved = net.layers[2](0.5 * F.relu(net.layers[1](0.5 * F.relu(net.layers[0](x)))))
    torch.testing.assert_close(net(x, lambda h: 0.5 * h), halved)


# ----------------------------------------------------------------------------------------- class and vector
def joints(n: int) -> list[Joint]:
    return [Joint(3, 2, 4, (8, 6), generator=seeded(s)).double() for s in range(n)]


def test_a_joint_network_is_a_perceptron_of_the_concatenated_inputs(generator):
    (net,) = joints(1)
    c, v = torch.eye(3, dtype=torch.double)[[0, 2, 1, 1]], torch.randn(4, 2, generator=generator, dtype=torch.double)
    weight = torch.cat([net.of_class.weight, net.of_vector.weight], 1)
    first = F.selu(F.linear(torch.cat([c, v], 1), weight, net.of_class.bias + net.of_vector.bias))
    torch.testing.assert_close(net(c, v), net.rest(first))


@pytest.mark.parametrize("members", [0, 2])
def test_the_inputs_of_a_joint_network_broadcast(members, generator):
    net = stack(joints(members)) if members else joints(1)[0]
    batch = (members, 6) if members else (6,)
    v = torch.randn(5, *batch, 2, generator=generator, dtype=torch.double)
    ones = (1,) * len(batch[:-1])
    c = torch.eye(3, dtype=torch.double).reshape(3, 1, *ones, 1, 3).expand(3, 1, *batch[:-1], 1, 3)
    out = net(c, v)
    assert out.shape == (3, 5, *batch, 4)
    torch.testing.assert_close(out, net(c.expand(3, 5, *batch, 3), v.expand(3, 5, *batch, 2)))
    for i, member in enumerate(joints(members)):
        torch.testing.assert_close(out[:, :, i], member(c[:, :, i], v[:, i]), rtol=1e-12, atol=1e-12)


# --------------------------------------------------------------------------------------------------- convolutions
def by_torch(net: CNN, x: Tensor) -> Tensor:
    h = x.reshape(-1, 1, *net.image_shape)
    for layer in net.convolutions:
        weight = layer.get_parameter("weight")
        h = F.conv2d(h, weight.reshape(len(weight), -1, 3, 3), layer.get_parameter("bias"), padding=net.padding)
        h = F.selu(F.max_pool2d(h, 2) if min(h.shape[-2:]) > 1 else h)
    return net.head(h.flatten(1))


def cnns(image_shape: tuple[int, int], n: int = 3, padded: bool = True) -> list[CNN]:
    return [CNN(image_shape, 4, (3, 5, 2), (6,), padded=padded, generator=seeded(s)).double() for s in range(n)]


@pytest.mark.parametrize(
    ("image_shape", "padded"),
    [((8, 8), True), ((7, 9), True), ((5, 4), True), ((3, 2), True), ((1, 6), True), ((28, 22), False)],
)
def test_convolutions_agree_with_torch_on_images_of_any_size(image_shape, padded, generator):
    (net,) = cnns(image_shape, 1, padded)
    x = torch.randn(6, image_shape[0] * image_shape[1], generator=generator, dtype=torch.double)
    torch.testing.assert_close(net(x), by_torch(net, x), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(net(x.reshape(2, 3, -1)), net(x).reshape(2, 3, -1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(net(x, lambda h: 0.5 * h), by_torch_halved(net, x), rtol=1e-10, atol=1e-12)


def by_torch_halved(net: CNN, x: Tensor) -> Tensor:
    """The network with its hidden units after the convolutions halved."""
    bias = net.head.layers[1].get_parameter("bias")
    return 0.5 * (by_torch(net, x) - bias) + bias


@pytest.mark.parametrize("lead", [(), (5,), (2, 3)])
def test_a_stack_of_convolutional_networks_gives_the_outputs_of_its_members(lead, generator):
    nets = cnns((5, 4))
    x = torch.randn(*lead, 3, 7, 20, generator=generator, dtype=torch.double)
    out = stack(nets)(x)
    for m, net in enumerate(nets):
        torch.testing.assert_close(out[..., m, :, :], net(x[..., m, :, :]), rtol=1e-10, atol=1e-12)


def test_images_of_another_size_or_without_the_member_axis_raise():
    with pytest.raises(ShapeError, match=r"images have 16 pixels, the network takes \(5, 4\)"):
        cnns((5, 4))[0](torch.zeros(7, 16, dtype=torch.double))
    for shape in ((6, 20), (2, 6, 20), (3, 2, 6, 20)):
        with pytest.raises(ShapeError, match="a stack of 3 members needs input"):
            stack(cnns((5, 4)))(torch.zeros(*shape, dtype=torch.double))
