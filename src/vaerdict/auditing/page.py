"""The page of an audit: the verdict first, then which observations, which quantities, and the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vaerdict import __version__
from vaerdict.auditing.figures import groups_picture, khat_picture, movement_picture
from vaerdict.auditing.verdict import MOST, NEAR, moved_most, of_share, percent
from vaerdict.report import brief
from vaerdict.report.document import TONES, Block, Document, Finding, Section, present
from vaerdict.report.page import flat
from vaerdict.report.records import Row, read_run, rows_of, well_formed
from vaerdict.report.tables import Column, Table, Value, number

_WORDS = (
    ("k-hat", "How heavy the tail of the importance weights is. Above the threshold their averages are not reliable."),
    ("effective draws", "How many draws of the posterior the weighted draws are worth, as a share of the draws (ESS)."),
    ("encoder", "The approximate posterior that was trained with the model."),
    ("average of the encoder", "What is usually read off a model: the mean of a quantity under the encoder."),
    ("refined inference", "Importance sampling from proposals fitted to the posterior of each observation."),
    ("posterior standard deviation", "The spread of a quantity given one observation, by refined inference."),
    ("near", f"Within {NEAR:g} posterior standard deviations (root mean square over the outputs of a quantity)."),
    ("reconstruction", "The log-likelihood of the observation given its latents, averaged over these."),
    ("nats", "Units of log evidence, with the natural logarithm."),
)


_STYLE = """
.picture { display: inline-block; width: min(100%, 33rem); margin-right: 1rem; vertical-align: top; }
tbody th { min-width: 9rem; overflow-wrap: break-word; }
"""
_LITTLE = 0.1  # posterior standard deviations


def from_run(run_dir: Path) -> Document:
    """The report on a run directory of `vaerdict audit`: results.json and manifest.json."""
    results, manifest = read_run(run_dir)
    with well_formed(run_dir):
        return document(results, manifest)


def document(results: Row, manifest: dict[str, Any] | None) -> Document:
    """The report on an audit; `results` is what results.json holds, `manifest` what manifest.json holds."""
    noun, groups = results["noun"], rows_of(results, "groups", "group", "n")
    quantities = rows_of(results, "quantities", "name", "share_near")
    sections = [
        ("Verdict", [findings(results)]),
        (f"Which {noun}?", [khat_picture(results), *_groups(groups, quantities, noun)]),
        ("Which quantities?", [movement_picture(quantities, groups), _quantities_table(quantities, noun)]),
        ("What moved most", [_features_table(row, noun) for row in quantities]),
        ("Evidence", [_evidence_table(results), *_evidence_notes(results)]),
        ("Words and settings", [_words_table(), *_settings(results)]),
    ]
    return Document(
        f"Audit of the encoder of {results['model']}",
        [f"{results['verdict']['verdict']}. {results['verdict']['reason']}", _most(results), _gap(results)],
        present(sections),
        manifest,
        style=_STYLE,
    )


def card(results: Row) -> str:
    """The block for a model card: verdict, what moved most, evidence gap, statements and the table of quantities."""
    report = document(results, None)
    n, noun = results["n_observations"], results["noun"]
    made = f"{n:,} {noun}, vaerdict {__version__}"
    quantities = Section("", [_quantities_table(results["quantities"], noun)])
    groups = [Section("", _groups(results["groups"], results["quantities"], noun)[1:])] if results["groups"] else []
    short = Document(report.title, report.summary, [report.sections[0], quantities])
    parts = [f"### {report.title}", made, brief(short)]
    if groups:
        parts.append(brief(Document("", [], groups)))
    return "\n\n".join(parts) + "\n"


# ----------------------------------------------------------------------------------------------------- sentences
def _most(results: Row) -> str:
    """What moved most, in posterior standard deviations and in units."""
    (quantity, feature), noun = moved_most(results["quantities"]), results["noun"]
    typical = quantity["median_sd"]
    if typical is not None and typical < _LITTLE:
        return f"No quantity moves by more than {_LITTLE:g} posterior standard deviations for most of the {noun}."
    sentence = (
        f"What moves most under refined inference: {quantity['name']}, by {_number(typical)} posterior standard "
        f"deviations (median over {noun})"
    )
    if feature is None or quantity["n_outputs"] == 1:
        return f"{sentence}."
    unit = f" {quantity['unit']}" if quantity["unit"] else ""
    place = f", most in {feature['group']}" if feature["group"] is not None else ""
    change = f"{_signed(feature['shift'])} ± {_number(feature['shift_error'])}"
    return (
        f"{sentence}. Of its {quantity['n_outputs']:,} features it is {feature['feature']}{place}: its mean over all "
        f"{noun} changes from {_number(feature['plugin'])} to {_number(feature['value'])}{unit} ({change})."
    )


def _gap(results: Row) -> str:
    evidence = results["evidence"]
    if not evidence["n"]:
        return "The evidence could not be bounded."
    low, high = (number(evidence[key], 3) for key in ("lower", "upper"))
    return (
        f"The encoder's evidence lower bound (ELBO) is {number(evidence['lower'] - evidence['elbo'], 2)} nats per "
        f"observation below the log evidence, which refined inference bounds between {low} and {high} "
        f"(± {2 * evidence['error']:.3f})."
    )


def findings(results: Row) -> list[Finding]:
    """The parts of the verdict, each with its evidence."""
    verdict, noun = results["verdict"], results["noun"]
    encoder, refined, search = results["encoder"], results["refined"], results["search"]
    low, middle, high = map(_khat, encoder["khat"])
    proposal = Finding(
        f"The encoder as a proposal: its importance weights are reliable for {percent(encoder['share_reliable'])} of "
        f"the {noun}.",
        *_badge(verdict["encoder"]),
        [
            f"k-hat {middle} (80 % of the {noun}: {low} to {high}); reliable below {encoder['khat_threshold']:.2f} "
            f"with {encoder['n_draws']} draws.",
            f"{percent(encoder['ess'][1])} of the draws are effective (median).",
        ],
    )
    near = ", ".join(f"{row['name']} {percent(row['share_near'])}" for row in results["quantities"])
    averages = Finding(
        f"The averages of the encoder: share of the {noun} for which they are near those of refined inference.",
        *_badge(verdict["averages"]),
        [f"{near}.", *_neighbours(results["neighbours"], noun)],
    )
    checked = Finding(
        f"Refined inference, the yardstick: its importance weights are reliable for "
        f"{percent(refined['share_reliable'])} of the {noun}.",
        *_badge(verdict["refined"]),
        [
            f"k-hat {_khat(refined['khat'][1])}; {percent(refined['ess'][1])} of {refined['n_draws']} draws are "
            f"effective (medians). {refined['n_repeated']:,} {noun} were repeated with four times as many draws.",
            f"Modes were also searched from the prior for {search['n']} {noun} chosen at random: posterior mass was "
            f"missed for {search['n_missed']}. A mode that neither search reaches would not be noticed.",
            "Refined inference gives the posterior of the model as it was fitted. Whether the model fits the data is "
            "another question.",
        ],
    )
    return [proposal, averages, checked]


def _badge(verdict: str) -> tuple[str, str]:
    return verdict.lower(), TONES[verdict]


def _neighbours(row: Row | None, noun: str) -> list[str]:
    if row is None:
        return []
    return [
        f"Of the {row['k']} nearest neighbours by latent means, {percent(row['kept'])} stay the same. Between two "
        "halves of the refined draws, which differ by Monte-Carlo error alone, "
        f"{percent(row['kept_between_halves'])} do."
    ]


# -------------------------------------------------------------------------------------------------------- tables
def _groups(groups: Sequence[Row], quantities: Sequence[Row], noun: str) -> list[Block]:
    if not groups:
        return []
    columns = [
        Column("group", "group"),
        Column("n", noun),
        Column("verdict", "averages of the encoder"),
        Column("share_reliable", "encoder reliable, %", 1, 100),
        Column("khat_encoder", "k-hat, encoder"),
        Column("ess_encoder", "effective draws, encoder, %", 1, 100),
        Column("share_answered", "refined reliable, %", 1, 100),
        Column("gap", "ELBO below evidence, nats"),
        *(Column(f"near {q['name']}", f"{q['name']} near, %", 0, 100) for q in quantities),
    ]
    rows = [_group_row(group) for group in groups]
    note = f"Averages are ok if all are near for {MOST:.0%} of the {noun} of a group. k-hat and draws are medians."
    return [groups_picture(groups, noun), Table("groups", f"Reliability by group of {noun}", columns, rows, note)]


def _group_row(group: Row) -> dict[str, Any]:
    shares = {f"near {name}": share for name, share in group["share_near"].items()}
    known = [share for share in shares.values() if share is not None and share == share]
    verdict = of_share(min(known)).name.lower() if known else None
    return {**{k: v for k, v in group.items() if not isinstance(v, dict)}, **shares, "verdict": verdict}


def _quantities_table(quantities: Sequence[Row], noun: str) -> Table:
    columns = [
        Column("name", "quantity"),
        Column("verdict", "average of the encoder"),
        Column("share_near", f"{noun} near, %", 1, 100),
        Column("median_sd", "movement, posterior SD"),
        Column("rms", "movement, units", 3),
        Column("plugin", "mean by encoder", 2),
        Column("value", "mean, refined", 2),
        Column("spread", f"spread between {noun}, units", 3),
        Column("share_moved", "moved beyond 3 errors, %", 1, 100),
        Column("sd_ratio", "SD of encoder / posterior"),
    ]
    rows = [
        {**row, **_only(row), "name": _with_unit(row), "verdict": of_share(row["share_near"]).name.lower()}
        for row in quantities
    ]
    note = (
        f"SD: standard deviation. Movement in posterior SD is the median over {noun} of the root mean square over "
        "outputs; in units it is the root mean square over both. Neither includes the Monte-Carlo error."
    )
    return Table("quantities", "From the encoder to refined inference", columns, rows, note)


def _with_unit(quantity: Row) -> str:
    return f"{quantity['name']} ({quantity['unit']})" if quantity["unit"] else quantity["name"]


def _only(quantity: Row) -> dict[str, Any]:
    """The means of a quantity with one output."""
    one = quantity["features"] and quantity["n_outputs"] == 1
    return {key: quantity["features"][0][key] for key in ("plugin", "value")} if one else {}


def _features_table(quantity: Row, noun: str) -> Table | None:
    if quantity["n_outputs"] < 2 or not quantity["features"]:
        return None
    unit = f", {quantity['unit']}" if quantity["unit"] else ""
    columns = [
        Column("feature", "feature"),
        Column("plugin", f"mean by encoder{unit}", 3),
        Column("value", f"mean, refined{unit}", 3),
        Column("shift", "difference ± error", 3, signed=True),
        Column("rms", f"movement per observation{unit}", 3),
        Column("rms_sd", "the same, posterior SD ± error"),
        Column("share_moved", f"{noun} moved beyond 3 errors, %", 1, 100),
        *([Column("group", "most in")] if quantity["features"][0]["group"] is not None else []),
    ]
    rows = [
        row
        | {
            "shift": Value(row["shift"], row["shift_error"]),
            "rms_sd": Value(row["rms_sd"], row["rms_sd_error"]),
        }
        for row in quantity["features"]
    ]
    caption = f"{quantity['name']}: the features that moved most, of {quantity['n_outputs']:,}"
    return Table(f"features-{quantity['name']}", caption, columns, rows)


def _evidence_table(results: Row) -> Table | None:
    simulated = results["simulated"]
    columns = [
        Column("what", "bound on log p(x)"),
        Column("observed", f"{results['n_observations']:,} {results['noun']}", 3),
        *([Column("simulated", f"{simulated['n_pairs']} simulated pairs", 3)] if simulated else []),
    ]
    draws = results["evidence"]["n_draws_encoder"]
    names = {
        "elbo": "ELBO, own encoder",
        "iwelbo": f"IWELBO, own encoder, {draws} draws",
        "lower": f"lower, refined inference, {results['refined']['n_draws']} draws",
        "upper": "upper, refined inference",
    }
    sources = {"observed": results["evidence"], **({"simulated": simulated} if simulated else {})}
    rows = [{"what": name, **{c: source[key] for c, source in sources.items()}} for key, name in names.items()]
    return Table("evidence", "Log evidence, mean in nats", columns, rows)


def _evidence_notes(results: Row) -> list[str]:
    evidence, simulated, noun = results["evidence"], results["simulated"], results["noun"]
    notes = [
        f"Means over the {evidence['n']:,} {noun} for which refined inference is reliable; twice the Monte-Carlo error "
        f"of the last two is {2 * evidence['error']:.3f} nats. An IWELBO by the own encoder scores encoder and model "
        "together: compare models by the refined bounds. The upper bound takes weighted draws of one half for draws of "
        "the posterior, and is valid as far as they are."
    ]
    if simulated:
        notes.append(
            "For simulated pairs the latent is an exact draw of the posterior, and the upper bound needs no such "
            f"assumption. The bounds are {_number(simulated['width'])} ± {_number(simulated['width_error'])} nats "
            f"apart, {percent(simulated['share_uncovered'])} of the latents are not covered by the refined draws, and "
            f"the encoder is reliable for {percent(simulated['share_reliable'])} of the pairs."
        )
    return notes


def _words_table() -> Table:
    columns = (Column("word", "word"), Column("meaning", "meaning"))
    return Table(
        "words", "What the words mean", columns, [dict(zip(("word", "meaning"), w, strict=True)) for w in _WORDS]
    )


def _settings(results: Row) -> list[Block]:
    entries: Mapping[str, Any] = {**results["settings"], "seconds": results["seconds"]}
    rows = [{"what": key, "value": flat(value)} for key, value in entries.items()]
    columns = (Column("what", "setting"), Column("value", "value"))
    return [Table("settings", "Settings and seconds of each stage", columns, rows, detail=True)]


def _number(value: float | None) -> str:
    """Three digits; an en dash for a missing number."""
    if value is None or value != value:
        return "\N{EN DASH}"
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")


def _khat(value: float | None) -> str:
    return _number(value) if value is None or value != value else number(value, 2)


def _signed(value: float | None) -> str:
    return _number(value) if value is None or value < 0 else f"+{_number(value)}"
