"""The page of the MNIST experiment on made-up rows whose right answers are known."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from page_checks import NASTY, run_in
from vaerdict.core import DataError
from vaerdict.report import load, markdown, render, text
from vaerdict.report.tables import Table, is_best
from vaerdict_paper.experiments.ppca import published
from vaerdict_paper.pages import mnist
from vaerdict_paper.pages.claims import Claim, ClaimVerdict, judged
from vaerdict_paper.pages.mnist_claims import (
    last_stage,
    paper_claims,
    paper_claims_by_sizes,
    refinement_claims,
    rejection_claims,
    targets,
)
from vaerdict_paper.pages.mnist_figures import digit_text, mosaic, pixels, thinned
from vaerdict_paper.pages.mnist_rows import baselines, best_model, by_selection, methods, paper_variant, title
from vaerdict_paper.pages.mnist_summary import effect_on_decisions
from vaerdict_paper.pages.mnist_tables import (
    agreement_table,
    better_table,
    decisions_table,
    iwelbo_table,
    methods_table,
    models_table,
    refinement_table,
    stages_table,
)
from vaerdict_paper.pages.seed_statistics import where

HOLDS, FAILS, UNRESOLVED, TOO_FEW, NOT_RUN = ClaimVerdict
SEEDS = range(5)
WOBBLE = (-0.002, 0.001, 0.0, 0.002, -0.001)
"""Differences between seeds: mean zero, standard error 0.0007."""


def noise(seed: int, *names: object) -> float:
    """A difference between seeds of its own size for these names, so that no paired difference is constant."""
    return WOBBLE[seed] * (1 + crc32(repr(names).encode()) % 97 / 97)


PRINTED = published()["mnist"]["printed"]
RELEASED = published()["mnist"]["released"]
MODELS = ("VAE", "IWAE", "WW", "CHI")
IWELBO = {"VAE": -104.0, "IWAE": -101.0, "WW": -102.0, "CHI": -105.0}
PRECISION = {"VAE": 0.35, "IWAE": 0.50, "WW": 0.30, "CHI": 0.45}
GAIN = {"VAE": 0.0, "IWAE": 0.0, "WW": 0.0, "CHI": 0.02, "MIS": 0.03}
GAIN |= {"3 VAE": 0.01, "3 IWAE": 0.01, "3 WW": 0.01, "3 CHI": 0.022}
"""By proposal: CHI is the best single one and MIS better still, also than three networks of one objective."""


# ----------------------------------------------------------------------------- made-up results


def model_row(model: str, seed: int, precision: float, accuracy: float = 0.96, **keys: Any) -> dict[str, Any]:
    wobble = noise(seed, model)
    return {
        "model": model, "seed": seed, "n_classes": 9, "free": 0, "shifts": False, "relaxed": True, "n_draws": 256,
        "iwelbo": IWELBO.get(model, -101.0) + wobble, "iwelbo_refined_held_out": IWELBO.get(model, -101.0) + 2 * wobble,
        "khat": 1.3 + wobble, "khat_share_ok": 0.05, "ess": 0.04, "accuracy_same": 0.7 + wobble,
        "auprc": precision + wobble, "auprc_entropy": precision + 0.01 + wobble, "auroc": 0.9, "auroc_entropy": 0.9,
        "accuracy": accuracy + wobble, "accuracy_is": 0.6 + wobble, "auprc_is": 0.2, "auprc_entropy_is": 0.2, **keys,
    }  # fmt: skip


def pair_row(model: str, proposal: str, seed: int) -> dict[str, Any]:
    precision = PRECISION[model] + GAIN[proposal] + noise(seed, model, proposal)
    return {
        "model": model, "proposal": proposal, "seed": seed, "n_draws": 256,
        "networks": 3 if proposal == "MIS" or proposal.startswith("3 ") else 1, "auprc": precision,
        "accuracy": 0.96 + noise(seed, model, proposal) / 10,
        "auprc_entropy": precision + 0.01,
        "auprc_is": precision / 2, "accuracy_is": 0.955, "khat": 1.2, "khat_share_ok": 0.06, "ess": 0.05,
    }  # fmt: skip


def network_row(seed: int, shifts: bool, score: str, precision: float) -> dict[str, Any]:
    return {
        "model": "CNN", "proposal": None, "shifts": shifts, "seed": seed, "score": score,
        "auprc": precision + WOBBLE[seed] / 2, "auroc": 0.9, "accuracy": 0.96 + 0.005 * shifts,
    }  # fmt: skip


STAGES = {
    "encoder": (0.05, 0.95, 0.30),
    "MIS": (0.08, 0.95, 0.29),
    "REFINED": (0.7, 0.945, 0.25),
    "IMPROVED": (0.99, 0.94, 0.2),
}
"""Share of digits below the k-hat threshold, accuracy and average precision with weights."""


def refined_row(stage: str, seed: int, model: str = "IWAE") -> dict[str, Any]:
    share, accuracy, precision = STAGES[stage]
    return {
        "model": model, "seed": seed, "stage": stage, "n_images": 1000, "n_draws": 256, "khat": 0.3, "ess": 0.4,
        "khat_share_ok": share + noise(seed, stage), "accuracy_is": accuracy + noise(seed, stage),
        "auprc_is": precision,
        "auprc_entropy_is": precision, "accuracy": 0.96, "auprc": 0.4 + WOBBLE[seed], "gold_distance": 0.003,
        "gold_images": 100, "seconds": 9.0,
    }  # fmt: skip


def agreement_row(seed: int, inference: str = "certified", verdict: str = "disagrees") -> dict[str, Any]:
    return {
        "model": "IWAE", "seed": seed, "certified_share": 0.98, "n_held_out": 500, "accuracy": 0.94,
        "confidence": 0.98, "gap": 0.04, "gap_se": 0.006, "log_score": -0.2, "log_score_plugin": -0.15, "ece": 0.04,
        "inference": inference, "model_verdict": verdict,
    }  # fmt: skip


def decision_row(model: str, seed: int, estimator: str, rule: str) -> dict[str, Any]:
    return {
        "model": model, "seed": seed, "estimator": estimator, "score": "entropy", "rule": rule, "threshold": 0.3,
        "rejected_known": 0.05, "rejected_unseen": 0.4, "accuracy_accepted": 0.985, "coverage": 0.9,
    }  # fmt: skip


def pictures() -> dict[str, Any]:
    image = "0" * 380 + "8f" * 12 + "0" * 380
    line = [i / 999 for i in range(1000)]
    return {
        "digits": [
            {"kind": kind, "label": 9, "predicted": 4, "score": 0.61, "pixels": image}
            for kind in ("rejected", "wrongly rejected", "wrongly accepted") for _ in range(30)
        ],
        "curves": [
            {"kind": kind, "name": name, "x": line, "y": line}
            for kind in ("risk-coverage", "precision-recall") for name in ("IWAE plugin", "CNN")
        ],
        "latent": [{"x": float(i % 7), "y": float(i % 5), "label": i % 10} for i in range(40)],
    }  # fmt: skip


def results(seeds: range = SEEDS, preset: str = "paper") -> dict[str, Any]:
    """A run in which every claim of the paper holds, with an estimator as poor as the paper's."""
    models = [model_row(m, s, precision) for m, precision in PRECISION.items() for s in seeds]
    free = {"free": 1, "n_classes": 10, "auprc_free": 0.96, "auroc_free": 0.99}
    models += [model_row("IWAE", s, 0.4, **free) for s in seeds]
    cross = [pair_row(m, q, s) for m in MODELS for q in GAIN for s in seeds]
    cross += [
        network_row(s, shifts, score, precision)
        for shifts, score, precision in ((False, "max logit", 0.48), (True, "max logit", 0.46)) for s in seeds
    ]  # fmt: skip
    return {
        "experiment": "mnist", "preset": preset, "settings": {}, "seeds": list(seeds), "seconds": {},
        "models": models, "cross": cross, "refined": [refined_row(stage, s) for stage in STAGES for s in seeds],
        "agreement": [agreement_row(s) for s in seeds],
        "decisions": [
            decision_row(m, s, how, rule)
            for m, how in (("IWAE", "plugin"), ("IWAE", "corrected"), ("VAE", "plugin"), ("CNN", "CNN"))
            for rule in ("conformal 5 %", "cost 0.1") for s in seeds
        ],
        "stages": [
            {"stage": "training", "seconds": 400.0, "what": "20 models", "device": "NVIDIA H200"},
            {"stage": "proposals", "seconds": 200.0, "what": "80 encoders", "device": "NVIDIA H200"},
        ],
        **pictures(),
    }  # fmt: skip


def verdicts(claims: list[Claim]) -> list[ClaimVerdict]:
    return [judgement.verdict for judgement in judged(claims)[0]]


def of_paper(content: dict[str, Any]) -> list[ClaimVerdict]:
    return verdicts(paper_claims(content["models"], content["cross"], PRINTED))


# ----------------------------------------------------------------------------- rows


def test_published_numbers_are_those_of_the_paper():
    assert (PRINTED["iwelbo"], PRINTED["auprc"]) == (
        {"VAE": -104.74, "IWAE": -101.92, "WW": -102.82, "CHI": -105.29},
        {"VAE": 0.35, "IWAE": 0.45, "WW": 0.29, "CHI": 0.44},
    )
    assert (RELEASED["auprc"]["IWAE"], RELEASED["accuracy"]["VAE"], RELEASED["gpu_hours"]) == (0.551, 0.946, 10)


def test_variants_are_named_and_that_of_the_paper_comes_first():
    row = {"model": "IWAE", "free": 1, "shifts": True, "relaxed": False}
    assert title(row) == "IWAE (free class, shifts, exact sum)"
    assert title({"model": "IWAE", "relaxed": True}) == title({"model": "IWAE"}) == "IWAE"
    rows = [row, {"model": "IWAE", "shifts": True}, {"model": "VAE", "relaxed": False}, {"model": "WW"}]
    assert paper_variant(rows) == [rows[3]]
    assert paper_variant(rows[:2]) == [rows[1]]
    assert paper_variant([]) == []
    sizes = [{"model": "WW", "sizes": name} for name in ("printed", "ours", "released")]
    assert [title(row) for row in sizes] == ["WW (as printed)", "WW (our sizes)", "WW (as released)"]
    assert paper_variant(sizes) == [sizes[1]]
    assert paper_variant([sizes[0], sizes[2]]) == [sizes[2]]


def test_best_model_is_by_mean_iwelbo_in_the_papers_variant():
    content = results()
    assert best_model(content["models"]) == "IWAE"
    for row in where(content["models"], free=1):
        row["model"], row["iwelbo"] = "VAE", 0.0  # another variant does not compete
    assert best_model(content["models"]) == "IWAE"
    assert best_model([]) is None


def test_methods_have_every_score_and_baselines_their_own():
    content = results()
    assert {str(m) for m in methods(content["models"])} >= {"IWAE by entropy", "IWAE (free class) by free class"}
    assert [str(m) for m in baselines(content["cross"])] == [
        "CNN by max logit",
        "CNN (shifts) by max logit",
    ]


# ----------------------------------------------------------------------------- claims


def test_claims_that_hold_are_found_to_hold():
    assert of_paper(results()) == [HOLDS] * 12


FLIPS = {
    "WW below the VAE": ("models", {"model": "WW"}, {"iwelbo": -104.5}, {0}),
    "CHI rejects better": ("models", {"model": "CHI"}, {"auprc": 0.6}, {1}),
    "k-hat of one model below the threshold": ("models", {"model": "CHI"}, {"khat": 0.5}, {2}),
    "weights in log space": ("models", {}, {"accuracy_is": 0.955}, {3}),
    "not accurate without weights": ("models", {}, {"accuracy": 0.9}, {3}),
    "CHI's proposal worse": ("cross", {"proposal": "CHI"}, {"auprc": 0.25}, {4}),
    "MIS no better": ("cross", {"proposal": "MIS"}, {"auprc": 0.28}, {5, 6, 9, 10}),
    "MIS no better with weights": ("cross", {"proposal": "MIS"}, {"auprc_is": 0.1}, {7, 8, 11}),
    "three networks of one objective are better": ("cross", {"proposal": "3 IWAE"}, {"auprc": 0.9}, {6, 10}),
    "and with weights": ("cross", {"proposal": "3 CHI"}, {"auprc_is": 0.9}, {8}),
    "one objective alone with weights": ("cross", {"model": "WW", "proposal": "WW"}, {"auprc_is": 0.9}, {7, 11}),
    "one objective alone": ("cross", {"model": "CHI", "proposal": "CHI"}, {"auprc": 0.9}, {5, 9}),
    "another pair better still": ("cross", {"model": "WW", "proposal": "IWAE"}, {"auprc": 0.9}, {4, 5}),
}


@pytest.mark.parametrize("name", FLIPS)
def test_claims_turn_with_the_numbers(name):
    """Each planted change makes its claims fail, and no others."""
    part, rows, change, fails = FLIPS[name]
    content = results()
    for row in where(content[part], **rows):
        row |= {key: value + WOBBLE[row["seed"]] / 10 for key, value in change.items()}  # type: ignore[operator]
    assert {i for i, verdict in enumerate(of_paper(content)) if verdict is FAILS} == fails


def test_published_differences_stand_beside_ours():
    first = paper_claims(results()["models"], [], PRINTED)[0].evidence[0]
    assert first.described() == "IWELBO, IWAE minus VAE: +3.00 (se 0.00, 5 seeds, p < 0.0001; published +2.82)"


def test_the_effect_of_weights_on_accuracy_is_of_the_digits_that_have_weights():
    note = paper_claims(results()["models"], [], PRINTED)[3].note
    assert "change accuracy by \u221210.00" in note
    assert "on the same digits" in note


def test_three_steps_select_the_best_model_of_each_seed():
    content = results()
    for row in where(content["models"], model="WW", seed=3):
        row["iwelbo_refined_held_out"] = 0.0
    for row in where(content["models"], model="CHI", seed=2):
        row["iwelbo"] = 0.0  # on test digits, by which nothing is selected
    alone, several, weighted = paper_claims(content["models"], content["cross"], PRINTED)[9:]
    assert "IWAE 4 times, WW once" in alone.note
    for claim in (alone, weighted):  # fixed rivals, whichever was best
        assert [e.what.split(" minus ")[1] for e in claim.evidence] == ["VAE", "IWAE", "WW", "CHI"]
    assert [e.what.split(" minus ")[1] for e in several.evidence] == [f"3 {m} on {m}" for m in MODELS]
    # WW with MIS is 0.2 below IWAE with MIS, and half of it with weights
    assert alone.evidence[1].difference.mean == pytest.approx(0.03 - 0.2 / 5, abs=1e-3)
    assert several.evidence[1].difference.mean == pytest.approx(0.02 - 0.2 / 5, abs=1e-3)
    assert weighted.evidence[1].difference.mean == pytest.approx((0.03 - 0.2 / 5) / 2, abs=1e-3)


def test_the_mixture_is_compared_with_fixed_rivals_and_as_many_networks():
    claims = paper_claims(results()["models"], results()["cross"], PRINTED)[5:9]
    plain, weighted = "average precision, mean over models", "average precision with weights, mean over models"
    for claim, what, several in zip(claims, (plain, plain, weighted, weighted), ("", "3 ", "", "3 "), strict=True):
        assert [e.what for e in claim.evidence] == [f"{what}, MIS minus {several}{m}" for m in MODELS]
    assert "Three of one objective minus one: VAE +0.010 (se 0.000), IWAE" in claims[1].note


def test_better_inference_is_tested_on_the_same_digits():
    content = results()
    shares, decisions = refinement_claims(content["refined"])
    assert last_stage(content["refined"]) == "IMPROVED"
    assert last_stage([*content["refined"], {"stage": "ESCALATED"}]) == "ESCALATED"
    assert verdicts([shares, decisions]) == [HOLDS, FAILS]
    assert shares.evidence[0].difference.mean == pytest.approx(94)
    assert [e.difference.mean for e in decisions.evidence] == pytest.approx([-2, -0.2])
    for row in where(content["refined"], stage="IMPROVED"):
        row["accuracy_is"], row["auprc_is"] = 0.97 + WOBBLE[row["seed"]], 0.5
    assert verdicts(refinement_claims(content["refined"]))[1] is HOLDS
    assert refinement_claims([]) == []


@pytest.mark.parametrize(
    ("accuracy", "precision", "n", "effect"),
    [
        (
            0.97,
            0.5,
            5,
            "better decisions: holds. With weights minus without, on the same digits: accuracy +1.00 points",
        ),
        (0.94, 0.3, 5, "better decisions: does not hold."),
        (0.96, 0.4, 5, "better decisions: not resolved."),
        (0.97, 0.5, 2, "better decisions: too few seeds to say."),
        (None, 0.5, 5, "on the same digits: average precision +0.100 (se 0.001)."),
        (None, None, 5, ""),
    ],
)
def test_the_summary_says_whether_better_inference_helped(accuracy, precision, n, effect):
    def row(seed: int, stage: str) -> dict[str, Any]:
        wobble = WOBBLE[seed]
        new = {"accuracy_is": accuracy and accuracy + wobble, "auprc_is": precision and precision + wobble}
        return {"model": "IWAE", "stage": stage, "seed": seed, "accuracy": 0.96, "auprc": 0.4, **new}

    rows = [row(seed, stage) for seed in range(n) for stage in ("encoder", "IMPROVED")]
    sentence = effect_on_decisions(judged(refinement_claims(rows))[0], rows)
    assert effect in sentence
    assert bool(sentence) == bool(effect)


def test_rejection_is_compared_at_equal_accuracy():
    content = results()
    assert verdicts(rejection_claims(content["models"], content["cross"])) == [HOLDS] * 3
    for row in (*where(content["models"], free=0), *where(content["cross"], proposal="MIS")):
        row["accuracy"] -= 0.02 - WOBBLE[row["seed"]] / 10  # as precise, but less accurate
    assert verdicts(rejection_claims(content["models"], content["cross"])) == [HOLDS, FAILS, HOLDS]
    for row in where(content["cross"], model="CNN"):
        row["auprc"] = 0.99 + WOBBLE[row["seed"]] / 2
    assert verdicts(rejection_claims(content["models"], content["cross"]))[2] is FAILS
    assert verdicts(rejection_claims(content["models"], []))[0] is HOLDS
    assert rejection_claims([], where(content["cross"], model="CNN")) == []


def test_rivals_in_rejection_are_fixed_whichever_is_best():
    """One network against one, several against as many, with the same shifts; the supervised ones by max logit."""
    content = results()
    rows = [
        network_row(s, False, score, 0.3) | {"model": "3 CNNs"} for score in ("1 - max", "max logit") for s in SEEDS
    ]
    better = [model_row("VAE", s, 0.9) for s in SEEDS]
    claims = rejection_claims([*content["models"], *better], [*content["cross"], *rows])
    minus = "\N{MINUS SIGN}"
    assert [e.what for e in claims[1].evidence[::2]] == [
        f"average precision, IWAE by 1 {minus} max minus CNN by max logit",
        f"average precision, IWAE, proposals averaged by 1 {minus} max minus 3 CNNs by max logit",
    ]


def test_a_free_class_is_compared_with_nine_classes_that_differ_in_nothing_else():
    same = {"shifts": True, "relaxed": False}
    free = {"free": 1, "n_classes": 10, "auprc_free": 0.96, "auroc_free": 0.99, **same}
    models = [
        model_row(*row, **more)
        for s in SEEDS
        for row, more in (
            (("WW", s, 0.5), {**same, "sizes": "printed"}),
            (("WW", s, 0.4), {**free, "sizes": "printed"}),
            (("WW", s, 0.4), {**free, "sizes": "ours"}),
            (("IWAE", s, 0.6), {"shifts": True, "sizes": "printed"}),
        )
    ]
    claim = rejection_claims(models, [])[0]
    (evidence,) = claim.evidence
    assert evidence.what.count("as printed") == 2
    assert "IWAE" not in evidence.what
    larger = [row for row in models if not (row["free"] and row["sizes"] == "printed")]
    assert all("A free class" not in claim.text for claim in rejection_claims(larger, []))  # nothing to compare with


def test_models_selected_by_seeds_are_shown_together():
    rows = [refined_row(stage, seed, model) for stage in STAGES for seed, model in enumerate(("WW", "CHI", "WW"))]
    assert {name: len(part) for name, part in by_selection(rows).items()} == {"the selected model": 12}
    assert verdicts(refinement_claims(rows)) == [HOLDS, FAILS]
    both = [refined_row("encoder", seed, model) for seed in SEEDS for model in ("WW", "CHI")]
    assert list(by_selection(both)) == ["WW", "CHI"]


def test_aims_are_met_or_missed():
    content = results()
    rows = content["models"], content["cross"], content["refined"]
    assert verdicts(targets("paper", *rows, 600.0, PRINTED)) == [NOT_RUN, HOLDS, FAILS, HOLDS, HOLDS]
    assert verdicts(targets("paper", *rows, 1200.0, PRINTED))[4] is FAILS
    for row in content["models"]:
        row["iwelbo_100"] = PRINTED["iwelbo"][row["model"]] + 0.1 + WOBBLE[row["seed"]]
    assert verdicts(targets("paper", *rows, 600.0, PRINTED))[0] is HOLDS
    for row in where(content["models"], model="IWAE"):
        row["iwelbo_100"] -= 1.0
    assert verdicts(targets("paper", *rows, 600.0, PRINTED))[0] is FAILS
    assert targets("quick", *rows, 1.0, PRINTED) == []


def test_bounds_by_sizes_are_judged_for_each_of_them():
    ahead = {"released": 0.5, "printed": -0.5}
    models = [
        model_row(name, s, 0.5, sizes=sizes, iwelbo_100=PRINTED["iwelbo"][name] + shift + WOBBLE[s])
        for sizes, shift in ahead.items()
        for name in MODELS
        for s in SEEDS
    ]
    assert verdicts(targets("sizes", models, [], [], None, PRINTED)) == [HOLDS, FAILS]
    content = {"experiment": "mnist", "preset": "sizes", "seeds": list(SEEDS), "models": models}
    made = mnist.document(content, None)
    names = [block.name for section in made.sections for block in section.blocks if isinstance(block, Table)]
    assert names[:4] == ["iwelbo", "models-released", "models-printed", "weights-released"]
    headings = [section.heading for section in made.sections]
    assert headings[:3] == ["Claims of the paper", "Targets", "The paper's table"]


def test_claims_on_own_proposals_are_judged_for_each_size():
    """IWAE rejects best and every k-hat is above 1 with one size, and the other way round with the other."""
    models = [
        model_row(name, s, sign * (name == "IWAE") + WOBBLE[s], sizes=sizes, khat=1 + 0.5 * sign + WOBBLE[s])
        for sizes, sign in (("printed", +1), ("released", -1))
        for name in MODELS
        for s in SEEDS
    ]
    half = [row | {"labelled_bound": 1.0, "auprc": -9.0, "khat": -9.0} for row in models if row["sizes"] == "printed"]
    words = {claim.text: claim.verdict for claim in judged(paper_claims_by_sizes(models + half, PRINTED))[0]}
    assert {text.split("(")[1] for text in words} == {"as printed).", "as released)."}
    ours = [model_row(name, s, 0.5, sizes="ours") for name in MODELS for s in SEEDS]
    assert all(claim.text.endswith(" (our sizes).") for claim in paper_claims(ours, [], PRINTED))
    best, khat = "IWAE rejects the nines best, each model with its own proposal", "k-hat is above 1 for every model"
    assert words[f"{best} (as printed)."] is HOLDS
    assert words[f"{best} (as released)."] is FAILS
    assert words[f"{khat} with its own proposal (as printed)."] is HOLDS
    assert words[f"{khat} with its own proposal (as released)."] is FAILS


@pytest.mark.parametrize(("loss", "expected"), [(3.0, HOLDS), (-3.0, FAILS)])
def test_the_weight_of_labelled_images_is_judged_alone(loss, expected):
    """The models that differ in it have a claim and a row of their own, and enter no other claim or table."""
    once = [model_row("IWAE", s, 0.5, sizes="printed", iwelbo_100=-104.0 + WOBBLE[s]) for s in SEEDS]
    half = [
        row | {"labelled_bound": 1.0, "iwelbo_100": row["iwelbo_100"] - loss + 3 * WOBBLE[row["seed"]]} for row in once
    ]
    claims = targets("sizes", once + half, [], [], None, PRINTED)
    assert claims[-1].text.startswith("Weighing labelled images by their share")
    assert verdicts(claims)[-1] is expected
    content = {"experiment": "mnist", "preset": "sizes", "seeds": list(SEEDS)}
    tables, without = (
        {
            block.name: block
            for section in mnist.document({**content, "models": models}, None).sections
            for block in section.blocks
            if isinstance(block, Table)
        }
        for models in (once + half, once)
    )
    bounds = {
        (r["networks"], r["draws"]): r["IWAE"].value for r in tables["iwelbo"].rows if r["networks"].startswith("as")
    }
    mean = sum(row["iwelbo_100"] for row in once) / len(once)
    halved = sum(row["iwelbo_100"] for row in half) / len(half)
    assert bounds["as printed", 100] == pytest.approx(mean)
    assert bounds["as printed, labelled images half of the objective", 100] == pytest.approx(halved)
    weights = {r["labelled"]: r["iwelbo_100"].value for r in tables["labelled"].rows}
    assert weights == pytest.approx({"by their share": mean, "half of the objective": halved})
    about = ("iwelbo", "labelled")
    others, expected = ({n: t for n, t in made.items() if n not in about} for made in (tables, without))
    assert others == expected
    assert "labelled" not in without


def test_aims_of_the_best_preset_are_of_fixed_methods():
    free = {"free": 1, "n_classes": 10, "auroc_free": 0.99}
    cross = [
        pair_row("IWAE", "MIS", s) | {"accuracy": 0.975 + WOBBLE[s], "auprc_entropy": 0.64 + WOBBLE[s]} for s in SEEDS
    ]
    cross += [pair_row("WW", "MIS", s) | free | {"sizes": "printed", "auprc_free": 0.94 + WOBBLE[s]} for s in SEEDS]
    assert verdicts(targets("best", [], cross, [], None, PRINTED))[:3] == [HOLDS, HOLDS, FAILS]
    larger = [pair_row("WW", "MIS", s) | free | {"sizes": "ours", "auprc_free": 0.96 + WOBBLE[s]} for s in SEEDS]
    assert verdicts(targets("best", [], [*cross, *larger], [], None, PRINTED))[:3] == [HOLDS, HOLDS, HOLDS]


def test_few_seeds_decide_nothing():
    content = results(range(2))
    assert set(of_paper(content)) == {TOO_FEW}
    assert set(verdicts(refinement_claims(content["refined"]))) == {TOO_FEW}
    assert set(of_paper({"models": [], "cross": []})) == {NOT_RUN}


@pytest.mark.parametrize("n", [1, 2])
def test_a_page_of_few_seeds_never_says_that_something_is_not_resolved(tmp_path, n):
    for preset in ("paper", "best"):
        shown = text(load(run_in(tmp_path / preset, results(range(n), preset)))).lower()
        assert "not resolved" not in shown
        assert "too few seeds to say" in shown


# ----------------------------------------------------------------------------- tables


def test_the_papers_table_has_both_sources_beside_ours():
    table = models_table(results()["models"], PRINTED, RELEASED)
    vae, iwae, _, chi = table.rows
    assert [row["model"] for row in table.rows] == list(MODELS)
    assert (vae["iwelbo"].value, vae["iwelbo_paper"], vae["iwelbo_released"]) == (
        pytest.approx(-104.0),
        -104.74,
        -104.4,
    )
    assert (iwae["auprc"].best, iwae["auprc_released"], chi["iwelbo_released"]) == (True, 0.551, None)
    assert iwae["auprc"].value == pytest.approx(0.5)  # the free class is another variant
    assert models_table([], PRINTED, RELEASED) is None


def test_bounds_stand_beside_the_papers_by_sizes_draws_and_digits():
    rows = [
        model_row("IWAE", s, 0.5, sizes=sizes, iwelbo_100=-101.5, iwelbo_100_known=-103.0, iwelbo_known=-102.0)
        for sizes in ("ours", "printed")
        for s in SEEDS
    ]
    old = [model_row("IWAE", s, 0.5) for s in SEEDS]
    table = iwelbo_table([*rows, *old], PRINTED, RELEASED)
    shown = [(r["networks"], r["digits"], r["draws"], r.get("IWAE")) for r in table.rows]
    assert shown[:2] == [("the paper", "all", 100, -101.92), ("released code, run unchanged", "all", 100, -101.0)]
    kinds = [("all", 100), ("0 to 8", 100), ("all", 256), ("0 to 8", 256)]
    assert [row[:3] for row in shown[2:]] == [
        *(("as printed", *kind) for kind in kinds),
        *(("our sizes", *kind) for kind in kinds),
        ("as printed, an older run", "all", 256),
    ]
    assert [row[3].value for row in shown[2:6]] == pytest.approx([-101.5, -103.0, -101.0, -102.0])
    assert table.rows[2]["VAE"] is None
    assert iwelbo_table([], PRINTED, RELEASED) is None


def test_cross_tables_mark_the_highest():
    tables = [
        block
        for section in mnist.document(results(), None).sections
        for block in section.blocks
        if isinstance(block, Table) and block.name.startswith("cross")
    ]
    assert [table.name for table in tables] == ["cross-auprc", "cross-auprc_is", "cross-accuracy", "cross-accuracy_is"]
    assert not any(table.detail for table in tables)
    assert [column.key for column in tables[0].columns] == ["model", *GAIN, "n_draws"]
    assert {row["n_draws"] for row in tables[0].rows} == {256}
    for row in tables[0].rows:
        assert [key for key, value in row.items() if is_best(value)] == ["MIS"]
    assert "256 draws" in tables[0].caption


def test_stages_are_sorted_whatever_the_order_of_rows():
    rows = results()["refined"][::-1]
    table = refinement_table(rows)
    assert [row["stage"] for row in table.rows] == list(STAGES)
    assert "mean of 100 digits" in table.note
    assert "1000 digits" in better_table(rows).caption


def test_agreement_counts_seeds_that_differ():
    rows = [agreement_row(s, "certified" if s else "not certified") for s in SEEDS]
    (row,) = agreement_table(rows).rows
    assert (row["inference"], row["model_verdict"]) == ("certified (4 of 5 seeds)", "disagrees")
    assert "IWAE +4.00 ± 0.00 points (se 0.60 over digits)" in agreement_table(rows).note


def test_methods_are_most_precise_first():
    content = results()
    table = methods_table(content["models"], content["cross"])
    assert table.rows[0]["name"] == "IWAE (free class)"
    assert table.rows[0]["auroc"].value == 0.99
    values = [row["auprc"].value for row in table.rows]
    assert values == sorted(values, reverse=True)
    assert {row["kind"] for row in table.rows} == {"nine", "nine and a free one", "nine, supervised network"}


def test_decisions_are_grouped_by_rule():
    table = decisions_table(results()["decisions"], "d", "Rules")
    rules = [row["rule"] for row in table.rows]
    assert rules == ["conformal 5 %"] * 4 + ["cost 0.1"] * 4


def test_stages_are_summed_and_compared_with_the_released_code():
    table = stages_table(results()["stages"], RELEASED)
    assert [(row["stage"], row["seconds"].value) for row in table.rows] == [
        ("training", 400.0), ("proposals", 200.0), ("all", 600.0), ("released code", 36000.0),
    ]  # fmt: skip


# ----------------------------------------------------------------------------- pictures


def test_pixels_are_hexadecimal_and_square():
    image = pixels("0" * 28 + "f" * 28 + "0" * 728)
    assert image.shape == (28, 28)
    assert image[1].tolist() == [15] * 28
    canvas = mosaic([image] * 7)
    assert canvas.shape == (2 * 44, 6 * 32)
    assert int((canvas == 15).sum()) == 7 * 28
    assert canvas.count() == 7 * 30**2  # the rest is masked
    for bad in ("f" * 783, "g" * 784, 7):
        with pytest.raises(DataError, match="784 hexadecimal"):
            pixels(bad)  # type: ignore[arg-type]


def test_digits_as_text():
    assert digit_text({"label": 9, "predicted": 4, "score": 0.614}) == "9 as 4, score 0.61"
    assert digit_text({"label": 9}) == "9"


def test_thinning_keeps_the_ends():
    assert thinned(range(1000), 10)[::9] == [0, 999]
    assert thinned([1, 2, 3], 10) == [1, 2, 3]


# ----------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A rendered run, shared by the tests that only read it."""
    folder = run_in(tmp_path_factory.mktemp("mnist"), results())
    render(folder)
    return folder


def test_page_starts_with_the_summary(run):
    source = (run / "report.html").read_text(encoding="utf-8")
    summary = source.split('class="summary"')[1].split("</section>")[0]
    for sentence in (
        "Of 12 claims of the paper, tested with equal draws and corrected losses, 12 hold (5 seeds).",
        "the best generative model is that of IWAE (\N{MINUS SIGN}101.00), 1.00 nats (se 0.00) ahead of WW.",
        "rejects the nines best is IWAE with MIS: average precision 0.530, 0.265 with weights, 0.008 (se 0.000) ahead",
        "k-hat of digits is below the threshold for 5.0% by encoder and for 99.0% by IMPROVED; p(c|x) then differs",
        "Better inference gives better decisions: does not hold.",
        "the inference is certified, and the model disagrees with held-out labels (expected accuracy 98.0%, actual",
        "among methods and scores picked on these digits: 0.540 at",
        "0.540 at 96.0% accuracy with nine classes; 0.960 at 96.0% accuracy with a free class; 0.480 at 96.0%",
    ):
        assert sentence in summary.replace("&#x27;", "'")
    assert "All stages took 10.0 minutes" in source
    assert "60 times as long" in source


def test_page_has_every_picture_and_loads_nothing(run):
    source = (run / "report.html").read_text(encoding="utf-8")
    stems = {
        "cross-auprc",
        "cross-auprc-is",
        "cross-accuracy",
        "cross-accuracy-is",
        "risk-coverage",
        "precision-recall",
    }
    stems |= {"digits-rejected", "digits-wrongly-rejected", "digits-wrongly-accepted", "latent"}
    assert {path.stem for path in (run / "figures").iterdir()} == stems
    assert source.count('role="img"') == len(stems)
    addresses = re.findall(r'(?:xlink:)?href="([^"]*)"', source)
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in addresses)
    assert sum(address.startswith("data:") for address in addresses) == 3  # one image for each kind
    assert "24 of 30." in source
    assert "http:" not in source.replace("http-equiv", "")
    ids = re.findall(r'\bid="([^"]+)"', source)
    assert len(ids) == len(set(ids))


def test_best_preset_shows_its_targets_instead_of_the_papers_claims(tmp_path):
    shown = text(load(run_in(tmp_path, results(preset="best"))))
    assert "claims of the paper" not in shown
    assert "Of 6 targets of this run, 3 hold, 2 do not hold and 1 was not run (5 seeds)." in shown
    assert "FAILS" not in shown.split("Of 6")[0]
    assert "DOES NOT HOLD: Accuracy of at least 97.2% with nine classes." in shown


@pytest.mark.parametrize(
    ("inference", "verdict", "advice"),
    [
        ("certified", "disagrees", "the error is that of the model"),
        ("certified", "agrees", "use the probabilities as they are"),
        ("not certified", "agrees", "there is no evidence against the model"),
        ("not certified", "disagrees", "an error of inference can look like an error of the model"),
    ],
)
def test_errors_of_the_sampler_and_of_the_model_get_their_own_advice(tmp_path, inference, verdict, advice):
    content = results() | {"agreement": [agreement_row(s, inference, verdict) for s in SEEDS]}
    shown = text(load(run_in(tmp_path, content)))
    assert f"the inference is {inference}, and the model {verdict} with held-out labels" in shown
    assert advice in shown


@pytest.mark.parametrize("seeds", [range(1), SEEDS])
@pytest.mark.parametrize("name", [None, *(key for key, value in results().items() if isinstance(value, (list, dict)))])
def test_a_run_without_some_stages_still_has_a_page(tmp_path, name, seeds):
    content = results(seeds, "quick")
    for key in content if name is None else (name,):
        if key not in ("experiment", "preset"):
            content[key] = None
    assert "This is the quick preset" in text(load(run_in(tmp_path, content)))


def test_missing_numbers_are_shown_as_missing(tmp_path):
    content = results(range(2))
    needed = {"model", "seed", "proposal", "rule", "kind", "stage", "name", "x", "y", "label"}
    for rows in content.values():
        for row in rows if isinstance(rows, list) and rows and isinstance(rows[0], dict) else ():
            for key in [key for key in row if key not in needed]:
                row[key] = None
    render(run_in(tmp_path / "all", content))
    for rows in content.values():
        for row in rows if isinstance(rows, list) and rows and isinstance(rows[0], dict) else ():
            for key in [key for key in row if key not in needed]:
                del row[key]
    render(run_in(tmp_path / "gone", content))
    partly = results(range(2))
    partly["models"][0]["auprc"] = None
    assert "(1 missing)" in markdown(load(run_in(tmp_path / "partly", partly)))


def test_names_of_any_kind_are_printed_literally(tmp_path):
    source = json.dumps(results(range(1)))
    for name in ("IWAE", "CNN", "IMPROVED", "conformal 5 %", "certified", "entropy", "NVIDIA H200", "IWAE plugin"):
        source = source.replace(json.dumps(name), json.dumps(f"{name} {NASTY}"))
    content = json.loads(source)
    content["digits"][0] |= {"label": NASTY, "predicted": NASTY}
    content["latent"][0]["label"] = NASTY
    content["curves"][0]["kind"] = NASTY
    content["preset"] = NASTY
    folder = run_in(tmp_path, content)
    page = render(folder).read_text(encoding="utf-8")
    assert page.count("<script>") == 1
    assert "名前" in page
    document = load(folder)
    assert "\x07" not in page + text(document) + markdown(document)
    assert "<script" not in markdown(document)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("digits", {"kind": "rejected", "pixels": "abc"}, "784 hexadecimal"),
        ("curves", {"kind": "risk-coverage", "name": "a", "x": [1.0], "y": []}, "lacks something"),
        ("latent", {"x": 1.0, "y": 2.0}, "lacks label"),
        ("models", {"model": "IWAE"}, "lacks seed"),
    ],
)
def test_records_that_cannot_be_used_are_the_files_fault(tmp_path, name, row, message):
    with pytest.raises(DataError, match=message):
        render(run_in(tmp_path, {"experiment": "mnist", name: [row]}))


def test_results_are_not_changed_by_reporting():
    content = results(range(2))
    before = copy.deepcopy(content)
    mnist.document(content, None)
    assert content == before
