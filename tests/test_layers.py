"""The architecture, enforced: who may import whom, what `import vaerdict` costs, and that docstring examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import vaerdict

ROOT = Path(vaerdict.__file__).parent

# Lowest first. A module or package imports only from lines above its own, and from its own package.
LAYERS = (
    ("core",),
    ("noise", "files", "engines"),
    ("units",),
    ("distributions", "likelihoods", "objectives", "diagnostics", "networks", "views"),
    ("proposals", "estimators", "samplers", "refinement", "theory", "models"),
    ("flows",),
    ("training", "decisions", "datasets", "foreign"),
    ("selective",),
    ("agreement",),
    ("procedure",),
    ("classify", "de"),
    ("experiments",),
    ("report", "benchmarks"),
    ("cli_de", "cli_calibrate"),
    ("cli",),
    ("__main__", "__init__"),
)
LAYER = {name: level for level, names in enumerate(LAYERS) for name in names}

HEAVY = ("matplotlib", "pandas", "anndata", "sklearn", "scvi", "zuko", "arviz", "typer", "rich", "safetensors", "ray")


def dotted(path: Path) -> str:
    """``models/ppca.py -> vaerdict.models.ppca``."""
    parts = ("vaerdict", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


MODULES = {dotted(path): path for path in sorted(ROOT.rglob("*.py"))}


def unit(name: str) -> str:
    """The entry of the table a dotted name belongs to: ``vaerdict.models.ppca -> models``."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(source: str, module: str) -> list[str]:
    """Every project module a source imports, at the top of the file or inside a function."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            # `from vaerdict import core` names a module, `from vaerdict.core import Draws` something inside one
            found += [f"{base}.{alias.name}" if base == "vaerdict" else base for alias in node.names]
    return [name for name in found if name.split(".")[0] == "vaerdict"]


def violations(source: str, module: str) -> list[str]:
    here = unit(module)
    return [
        f"{module} imports {name}"
        for name in imports(source, module)
        if unit(name) not in (here, "__version__") and LAYER.get(unit(name), LAYER["__init__"]) >= LAYER[here]
    ]


def test_every_module_has_its_layer():
    homeless = sorted(name for name in MODULES if unit(name) not in LAYER)
    assert not homeless, f"{homeless} stand in no layer; add them to the table"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_to_lower_layers(module):
    assert not violations(MODULES[module].read_text(), module)


@pytest.mark.parametrize(
    ("source", "module", "allowed"),
    [
        ("from vaerdict.core import Draws", "vaerdict.noise", True),
        ("import vaerdict.core", "vaerdict.noise", True),
        ("from vaerdict.models.ppca import PPCA", "vaerdict.models.counts", True),
        ("from .ppca import PPCA", "vaerdict.models.counts", True),
        ("from vaerdict import estimators", "vaerdict.proposals", False),
        ("from vaerdict.noise import seeded", "vaerdict.core", False),
        ("def f():\n    from vaerdict.cli import main", "vaerdict.procedure", False),
        ("from ..procedure import run", "vaerdict.models.counts", False),
        ("from vaerdict import PPCA", "vaerdict.cli", False),
        ("from vaerdict import __version__", "vaerdict.cli", True),
        ("import vaerdict", "vaerdict.core", False),
        ("import torch", "vaerdict.core", True),
    ],
)
def test_the_rule_itself(source, module, allowed):
    assert (violations(source, module) == []) == allowed


def test_importing_vaerdict_is_cheap():
    code = f"import sys, vaerdict; print(*(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_examples_in_docstrings_run():
    attempted = 0
    for name in MODULES:
        if unit(name) == "__main__":
            continue
        result = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
        assert result.failed == 0, f"an example in {name} prints something else"
        attempted += result.attempted
    assert attempted > 0
