"""What a release needs to agree on: versions, Python versions, pins, and the commands that the workflows call."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import vaerdict

ROOT = Path(__file__).parent.parent
PROJECTS = {
    name: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    for name, folder in {"vaerdict": ".", "vaerdict-paper": "paper"}.items()
}
CONSTRAINTS = ("constraints.txt", "constraints-newest.txt")
WORKFLOWS = {path.name: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load(WORKFLOWS[name])["jobs"]


def pins(file: str) -> dict[str, Version]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_one_version_everywhere():
    version = vaerdict.__version__
    assert PROJECTS["vaerdict-paper"]["version"] == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    released = re.findall(r"^## \[(\d[^]]*)\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0][0] == version
    assert released[0][1] == str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["date-released"])
    library = next(r for r in map(Requirement, PROJECTS["vaerdict-paper"]["dependencies"]) if r.name == "vaerdict")
    assert library.specifier.contains(version)


def test_the_python_versions_of_both_packages_are_those_that_are_tested():
    tests = workflow("test.yml")
    pinned = [step["with"]["python-version"] for step in tests["pinned"]["steps"] if "with" in step]
    tested = [*pinned, *tests["newest"]["strategy"]["matrix"]["python"]]
    for project in PROJECTS.values():
        classified = [c.removeprefix("Programming Language :: Python :: ") for c in project["classifiers"]]
        assert [c for c in classified if re.fullmatch(r"3\.\d+", c)] == tested
        assert SpecifierSet(project["requires-python"]).contains(tested[0])
        assert not SpecifierSet(project["requires-python"]).contains("3.10")


def requirements(project: str, extra: str | None = None) -> Iterator[Requirement]:
    """The dependencies of a project, or of an extra of it, on other projects."""
    texts = PROJECTS[project]["optional-dependencies"][extra] if extra else PROJECTS[project]["dependencies"]
    for requirement in map(Requirement, texts):
        if requirement.name in PROJECTS:
            yield from requirements(requirement.name)
            for other in requirement.extras:
                yield from requirements(requirement.name, other)
        else:
            yield requirement


@pytest.mark.parametrize("file", CONSTRAINTS)
def test_what_is_installed_for_the_tests_is_pinned_to_a_version_that_is_allowed(file):
    pinned = pins(file)
    installed = [*requirements("vaerdict", "dev"), *requirements("vaerdict-paper", "rivals")]
    assert {"torch", "scvi-tools", "pytest"} <= {r.name for r in installed}
    for requirement in installed:
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("project", PROJECTS)
def test_no_dependency_has_an_upper_bound(project):
    for extra in (None, *PROJECTS[project]["optional-dependencies"]):
        for requirement in requirements(project, extra):
            assert {s.operator for s in requirement.specifier} <= {">="}, requirement


def test_the_newest_constraints_are_newer():
    """The packages whose interfaces changed between both files."""
    older, newer = map(pins, CONSTRAINTS)
    assert [p for p in older.keys() & newer.keys() if older[p] > newer[p]] == []
    major = {"arviz": 1, "pandas": 3}
    assert all(older[name].major < number <= newer[name].major for name, number in major.items())
    assert all(older[name] < newer[name] for name in ("torch", "anndata", "scanpy", "scvi-tools"))


def test_the_workflows_call_targets_of_the_makefile():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {target for text in WORKFLOWS.values() for target in re.findall(r"\bmake ([\w-]+)", text)}
    assert called == {"test", "test-newest", "docs", "dist"}
    assert called <= targets


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_issue_templates_are_complete(path):
    form = yaml.safe_load(path.read_text())
    if path.stem != "config":
        assert {"name", "description", "body"} <= form.keys()
        assert all(field["attributes"]["label"] for field in form["body"])
        assert len({field["id"] for field in form["body"]}) == len(form["body"])


def test_the_version_is_printed_at_once():
    """In less than 0.3 s of processor time; no library that computes is loaded."""
    command = [sys.executable, "-m", "vaerdict", "--version"]
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout == f"vaerdict {vaerdict.__version__}\n"
    assert min(seconds) < 0.3
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command[1:]], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "numpy", "scipy", "pandas", "matplotlib"}
