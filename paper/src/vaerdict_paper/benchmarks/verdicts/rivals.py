"""NUTS (NumPyro) and nested sampling (dynesty) on the same questions, at their usual settings.

NUTS runs four chains of 1,000 warm-up steps and 1,000 draws. Its answer counts as OK if there was no divergence and
R-hat is below 1.01 and the bulk effective sample size above 400 for every latent and for the functional asked about.
It runs with its defaults, and with the smaller steps that its users choose after divergences.
Nested sampling has 500 live points. It has no verdict, so that every answer counts as OK, unless it did not end within
five minutes of processor time. (With uniform sampling it may search for a point in its bounds without an end.)
"""

from __future__ import annotations

import math
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import special
from torch import Tensor
from torch.distributions import Independent, StudentT

from vaerdict.optional import require
from vaerdict_paper.benchmarks import is_installed
from vaerdict_paper.benchmarks.verdicts.curved import ScalePrior
from vaerdict_paper.benchmarks.verdicts.questions import Joint, Likelihood, Question, Target
from vaerdict_paper.benchmarks.verdicts.records import Given, Record, records

COMPARED = (
    "Gaussian, correlated, 30-d",
    "ring, 2-d",
    "banana, 2-d",
    "funnel, 5-d",
    "hierarchical scale, 6-d",
    "Student-t, 3 df, 3-d",
    "two far modes, 6-d",
    "spike on a slab, 3-d",
    "Bernoulli VAE, tanh, 4 latents",
)
"""Targets given to the rivals; their densities are written in JAX below."""

N_COMPARED = 3
"""Number of observations of each target."""

N_CHAINS, N_WARM_UP, N_DRAWS = 4, 1000, 1000
N_LIVE, CPU_SECONDS = 500, 300
RHAT, BULK_ESS = 1.01, 400
SMALL_STEPS = 0.99
"""The acceptance rate that steps are adapted to after divergences; the default is 0.8."""

Array = Any


class Draws(NamedTuple):
    """What a rival returns for one observation: draws, their log-weights (None: equal), its cost and divergences.

    Shapes: ``z (n, d), log_w (n)``; n is zero if it did not end.
    """

    z: Tensor
    log_w: Tensor | None
    cost: int
    divergences: int = 0


def installed() -> list[str]:
    """The rivals whose packages are installed."""
    return [name for name, (_, packages) in METHODS.items() if all(map(is_installed, packages))]


def answers(method: str, target: Target, asked: Sequence[Question], seed: int) -> list[Record]:
    """One record per question and observation; all questions are answered from the same draws."""
    sample, _ = METHODS[method]
    with _double_precision():
        drawn = list(sample(target, seed))
    _jax().clear_caches()  # a run of NUTS compiles thousands of programs, and a process may map 65,530 pieces of memory
    found = []
    for question in asked:
        value, mcse, reasons = zip(*(judged(draws, question.f) for draws in drawn), strict=True)
        given = Given(
            torch.tensor(value, dtype=torch.float64),
            torch.tensor(mcse, dtype=torch.float64),
            ["REFUSE" if reason else "OK" for reason in reasons],
            [method] * len(drawn),
            [draws.cost for draws in drawn],
            list(reasons),
        )
        found += records(method, target.group, target.name, question, given)
    return found


def judged(draws: Draws, f: Callable[[Tensor], Tensor]) -> tuple[float, float, str]:
    """The expectation of f, its standard error, and the reason why it is not to be trusted, if there is one."""
    if not len(draws.z):
        return math.nan, math.nan, f"no result in {CPU_SECONDS} s"
    values = f(draws.z)
    if draws.log_w is not None:
        weights = draws.log_w.softmax(0)
        mean = weights @ values
        error = (weights.square() @ (values - mean).square()).sqrt()
        return mean.item(), max(error.item(), weights.square().sum().item() * _indicator(values)), ""
    arviz = require("arviz", "arviz")
    chains = np.stack([t.reshape(N_CHAINS, -1).numpy() for t in (*draws.z.mT, values)])
    varying = [chain for chain in chains if chain.std() > 0]
    rhat = max(float(arviz.rhat(chain)) for chain in varying)
    ess = min(float(arviz.ess(chain, method="bulk")) for chain in varying)
    spread = values.std().item()
    error = spread / float(arviz.ess(chains[-1], method="mean")) ** 0.5 if spread > 0 else 0.0
    reasons = [f"{draws.divergences} divergences"] * (draws.divergences > 0)
    reasons += [f"R-hat {rhat:.2f}"] * (not rhat < RHAT) + [f"bulk ESS {ess:.0f}"] * (not ess > BULK_ESS)
    # an event that no draw hit has an error too
    return values.mean().item(), max(error, 1 / max(ess, 1.0)) if _indicator(values) else error, ", ".join(reasons)


def _indicator(values: Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def _jax() -> Any:
    return require("jax", "samplers", distribution="vaerdict-paper")


@contextmanager
def _double_precision() -> Iterator[None]:
    jax = _jax()
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise a `TimeoutError` after some seconds of processor time. Only in the main thread."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def nuts(target: Target, seed: int, *, accept: float = 0.8) -> Iterator[Draws]:
    """Draws by NUTS from four chains, with the leapfrog steps of the warm-up among its cost."""
    numpyro, jax = require("numpyro", "samplers", distribution="vaerdict-paper"), _jax()
    infer, dist = numpyro.infer, numpyro.distributions
    log_joint, d = jax_log_joint(target), target.model.prior.event_shape[0]

    def model(x: Array) -> None:
        z = numpyro.sample("z", dist.ImproperUniform(dist.constraints.real_vector, (), (d,)))
        numpyro.factor("log_joint", log_joint(x, z))

    mcmc = infer.MCMC(
        infer.NUTS(model, target_accept_prob=accept),
        num_warmup=N_WARM_UP,
        num_samples=N_DRAWS,
        num_chains=N_CHAINS,
        chain_method="sequential",
        progress_bar=False,
        jit_model_args=True,
    )
    for i, x in enumerate(target.x.numpy()):
        mcmc.warmup(jax.random.PRNGKey(100 * seed + i), x, extra_fields=("num_steps",), collect_warmup=True)
        cost = int(mcmc.get_extra_fields()["num_steps"].sum())
        mcmc.run(mcmc.post_warmup_state.rng_key, x, extra_fields=("num_steps", "diverging"))
        fields = mcmc.get_extra_fields()
        z = torch.from_numpy(np.array(mcmc.get_samples()["z"]))
        yield Draws(z, None, cost + int(fields["num_steps"].sum()), int(fields["diverging"].sum()))


def nested(target: Target, seed: int) -> Iterator[Draws]:
    """Weighted draws by nested sampling."""
    dynesty, jax = require("dynesty", "samplers", distribution="vaerdict-paper"), _jax()
    prior, log_joint, log_prior = target.model.prior, jax_log_joint(target), jax_log_prior(target.model.prior)
    log_lik = jax.jit(lambda x, z: log_joint(x, z) - log_prior(z))
    for i, x in enumerate(target.x.numpy()):
        sampler = dynesty.NestedSampler(
            lambda z, x=x: float(log_lik(x, z)),
            lambda u: prior_transform(prior, u),
            prior.event_shape[0],
            nlive=N_LIVE,
            rstate=np.random.default_rng([seed, i]),
        )
        try:
            with warnings.catch_warnings(), _limited(CPU_SECONDS):
                warnings.simplefilter("ignore")  # of inefficient bounds
                sampler.run_nested(print_progress=False)
        except TimeoutError:
            yield Draws(torch.zeros(0, prior.event_shape[0]), None, int(sampler.ncall))
            continue
        result = sampler.results
        yield Draws(torch.from_numpy(result.samples), torch.from_numpy(result.logwt), int(np.sum(result.ncall)))


METHODS: dict[str, tuple[Callable[[Target, int], Iterator[Draws]], tuple[str, ...]]] = {
    "NUTS": (nuts, ("jax", "numpyro", "arviz")),
    "NUTS, small steps": (partial(nuts, accept=SMALL_STEPS), ("jax", "numpyro", "arviz")),
    "nested sampling": (nested, ("jax", "dynesty")),
}


# ------------------------------------------------------------------------------------------------------ priors
def prior_transform(prior: Any, u: np.ndarray) -> np.ndarray:
    """A draw from the prior by the inverse of its distribution function at uniform numbers. Shapes: ``(d) -> (d)``."""
    if isinstance(prior, ScalePrior):
        eps = special.ndtri(u)
        return np.concatenate([[prior.sd * eps[0]], np.exp(prior.sd * eps[0] / 2) * eps[1:]])
    base = prior.base_dist if isinstance(prior, Independent) else None
    if base is None:
        return special.ndtri(u)
    quantile = special.stdtrit(base.df.numpy(), u) if isinstance(base, StudentT) else special.ndtri(u)
    return base.loc.numpy() + base.scale.numpy() * quantile


def jax_log_prior(prior: Any) -> Callable[[Array], Array]:
    """Log-density of a prior in JAX, without its constant. Shapes: ``(d) -> ()``."""
    jnp = _jax().numpy
    if isinstance(prior, ScalePrior):
        sd = prior.sd
        return lambda z: -0.5 * ((z[0] / sd) ** 2 + (len(z) - 1) * z[0] + jnp.sum(z[1:] ** 2) * jnp.exp(-z[0]))
    base = prior.base_dist if isinstance(prior, Independent) else None
    if base is None:
        return lambda z: -0.5 * jnp.sum(z**2)
    loc, scale = base.loc.numpy(), base.scale.numpy()
    if isinstance(base, StudentT):
        df = base.df.numpy()
        return lambda z: -jnp.sum((df + 1) / 2 * jnp.log1p(((z - loc) / scale) ** 2 / df))
    return lambda z: -0.5 * jnp.sum(((z - loc) / scale) ** 2)


# ------------------------------------------------------------------------------------------------------ densities
def jax_log_joint(target: Target) -> Callable[[Array, Array], Array]:
    """Log p(x, z) of a target in JAX up to a constant. Shapes: ``(p), (d) -> ()``."""
    model, log_prior = target.model, jax_log_prior(target.model.prior)
    if isinstance(model, Likelihood):
        parameters = {k: v.numpy() if isinstance(v, Tensor) else v for k, v in model.parameters.items()}
        density = _DENSITIES[model.log_density.__name__]
    else:
        parameters = {k: v.numpy() for k, v in model.decoder.state_dict().items() if k.startswith("layers")}
        density = _bernoulli_decoder
    if isinstance(model, Joint):
        return lambda x, z: density(x, z, **parameters)
    return lambda x, z: log_prior(z) + density(x, z, **parameters)


def _linear_gaussian(x: Array, z: Array, a: Array, noise: float) -> Array:
    return -0.5 * (((x - a @ z) / noise) ** 2).sum()


def _radius(x: Array, z: Array, width: float) -> Array:
    return -0.5 * ((x[0] - ((z**2).sum()) ** 0.5) / width) ** 2


def _parabola(x: Array, z: Array, bend: float, noise: float) -> Array:
    return -0.5 * ((x[0] - z[1] - bend * z[0] ** 2) / noise) ** 2


def _first_measured(x: Array, z: Array, noise: float) -> Array:
    return -0.5 * ((x[0] - z[0]) / noise) ** 2


def _effects(x: Array, z: Array, noise: float) -> Array:
    return -0.5 * (((x - z[1:]) / noise) ** 2).sum()


def _elliptical_student(x: Array, z: Array, df: float, root: Array) -> Array:
    jnp = _jax().numpy
    square = (jnp.linalg.solve(root, z - x) ** 2).sum()
    return -(df + len(z)) / 2 * jnp.log1p(square / df)


def _mixture(x: Array, z: Array, loc: Array, scale: Array, log_weight: Array) -> Array:
    jnp, logsumexp = _jax().numpy, _jax().nn.logsumexp
    weights = jnp.asarray(log_weight).at[0].add(x[-1])
    square = ((z - x[:-1] - loc) ** 2).sum(-1) / scale**2
    return logsumexp(weights - logsumexp(weights) - 0.5 * square - len(z) * jnp.log(scale))


def _bernoulli_decoder(x: Array, z: Array, **layers: Array) -> Array:
    jnp = _jax().numpy
    hidden = jnp.tanh(layers["layers.0.weight"] @ z + layers["layers.0.bias"])
    logits = layers["layers.1.weight"] @ hidden + layers["layers.1.bias"]
    return (x * logits - _jax().nn.softplus(logits)).sum()


_DENSITIES: dict[str, Callable[..., Array]] = {
    "linear_gaussian": _linear_gaussian,
    "radius": _radius,
    "parabola": _parabola,
    "first_measured": _first_measured,
    "effects": _effects,
    "elliptical_student": _elliptical_student,
    "mixture": _mixture,
}
