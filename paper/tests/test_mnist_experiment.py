"""The MNIST experiment at toy size, on images that are no digits: every stage runs and is measured correctly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from page_checks import run_in
from vaerdict.core import DataError
from vaerdict.inference import class_probabilities
from vaerdict.models.m1m2 import M1M2, recognition
from vaerdict.noise import seeded
from vaerdict.objectives import loss
from vaerdict.report import load, text
from vaerdict_paper.experiments import mnist as experiment
from vaerdict_paper.experiments import mnist_measure as measure
from vaerdict_paper.experiments.mnist_lab import Lab, fresh_member, started, training_settings
from vaerdict_paper.experiments.mnist_settings import (
    AS_PRINTED,
    AS_RELEASED,
    FOUR,
    HALF_LABELLED,
    OURS,
    PRESETS,
    RELEASED_SIZES,
    Preset,
    Variant,
)
from vaerdict_paper.mnist_data import Mnist, mnist

TINY = Preset(
    (replace(AS_PRINTED, epochs=1, proposals=FOUR, networks=2, n_closer=None),),
    seeds=2,
    n_particles=2,
    batch_size=32,
    n_labels=27,
    n_held_out=12,
    n_train=64,
    n_test=60,
    n_corrected=30,
    n_scored=1,
    n_refined=2,
    n_gold=0,
    n_draws=120,
    n_escalated=240,
    proposal_epochs=1,
    baseline_epochs=2,
)


@pytest.fixture(scope="module")
def blobs() -> Iterator[Mnist]:
    """Ten kinds of image, a bright spot each, in the place of the ten digits."""
    generator = seeded(0)
    y = torch.arange(400) % 10
    x = 0.2 * torch.rand(400, 28, 28, generator=generator)
    for i, kind in enumerate(y.tolist()):
        x[i, 4 * (kind % 5) + 2 : 4 * (kind % 5) + 8, 12 * (kind // 5) + 2 : 12 * (kind // 5) + 10] = 1.0
    data = Mnist(x[:300].flatten(1), y[:300], x[300:].flatten(1), y[300:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "mnist", lambda: data)
        patch.setattr(class_probabilities, "STAGES", ((loss("elbo", "stl"), 40), (loss("iwelbo", "dreg"), 10)))
        yield data


@pytest.fixture(scope="module")
def result(blobs):
    return experiment.work(task(TINY, "printed", seed=1))


def task(preset: Preset, stage: str, seed: int = 0):
    first = next(t for t in experiment.tasks(preset) if t["stage"] == stage and t.get("seed", seed) == seed)
    return json.loads(json.dumps(first))  # as a worker receives it


def test_tasks_are_a_variant_and_a_seed_each():
    stages = [(t["stage"], t.get("seed")) for t in experiment.tasks(replace(TINY, variants=(AS_PRINTED, OURS)))]
    assert stages == [("printed", 0), ("ours", 0), ("printed", 1), ("ours", 1), ("baselines", None)]
    few = replace(TINY, variants=(AS_RELEASED, OURS), seeds=5)
    assert [t["seed"] for t in experiment.tasks(few) if t["stage"] == "released"] == [0, 1, 2]
    bounds = {t["stage"] for t in experiment.tasks(PRESETS["sizes"])}
    assert bounds == {"released", "printed", "printed, half labelled"}  # no proposals to compare, so no baselines
    received = json.loads(json.dumps(experiment.tasks(replace(TINY, variants=(AS_RELEASED,)))[0]))
    assert Variant.of(received["variant"]) == AS_RELEASED


def test_a_variant_gives_every_kind_of_row(result):
    assert {(r["model"], r["seed"]) for r in result["models"]} == {(m, 1) for m in ("VAE", "IWAE", "WW", "CHI")}
    pairs = [(r["model"], r["proposal"]) for r in result["cross"]]
    assert len(pairs) == len(set(pairs)) == 4 * 9
    assert {q for _, q in pairs} == {*(f"{n}{q}" for q in ("VAE", "IWAE", "WW", "CHI") for n in ("", "2 ")), "MIS"}
    assert [r["stage"] for r in result["refined"]] == ["encoder", "MIS", "REFINED", "IMPROVED", "ESCALATED"]
    assert {r["inference"] for r in result["agreement"]} <= {"certified", "not certified"}
    assert {r["rule"] for r in result["decisions"]} == {"conformal 5 %"}
    stages = [s["stage"] for s in result["stages"]]
    assert stages[:3] == ["training", "proposals", "evaluation"]
    json.dumps(result)


def test_every_row_has_the_same_draws_whatever_the_number_of_its_networks(result):
    assert {r["n_draws"] for r in (*result["models"], *result["cross"])} == {120}
    assert {r["draws_mean"] for r in (*result["models"], *result["cross"])} == {120}
    networks = {r["proposal"]: r["networks"] for r in result["cross"]}
    assert (networks["IWAE"], networks["2 IWAE"], networks["MIS"]) == (1, 2, 3)


def test_an_ensemble_has_networks_of_one_objective_that_differ(result):
    rows = {r["proposal"]: r for r in result["cross"] if r["model"] == "IWAE"}
    assert rows["2 IWAE"]["auprc"] != rows["IWAE"]["auprc"]
    assert rows["2 IWAE"]["iwelbo"] != rows["IWAE"]["iwelbo"]


def test_bounds_are_of_all_and_of_known_digits_with_two_numbers_of_draws(result):
    for row in result["models"]:
        assert row["iwelbo"] > row["iwelbo_100"] - 0.5  # more draws: a tighter bound, up to noise of 30 digits
        assert abs(row["iwelbo_known"] - row["iwelbo"]) > 1e-6


def test_answers_that_refinement_leaves_unreliable_get_more_draws(result):
    by_stage = {r["stage"]: r for r in result["refined"]}
    assert by_stage["IMPROVED"]["draws_mean"] == 120
    assert 120 <= by_stage["ESCALATED"]["draws_mean"] <= 240
    assert by_stage["ESCALATED"]["khat_share_ok"] >= by_stage["IMPROVED"]["khat_share_ok"]


def test_the_page_shows_what_was_measured(result, tmp_path):
    """Every claim finds its rows: of one seed there is too little to say, but nothing is missing."""
    content = {"experiment": "mnist", "preset": "paper", "seeds": [1], **result}
    shown = text(load(run_in(tmp_path, content)))
    assert "TOO FEW SEEDS TO SAY: Without weights MIS decides better" in shown
    assert "NOT RUN" not in shown
    assert "average precision, mean over models, MIS minus 2 IWAE" in shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for start in ("as printed all 100", "as printed 0 to 8 120"):
        assert any(line.startswith(start) for line in lines)
    assert "ESCALATED" in shown


def test_refined_weights_beat_the_encoder_of_a_hardly_trained_model(result):
    by_stage = {r["stage"]: r for r in result["refined"]}
    assert by_stage["IMPROVED"]["ess"] > by_stage["encoder"]["ess"]
    assert by_stage["IMPROVED"]["iwelbo"] > by_stage["encoder"]["iwelbo"] - 1


def test_the_sizes_of_the_released_code_can_be_trained(blobs):
    """Unpadded convolutions, no dense layer, nine units in q(c | z) and 784 in p(x | z)."""
    preset = replace(TINY, variants=(replace(AS_RELEASED, objectives=("IWAE",), epochs=1),))
    released = experiment.work(task(preset, "released"))
    assert [(r["model"], r["variant"]) for r in released["models"]] == [("IWAE", "released")]
    assert (released["cross"], released["refined"]) == ([], [])
    member = fresh_member(M1M2(784, 9, hidden=RELEASED_SIZES, generator=seeded(0)), "IWAE", 0)
    shapes = {name: tuple(p.shape) for name, p in member.recognition.named_parameters()}
    assert shapes["encoder.convolutions.2.weight"] == (128, 9 * 64)
    assert shapes["encoder.head.layers.0.weight"] == (20, 128)
    assert shapes["classifier.layers.0.weight"] == (9, 10)
    assert member.model.decoder.layers[0].get_parameter("weight").shape == (784, 10)


def test_bounds_of_labelled_images_are_weighted_by_their_share_in_all_variants_but_one(blobs):
    assert training_settings(TINY, AS_PRINTED, 1).labelled_bound is None
    assert {v.labelled_bound for v in PRESETS["paper"].variants} == {None}
    changed = {**vars(AS_PRINTED), "name": HALF_LABELLED.name, "objectives": ("IWAE",), "labelled_bound": 1.0}
    assert vars(HALF_LABELLED) == changed  # nothing else differs


def test_a_free_class_has_its_own_score(blobs):
    free = Variant("free", ("WW",), free=1, relaxed=False, shifts=1, dropout=0.0, epochs=1, n_closer=0)
    result = experiment.work(task(replace(TINY, variants=(free,), seeds=1), "free"))
    assert result["models"][0]["n_classes"] == 10
    assert 0 <= result["models"][0]["auprc_free"] <= 1
    assert {r["score"] for r in result["decisions"]} == {"free class"}
    assert result["cross"] == []


def test_supervised_classifiers_learn_the_labels_with_and_without_shifts(blobs):
    result = experiment.work(task(replace(TINY, baseline_epochs=60), "baselines"))
    rows = result["cross"]
    assert {(r["model"], r["shifts"], r["score"]) for r in rows} == {
        (model, shifts, score)
        for model in ("CNN", "3 CNNs")
        for shifts in (False, True)
        for score in ("1 - max", "max logit", "entropy")
    }
    assert all(r["accuracy"] > 0.8 for r in rows if not r["shifts"])  # the spots are easy
    assert all(r["proposal"] is None for r in rows)


def test_seeds_have_splits_of_their_own_and_held_out_images_are_no_training_images(blobs):
    lab = Lab(replace(TINY, first_split=3), blobs, [0, 1])
    a, b = lab.splits[0], lab.splits[1]
    assert torch.equal(b.x_test, Lab(replace(TINY, first_split=4), blobs, [0]).splits[0].x_test)
    assert not torch.equal(a.x_test, b.x_test)
    for split in lab.splits.values():
        assert not (split.x_held_out[:, None] == split.x_train[None]).all(-1).any()
        assert not (split.y_held_out == measure.UNSEEN).any()
        assert not (split.y_labelled == measure.UNSEEN).any()


def test_proposals_start_from_the_models_own_and_keep_their_tails():
    model = M1M2(784, 9, generator=seeded(0))
    start = recognition(model, image_shape=(28, 28), generator=seeded(1))
    member = started(fresh_member(model, "CHI", 5), start)
    assert member.recognition.df is not None
    for name, value in start.state_dict().items():
        torch.testing.assert_close(member.recognition.state_dict()[name], value)


def test_absent_data_raise_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("VAERDICT_DATA", str(tmp_path))
    monkeypatch.setattr(experiment, "mnist", mnist)
    with pytest.raises(DataError, match="mnist"):
        experiment.work(task(PRESETS["quick"], "baselines"))


# ------------------------------------------------------------------------------------------------- measurements
def test_the_bound_of_few_draws_averages_over_sets_of_all_components():
    log_w = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]).unsqueeze(1)  # three draws of each of two components
    expected = torch.tensor([(1 + torch.e) / 2]).log()
    torch.testing.assert_close(measure.iwelbo_of(log_w, 2), expected)
    assert measure.iwelbo_of(log_w, 7) is None
    torch.testing.assert_close(measure.iwelbo_of(log_w, 5), log_w[:5].exp().mean(0).log())


def test_a_perfect_classifier_scores_one_and_thresholds_come_from_held_out_digits():
    label = torch.arange(100) % 10
    sure = torch.eye(10)[label][:, :9]
    prob = torch.where((label == 9)[:, None], torch.full((100, 9), 1 / 9), sure)
    row = measure.decisions_of(prob, label, 9)
    assert row["accuracy"] == row["auprc"] == row["auprc_entropy"] == row["auroc"] == 1
    held_out = torch.eye(9).repeat(4, 1)
    (by_max, by_entropy) = measure.rule_rows(held_out, prob, label, 9, estimator="plugin")
    for rule in (by_max, by_entropy):
        assert rule["rejected_unseen"] == 1
        assert rule["rejected_known"] == 0
        assert rule["accuracy_accepted"] == 1


def test_digits_shown_are_the_clearest_cases():
    label = torch.tensor([9, 9, 9, 1, 1, 2])
    prob = torch.full((6, 9), 1 / 9)
    score = torch.tensor([0.9, 0.1, 0.8, 0.7, 0.2, 0.95])
    rows = measure.digit_rows(torch.rand(6, 784, generator=seeded(0)), prob, label, score, 0.5, count=1)
    assert [(r["kind"], r["label"], round(r["score"], 2)) for r in rows] == [
        ("rejected", 9, 0.9),
        ("wrongly rejected", 2, 0.95),
        ("wrongly accepted", 9, 0.1),
    ]
    assert all(len(r["pixels"]) == 784 for r in rows)
