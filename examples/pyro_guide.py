"""May a Pyro guide be trusted, and what is the answer where it may not? (extra `pyro`)"""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO

import vaerdict as vd

pyro.set_rng_seed(0)
loadings = torch.tensor([[1.0, 0.8], [0.8, 1.0], [1.0, 1.1], [0.5, 0.2]])
x = torch.randn(300, 2) @ loadings.T + 0.3 * torch.randn(300, 4)


class LinearVAE(torch.nn.Module):  # as in Pyro's tutorial, with a linear decoder: the posterior is known
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

    def model(self, x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(len(x), 2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z @ loadings.T, 0.3).to_event(1), obs=x)

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", len(x)):
            mean, log_sd = self.encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(mean, log_sd.exp()).to_event(1))


vae = LinearVAE()
svi = SVI(vae.model, vae.guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
for _ in range(400):
    svi.step(x)

model = vd.from_pyro(vae.model, vae.guide, x)
guide = vd.posterior(model, x, model.guide, n=1000, seed=0)
print(f"the guide is reliable for {(guide.verdict == vd.Verdict.OK).float().mean():.0%} of 300 observations: ", end="")
print(f"{guide.ess.median() / 1000:.0%} effective draws")

answer = vd.expect(model, x, lambda z: z[..., 1], model.guide, tolerance=0.05, seed=0)
print(f"corrected answers: {(answer.verdict == vd.Verdict.OK).float().mean():.0%} OK")

precision = torch.eye(2) + loadings.T @ loadings / 0.09
exact = torch.linalg.solve(precision, loadings.T @ x.T / 0.09)[1]
by_guide = vae.encoder(x)[:, 1]
print(f"root mean square error of E[z_2 | x]: guide {(by_guide - exact).square().mean().sqrt():.3f}, ", end="")
print(f"corrected {(answer.value - exact).square().mean().sqrt():.3f}")
