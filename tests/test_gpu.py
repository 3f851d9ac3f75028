"""The same code on a CUDA device: run by `make test-gpu` where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import sparse

from vaerdict import diagnostics
from vaerdict.inference import expect, posterior
from vaerdict.models import M1M2, PPCA, recognition
from vaerdict.models.counts import CountModel
from vaerdict.networks import CNN, stack
from vaerdict.noise import Sobol, seeded
from vaerdict.proposals import Normal, OfCounts, Prior, Student
from vaerdict.refinement import refine
from vaerdict.samplers import ais, smc
from vaerdict.training import (
    CHI,
    IWAE,
    VAE,
    WW,
    Member,
    SemiData,
    SemiMember,
    SemiSettings,
    Settings,
    semi_recipe,
    train,
)
from vaerdict.training.optimiser import make_graphed_step
from vaerdict.training.semisupervised_stack import SemiStack, stack_data
from vaerdict_paper.benchmarks import gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _problem() -> tuple[PPCA, torch.Tensor]:
    g = seeded(0)
    model = PPCA(torch.randn(10, 6, generator=g) / 6**0.5, 0.7)
    x, _ = model.simulate(256, generator=g)
    return model, x


def test_psis_agrees_with_the_cpu():
    log_w = torch.randn(5000, 100, generator=seeded(1), dtype=torch.float64)
    smoothed, khat = diagnostics.psis(log_w)
    smoothed_gpu, khat_gpu = diagnostics.psis(log_w.cuda())
    torch.testing.assert_close(khat_gpu.cpu(), khat, atol=1e-6, rtol=0)
    torch.testing.assert_close(smoothed_gpu.cpu(), smoothed, atol=1e-6, rtol=0)


def test_a_posterior_is_resampled_by_a_generator_of_either_device():
    model, x = _problem()
    answer = posterior(model.cuda(), x.cuda(), Prior(model.prior), 500)
    for device in ("cpu", "cuda"):
        assert answer.resample(40, generator=seeded(0, device)).shape == (40, 256, 6)


def test_training_reaches_the_same_evidence():
    model, x = _problem()
    settings = Settings(n_particles=10, epochs=40, patience=None, check_every=40)

    def members() -> list[Member]:
        families = (Normal(), Normal(), Normal(full=True), Student())
        return [
            Member(PPCA(model.weight, 1.0), f.make(x, 6, hidden=(32,), generator=seeded(s)), r, s)
            for s, (r, f) in enumerate(zip((VAE, IWAE, WW, CHI), families, strict=True))
        ]

    on_cpu = train(members(), x[:200], x[200:], settings)
    on_gpu = train(members(), x[:200], x[200:], settings, device="cuda")
    for a, b in zip(on_cpu, on_gpu, strict=True):
        # other random numbers, the same optimum
        assert abs(a.history[-1][1] - b.history[-1][1]) < 0.15


@pytest.mark.parametrize("source", [lambda: seeded(2, "cuda"), lambda: Sobol(seeded(2, "cuda"))])
def test_posterior_expectations_agree_with_the_exact_ones(source):
    model, x = _problem()
    on_gpu = PPCA(model.weight.cuda(), 0.7).cuda()
    q = Student(full=True).make(x, 6, hidden=(32,), generator=seeded(0)).cuda()
    local = refine(on_gpu, x.cuda(), q).distribution
    answer = posterior(on_gpu, x.cuda(), {"REFINED": local, "PRIOR": Prior(on_gpu.prior)}, 4000, seed=source())
    estimate = answer.expect(lambda z: (z[..., 0] >= 0.5).double())
    exact = on_gpu.tail_probability(x.cuda(), 0.5)
    assert estimate.value.is_cuda
    assert ((estimate.value - exact).abs() <= 6 * estimate.mcse + 1e-3).all()


def test_escalation_and_samplers_run_on_a_gpu():
    model, x = _problem()
    on_gpu, x = PPCA(model.weight.cuda(), 0.7).cuda(), x[:32].cuda()
    answer = expect(on_gpu, x, lambda z: (z[..., 0] >= 0.5).double(), tolerance=0.05)
    exact = on_gpu.tail_probability(x, 0.5)
    assert (answer.verdict == 0).all()
    assert ((answer.value - exact).abs() < 0.2).all()
    prior = Prior(on_gpu.prior)
    for result in (
        smc(on_gpu, x, prior, n_particles=512, generator=seeded(0, "cuda")),
        ais(on_gpu, x, prior, n_chains=64, temperatures=100, generator=seeded(0, "cuda")),
    ):
        error = (result.log_evidence - on_gpu.log_evidence(x)).abs()
        assert (error <= 6 * result.standard_error + 0.1).all()


def test_a_stack_of_convolutional_networks_agrees_with_the_cpu():
    networks = [CNN((7, 6), 4, (3, 5), (6,), generator=seeded(s)).double() for s in range(3)]
    on_cpu = stack(networks)
    # 16 images: enough for split gradients too
    x = torch.rand(3, 16, 42, generator=seeded(9), dtype=torch.double)
    on_gpu = stack(networks).cuda()
    torch.testing.assert_close(on_gpu(x.cuda()).cpu(), on_cpu(x), rtol=1e-10, atol=1e-12)
    gradients = [
        torch.autograd.grad(net(x.to(device)).square().sum(), list(net.parameters()))
        for net, device in ((on_cpu, "cpu"), (on_gpu, "cuda"))
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-8, atol=1e-10)


def _semi_stack(names: tuple[str, ...], settings: SemiSettings) -> SemiStack:
    g = seeded(0)
    x, labels = (torch.rand(64, 16, generator=g) < 0.5).float(), torch.arange(20) % 3
    members = []
    for seed, name in enumerate(names):
        model = M1M2(16, 3, d_z=2, d_u=2, hidden=(8,), generator=seeded(seed))
        df = 5.0 if name == "CHI" else None
        q = recognition(model, image_shape=(4, 4), hidden=(8,), df=df, generator=seeded(seed))
        members.append(SemiMember(model, q, semi_recipe(name), seed))
    data = stack_data([SemiData(x, torch.arange(20), labels)] * len(names), torch.device("cuda"))
    return SemiStack(members, data, settings, learn_model=True)


@pytest.mark.parametrize("names", [("VAE", "IWAE"), ("WW",), ("CHI", "CHI")])
@pytest.mark.parametrize("relaxed", [True, False])
def test_a_graphed_step_is_the_step(names, relaxed):
    settings = SemiSettings(4, batch_size=16, labelled_batch=8, relaxed=relaxed, shifts=1, image_shape=(4, 4))
    eager, replayed = _semi_stack(names, settings), _semi_stack(names, settings)
    step = make_graphed_step(
        replayed.step, (replayed.shuffled()[0],), replayed.generators, [*replayed.adam.tensors(), replayed.adam.lr]
    )
    assert torch.equal(eager.adam.flat.values, replayed.adam.flat.values)  # the state before recording is restored
    eager.shuffled()
    for _ in range(3):
        eager.adam.lr.mul_(0.5)
        replayed.adam.lr.mul_(0.5)
        for index, again in zip(eager.shuffled(), replayed.shuffled(), strict=True):
            assert torch.equal(index, again)
            torch.testing.assert_close(step(again), eager.step(index), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(replayed.adam.flat.values, eager.adam.flat.values, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("convert", [torch.as_tensor, sparse.csr_matrix])
@pytest.mark.parametrize("joint", [True, False])
def test_training_by_graphs_gives_the_results_of_training(joint, convert):
    x = torch.poisson(torch.full((160, 12), 3.0), generator=seeded(0)) + 1
    settings = Settings(n_particles=4, epochs=3, batch_size=32, patience=None, check_every=3, joint=joint)

    def members() -> list[Member]:
        return [
            Member(
                CountModel.start(x, 3, generator=seeded(s), hidden=(8,)),
                OfCounts().make(x, 3, hidden=(8,), generator=seeded(s)),
                recipe,
                s,
            )
            for s, recipe in enumerate((VAE, IWAE, WW, CHI))
        ]

    eager, replayed = (
        train(members(), convert(x[:128]), x[128:], replace(settings, graphs=graphs), device="cuda")
        for graphs in (False, True)
    )
    for a, b in zip(eager, replayed, strict=True):
        for old, new in zip(a.model.parameters(), b.model.parameters(), strict=True):
            torch.testing.assert_close(new, old, rtol=1e-3, atol=1e-4)
        assert a.history[-1][1] == pytest.approx(b.history[-1][1], abs=1e-2)


def test_steps_of_every_grid_can_be_graphed():
    device = torch.device("cuda")
    for make in [make for grid in (gpu._mnist, gpu._genes, gpu._ppca) for make in grid(gpu.SMALL, device)]:
        work = make()
        assert gpu._replayed(work, device) is not None, (work.grid, work.case)


@pytest.mark.parametrize(("n_ranks", "backend"), [(1, "nccl"), (torch.cuda.device_count() + 1, "gloo")])
def test_ranks_train_on_gpus_and_share_them_if_there_are_too_few(n_ranks, backend):
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
    done = subprocess.run(
        [sys.executable, *ranks, "examples/train_parallel.py", "cuda"],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{n_ranks} ranks on cuda by {backend}" in done.stdout
