"""A module of your own with `prior` and `log_joint(x, z)`: here a learned prior, a mixture. Checked by quadrature."""

import torch
from torch import nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

import vaerdict as vd


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits, self.centres = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.randn(4, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 6))

    @property
    def prior(self):
        parts = Independent(Normal(self.centres, 0.5), 1)
        return MixtureSameFamily(Categorical(logits=self.logits), parts)

    def log_joint(self, x, z):  # (n, 6), (particles, n, 2) -> (particles, n)
        return Normal(self.decoder(z), 0.5).log_prob(x).sum(-1) + self.prior.log_prob(z)


torch.manual_seed(0)
hidden = torch.randint(3, (1000, 1)) * torch.tensor([2.0, -1.0]) + 0.4 * torch.randn(1000, 2)
x = torch.cat([hidden.sin(), hidden.square() / 2, hidden.prod(-1, keepdim=True), hidden.sum(-1, keepdim=True)], -1)
x = x + 0.5 * torch.randn(1000, 6)

model, encoder = Model(), nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 4))
optimiser = torch.optim.Adam([*model.parameters(), *encoder.parameters()], lr=5e-3)


def q(x):
    mean, log_sd = encoder(x).chunk(2, -1)
    return Independent(Normal(mean, log_sd.exp()), 1)


for _ in range(500):
    z = q(x).rsample((2,))
    loss = (q(x).log_prob(z) - model.log_joint(x, z)).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def warm(z):  # is the first sensor, without its noise, above zero?
    return (model.decoder(z)[..., 0] > 0).double()


answer = vd.expect(model, x[:8], warm, q, tolerance=0.02, seed=0)

side = torch.linspace(-6, 6, 401)
z = torch.cartesian_prod(side, side).unsqueeze(1)
with torch.no_grad():
    exact = torch.cat([(torch.softmax(model.log_joint(row[None], z).double(), 0) * warm(z)).sum(0) for row in x[:8]])
for value, error, verdict, truth in zip(answer.value, answer.mcse, answer.verdict, exact, strict=True):
    print(f"P(warm | x) = {value:.3f} +- {error:.3f}   {vd.Verdict(int(verdict)).name}   exact {truth:.3f}")
