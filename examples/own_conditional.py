"""A conditional VAE p(x | z, c) with a conditional prior p(z | c); linear in z, so that the exact answer is known."""

import torch
from torch import nn
from torch.distributions import Independent, Normal, kl_divergence

import vaerdict as vd


class CVAE(nn.Module):  # a state z, read by five sensors at a temperature c that shifts both
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 4))
        self.weight, self.drift = nn.Parameter(torch.randn(5, 2)), nn.Linear(1, 5)
        self.state = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 4))

    def encode(self, x, c):
        return self.encoder(torch.cat([x, c], -1)).chunk(2, -1)

    def decode(self, z, c):
        return z @ self.weight.mT + self.drift(c)

    def prior(self, c):
        mean, log_sd = self.state(c).chunk(2, -1)
        return Independent(Normal(mean, log_sd.exp()), 1)


torch.manual_seed(0)
c = torch.rand(1000, 1) * 4 - 2
z = torch.cat([c.sin(), c**2 / 2], -1) + 0.5 * torch.randn(1000, 2)
x = z @ torch.randn(2, 5) + c + 0.5 * torch.randn(1000, 5)
vae = CVAE()
optimiser = torch.optim.Adam(vae.parameters(), lr=1e-2)
for _ in range(400):
    mean, log_variance = vae.encode(x, c)
    q = Independent(Normal(mean, (log_variance / 2).exp()), 1)
    likelihood = Normal(vae.decode(q.rsample(), c), 0.5).log_prob(x).sum(-1)
    loss = (kl_divergence(q, vae.prior(c)) - likelihood).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

model = vd.from_vae(vae.encode, vae.decode, "gaussian", vae.prior, scale=0.5)


def higher(z, observed):  # P(the first sensor, without its noise, is above what it reads)
    return (model.decode(z, observed)[..., 0] > observed[0][:, 0]).double()


answer = vd.expect(model, (x[:8], c[:8]), higher, model.encoder, tolerance=0.02, seed=0)

with torch.no_grad():  # the exact posterior N(mean, covariance) of z
    prior, weight = vae.prior(c[:8]), vae.weight
    covariance = torch.linalg.inv(torch.diag_embed(1 / prior.variance) + weight.mT @ weight / 0.5**2)
    natural = prior.mean / prior.variance + (x[:8] - vae.drift(c[:8])) @ weight / 0.5**2
    mean = vae.decode((covariance @ natural.unsqueeze(-1)).squeeze(-1), c[:8])[:, 0]
    exact = torch.special.ndtr((mean - x[:8, 0]) / (weight[0] @ covariance @ weight[0]).sqrt())
for value, error, verdict, truth in zip(answer.value, answer.mcse, answer.verdict, exact, strict=True):
    print(f"P(higher | x, c) = {value:.3f} +- {error:.3f}   {vd.Verdict(int(verdict)).name}   exact {truth:.3f}")
