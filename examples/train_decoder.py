"""The three steps with a decoder of your own: train by several objectives, select the best model, ask it questions."""

import torch

import vaerdict as vd
from vaerdict.distributions import StandardNormal


class Decoder(torch.nn.Module):
    """Two latents, a small network and Gaussian noise."""

    prior = StandardNormal(2)

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
        self.log_noise = torch.nn.Parameter(torch.zeros(8))

    def log_joint(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Log p(x, z). Shapes: ``(n, 8), (particles, n, 2) -> (particles, n)``."""
        noise = self.log_noise.exp()
        return torch.distributions.Normal(self.mean(z), noise).log_prob(x).sum(-1) + self.prior.log_prob(z)


generator = vd.seeded(0)
angle = 6.28 * torch.rand(600, 1, generator=generator)
x = torch.cat([angle.cos(), angle.sin(), (2 * angle).cos(), (2 * angle).sin()], -1).repeat(1, 2)
x = x + 0.2 * torch.randn(x.shape, generator=generator)

steps = vd.ThreeStep(
    Decoder, objectives=[vd.VAE, vd.IWAE], settings=vd.Settings(n_particles=8, epochs=20), hidden=(64,)
).fit(x[:400], x[400:500])
for score in steps.selection:
    print(f"{score.model}: held-out evidence {score.iwelbo_best:.2f} nats, {score.iwelbo:.2f} by its own encoder")

answer = steps.posterior(x[500:], n=1000, tolerance=0.05, query=lambda z: (z[..., 0] > 0).double())
names = vd.Verdict.names(answer.verdict)
print(f"verdicts: {', '.join(f'{names.count(n)} {n}' for n in dict.fromkeys(names))}")
print(f"answered by: {answer.record.summary()}")
