"""A VAE whose latents form classes (GMVAE): a discrete latent beside a continuous one, summed exactly."""

import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal

import vaerdict as vd


class GMVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres, self.log_sd = nn.Parameter(2 * torch.randn(3, 2)), nn.Parameter(torch.zeros(3, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 6))
        self.prior = vd.JointPrior(
            c=Categorical(logits=torch.zeros(3)),
            z=lambda c: Independent(Normal(self.centres[c], self.log_sd[c].exp()), 1),
        )

    def log_joint(self, x, latent):  # latent.c is (particles, n), latent.z (particles, n, 2)
        return Normal(self.decoder(latent.z), 0.5).log_prob(x).sum(-1) + self.prior.log_prob(latent)

    def in_each_class(self, z):  # (particles, n, 2) -> latents (3 particles, n)
        c = torch.arange(3).repeat_interleave(len(z)).unsqueeze(1).expand(-1, z.shape[1])
        return self.prior.Latent(c=c, z=z.repeat(3, 1, 1))


torch.manual_seed(0)
hidden = torch.tensor([[1.5, 0.0], [-1.0, 1.2], [-1.0, -1.2]])[torch.randint(3, (1000,))] + 0.8 * torch.randn(1000, 2)
x = torch.cat([hidden, hidden.sin(), hidden.square() / 2], -1) + 0.5 * torch.randn(1000, 6)

model, encoder = GMVAE(), nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 4))
optimiser = torch.optim.Adam([*model.parameters(), *encoder.parameters()], lr=5e-3)
for _ in range(400):
    mean, log_variance = encoder(x).chunk(2, -1)
    q = Independent(Normal(mean, (log_variance / 2).exp()), 1)
    z = q.rsample((1,))
    loss = (q.log_prob(z)[0] - model.log_joint(x, model.in_each_class(z)).logsumexp(0)).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def classes(latent):  # (particles, n, 3)
    return nn.functional.one_hot(latent.c, 3).double()


answer = vd.expect(model, x[:8], classes, lambda x: encoder(x).chunk(2, -1), tolerance=0.02, seed=0)

side = torch.linspace(-7, 7, 201)
grid = model.in_each_class(torch.cartesian_prod(side, side).unsqueeze(1))
with torch.no_grad():
    weights = torch.cat([torch.softmax(model.log_joint(row[None], grid).double(), 0) for row in x[:8]], 1)
    exact = (weights.unsqueeze(-1) * classes(grid)).sum(0)
for value, error, verdict, truth in zip(answer.value, answer.mcse, answer.verdict, exact, strict=True):
    p, of = (", ".join(f"{number:.3f}" for number in row) for row in (value, truth))
    print(f"P(c | x) = {p} +- {error.max():.3f}   {vd.Verdict(int(verdict)).name}   exact {of}")
