"""Tables of the pPCA experiment, with the published numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vaerdict.report.records import Row, grouped
from vaerdict.report.tables import Column, Table, Value, mark_column
from vaerdict_paper.pages.crossed import CROSSED
from vaerdict_paper.pages.seed_statistics import Summary, cell, cells, counts_of, mean_of, ordered, seed_count, where

MODELS = ("VAE", "AGG", "CYCLIC", "CONSTANT", "IWAE", "WW", "CHI", "CHI-t")
SINGLES = ("VAE", "IWAE", "WW", "CHI", "CHI-t")
PROPOSALS = (*SINGLES, "MIS")
NOISES = {"iid": "i.i.d.", "sobol": "Sobol", "aligned": "aligned Sobol"}

Published = Mapping[str, Any]

_MAE = "MAE \N{MULTIPLICATION SIGN}100"
A_NORM, KHAT, MAE = Column("a_norm", "‖A‖₂"), Column("khat", "k-hat"), Column("mae", _MAE, 2, 100)
_QUANTITIES = (A_NORM, KHAT, MAE)
_DRAWS = Column("n_draws", "draws")


def models_table(models: Sequence[Row], k: int, published: Published) -> Table | None:
    """The paper's table of models at k particles: our numbers, each column beside the published one."""
    rows = where(models, k_train=k, training="paper")
    if not rows:
        return None
    names = ordered((row["model"] for row in rows), MODELS)
    best = max(m.mean for name in names if (m := mean_of(where(rows, model=name), "log_evidence")))
    body = [_model_row(name, where(rows, model=name), best, published) for name in names]
    body = mark_column(mark_column(mark_column(body, "gap", max), "iwelbo", max), "mae")
    columns = [
        Column("model", "model"),
        Column("gap", "log p, gap to generator", 3, signed=True),
        Column("iwelbo", "IWELBO", 3),
        Column("behind", "behind best", 3),
        Column("behind_paper", "behind best, paper", 2),
        *(column for quantity in _QUANTITIES for column in (quantity, _printed(quantity))),
        _DRAWS,
    ]
    caption = (
        f"Models trained with {k} particles, each with its own encoder: mean ± sd over {seed_count(rows)}, and as "
        "published."
    )
    note = (
        "Behind best: how far log p is below that of the best model of the column. MAE is against the posterior of the "
        "generator; its floor, exact sampling of that posterior with as many draws, stands in the table of floors. "
        f"k-hat has draws of its own. {published.get('note', '')}"
    )
    return Table(f"models-k{k}", caption, columns, body, note.strip())


def _printed(column: Column) -> Column:
    return replace(column, key=f"{column.key}_paper", title=f"{column.title}, paper")


def _model_row(name: str, rows: Sequence[Row], best: float, published: Published) -> dict[str, Any]:
    evidence = mean_of(rows, "log_evidence")
    printed: Mapping[str, float] = published.get("log_evidence", {})
    return {
        "model": name,
        "gap": cell(mean_of(rows, "log_evidence_gap")),
        "iwelbo": cell(mean_of(rows, "iwelbo")),
        "behind": None if evidence is None else Value(best - evidence.mean),
        "behind_paper": max(printed.values()) - printed[name] if name in printed else None,
        **{c.key: cell(mean_of(rows, c.key)) for c in _QUANTITIES},
        **{_printed(c).key: published.get(c.key, {}).get(name) for c in _QUANTITIES},
        "n_draws": counts_of(rows, "n_draws"),
    }


def three_ways_table(models: Sequence[Row], k: int, printed: Published, released: Published) -> Table | None:
    """The paper as printed, its released code and our code, in the quantities that all three report."""
    rows = where(models, k_train=k, training="paper")
    if not rows or not printed:
        return None
    keys = ("log_evidence", "khat", "mae")
    ours = {key: {name: m.mean for name in CROSSED if (m := mean_of(where(rows, model=name), key))} for key in keys}
    sources = {"printed": printed, "released code": released, "ours": ours}
    body = [
        {"what": f"{title}, {source}", **{name: v * scale for name, v in form(numbers.get(key, {})).items()}}
        for (title, form, scale), key in zip(_FORMS, keys, strict=True)
        for source, numbers in sources.items()
    ]
    columns = [Column("what", "quantity and source"), *(Column(name, name, 2) for name in CROSSED)]
    caption = f"The paper as printed, the released code and our code, {k} particles."
    return Table("three-ways", caption, columns, body, released.get("note", ""))


def _behind(levels: Mapping[str, float]) -> Mapping[str, float]:
    return {name: max(levels.values()) - level for name, level in levels.items()}


_FORMS: tuple[tuple[str, Callable[[Mapping[str, float]], Mapping[str, float]], float], ...] = (
    ("log p behind the best", _behind, 1),
    ("k-hat", dict, 1),
    (_MAE, dict, 100),
)


def beyond_rows(cross: Iterable[Row]) -> list[Row]:
    """The rows on converged models; rows without a noise or an estimator are i.i.d. and self-normalised."""
    rows = where(cross, training="converged")
    return [{"noise": "iid", "estimator": "snis", **row} for row in rows]


def beyond_table(cross: Sequence[Row], floors: Sequence[Row]) -> Table | None:
    """Proposals on the selected, converged model by kind of draws, best first, below the floor of exact sampling."""
    rows = where(beyond_rows(cross), estimator="snis")
    if not rows:
        return None
    body = [_beyond_row(name, part) for (name,), part in grouped(rows, "proposal").items()]
    body.sort(
        key=lambda row: min((v.value for noise in NOISES if isinstance(v := row[noise], Value)), default=math.inf)
    )
    for noise in NOISES:
        body = mark_column(body, noise)
    n = rows[0]["n_draws"]
    columns = [
        Column("proposal", "proposal"),
        *(Column(noise, f"{_MAE}, {title}", 2, 100) for noise, title in NOISES.items()),
        KHAT,
        Column("khat_share_ok", "reliable, % of observations", 0, 100),
        Column("ess", "ESS, i.i.d.", 0),
        _DRAWS,
    ]
    caption = (
        f"Beyond the paper: proposals for the selected, converged model with {n} draws each, best first; mean ± sd "
        f"over {seed_count(rows)}."
    )
    note = (
        "MAE is against the posterior of the generator, so it includes the error of the fitted model. The floor "
        "samples that posterior itself. Weights are self-normalised; an aligned draw turns the first Sobol coordinate "
        "towards the query. Reliable: k-hat and ESS have the verdict ok. The length of training was chosen on other "
        "data sets."
    )
    return Table("beyond", caption, columns, [*_floor_row(floors, n), *body], note)


def _floor_row(floors: Sequence[Row], n: int) -> list[dict[str, Any]]:
    means = floor_means(floors, n)
    floor = {"proposal": "floor: exact posterior", "n_draws": n}
    return [{**floor, **{k: cell(mean) for k, mean in means.items()}}] if means else []


def floor_means(floors: Sequence[Row], n: int) -> dict[str, Summary]:
    """Error of n draws from the posterior of the generator, by kind of draws."""
    rows_by_noise = {
        noise: where(floors, floor=f"exact posterior, {title}", n_draws=n) for noise, title in NOISES.items()
    }
    return {noise: mean for noise, rows in rows_by_noise.items() if (mean := mean_of(rows, "mae"))}


def _beyond_row(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    by_noise = {noise: where(rows, noise=noise) for noise in NOISES}
    assessed = next((part for part in by_noise.values() if mean_of(part, "khat")), [])
    return {
        "proposal": name,
        **{noise: cell(mean_of(part, "mae")) for noise, part in by_noise.items()},
        "khat": cell(mean_of(assessed, "khat")),
        "khat_share_ok": cell(mean_of(assessed, "khat_share_ok")),
        "ess": cell(mean_of(by_noise["iid"], "ess")),
        "n_draws": counts_of(rows, "n_draws"),
    }


def every_variant_table(cross: Sequence[Row]) -> Table | None:
    """All measurements on the converged models, best first."""
    rows = beyond_rows(cross)
    if not rows:
        return None
    measured = (
        MAE,
        Column("mae_inference", "of the sampler", 2, 100),
        Column("mae_model", "of the model", 2, 100),
        _COVERAGE,
        KHAT,
    )
    body = [
        {"proposal": q, "noise": NOISES.get(noise, noise), "estimator": kind.upper(), **cells(part, measured)}
        | {"n_draws": counts_of(part, "n_draws")}
        for (q, noise, kind), part in grouped(rows, "proposal", "noise", "estimator").items()
    ]
    body.sort(key=lambda row: mae.value if isinstance(mae := row["mae"], Value) else math.inf)
    kinds = [Column("proposal", "proposal"), Column("noise", "kind of draws"), Column("estimator", "weights")]
    caption = "Every proposal, kind of draws and kind of weights, best first."
    return Table("variants", caption, [*kinds, *measured, _DRAWS], body, detail=True)


def parts_table(models: Sequence[Row], floors: Sequence[Row]) -> Table | None:
    """The error of the fitted model and of the sampler, for short and converged training."""
    if not models:
        return None
    measured = (
        Column("log_evidence_gap", "log p minus the generator's", 3, signed=True),
        Column("mae_model", f"{_MAE} of the model", 2, 100),
        Column("mae_inference", "of the sampler", 2, 100),
        Column("mae", "together", 2, 100),
        Column("mae_plugin", "without weights", 2, 100),
        _COVERAGE,
    )
    body = [
        {"model": model, "training": f"{_TRAINING.get(training, training)}, K = {k}", **cells(part, measured)}
        | {"n_draws": counts_of(part, "n_draws")}
        for (training, k, model), part in grouped(models, "training", "k_train", "model").items()
    ]
    likelihood = where(floors, floor="maximum likelihood")
    if likelihood:
        body.append({"model": "maximum likelihood", "training": "exact evidence", **cells(likelihood, measured)})
    columns = [Column("model", "model"), Column("training", "training"), *measured, _DRAWS]
    caption = "Sources of the error: the fitted model, and sampling from its encoder."
    note = "Within 2 MCSE: how often two standard errors cover an exact answer between 0.02 and 0.98; nominal: 95 %."
    return Table("parts", caption, columns, mark_column(body, "mae_model"), note, detail=True)


_TRAINING = {"paper": "as in the paper"}
_COVERAGE = Column("within_2_mcse", "within 2 MCSE, %", 0, 100)


def floors_table(floors: Sequence[Row]) -> Table | None:
    """The error of exact sampling from the posterior of the generator, by number and kind of draws."""
    rows = [row for row in floors if row.get("n_draws") is not None]
    if not rows:
        return None
    kinds = list(dict.fromkeys(row["floor"] for row in rows))
    counts = sorted({row["n_draws"] for row in rows})
    body = [
        {"n": n, **{kind: cell(mean_of(where(rows, floor=kind, n_draws=n), "mae")) for kind in kinds}} for n in counts
    ]
    columns = [Column("n", "draws"), *(Column(kind, kind.removeprefix("exact posterior, "), 2, 100) for kind in kinds)]
    return Table("floors", f"The floor: {_MAE} of sampling from the posterior of the generator.", columns, body)


def selection_table(selection: Sequence[Row]) -> Table | None:
    """Step one of the procedure: held-out evidence of every model, and how far it is behind the one used."""
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
    return Table("selection", "Step one: the models by held-out evidence, the one kept first.", columns, body)


def _with_error(row: Row, key: str) -> Value | None:
    value = row.get(key)
    return None if value is None else Value(value, row.get(f"{key}_se"))
