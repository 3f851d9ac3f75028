"""How often a verdict of `vaerdict.expect` is true: questions with known answers in four groups of posteriors.

Every target has six observations and four questions: a mean, a second moment or product, a probability near 0.3 and
one near 0.01. Both the truth and the tolerance are known, so that an answer said to be OK is checked. Some targets are
also given to NUTS and to nested sampling at their usual settings.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal

import vaerdict as vd
from vaerdict.core import Progress, silent
from vaerdict_paper.benchmarks.verdicts import rivals
from vaerdict_paper.benchmarks.verdicts.questions import Question, Target, first, generator_of
from vaerdict_paper.benchmarks.verdicts.records import OURS, Given, Record, records, summary, table
from vaerdict_paper.benchmarks.verdicts.targets import GROUPS, targets
from vaerdict_paper.benchmarks.verdicts.truth import questions

PEERS = ("jax", "numpyro", "dynesty")
HELD_OUT = 31
"""The seed of the targets that verdicts are judged on, which nothing was built on."""

log = logging.getLogger(__name__)

__all__ = ["GROUPS", "answers", "conjugate_defaults", "rival_answers", "run", "summary", "table", "targets"]


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
    found = []
    for done, target in enumerate(chosen, 1):
        found += _ask(target, questions(target), seed)
        progress(done, len(chosen), "targets")
    return found


def _ask(target: Target, asked: Sequence[Question], seed: int) -> list[Record]:
    found = []
    for question in asked:
        answer = vd.expect(
            target.model,
            target.x,
            question.f,
            target.proposals,
            n=1000,
            tolerance=question.tolerance,
            seed=generator_of(seed, f"answer to {question.name} of {target.name}"),
        )
        found += records(OURS, target.group, target.name, question, _given(answer))
    return found


def _given(answer: Any) -> Given:
    verdict = vd.Verdict.names(answer.verdict)
    return Given(answer.value, answer.mcse, verdict, answer.stage, answer.cost.tolist(), answer.reason)


class _FirstModel:
    """A conjugate normal as one would first write it."""

    prior = Normal(torch.zeros(1), torch.ones(1))

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return (self.prior.log_prob(z) + Normal(z, 1.0).log_prob(x)).sum(-1)


def conjugate_defaults(seed: int = 0, n: int = 100) -> list[Record]:
    """One record per question for the mean of a conjugate normal, with all defaults, each with another x and seed."""
    found = []
    for i in range(n):
        x = 2**0.5 * torch.randn(1, 1, generator=generator_of(seed, f"defaults {i}"))
        answer = vd.expect(_FirstModel(), x, first, seed=vd.seeded(i))
        question = Question("mean", first, 0.02, x[:, 0].double() / 2, torch.zeros(1).double())
        found += records(OURS, "defaults", "conjugate normal, 1-d", question, _given(answer))
    return found


def rival_answers(
    seed: int = 0, names: Sequence[str] = rivals.COMPARED, *, progress: Progress = silent
) -> list[Record]:
    """The records of NUTS and nested sampling, as far as they are installed, and ours, on targets given to all."""
    chosen = [target for target in targets(seed) if target.name in names]
    found = []
    for done, full in enumerate(chosen, 1):
        asked = [question.of(rivals.N_COMPARED) for question in questions(full)]
        target = replace(full, x=full.x[: rivals.N_COMPARED])
        found += _ask(target, asked, seed)
        for method in rivals.installed():
            found += rivals.answers(method, target, asked, seed)
        progress(done, len(chosen), "compared targets")
    return [{**record, "group": "compared"} for record in found]


def run(*, quick: bool = False, progress: Progress = silent) -> Iterator[Record]:
    """Rows of all groups, then of the comparison; with `quick` two benign targets and no comparison.

    The targets are drawn with a seed that was not used while the inference was built; those were 0 and 12.
    """
    if quick:
        yield from table(answers(0, ["benign"], ["Gaussian, 1-d", "box, 4-d"]) + conjugate_defaults(n=5))
        return
    for group in GROUPS:
        yield from table(answers(HELD_OUT, [group], progress=progress))
    yield from table(conjugate_defaults(HELD_OUT))
    if len(rivals.installed()) < len(rivals.METHODS):
        log.warning("NumPyro or dynesty is missing (`pip install vaerdict-paper[samplers]`): its rows are left out")
    if rivals.installed():
        yield from table(rival_answers(HELD_OUT, progress=progress))
