"""The bounds of the paper's theory: what they promise for the figure's proposals, and as printed against the truth."""

from __future__ import annotations

import math

import torch
from scipy import stats
from torch import Tensor

from vaerdict.report.document import Block
from vaerdict.report.records import Row
from vaerdict.report.tables import Column, Table, Value
from vaerdict_paper.theory import concentration, error_bounds
from vaerdict_paper.theory.gaussians import (
    Gaussian,
    a_norm,
    gaussian_chi_square,
    gaussian_forward_kl,
    log_ratio_form,
)

_GOAL = {"kappa": 1.0, "deviation": 0.1, "probability": 0.1}
"""Of Theorem 1: the second moment of f, the deviation, and the probability of exceeding it."""

_TEXT = (
    "Lemma 1, Theorem 1 and Proposition 1 hold with corrections, which the tests compare with exact probabilities. "
    "Theorem 1 is sufficient and far from necessary: draws of the order of exp KL(p‖q) are necessary and, up to the "
    "spread of the log weights, sufficient (Chatterjee and Diaconis, 2018)."
)


def bounds_blocks(shape: Row) -> list[Block]:
    """The two tables, for the posterior and the proposals of panel A."""
    return [_TEXT, _promises(shape), _printed()]


def _promises(shape: Row) -> Table:
    """The divergences of each proposal and the draws that Theorem 1 asks for, as a power of ten."""
    p = Gaussian(torch.zeros(2, dtype=torch.float64), _matrix(shape["posterior"]["covariance"]))
    body = []
    for row in shape["proposals"]:
        q = Gaussian(torch.zeros_like(p.mean), _matrix(row["covariance"]))
        kl, norm, form = gaussian_forward_kl(p, q), a_norm(p.cov, q.cov), log_ratio_form(p, q)
        cells: dict[str, object] = {
            "proposal": row["proposal"],
            "kl": Value(kl.item()),
            "chi": Value(chi) if math.isfinite(chi := gaussian_chi_square(p, q).item()) else "infinite",
            "a_norm": Value(norm.item()),
            "necessary": Value(kl.exp().item()),
        }
        for name, printed in (("corrected", False), ("printed", True)):
            t_star = concentration.large_deviation_threshold(*form, printed=printed)
            # in units of exp(KL) and as a logarithm of base ten, so that the numbers fit
            log_n = error_bounds.sufficient_sample_size(0.0, norm, t_star=t_star, printed=printed, **_GOAL).log10()
            cells[name] = Value(log_n.item() + kl.item() / math.log(10))
        body.append(cells)
    columns = [
        Column("proposal", "proposal"),
        Column("kl", "KL(p‖q)"),
        Column("chi", "χ²(p‖q)"),
        Column("a_norm", "‖A‖₂"),
        Column("necessary", "exp KL(p‖q)", 1),
        Column("corrected", "log₁₀ of draws by Theorem 1", 0),
        Column("printed", "as printed", 0),
    ]
    caption = (
        f"What Theorem 1 asks of the proposals of panel A ({shape['loading']}), for an error above "
        f"{_GOAL['deviation']:g} with probability {_GOAL['probability']:g} at most, of a function whose second moment "
        "is one."
    )
    return Table("bounds", caption, columns, body)


def _matrix(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _printed() -> Table:
    """Points at which the truth is known exactly and a printed bound lies below it."""
    zero, one, n, d = torch.zeros(1, 1), torch.ones(1), 10, 400
    chi = torch.eye(d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
    t = 1.001 * concentration.large_deviation_threshold(*chi, printed=True).item()
    points = [
        (
            "Lemma 2, P(|v - E v| ≥ 3) for A = 0, b = 1",
            2 * stats.norm.sf(3),
            [concentration.concentration_bound(zero, one, 3.0, printed=printed) for printed in (True, False)],
        ),
        (
            f"Lemma 2, P(|v - E v| ≥ {t:.0f}) just above the printed t*, for A the identity of {d} dimensions, b = 0",
            stats.chi2.sf(d + t, d) + stats.chi2.cdf(d - t, d),
            [concentration.large_deviation_bound(*chi, t, printed=printed) for printed in (True, False)],
        ),
        (
            f"Proposition 1, plugin with {n} draws, f = ±1 with even odds, q = p",
            1 / n,
            [error_bounds.plugin_mse_bound(0.0, n, printed=printed) for printed in (True, False)],
        ),
        (
            f"Proposition 1, SNIS with {n} draws, f = ±1 with even odds, q = p",
            1 / n,
            [error_bounds.snis_mse_bound(0.0, n, printed=printed) for printed in (True, False)],
        ),
    ]
    body = [
        {"bound": text, "truth": Value(truth), "printed": Value(as_printed.item()), "corrected": Value(right.item())}
        for text, truth, (as_printed, right) in points
    ]
    columns = [
        Column("bound", "quantity"),
        Column("truth", "truth", None),
        Column("printed", "bound as printed", None),
        Column("corrected", "bound corrected", None),
    ]
    return Table("printed-bounds", "Bounds of the appendix where the truth is known.", columns, body)
