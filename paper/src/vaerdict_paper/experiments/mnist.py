"""Section 4 of the paper: nine known digits, few labels, and a digit to reject; decided by M1+M2 models on MNIST.

Every seed has its own split, labels and initialisation, so that spreads and standard errors cover all of them. Reject
thresholds and the choice of model use held-out digits. A task is one variant of the model on one seed with all its
measurements, or the supervised baselines of all seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vaerdict import selective
from vaerdict.classify.agreement import agreement, log_score
from vaerdict.core import log_mean_exp
from vaerdict.inference.class_probabilities import (
    MakeProposal,
    amortised,
    class_posterior,
    plugin_classes,
    refined,
)
from vaerdict.models.m1m2 import M1M2, ClassProposal, PerClass, Recognition, per_class
from vaerdict.samplers import smc
from vaerdict.tasks import Task
from vaerdict_paper.experiments.mnist_baselines import classifier_logits
from vaerdict_paper.experiments.mnist_lab import Lab, Proposals, Trained, fitted_proposals, log, trained_models
from vaerdict_paper.experiments.mnist_measure import (
    UNSEEN,
    Weighted,
    agreement_row,
    bounds_of,
    curve_rows,
    decisions_of,
    digit_rows,
    rule_rows,
    weighted,
    weights_of,
)
from vaerdict_paper.experiments.mnist_settings import (
    MIXTURE,
    N_KNOWN,
    PRESETS,
    SIZE_NAMES,
    Preset,
    Variant,
    preset_of,
    preset_tasks,
)
from vaerdict_paper.mnist_data import mnist, mnist_files

__all__ = ["PRESETS", "data", "tasks", "work"]


def tasks(preset: Preset, seeds: int | None = None) -> list[Task]:
    """One task per variant and seed of the preset, which has the number of seeds, and one for the baselines."""
    return preset_tasks(preset)


def data(preset: Preset, seeds: Sequence[int]) -> Iterator[bytes]:
    """The files of MNIST, for the hash in the manifest."""
    return mnist_files()


def work(task: Task) -> dict[str, Any]:
    """Do one task (see `tasks`)."""
    preset = preset_of(task)
    if task["stage"] == "baselines":
        return baselines(Lab(preset, mnist(), range(preset.seeds)))
    return run_variant(Lab(preset, mnist(), [task["seed"]]), Variant.of(task["variant"]), task["seed"])


# --------------------------------------------------------------------------------------------------- one variant
@dataclass
class Rows:
    """The rows of a variant, as they are written."""

    models: list[dict[str, Any]] = field(default_factory=list)
    cross: list[dict[str, Any]] = field(default_factory=list)
    refined: list[dict[str, Any]] = field(default_factory=list)
    agreement: list[dict[str, Any]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    curves: list[dict[str, Any]] = field(default_factory=list)
    digits: list[dict[str, Any]] = field(default_factory=list)
    latent: list[dict[str, Any]] = field(default_factory=list)


def run_variant(lab: Lab, variant: Variant, seed: int) -> dict[str, Any]:
    """Train the models of a seed, fit proposals to each, measure every pair, and refine the selected model."""
    rows = Rows()
    fits = trained_models(lab, variant, seed)
    proposals = fitted_proposals(lab, variant, fits)
    with lab.stage("evaluation", f"models and proposals of {variant.name}"):
        for fit in fits:
            measured = _measured(lab, fit.model, fit.seed, {fit.name: fit.recognition})
            rows.models.append(_tag(variant, fit) | measured | _scored(lab, fit))
            rows.cross += [_tag(variant, fit) | row for row in _cross_rows(lab, fit, proposals[fit.name])]
    best = max(range(len(fits)), key=lambda i: rows.models[i]["iwelbo_refined_held_out"])
    log.info("%s, seed %d: selected %s", variant.name, seed, fits[best].name)
    if variant.n_closer is None or seed < variant.n_closer:
        _refine(lab, variant, fits[best], proposals[fits[best].name], rows)
    _decide(lab, variant, fits[best], rows)
    return vars(rows) | {"stages": lab.stages}


def _tag(variant: Variant, fit: Trained) -> dict[str, Any]:
    return {
        "model": fit.name,
        "seed": fit.seed,
        "variant": variant.name,
        "sizes": SIZE_NAMES.get(variant.architecture),
        "n_classes": N_KNOWN + variant.free,
        "free": variant.free,
        "shifts": bool(variant.shifts),
        "relaxed": variant.relaxed,
        "labelled_bound": variant.labelled_bound,
        "epochs": variant.epochs,
    }


def _measured(
    lab: Lab, model: M1M2, seed: int, named: Mapping[str, Recognition], prior: bool = False
) -> dict[str, Any]:
    """Decisions without and with weights from equal draws, and diagnostics of the weights.

    The draws are shared by the networks, and with weights by the prior too. Weights are computed for some of the test
    digits only; keys ending in ``_same`` are without weights on these.
    """
    n_draws = lab.preset.n_draws
    x, y = lab.test(seed, lab.preset.n_test)
    row: dict[str, Any] = {"n_draws": n_draws, "networks": len(named), "score": "1 - max"}
    plugin = _plugin(lab, x, named, seed)
    row |= decisions_of(plugin, y, N_KNOWN)
    x, y = lab.test(seed, lab.preset.n_corrected)
    row |= decisions_of(plugin[: len(x)], y, N_KNOWN, "_same")
    answer = _weighted(lab, model, x, amortised(named, model if prior else None), seed)
    row |= decisions_of(answer.posterior.prob, y, N_KNOWN, "_is") | weights_of(answer.posterior, [n_draws])
    held_out = _weighted(lab, model, lab.held_out(seed)[0], amortised(named, model if prior else None), seed)
    return row | bounds_of(answer, y) | {"iwelbo_held_out": held_out.posterior.log_evidence.mean().item()}


def _plugin(lab: Lab, x: Tensor, named: Mapping[str, Recognition], seed: int) -> Tensor:
    """Class probabilities without weights: the mean over the networks, with equal draws."""
    share = max(1, lab.preset.n_draws // len(named))
    parts = [plugin_classes(q, x, share, generator=lab.noise(seed)) for q in named.values()]
    return torch.stack(parts).mean(0)


def _weighted(lab: Lab, model: M1M2, x: Tensor, make: MakeProposal, seed: int) -> Weighted:
    return weighted(model, x, make, lab.preset.n_draws, generator=lab.noise(seed))


def _cross_rows(lab: Lab, fit: Trained, proposals: Proposals) -> list[dict[str, Any]]:
    """Single proposals, the mixture, and its controls: ensembles of as many networks by one objective each."""
    single = {name: {name: q} for name, q in proposals.single.items()}
    several = ({"MIS": proposals.mixture} if single else {}) | proposals.ensembles
    rows = [{"proposal": name} | _measured(lab, fit.model, fit.seed, named) for name, named in single.items()]
    return rows + [
        {"proposal": name} | _measured(lab, fit.model, fit.seed, named, prior=True) for name, named in several.items()
    ]


def _scored(lab: Lab, fit: Trained) -> dict[str, float]:
    """Evidence of some held-out digits by refined proposals; the encoder's own bound is too loose to select by."""
    x = lab.held_out(fit.seed)[0][: lab.preset.n_scored]
    make = refined(fit.model, fit.recognition, improve=False, generator=lab.noise(fit.seed))
    log_evidence = _weighted(lab, fit.model, x, make, fit.seed).posterior.log_evidence
    return {"iwelbo_refined_held_out": log_evidence.mean().item()}


# ---------------------------------------------------------------------------------------------- selected models
@dataclass(frozen=True)
class Inference:
    """A way to answer: proposals with their draws, each for the digits that the one before leaves unreliable."""

    stages: dict[str, MakeProposal]
    n_draws: list[int]


def _refine(lab: Lab, variant: Variant, fit: Trained, proposals: Proposals, rows: Rows) -> None:
    """Every stage of inference beside a long reference run, and agreement with held-out labels."""
    tag, ways = _tag(variant, fit), _inferences(lab, fit, proposals)
    gold = _gold(lab, fit) if lab.preset.n_gold else None
    rows.refined += [tag | _stage_row(lab, fit, stage, way, gold) for stage, way in ways.items()]
    x, y = lab.held_out(fit.seed)
    n = min(len(x), lab.preset.n_refined)
    with lab.stage("refinement", f"{n} held-out digits, {variant.name}"):
        last = ways["ESCALATED"]
        stages = {"REFINED": ways["REFINED"].stages["REFINED"], **last.stages}
        draws = [lab.preset.n_draws, *last.n_draws]
        certified = class_posterior(fit.model, x[:n], stages, draws, generator=lab.noise(fit.seed))
    plugin = _plugin(lab, x, {"own": fit.recognition}, fit.seed)[:n]
    free = range(N_KNOWN, N_KNOWN + variant.free)
    prob, plugin = (selective.among_known(p, free) if free else p for p in (certified.prob, plugin))
    verdicts = agreement(prob, y[:n], certified.verdict, plugin=plugin)
    rows.agreement.append(tag | agreement_row(verdicts, log_score(plugin, y[:n]).mean().item()))


def _inferences(lab: Lab, fit: Trained, proposals: Proposals) -> dict[str, Inference]:
    """The encoder, the mixture, refinement, gradient steps, and longer ones with more draws where these fall short."""
    model, own, n, noise = fit.model, fit.recognition, lab.preset.n_draws, lab.noise(fit.seed)
    improved = refined(model, own, improve=True, generator=noise)
    longer = refined(model, own, improve=True, longer=2, generator=noise)
    single = {"encoder": amortised({"own": own})}
    single |= {"MIS": amortised(proposals.mixture, model)} if proposals.mixture else {}
    single |= {"REFINED": refined(model, own, improve=False, generator=noise), "IMPROVED": improved}
    ways = {name: Inference({name: make}, [n]) for name, make in single.items()}
    escalated = Inference({"IMPROVED": improved, "ESCALATED": longer}, [n, lab.preset.n_escalated])
    return {**ways, "ESCALATED": escalated}


def _decide(lab: Lab, variant: Variant, fit: Trained, rows: Rows) -> None:
    """Decision rules with thresholds chosen on held-out digits."""
    x, y = lab.test(fit.seed, lab.preset.n_test)
    held_out, prob = (_plugin(lab, each, {"own": fit.recognition}, fit.seed) for each in (lab.held_out(fit.seed)[0], x))
    decisions = rule_rows(held_out, prob, y, N_KNOWN, estimator="plugin")
    rows.decisions += [_tag(variant, fit) | row for row in decisions]
    if fit.seed == 0:
        _show(lab, variant, fit, held_out, prob, rows)


def _gold(lab: Lab, fit: Trained) -> Tensor:
    """P(c | x) of some test digits by sequential Monte Carlo for each class, independent of refinement."""
    x, _ = lab.test(fit.seed, lab.preset.n_gold)
    view = PerClass(fit.model)
    with lab.stage("gold", f"SMC for {len(x)} digits and each class"):
        repeated = per_class(x, fit.model.n_classes)
        runs = [
            smc(
                view,
                repeated,
                ClassProposal(fit.recognition),
                n_particles=512,
                ess_target=0.7,
                n_leapfrog=3,
                max_moves=1,
                generator=lab.noise(s),
            ).log_evidence
            for s in (1, 2)
        ]
    return torch.softmax(log_mean_exp(torch.stack(runs)), 0).mT


def _stage_row(lab: Lab, fit: Trained, stage: str, way: Inference, gold: Tensor | None) -> dict[str, Any]:
    x, y = lab.test(fit.seed, lab.preset.n_refined)
    with lab.stage("refinement", f"{stage}, {len(x)} digits"):
        posterior = class_posterior(fit.model, x, way.stages, way.n_draws, generator=lab.noise(fit.seed))
    plugin = _plugin(lab, x, {"own": fit.recognition}, fit.seed)
    row = {} if gold is None else _distance(posterior.prob, gold)
    return row | {
        "stage": stage,
        "n_images": len(x),
        "n_draws": lab.preset.n_draws,
        **decisions_of(plugin, y, N_KNOWN),
        **decisions_of(posterior.prob, y, N_KNOWN, "_is"),
        **weights_of(posterior, way.n_draws),
        "iwelbo": posterior.log_evidence.mean().item(),
        "seconds": lab.stages[-1]["seconds"],
    }


def _distance(prob: Tensor, gold: Tensor) -> dict[str, float]:
    """Mean total variation between class probabilities and those of the reference run on the first digits."""
    distance = 0.5 * (prob[: len(gold)] - gold).abs().sum(-1)
    return {"gold_distance": distance.mean().item(), "gold_images": len(gold)}


def _show(lab: Lab, variant: Variant, fit: Trained, held_out: Tensor, prob: Tensor, rows: Rows) -> None:
    """Curves, pictures of digits and the latent plane of one model."""
    x, y = lab.test(fit.seed, lab.preset.n_test)
    free = range(N_KNOWN, N_KNOWN + variant.free)
    score = (lambda p: selective.free_class(p, free)) if free else selective.entropy
    name = f"{fit.name} {'free class' if free else 'plugin'} ({variant.name})"
    rows.curves += curve_rows(prob, y, score(prob), name)
    threshold = selective.conformal_threshold(score(held_out), 0.05)
    rows.digits += [{"variant": variant.name} | r for r in digit_rows(x, prob, y, score(prob), threshold)]
    with torch.no_grad():
        z = fit.recognition.z_given(x[:900]).loc
    plane = (z - z.mean(0)) @ torch.linalg.svd(z - z.mean(0), full_matrices=False).Vh[:2].mT
    rows.latent += [
        {"variant": variant.name, "x": round(a, 4), "y": round(b, 4), "label": int(c)}
        for (a, b), c in zip(plane.tolist(), y[:900].tolist(), strict=True)
    ]


# ----------------------------------------------------------------------------------------------------- baselines
def baselines(lab: Lab) -> dict[str, Any]:
    """Supervised classifiers, with and without shifts: one per seed, and ensembles as large as the mixture."""
    rows, n = Rows(), lab.preset.seeds
    for shifts in (0, 2):
        images = [torch.cat([s.x_test[: lab.preset.n_test], s.x_held_out]) for s in lab.splits.values()]
        count = len(MIXTURE) * n
        with lab.stage("baselines", f"{count} classifiers, {lab.preset.baseline_epochs} epochs, shifts {shifts}"):
            logits = classifier_logits(
                [*lab.training.values()] * len(MIXTURE),
                images * len(MIXTURE),
                N_KNOWN,
                shifts=shifts,
                epochs=lab.preset.baseline_epochs,
                device=lab.device,
            )
        for seed in range(n):
            _baseline_rows(lab, seed, logits[seed::n][:1], bool(shifts), rows)
            _baseline_rows(lab, seed, logits[seed::n], bool(shifts), rows)
    return {"cross": rows.cross, "decisions": rows.decisions, "curves": rows.curves, "stages": lab.stages}


def _baseline_rows(lab: Lab, seed: int, logits: Tensor, shifts: bool, rows: Rows) -> None:
    """Decisions of an ensemble. Shapes: ``logits (classifiers, test and held-out digits, classes)``."""
    _, y = lab.test(seed, lab.preset.n_test)
    prob, held_out = torch.softmax(logits, -1).mean(0).tensor_split([len(y)])
    model = "CNN" if len(logits) == 1 else f"{len(logits)} CNNs"
    tag = {"model": model, "proposal": None, "seed": seed, "shifts": shifts}
    unseen, largest = y == UNSEEN, logits[:, : len(y)].mean(0).amax(-1)
    for name, score in {"1 - max": -prob.amax(-1), "max logit": -largest, "entropy": selective.entropy(prob)}.items():
        row = {"auprc": selective.average_precision(score, unseen), "auroc": selective.auroc(score, unseen)}
        rows.cross.append(tag | {"score": name, "accuracy": selective.accuracy(prob, y)} | row)
    rows.decisions += [tag | row for row in rule_rows(held_out, prob, y, N_KNOWN, estimator="CNN")]
    if seed == 0:
        rows.curves += curve_rows(prob, y, -prob.amax(-1), f"{model}{' with shifts' if shifts else ''}")
