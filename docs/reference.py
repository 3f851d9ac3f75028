"""Writes api.md beside this file: the public names with their signatures and docstrings (`make docs`)."""

from __future__ import annotations

import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vaerdict as vd

HEAD = """# Reference

Every name of `import vaerdict as vd`, from the docstrings, by `make docs`. Shapes: particles first, `(particles,
*batch)` for log-weights and `(particles, *batch, d)` for latents. Randomness is the argument `generator`, or at the
user's edge a `seed`.
"""

GROUPS: dict[str, tuple[str, ...]] = {
    "Answers": ("expect", "posterior", "Posterior", "Estimate", "Answer", "Decision", "Verdict"),
    "The three steps": ("ThreeStep", "VAE", "IWAE", "WW", "CHI", "CYCLIC", "AGG", "Recipe"),
    "Training": ("train", "Settings", "Member", "Fit"),
    "Proposals": ("Normal", "Student", "SplineFlow", "Prior", "Mixture", "refine"),
    "Classifiers": ("SelectiveClassifier",),
    "Differential expression": ("differential_expression", "DEResult", "calibrate", "Calibration", "from_scvi"),
    "What models and proposals are": ("Model", "Proposal", "Draws", "Sobol", "seeded"),
    "Modules": (
        "estimators",
        "diagnostics",
        "decisions",
        "selective",
        "objectives",
        "samplers",
        "models",
        "datasets",
        "theory",
    ),
    "Errors": ("VaerdictError", "DataError", "SettingError", "ShapeError", "WeightError", "DivergenceError"),
}


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        parts += [_entry(name, getattr(vd, name)) for name in names]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _entry(name: str, thing: Any) -> str:
    if inspect.ismodule(thing):
        return f"### `vd.{name}`\n{_words(thing)}\n\n{_listed(_of_module(thing))}"
    if inspect.isclass(thing):
        plain = issubclass(thing, (Exception, enum.Enum)) or getattr(thing, "_is_protocol", False)
        built = "" if plain else _code(name, thing)
        members = "" if issubclass(thing, Exception) else _listed(_of_class(thing))
        return "\n\n".join(filter(None, [f"### `vd.{name}`", built, _words(thing), members]))
    if inspect.isfunction(thing):
        return f"### `vd.{name}`\n{_code(name, thing)}\n\n{_words(thing)}"
    return f"### `vd.{name}`\nA `{type(thing).__name__}`: `{thing.name}`, with `{thing.phi.name}` for the proposal."


def _code(name: str, thing: Any) -> str:
    """The call as Python, an argument a line where it is long."""
    signature = inspect.signature(thing)
    arguments, starred = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            arguments, starred = [*arguments, "*"], True
        arguments.append(_argument(parameter))
    answer = "" if inspect.isclass(thing) else f" -> {_type(signature.return_annotation)}"
    short = f"{name}({', '.join(arguments)}){answer}"
    long = f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){answer}"
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
    """Public methods and properties with words of their own, in the order they were written."""
    for owner in reversed(thing.__mro__[:-1]):
        if owner.__module__.startswith("vaerdict"):
            for name, member in vars(owner).items():
                if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                    yield f"{name}" if isinstance(member, property) else f"{name}()", member


def _of_module(module: Any) -> Iterator[tuple[str, Any]]:
    for name in getattr(module, "__all__", vars(module)):
        member = getattr(module, name)
        if not name.startswith("_") and getattr(member, "__module__", "").startswith(module.__name__):
            yield f"{name}()" if inspect.isfunction(member) else name, member


def _listed(members: Iterator[tuple[str, Any]]) -> str:
    rows = {name: (inspect.getdoc(member) or "").split("\n\n")[0] for name, member in members}
    return "\n".join(f"- `{name}`: {_markdown(' '.join(words.split()))}" for name, words in rows.items() if words)


def _words(thing: Any) -> str:
    return _markdown(inspect.getdoc(thing) or "")


def _markdown(doc: str) -> str:
    """Docstrings write formulas as Sphinx wants them; GitHub wants dollars."""
    doc = re.sub(r"\.\. math::(.*?)(?:\n\n|\Z)", _formula, doc, flags=re.DOTALL)
    doc = re.sub(r":math:`(.+?)`", r"$\1$", doc, flags=re.DOTALL)
    return doc.replace("``", "`")


def _formula(found: re.Match[str]) -> str:
    return f"```math\n{textwrap.dedent(found[1]).strip()}\n```\n\n"


if __name__ == "__main__":
    Path(__file__).with_name("api.md").write_text(reference(), encoding="utf-8")
