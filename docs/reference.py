"""Writes what the pages beside this file take from the code (`make docs`).

api.md is written whole: the public names with their signatures and docstrings. In the other pages the text between
``<!-- generated:NAME -->`` and ``<!-- /generated:NAME -->`` is replaced.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vaerdict as vd
from vaerdict.annotation.columns import CELLS
from vaerdict.annotation.options import AnnotateOptions
from vaerdict.de import columns
from vaerdict.de.calibration.strata import STRATA
from vaerdict.de.columns import column_table
from vaerdict.de.options import CalibrateOptions, DEOptions
from vaerdict.inference import sampling, search
from vaerdict.inference.posterior import _CONFIRMED_ERRORS
from vaerdict.options import option_table

DOCS = Path(__file__).parent

HEAD = """# Reference

Every name of `import vaerdict as vd`, from the docstrings. Arrays have particles first: log-weights are
`(particles, *batch)` and latents `(particles, *batch, d)`. Randomness is the argument `generator`, or a `seed` where
users call.
"""

GROUPS: dict[str, tuple[str, ...]] = {
    "Answers": (
        "expect",
        "posterior",
        "check",
        "Posterior",
        "Estimate",
        "Answer",
        "Decision",
        "CheckReport",
        "Verdict",
    ),
    "An audit": ("audit", "Audit", "Quantity"),
    "The three steps": ("ThreeStep", "VAE", "IWAE", "WW", "CHI", "CYCLIC", "AGG", "Recipe"),
    "Training": ("train", "Settings", "Member", "Fit"),
    "Your own model": ("from_vae", "from_scvi", "from_pyro", "from_sbi", "from_weights", "as_proposal", "JointPrior"),
    "Proposals": ("Normal", "Student", "SplineFlow", "Prior", "Mixture", "refine"),
    "Classifiers": ("SelectiveClassifier",),
    "Annotation": ("annotate", "Annotation"),
    "Differential expression": ("differential_expression", "DEResult", "split_counts", "calibrate", "Calibration"),
    "Models and proposals as protocols": ("Model", "Proposal", "Draws", "Sobol", "seeded"),
    "Modules": (
        "estimators",
        "diagnostics",
        "decisions",
        "selective",
        "objectives",
        "samplers",
        "models",
        "datasets",
    ),
    "Errors": ("VaerdictError", "DataError", "SettingError", "ShapeError", "WeightError", "DivergenceError"),
}

EXTRAS = {
    "cli": "the commands, figures and everything that `vaerdict de` needs",
    "bio": "AnnData files and tables",
    "sklearn": "`SelectiveClassifier` and `annotate`",
    "rivals": "the tests that `vaerdict calibrate --rivals` compares with",
    "scvi": "fitted scvi-tools models",
    "pyro": "Pyro models and guides",
    "numpyro": "the example of a NumPyro guide",
    "sbi": "posteriors of sbi",
    "plot": "figures",
    "flows": "spline-flow proposals",
    "arviz": "export to arviz",
    "ray": "tasks on a cluster",
    "dev": "tests, linter and type checker",
}
"""What each extra of pyproject.toml is for."""

STAGES = {
    "REFINED": "local proposals at the modes found, the given proposals, wide Student-t kernels and the prior",
    "TILTED": "the same, and kernels where the query differs from its mean; only where the weights are reliable and "
    "the query is not, such as the probability of a rare event",
    "ADAPTED": "kernels fitted to weighted draws; only where the posterior does not have the shape of its curvature, "
    "or where mass was missed",
    "SMC": "kernels fitted to particles of sequential Monte Carlo from the prior, and refitted to weighted draws; only "
    "where the stages before do not answer",
}
"""Where the draws of each stage of escalation come from."""

SECTIONS = ("Parameters", "Attributes", "Returns", "Yields", "Raises", "Notes", "References", "Examples")


# ----------------------------------------------------------------------------------------------- generated tables
def blocks() -> dict[str, dict[str, str]]:
    """The generated text of each page, by the name of its markers."""
    return {
        "de.md": {
            "options": _escaped(option_table(DEOptions)),
            "calibrate-options": _escaped(option_table(CalibrateOptions)),
            "columns": _escaped(column_table(columns.DE)),
            "calibrate-columns": _escaped(column_table(columns.CALIBRATE)),
            "calibrate-strata": _escaped(column_table(STRATA)),
        },
        "annotate.md": {
            "options": _escaped(option_table(AnnotateOptions)),
            "columns": _escaped(column_table(CELLS)),
        },
        "classify.md": {"scores": _scores()},
        "index.md": {"extras": _extras()},
        "verdicts.md": {"stages": _stages(), "limits": _limits(), **_captions()},
    }


def _escaped(table: str) -> str:
    """A Markdown table in which bars inside cells, such as those of |LFC|, are escaped."""
    lines = (line if line.startswith("|---") else _BAR.sub(r"\\|", line) for line in table.splitlines())
    return "\n".join(lines)


_BAR = re.compile(r"(?<!\\)\|(?=\S)|(?<=\S)(?<!\\)\|")


def _scores() -> str:
    rows = [f"| `{name}` | {score.meaning} |" for name, score in vd.selective.REJECT_SCORES.items()]
    return "\n".join(["| `reject_by` | score |", "|---|---|", *rows])


def _extras() -> str:
    declared = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    unknown = declared.keys() ^ EXTRAS.keys()
    if unknown:
        raise SystemExit(f"extras {', '.join(sorted(unknown))} are not both in pyproject.toml and in EXTRAS.")
    names = {extra: ", ".join(re.split(r"[<>=]", package)[0] for package in declared[extra]) for extra in EXTRAS}
    rows = [f"| `{extra}` | {EXTRAS[extra]} | {names[extra]} |" for extra in EXTRAS]
    return "\n".join(["| extra | for | packages |", "|---|---|---|", *rows])


def _stages() -> str:
    if STAGES.keys() != set(sampling.STAGES):
        raise SystemExit(f"STAGES must describe the stages of escalation: {', '.join(sampling.STAGES)}.")
    rows = [f"| `{name}` | {STAGES[name]} |" for name in sampling.STAGES]
    return "\n".join(["| stage | where its draws come from |", "|---|---|", *rows])


def _limits() -> str:
    """The constants on which a verdict depends."""
    limits = {
        "largest k-hat": f"min(1 - 1/log10 K, {vd.diagnostics.MAX_KHAT:g}) for K draws",
        "least share of effective draws, with one or two latents": ", ".join(
            f"{share:.0%} ({stage})" for stage, share in sampling._LEAST_ESS.items()
        ),
        "largest number of draws": f"{sampling.MAX_GROWTH:g} times `n`",
        "largest distance of planned from fresh draws": f"{sampling._AGREEMENT:g} standard errors",
        "event with few draws inside": f"fewer than {vd.diagnostics.FEW_HITS} effective ones",
        "largest share of searches that end alone, for ok": f"{search.MAX_ALONE:.0%}",
        "largest share of the posterior that may be missing, for ok": f"{search.MAX_MISSING:.0%}",
        "largest distance of a confirmed answer from its repetition": f"{_CONFIRMED_ERRORS:g} standard errors",
    }
    return "\n".join(["| limit | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in limits.items())])


def _captions() -> dict[str, str]:
    """The pictures of verdicts.md with the numbers of the run that drew them (figures/verdicts.py)."""
    results = json.loads((DOCS / "figures" / "verdicts.json").read_text(encoding="utf-8"))
    captions = {name: _caption(name, results[name]) for name in ("banana", "ring", "two-modes", "spike")}
    narrow, wider = results["spike"], results["wider-spike"]
    captions["spike"] += (
        f"\n\nThis question was asked {narrow['n_answers']} times, with independent searches. {_tally(narrow)}. "
        f"With a spike {wider['width'] / narrow['width']:.2g} times as wide: {_tally(wider)}."
    )
    return captions


def _tally(row: dict[str, Any]) -> str:
    wrong = row["n_ok"] - row["n_ok_right"]
    others = (
        f"{row['n_caution']} have the verdict caution and {row['n_answers'] - row['n_ok'] - row['n_caution']} refuse"
    )
    return f"{row['n_ok']} answers are ok, {wrong} of them off by more than the tolerance; {others}"


def _caption(name: str, row: dict[str, Any]) -> str:
    error = row["value"] - row["truth"]
    return (
        f"![Posterior, draws and modes found: {name}](figures/{name}.png)\n\n"
        f"*{row['question']}: {row['verdict'].lower()}, stage {row['stage']}. Answer {row['value']:.3f}, standard "
        f"error {row['mcse']:.3f}; the truth is {row['truth']:.3f}, so the true error is {abs(error):.3f} "
        f"({abs(error) / row['mcse']:.1f} standard errors). {row['draws']:,} draws, {row['cost']:,} evaluations. "
        f"Scope: {row['scope']}; `missing` is {row['missing']:.0%}.*"
    )


def filled(page: str, texts: dict[str, str]) -> str:
    """The page with the text between its markers replaced."""
    for name, text in texts.items():
        opening, closing = f"<!-- generated:{name} -->", f"<!-- /generated:{name} -->"
        before, rest = page.split(opening)
        page = f"{before}{opening}\n\n{text}\n\n{closing}{rest.split(closing)[1]}"
    return page


# -------------------------------------------------------------------------------------------------- the reference
def reference() -> str:
    """The whole of api.md."""
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        parts += [_entry(name, getattr(vd, name)) for name in names]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _entry(name: str, thing: Any) -> str:
    if inspect.ismodule(thing):
        return f"### `vd.{name}`\n\n{_docstring(thing)}\n\n{_listed(_of_module(thing))}"
    if inspect.isclass(thing):
        bare = issubclass(thing, (Exception, enum.Enum)) or getattr(thing, "_is_protocol", False)
        call = "" if bare else _call(name, thing)
        members = "" if issubclass(thing, Exception) else _listed(_of_class(thing))
        return "\n\n".join(filter(None, [f"### `vd.{name}`", call, _docstring(thing), members]))
    if inspect.isfunction(thing):
        return f"### `vd.{name}`\n\n{_call(name, thing)}\n\n{_docstring(thing)}"
    return f"### `vd.{name}`\n\nA `{type(thing).__name__}`: `{thing.name}`, with `{thing.phi.name}` for the proposal."


def _call(name: str, thing: Any) -> str:
    """The call as Python, one argument per line where it is long."""
    signature = inspect.signature(thing)
    arguments, starred = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            arguments, starred = [*arguments, "*"], True
        arguments.append(_argument(parameter))
    returns = "" if inspect.isclass(thing) else f" -> {_type(signature.return_annotation)}"
    short = f"{name}({', '.join(arguments)}){returns}"
    long = f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){returns}"
    return f"```python\n{short if len(short) <= 100 else long}\n```"


def _argument(parameter: inspect.Parameter) -> str:
    mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    typed = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
    default = parameter.default
    if default is parameter.empty:
        return f"{mark}{parameter.name}{typed}"
    shown = getattr(default, "__name__", None) or ("..." if "object at" in repr(default) else repr(default))
    return f"{mark}{parameter.name}{typed} = {'...' if shown == '<factory>' else shown}"


def _type(annotation: Any) -> str:
    """An annotation as it was written."""
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__forward_arg__", None) or inspect.formatannotation(annotation)


def _of_class(thing: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with a docstring of their own, in the order of the source."""
    for owner in reversed(thing.__mro__[:-1]):
        if owner.__module__.startswith("vaerdict"):
            for name, member in vars(owner).items():
                if not name.startswith("_") and (callable(member) or isinstance(member, (property, classmethod))):
                    yield name if isinstance(member, property) else f"{name}()", member


def _of_module(module: Any) -> Iterator[tuple[str, Any]]:
    for name in getattr(module, "__all__", vars(module)):
        member = getattr(module, name)
        if not name.startswith("_") and getattr(member, "__module__", "").startswith(module.__name__):
            yield f"{name}()" if inspect.isfunction(member) else name, member


def _listed(members: Iterator[tuple[str, Any]]) -> str:
    """The first paragraph of each docstring, as a list."""
    first = {name: (inspect.getdoc(member) or "").split("\n\n")[0] for name, member in members}
    lines = [f"- `{name}`: {_formulas(' '.join(text.split()))}" for name, text in first.items() if text]
    return "\n".join(["**Members**", "", *lines]) if lines else ""


# ----------------------------------------------------------------------------------------------------- docstrings
def _docstring(thing: Any) -> str:
    """A docstring as Markdown: the sections of NumPy's style as headings, parameters as a list."""
    heading = re.compile(rf"^({'|'.join(SECTIONS)})\n-+\n", re.MULTILINE)
    text, *sections = heading.split(inspect.getdoc(thing) or "")
    parts = [_formulas(text.strip())]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        parts.append(f"**{title}**\n\n{_section(title, body.strip())}")
    return "\n\n".join(filter(None, parts))


def _section(title: str, body: str) -> str:
    if title == "Examples":
        return f"```python\n{body.replace('  # doctest: +SKIP', '')}\n```"
    if title in ("Notes", "References"):
        return _formulas(body)
    entries = re.split(r"\n(?=\S)", body)
    return "\n".join(_item(*entry.partition("\n")) for entry in entries)


def _item(head: str, _: str, body: str) -> str:
    """A parameter, its type where it has one, and its meaning, as an item of a list."""
    name, _, kind = head.partition(" : ")
    names = ", ".join(f"`{each.strip()}`" for each in name.split(", "))
    meaning = _formulas(" ".join(re.sub(r"(?<=\w)-\n\s*", "-", body).split()))  # a line may end at a hyphen
    return f"- {names}{f' ({kind})' if kind else ''}{f': {meaning}' if meaning else ''}"


def _formulas(text: str) -> str:
    """Formulas and tables of Sphinx as GitHub writes them."""
    text = _TABLE.sub(_table, text)
    text = re.sub(r"\.\. math::(.*?)(?:\n\n|\Z)", _displayed, text, flags=re.DOTALL)
    text = re.sub(r":math:`(.+?)`", r"$\1$", text, flags=re.DOTALL)
    return text.replace("``", "`")


def _displayed(match: re.Match[str]) -> str:
    return f"```math\n{textwrap.dedent(match[1]).strip()}\n```\n\n"


_RULE = r"(?P<rule>=+(?: +=+)+)"
_TABLE = re.compile(rf"^{_RULE}\n(?P<head>.+)\n(?P=rule)\n(?P<rows>.+?)\n(?P=rule)$", re.MULTILINE | re.DOTALL)


def _table(match: re.Match[str]) -> str:
    spans = [rule.span() for rule in re.finditer("=+", match["rule"])]
    stops = [*(start for start, _ in spans[1:]), None]
    lines = [match["head"], *match["rows"].splitlines()]
    cells = [[line[start:stop].strip() for (start, _), stop in zip(spans, stops, strict=True)] for line in lines]
    rows = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([rows[0], "|" + "---|" * len(spans), *rows[1:]])


if __name__ == "__main__":
    (DOCS / "api.md").write_text(reference(), encoding="utf-8")
    for page, texts in blocks().items():
        path = DOCS / page
        path.write_text(filled(path.read_text(encoding="utf-8"), texts), encoding="utf-8")
