"""How often a verdict of `vaerdict.expect` is true: questions with known answers in four groups of posteriors.

Every target has six observations and four questions: a mean, a second moment or product, a probability near 0.3 and
one near 0.01. Both the truth and the tolerance are known, so that an answer said to be OK is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal

import vaerdict as vd
from vaerdict.core import Progress, silent
from vaerdict_paper.benchmarks.verdicts.questions import Question, Target, first, generator_of
from vaerdict_paper.benchmarks.verdicts.targets import GROUPS, targets
from vaerdict_paper.benchmarks.verdicts.truth import questions

Record = dict[str, Any]

__all__ = ["GROUPS", "answers", "conjugate_defaults", "run", "summary", "table"]


def answers(
    seed: int = 0,
    groups: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    *,
    progress: Progress = silent,
) -> list[Record]:
    """One record per question and observation: the answer, the truth, the verdict and its reason.

    Parameters
    ----------
    seed
        Seed of the targets and of the answers.
    groups, names
        The groups, and the targets, to ask; all by default.
    progress
        Called after each target.
    """
    chosen = [target for target in targets(seed, groups) if names is None or target.name in names]
    records = []
    for done, target in enumerate(chosen, 1):
        records += [record for question in questions(target) for record in _ask(target, question, seed)]
        progress(done, len(chosen), "targets")
    return records


def _ask(target: Target, question: Question, seed: int) -> list[Record]:
    answer = vd.expect(
        target.model,
        target.x,
        question.f,
        target.proposals,
        n=1000,
        tolerance=question.tolerance,
        generator=generator_of(seed, f"answer to {question.name} of {target.name}"),
    )
    return _records(target.group, target.name, question, answer)


def _records(group: str, name: str, question: Question, answer: vd.Answer) -> list[Record]:
    """One record per observation."""
    value, mcse = answer.value.double(), answer.mcse.double()
    difference, error = value - question.truth, torch.hypot(mcse, question.gold_error)
    columns = {
        "value": value.tolist(),
        "truth": question.truth.tolist(),
        "mcse": mcse.tolist(),
        "gold_error": question.gold_error.tolist(),
        "z": torch.where(difference == 0, 0, difference / error).tolist(),
        "verdict": vd.Verdict.names(answer.verdict),
        "stage": answer.stage,
        "cost": answer.cost.tolist(),
        "reason": answer.reason,
    }
    about = {"group": group, "target": name, "query": question.name, "tolerance": question.tolerance}
    return [
        {**about, "observation": i, **dict(zip(columns, values, strict=True))}
        for i, values in enumerate(zip(*columns.values(), strict=True))
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
        "wrong": sum(abs(r["z"]) > 4 for r in ok),
        "beyond": sum(abs(r["value"] - r["truth"]) > r["tolerance"] for r in ok),
        "refused": sum(r["verdict"] == "REFUSE" for r in records),
        "caution": sum(r["verdict"] == "CAUTION" for r in records),
        "evaluations": sum(r["cost"] for r in records) / max(len(records), 1),
        "rms_z": squares.mean().sqrt().item() if ok else None,
    }


def table(records: Sequence[Record]) -> list[Record]:
    """One row per target and one per group, under the name "all"."""
    rows = []
    for group in dict.fromkeys(r["group"] for r in records):
        members = [r for r in records if r["group"] == group]
        for name in dict.fromkeys(r["target"] for r in members):
            part = [r for r in members if r["target"] == name]
            rows.append({"group": group, "target": name, **summary(part)})
        rows.append({"group": group, "target": "all", **summary(members)})
    return rows


class _FirstModel:
    """A conjugate normal as one would first write it."""

    prior = Normal(torch.zeros(1), torch.ones(1))

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return (self.prior.log_prob(z) + Normal(z, 1.0).log_prob(x)).sum(-1)


def conjugate_defaults(seed: int = 0, n: int = 100) -> list[Record]:
    """One record per question for the mean of a conjugate normal, with all defaults, each with another x and seed."""
    records = []
    for i in range(n):
        x = 2**0.5 * torch.randn(1, 1, generator=generator_of(seed, f"defaults {i}"))
        answer = vd.expect(_FirstModel(), x, lambda z: z[..., 0], generator=vd.seeded(i))
        question = Question("mean", first, 0.02, x[:, 0].double() / 2, torch.zeros(1).double())
        records += _records("defaults", "conjugate normal, 1-d", question, answer)
    return records


def run(*, quick: bool = False, progress: Progress = silent) -> Iterator[Record]:
    """Rows of all groups at seed 0; with `quick` only the benign group."""
    records = answers(0, ["benign"] if quick else None, progress=progress)
    yield from table(records + conjugate_defaults(n=10 if quick else 100))
