"""A posterior probability from a model of your own: any module with `prior` and `log_joint(x, z)`."""

import torch
from torch.distributions import Independent, Normal

import vaerdict as vd


class Thermostat(torch.nn.Module):  # a hidden state, read through a nonlinear sensor
    prior = Independent(Normal(torch.zeros(2), torch.ones(2)), 1)

    def log_joint(self, x, z):  # (n, 3), (particles, n, 2) -> (particles, n)
        mean = torch.stack([z[..., 0].exp(), z[..., 0] * z[..., 1], z[..., 1].tanh()], -1)
        return Normal(mean, 0.3).log_prob(x).sum(-1) + self.prior.log_prob(z)


x = torch.tensor([[1.0, 0.1, 0.2], [2.5, -0.6, -0.5], [0.2, -1.0, 0.4]])
answer = vd.expect(Thermostat(), x, lambda z: (z[..., 0] > 0).double(), tolerance=0.02)
verdicts = vd.Verdict.names(answer.verdict)
for p, error, verdict, stage in zip(answer.value, answer.mcse, verdicts, answer.stage, strict=True):
    print(f"P(z_1 > 0 | x) = {p:.3f} +- {error:.3f}   {verdict}   answered by {stage}")
