"""Adam on the parameters of a stack, learning-rate factors, and steps replayed as CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from training_toys import COUNTS, SHORT, TRUE, count_member, stack_of
from vaerdict.core import SettingError
from vaerdict.models.counts import CountModel
from vaerdict.models.ppca import PPCA
from vaerdict.noise import seeded
from vaerdict.training import train
from vaerdict.training.optimiser import Adam, FlatParameters, allow_tf32, make_graphed_step


# ------------------------------------------------------------------------------------------------------ Adam
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adam_is_torchs_adam_for_each_member(dtype):
    g = seeded(0)
    module = nn.ParameterList([torch.randn(3, 4, 2, generator=g).to(dtype), torch.randn(3, 5, generator=g).to(dtype)])
    copies = [[p[i].detach().clone().requires_grad_() for p in module] for i in range(3)]
    rates = [1e-1, 1e-2, 0.0]
    flat = FlatParameters(module, 3)
    adam = Adam(flat, 1.0)
    adam.lr.copy_(torch.tensor(rates, dtype=torch.double)[:, None])
    peers = [torch.optim.Adam(c, lr) for c, lr in zip(copies, rates, strict=True)]

    def objective(parts: list[Tensor]) -> Tensor:
        return (parts[0] - 1).pow(4).sum() + 1e-3 * (parts[1] * 3).sin().sum()

    for _ in range(25):
        adam.step(flat.gradient(torch.stack([objective([p[i] for p in module]) for i in range(3)])))
        for c, peer in zip(copies, peers, strict=True):
            peer.zero_grad()
            objective(c).backward()
            peer.step()
        allowed = {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 2e-6, "atol": 2e-7}
        for i, c in enumerate(copies):
            for stacked, single in zip(module, c, strict=True):
                torch.testing.assert_close(stacked[i], single, **allowed)


def test_parameters_are_views_of_one_matrix():
    module = nn.ParameterList([torch.zeros(2, 3), torch.ones(2)])
    module.append(nn.Parameter(torch.full((2,), 7.0), requires_grad=False))
    flat = FlatParameters(module, 2)
    assert len(flat) == 8  # three columns and one, each filled up to four
    flat.values[1] = 5.0
    assert module[0].tolist() == [[0, 0, 0], [5, 5, 5]]
    assert module[1].tolist() == [1, 5]
    assert module[2].tolist() == [7, 7]
    unused = flat.gradient(module[0].sum(1))  # the gradient of a parameter that the loss does not use is zero
    assert unused.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]] * 2


def test_every_parameter_of_every_member_begins_at_a_multiple_of_16_bytes():
    module = nn.ParameterList([torch.randn(3, size, generator=seeded(size)) for size in (5, 1, 8, 3)])
    before = [p.detach().clone() for p in module]
    flat = FlatParameters(module, 3)
    assert all(p[i].data_ptr() % 16 == 0 for p in module for i in range(3))
    assert all(torch.equal(p, old) for p, old in zip(module, before, strict=True))
    adam = Adam(flat, 0.1)
    adam.step(flat.gradient(sum(p.sum(1) for p in module)))
    assert flat.values[:, 5:8].abs().max() == 0  # what fills up is never trained


def test_a_masked_step_does_not_change_the_other_members():
    module = nn.ParameterList([torch.randn(3, 4, generator=seeded(0))])
    adam = Adam(FlatParameters(module, 3), 0.1)
    adam.step(torch.randn(3, 4, generator=seeded(1)))
    before = [t.clone() for t in adam.tensors()]
    gradient = torch.randn(3, 4, generator=seeded(2))
    gradient[0] = torch.nan  # does not reach a member outside the mask
    adam.step(gradient, torch.tensor([False, True, True]))
    for old, new in zip(before, adam.tensors(), strict=True):
        assert torch.equal(old[0], new[0])
        assert not torch.equal(old[1:], new[1:])
        assert torch.isfinite(new).all()


def test_adam_resumes_from_its_state():
    gradients = torch.randn(6, 2, 4, generator=seeded(0))
    full, first, second = (Adam(FlatParameters(nn.ParameterList([torch.ones(2, 4)]), 2), 0.1) for _ in range(3))
    for g in gradients:
        full.step(g)
    for g in gradients[:3]:
        first.step(g)
    second.load({name: t.clone() for name, t in first.state().items()})
    for g in gradients[3:]:
        second.step(g)
    assert all(torch.equal(a, b) for a, b in zip(full.state().values(), second.state().values(), strict=True))


# ----------------------------------------------------------------------------------------------- learning-rate factors
class Two(nn.Module):
    rates = {"fast": 10.0}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))


def test_named_parameters_have_larger_learning_rates():
    module = Two()
    flat = FlatParameters(module, 1)
    Adam(flat, 0.01).step(torch.ones(1, len(flat)))
    assert module.fast.tolist() == pytest.approx([-0.1] * 3)
    assert module.slow.flatten().tolist() == pytest.approx([-0.01] * 4)


def test_factors_apply_to_every_member_of_a_stack():
    stack = stack_of(*(count_member(i) for i in range(2)))
    rates = stack.theta.flat.rates
    assert rates is not None
    assert rates.shape == (1, len(stack.theta.flat))
    assert (rates == 10).sum() == COUNTS.shape[1]
    before = [p.clone() for p in (stack.model.log_dispersion, stack.model.decoder.layers[0].bias)]
    stack.theta.step(torch.ones(2, len(stack.theta.flat)))
    for old, new, rate in zip(
        before, (stack.model.log_dispersion, stack.model.decoder.layers[0].bias), (0.1, 0.01), strict=True
    ):
        torch.testing.assert_close(old - new, torch.full_like(old, rate), rtol=1e-4, atol=0)


def test_a_module_without_factors():
    assert FlatParameters(PPCA(TRUE.weight, 1.0), 1).rates is None


def test_a_checkpoint_distinguishes_factors(tmp_path, monkeypatch):
    train([count_member(0)], COUNTS, COUNTS, SHORT, checkpoint=tmp_path)
    monkeypatch.setattr(CountModel, "rates", {"log_dispersion": 3.0})
    with pytest.raises(SettingError, match="another run"):
        train([count_member(0)], COUNTS, COUNTS, SHORT, checkpoint=tmp_path)


# ---------------------------------------------------------------------------------------------------------- graphs
def test_on_a_cpu_the_graphed_step_is_the_step_itself(generator):
    calls: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        calls.append(x)
        return x

    assert make_graphed_step(step, (torch.zeros(2),), [generator], []) is step
    assert calls == []


def test_the_tf32_setting_is_restored():
    before = torch.backends.cuda.matmul.allow_tf32
    with allow_tf32(torch.device("cpu")):
        assert torch.backends.cuda.matmul.allow_tf32 == before
    with allow_tf32(torch.device("cuda")):
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before
    with pytest.raises(ZeroDivisionError), allow_tf32(torch.device("cuda")):
        _ = 1 / 0
    assert torch.backends.cuda.matmul.allow_tf32 == before
