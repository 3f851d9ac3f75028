r"""Figure 1 of the paper: mean-field proposals of a bivariate pPCA posterior, and the model that each would select.

The paper gives :math:`\lambda = 0.82` and five particles, but not the loading matrix W' (`LOADINGS` has ours), and its
text allows two readings of the proposals' means (`MEANS`). In both, the variances are those of the optimum at
:math:`\lambda = 0`. The means are those of the posterior at :math:`\lambda = 0` (``frozen``, as section 3.2 says), or
at the :math:`\lambda` in question (``exact``, as its equation for :math:`\mathrm{KL}(q \Vert p)` assumes, which has no
mean). The two readings disagree on which proposal selects the better model, so both are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from scipy import optimize
from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.distributions import Diagonal, Elliptical
from vaerdict.models.ppca import LambdaPPCA
from vaerdict.noise import seeded
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
five particles is narrower than that of the forward KL. The others have correlations -0.67 and -0.37; the claims are
tested on all three."""

_EDGE = 0.98
_STEP = 1e-3  # of the central differences; the grid ends far enough from 1 for it


@dataclass(frozen=True)
class Preset:
    """Sizes of the data, grids and numbers of draws."""

    loadings: tuple[str, ...] = tuple(LOADINGS)
    k: int = 5
    n_data: int = 20_000
    n_grid: int = 50
    n_zoom: int = 31
    n_draws: int = 100_000

    def __post_init__(self) -> None:
        unknown = sorted(set(self.loadings) - set(LOADINGS))
        if unknown:
            raise SettingError(f"no loadings {', '.join(unknown)}; choose from {', '.join(LOADINGS)}.")


PRESETS = {
    "paper": Preset(),
    "quick": Preset(loadings=("entangled",), n_data=4_000, n_grid=25, n_zoom=11, n_draws=10_000),
}


def tasks(preset: Preset, seeds: int | None = None) -> list[Task]:
    """Panels A and B, then C and D for each reading of the means, for every loading and seed."""
    settings = asdict(preset)
    return [
        {"stage": stage, "loading": loading, "means": means, "seed": seed, **settings}
        for seed in range(seeds or 1)
        for loading in preset.loadings
        for stage, means in (("approximation", None), *(("selection", means) for means in MEANS))
    ]


def work(task: Task) -> dict[str, Any]:
    """Do one task (see `tasks`)."""
    fields = {name: task[name] for name in Preset.__dataclass_fields__}
    preset = Preset(**{**fields, "loadings": tuple(fields["loadings"])})
    with torch.no_grad():
        example = Example.of(preset, task["loading"], task["seed"])
        panel = (
            approximation(example) if task["stage"] == "approximation" else selection(preset, example, task["means"])
        )
    return {"panels": [{**{key: task[key] for key in ("stage", "loading", "means", "seed")}, **panel}]}


def data(preset: Preset, seeds: Sequence[int]) -> Iterator[Tensor]:
    """The observations of every loading and seed, for the hash in the manifest."""
    return (_observations(preset, loading, seed) for loading in preset.loadings for seed in seeds)


def _observations(preset: Preset, loading: str, seed: int) -> Tensor:
    base = torch.tensor(LOADINGS[loading], dtype=torch.float64)
    return LambdaPPCA(base, TRUE_LAMBDA).simulate(preset.n_data, generator=seeded(seed))[0]


@dataclass(frozen=True, eq=False)
class Example:
    """Observations of the true model, base noise shared by all proposals and lambdas, and the fitted precisions.

    Shapes: ``base (2, 2)``, ``x (n, 2)``, ``eps (K, n, 2)``, each precision ``(2,)``.
    """

    base: Tensor
    x: Tensor
    eps: Tensor
    precision: Mapping[str, Tensor]

    @classmethod
    def of(cls, preset: Preset, loading: str, seed: int) -> Example:
        """Simulate at the true lambda and fit every proposal at lambda = 0."""
        base = torch.tensor(LOADINGS[loading], dtype=torch.float64)
        x = _observations(preset, loading, seed)
        eps = torch.randn(preset.k, *x.shape, generator=seeded(10_000 + seed), dtype=x.dtype)
        return cls(base, x, eps, _fitted(loading, preset.k, preset.n_draws, seed))

    def model(self, lam: float) -> LambdaPPCA:
        """The model at another lambda, all else true."""
        return LambdaPPCA(self.base, lam)

    def evidence(self, lam: float) -> Tensor:
        """Exact log p(x) at lambda. Shapes: ``-> (n,)``."""
        return self.model(lam).log_evidence(self.x)

    def bound(self, lam: float, proposal: str, means: str) -> Tensor:
        """IWELBO of the model at lambda, one estimate per observation. Shapes: ``-> (n,)``."""
        model = self.model(lam)
        loc = (model if means == "exact" else self.model(FITTED_AT)).posterior(self.x).loc
        q = Elliptical(loc, Diagonal(self.precision[proposal].rsqrt().expand_as(loc)))
        z = loc + q.root.apply(self.eps)
        return iwelbo(model.log_joint(self.x, z) - q.log_prob(z))


@cache
@torch.no_grad()
def _fitted(loading: str, k: int, n_draws: int, seed: int) -> dict[str, Tensor]:
    model = LambdaPPCA(torch.tensor(LOADINGS[loading], dtype=torch.float64), FITTED_AT)
    precision = torch.linalg.inv(model.posterior_covariance())
    return {
        "VAE": mean_field.mean_field_reverse_kl(precision),
        "IWAE": mean_field.mean_field_iwelbo(precision, k, n_draws=n_draws, generator=seeded(20_000 + seed)),
        "WW": mean_field.mean_field_forward_kl(precision),
        "CHI": mean_field.mean_field_chi_square(precision),
    }


def approximation(example: Example) -> dict[str, Any]:
    """Panels A and B: the posterior at lambda = 0 for the first observation, each proposal, and its norm of A."""
    posterior = example.model(FITTED_AT).posterior(example.x[:1])
    cov, mean = posterior.covariance()[0], posterior.loc[0]
    rows = [
        {
            "proposal": name,
            "mean": mean.tolist(),
            "covariance": torch.diag(1 / precision).tolist(),
            "variance_ratio": (1 / precision / cov.diagonal()).tolist(),
            "a_norm": a_norm(cov, 1 / precision).item(),
        }
        for name, precision in example.precision.items()
    ]
    correlation = (cov[0, 1] / cov.diagonal().prod().sqrt()).item()
    ellipse = {"mean": mean.tolist(), "covariance": cov.tolist(), "correlation": correlation}
    return {"x": example.x[0].tolist(), "posterior": ellipse, "proposals": rows}


def selection(preset: Preset, example: Example, means: str) -> dict[str, Any]:
    """Panels C and D: every bound as a function of lambda, a zoom at the maxima, and the lambda each would select."""
    curves = _curves(example, means)
    grid = torch.linspace(-_EDGE, _EDGE, preset.n_grid, dtype=torch.float64).tolist()
    wide = {name: _drawn(curve, grid) for name, curve in curves.items()}
    choices = {name: Choice.of(curve, grid, wide[name]["value"], curves["EVIDENCE"]) for name, curve in curves.items()}
    ends = [TRUE_LAMBDA, *(choice.lam for choice in choices.values())]
    low, high = max(min(ends) - 0.05, -_EDGE), min(max(ends) + 0.05, _EDGE)
    near = torch.linspace(low, high, preset.n_zoom, dtype=torch.float64).tolist()
    return {
        "grid": grid,
        "curves": wide,
        "zoom_grid": near,
        "zoom": {name: _drawn(curve, near) for name, curve in curves.items()},
        "selection": [{"proposal": name, **choice.row()} for name, choice in choices.items()],
        "claims": _selection_claims(choices),
    }


Curve = Callable[[float], Tensor]
"""A bound as a function of lambda: one number per observation."""


def _curves(example: Example, means: str) -> dict[str, Curve]:
    bounds = {name: lambda lam, name=name: example.bound(lam, name, means) for name in PROPOSALS}
    return {"EVIDENCE": example.evidence, **bounds}


def _drawn(curve: Curve, grid: list[float]) -> dict[str, list[float]]:
    values = [curve(lam) for lam in grid]
    return {"value": [v.mean().item() for v in values], "mcse": [_standard_error(v) for v in values]}


def _standard_error(values: Tensor) -> float:
    return (values.std() / len(values) ** 0.5).item()


@dataclass(frozen=True, eq=False)
class Choice:
    r"""The lambda a bound selects, each observation's influence on it, and the bound's sensitivity to lambda.

    With f the bound of one observation the maximiser of its mean has
    :math:`\hat\lambda - \lambda \approx \tfrac1n\sum_i f_i'(\hat\lambda) / |\bar f''(\hat\lambda)|`. ``slack`` is the
    slope, at the true lambda, of the gap between evidence and bound, which shifts the maximum. ``fall`` is the
    difference between the highest and the lowest point of the bound.

    Shapes: ``influence (n,)``, ``slack (n,)``, ``fall (n,)``.
    """

    lam: float
    influence: Tensor
    slack: Tensor
    fall: Tensor

    @classmethod
    def of(cls, curve: Curve, grid: list[float], values: list[float], evidence: Curve) -> Choice:
        """Refine the maximum on the grid; derivatives are central differences with the same noise at every lambda."""
        lam = _maximum(curve, grid, values)
        low, mid, high = (curve(lam + step) for step in (-_STEP, 0.0, _STEP))
        curvature = (low - 2 * mid + high).mean().abs() / _STEP**2
        influence = (high - low) / (2 * _STEP) / curvature
        fall = mid - curve(grid[min(range(len(grid)), key=values.__getitem__)])
        return cls(lam, influence, _slope(evidence) - _slope(curve), fall)

    @property
    def bias(self) -> float:
        """Distance of the selected lambda from the true one."""
        return self.lam - TRUE_LAMBDA

    def row(self) -> dict[str, Any]:
        """The choice with standard errors over data and draws."""
        return {
            "lambda": self.lam,
            "lambda_se": _standard_error(self.influence),
            "bias": self.bias,
            "at_edge": abs(self.lam) > _EDGE - 0.01,
            "sensitivity": self.slack.mean().abs().item(),
            "sensitivity_se": _standard_error(self.slack),
            "range": self.fall.mean().item(),
            "range_se": _standard_error(self.fall),
        }


def _maximum(curve: Curve, grid: list[float], values: list[float]) -> float:
    """The maximum of the curve: the best of the grid, refined between its neighbours by Brent's method."""
    best = max(range(len(grid)), key=values.__getitem__)
    bounds = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])

    def negative(lam: float) -> float:
        return -curve(lam).mean().item()

    result: Any = optimize.minimize_scalar(negative, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return float(result.x)


def _slope(curve: Curve) -> Tensor:
    return (curve(TRUE_LAMBDA + _STEP) - curve(TRUE_LAMBDA - _STEP)) / (2 * _STEP)


def _selection_claims(choices: Mapping[str, Choice]) -> list[dict[str, Any]]:
    """Claims of section 3.2 as margins of WW and CHI over VAE and IWAE; a claim holds if all four are positive."""
    return [
        _margins(
            "WW and CHI are more sensitive to lambda than VAE and IWAE, by the slope of their slack at the truth",
            {name: _size(choice.slack.mean().item(), choice.slack) for name, choice in choices.items()},
        ),
        _margins(
            "WW and CHI are more sensitive to lambda than VAE and IWAE, by the range of their bound",
            {name: _size(choice.fall.mean().item(), choice.fall) for name, choice in choices.items()},
        ),
        _margins(
            "WW and CHI select lambda with a higher bias than VAE and IWAE",
            {name: _size(choice.bias, choice.influence) for name, choice in choices.items()},
        ),
    ]


def _size(value: float, influence: Tensor) -> tuple[float, Tensor]:
    """The absolute value of an estimate, and the influence of each observation on it."""
    return abs(value), influence if value >= 0 else -influence


def _margins(claim: str, size: Mapping[str, tuple[float, Tensor]]) -> dict[str, Any]:
    """Differences of sizes, with standard errors paired by the noise that the proposals share."""
    margins = {
        f"{wide} - {narrow}": {
            "margin": size[wide][0] - size[narrow][0],
            "se": _standard_error(size[wide][1] - size[narrow][1]),
        }
        for wide in ("WW", "CHI")
        for narrow in ("VAE", "IWAE")
    }
    return {"claim": claim, "holds": all(m["margin"] > 0 for m in margins.values()), "margins": margins}
