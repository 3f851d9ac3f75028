"""From the columns and sums of all blocks to the results of an audit: plain numbers, as results.json holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vaerdict import diagnostics
from vaerdict.auditing.movement import FIELDS
from vaerdict.auditing.neighbours import share_kept
from vaerdict.auditing.quantities import Quantity
from vaerdict.auditing.verdict import NEAR
from vaerdict.diagnostics import Verdict

N_FEATURES = 10
"""How many of the features that moved most are listed for each quantity."""

_EDGES = [-0.5 + 0.1 * i for i in range(31)]  # of the histogram of k-hat
_LEAST = 5  # observations of a group that can be the one where a feature moved most
_UNCOVERED = math.log(100)  # log-weight above which a simulated latent is not covered by the draws

Columns = Mapping[str, Tensor]


def proposal_record(columns: Columns, suffix: str, n: int) -> dict[str, Any]:
    """How reliable a proposal is: share of observations, k-hat and the effective share of its draws."""
    khat, ess = columns[f"khat{suffix}"], columns[f"ess{suffix}"]
    return {
        "n_draws": n,
        "khat_threshold": diagnostics.khat_threshold(n),
        "share_reliable": _share(columns[f"verdict{suffix}"] == Verdict.OK),
        "khat": _quantiles(khat),
        "ess": _quantiles(ess),
    }


def histogram(columns: Columns) -> dict[str, Any]:
    """Numbers of observations by k-hat; the outer bins take what is beyond them."""
    edges = torch.tensor(_EDGES, dtype=torch.float64)
    counts = {}
    for name, key in (("encoder", "khat_encoder"), ("refined", "khat")):
        khat = columns[key].double()
        inside = torch.nan_to_num(khat[~khat.isnan()], posinf=_EDGES[-1]).clamp(_EDGES[0], _EDGES[-1] - 1e-9)
        counts[name] = torch.histogram(inside, edges).hist.long().tolist()
    return {"edges": _EDGES, **counts}


def group_records(columns: Columns, group: Tensor, names: Sequence[str], quantities: Sequence[str]) -> list[dict]:
    """One row per group: reliability of encoder and refined inference, evidence, and movement of the quantities."""
    rows = []
    for number, name in enumerate(names):
        part = {key: column[group == number] for key, column in columns.items()}
        rows.append(
            {
                "group": name,
                "n": len(part["khat"]),
                "share_reliable": _share(part["verdict_encoder"] == Verdict.OK),
                "khat_encoder": _median(part["khat_encoder"]),
                "ess_encoder": _median(part["ess_encoder"]),
                "share_answered": _share(part["verdict"] == Verdict.OK),
                "khat": _median(part["khat"]),
                "ess": _median(part["ess"]),
                "gap": _mean(part["lower"] - part["elbo"]),
                "share_near": {q: _near(part[f"moved: {q}"]) for q in quantities},
                "median_sd": {q: _median(_root(part[f"moved: {q}"])) for q in quantities},
            }
        )
    return rows


# -------------------------------------------------------------------------------------------------- quantities
def quantity_record(
    name: str, quantity: Quantity, moved: Tensor, sums: Tensor, groups: Sequence[str]
) -> dict[str, Any]:
    """How far a quantity moved, over all observations and by feature.

    Shapes: ``moved (n_obs,)`` in squared posterior standard deviations, ``sums (fields, groups, outputs)``.
    """
    total = {field: sums[i].sum(0) for i, field in enumerate(FIELDS)}
    n = total["n"].clamp_min(1)
    spread = (total["square"] / n - (total["value"] / n).square()).clamp_min(0)
    return {
        "name": name,
        "unit": quantity.unit,
        "n_outputs": sums.shape[-1],
        "n": int((~moved.isnan()).sum()),
        "share_near": _near(moved),
        "median_sd": _median(_root(moved)),
        "rms_sd": _rms(total["sds"].sum() / n.sum()),
        "rms": _rms(total["units"].sum() / n.sum()),
        "spread": _rms(spread.mean()),
        "share_moved": float(total["moved"].sum() / n.sum()),
        "sd_ratio": float((total["before"].sum() / total["after"].sum().clamp_min(1e-300)).sqrt()),
        "features": _features(sums, quantity.names(sums.shape[-1]), groups),
    }


def _features(sums: Tensor, names: Sequence[str], groups: Sequence[str]) -> list[dict[str, Any]]:
    """The features that moved most, by the lower end of their mean square movement; all have the same unit."""
    by_group = dict(zip(FIELDS, sums, strict=True))
    total = {field: values.sum(0) for field, values in by_group.items()}
    n = total["n"].clamp_min(1)
    (units, units_error), (sds, sds_error) = (_mean_and_error(total, key) for key in ("units", "sds"))
    enough = by_group["n"] >= by_group["n"].amax(0).clamp_max(_LEAST)
    within = torch.where(enough, by_group["units"] / by_group["n"].clamp_min(1), -torch.inf)
    order = (units - 2 * units_error).argsort(descending=True)[:N_FEATURES].tolist() if total["n"].sum() else []
    return [
        {
            "feature": names[j],
            "plugin": float(total["plugin"][j] / n[j]),
            "value": float(total["value"][j] / n[j]),
            "shift": float(total["shift"][j] / n[j]),
            "shift_error": float(total["error"][j].sqrt() / n[j]),
            "rms": _rms(units[j]),
            "rms_sd": _rms(sds[j]),
            "rms_sd_error": float(sds_error[j] / (2 * torch.maximum(sds[j], sds_error[j]).sqrt().clamp_min(1e-300))),
            "share_moved": float(total["moved"][j] / n[j]),
            "group": groups[int(within[:, j].argmax())] if len(groups) > 1 else None,
        }
        for j in order
    ]


def _mean_and_error(total: Mapping[str, Tensor], key: str) -> tuple[Tensor, Tensor]:
    """The mean over observations of what was summed, and its standard error. Shapes: ``(outputs,)`` each."""
    n = total["n"].clamp_min(1)
    mean = total[key] / n
    return mean, ((total[f"{key}_square"] / n - mean.square()).clamp_min(0) / n).sqrt()


def neighbours_record(columns: Columns, k: int, coordinates: Sequence[int]) -> dict[str, Any] | None:
    """The share of nearest neighbours that stay, beside that between two halves of the refined draws."""
    n = len(columns["mean"])
    if n < 3 or k < 1:
        return None
    k = min(k, n - 1)
    answered = columns["verdict"] == Verdict.OK
    before, after, even, odd = (columns[f"mean{name}"][:, coordinates] for name in ("_encoder", "", "_even", "_odd"))
    kept, between = share_kept(before, after, k), share_kept(even, odd, k)
    return {"k": k, "kept": _mean(kept[answered]), "kept_between_halves": _mean(between[answered])}


# ---------------------------------------------------------------------------------------------------- evidence
def evidence_record(columns: Columns, n_encoder: int) -> dict[str, Any]:
    """Means over observations of the bounds on the log evidence, with the errors of the last two, in nats."""
    used = (columns["verdict"] == Verdict.OK) & columns["elbo"].isfinite() & columns["upper"].isfinite()
    part = {key: columns[key][used].double() for key in ("elbo", "iwelbo", "lower", "upper", "lower_se")}
    n = int(used.sum())
    return {
        "n": n,
        "n_draws_encoder": n_encoder,
        **{key: _mean(part[key]) for key in ("elbo", "iwelbo", "lower", "upper")},
        "error": float(part["lower_se"].square().sum().sqrt()) / max(1, n),
    }


def simulated_record(columns: Columns, n_encoder: int) -> dict[str, Any]:
    """The same for pairs that the model has simulated; errors are those of the mean over pairs."""
    record = evidence_record(columns, n_encoder)
    used = (columns["verdict"] == Verdict.OK) & columns["upper"].isfinite()
    n = max(1, int(used.sum()))
    log_w = columns["latent_log_w"] - columns["lower"]
    width = (columns["upper"] - columns["lower"])[used]
    return record | {
        "n_pairs": len(used),
        "share_reliable": _share(columns["verdict_encoder"] == Verdict.OK),
        "share_answered": _share(columns["verdict"] == Verdict.OK),
        "width": _mean(width),
        "width_error": float(width.std()) / math.sqrt(n) if n > 1 else math.nan,
        "share_uncovered": _share(log_w[used] > _UNCOVERED),
    }


# ------------------------------------------------------------------------------------------------ small helpers
def _share(mask: Tensor) -> float:
    return float(mask.double().mean()) if len(mask) else math.nan


def _mean(values: Tensor) -> float:
    values = values[values.isfinite()].double()
    return float(values.mean()) if len(values) else math.nan


def _median(values: Tensor) -> float:
    values = values[~values.isnan()].double()
    return float(values.median()) if len(values) else math.nan


def _quantiles(values: Tensor) -> list[float]:
    """Tenth, fiftieth and ninetieth percentile."""
    values = values[~values.isnan()].double().sort().values
    n = len(values)
    return [float(values[min(n - 1, int(q * n))]) if n else math.nan for q in (0.1, 0.5, 0.9)]


def _root(square: Tensor) -> Tensor:
    return torch.where(square.isnan(), square, square.clamp_min(0).sqrt())


def _near(square: Tensor) -> float:
    """The share of observations that moved by at most `NEAR` posterior standard deviations."""
    square = square[~square.isnan()]
    return _share(square <= NEAR**2) if len(square) else 0.0


def _rms(square: Tensor) -> float:
    return float(square.clamp_min(0).sqrt())
