"""May a NumPyro guide be trusted? Its log-weights are arrays, and these are all that is needed (extra `numpyro`)."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

import vaerdict as vd

dose = jnp.linspace(-1, 1, 8)
died = jnp.array([0, 0, 0, 1, 1, 1, 1, 1])


def model(dose, died):
    line = numpyro.sample("line", dist.Normal(0, 5).expand([2]).to_event(1))
    with numpyro.plate("animals", len(dose)):
        numpyro.sample("died", dist.Bernoulli(logits=line[0] + line[1] * dose), obs=died)


data, guide = (dose, died), AutoNormal(model)
fit = SVI(model, guide, numpyro.optim.Adam(0.05), Trace_ELBO()).run(jax.random.key(0), 500, *data, progress_bar=False)


def log_weight(key):  # a draw z of the guide and log p(x, z) - log q(z)
    log_q, trace = log_density(seed(guide, key), data, {}, fit.params)
    z = {name: site["value"] for name, site in trace.items() if site["type"] == "sample"}
    log_p, _ = log_density(model, data, {}, z)
    return log_p - log_q, z


log_w, z = jax.jit(jax.vmap(log_weight))(jax.random.split(jax.random.key(1), 4000))
answer = vd.from_weights(log_w, z)
slope = answer.expect(lambda z: z.line[..., 1])
print(
    f"guide: k-hat {answer.khat:.2f}, {answer.ess:.0f} effective draws of 4000: {vd.Verdict(int(answer.verdict)).name}"
)
print(f"slope by the guide {z['line'][:, 1].mean():.2f}, corrected {slope.value:.2f} +- {slope.mcse:.2f}; exact 6.88")
