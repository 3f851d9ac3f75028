"""Curved and heavy-tailed posteriors."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vaerdict_paper.benchmarks.verdicts.benign import ring
from vaerdict_paper.benchmarks.verdicts.questions import (
    N_OBS,
    Joint,
    Likelihood,
    Target,
    generator_of,
    log_normal_density,
    normal,
    normal_prior,
    student_prior,
    uniform,
)

GROUP = "curved"


def targets(seed: int) -> list[Target]:
    """All targets of the group."""
    return [
        banana("banana, 2-d", seed),
        bananas("bananas, 5-d", seed),
        crescent("crescent, 2-d", seed),
        ring("thin ring, 2-d", seed, width=0.06, group=GROUP),
        funnel("funnel, 5-d", seed),
        hierarchy("hierarchical scale, 6-d", seed),
        student("Student-t, 3 df, 3-d", seed),
        students("Student-t, 5 df, 10-d", seed),
        scales("scale mixture, 3-d", seed),
        warped("warped normal, 8-d", seed),
        conflict("conflicting measurements, 1-d", seed),
    ]


def parabola(x: Tensor, z: Tensor, bend: float, noise: float) -> Tensor:
    """Log-likelihood of x = z_2 + bend z_1^2 + noise."""
    return log_normal_density(x - z[..., 1:] - bend * z[..., :1].square(), noise)


def banana(name: str, seed: int) -> Target:
    """One measurement of a parabola."""
    g = generator_of(seed, name)
    bend = uniform(g, 0.6, 1.0, 1).item()
    model = Likelihood(normal_prior(2, torch.tensor([1.5, 3.0]), 0.3), parabola, {"bend": bend, "noise": 0.4})
    return Target(GROUP, name, model, uniform(g, 0, 1.5, N_OBS, 1), box=((-8, 8), (-25, 10)))


def bent_normal(x: Tensor, z: Tensor, bend: float, scale: Tensor) -> Tensor:
    """Log-density of a normal around x after z_2 and z_4 were bent by the squares of z_1 and z_3."""
    straight = torch.stack(
        [z[..., 0], z[..., 1] + bend * z[..., 0].square(), z[..., 2], z[..., 3] + bend * z[..., 2].square(), z[..., 4]],
        -1,
    )
    return log_normal_density(straight - x, scale) - 12.0


def bananas(name: str, seed: int) -> Target:
    """Two bananas and a normal."""
    g = generator_of(seed, name)
    bend, scale = uniform(g, 0.6, 1.0, 1).item(), torch.tensor([1.0, 0.3, 1.0, 0.5, 0.7], dtype=torch.float64)
    x = scale * normal(g, N_OBS, 5)

    def sample(n: int, g: torch.Generator) -> Tensor:
        u = x + scale * normal(g, n, N_OBS, 5)
        u[..., 1] -= bend * u[..., 0].square()
        u[..., 3] -= bend * u[..., 2].square()
        return u

    model = Joint(student_prior(5, 4.0, 2.0), bent_normal, {"bend": bend, "scale": scale})
    return Target(GROUP, name, model, x, sample)


def arc(x: Tensor, z: Tensor, width: float, noise: float) -> Tensor:
    """Log-likelihood of a measured radius and a rough first coordinate."""
    r = torch.linalg.vector_norm(z, dim=-1)
    return -0.5 * (((r - x[..., 0]) / width).square() + ((z[..., 0] - x[..., 1]) / noise).square())


def crescent(name: str, seed: int) -> Target:
    """A part of a ring."""
    g = generator_of(seed, name)
    x = torch.stack([uniform(g, 2.0, 3.0, N_OBS), uniform(g, 1.5, 2.5, N_OBS)], -1)
    model = Likelihood(normal_prior(2, 2.0), arc, {"width": 0.12, "noise": 0.8})
    return Target(GROUP, name, model, x, box=((-6, 6),) * 2)


class ScalePrior:
    """The log-variance v ~ N(0, sd^2) and d - 1 effects y ~ N(0, e^v); z = (v, y)."""

    def __init__(self, d: int, sd: float) -> None:
        self.event_shape, self.sd = torch.Size([d]), sd

    def log_prob(self, z: Tensor) -> Tensor:
        """Log p(z) with its constant. Shapes: ``(..., d) -> (...)``."""
        v, y, d = z[..., 0], z[..., 1:], z.shape[-1]
        constant = -0.5 * d * math.log(2 * math.pi) - math.log(self.sd)
        return constant - 0.5 * ((v / self.sd).square() + (d - 1) * v + y.square().sum(-1) * (-v).exp())

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Draw from the global random state."""
        eps = torch.randn(*sample_shape, *self.event_shape, dtype=torch.float64)
        v = self.sd * eps[..., :1]
        return torch.cat([v, eps[..., 1:] * (v / 2).exp()], -1)


def first_measured(x: Tensor, z: Tensor, noise: float) -> Tensor:
    """Log-likelihood of x = z_1 + noise."""
    return log_normal_density(x - z[..., :1], noise)


def funnel(name: str, seed: int) -> Target:
    """The log-variance of four effects is measured, the effects are not."""
    sd, noise = 1.5, 1.0
    x = uniform(generator_of(seed, name), -1.5, 1.5, N_OBS, 1)
    variance = 1 / (1 / sd**2 + 1 / noise**2)

    def sample(n: int, g: torch.Generator) -> Tensor:
        eps = normal(g, n, N_OBS, 5)
        v = variance * x / noise**2 + variance**0.5 * eps[..., :1]
        return torch.cat([v, eps[..., 1:] * (v / 2).exp()], -1)

    model = Likelihood(ScalePrior(5, sd), first_measured, {"noise": noise})
    return Target(GROUP, name, model, x, sample, score=lambda z: -z[..., 0], tail=lambda z: z[..., 1:].sum(-1))


def effects(x: Tensor, z: Tensor, noise: float) -> Tensor:
    """Log-likelihood of measured effects."""
    return log_normal_density(x - z[..., 1:], noise)


def hierarchy(name: str, seed: int, n: int = 5) -> Target:
    """Effects are measured; their log-variance is unknown and goes down to where the effects vanish."""
    g, sd, noise = generator_of(seed, name), 1.5, 1.0
    x = uniform(g, 0.3, 1.5, N_OBS, 1) * normal(g, N_OBS, n)
    v = torch.linspace(-12, 12, 40_001, dtype=torch.float64)[:, None]
    total = v.exp() + noise**2
    log_p = -0.5 * (v / sd).square() - 0.5 * (n * total.log() + x.square().sum(-1) / total)
    cumulative = log_p.softmax(0).cumsum(0).mT.contiguous()

    def sample(k: int, g: torch.Generator) -> Tensor:
        u = uniform(g, 0, 1, N_OBS, k)
        index = torch.searchsorted(cumulative, u).clamp_max(len(v) - 1).mT
        state = v[index, 0] + (v[1] - v[0]) * uniform(g, -0.5, 0.5, k, N_OBS)
        share = 1 / (1 + noise**2 * (-state).exp()).unsqueeze(-1)
        return torch.cat([state.unsqueeze(-1), share * x + noise * share.sqrt() * normal(g, k, N_OBS, n)], -1)

    model = Likelihood(ScalePrior(n + 1, sd), effects, {"noise": noise})
    return Target(GROUP, name, model, x, sample, score=lambda z: -z[..., 0])


def elliptical_student(x: Tensor, z: Tensor, df: float, root: Tensor) -> Tensor:
    """Log-density of a multivariate Student-t around x."""
    square = torch.linalg.solve_triangular(root, (z - x).unsqueeze(-1), upper=False).square().sum((-2, -1))
    return -(df + z.shape[-1]) / 2 * torch.log1p(square / df) - 7.0


def student(name: str, seed: int) -> Target:
    """A multivariate Student-t; the second functional is |z_1|, as the square has an infinite variance."""
    g, df = generator_of(seed, name), 3.0
    root = torch.linalg.cholesky(torch.eye(3, dtype=torch.float64) + 0.5 * torch.ones(3, 3, dtype=torch.float64))
    x = normal(g, N_OBS, 3)

    def sample(n: int, g: torch.Generator) -> Tensor:
        chi = 2 * torch._standard_gamma(torch.full((n, N_OBS, 1), df / 2, dtype=torch.float64), generator=g)
        return x + normal(g, n, N_OBS, 3) @ root.mT * (df / chi).sqrt()

    model = Joint(student_prior(3, 1.0, 2.0), elliptical_student, {"df": df, "root": root})
    return Target(GROUP, name, model, x, sample, product=lambda z: z[..., 0].abs())


def independent_students(x: Tensor, z: Tensor, df: float, scale: Tensor) -> Tensor:
    """Log-density of independent Student-t variables around x."""
    return -(df + 1) / 2 * torch.log1p(((z - x) / scale).square() / df).sum(-1) - 30.0


def students(name: str, seed: int) -> Target:
    """Ten independent Student-t variables with tails lighter than those of their prior."""
    g, df, d = generator_of(seed, name), 5.0, 10
    scale = uniform(g, 0.3, 1.0, d)
    x = scale * normal(g, N_OBS, d)

    def sample(n: int, g: torch.Generator) -> Tensor:
        chi = 2 * torch._standard_gamma(torch.full((n, N_OBS, d), df / 2, dtype=torch.float64), generator=g)
        return x + scale * normal(g, n, N_OBS, d) * (df / chi).sqrt()

    model = Joint(student_prior(d, 2.0, 1.5), independent_students, {"df": df, "scale": scale})
    return Target(GROUP, name, model, x, sample)


def two_scales(x: Tensor, z: Tensor, weight: float, narrow: float, wide: float) -> Tensor:
    """Log-density of two normals around x that differ in scale."""
    parts = [
        math.log(w) + log_normal_density(z - x, s) - z.shape[-1] * math.log(s)
        for w, s in ((weight, narrow), (1 - weight, wide))
    ]
    return torch.logaddexp(*parts) + 3.0


def scales(name: str, seed: int) -> Target:
    """A mixture of two normals of one centre, the second eight times as wide."""
    g = generator_of(seed, name)
    weight, narrow, d = uniform(g, 0.5, 0.8, 1).item(), 0.2, 3
    wide, x = 8 * narrow, 0.4 * normal(g, N_OBS, d)

    def sample(n: int, g: torch.Generator) -> Tensor:
        is_narrow = uniform(g, 0, 1, n, N_OBS, 1) < weight
        return x + torch.where(is_narrow, narrow, wide) * normal(g, n, N_OBS, d)

    parameters = {"weight": weight, "narrow": narrow, "wide": wide}
    return Target(GROUP, name, Joint(normal_prior(d, 4.0), two_scales, parameters), x, sample)


def sinh_normal(x: Tensor, z: Tensor, warp: float, root: Tensor) -> Tensor:
    """Log-density of z = sinh(warp u) / warp with u normal around x."""
    u = torch.asinh(warp * z) / warp
    square = torch.linalg.solve_triangular(root, (u - x).unsqueeze(-1), upper=False).square().sum((-2, -1))
    return -0.5 * square - 0.5 * torch.log1p((warp * z).square()).sum(-1) + 5.0


def warped(name: str, seed: int) -> Target:
    """A correlated normal whose axes are stretched by a hyperbolic sine."""
    g, d, warp = generator_of(seed, name), 8, 0.8
    mix = normal(g, d, d) / d**0.5
    root = torch.linalg.cholesky(mix @ mix.mT + 0.1 * torch.eye(d, dtype=torch.float64))
    x = F.pad(uniform(g, -1.0, 1.0, N_OBS, 3), (0, d - 3), value=0.5) + 0.3 * normal(g, N_OBS, d)

    def sample(n: int, g: torch.Generator) -> Tensor:
        return torch.sinh(warp * (x + normal(g, n, N_OBS, d) @ root.mT)) / warp

    model = Joint(student_prior(d, 2.0, 1.5), sinh_normal, {"warp": warp, "root": root})
    return Target(GROUP, name, model, x, sample)


def student_measured(x: Tensor, z: Tensor, df: float, scale: float) -> Tensor:
    """Log-likelihood of x = z + Student-t noise, every column of x a measurement of the one latent."""
    return -(df + 1) / 2 * torch.log1p(((x - z) / scale).square() / df).sum(-1)


def conflict(name: str, seed: int) -> Target:
    """Two measurements with heavy-tailed noise that contradict each other."""
    g = generator_of(seed, name)
    x = torch.tensor([-2.0, 2.5]) + uniform(g, -0.7, 0.7, N_OBS, 2)
    return Target(
        GROUP, name, Likelihood(normal_prior(1, 3.0), student_measured, {"df": 2.0, "scale": 0.4}), x, box=((-30, 30),)
    )
