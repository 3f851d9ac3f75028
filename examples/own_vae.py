"""A trained VAE in plain PyTorch, and five lines to an answer; checked by quadrature (extra `sklearn`)."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import vaerdict as vd


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 4))
        self.decoder = nn.Sequential(nn.Linear(2, 128), nn.SiLU(), nn.Linear(128, 64))

    def encode(self, x):
        return self.encoder(x).chunk(2, -1)

    def decode(self, z):
        return self.decoder(z)


torch.manual_seed(0)
x = torch.tensor(load_digits(return_X_y=True)[0] / 16, dtype=torch.float32)
vae = VAE()
optimiser = torch.optim.Adam(vae.parameters(), lr=3e-3)
for _ in range(30):
    for rows in torch.randperm(len(x)).split(100):
        mean, log_variance = vae.encode(x[rows])
        logits = vae.decode(mean + (log_variance / 2).exp() * torch.randn_like(mean))
        kl = (mean**2 + log_variance.exp() - log_variance - 1).sum() / 2
        loss = nn.functional.binary_cross_entropy_with_logits(logits, x[rows], reduction="sum") + kl
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def ink(z):  # the share of the ink that is in the lower half of the image, without noise
    pixels = vae.decode(z).sigmoid()
    return pixels[..., 32:].sum(-1) / pixels.sum(-1)


model = vd.from_vae(vae.encode, vae.decode, "bernoulli")
answer = vd.expect(model, x[:8], ink, model.encoder, tolerance=0.01, seed=0)

side = torch.linspace(-5, 5, 201)
z = torch.cartesian_prod(side, side).unsqueeze(1)
with torch.no_grad():
    weights = torch.softmax(torch.cat([model.log_joint(row[None], z) for row in x[:8]], 1).double(), 0)
    exact = (weights * ink(z)).sum(0)
for value, error, verdict, truth in zip(answer.value, answer.mcse, answer.verdict, exact, strict=True):
    print(f"E(ink below | x) = {value:.3f} +- {error:.3f}   {vd.Verdict(int(verdict)).name}   exact {truth:.3f}")
