"""Conformal p-values, false discovery rates of novel rows by simulation, the permutation test of exchangeability."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LogisticRegression

from checks import assert_mean
from vaerdict import optional, selective
from vaerdict.core import DataError, SettingError, ShapeError
from vaerdict.selective import Learned, NearestClass, NearestNeighbours, conformal_p_values, exchangeability, find_novel

SCORES = {
    "neighbours": NearestNeighbours(3),
    "class": NearestClass(),
    "learned": Learned(LogisticRegression(), folds=2),
    "function": selective.from_function(lambda rows: np.abs(rows[:, 1])),
}


def rows_of(rng: np.random.Generator, n: int, centers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of normal classes around `centers`, with their classes."""
    classes = rng.integers(0, len(centers), n)
    return centers[classes] + rng.normal(size=(n, centers.shape[1])), classes


CENTERS = np.array([[0.0, 0.0, 0.0], [4.0, 0.0, 0.0]])


# ------------------------------------------------------------------------------------------------ p-values
def test_p_values_by_hand():
    calibration = np.array([1.0, 2.0, 2.0, np.inf])
    p = conformal_p_values(calibration, np.array([0.0, 1.0, 2.0, 3.0, np.inf]))
    np.testing.assert_allclose(p, np.array([5, 5, 4, 2, 2]) / 5)
    assert conformal_p_values(np.empty(0), np.ones(2)).tolist() == [1, 1]


def p_values(n: int, bias: float) -> torch.Tensor:
    """P-values of 20,000 rows, each with its own calibration scores, that score higher by `bias`."""
    rng = np.random.default_rng(0)
    score = rng.normal(size=(20_000, n + 1))
    calibration, query = score[:, :n], score[:, n:] + bias
    return torch.tensor([conformal_p_values(c, q)[0] for c, q in zip(calibration, query, strict=True)])


def test_p_values_are_uniform_where_rows_are_exchangeable():
    """P(p <= t) = t for t = 1/20, ..., 1; false-alarm rate 1e-6 for each of two thresholds."""
    for n_below in (1, 5):
        assert_mean((p_values(19, 0) <= n_below / 20 + 1e-9).double(), n_below / 20, rate=1e-6)
        with pytest.raises(AssertionError, match="standard errors"):
            assert_mean((p_values(19, 0.15) <= n_below / 20 + 1e-9).double(), n_below / 20, rate=1e-6)


def test_mondrian_p_values_are_those_within_each_group():
    rng = np.random.default_rng(1)
    calibration, score = rng.normal(size=40), rng.normal(size=30)
    groups = np.array(["a", "b"])[rng.integers(0, 2, 40)], np.array(["a", "b", "c"])[rng.integers(0, 3, 30)]
    p = conformal_p_values(calibration, score, calibration_group=groups[0], group=groups[1])
    for name in "ab":
        alone = conformal_p_values(calibration[groups[0] == name], score[groups[1] == name])
        np.testing.assert_array_equal(p[groups[1] == name], alone)
    assert (p[groups[1] == "c"] == 1).all()  # no calibration row


def test_mondrian_p_values_are_valid_in_a_group_with_larger_scores():
    """Groups differ in scale: their own p-values are uniform, the common ones are not. False-alarm rate 1e-6."""
    rng = np.random.default_rng(2)
    scale = np.array([1.0, 3.0])
    in_group, common = [], []
    for _ in range(3000):
        group = np.append(rng.permutation(np.arange(38) % 2), 1)
        score = scale[group] * rng.normal(size=39)
        names = {"calibration_group": group[:-1], "group": group[-1:]}
        in_group.append(conformal_p_values(score[:-1], score[-1:], **names)[0])
        common.append(conformal_p_values(score[:-1], score[-1:])[0])
    assert_mean((torch.tensor(in_group) <= 0.1 + 1e-9).double(), 0.1, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean((torch.tensor(common) <= 0.1 + 1e-9).double(), 0.1, rate=1e-6)


def test_q_values_are_those_of_benjamini_and_hochberg():
    p = np.random.default_rng(3).random(50) ** 2
    for level in (0.05, 0.2):
        ranked = np.sort(p)
        n_called = np.flatnonzero(ranked <= level * np.arange(1, 51) / 50).max(initial=-1) + 1
        assert (selective.q_values(p) <= level).sum() == n_called
    assert len(selective.q_values(np.empty(0))) == 0


@pytest.mark.parametrize(
    ("n_query", "n_calibration", "fdr"), [(10, 99, 0.1), (30, 99, 0.1), (7, 12, 0.3), (50, 3, 0.2)]
)
def test_fewest_rows_that_can_be_called(n_query, n_calibration, fdr):
    fewest = selective.fewest_novel(n_query, n_calibration, fdr)
    for n_novel in range(1, n_query + 1):
        query = np.where(np.arange(n_query) < n_novel, 2.0, 0.0)[:, None]  # novel rows with the smallest p-value
        score = selective.from_function(lambda rows: rows[:, 0])
        found = find_novel(score, np.zeros((1, 1)), np.zeros(1), np.ones((n_calibration, 1)), query, fdr=fdr)
        assert found.fewest == fewest
        assert found.novel.sum() == (n_novel if n_novel >= fewest else 0)


# ------------------------------------------------------------------------------------------------ false discovery rate
def discoveries(score, *, shift: float, n_runs: int, fdr: float = 0.2, drift: float = 0.0) -> tuple[np.ndarray, ...]:
    """Share of false calls and of novel rows found, over runs with 15 of 60 query rows novel.

    `drift` moves the known rows of the query: they are then not exchangeable with the calibration rows.
    """
    false_share, power = [], []
    for run in range(n_runs):
        rng = np.random.default_rng(run)
        (known, classes), (calibration, _), (query, _) = (rows_of(rng, n, CENTERS) for n in (80, 99, 60))
        query[:15] = rows_of(rng, 15, CENTERS[:1] + np.array([0, shift, 0]))[0]
        query[15:] += drift
        novel = find_novel(score, known, classes, calibration, query, fdr=fdr, seed=run).novel
        false_share.append(novel[15:].sum() / max(1, novel.sum()))
        power.append(novel[:15].mean())
    return np.array(false_share), np.array(power)


def assert_fdr(false_share: np.ndarray, fdr: float) -> None:
    """Assert a mean of at most `fdr`; a true claim fails with probability at most about 1e-4."""
    error = false_share.std() / np.sqrt(len(false_share))
    assert false_share.mean() <= fdr + stats.norm.isf(1e-4) * error, f"FDR {false_share.mean():.3f} exceeds {fdr}"


@pytest.mark.parametrize("name", SCORES)
def test_the_false_discovery_rate_is_at_most_that_asked_for(name):
    false_share, power = discoveries(SCORES[name], shift=4.0, n_runs=150)
    assert_fdr(false_share, 0.2)
    assert power.mean() > 0.1
    assert false_share.mean() > 0.05  # calls are made: the bound is not kept by silence


def test_the_rate_is_lost_where_query_rows_drift():
    false_share, _ = discoveries(SCORES["neighbours"], shift=4.0, n_runs=50, drift=1.0)
    with pytest.raises(AssertionError, match="exceeds"):
        assert_fdr(false_share, 0.2)


@pytest.mark.parametrize("name", ["neighbours", "class", "learned"])
def test_novel_rows_far_away_are_found(name):
    false_share, power = discoveries(SCORES[name], shift=12.0, n_runs=10)
    assert power.mean() > 0.95
    assert false_share.mean() < 0.5


def test_a_score_that_depends_on_the_order_of_rows_keeps_the_rate():
    """Calibration and query rows are shuffled, so that a score by position is noise: P(any call) <= 0.2."""
    score = selective.from_function(lambda rows: np.arange(len(rows), dtype=float))
    rows = np.zeros((100, 1))
    calls = [find_novel(score, rows, rows[:, 0], rows, rows[:20], fdr=0.2, seed=s).novel.any() for s in range(200)]
    assert stats.binom.sf(sum(calls) - 1, 200, 0.2) > 1e-4


@pytest.mark.parametrize("name", SCORES)
def test_calibration_and_query_rows_are_treated_alike(name):
    """Any division of the pool into calibration and query rows leaves the scores unchanged."""
    rng = np.random.default_rng(4)
    (known, classes), (pool, _) = rows_of(rng, 60, CENTERS), rows_of(rng, 50, CENTERS)
    score = Learned(LogisticRegression(), folds=1) if name == "learned" else SCORES[name]  # folds are by position
    order = rng.permutation(50)
    first = find_novel(score, known, classes, pool[:30], pool[30:])
    second = find_novel(score, known, classes, pool[order[:10]], pool[order[10:]], seed=1)
    scores = np.empty(50)
    scores[order] = np.concatenate([second.calibration_score, second.score])
    np.testing.assert_allclose(scores, np.concatenate([first.calibration_score, first.score]), rtol=1e-3)


# ------------------------------------------------------------------------------------------------ scores
def test_nearest_neighbours_by_brute_force(monkeypatch):
    monkeypatch.setattr("vaerdict.selective.novelty._CHUNK", 100)
    rng = np.random.default_rng(5)
    scale = np.array([1.0, 10.0, 0.0])
    known, pool = rng.normal(size=(30, 3)) * scale, rng.normal(size=(20, 3)) * scale
    spread = np.append(known[:, :2].std(0), 1)
    distance = np.linalg.norm((pool[:, None] - known) / spread, axis=-1)
    for k in (1, 4, 30):
        expected = np.sort(distance, 1)[:, :k].mean(1)
        np.testing.assert_allclose(NearestNeighbours(k)(known, np.zeros(30), pool), expected)
    with pytest.raises(DataError, match=r"k=31 nearest neighbours of 30 known rows; give k=30"):
        NearestNeighbours(31)(known, np.zeros(30), pool)


def test_nearest_class_is_the_shrunken_mahalanobis_distance():
    from sklearn.covariance import ledoit_wolf

    rng = np.random.default_rng(6)
    known, classes = rows_of(rng, 40, 3 * np.eye(5)[:3])
    pool = rng.normal(size=(20, 5))
    center, spread = known.mean(0), known.std(0)
    x, y = (known - center) / spread, (pool - center) / spread
    mean = np.stack([x[classes == c].mean(0) for c in range(3)])
    covariance, share = ledoit_wolf(x - mean[classes], assume_centered=True)
    assert 0.01 < share < 0.9
    distance = [np.einsum("nd,de,ne->n", y - m, np.linalg.inv(covariance), y - m) ** 0.5 for m in mean]
    np.testing.assert_allclose(NearestClass()(known, classes, pool), np.min(distance, 0))
    constant = NearestClass()(np.zeros((3, 2)), np.array(["a", "b", "b"]), np.array([[3.0, 4.0]]))
    np.testing.assert_allclose(constant, [5.0])


def test_learned_scores_are_cross_fitted_and_reproducible():
    rng = np.random.default_rng(7)
    known, pool = rng.normal(size=(100, 4)), rng.normal(size=(60, 4))
    forest = Learned(folds=2)
    np.testing.assert_array_equal(forest(known, np.zeros(100), pool), forest(known, np.zeros(100), pool))
    in_sample, across = Learned(folds=1)(known, np.zeros(100), pool), forest(known, np.zeros(100), pool)
    assert in_sample.mean() > across.mean() + 0.1  # a forest recognises the rows it was fitted on


def test_weighted_p_values_hold_where_the_shares_of_classes_differ():
    """Rows of two classes with different scores, in other shares: P(p <= 0.1) <= 0.1 with weights, not without."""
    rng, n = np.random.default_rng(8), 4000
    calibration_class, query_class = rng.random(n) < 0.1, rng.random(n) < 0.6
    calibration, score = rng.normal(2.0 * calibration_class), rng.normal(2.0 * query_class)
    ratio = {True: 6.0, False: 0.4 / 0.9}
    weights = [np.array([ratio[c] for c in mask.tolist()]) for mask in (calibration_class, query_class)]
    p = conformal_p_values(calibration, score, calibration_weight=weights[0], weight=weights[1])
    error = 4 * (0.1 * 0.9 / n) ** 0.5 * 3  # four standard errors, of calibration rows with weights up to six too
    assert abs((p <= 0.1).mean() - 0.1) < error
    assert (conformal_p_values(calibration, score) <= 0.1).mean() > 0.1 + error
    same = conformal_p_values(calibration, score, calibration_weight=np.full(n, 2.0), weight=np.full(n, 2.0))
    np.testing.assert_allclose(same, conformal_p_values(calibration, score))


# ------------------------------------------------------------------------------------------------ exchangeability
def split(seed: int, *, n: int = 300, shift: float = 0.0, novel: float = 0.0, rare: bool = False) -> tuple:
    """Reference and query rows of five classes and their classes: shifted, with novel rows, or other shares."""
    rng = np.random.default_rng(seed)
    centers = 4 * rng.normal(size=(5, 4))
    share = np.array([0.4, 0.3, 0.1, 0.1, 0.1]) if rare else np.full(5, 0.2)
    (reference, group), query_group = rows_of(rng, n, centers), rng.choice(5, n, p=share)
    query = centers[query_group] + rng.normal(size=(n, 4)) + shift
    query[(query_group == 0) & (rng.random(n) < 0.5)] += novel
    return reference, query, group, query_group


def n_failed(n_runs: int = 100, **settings) -> int:
    return sum(not exchangeability(*split(s, **settings), n_permutations=99, seed=s).passed for s in range(n_runs))


@pytest.mark.parametrize(
    "settings", [{}, {"rare": True}, {"novel": 5.0}], ids=["random splits", "composition", "novel rows in one class"]
)
def test_the_gate_fails_at_most_at_its_level(settings):
    """Failures of 100 runs at a level of 5 %; false-alarm rate 1e-4 at most."""
    assert stats.binom.sf(n_failed(**settings) - 1, 100, 0.05) > 1e-4


def test_the_gate_without_novel_groups_keeps_its_level_exactly():
    """P-values of random splits are uniform without a group set aside; false-alarm rate 1e-4."""
    p = [exchangeability(*split(s, n=200), n_permutations=99, novel_groups=0, seed=s).p_value for s in range(100)]
    assert stats.kstest(p, "uniform").pvalue > 1e-4


def test_the_gate_finds_a_shift():
    assert n_failed(10, shift=0.7) >= 9
    result = exchangeability(*split(0, shift=0.7))
    assert result.median_auroc > 0.7
    assert result.message.startswith("reference and query differ within groups (median AUROC 0.")
    assert [g.group for g in result.groups] == [0, 1, 2, 3, 4]
    assert all(g.n_reference >= 10 and g.n_query >= 10 and 0.5 < g.auroc <= 1 for g in result.groups)


def test_the_gate_finds_a_change_of_spread():
    reference, query, group, query_group = split(0)
    center = np.stack([query[query_group == c].mean(0) for c in range(5)])[query_group]
    assert not exchangeability(reference, center + 1.6 * (query - center), group, query_group).passed


def test_small_groups_are_left_out_and_named():
    rng = np.random.default_rng(0)
    rows, group = rng.normal(size=(110, 2)), np.repeat(["a", "b"], [100, 10])
    result = exchangeability(rows, rows[:101], group, group[:101])
    assert [g.group for g in result.left_out] == ["b"]
    assert result.message.endswith("Too small, left out (rows of reference and query): b (10 and 1).")
    untested = exchangeability(rows, rows, group, np.full(110, "c"))
    assert not untested.passed
    assert untested.message.startswith("not tested: no group has 10 rows in both")


def test_more_features_than_rows_and_constant_features():
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(size=(60, 100)), np.ones((60, 1))], 1)
    group = np.zeros(30)
    assert exchangeability(rows[:30], rows[30:], group, group).passed
    assert not exchangeability(rows[:30], rows[30:] + 1, group, group).passed
    assert exchangeability(np.ones((30, 2)), np.ones((30, 2)), group, group).passed


def test_large_groups_are_drawn_from(monkeypatch):
    monkeypatch.setattr("vaerdict.selective.gate._MAX_ROWS", 20)
    result = exchangeability(*split(0, n=400))
    assert result.passed
    assert all(g.n_reference > 20 for g in result.groups)


# ------------------------------------------------------------------------------------------------ bad input
ROWS = np.zeros((3, 2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: conformal_p_values(np.array([np.nan, 1]), np.ones(1)),
            DataError,
            "1 of 2 values of calibration are NaN",
        ),
        (
            lambda: conformal_p_values(ROWS, np.ones(1)),
            ShapeError,
            r"calibration has shape \(3, 2\); expected one number",
        ),
        (lambda: conformal_p_values(np.ones(2), np.ones(1), group=np.ones(1)), SettingError, "give both or neither"),
        (
            lambda: conformal_p_values(np.ones(2), np.ones(1), group=np.ones(1), calibration_group=np.ones(3)),
            ShapeError,
            r"calibration_group has shape \(3,\) for 2 rows",
        ),
        (lambda: selective.q_values(np.array([0.5, 1.5])), DataError, r"from 0.5 to 1.5; they must lie in \[0, 1\]"),
        (lambda: selective.fewest_novel(5, 5, 0), SettingError, "fdr=0 must lie strictly between 0 and 1"),
        (lambda: find_novel(NearestClass(), ROWS, np.ones(2), ROWS, ROWS), ShapeError, "classes has shape"),
        (lambda: find_novel(NearestClass(), ROWS, np.ones(3), ROWS[:0], ROWS), ShapeError, "calibration has shape"),
        (
            lambda: find_novel(NearestClass(), ROWS, np.ones(3), ROWS, np.zeros((3, 1))),
            ShapeError,
            r"numbers of features differ \(known 2, calibration 2, query 1\)",
        ),
        (
            lambda: find_novel(NearestClass(), ROWS * np.nan, np.ones(3), ROWS, ROWS),
            DataError,
            "known holds 6 values that are not finite",
        ),
        (
            lambda: find_novel(lambda known, classes, pool: pool[:2, 0], ROWS, np.ones(3), ROWS, ROWS),
            ShapeError,
            "the novelty score returned 2 numbers for 6 rows",
        ),
        (
            lambda: conformal_p_values(np.ones(3), np.ones(2), weight=np.ones(2)),
            SettingError,
            "calibration_weight= and weight= belong together",
        ),
        (
            lambda: conformal_p_values(np.ones(3), np.ones(2), calibration_weight=np.zeros(3), weight=np.ones(2)),
            DataError,
            "weights must be positive",
        ),
        (lambda: NearestNeighbours(0), SettingError, "k=0 must be a whole number"),
        (lambda: Learned()(ROWS, np.ones(3), ROWS), DataError, "folds=5 for a pool of 3 rows"),
        (lambda: exchangeability(ROWS, ROWS, np.ones(3), np.ones(2)), ShapeError, "query_group has shape"),
        (lambda: exchangeability(ROWS, ROWS, np.ones(3), np.ones(3), level=0), SettingError, "level=0 must lie in"),
        (
            lambda: exchangeability(ROWS, ROWS, np.ones(3), np.ones(3), novel_groups=-1),
            SettingError,
            "novel_groups=-1 must not be negative",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_learned_score_without_scikit_learn_names_the_extra(monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(optional, "import_module", missing)
    with pytest.raises(SettingError, match=r"needs sklearn; install it with `pip install 'vaerdict\[sklearn\]'`"):
        Learned()(np.zeros((9, 1)), np.ones(9), np.zeros((9, 1)))
