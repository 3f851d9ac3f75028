"""The headline table of the README: questions of users, measured answers, and the commands that reproduce them.

``make readme`` renders it from the result files. Every number is read from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from vaerdict.core import DataError
from vaerdict.io import write_text
from vaerdict_paper.pages.claims import selected_models
from vaerdict_paper.pages.prior import USUAL

RESULTS = Path(__file__).parents[3] / "results"
OPENING, CLOSING = "<!-- headline -->", "<!-- /headline -->"


class HeadlineRow(NamedTuple):
    """A row of the table."""

    question: str
    answer: str
    command: str


def headline_table(results: Path = RESULTS) -> str:
    """The table in Markdown, from the folder of all results."""
    rows = [row(results) for row in (_ppca, _weights, _reject, _novel, _calibration, _prior, _methods)]
    lines = [f"| {row.question} | {row.answer} | `{row.command}` |" for row in rows]
    return "\n".join(["| question | measured | command |", "|---|---|---|", *lines])


def update_headline(page: Path, results: Path = RESULTS) -> bool:
    """Replace the text between the headline markers of a page; False where it has none."""
    content = page.read_text(encoding="utf-8")
    if OPENING not in content:
        return False
    if (content.count(OPENING), content.count(CLOSING)) != (1, 1) or content.index(CLOSING) < content.index(OPENING):
        raise DataError(f"{page} needs exactly one '{OPENING}' followed by one '{CLOSING}'.")
    before, rest = content.split(OPENING)
    write_text(page, f"{before}{OPENING}\n\n{headline_table(results)}\n\n{CLOSING}{rest.split(CLOSING)[1]}")
    return True


# --------------------------------------------------------------------------------------------------------- rows
def _ppca(results: Path) -> HeadlineRow:
    run = _read(results / "ppca" / "results.json")
    as_paper = _where(run["models"], model="VAE", training="paper", k_train=5)
    converged = _where(run["models"], model="VAE", training="converged")
    pairs = _where(run["cross"], training="converged", estimator="snis", noise="iid")
    mixture, single = (_where(pairs, proposal=name) for name in ("MIS-full", "IWAE-full"))
    n = _only([*as_paper, *converged, *mixture, *single], "n_draws")
    floor = _mean(_where(run["floors"], floor="exact posterior, i.i.d.", n_draws=n), "mae")
    return HeadlineRow(
        "How far off is a posterior probability?",
        f"pPCA, {n} draws each, mean error: VAE as in the paper {_mean(as_paper, 'mae_plugin'):.3f} "
        f"({_mean(as_paper, 'mae'):.3f} with weights). Converged, full rank, with weights: VAE "
        f"{_mean(converged, 'mae'):.3f}, three steps {_mean(mixture, 'mae'):.3f}, one encoder alone "
        f"{_mean(single, 'mae'):.3f}. Floor, exact sampling: {floor:.3f}.",
        "vaerdict reproduce ppca --preset paper",
    )


def _weights(results: Path) -> HeadlineRow:
    run = _read(results / "mnist" / "results.json")
    by_stage = {stage: [row for row in run["refined"] if row["stage"] == stage] for stage in ("encoder", "IMPROVED")}
    before, after = (_mean(rows, "khat_share_ok") for rows in by_stage.values())
    distance = _mean(by_stage["IMPROVED"], "gold_distance")
    seeds = len(by_stage["IMPROVED"])
    n, n_gold = (seeds * _only(by_stage["IMPROVED"], key) for key in ("n_images", "gold_images"))
    return HeadlineRow(
        "Are the importance weights reliable?",
        f"MNIST: for {before:.0%} of {n} digits with the encoder, {after:.0%} after refinement per digit. p(c \\| x) "
        f"of {n_gold} is then {distance:.3f} from a long run (total variation).",
        "vaerdict reproduce mnist --preset paper",
    )


def _reject(results: Path) -> HeadlineRow:
    run, older = (_read(results / name / "results.json") for name in ("mnist", "mnist-best"))
    selected = selected_models(run["models"], "iwelbo_refined_held_out")
    steps = [_only_row(run["cross"], model=model, proposal="MIS", seed=seed) for seed, model in selected.items()]
    shifted = _where(older["cross"], model="IWAE", variant="shifted", proposal="MIS")
    plain, with_shifts = (
        _where(part["cross"], model="3 CNNs", shifts=shifts, score="max logit")
        for part, shifts in ((run, False), (older, True))
    )
    ours, theirs, ours_shifted, theirs_shifted = (
        "{:.2f}±{:.2f}".format(*_moments([row["auprc"] for row in rows]))
        for rows in (steps, plain, shifted, with_shifts)
    )
    return HeadlineRow(
        "Is a class without labels rejected?",
        f"MNIST, {run['settings']['n_labels']:,} labels, none of a nine. Average precision of rejecting nines: three "
        f"steps without weights {ours}, three supervised networks {theirs}; shifted images (older run): "
        f"{ours_shifted}, {theirs_shifted}.",
        "vaerdict reproduce mnist --preset paper",
    )


def _calibration(results: Path) -> HeadlineRow:
    run = _read(results / "calibrate-pbmc3k" / "results.json")
    level, (group,) = 0.05, run["settings"]["groups"]
    null, spikes = (_where(run[key], method="reported", level=level) for key in ("null", "spikes"))
    with_any, splits = (_only(null, key) for key in ("splits_with_any", "splits"))
    fdp, error, power = (_only(spikes, key) for key in ("fdp", "fdp_se", "tpr"))
    planted = _where(run["intervals"], kind="spike")
    coverage, of_changed = (_only(planted, key) for key in ("coverage", "coverage_changed"))
    return HeadlineRow(
        f"Does an FDR of {level:.0%} hold on real cells?",
        f"PBMC 3k, halves of {group}: a discovery in {with_any} of {splits}. Planted changes: {power:.0%} found, "
        f"{fdp:.1%} (se {error:.1%}) of calls false; 90% intervals cover {coverage:.0%} of all genes, {of_changed:.0%} "
        "of those changed.",
        "vaerdict calibrate pbmc3k.h5ad --groupby cell_type",
    )


UNEQUAL = "1:9"
"""Splits of one kind of cells into sides of unequal size."""

UNTOUCHED = "PBMC 3k, naive CD4 T"
"""The kind of cells with planted changes on which no setting of ours was chosen."""


def _methods(results: Path) -> HeadlineRow:
    rows = _read(results / "bench" / "de-methods.json")["rows"]
    names = ("vaerdict", "edger+lfc", "edger-treat", "ttest+lfc", "wilcoxon+lfc")
    cells = _where(rows, stage="null", replicates="cells")
    planted, donors = (_where(rows, stage="planted", design=design) for design in ("50", "8v8"))

    def calls(part: Sequence[Mapping[str, Any]]) -> str:
        """In how many splits every method makes a discovery."""
        return ", ".join(str(sum(row["n_called"] > 0 for row in _where(part, method=name))) for name in names)

    def found(part: Sequence[Mapping[str, Any]]) -> str:
        """The share of the changes beyond delta that every method finds; kinds of cells count the same."""
        shares = [mean(_clusters(_where(part, method=name), _FOUND, "data")) for name in names]
        return ", ".join(f"{100 * share:.0f}" for share in shares) + "%"

    equal, unequal = ([row for row in cells if (row["design"] == UNEQUAL) == other] for other in (False, True))
    n_equal, n_unequal = (len(_where(part, method="vaerdict")) for part in (equal, unequal))
    return HeadlineRow(
        "And beside other methods?",
        f"vaerdict, edgeR, treat, Welch, Wilcoxon. Nothing changed, cells as replicates: discoveries in "
        f"{calls(equal)} of {n_equal} halves, {calls(unequal)} of {n_unequal} splits {UNEQUAL}. Planted changes found "
        f"if 5% are false: 50 cells a side {found(planted)}, of a kind that no setting was chosen on "
        f"{found(_where(planted, data=UNTOUCHED))}; 8 v 8 donors {found(donors)}.",
        "vaerdict bench de-methods",
    )


_FOUND = "tpr_matched_delta"


def _prior(results: Path) -> HeadlineRow:
    rows = _read(results / "bench" / "prior.json")["rows"]
    contrasts = _where(rows, stage="contrast", n=15)
    few = [row for row in contrasts if "fdp_exact" not in row and row["others"] in USUAL]
    counts, *priors = (_where(few, method=name) for name in ("none", "profile", "model"))
    alone = _clusters(counts, "tpr", "data")
    gains = [
        _with_error([b - a for a, b in zip(alone, _clusters(part, "tpr", "data"), strict=True)]) for part in priors
    ]
    surely, expected = (
        ", ".join(_percent(part, key, "data") for part in (counts, *priors)) for key in ("fdp_hard", "fdp_soft")
    )
    null = _where(rows, stage="null", method="profile")
    calls = sum(row["n_called"] > 0 for row in null)
    return HeadlineRow(
        "What do other cells add to few?",
        f"{len(alone)} contrasts, 15 cells a side, FDR 5%: counts alone find {mean(alone):.0%}, a prior from clusters "
        f"of other cells {gains[0]} more, from a VAE {gains[1]}. False calls: at least {surely}, expected "
        f"{expected}. Nothing differs: a discovery in {calls} of {len(null)} splits.",
        "vaerdict bench prior",
    )


def _novel(results: Path) -> HeadlineRow:
    rows = _where(_read(results / "bench" / "novel-cells.json")["rows"], method="vaerdict")
    cells = _where(rows, stage="hidden", data="PBMC 3k")
    shares = {share: _where(cells, share=share) for share in (0.05, 0.25)}
    few, many = ([_percent(part, key, "design") for key in ("power", "fdp")] for part in shares.values())
    shifted = [row for row in _where(rows, stage="gate") if row["design"] not in ("random", "composition")]
    n_refused = sum(row["refused"] for row in shifted)
    return HeadlineRow(
        "Are unknown cell types found?",
        f"PBMC 3k, types hidden in turn, FDR 10%: 5% novel, {few[0]} found, {few[1]} of calls false; 25% "
        f"novel, {many[0]}, {many[1]}. Other donors, patients, conditions: {n_refused} of {len(shifted)} "
        "refused.",
        "vaerdict bench novel-cells",
    )


# ------------------------------------------------------------------------------------------------------ reading
def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); the headline table needs it.") from error


def _where(rows: Iterable[Mapping[str, Any]], **values: Any) -> list[Mapping[str, Any]]:
    """The rows that have all of these values, at least one."""
    chosen = [row for row in rows if all(row.get(key) == value for key, value in values.items())]
    if not chosen:
        raise DataError(f"no row of the results has {values}; the headline table needs one.")
    return chosen


def _mean(rows: Iterable[Mapping[str, Any]], key: str) -> float:
    """The mean over rows, one per seed."""
    values = [row[key] for row in rows]
    return sum(values) / len(values)


def _clusters(rows: Sequence[Mapping[str, Any]], key: str, by: str) -> list[float]:
    """The mean of each group of rows: runs on the same cells are not independent."""
    return [_mean(_where(rows, **{by: name}), key) for name in dict.fromkeys(row[by] for row in rows)]


def _percent(rows: Sequence[Mapping[str, Any]], key: str, by: str) -> str:
    """The mean over groups in percent with its standard error."""
    return _with_error(_clusters(rows, key, by))


def _with_error(values: Sequence[float]) -> str:
    """The mean in percent with its standard error."""
    return "{:.0f}±{:.1f}%".format(*_moments([100 * value for value in values]))


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    return mean(values), stdev(values) / len(values) ** 0.5


def _only_row(rows: Iterable[Mapping[str, Any]], **values: Any) -> Mapping[str, Any]:
    """The one row that has all of these values."""
    (row,) = _where(rows, **values)
    return row


def _only(rows: Iterable[Mapping[str, Any]], key: str) -> Any:
    """The value that all rows share."""
    values = {row[key] for row in rows}
    if len(values) != 1:
        raise DataError(f"{key} has the values {sorted(values)}; the headline table needs one.")
    return values.pop()
