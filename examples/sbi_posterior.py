"""May a neural posterior estimate of sbi be trusted, and what is the answer where it may not? (extra `sbi`)"""

import contextlib
import tempfile

import torch
from sbi.inference import NPE
from sbi.utils import BoxUniform
from torch.distributions import Independent, Normal

import vaerdict as vd

torch.manual_seed(1)
prior = BoxUniform(-2 * torch.ones(2), 2 * torch.ones(2))
mixing = torch.tensor([[1.0, 0.5], [0.0, 1.0], [0.3, -0.4]])


def likelihood(theta):  # the simulator, as a distribution of x
    return Independent(Normal(theta @ mixing.T, 0.3), 1)


theta = prior.sample((2100,))
with contextlib.chdir(tempfile.mkdtemp()):  # sbi writes logs
    npe = NPE(prior, show_progress_bars=False)
    npe.append_simulations(theta[:2000], likelihood(theta[:2000]).sample())
    npe.train(max_num_epochs=12, training_batch_size=100, learning_rate=2e-3)
    posterior = npe.build_posterior()

x = likelihood(theta[2000:]).sample()
model = vd.from_sbi(posterior, likelihood)
estimate = vd.posterior(model, x, model.encoder, n=1000, seed=0)
leaked = estimate.log_w.isneginf().float().mean()
print(f"sbi is reliable for {(estimate.verdict == vd.Verdict.OK).float().mean():.0%} of 100 observations: ", end="")
print(f"{estimate.ess.median() / 1000:.0%} effective draws, {leaked:.0%} outside the prior")

answer = vd.expect(model, x, lambda z: z, model.encoder, tolerance=0.05, seed=0)
print(f"corrected answers: {(answer.verdict == vd.Verdict.OK).float().mean():.0%} OK")

side = (torch.arange(200) + 0.5) / 50 - 2  # exact, by a sum over the box
grid = torch.cartesian_prod(side, side)
by_sum = likelihood(grid).log_prob(x.unsqueeze(1)).softmax(1) @ grid
by_sbi = posterior.sample_batched((200,), x, show_progress_bars=False).mean(0)
print(f"root mean square error of E[theta | x]: sbi {(by_sbi - by_sum).square().mean().sqrt():.3f}, ", end="")
print(f"corrected {(answer.value - by_sum).square().mean().sqrt():.3f}")
