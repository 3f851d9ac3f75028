"""The MNIST experiment at toy size, on images that are no digits: every stage runs and is measured correctly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from vaerdict.core import DataError
from vaerdict.models.m1m2 import M1M2, recognition
from vaerdict.noise import seeded
from vaerdict_paper.experiments import mnist as experiment
from vaerdict_paper.experiments import mnist_measure as measure
from vaerdict_paper.experiments.mnist import PRESETS, Preset, Variant
from vaerdict_paper.mnist_data import Mnist, mnist

TINY = Preset(
    (Variant("paper", ("VAE", "IWAE", "WW", "CHI"), ("VAE", "IWAE", "WW", "CHI"), epochs=1),),
    seeds=2,
    n_particles=2,
    batch_size=32,
    n_labels=27,
    n_held_out=12,
    n_train=64,
    n_test=60,
    n_corrected=30,
    n_scored=2,
    n_refined=3,
    n_gold=0,
    n_draws=40,
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
        yield data


@pytest.fixture(scope="module")
def result(blobs):
    return experiment.work(task(TINY, "paper"))


def task(preset: Preset, stage: str):
    first = next(t for t in experiment.tasks(preset) if t["stage"] == stage)
    return json.loads(json.dumps(first))  # as a worker receives it


def test_a_variant_gives_every_kind_of_row(result):
    assert {(r["model"], r["seed"]) for r in result["models"]} == {
        (m, s) for m in ("VAE", "IWAE", "WW", "CHI") for s in (0, 1)
    }
    pairs = [(r["model"], r["proposal"], r["seed"]) for r in result["cross"]]
    assert len(pairs) == len(set(pairs)) == 4 * 5 * 2
    assert {r["n_draws"] for r in result["cross"]} == {40}  # equal draws, also of the mixture
    assert [r["stage"] for r in result["refined"][:4]] == ["encoder", "MIS", "REFINED", "IMPROVED"]
    assert {r["inference"] for r in result["agreement"]} <= {"certified", "not certified"}
    assert {r["rule"] for r in result["decisions"]} == {"conformal 5 %"}
    stages = [s["stage"] for s in result["stages"]]
    assert stages[:3] == ["training", "proposals", "evaluation"]
    json.dumps(result)


def test_refined_weights_beat_the_encoder_of_a_hardly_trained_model(result):
    for seed in (0, 1):
        by_stage = {r["stage"]: r for r in result["refined"] if r["seed"] == seed}
        assert by_stage["IMPROVED"]["ess"] > by_stage["encoder"]["ess"]
        assert by_stage["IMPROVED"]["iwelbo"] > by_stage["encoder"]["iwelbo"] - 1


def test_a_free_class_has_its_own_score(blobs):
    free = Variant("free", ("WW",), free=1, relaxed=False, shifts=1, dropout=0.0, epochs=1)
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
    lab = experiment.Lab(TINY)
    a, b = lab.splits
    assert not torch.equal(a.x_test, b.x_test)
    for split in lab.splits:
        assert not (split.x_held_out[:, None] == split.x_train[None]).all(-1).any()
        assert not (split.y_held_out == measure.UNSEEN).any()
        assert not (split.y_labelled == measure.UNSEEN).any()


def test_proposals_start_from_the_models_own_and_keep_their_tails():
    model = M1M2(784, 9, generator=seeded(0))
    start = recognition(model, image_shape=(28, 28), generator=seeded(1))
    member = experiment._started(experiment.fresh_member(model, "CHI", 0, fresh=5), start)
    assert member.recognition.df is not None
    for name, value in start.state_dict().items():
        torch.testing.assert_close(member.recognition.state_dict()[name], value)


def test_absent_data_raise_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("VAERDICT_DATA", str(tmp_path))
    monkeypatch.setattr(experiment, "mnist", mnist)
    with pytest.raises(DataError, match="mnist"):
        experiment.work(task(PRESETS["quick"], "baselines"))


# ------------------------------------------------------------------------------------------------- measurements
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
