"""Which of the paper's claims on pPCA hold under a fair comparison, from the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vaerdict.core import DataError
from vaerdict.diagnostics import MAX_KHAT
from vaerdict.report.records import Row
from vaerdict_paper.pages.claims import (
    Claim,
    Evidence,
    Scores,
    paired_evidence,
    rival_evidence,
    selected_models,
    selection_counts,
)
from vaerdict_paper.pages.crossed import CROSSED
from vaerdict_paper.pages.ppca_tables import SINGLES, Published, beyond_rows
from vaerdict_paper.pages.seed_statistics import Summary, by_seed, counts_of, difference, mean_of, minus, where

ERRORS = (
    "Errors are mean absolute errors against the posterior of the generator, with equal draws for every proposal; "
    "their differences are in hundredths of a probability. Differences between proposals are averaged over the fixed "
    "models within each seed. Every seed has its own data set."
)

MARGIN = 0.5
"""Errors this close, in hundredths, count as equal; about a twentieth of the paper's error of the VAE."""


FEW, MANY = 5, 200
"""The particle counts that the paper's claims were made for."""


def paper_claims(models: Sequence[Row], cross: Sequence[Row], published: Published) -> list[Claim]:
    """The paper's claims, each at its particle count."""
    _require_equal_draws(where([*models, *cross], training="paper"))
    return [
        _better_models(models, FEW, published.get(f"k{FEW}", {})),
        _plugin_equals_weights(models, FEW),
        _chi_is_best(cross, FEW),
        _student_improves_chi(models, cross, FEW),
        *(_mixture_is_best(cross, k) for k in (FEW, MANY)),
        _vae_proposal_fails(cross, FEW),
        *(_three_steps_win(models, cross, k) for k in (FEW, MANY)),
        *_collapse_claims(models, cross, FEW, published.get(f"k{FEW}", {})),
        _ww_is_best(models, MANY, published.get(f"k{MANY}", {})),
        _chi_collapses(models, FEW, MANY, published),
    ]


def _better_models(models: Sequence[Row], k: int, published: Published) -> Claim:
    levels, printed = _levels(models, k), published.get("log_evidence")
    names = ("IWAE", "WW", "CHI")
    evidence = [paired_evidence("held-out log p", levels, name, "VAE", +1, 3, printed) for name in names]
    return Claim(f"IWAE, WW and CHI fit better models than the VAE ({k} particles).", evidence)


def _plugin_equals_weights(models: Sequence[Row], k: int) -> Claim:
    """As printed: for the VAE the plugin estimator attains performance similar to the SNIS estimator."""
    rows = where(models, k_train=k, training="paper", model="VAE")
    gap = difference(_errors(rows, "mae_plugin"), _errors(rows))
    evidence = Evidence("error of the VAE, without weights minus with, same draws", gap, 0, 3, margin=MARGIN)
    return Claim(
        f"For the VAE the error without weights is that with weights, to {MARGIN / 100:g} ({k} particles).", [evidence]
    )


def _chi_is_best(cross: Sequence[Row], k: int) -> Claim:
    evidence = rival_evidence("error", _pairs(cross, k), "CHI", CROSSED, -1)
    return Claim(f"For a fixed model the proposal of CHI is the best Gaussian one ({k} particles).", evidence)


def _student_improves_chi(models: Sequence[Row], cross: Sequence[Row], k: int) -> Claim:
    rows = where(models, k_train=k, training="paper")
    own = difference(*(_errors(where(rows, model=name)) for name in ("CHI-t", "CHI")))
    evidence = [
        Evidence("error, CHI-t minus CHI, each with its own model", own, -1, 3),
        *rival_evidence("error on a fixed model", _pairs(cross, k), "CHI-t", ("CHI",), -1),
    ]
    return Claim(f"A Student-t proposal lowers the error of CHI ({k} particles).", evidence)


def _mixture_is_best(cross: Sequence[Row], k: int) -> Claim:
    evidence = rival_evidence("error", _pairs(cross, k), "MIS", SINGLES, -1)
    return Claim(f"For a fixed model the mixture MIS is the best proposal ({k} particles).", evidence)


def _vae_proposal_fails(cross: Sequence[Row], k: int) -> Claim:
    rows = where(cross, k_train=k, training="paper", proposal="VAE", model=("IWAE", "WW", "CHI"))
    excess = minus(by_seed(rows, "khat"), MAX_KHAT)
    level = mean_of(rows, "khat")
    note = f"Mean k-hat {level.mean:.2f}." if level else ""
    return Claim(
        f"The VAE's proposal has a k-hat above {MAX_KHAT} on the other models ({k} particles).",
        [Evidence(f"k-hat of the VAE's proposal on IWAE, WW and CHI, minus {MAX_KHAT}", excess, +1)],
        note,
    )


def _three_steps_win(models: Sequence[Row], cross: Sequence[Row], k: int) -> Claim:
    """The best model of each seed with the mixture, against each objective's own model and proposal."""
    pairs, selected = _pairs(cross, k), _selected(models, k)
    scores = {name: errors[name] for name, errors in pairs.items() if name in errors}
    scores[_THREE_STEPS] = _three_steps(pairs, selected)
    evidence = [paired_evidence("error", scores, _THREE_STEPS, name, -1) for name in CROSSED]
    note = "The model of best IWELBO on the test points, as in the paper, was {}."
    return Claim(
        f"The three-step procedure beats every single-proposal method ({k} particles).",
        evidence,
        note.format(selection_counts(selected)) if selected else "",
    )


_THREE_STEPS = "three steps"


def _three_steps(pairs: Mapping[str, Scores], selected: Mapping[Any, str]) -> dict[Any, float]:
    """The error of the mixture on the selected model of each seed."""
    mixed = {model: scores.get("MIS", {}) for model, scores in pairs.items()}
    return {seed: mixed[model][seed] for seed, model in selected.items() if seed in mixed.get(model, {})}


def _collapse_claims(models: Sequence[Row], cross: Sequence[Row], k: int, published: Published) -> list[Claim]:
    """Remedies of posterior collapse: lagging inference networks, and cyclical or constant annealing."""
    rows = where(models, k_train=k, training="paper")
    names = ("VAE", "AGG", "CYCLIC", "CONSTANT")
    levels = {name: by_seed(where(rows, model=name), "log_evidence") for name in names}
    errors = {name: _errors(where(rows, model=name)) for name in names}
    errors[_THREE_STEPS] = _three_steps(_pairs(cross, k), _selected(models, k))
    log_p, mae = published.get("log_evidence"), {n: 100 * v for n, v in published.get("mae", {}).items()}
    improved = [
        evidence
        for name in ("AGG", "CYCLIC")
        for evidence in (
            paired_evidence("held-out log p", levels, name, "VAE", +1, 3, log_p),
            paired_evidence("error", errors, name, "VAE", -1, 3, mae),
        )
    ]
    constant = [
        paired_evidence("held-out log p", levels, "CONSTANT", "CYCLIC", -1),
        paired_evidence("error", errors, "CONSTANT", "CYCLIC", +1),
    ]
    beaten = [paired_evidence("error", errors, _THREE_STEPS, name, -1) for name in ("AGG", "CYCLIC", "CONSTANT")]
    return [
        Claim(f"Lagging networks and cyclical annealing improve the VAE ({k} particles).", improved),
        Claim(f"Constant annealing is worse than cyclical annealing ({k} particles).", constant),
        Claim(f"The three-step procedure beats these remedies of posterior collapse ({k} particles).", beaten),
    ]


def _ww_is_best(models: Sequence[Row], k: int, published: Published) -> Claim:
    levels, printed = _levels(models, k), published.get("log_evidence")
    evidence = [paired_evidence("held-out log p", levels, "WW", b, +1, 3, printed) for b in ("VAE", "IWAE", "CHI")]
    return Claim(f"WW learns the best model with {k} particles.", evidence)


def _chi_collapses(models: Sequence[Row], few: int, many: int, published: Published) -> Claim:
    """As printed: with many particles CHI loses log p, and its k-hat exceeds the limit."""
    before, after = (_levels(models, k).get("CHI", {}) for k in (few, many))
    khat = by_seed(where(models, k_train=many, training="paper", model="CHI"), "khat")
    printed = {k: published.get(f"k{k}", {}) for k in (few, many)}
    levels = [printed[k].get("log_evidence", {}).get("CHI") for k in (many, few)]
    printed_khat = printed[many].get("khat", {}).get("CHI")
    loss = Evidence(
        f"held-out log p of CHI, {many} minus {few} particles", difference(after, before), -1, 3, _minus(*levels)
    )
    excess = Evidence(f"its k-hat minus {MAX_KHAT}", minus(khat, MAX_KHAT), +1, 2, _minus(printed_khat, MAX_KHAT))
    return Claim(f"CHI collapses with {many} particles.", [loss, excess])


def further_claims(models: Sequence[Row], cross: Sequence[Row]) -> list[Claim]:
    """Claims on what this project adds, on the selected, converged model."""
    _require_equal_draws(where([*models, *cross], training="converged"))
    rows = where(beyond_rows(cross), noise="iid", estimator="snis")
    scores = {name: _errors(where(rows, proposal=name)) for name in dict.fromkeys(row["proposal"] for row in rows)}
    scores["converged VAE"] = _errors(where(models, model="VAE", training="converged"))
    scores |= {
        f"{name}, {title}": _errors(where(beyond_rows(cross), proposal=name, noise=noise, estimator=estimator))
        for name, title, noise, estimator in (
            ("MIS-full", "Sobol", "sobol", "snis"),
            ("MIS-full-optimal", "Sobol", "sobol", "snis"),
            ("MIS", "smoothed", "iid", "psis"),
        )
    }

    def lower(text: str, new: str, *old: str) -> Claim:
        return Claim(text, [paired_evidence("error", scores, new, rival, -1) for rival in old])

    trained = [
        Evidence(f"error of the {name} model, converged minus as in the paper", _converged(models, name, FEW), -1, 3)
        for name in ("IWAE", "WW", "CHI")
    ]
    return [
        Claim("Training to convergence, with 30 particles and full-rank encoders, lowers the model's error.", trained),
        lower("Full-rank proposals lower the error of the mixture.", "MIS-full", "MIS"),
        lower("The full-rank mixture beats full-rank proposals.", "MIS-full", "IWAE-full", "WW-full", "CHI-full"),
        lower("The three steps beat a converged VAE with its weights.", "MIS-full", "converged VAE"),
        lower("Sobol draws lower the error of the full-rank mixture.", "MIS-full, Sobol", "MIS-full"),
        lower("Optimised mixture weights beat equal ones.", "MIS-full-optimal, Sobol", "MIS-full, Sobol"),
        lower("Pareto smoothing lowers the error of the paper's mixture.", "MIS, smoothed", "MIS"),
    ]


def _require_equal_draws(rows: Sequence[Row]) -> None:
    n = counts_of(rows, "n_draws")
    if isinstance(n, str):
        raise DataError(f"rows that are compared have {n} draws; run the experiment again with equal numbers.")


def _converged(models: Sequence[Row], name: str, k: int) -> Summary | None:
    rows = where(models, model=name)
    after, before = where(rows, training="converged"), where(rows, training="paper", k_train=k)
    return difference(_errors(after, "mae_model"), _errors(before, "mae_model"))


def _errors(rows: Sequence[Row], key: str = "mae") -> dict[Any, float]:
    return {seed: 100 * value for seed, value in by_seed(rows, key).items()}


def _levels(models: Sequence[Row], k: int) -> dict[str, dict[Any, float]]:
    """Held-out log p by model and seed."""
    rows = where(models, k_train=k, training="paper")
    return {name: by_seed(part, "log_evidence") for name in CROSSED if (part := where(rows, model=name))}


def _pairs(cross: Sequence[Row], k: int) -> dict[str, dict[str, dict[Any, float]]]:
    """Errors by model, proposal and seed."""
    rows = where(cross, k_train=k, training="paper")
    return {
        model: {q: _errors(where(part, proposal=q)) for q in dict.fromkeys(row["proposal"] for row in part)}
        for model in CROSSED
        if (part := where(rows, model=model))
    }


def _selected(models: Sequence[Row], k: int) -> dict[Any, str]:
    """The crossed model of best held-out IWELBO in each seed."""
    return selected_models(where(models, k_train=k, training="paper", model=CROSSED), "iwelbo")


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
