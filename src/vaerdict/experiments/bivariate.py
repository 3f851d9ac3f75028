r"""Figure 1 of the paper: mean-field proposals of a bivariate pPCA posterior, and the model each of them would select.

The paper gives :math:`\lambda = 0.82` and five particles, not the loading matrix W' (`LOADINGS` names ours), and it can
be read in two ways on the proposals' means (`MEANS`). Their variances are those of the optimum at :math:`\lambda = 0`
in both; the means are the posterior's at :math:`\lambda = 0` (``frozen``, the words of section 3.2), or at the
:math:`\lambda` in question (``exact``, the assumption of its equation for :math:`\mathrm{KL}(q \Vert p)`, in which no
mean appears). The two disagree on which proposal selects the better model, so both are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy import optimize
from torch import Tensor

from vaerdict.distributions import Diagonal, Elliptical
from vaerdict.experiments.runner import Unit
from vaerdict.models.ppca import LambdaPPCA
from vaerdict.noise import seeded
from vaerdict.objectives import iwelbo
from vaerdict.theory import (
    a_norm,
    mean_field_chi_square,
    mean_field_forward_kl,
    mean_field_iwelbo,
    mean_field_reverse_kl,
)

TRUE_LAMBDA = 0.82
FITTED_AT = 0.0
PROPOSALS = ("VAE", "IWAE", "WW", "CHI")
MEANS = ("exact", "frozen")

LOADINGS = {
    "entangled": ((2.0, 3.0), (3.0, 2.0)),
    "moderate": ((1.0, 2.0), (2.0, 1.0)),
    "triangular": ((2.0, 1.0), (0.0, 2.0)),
}
"""W' by name. The figure shows ``entangled``, whose posterior has correlation -0.86 at lambda = 0: past about 0.8 the
optimum of the IWELBO with five particles is narrower than the forward KL's, the order of the paper's figure. The others,
of correlation -0.67 and -0.37, say what of it is general."""

_EDGE = 0.98
_STEP = 1e-3


@dataclass(frozen=True)
class Preset:
    """How finely to draw the figure."""

    loadings: tuple[str, ...] = tuple(LOADINGS)
    k: int = 5
    n_data: int = 20_000
    n_grid: int = 50
    n_zoom: int = 31
    n_draws: int = 100_000


PRESETS = {
    "paper": Preset(),
    "quick": Preset(loadings=("entangled",), n_data=4_000, n_grid=25, n_zoom=11, n_draws=10_000),
}


def units(preset: Preset, seeds: int | None = None) -> list[Unit]:
    """Panels A and B, then C and D for each reading of the means, of every loading; once for each seed."""
    settings = asdict(preset)
    return [
        {"stage": stage, "loading": loading, "means": means, "seed": seed, **settings}
        for seed in range(seeds or 1)
        for loading in preset.loadings
        for stage, means in (("approximation", None), *(("selection", means) for means in MEANS))
    ]


def work(unit: Unit) -> dict[str, Any]:
    """Do one unit (see `units`)."""
    fields = {name: unit[name] for name in Preset.__dataclass_fields__}
    preset = Preset(**{**fields, "loadings": tuple(fields["loadings"])})
    with torch.no_grad():
        example = Example.of(preset, unit["loading"], unit["seed"])
        found = approximation(example) if unit["stage"] == "approximation" else selection(preset, example, unit["means"])
    return {"stage": unit["stage"], "loading": unit["loading"], "means": unit["means"], "seed": unit["seed"], **found}


@dataclass(frozen=True, eq=False)
class Example:
    """Data of the true model, base noise shared by all proposals and all lambda, and the fitted precisions.

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
        x, _ = LambdaPPCA(base, TRUE_LAMBDA).simulate(preset.n_data, generator=seeded(seed))
        eps = torch.randn(preset.k, *x.shape, generator=seeded(10_000 + seed), dtype=x.dtype)
        precision = torch.linalg.inv(LambdaPPCA(base, FITTED_AT).posterior_covariance())
        draws = seeded(20_000 + seed)
        fitted = {
            "VAE": mean_field_reverse_kl(precision),
            "IWAE": mean_field_iwelbo(precision, preset.k, n_draws=preset.n_draws, generator=draws),
            "WW": mean_field_forward_kl(precision),
            "CHI": mean_field_chi_square(precision),
        }
        return cls(base, x, eps, fitted)

    def model(self, lam: float) -> LambdaPPCA:
        """The model at another lambda, all else true."""
        return LambdaPPCA(self.base, lam)

    def evidence(self, lam: float) -> Tensor:
        """Exact log p(x) at lambda. Shapes: ``-> (n,)``."""
        return self.model(lam).log_evidence(self.x)

    def bound(self, lam: float, proposal: str, means: str) -> Tensor:
        """IWELBO of the model at lambda, one estimate an observation. Shapes: ``-> (n,)``."""
        model = self.model(lam)
        loc = (model if means == "exact" else self.model(FITTED_AT)).posterior(self.x).loc
        q = Elliptical(loc, Diagonal(self.precision[proposal].rsqrt().expand_as(loc)))
        z = loc + q.root.apply(self.eps)
        return iwelbo(model.log_joint(self.x, z) - q.log_prob(z))


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
    return {"x": example.x[0].tolist(), "posterior": ellipse, "proposals": rows, "claims": _shape_claims(rows)}


def _shape_claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ratio = {row["proposal"]: max(row["variance_ratio"]) for row in rows}
    norm = {row["proposal"]: row["a_norm"] for row in rows}
    return [
        {"claim": "the VAE underestimates the variance", "holds": ratio["VAE"] < 1, "variance_ratio": ratio},
        {
            "claim": "the norm of A is smaller for WW and CHI than for the VAE",
            "holds": max(norm["WW"], norm["CHI"]) < norm["VAE"],
            "a_norm": norm,
        },
    ]


def selection(preset: Preset, example: Example, means: str) -> dict[str, Any]:
    """Panels C and D: every bound as a function of lambda, a zoom at the maxima, and the lambda each would select."""
    curves = _curves(example, means)
    grid = torch.linspace(-_EDGE, _EDGE, preset.n_grid, dtype=torch.float64).tolist()
    wide = {name: _drawn(curve, grid) for name, curve in curves.items()}
    maxima = {name: _maximum(curve, grid, wide[name]["value"]) for name, curve in curves.items()}
    ends = [TRUE_LAMBDA, *maxima.values()]
    near = torch.linspace(max(min(ends) - 0.05, -_EDGE), min(max(ends) + 0.05, _EDGE), preset.n_zoom).double().tolist()
    found = {name: Maximum.of(curve, maxima[name], curves["EVIDENCE"]) for name, curve in curves.items()}
    rows = [{"proposal": name, **found[name].row(), "range": _range(wide[name]["value"])} for name in curves]
    zoom = {name: _drawn(curve, near) for name, curve in curves.items()}
    return {
        "grid": grid,
        "curves": wide,
        "zoom_grid": near,
        "zoom": zoom,
        "selection": rows,
        "claims": _selection_claims(found),
    }


Curve = Callable[[float], Tensor]
"""A bound as a function of lambda: one number an observation."""


def _curves(example: Example, means: str) -> dict[str, Curve]:
    bounds = {name: lambda lam, name=name: example.bound(lam, name, means) for name in PROPOSALS}
    return {"EVIDENCE": example.evidence, **bounds}


def _drawn(curve: Curve, grid: list[float]) -> dict[str, list[float]]:
    values = [curve(lam) for lam in grid]
    return {"value": [v.mean().item() for v in values], "mcse": [_standard_error(v) for v in values]}


def _standard_error(values: Tensor) -> float:
    return (values.std() / len(values) ** 0.5).item()


def _range(values: list[float]) -> float:
    return max(values) - min(values)


def _maximum(curve: Curve, grid: list[float], values: list[float]) -> float:
    """The curve's highest point: the best of the grid, refined between its neighbours by Brent's method."""
    best = max(range(len(grid)), key=values.__getitem__)
    bounds = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    options = {"xatol": 1e-4}
    return float(
        optimize.minimize_scalar(lambda lam: -curve(lam).mean().item(), bounds=bounds, method="bounded", options=options).x
    )


@dataclass(frozen=True, eq=False)
class Maximum:
    r"""The lambda a bound selects and each observation's influence on it.

    With f the bound of one observation the maximiser of its mean has
    :math:`\hat\lambda - \lambda \approx \tfrac1n\sum_i f_i'(\hat\lambda) / |\bar f''(\hat\lambda)|`. ``slack`` is the
    slope in lambda of what the bound leaves to the evidence, at the true lambda: what pulls the maximum away.

    Shapes: ``influence (n,)``, ``slack (n,)``.
    """

    lam: float
    curvature: float
    influence: Tensor
    slack: Tensor

    @classmethod
    def of(cls, curve: Curve, lam: float, evidence: Curve) -> Maximum:
        """Take derivatives by central differences, on the same noise at every lambda."""
        centre = min(max(lam, -1 + 2 * _STEP), 1 - 2 * _STEP)
        low, mid, high = (curve(centre + step) for step in (-_STEP, 0.0, _STEP))
        curvature = (low - 2 * mid + high).mean().item() / _STEP**2
        return cls(lam, curvature, _slope(curve, centre) / abs(curvature), _slope(evidence) - _slope(curve))

    def row(self) -> dict[str, Any]:
        """The selected lambda, its bias and the slack's slope, with standard errors."""
        return {
            "lambda": self.lam,
            "lambda_se": _standard_error(self.influence),
            "bias": self.lam - TRUE_LAMBDA,
            "at_edge": abs(self.lam) > _EDGE - 0.01,
            "curvature": self.curvature,
            "sensitivity": abs(self.slack.mean().item()),
            "sensitivity_se": _standard_error(self.slack),
        }


def _slope(curve: Curve, at: float = TRUE_LAMBDA) -> Tensor:
    return (curve(at + _STEP) - curve(at - _STEP)) / (2 * _STEP)


def _selection_claims(found: Mapping[str, Maximum]) -> list[dict[str, Any]]:
    """Section 3.2's claims as margins of WW and CHI over VAE and IWAE; each holds where all four are positive."""
    bias = {name: (abs(m.lam - TRUE_LAMBDA), _signed(m.influence, m.lam - TRUE_LAMBDA)) for name, m in found.items()}
    slack = {name: (abs(m.slack.mean().item()), _signed(m.slack, m.slack.mean().item())) for name, m in found.items()}
    return [
        _margins("WW and CHI are more sensitive to lambda than VAE and IWAE", slack),
        _margins("WW and CHI select lambda with a higher bias than VAE and IWAE", bias),
    ]


def _signed(values: Tensor, sign: float) -> Tensor:
    return values if sign >= 0 else -values


def _margins(claim: str, size: Mapping[str, tuple[float, Tensor]]) -> dict[str, Any]:
    """Differences of sizes, with standard errors that profit from the noise the proposals share."""
    margins = {
        f"{wide} - {narrow}": {
            "margin": size[wide][0] - size[narrow][0],
            "se": _standard_error(size[wide][1] - size[narrow][1]),
        }
        for wide in ("WW", "CHI")
        for narrow in ("VAE", "IWAE")
    }
    return {"claim": claim, "holds": all(m["margin"] > 0 for m in margins.values()), "margins": margins}
