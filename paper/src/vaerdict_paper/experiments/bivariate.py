r"""Figure 1 of the paper: mean-field proposals of a bivariate pPCA posterior, and the model that each would select.

The paper gives :math:`\lambda = 0.82` and five particles, but not the loading matrix W' (`LOADINGS` has ours), and its
text allows two readings of the proposals' means (`MEANS`). In both, the variances are those of the optimum at
:math:`\lambda = 0`. The means are those of the posterior at :math:`\lambda = 0` (``frozen``, as section 3.2 says), or
at the :math:`\lambda` in question (``exact``, as its equation for :math:`\mathrm{KL}(q \Vert p)` assumes, which has no
mean). The two readings disagree on which proposal selects the better model, so both are shown.

What a proposal selects depends on W'. The stage ``random`` therefore draws many, with independent normal entries, and
computes the same quantities for each.

Bounds are expectations over the true distribution of x, as with infinitely many observations:

.. math:: \mathrm E\, \log p_\lambda(x) - \mathrm E\, s_\lambda, \qquad
    s_\lambda = -\log \frac1K \sum_k \frac{p_\lambda(z_k \mid x)}{q(z_k \mid x)},

the first in closed form, the slack :math:`s_\lambda` by scrambled Sobol points of dimension 2 + 2K. Standard errors
are over independent scramblings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from scipy import optimize
from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.models.ppca import LambdaPPCA
from vaerdict.noise import Sobol, seeded
from vaerdict.objectives import iwelbo
from vaerdict.tasks import Task
from vaerdict_paper.theory import mean_field
from vaerdict_paper.theory.gaussians import a_norm

TRUE_LAMBDA = 0.82
FITTED_AT = 0.0
PROPOSALS = ("VAE", "IWAE", "WW", "CHI")
MEANS = ("exact", "frozen")

LOADINGS = {
    "entangled": ((2.0, 3.0), (3.0, 2.0)),
    "moderate": ((1.0, 2.0), (2.0, 1.0)),
    "triangular": ((2.0, 1.0), (0.0, 2.0)),
}
"""W' by name. The figure shows ``entangled``, chosen among about thirty matrices because it gives the order of the
paper's figure: its posterior has correlation -0.86 at lambda = 0, and above about 0.8 the optimum of the IWELBO with
five particles is narrower than that of the forward KL. The others have correlations -0.67 and -0.37."""

VARIANCES = (0.5, 1.0, 6.0)
"""Of the entries of random loadings: that of the appendix's :math:`b_j \\sim N(0, I/p)` with p = 2, the standard
normal, and one of entries as large as those of ``entangled``."""

_EDGE = 0.98
_STEP = 1e-3  # of the central differences; the grid ends far enough from 1 for it
_BATCH = 50  # random loadings of one task
_FIRST, _SECOND = torch.triu_indices(4, 4)
_NORM_OF_EPS = torch.diag(torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64))


@dataclass(frozen=True)
class Preset:
    """Numbers of particles, Sobol points and scramblings; sizes of the grids of lambda; random loadings per variance.

    Random loadings use one scrambling and a coarser grid: what is of interest is how they differ from each other.
    """

    loadings: tuple[str, ...] = tuple(LOADINGS)
    k: int = 5
    n_points: int = 2**12
    n_scramblings: int = 8
    n_grid: int = 50
    n_zoom: int = 31
    n_random: int = 200
    n_random_grid: int = 25

    def __post_init__(self) -> None:
        unknown = sorted(set(self.loadings) - set(LOADINGS))
        if unknown:
            raise SettingError(f"no loadings {', '.join(unknown)}; choose from {', '.join(LOADINGS)}.")
        if self.n_scramblings < 2:
            raise SettingError(f"n_scramblings={self.n_scramblings} gives no standard error; use at least 2.")


PRESETS = {
    "paper": Preset(),
    "quick": Preset(
        loadings=("entangled",), n_points=2**9, n_scramblings=3, n_grid=15, n_zoom=11, n_random=3, n_random_grid=9
    ),
}


def tasks(preset: Preset, seeds: int | None = None) -> list[Task]:
    """Panels A and B, then C and D for each reading of the means, for every loading and seed; then random loadings."""
    settings = asdict(preset)
    panels = [("approximation", None), *(("selection", means) for means in MEANS)]
    return [
        task
        for seed in range(seeds or 1)
        for task in (
            *(
                {"stage": stage, "loading": loading, "means": means, "seed": seed, **settings}
                for loading in preset.loadings
                for stage, means in panels
            ),
            *(
                {"stage": "random", "variance": variance, "first": first, "seed": seed, **settings}
                for variance in VARIANCES
                for first in range(0, preset.n_random, _BATCH)
            ),
        )
    ]


def work(task: Task) -> dict[str, Any]:
    """Do one task (see `tasks`)."""
    fields = {name: task[name] for name in Preset.__dataclass_fields__}
    preset = Preset(**{**fields, "loadings": tuple(fields["loadings"])})
    with torch.no_grad():
        if task["stage"] == "random":
            bases = random_loadings(preset, task["variance"], task["seed"])[task["first"] :][:_BATCH]
            (points,) = scramblings(preset, 1, task["seed"])
            rows = [random_row(preset, Example.of(base, points)) for base in bases]
            return {"random": [{"variance": task["variance"], "seed": task["seed"], **row} for row in rows]}
        base = torch.tensor(LOADINGS[task["loading"]], dtype=torch.float64)
        examples = [Example.of(base, points) for points in scramblings(preset, preset.n_scramblings, task["seed"])]
        panel = (
            approximation(examples) if task["stage"] == "approximation" else selection(preset, examples, task["means"])
        )
    return {"panels": [{**{key: task[key] for key in ("stage", "loading", "means", "seed")}, **panel}]}


def data(preset: Preset, seeds: Sequence[int]) -> Iterator[Tensor]:
    """All loadings, for the hash in the manifest; there are no other data."""
    yield from (torch.tensor(LOADINGS[name], dtype=torch.float64) for name in preset.loadings)
    yield from (random_loadings(preset, variance, seed) for variance in VARIANCES for seed in seeds)


def random_loadings(preset: Preset, variance: float, seed: int) -> Tensor:
    """Loadings with independent normal entries. Shapes: ``-> (n_random, 2, 2)``."""
    generator = seeded(30_000 + 1_000 * VARIANCES.index(variance) + seed)
    return variance**0.5 * torch.randn(preset.n_random, 2, 2, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Points:
    """Standard normals that are transformed to x and z. Shapes: ``u (n, 2)``, ``eps (K, n, 2)``."""

    u: Tensor
    eps: Tensor

    @cached_property
    def products(self) -> Tensor:
        """The products of each two of the four coordinates (u, eps). Shapes: ``-> (K, n, 10)``."""
        both = torch.cat([self.u.expand_as(self.eps), self.eps], -1)
        return both[..., _FIRST] * both[..., _SECOND]

    def quadratic_form(self, matrix: Tensor) -> Tensor:
        """The quadratic form of the coordinates (u, eps). Shapes: ``(4, 4) -> (K, n)``."""
        return self.products @ (matrix[_FIRST, _SECOND] * torch.where(_FIRST == _SECOND, 1.0, 2.0))


def scramblings(preset: Preset, n: int, seed: int) -> list[Points]:
    """Independently scrambled Sobol nets."""
    generator, like = seeded(20_000 + seed), torch.empty(0, dtype=torch.float64)
    nets = [Sobol(generator).normal(preset.n_points, (), 2 + 2 * preset.k, like=like) for _ in range(n)]
    return [Points(net[:, :2], net[:, 2:].reshape(-1, preset.k, 2).movedim(1, 0).contiguous()) for net in nets]


class Solution(NamedTuple):
    """What the bounds need of the model at one lambda: covariance of x, and of z given x precision and map of means.

    Shapes: ``(2, 2)`` each.
    """

    marginal: Tensor
    precision: Tensor
    gain: Tensor

    @classmethod
    def of(cls, model: LambdaPPCA) -> Solution:
        """The solution of a model of centred observations."""
        marginal = model.loading @ model.loading.mT + torch.diag(model.noise_sd**2)
        unit = torch.eye(2, dtype=marginal.dtype)
        return cls(marginal, torch.linalg.inv(model.posterior_covariance()), model.posterior(unit).loc.mT)


@dataclass(frozen=True, eq=False)
class Example:
    """The true model, the proposals fitted to its posterior at lambda = 0, and the points that integrate over x and z.

    Shapes: ``base (2, 2)``, each precision ``(2,)``.
    """

    base: Tensor
    points: Points
    precision: Mapping[str, Tensor]
    solved: dict[float, Solution] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, base: Tensor, points: Points) -> Example:
        """Fit every proposal at lambda = 0, that of the IWELBO on the points."""
        precision = Solution.of(LambdaPPCA(base, FITTED_AT)).precision
        fitted = {
            "VAE": mean_field.mean_field_reverse_kl(precision),
            "IWAE": mean_field.mean_field_iwelbo_on(points.eps, precision),
            "WW": mean_field.mean_field_forward_kl(precision),
            "CHI": mean_field.mean_field_chi_square(precision),
        }
        return cls(base, points, fitted)

    def at(self, lam: float) -> Solution:
        """The model at another lambda, all else true."""
        if lam not in self.solved:
            self.solved[lam] = Solution.of(LambdaPPCA(self.base, lam))
        return self.solved[lam]

    @cached_property
    def root(self) -> Tensor:
        """The matrix C for which x = C u has the true distribution. Shapes: ``-> (2, 2)``."""
        return torch.linalg.cholesky(self.at(TRUE_LAMBDA).marginal)

    def evidence(self, lam: float) -> float:
        """The expectation of log p(x) at lambda, in closed form."""
        cov = self.at(lam).marginal
        trace = torch.linalg.solve(cov, self.at(TRUE_LAMBDA).marginal).trace()
        return -0.5 * (torch.logdet(2 * math.pi * cov) + trace).item()

    def slack(self, lam: float, proposal: str, means: str) -> float:
        """The expectation of the evidence minus the IWELBO, at lambda."""
        target, precision = self.at(lam).precision, self.precision[proposal]
        shift = torch.zeros_like(target)
        if means == "frozen":
            shift = (self.at(FITTED_AT).gain - self.at(lam).gain) @ self.root
        deviation = torch.cat([shift, torch.diag(precision.rsqrt())], 1)  # of z from the posterior's mean, by (u, eps)
        form = _NORM_OF_EPS - deviation.mT @ target @ deviation
        log_w = 0.5 * (self.points.quadratic_form(form) + torch.logdet(target) - precision.log().sum())
        return -iwelbo(log_w).mean().item()


# ---------------------------------------------------------------------------------------------------- panels A and B
def approximation(examples: Sequence[Example]) -> dict[str, Any]:
    """Panels A and B: the posterior of x = 0 at lambda = 0, each proposal, and its norm of A."""
    cov = torch.linalg.inv(examples[0].at(FITTED_AT).precision)
    rows = []
    for name in PROPOSALS:
        variances = [1 / example.precision[name] for example in examples]  # equal, but for the numerical fit of IWAE
        norms = Estimate.of(a_norm(cov, variance).item() for variance in variances)
        mean = torch.stack(variances).mean(0)
        shape = {"covariance": torch.diag(mean).tolist(), "variance_ratio": (mean / cov.diagonal()).tolist()}
        rows.append({"proposal": name, **shape, "a_norm": norms.value, "a_norm_se": norms.se})
    return {"posterior": {"covariance": cov.tolist(), "correlation": _correlation(cov)}, "proposals": rows}


def _correlation(cov: Tensor) -> float:
    return (cov[0, 1] / cov.diagonal().prod().sqrt()).item()


class Estimate(NamedTuple):
    """A mean over scramblings and its standard error."""

    value: float
    se: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate:
        """The estimate from one value per scrambling."""
        each = torch.tensor(list(values), dtype=torch.float64)
        return cls(each.mean().item(), (each.std() / len(each) ** 0.5).item())


# ---------------------------------------------------------------------------------------------------- panels C and D
Curve = Callable[[float], float]
"""A bound as a function of lambda."""


class Choice(NamedTuple):
    """The lambda that a bound selects, and two measures of how strongly the bound depends on lambda.

    ``slope`` is the slope, at the true lambda, of the gap between evidence and bound, which shifts the maximum.
    ``range`` is the difference between the highest and the lowest point of the bound on the grid.
    """

    lam: float
    slope: float
    range: float

    @property
    def bias(self) -> float:
        """The selected lambda minus the true one."""
        return self.lam - TRUE_LAMBDA

    @property
    def at_edge(self) -> bool:
        """Whether the bound has no maximum inside the grid."""
        return abs(self.lam) > _EDGE - 0.01


def curves(example: Example, means: str) -> dict[str, Curve]:
    """The evidence and the bound of every proposal."""
    bounds = {
        name: lambda lam, name=name: example.evidence(lam) - example.slack(lam, name, means) for name in PROPOSALS
    }
    return {"EVIDENCE": example.evidence, **bounds}


def choose(example: Example, means: str, n_grid: int) -> tuple[dict[str, Choice], dict[str, list[float]]]:
    """What each bound selects, and its values on the grid."""
    grid, bounds = lambda_grid(n_grid), curves(example, means)
    values = {name: [bound(lam) for lam in grid] for name, bound in bounds.items()}

    def choice(name: str) -> Choice:
        lam = _maximum(bounds[name], grid, values[name])
        slope = _slope(bounds["EVIDENCE"]) - _slope(bounds[name])
        return Choice(lam, slope, bounds[name](lam) - min(values[name]))

    return {name: choice(name) for name in bounds}, values


def lambda_grid(n: int) -> list[float]:
    """Evenly spaced values of lambda."""
    return torch.linspace(-_EDGE, _EDGE, n, dtype=torch.float64).tolist()


def _maximum(curve: Curve, grid: list[float], values: list[float]) -> float:
    """The maximum of the curve: the best of the grid, refined between its neighbours by Brent's method."""
    best = max(range(len(grid)), key=values.__getitem__)
    bounds = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    result: Any = optimize.minimize_scalar(
        lambda lam: -curve(lam), bounds=bounds, method="bounded", options={"xatol": 1e-5}
    )
    return float(result.x)


def _slope(curve: Curve) -> float:
    return (curve(TRUE_LAMBDA + _STEP) - curve(TRUE_LAMBDA - _STEP)) / (2 * _STEP)


def selection(preset: Preset, examples: Sequence[Example], means: str) -> dict[str, Any]:
    """Panels C and D: every bound as a function of lambda, a zoom at the maxima, and the lambda each would select."""
    runs = [choose(example, means, preset.n_grid) for example in examples]
    choices = {name: [choice[name] for choice, _ in runs] for name in ("EVIDENCE", *PROPOSALS)}
    ends = [TRUE_LAMBDA, *(choice.lam for each in choices.values() for choice in each)]
    near = torch.linspace(max(min(ends) - 0.05, -_EDGE), min(max(ends) + 0.05, _EDGE), preset.n_zoom).tolist()
    zoomed = [curves(example, means) for example in examples]
    return {
        "grid": lambda_grid(preset.n_grid),
        "curves": {name: _drawn([values[name] for _, values in runs]) for name in choices},
        "zoom_grid": near,
        "zoom": {name: _drawn([[bounds[name](lam) for lam in near] for bounds in zoomed]) for name in choices},
        "selection": [_selection_row(name, each) for name, each in choices.items()],
        "claims": claims(choices),
    }


def _drawn(values: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """A curve with standard errors. Shapes: ``values (scramblings, grid)``."""
    points = [Estimate.of(each) for each in zip(*values, strict=True)]
    return {"value": [p.value for p in points], "mcse": [p.se for p in points]}


def _selection_row(name: str, choices: Sequence[Choice]) -> dict[str, Any]:
    lam, slope = (Estimate.of(getattr(c, key) for c in choices) for key in ("lam", "slope"))
    return {
        "proposal": name,
        "lambda": lam.value,
        "lambda_se": lam.se,
        "bias": lam.value - TRUE_LAMBDA,
        "at_edge": any(c.at_edge for c in choices),
        "sensitivity": abs(slope.value),
        "sensitivity_se": slope.se,
    }


SIZES: dict[str, Callable[[Choice], float]] = {
    "slope": lambda choice: abs(choice.slope),
    "range": lambda choice: choice.range,
    "bias": lambda choice: abs(choice.bias),
}
"""What the claims of section 3.2 compare."""

CLAIMS = {
    "slope": "WW and CHI are more sensitive to lambda than VAE and IWAE, by the slope of their slack at the truth",
    "range": "WW and CHI are more sensitive to lambda than VAE and IWAE, by the range of their bound",
    "bias": "WW and CHI select lambda with a higher bias than VAE and IWAE",
}
"""The claims of section 3.2; each holds if WW and CHI have the larger size in all four pairs."""

PAIRS = tuple((wide, narrow) for wide in ("WW", "CHI") for narrow in ("VAE", "IWAE"))


def claims(choices: Mapping[str, Sequence[Choice]]) -> list[dict[str, Any]]:
    """The claims as margins of WW and CHI over VAE and IWAE, paired by scrambling."""
    return [{"claim": text, "margins": _margins(SIZES[key], choices)} for key, text in CLAIMS.items()]


def _margins(size: Callable[[Choice], float], choices: Mapping[str, Sequence[Choice]]) -> dict[str, Any]:
    margins = {}
    for wide, narrow in PAIRS:
        both = zip(choices[wide], choices[narrow], strict=True)
        gap = Estimate.of(size(a) - size(b) for a, b in both)
        margins[f"{wide} - {narrow}"] = {"margin": gap.value, "se": gap.se}
    return margins


# --------------------------------------------------------------------------------------------------- random loadings
def random_row(preset: Preset, example: Example) -> dict[str, Any]:
    """One random loading matrix: its posterior, its proposals, and what each selects; lists follow `PROPOSALS`."""
    cov = torch.linalg.inv(example.at(FITTED_AT).precision)
    variances = [1 / example.precision[name] for name in PROPOSALS]
    selected = {means: choose(example, means, preset.n_random_grid)[0] for means in MEANS}
    return {
        "loading": [[_rounded(entry) for entry in row] for row in example.base.tolist()],
        "correlation": _correlation(cov),
        "variance_ratio": [(v / cov.diagonal()).max().item() for v in variances],
        "a_norm": [a_norm(cov, v).item() for v in variances],
        **{
            means: {
                "lambda": [_rounded(choices[name].lam) for name in PROPOSALS],
                **{key: [_rounded(size(choices[name])) for name in PROPOSALS] for key, size in SIZES.items()},
            }
            for means, choices in selected.items()
        },
    }


def _rounded(value: float) -> float:
    """Six significant digits, more than the points resolve."""
    return float(f"{value:.6g}")
