"""Tables of the pPCA experiment, the published numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vaerdict.report.summary import Row, grouped, in_order, mean_of, where
from vaerdict.report.tables import Column, Table, Value, cell, mark, mark_column

MODELS = ("VAE", "AGG", "CYCLIC", "IWAE", "WW", "CHI", "CHI-t")
CROSSED = ("VAE", "IWAE", "WW", "CHI")
SINGLES = ("VAE", "IWAE", "WW", "CHI", "CHI-t")
PROPOSALS = (*SINGLES, "MIS")
NOISES = {"iid": "i.i.d.", "sobol": "Sobol", "aligned": "aligned Sobol"}

Published = Mapping[str, Any]

_QUANTITIES: tuple[tuple[str, str, int, float], ...] = (
    ("a_norm", "‖A‖₂", 2, 1),
    ("khat", "k-hat", 2, 1),
    ("mae", "MAE ×100", 2, 100),
)
_BEHIND = "The paper's log p is of its own data set, so distances to each table's best model are compared, not levels."


def models_table(models: Sequence[Row], k: int, published: Published) -> Table | None:
    """The paper's table of models at k particles: ours and, beside each column, its own."""
    rows = where(models, k_train=k, training="paper")
    if not rows:
        return None
    names = in_order((row["model"] for row in rows), MODELS)
    best = max(m.mean for name in names if (m := mean_of(where(rows, model=name), "log_evidence")))
    body = [_model_row(name, where(rows, model=name), best, published) for name in names]
    body = mark_column(mark_column(mark_column(body, "gap", max), "iwelbo", max), "mae")
    columns = [
        Column("model", "model"),
        Column("gap", "log p minus the generator's", 3, signed=True),
        Column("iwelbo", "IWELBO", 3),
        Column("behind", "log p behind the best", 3),
        Column("behind_paper", "paper", 2),
        *(
            c
            for key, title, n, x in _QUANTITIES
            for c in (Column(key, title, n, x), Column(f"{key}_paper", "paper", n, x))
        ),
    ]
    caption = f"Models trained with {k} particles on {_draws(rows)} draws a decision: mean ± sd over {_seeds(rows)}, and as published."
    note = f"{_BEHIND} MAE is against the posterior of the generator. {published.get('note', '')}"
    return Table(f"models-k{k}", caption, columns, body, note.strip())


def _model_row(name: str, rows: Sequence[Row], best: float, published: Published) -> dict[str, Any]:
    evidence = mean_of(rows, "log_evidence")
    printed: Mapping[str, float] = published.get("log_evidence", {})
    return {
        "model": name,
        "gap": cell(mean_of(rows, "log_evidence_gap")),
        "iwelbo": cell(mean_of(rows, "iwelbo")),
        "behind": None if evidence is None else Value(best - evidence.mean),
        "behind_paper": max(printed.values()) - printed[name] if name in printed else None,
        **{key: cell(mean_of(rows, key)) for key, *_ in _QUANTITIES},
        **{f"{key}_paper": published.get(key, {}).get(name) for key, *_ in _QUANTITIES},
    }


def three_ways_table(models: Sequence[Row], k: int, printed: Published, released: Published) -> Table | None:
    """The paper as printed, its code as released, and ours, in the quantities that all three have."""
    rows = where(models, k_train=k, training="paper")
    if not rows:
        return None
    evidence = {name: m.mean for name in CROSSED if (m := mean_of(where(rows, model=name), "log_evidence"))}
    ours = {key: {n: m.mean for n in CROSSED if (m := mean_of(where(rows, model=n), key))} for key in ("khat", "mae")}
    sources = {"printed": printed, "released code": released, "ours": {"log_evidence": evidence, **ours}}
    quantities = (
        ("log p behind the best", "log_evidence", _behind, 1),
        ("k-hat", "khat", _same, 1),
        ("MAE ×100", "mae", _same, 100),
    )
    body = [
        {"what": f"{title}, {source}", **{n: v * scale for n, v in form(numbers.get(key, {})).items() if n in CROSSED}}
        for title, key, form, scale in quantities
        for source, numbers in sources.items()
    ]
    columns = [Column("what", "quantity and source"), *(Column(name, name, 2) for name in CROSSED)]
    return Table(
        "three-ways", f"As printed, as released and ours, {k} particles.", columns, body, released.get("note", "")
    )


def _behind(levels: Mapping[str, float]) -> Mapping[str, float]:
    return {name: max(levels.values()) - level for name, level in levels.items()}


def _same(values: Mapping[str, float]) -> Mapping[str, float]:
    return values


def cross_table(
    cross: Sequence[Row], k: int, key: str, title: str, *, digits: int = 2, scale: float = 1
) -> Table | None:
    """One quantity for every model (down) and proposal (across), the lowest of each model marked."""
    rows = where(cross, k_train=k, training="paper")
    if not rows:
        return None
    models, proposals = (
        in_order((r[name] for r in rows), order) for name, order in (("model", CROSSED), ("proposal", PROPOSALS))
    )
    body = [
        {"model": m, **mark({q: cell(mean_of(where(rows, model=m, proposal=q), key)) for q in proposals})}
        for m in models
    ]
    columns = [Column("model", "model"), *(Column(q, q, digits, scale) for q in proposals)]
    caption = f"{title} of each proposal (columns) on each fixed model (rows), {k} particles, {_draws(rows)} draws for every one of them: mean ± sd over {_seeds(rows)}."
    return Table(f"cross-{key}-k{k}", caption, columns, body)


def beyond_rows(cross: Iterable[Row]) -> list[Row]:
    """The rows on converged models; rows that name no noise or estimator are i.i.d. and self-normalised."""
    rows = where(cross, training="converged")
    return [{"noise": "iid", "estimator": "snis", **row} for row in rows]


def beyond_table(cross: Sequence[Row], floors: Sequence[Row]) -> Table | None:
    """Proposals on the kept, converged model by kind of draws, best first, under the floor of exact sampling."""
    rows = where(beyond_rows(cross), estimator="snis")
    if not rows:
        return None
    body = [_beyond_row(name, part) for (name,), part in grouped(rows, "proposal").items()]
    body.sort(key=lambda row: min(v.value for noise in NOISES if isinstance(v := row[noise], Value)))
    for noise in NOISES:
        body = mark_column(body, noise)
    n = rows[0]["n_draws"]
    floor = {
        noise: mean_of(where(floors, floor=f"exact posterior, {title}", n_draws=n), "mae")
        for noise, title in NOISES.items()
    }
    first = (
        [{"proposal": "floor: exact posterior", **{k: cell(v) for k, v in floor.items()}}]
        if any(floor.values())
        else []
    )
    columns = [
        Column("proposal", "proposal"),
        *(Column(noise, f"MAE ×100, {title}", 2, 100) for noise, title in NOISES.items()),
        Column("khat", "k-hat"),
        Column("khat_share_ok", "observations with k-hat in order, %", 0, 100),
        Column("ess", "ESS, i.i.d.", 0),
    ]
    caption = f"Beyond the paper: proposals for the kept, converged model with {n} draws each, best first; mean ± sd over {_seeds(rows)}."
    note = "MAE is against the posterior of the generator, so it includes the error of the fitted model. The floor samples that posterior itself. "
    return Table(
        "beyond",
        caption,
        columns,
        [*first, *body],
        note + "Self-normalised weights; an aligned draw turns the first Sobol coordinate towards the query.",
    )


def _beyond_row(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    by_noise = {noise: where(rows, noise=noise) for noise in NOISES}
    assessed = next((part for part in by_noise.values() if mean_of(part, "khat")), [])
    return {
        "proposal": name,
        **{noise: cell(mean_of(part, "mae")) for noise, part in by_noise.items()},
        "khat": cell(mean_of(assessed, "khat")),
        "khat_share_ok": cell(mean_of(assessed, "khat_share_ok")),
        "ess": cell(mean_of(by_noise["iid"], "ess")),
    }


def every_variant_table(cross: Sequence[Row]) -> Table | None:
    """All that was measured on the converged models, best first."""
    rows = beyond_rows(cross)
    if not rows:
        return None
    keys = ("mae", "mae_inference", "mae_model", "within_2_mcse", "khat")
    body = [
        {
            "proposal": q,
            "noise": NOISES.get(noise, noise),
            "estimator": estimator.upper(),
            **{key: cell(mean_of(part, key)) for key in keys},
        }
        for (q, noise, estimator), part in grouped(rows, "proposal", "noise", "estimator").items()
    ]
    body.sort(key=_by("mae"))
    columns = [
        Column("proposal", "proposal"),
        Column("noise", "draws"),
        Column("estimator", "weights"),
        Column("mae", "MAE ×100", 2, 100),
        Column("mae_inference", "of the sampler", 2, 100),
        Column("mae_model", "of the model", 2, 100),
        Column("within_2_mcse", "within 2 MCSE, %", 0, 100),
        Column("khat", "k-hat"),
    ]
    return Table(
        "variants", "Every proposal, kind of draws and kind of weights, best first.", columns, body, detail=True
    )


def _by(key: str) -> Callable[[dict[str, Any]], float]:
    return lambda row: row[key].value if isinstance(row[key], Value) else float("inf")


def parts_table(models: Sequence[Row], floors: Sequence[Row]) -> Table | None:
    """Where the error comes from: the fitted model's part and the sampler's, for short and converged training."""
    if not models:
        return None
    keys = ("log_evidence_gap", "mae_model", "mae_inference", "mae", "mae_plugin", "within_2_mcse")
    body = [
        {
            "model": model,
            "training": f"{'as in the paper' if how == 'paper' else how}, K = {k}",
            **{key: cell(mean_of(part, key)) for key in keys},
        }
        for (how, k, model), part in grouped(models, "training", "k_train", "model").items()
    ]
    best = where(floors, floor="maximum likelihood")
    body += (
        [
            {
                "model": "maximum likelihood",
                "training": "exact evidence",
                **{key: cell(mean_of(best, key)) for key in keys},
            }
        ]
        if best
        else []
    )
    columns = [
        Column("model", "model"),
        Column("training", "training"),
        Column("log_evidence_gap", "log p minus the generator's", 3, signed=True),
        Column("mae_model", "MAE ×100 of the model", 2, 100),
        Column("mae_inference", "of the sampler", 2, 100),
        Column("mae", "together", 2, 100),
        Column("mae_plugin", "without weights", 2, 100),
        Column("within_2_mcse", "within 2 MCSE, %", 0, 100),
    ]
    caption = "Where the error comes from: the fitted model's own, and that of sampling from its encoder."
    return Table(
        "parts",
        caption,
        columns,
        mark_column(body, "mae_model"),
        "Within 2 MCSE: how often the reported error bar covers the exact answer of the model; 95 % is honest.",
        detail=True,
    )


def floors_table(floors: Sequence[Row]) -> Table | None:
    """What no method passes: exact sampling of the generator's posterior, by number and kind of draws."""
    rows = [row for row in floors if row.get("n_draws") is not None]
    if not rows:
        return None
    kinds = list(dict.fromkeys(row["floor"] for row in rows))
    counts = sorted({row["n_draws"] for row in rows})
    body = [
        {"n": n, **{kind: cell(mean_of(where(rows, floor=kind, n_draws=n), "mae")) for kind in kinds}} for n in counts
    ]
    columns = [Column("n", "draws"), *(Column(kind, kind.removeprefix("exact posterior, "), 2, 100) for kind in kinds)]
    return Table("floors", "The floor: MAE ×100 of sampling the generator's own posterior.", columns, body)


def selection_table(selection: Sequence[Row], name: str = "selection") -> Table | None:
    """Step one of the procedure: held-out evidence of every model, and how far it is behind the one kept."""
    if not selection:
        return None
    body = [
        {
            **{key: row.get(key) for key in ("model", "seed", "best_by", "khat", "iwelbo_best", "gap")},
            "iwelbo": _with_error(row, "iwelbo"),
            "behind": _with_error(row, "behind"),
        }
        for row in selection
    ]
    columns = [
        Column("model", "model"),
        Column("seed", "seed"),
        Column("behind", "behind the kept model (± se)", 3),
        Column("iwelbo_best", "held-out evidence", 3),
        Column("best_by", "measured by"),
        Column("iwelbo", "by its own encoder (± se)", 3),
        Column("gap", "hidden by its encoder", 3),
        Column("khat", "k-hat of its encoder"),
    ]
    return Table(name, "Step one: the models by held-out evidence, the one kept first.", columns, body)


def _with_error(row: Row, key: str) -> Value | None:
    value = row.get(key)
    return None if value is None else Value(value, row.get(f"{key}_se"))


def _seeds(rows: Iterable[Row]) -> str:
    n = len({row["seed"] for row in rows})
    return f"{n} seeds" if n > 1 else "one seed"


def _draws(rows: Iterable[Row]) -> str:
    return " or ".join(str(n) for n in sorted({row["n_draws"] for row in rows}))
