"""Novelty in the selective classifier: which score and rows are used, rates by simulation, files."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

import vaerdict as vd
from vaerdict import selective
from vaerdict.core import SettingError

pytest.importorskip("sklearn")

from vaerdict.classify.novelty import FROM_MODEL, NOVELTY_SCORES, rows_of
from vaerdict.classify.preprocessing import scaling

CENTERS = np.array([[-4.0, 0.0], [4.0, 0.0]])


def untrained(**changes) -> vd.SelectiveClassifier:
    """A classifier whose network is hardly trained: novelty by rows does not use it."""
    settings = {"epochs": 1, "n_draws": 20, "hidden": (8,), "n_particles": 1, "random_state": 0}
    return vd.SelectiveClassifier(**{**settings, **changes})


def draw(rng: np.random.Generator, n: int, n_novel: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of two classes, the last `n_novel` of a third one, and their classes."""
    classes = np.append(rng.integers(0, 2, n - n_novel), np.full(n_novel, 2))
    return np.append(CENTERS, [[0.0, 8.0]], 0)[classes] + rng.normal(size=(n, 2)), classes


def labelled_and_query(seed: int, n_novel: int = 12) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """60 labelled and 40 unlabelled rows, some of a novel class, and 40 query rows with their classes."""
    rng = np.random.default_rng(seed)
    (X, y), (others, _), (query, classes) = draw(rng, 60), draw(rng, 40, n_novel), draw(rng, 40, n_novel)
    return np.append(X, others, 0), np.append(y, np.full(40, -1)), query, classes


# ------------------------------------------------------------------------------------------------ the rule
@pytest.mark.parametrize(
    ("settings", "n_labelled", "rule", "threshold"),
    [
        ({}, 30, "novelty", 0.9),
        ({}, 8, "error", 0.1),  # 1 / (8 + 1) > 0.1: no row could be rejected
        ({"alpha": 0.2}, 8, "novelty", 0.8),
        ({"cost": 0.3}, 30, "error", 0.3),
        ({"cost": 0.3, "alpha": 0.2}, 30, "novelty", 0.8),
        ({"reject_by": "error"}, 30, "error", 0.1),
        ({"reject_by": "novelty", "cost": 0.3}, 30, "novelty", 0.9),
    ],
)
def test_the_reject_score_follows_from_what_is_given(settings, n_labelled, rule, threshold):
    X, y, _, _ = labelled_and_query(0)
    y[n_labelled:] = -1
    fitted = untrained(**settings).fit(X, y)
    assert fitted.reject_by_ == rule
    assert fitted.threshold_ == pytest.approx(threshold)


def test_rows_are_rejected_where_the_p_value_is_at_most_alpha():
    X, y, query, classes = labelled_and_query(0)
    fitted = untrained(alpha=6 / 61).fit(X, y)  # a value that p-values of 60 labels take
    decided, found = fitted.decide(query), fitted.novel(query)
    np.testing.assert_allclose(decided.score, 1 - found.p)
    assert np.array_equal(decided.action == -1, found.p * 61 <= 6 + 1e-6)
    assert (decided.action[classes == 2] == -1).all()
    assert found.novel[classes == 2].all()
    assert decided.evidence is None


@pytest.mark.parametrize(("novelty", "max_full"), [("diffusion", 500), ("diffusion", 10), ("neighbours", 500)])
def test_rates_hold(novelty, max_full, monkeypatch):
    """At most a share 0.2 of known rows rejected, and FDR at most 0.2, in 100 runs; false-alarm rate 1e-4 each."""
    monkeypatch.setattr("vaerdict.classify.novelty._MAX_FULL", max_full)
    rejected, false_share, power = [], [], []
    for seed in range(100):
        X, y, query, classes = labelled_and_query(seed)
        fitted = untrained(alpha=0.2, novelty=novelty).fit(X, y)
        rejected.append((fitted.decide(query).action[classes != 2] == -1).mean())
        novel = fitted.novel(query, fdr=0.2).novel
        false_share.append((novel & (classes != 2)).sum() / max(1, novel.sum()))
        power.append(novel[classes == 2].mean())
    for shares in (rejected, false_share):
        error = np.std(shares) / 10
        assert np.mean(shares) <= 0.2 + stats.norm.isf(1e-4) * error
    assert np.mean(rejected) > 0.1  # the share is used
    assert np.mean(power) > 0.9


def test_the_share_is_lost_where_labelled_rows_are_not_exchangeable():
    rejected = []
    for seed in range(20):
        X, y, query, classes = labelled_and_query(seed)
        X[:60] = 0.3 * X[:60] + 0.7 * CENTERS[y[:60]]  # labels were given to typical rows only
        fitted = untrained(alpha=0.2, novelty="neighbours").fit(X, y)
        rejected.append((fitted.decide(query).action[classes != 2] == -1).mean())
    assert np.mean(rejected) > 0.4


# ------------------------------------------------------------------------------------------------ scores
@pytest.mark.parametrize("novelty", [*NOVELTY_SCORES, selective.NearestNeighbours(3)])
def test_every_score_can_be_used(novelty):
    rng = np.random.default_rng(1)
    (X, y), (query, _) = draw(rng, 120), draw(rng, 40)
    query[20:] = np.array([0.0, 40.0]) + rng.normal(size=(20, 2))
    epochs = 60 if novelty in FROM_MODEL else 1
    fitted = untrained(novelty=novelty, epochs=epochs, learning_rate=0.02).fit(X, y)
    found = fitted.novel(query, fdr=0.2)
    n = {"diffusion": 120, "evidence": 24, "ambiguity": 24}.get(novelty if isinstance(novelty, str) else "", 60)
    assert len(found.calibration_score) == n
    assert found.p.min() >= 1 / (n + 1)
    if novelty != "ambiguity":  # far rows need not be ambiguous
        assert selective.auroc(*map(_tensor, (found.score, np.arange(40) >= 20))) > 0.95
    assert fitted.decide(query).action.shape == (40,)


def _tensor(values: np.ndarray):
    import torch

    return torch.as_tensor(values)


def test_the_evidence_is_that_of_the_first_stage():
    rng = np.random.default_rng(2)
    X, y = draw(rng, 120)
    fitted = untrained(novelty="evidence", n_draws=50).fit(X, y)
    found = fitted.novel(X[:10])
    answer = fitted.steps_.posterior(fitted._scaled(X[:10]), 50, seed=fitted.seed_, refine=False)
    np.testing.assert_allclose(found.score, -answer.log_evidence.numpy())
    assert answer.stages == ("MIS",)


def test_unlabelled_training_rows_may_be_asked_about():
    """They are not counted twice: the answer is that of diffusion over labelled rows and the rows asked about."""
    X, y, _, _ = labelled_and_query(3)
    fitted = untrained().fit(X, y)
    expected = selective.find_novel_by_diffusion(X[:60], X[60:])
    np.testing.assert_allclose(fitted.novel(X[60:]).p, expected.p)
    half = selective.Diffusion(X[80:], standardise=True)
    assert not np.allclose(fitted.novel(X[60:80]).p, 1)
    np.testing.assert_allclose(
        fitted.novel(X[60:80]).p, selective.find_novel_by_diffusion(X[:60], X[60:80], diffusion=half).p
    )


def test_features_are_scaled_by_unlabelled_rows_where_there_are_enough():
    X, y, query, _ = labelled_and_query(4)
    center, spread = scaling(X[60:], "gaussian")
    labelled, unlabelled, asked = ((rows - center) / spread for rows in (X[:60], X[60:], query))
    diffusion = selective.Diffusion(unlabelled, standardise=False)
    expected = selective.find_novel_by_diffusion(labelled, asked, diffusion=diffusion)
    np.testing.assert_allclose(untrained().fit(X, y).novel(query).score, expected.score)


def test_kept_rows_are_bounded(monkeypatch):
    monkeypatch.setattr("vaerdict.classify.novelty._MAX_LABELLED", 30)
    monkeypatch.setattr("vaerdict.classify.novelty._MAX_UNLABELLED", 20)
    X = np.arange(100.0)[:, None]
    labelled, held_out = np.arange(0, 100, 2), np.arange(0, 40, 2)
    rows = rows_of(X, labelled, labelled % 3, held_out, np.random.RandomState(0))
    assert (len(rows.labelled), len(rows.unlabelled)) == (30, 20)
    assert np.array_equal(rows.codes, rows.labelled[:, 0] % 3)
    assert np.array_equal(rows.held_out, rows.labelled[:, 0] < 40)
    assert (rows.unlabelled % 2 == 1).all()


# ------------------------------------------------------------------------------------------------ too few labels
def test_too_few_labels_are_named():
    X, y, query, _ = labelled_and_query(0)
    few = np.where(np.arange(100) < 8, y, -1)
    with pytest.raises(SettingError, match=r"alpha=0.1 needs at least 9 calibration rows.*has 8; give at least 9 lab"):
        untrained(alpha=0.1).fit(X, few)
    with pytest.raises(SettingError, match=r"novelty='class' has 4; give at least 18 labels"):
        untrained(reject_by="novelty", novelty="class").fit(X, few)
    with pytest.raises(SettingError, match=r"novelty='evidence' has 0; give more labels or a larger held_out="):
        untrained(reject_by="novelty", novelty="evidence").fit(X, y)
    with pytest.raises(SettingError, match=r"fdr=0.05 needs at least 19 calibration rows"):
        untrained(reject_by="error").fit(X, few).novel(query, fdr=0.05)
    for fdr in (0, 2):
        with pytest.raises(SettingError, match=f"fdr={fdr} must lie strictly between 0 and 1"):
            untrained().fit(X, y).novel(query, fdr=fdr)


# ------------------------------------------------------------------------------------------------ files
@pytest.mark.parametrize("novelty", ["diffusion", "class", "evidence"])
def test_novelty_is_the_same_after_saving(novelty, tmp_path):
    rng = np.random.default_rng(5)
    (X, y), (query, _) = draw(rng, 130), draw(rng, 20, 5)
    fitted = untrained(novelty=novelty).fit(X, np.where(np.arange(130) < 110, y, -1))
    again = vd.SelectiveClassifier.load(fitted.save(tmp_path / "fitted"))
    for before, after in zip(fitted.novel(query), again.novel(query), strict=True):
        assert np.array_equal(before, after)
    assert np.array_equal(fitted.decide(query).action, again.decide(query).action)


def test_a_score_that_is_no_name_cannot_be_saved(tmp_path):
    X, y, _, _ = labelled_and_query(0)
    with pytest.raises(SettingError, match="only numbers and strings can be saved"):
        untrained(novelty=selective.NearestClass()).fit(X, y).save(tmp_path / "fitted")
