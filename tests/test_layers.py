"""The layers of both packages: which module may import which. Examples in docstrings run."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import pytest

import vaerdict
import vaerdict_paper

WINGS = {"vaerdict": Path(vaerdict.__file__).parent, "vaerdict_paper": Path(vaerdict_paper.__file__).parent}

# Lowest first. A module or package imports only from lines above its own, and from its own package.
LAYERS = {
    "vaerdict": (
        ("_lazy",),
        ("core",),
        ("noise", "io", "options", "functions"),
        ("optional", "runs"),
        ("csv_files", "notebook"),
        ("engines",),
        ("tasks",),
        ("distributions", "likelihoods", "objectives", "diagnostics", "networks"),
        ("priors",),
        ("proposals", "estimators", "samplers", "refinement"),
        ("models",),
        ("training", "decisions", "datasets"),
        ("selective",),
        ("inference",),
        ("report",),
        ("classify", "de"),
        ("auditing",),
        ("annotation",),
        ("demo",),
        ("cli",),
        ("__main__", "__init__"),
    ),
    "vaerdict_paper": (
        ("mnist_data", "theory"),
        ("experiments",),
        ("benchmarks",),
        ("pages",),
        ("commands", "__init__"),
    ),
}
LEVEL = {
    f"{wing}.{name}": level for wing, layers in LAYERS.items() for level, names in enumerate(layers) for name in names
}


def dotted(path: Path, wing: str) -> str:
    """``models/ppca.py -> vaerdict.models.ppca``."""
    parts = (wing, *path.relative_to(WINGS[wing]).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


MODULES = {dotted(path, wing): path for wing, root in WINGS.items() for path in sorted(root.rglob("*.py"))}


def entry(name: str) -> str:
    """The entry of the table a dotted name belongs to: ``vaerdict.models.ppca -> vaerdict.models``."""
    parts = name.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 else f"{name}.__init__"


def imports(source: str, module: str) -> list[str]:
    """Every module of the project that a source imports, at module level, inside a function or by its name."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            # `from vaerdict import core` names a module, `from vaerdict.core import Draws` something inside one
            names += [f"{base}.{alias.name}" if base in WINGS else base for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            names += [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [name.rstrip(".") for name in names if name.split(".")[0] in WINGS]


def violations(source: str, module: str) -> list[str]:
    return [f"{module} imports {name}" for name in imports(source, module) if not allowed(module, name)]


def allowed(importer: str, imported: str) -> bool:
    source, target = entry(importer), entry(imported)
    wing, other = source.split(".")[0], target.split(".")[0]
    if source == target or imported == "vaerdict.__version__":
        return True
    if wing != other:
        return wing == "vaerdict_paper"  # the paper may import the library, but not the other way round
    return LEVEL.get(target, LEVEL[f"{other}.__init__"]) < LEVEL[source]


def test_every_module_has_its_layer():
    missing = sorted(name for name in MODULES if entry(name) not in LEVEL)
    assert not missing, f"{missing} are in no layer; add them to the table"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_to_lower_layers(module):
    assert not violations(MODULES[module].read_text(), module)


@pytest.mark.parametrize(
    ("source", "module", "fine"),
    [
        ("from vaerdict.core import Draws", "vaerdict.noise", True),
        ("import vaerdict.core", "vaerdict.noise", True),
        ("from vaerdict.models.ppca import PPCA", "vaerdict.models.counts", True),
        ("from .ppca import PPCA", "vaerdict.models.counts", True),
        ("from vaerdict import estimators", "vaerdict.proposals", False),
        ("from vaerdict.noise import seeded", "vaerdict.core", False),
        ("def f():\n    from vaerdict.cli import main", "vaerdict.inference", False),
        ('import_module("vaerdict.report").render(out)', "vaerdict.inference.posterior", False),
        ("from vaerdict_paper.theory import tail", "vaerdict.de.result", False),
        ("from vaerdict.de import page", "vaerdict_paper.theory.gaussians", True),
        ("from vaerdict_paper.pages import ppca", "vaerdict_paper.experiments.ppca", False),
        ("from ..inference import run", "vaerdict.models.counts", False),
        ("from vaerdict import PPCA", "vaerdict.cli", False),
        ("from vaerdict import __version__", "vaerdict.cli", True),
        ("import vaerdict", "vaerdict.core", False),
        ("import torch", "vaerdict.core", True),
    ],
)
def test_the_rule_itself(source, module, fine):
    assert (violations(source, module) == []) == fine


def test_examples_in_docstrings_run():
    attempted = 0
    for name in MODULES:
        if name.endswith("__main__"):
            continue
        result = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
        assert result.failed == 0, f"an example in {name} fails"
        attempted += result.attempted
    assert attempted > 0
