"""What is declared, shipped and imported: dependencies of both packages, the command without its extra, stubs, data."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SOURCES = {"vaerdict": ROOT / "src" / "vaerdict", "vaerdict-paper": ROOT / "paper" / "src" / "vaerdict_paper"}
PROJECTS: dict[str, dict[str, Any]] = {
    "vaerdict": tomllib.loads((ROOT / "pyproject.toml").read_text()),
    "vaerdict-paper": tomllib.loads((ROOT / "paper" / "pyproject.toml").read_text()),
}

DISTRIBUTIONS = {"sklearn": "scikit-learn", "skmisc": "scikit-misc", "scvi": "scvi-tools", "pyro": "pyro-ppl"}
DISTRIBUTIONS |= {"arviz_stats": "arviz"}  # a part of arviz 1
"""Distributions whose name is not that of the module."""

WHOLE_PACKAGES = {"cli": "cli", "classify": "sklearn"}
"""Packages of the library that may be imported only with an extra; all others need torch, numpy and scipy only."""

ON_REQUEST = {
    "scvi-tools": "--model",
    "ray": "--engine ray",
    "arviz": "to_arviz()",
    "xarray": "to_arviz()",
    "pyro-ppl": "from_pyro()",
    "sbi": "from_sbi()",
    "scanpy": "--rivals",
    "pydeseq2": "--rivals",
    "edgepython": "--rivals",
}
"""What no command needs unless it is asked for by an option or a method; everything else is in the extra ``cli``."""

HEAVY = (
    "matplotlib",
    "pandas",
    "anndata",
    "sklearn",
    "scvi",
    "zuko",
    "arviz",
    "typer",
    "rich",
    "safetensors",
    "ray",
    "pyro",
    "sbi",
)


# --------------------------------------------------------------------------------------------------- dependencies
class Imported(NamedTuple):
    """An import of a third-party module, at module level or not, perhaps by `require` with an extra."""

    where: str
    distribution: str
    at_module_level: bool = False
    extra: str | None = None
    of: str = "vaerdict"


def declared(project: str, extra: str | None = None) -> set[str]:
    """Distributions that a project, or an extra of it, depends on, with the extras of the project resolved."""
    metadata = PROJECTS[project]["project"]
    names: set[str] = set()
    for requirement in map(
        Requirement, metadata["optional-dependencies"][extra] if extra else metadata["dependencies"]
    ):
        names.add(requirement.name)
        if requirement.name in PROJECTS:
            names |= declared(requirement.name).union(*(declared(requirement.name, e) for e in requirement.extras))
    return names


def imports(source: str, where: str) -> Iterator[Imported]:
    """The third-party imports of a source, also those inside functions and those by name."""
    tree = ast.parse(source)
    top_level = set(map(id, _module_level(tree)))
    for node in ast.walk(tree):
        extra, project = None, "vaerdict"
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""] if node.level == 0 else []
        elif isinstance(node, ast.Call):
            function = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if function == "require":
                modules, (extra, *_) = _strings(node.args[0]), _strings(node.args[1])
                project = next((k.value.value for k in node.keywords if k.arg == "distribution"), project)  # type: ignore[attr-defined]
            else:
                modules = _strings(node.args[0]) if function in ("import_module", "find_spec") and node.args else []
        else:
            continue
        for package in dict.fromkeys(module.split(".")[0] for module in modules):
            if package.isidentifier() and package not in {"vaerdict", "vaerdict_paper", *sys.stdlib_module_names}:
                distribution = DISTRIBUTIONS.get(package, package)
                yield Imported(f"{where}:{node.lineno}", distribution, id(node) in top_level, extra, project)


def _module_level(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _module_level(child)


def _strings(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def all_imports(project: str) -> list[Imported]:
    root = SOURCES[project]
    return [
        imported
        for path in sorted(root.rglob("*.py"))
        for imported in imports(path.read_text(), path.relative_to(root).as_posix())
    ]


@pytest.mark.parametrize("project", PROJECTS)
def test_every_import_is_declared(project):
    extras = PROJECTS[project]["project"]["optional-dependencies"]
    names = declared(project).union(*(declared(project, extra) for extra in extras))
    assert [i for i in all_imports(project) if i.distribution not in names] == []


@pytest.mark.parametrize("project", PROJECTS)
def test_every_extra_named_in_an_error_brings_the_package(project):
    for imported in all_imports(project):
        if imported.extra is not None:
            extras = PROJECTS[imported.of]["project"]["optional-dependencies"]
            assert imported.extra in extras, f"{imported.where}: {imported.of} has no extra {imported.extra!r}"
            names = declared(imported.of) | declared(imported.of, imported.extra)
            assert imported.distribution in names, f"{imported.where}: not in {imported.of}[{imported.extra}]"


def test_the_library_is_imported_with_torch_numpy_and_scipy_only():
    assert declared("vaerdict") == {"torch", "numpy", "scipy"}
    for imported in all_imports("vaerdict"):
        extra = WHOLE_PACKAGES.get(imported.where.split("/")[0])
        names = declared("vaerdict") | (declared("vaerdict", extra) if extra else set())
        assert not imported.at_module_level or imported.distribution in names, imported


def test_the_extra_of_the_commands_brings_what_they_need():
    names = declared("vaerdict") | declared("vaerdict", "cli")
    assert [i for i in all_imports("vaerdict") if i.distribution not in names | ON_REQUEST.keys()] == []
    assert not names & ON_REQUEST.keys()
    assert "scikit-misc" in declared("vaerdict", "bio")  # the loess fit of the most variable genes


def test_imports_of_every_form_are_recognised():
    source = """
import torch, os
from sklearn.base import clone
if TYPE_CHECKING:
    import pandas
try:
    import zuko
except ImportError:
    pass
def f(part):
    import ray.data
    from .core import x
    import_module(f"safetensors.{part}" if part else "safetensors")
    require("skmisc.loess", "bio"), require("scanpy", "rivals", distribution="vaerdict-paper")
"""
    assert sorted(imports(source, "x.py")) == [
        Imported("x.py:11", "ray"),
        Imported("x.py:13", "safetensors"),
        Imported("x.py:14", "scanpy", extra="rivals", of="vaerdict-paper"),
        Imported("x.py:14", "scikit-misc", extra="bio"),
        Imported("x.py:2", "torch", at_module_level=True),
        Imported("x.py:3", "scikit-learn", at_module_level=True),
        Imported("x.py:5", "pandas"),
        Imported("x.py:7", "zuko", at_module_level=True),
    ]
    assert {"torch", "typer", "anndata", "scikit-misc", "matplotlib"} <= declared("vaerdict-paper")


# --------------------------------------------------------------------------------------------------- what is loaded
def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_without_its_extra_prints_one_line(missing):
    done = run_python(f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
sys.argv = ["vaerdict", "--help"]
from vaerdict.cli import main
main()
""")
    assert done.returncode != 0
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "pip install 'vaerdict[cli]'" in done.stderr


@pytest.mark.parametrize(
    ("modules", "absent"),
    [("vaerdict", ("torch", "vaerdict_paper", *HEAVY)), ("vaerdict, vaerdict.report", ("vaerdict_paper", *HEAVY))],
)
def test_imports_are_cheap_and_independent_of_the_paper(modules, absent):
    done = run_python(f"import sys, {modules}; print(*sorted(set({absent!r}) & set(sys.modules)))")
    assert (done.stdout.split(), done.stderr) == ([], "")


@pytest.mark.parametrize("package", ["vaerdict", "vaerdict.de", "vaerdict.de.model"])
def test_every_name_of_a_stub_resolves(package):
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = module.no_such_name


def test_entry_points_resolve():
    targets = [
        target
        for project in PROJECTS.values()
        for group in (project["project"].get("scripts", {}), *project["project"]["entry-points"].values())
        for target in group.values()
    ]
    assert "vaerdict.cli:main" in targets
    for target in targets:
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), target


# --------------------------------------------------------------------------------------------------- what is shipped
@pytest.mark.parametrize("project", PROJECTS)
def test_every_data_file_is_shipped(project):
    root, settings = SOURCES[project], PROJECTS[project]["tool"]["setuptools"]
    assert settings["packages"]["find"]["where"] == ["src"]
    assert all((path.parent / "__init__.py").exists() for path in root.rglob("*.py"))
    data = {path for path in root.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    ((package, patterns),) = settings["package-data"].items()
    assert package == root.name
    assert data == {path for pattern in patterns for path in root.glob(pattern)}


@pytest.mark.slow
def test_the_wheel_holds_the_library_only(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", "wheels"]
    subprocess.run(pip, cwd=tmp_path, capture_output=True, check=True, timeout=500)
    (wheel,) = (tmp_path / "wheels").glob("vaerdict-*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    sources = (path for path in SOURCES["vaerdict"].rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert sorted(names) == sorted(path.relative_to(ROOT / "src").as_posix() for path in sources)
    for word in ("experiment", "bench", "paper", "published", ".toml"):
        assert not [name for name in names if word in name]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_suite_that_changes_the_tree_fails(tmp_path):
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "test_writes.py").write_text("def test_writes():\n    open('left-behind.txt', 'w').close()\n")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True, timeout=30)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", ".", "test_writes.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    _, title, changed = done.stdout.partition("the tests changed the working tree")
    assert title, done.stdout + done.stderr
    assert [line for line in changed.splitlines() if line.startswith("??")] == ["?? left-behind.txt"]
    assert "1 passed" in changed


def test_modules_are_attributes_whatever_was_imported_before():
    done = run_python(
        "import vaerdict as vd; print(vd.training.Settings.__name__, vd.de.model.__name__, vd.proposals.Prior)"
    )
    assert done.returncode == 0, done.stderr
    done = run_python("import vaerdict as vd; vd.nothing")
    assert "module 'vaerdict' has no attribute 'nothing'" in done.stderr
