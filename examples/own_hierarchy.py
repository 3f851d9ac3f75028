"""A VAE of two levels, z2 -> z1 -> x, with a `JointPrior`; checked by quadrature over both."""

import torch
from torch import nn
from torch.distributions import Independent, Normal

import vaerdict as vd


class Hierarchy(nn.Module):
    def __init__(self):
        super().__init__()
        self.middle = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        self.decoder = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 5))
        top = Independent(Normal(torch.zeros(1), torch.ones(1)), 1)
        self.prior = vd.JointPrior(z2=top, z1=lambda z2: Independent(Normal(self.middle(z2), 0.5), 1))

    def log_joint(self, x, z):  # z.z2 and z.z1 are (particles, n, 1)
        return Normal(self.decoder(z.z1), 0.5).log_prob(x).sum(-1) + self.prior.log_prob(z)


torch.manual_seed(0)
hidden = torch.randn(1000, 1).tanh() * 2 + 0.3 * torch.randn(1000, 1)
x = torch.cat([hidden, hidden.sin(), hidden.square() / 2, hidden.exp() / 3, hidden.cos()], -1)
x = x + 0.5 * torch.randn(1000, 5)

model, encoder = Hierarchy(), nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 4))
optimiser = torch.optim.Adam([*model.parameters(), *encoder.parameters()], lr=5e-3)
for _ in range(500):
    mean, log_sd = encoder(x).chunk(2, -1)
    q = Independent(Normal(mean, log_sd.exp()), 1)
    draws = q.rsample((2,))
    z = model.prior.Latent(z2=draws[..., :1], z1=draws[..., 1:])
    loss = (q.log_prob(draws) - model.log_joint(x, z)).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def query(z):  # the top level, and whether it is above zero while the first sensor is not
    return torch.stack([z.z2[..., 0], ((z.z2 > 0) & (model.decoder(z.z1)[..., :1] < 0))[..., 0]], -1)


answer = vd.expect(model, x[:8], query, tolerance=0.02, seed=0)

side = torch.linspace(-6, 6, 401)
z2, z1 = torch.cartesian_prod(side, side).reshape(-1, 1, 2).split(1, -1)
grid = model.prior.Latent(z2=z2, z1=z1)
with torch.no_grad():
    weights = torch.cat([torch.softmax(model.log_joint(row[None], grid).double(), 0) for row in x[:8]], 1)
    exact = (weights.unsqueeze(-1) * query(grid)).sum(0)
for value, error, verdict, truth in zip(answer.value, answer.mcse, answer.verdict, exact, strict=True):
    print(f"E(z2 | x) = {value[0]:.3f} +- {error[0]:.3f}, exact {truth[0]:.3f}   {vd.Verdict(int(verdict)).name}")
    print(f"   P(z2 > 0, sensor < 0 | x) = {value[1]:.3f} +- {error[1]:.3f}, exact {truth[1]:.3f}")
