"""The three steps on a problem whose truth is known: choose a model, fit proposals, decide, and compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vaerdict.core import Progress, Proposal, silent
from vaerdict.datasets import linear_gaussian
from vaerdict.diagnostics import Verdict, khat_threshold
from vaerdict.inference import Posterior, ThreeStep, posterior
from vaerdict.models import PPCA
from vaerdict.noise import seeded
from vaerdict.proposals import Normal
from vaerdict.training import Settings

THRESHOLD = 0.5
COST_OF_MISSING, COST_OF_ALARM = 3.0, 1.0
"""The demo's decision: raise an alarm where z_1 >= THRESHOLD; missing one costs three times a false alarm."""

LOSS = torch.tensor([[0.0, COST_OF_MISSING], [COST_OF_ALARM, 0.0]])


def exceeds(z: Tensor) -> Tensor:
    """Whether z_1 reaches the threshold. Shapes: ``(K, n, d) -> (K, n)``."""
    return (z[..., 0] >= THRESHOLD).double()


def states(z: Tensor) -> Tensor:
    """Below and above the threshold as two states. Shapes: ``(K, n, d) -> (K, n, 2)``."""
    above = exceeds(z)
    return torch.stack([1 - above, above], -1)


def run(*, seed: int = 0, n_draws: int = 1000, device: str = "cpu", progress: Progress = silent) -> dict[str, Any]:
    """Run the three steps on simulated pPCA data and compare every answer with the exact one."""
    data = linear_gaussian(seed)
    steps = ThreeStep(
        PPCA(data.weight, 1.0),
        families=(Normal(), Normal(full=True)),
        seeds=[seed],
        settings=Settings(n_particles=10, epochs=200, patience=4, drops=2, lr_phi=5e-3),
        hidden=(64,),
        device=device,
    ).fit(data.x_train[:700], data.x_train[700:], progress=progress)
    model: PPCA = steps.model  # type: ignore[assignment]
    x = data.x_test.to(device)
    with torch.no_grad():
        exact = model.tail_probability(x, torch.tensor([THRESHOLD]))[:, 0].double()
    combined = steps.mixture()
    proposals = {**combined.components, "MIS": combined}
    answer = steps.posterior(x, n_draws, tolerance=0.02, query=exceeds, generator=seeded(seed + 1), progress=progress)
    return {
        "experiment": "demo",
        "settings": {"seed": seed, "n_draws": n_draws, "threshold": THRESHOLD, "tolerance": 0.02},
        "seeds": [seed],
        "selection": [score._asdict() for score in steps.selection],
        "proposals": [_proposal_row(model, x, exact, name, q, n_draws, seed) for name, q in proposals.items()],
        **_decision(answer, exact, n_draws),
    }


def _proposal_row(model: PPCA, x: Tensor, exact: Tensor, name: str, q: Proposal, n: int, seed: int) -> dict[str, Any]:
    """One proposal on its own, with the same number of draws as every other."""
    answer = posterior(model, x, q, n, generator=seeded(seed + 2))
    estimate = answer.expect(exceeds)
    return {
        "proposal": name,
        "khat": answer.khat.nanmedian().item(),
        "khat_share_ok": (answer.khat <= khat_threshold(n)).double().mean().item(),
        "ess": answer.ess.mean().item(),
        "mae": (estimate.value - exact).abs().mean().item(),
        "mae_plugin": (exceeds(answer.z).mean(0) - exact).abs().mean().item(),
        "mcse": estimate.mcse.mean().item(),
    }


def _decision(answer: Posterior, exact: Tensor, n: int) -> dict[str, Any]:
    """The decisions taken, beside those by the exact posterior of the fitted model."""
    assert answer.record is not None
    decision = answer.decide(LOSS, states)
    estimate = answer.expect(exceeds)
    best = (torch.stack([exact * COST_OF_MISSING, (1 - exact) * COST_OF_ALARM], -1)).argmin(-1)
    share = {v: (answer.verdict == v).double().mean().item() for v in Verdict}
    points = zip(exact.tolist(), estimate.value.tolist(), estimate.mcse.tolist(), answer.verdict.tolist(), strict=True)
    return {
        "decision": {
            "error": (estimate.value - exact).abs().mean().item(),
            "mcse": estimate.mcse.mean().item(),
            "n_draws": n,
            "n_observations": len(exact),
            "n_different": int((decision.action != best).sum()),
            "n_different_flagged": int(((decision.action != best) & (decision.verdict != Verdict.OK)).sum()),
            "n_unsure": int((decision.verdict == Verdict.CAUTION).sum()),
            "share_ok": share[Verdict.OK],
            "share_caution": share[Verdict.CAUTION],
            "share_refuse": share[Verdict.REFUSE],
            "stages": answer.record.summary(),
            "cost": answer.record.cost.mean().item(),
        },
        "points": [{"exact": e, "estimate": v, "mcse": s, "verdict": Verdict(w).name.lower()} for e, v, s, w in points],
    }
