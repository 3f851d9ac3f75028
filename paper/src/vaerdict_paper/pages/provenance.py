"""Where the committed results come from: command, commit, data, machine and cost of every run, from its manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vaerdict.report import read_record
from vaerdict.report.records import Row
from vaerdict.report.tables import ABSENT, Column, Table

_SHORT = 8  # letters of a hash that are shown
_COLUMNS = (
    Column("run", "run"),
    Column("command", "command"),
    Column("commit", "commit"),
    Column("data", "data, SHA-256"),
    Column("device", "machine"),
    Column("versions", "versions"),
    Column("minutes", "minutes of work", 1),
)


def provenance(results_root: Path) -> Table:
    """One row for each run in the folder that has a manifest."""
    manifests = sorted(results_root.glob("*/manifest.json"))
    return Table(
        "provenance",
        "What computed the committed results.",
        _COLUMNS,
        [_row(path.parent.name, read_record(path)) for path in manifests],
        "Minutes of work: the seconds of all tasks, which run side by side, one per core. A commit marked + had "
        "changes that were not committed.",
    )


def _row(run: str, manifest: Row) -> dict[str, Any]:
    machines = manifest.get("task_machines") or [manifest]
    return {
        "run": run,
        "command": _command(manifest.get("command") or []),
        "commit": _commits(manifest),
        "data": (manifest.get("data_sha256") or ABSENT)[:_SHORT],
        "device": _each(_device, machines),
        "versions": _each(_versions, machines),
        "minutes": sum((manifest.get("seconds") or {}).values()) / 60,
    }


def _each(part: Callable[[Row], str], machines: Sequence[Row]) -> str:
    """What the machines that did the tasks have, without repetitions."""
    return "; ".join(dict.fromkeys(map(part, machines)))


def _device(machine: Row) -> str:
    hardware = machine.get("hardware") or {}
    return hardware.get("accelerator") or f"{hardware.get('cores', '?')} CPU cores"


def _versions(machine: Row) -> str:
    versions = machine.get("versions") or {}
    return ", ".join(f"{name} {versions[name]}" for name in ("vaerdict", "torch") if name in versions)


def _command(words: Sequence[str]) -> str:
    """The command without its ``--out FOLDER`` or ``--out=FOLDER``."""
    shown = [word for before, word in zip(["", *words], words, strict=False) if "--out" not in (before, word)]
    return " ".join(word for word in shown if not word.startswith("--out=")) or ABSENT


def _commits(manifest: Row) -> str:
    """The commits whose code did the tasks; older manifests have that of the command alone."""
    commits = manifest.get("task_commits") or [manifest.get("commit")]
    return ", ".join(ABSENT if c is None else c["sha"][:_SHORT] + ("+" if c["dirty"] else "") for c in commits)
