"""Answers beside the truth: one record per question and observation, and the counts of true and false verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict_paper.benchmarks.verdicts.questions import Question

Record = dict[str, Any]
OURS = "vaerdict"


class Given(NamedTuple):
    """The answers of a method to one question. Shapes: ``value, mcse (n_obs)``, the others one entry per observation.

    ``cost`` is the number of evaluations of the model or of its gradient.
    """

    value: Tensor
    mcse: Tensor
    verdict: list[str]
    stage: list[str]
    cost: list[float]
    reason: list[str]


def records(method: str, group: str, target: str, question: Question, given: Given) -> list[Record]:
    """One record per observation."""
    value, mcse = given.value.double(), given.mcse.double()
    difference, error = value - question.truth, torch.hypot(mcse, question.gold_error)
    columns = {
        "observation": range(len(value)),
        "value": value.tolist(),
        "truth": question.truth.tolist(),
        "mcse": mcse.tolist(),
        "gold_error": question.gold_error.tolist(),
        "z": torch.where(difference == 0, 0, difference / error).tolist(),
        **{name: getattr(given, name) for name in ("verdict", "stage", "cost", "reason")},
    }
    about = {"method": method, "group": group, "target": target, "query": question.name}
    return [
        {**about, "tolerance": question.tolerance, **dict(zip(columns, values, strict=True))}
        for values in zip(*columns.values(), strict=True)
    ]


def summary(records: Sequence[Record]) -> Record:
    """Counts of verdicts, true and false.

    ``wrong`` are answers said to be OK that are more than four stated errors from the truth, ``beyond`` those that are
    further from it than the tolerance.
    """
    ok = [r for r in records if r["verdict"] == "OK"]
    squares = torch.tensor([r["z"] ** 2 for r in ok], dtype=torch.float64)
    return {
        "questions": len(records),
        "answered": len(ok),
        "wrong": sum(not abs(r["z"]) <= 4 for r in ok),
        "beyond": sum(not abs(r["value"] - r["truth"]) <= r["tolerance"] for r in ok),
        "refused": sum(r["verdict"] == "REFUSE" for r in records),
        "caution": sum(r["verdict"] == "CAUTION" for r in records),
        "evaluations": sum(r["cost"] for r in records) / max(len(records), 1),
        "rms_z": squares.mean().sqrt().item() if ok else None,
    }


def table(records: Sequence[Record]) -> list[Record]:
    """One row per method, group and target, and one per method and group under the name "all"."""
    rows = []
    for method, group in dict.fromkeys((r["method"], r["group"]) for r in records):
        members = [r for r in records if (r["method"], r["group"]) == (method, group)]
        parts = {
            name: [r for r in members if r["target"] == name] for name in dict.fromkeys(r["target"] for r in members)
        }
        about = {"method": method, "group": group}
        rows += [{**about, "target": name, **summary(part)} for name, part in (parts | {"all": members}).items()]
    return rows
