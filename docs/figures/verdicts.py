"""Draws the pictures of verdicts.md and measures what their captions say (`make figures`).

Four posteriors in the plane are asked for a probability: a banana, a ring, two modes, and a spike on a slab. The true
answers are from quadrature. The question about the spike is asked many times, with searches of their own, to see how
often it is missed. The pictures and verdicts.json are written beside this file; `make docs` makes the captions.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Independent, Normal

import vaerdict as vd
from vaerdict.inference.search import ModeSearch
from vaerdict.report.figures import GREY, INK, OKABE_ITO, blank, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
N_DRAWS, TOLERANCE, SEED = 1000, 0.02, 0
N_CELLS, HALF_WIDTH = 1600, 8.0  # cells of the quadrature per axis, and the square they cover
LEVELS = (0.99, 0.9, 0.5)  # posterior mass inside the contours
MOST_POINTS = 1500
SPIKE = (1.4, 0.8)
BLUE, ORANGE = OKABE_ITO[0], OKABE_ITO[3]


# ------------------------------------------------------------------------------------------------------- posteriors
@dataclass(frozen=True, eq=False)
class Plane:
    """A model with two normal latents and a given log-likelihood; the likelihood has no data besides its parameters.

    Shapes: ``log_likelihood (K, n, 2) -> (K, n)``.
    """

    scale: float
    log_likelihood: Callable[[Tensor], Tensor]

    @property
    def prior(self) -> Independent:
        """Independent normals around zero."""
        return Independent(Normal(torch.zeros(2).double(), torch.full((2,), self.scale).double()), 1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        """Log p(x, z). Shapes: ``(n, 1), (K, n, 2) -> (K, n)``."""
        return self.prior.log_prob(z) + self.log_likelihood(z)


def banana(z: Tensor) -> Tensor:
    """One measurement of a parabola."""
    return Normal(1.0, 0.4).log_prob(z[..., 1] + 0.8 * z[..., 0].square())


def ring(z: Tensor) -> Tensor:
    """A measured radius."""
    return Normal(2.0, 0.12).log_prob(torch.linalg.vector_norm(z, dim=-1))


def mixture(*parts: tuple[float, tuple[float, float], tuple[float, float]]) -> Callable[[Tensor], Tensor]:
    """Log-density of normals with given weights, locations and scales."""
    weight, loc, scale = (torch.tensor(t).double() for t in zip(*parts, strict=True))
    return lambda z: torch.logsumexp(weight.log() + Normal(loc, scale).log_prob(z.unsqueeze(-2)).sum(-1), -1)


def slab_and_spike(width: float) -> Callable[[Tensor], Tensor]:
    """A round normal, and a narrow one of the same mass beside its centre."""
    return mixture((0.5, (0.0, 0.0), (1.0, 1.0)), (0.5, SPIKE, (width, width)))


@dataclass(frozen=True, eq=False)
class Case:
    """A posterior and the probability asked for: that the latent with index `axis` is beyond the `limit`."""

    name: str
    model: Plane
    axis: int
    limit: float
    above: bool
    window: tuple[tuple[float, float], tuple[float, float]]
    repeats: int = 1
    missed: tuple[float, float] | None = None  # a mode that no search has found

    @property
    def x(self) -> Tensor:
        """Identical observations, each with draws and searches of its own. Shapes: ``-> (repeats, 1)``."""
        return torch.zeros(self.repeats, 1).double()

    @property
    def question(self) -> str:
        """The probability in words."""
        limit = f"{self.limit:g}".replace("-", "\N{MINUS SIGN}")
        return f"P(z{'₁₂'[self.axis]} {'>' if self.above else '<'} {limit} | x)"

    def query(self, z: Tensor) -> Tensor:
        """The indicator. Shapes: ``(K, n, 2) -> (K, n)``."""
        return ((z[..., self.axis] > self.limit) == self.above).double()


WIDTHS = (0.008, 0.02)  # of the spike that is drawn, and of one that is found more often

CASES = (
    Case("banana", Plane(2.0, banana), 1, -2.0, False, ((-3.4, 3.4), (-6.5, 3.0))),
    Case("ring", Plane(2.0, ring), 0, 1.0, True, ((-2.9, 2.9), (-2.9, 2.9))),
    Case(
        "two-modes",
        Plane(3.0, mixture((0.65, (-2.0, -0.5), (0.7, 0.35)), (0.35, (1.8, 1.0), (0.3, 0.6)))),
        0,
        0.0,
        True,
        ((-4.6, 3.8), (-2.6, 3.6)),
    ),
    Case("spike", Plane(3.0, slab_and_spike(WIDTHS[0])), 0, 1.0, True, ((-3.2, 3.2), (-3.2, 3.2)), 100, SPIKE),
)
WIDER_SPIKE = Case("wider-spike", Plane(3.0, slab_and_spike(WIDTHS[1])), 0, 1.0, True, CASES[-1].window, 100)


# ------------------------------------------------------------------------------------------------------- measuring
def truth(case: Case) -> float:
    """The posterior probability by the midpoint rule; the limit must be an edge of the cells."""
    width = 2 * HALF_WIDTH / N_CELLS
    axis = width * (torch.arange(N_CELLS).double() + 0.5) - HALF_WIDTH
    log_mass, log_inside = [], []
    for rows in axis.split(N_CELLS // 8):
        z = torch.cartesian_prod(rows, axis)
        log_p = case.model.log_joint(z[:, :1], z)
        log_mass.append(log_p.logsumexp(0))
        log_inside.append((log_p + case.query(z).log()).logsumexp(0))
    return math.exp(torch.stack(log_inside).logsumexp(0) - torch.stack(log_mass).logsumexp(0))


def ask(case: Case) -> vd.Posterior:
    """The draws behind the answers."""
    return vd.posterior(
        case.model, case.x, {}, N_DRAWS, tolerance=TOLERANCE, query=case.query, generator=vd.seeded(SEED)
    )


def modes(case: Case) -> Tensor:
    """Where the searches behind the first answer of `ask` ended. Shapes: ``-> (J, 2)``."""
    generator = vd.seeded(SEED)
    start = vd.Prior(case.model.prior).draw(case.x, 64, generator=generator).z.mean(0)
    kernels = ModeSearch(case.model, case.x, start, generator=generator).kernels
    return kernels.loc[:, 0][kernels.log_share[:, 0] > math.log(1e-3)]


def measured(case: Case, answer: vd.Posterior) -> dict[str, Any]:
    """What a caption says: the first answer, the truth, and how many answers are ok and how many of these right."""
    record, exact = answer.record, truth(case)
    assert record is not None
    ok = record.verdict == vd.Verdict.OK
    error = (record.value - exact).abs()
    return {
        "question": case.question,
        "verdict": vd.Verdict(int(record.verdict[0])).name,
        "stage": record.stage[0],
        "value": round(record.value[0].item(), 4),
        "mcse": round(record.mcse[0].item(), 4),
        "truth": round(exact, 4),
        "draws": int(record.draws[0]),
        "cost": int(record.cost[0]),
        "scope": record.scope.sentence(0),
        "modes": int(record.scope.modes[0]),
        "missing": round(record.scope.missing[0].item(), 3),
        "n_answers": len(ok),
        "n_ok": int(ok.sum()),
        "n_caution": int((record.verdict == vd.Verdict.CAUTION).sum()),
        "n_ok_right": int((ok & (error <= TOLERANCE)).sum()),
    }


# --------------------------------------------------------------------------------------------------------- drawing
def picture(case: Case, answer: vd.Posterior) -> Figure:
    """Contours of the posterior, draws shaded by weight, and the modes found."""
    figure, axes = blank(4.6, 3.7)
    _draw_question(axes, case)
    points = _draw_particles(axes, case, answer)
    _draw_contours(axes, case)
    found = modes(case)
    axes.scatter(*found.T, marker="X", s=70, color=ORANGE, edgecolor="white", linewidth=1.0, zorder=5)
    if case.missed:
        arrow = {"arrowstyle": "->", "color": INK, "shrinkB": 4}
        axes.annotate("missed", case.missed, (2.0, 2.2), ha="left", arrowprops=arrow, zorder=6)
    (left, right), (low, high) = case.window
    axes.set(xlim=(left, right), ylim=(low, high), xlabel="z₁", ylabel="z₂")
    bar = figure.colorbar(points, ax=axes, shrink=0.75, ticks=[0, 1, 2], label="weight / mean weight")
    bar.ax.set_yticklabels(["0", "1", "≥ 2"])
    bar.outline.set_visible(False)  # type: ignore[operator]
    return figure


def _draw_question(axes: Axes, case: Case) -> None:
    """A shaded half-plane: the event asked for."""
    end = case.window[case.axis][1 if case.above else 0]
    span = (min(case.limit, end), max(case.limit, end))
    (axes.axhspan if case.axis else axes.axvspan)(*span, color=OKABE_ITO[1], alpha=0.12, linewidth=0)
    (axes.axhline if case.axis else axes.axvline)(case.limit, color=GREY, linestyle="--", linewidth=1)


def _draw_particles(axes: Axes, case: Case, answer: vd.Posterior) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    assert answer.record is not None
    assert isinstance(answer.z, Tensor)
    n = int(answer.record.draws[0])
    chosen = torch.randperm(n, generator=vd.seeded(SEED))[:MOST_POINTS]
    z, relative = answer.z[chosen, 0], (n * answer.log_w[:n, 0].softmax(0))[chosen]
    order = relative.argsort()
    shades = LinearSegmentedColormap.from_list("weight", ["#d5dade", "#7fb8da", BLUE, "#002f4a"])
    return axes.scatter(*z[order].T, c=relative[order], s=5, cmap=shades, vmin=0, vmax=2, linewidth=0, zorder=2)


def _draw_contours(axes: Axes, case: Case) -> None:
    """Lines around the regions of highest density that hold given shares of the posterior."""
    side = [torch.linspace(low, high, 701).double() for low, high in case.window]
    first, second = torch.meshgrid(*side, indexing="xy")
    z = torch.stack([first, second], -1)
    density = case.model.log_joint(z[..., :1], z)
    density = (density - density.max()).exp()
    ordered = density.flatten().sort(descending=True).values
    mass = ordered.cumsum(0) / ordered.sum()
    heights = [ordered[int(torch.searchsorted(mass, level))].item() for level in LEVELS]
    axes.contour(first, second, density, levels=heights, colors=INK, linewidths=(0.7, 0.9, 1.1), zorder=3)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG on white with 256 colours, which is small and readable on pages of any colour."""
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, facecolor="white")
    Image.open(buffer).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def main() -> None:
    """Write all pictures and the numbers of their captions."""
    results: dict[str, Any] = {"settings": {"n": N_DRAWS, "tolerance": TOLERANCE, "seed": SEED}}
    for case in (*CASES, WIDER_SPIKE):
        answer = ask(case)
        results[case.name] = measured(case, answer)
        if case in CASES:
            with styled():
                save(picture(case, answer), FOLDER / f"{case.name}.png")
    for name, width in zip(("spike", "wider-spike"), WIDTHS, strict=True):
        results[name]["width"] = width
    (FOLDER / "verdicts.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
