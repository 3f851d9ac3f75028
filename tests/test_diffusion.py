"""Diffusion: the solver and the graph by brute force, full conformal p- and e-values by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from vaerdict.core import DataError, SettingError
from vaerdict.selective import Diffusion, find_novel_by_diffusion
from vaerdict.selective.diffusion import _e_adjusted, neighbour_weights

CENTERS = np.array([[0.0, 0.0, 0.0], [6.0, 0.0, 0.0]])
NOVEL = np.array([[0.0, 6.0, 0.0]])


def rows_of(rng: np.random.Generator, n: int, centers: np.ndarray) -> np.ndarray:
    return centers[rng.integers(0, len(centers), n)] + rng.normal(size=(n, centers.shape[1]))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


# ------------------------------------------------------------------------------------------------ the graph
def test_weights_by_brute_force(rng, monkeypatch):
    monkeypatch.setattr("vaerdict.selective.diffusion._CHUNK", 100)
    rows = rng.normal(size=(30, 3))
    distance = np.linalg.norm(rows[:, None] - rows, axis=-1)
    np.fill_diagonal(distance, np.inf)
    radius = np.sort(distance, 1)[:, 3]
    directed = np.where(distance <= radius[:, None], np.exp(-(distance**2) / np.outer(radius, radius)), 0)
    np.testing.assert_allclose(neighbour_weights(rows, 4).toarray(), np.maximum(directed, directed.T))


def test_reach_solves_the_linear_equations(rng):
    walk = Diffusion(restart=0.05, leak=0.2).walk(rows_of(rng, 20, CENTERS), rows_of(rng, 30, CENTERS))
    transition = walk.weight.toarray() / (walk.weight.toarray().sum(1, keepdims=True) + 0.2)
    reach = 0.05 * np.linalg.inv(np.eye(50) - 0.95 * transition)
    np.testing.assert_allclose(walk.reach(np.eye(20), np.arange(20)), reach[:, :20], atol=1e-9)
    np.testing.assert_allclose(walk.reach(np.ones(20), np.arange(20)), reach[:, :20].sum(1), atol=1e-8)
    assert np.linalg.norm(reach * walk.degree[:, None] / walk.degree - reach.T) < 1e-9  # which the p-values use


def test_equal_rows_and_constant_features_are_no_obstacle(rng):
    rows = np.repeat(rows_of(rng, 6, CENTERS), 10, axis=0)
    rows[:, 2] = 3.0
    found = find_novel_by_diffusion(rows[:40], rows[40:], diffusion=Diffusion(neighbours=5))
    assert np.isfinite(found.score).all()


# ------------------------------------------------------------------------------------------------ the calls
def test_both_tell_what_known_rows_do_not_reach(rng):
    """A cluster without labels, and a single row far from all others."""
    known, unlabelled = rows_of(rng, 60, CENTERS), rows_of(rng, 90, np.concatenate([CENTERS, NOVEL]))
    query = np.concatenate([rows_of(rng, 40, CENTERS), rows_of(rng, 20, NOVEL), [[-9.0, -9.0, 9.0]]])
    diffusion = Diffusion(unlabelled)
    score = diffusion(known, np.zeros(60), query)
    found = find_novel_by_diffusion(known, query, diffusion=diffusion)
    np.testing.assert_allclose(found.score, score, atol=1e-9)
    assert score[40:].min() > np.quantile(score[:40], 0.9)
    assert found.novel[40:].all()
    assert found.novel[:40].mean() < 0.3  # mean 0.03 over runs
    assert (found.novel == (found.q <= 0.1)).all()


def test_a_labelled_row_and_a_query_row_can_change_places(rng):
    """With one query row, the reach of the n + 1 rows does not depend on which of them is the query."""
    rows, unlabelled = rows_of(rng, 25, CENTERS), rows_of(rng, 30, CENTERS)
    p = [
        find_novel_by_diffusion(np.delete(rows, j, 0), rows[[j]], diffusion=Diffusion(unlabelled)).p[0]
        for j in range(25)
    ]
    np.testing.assert_allclose(np.sort(p), np.arange(1, 26) / 25)  # each rank once: exactly uniform
    drifted = find_novel_by_diffusion(rows[:24], rows[24:] + 9, diffusion=Diffusion(unlabelled)).p[0]
    assert drifted == pytest.approx(1 / 25)


def discoveries(*, n_runs: int, drift: float = 0.0, share: float = 0.25) -> tuple[np.ndarray, np.ndarray]:
    """Share of false calls and of novel rows found at an FDR of 20 %, with a `share` of 60 query rows novel."""
    false_share, power, n_novel = [], [], round(60 * share)
    for run in range(n_runs):
        rng = np.random.default_rng(run)
        labelled, query = rows_of(rng, 60, CENTERS), rows_of(rng, 60, CENTERS) + drift
        query[:n_novel] = rows_of(rng, n_novel, 0.6 * NOVEL)
        unlabelled = rows_of(rng, 40, np.concatenate([CENTERS, 0.6 * NOVEL]))
        novel = find_novel_by_diffusion(labelled, query, diffusion=Diffusion(unlabelled), fdr=0.2).novel
        false_share.append(novel[n_novel:].sum() / max(1, novel.sum()))
        power.append(novel[:n_novel].sum() / max(1, n_novel))
    return np.array(false_share), np.array(power)


def assert_fdr(false_share: np.ndarray, fdr: float) -> None:
    """Assert a mean of at most `fdr`; a true claim fails with probability at most about 1e-4."""
    error = false_share.std() / np.sqrt(len(false_share))
    assert false_share.mean() <= fdr + stats.norm.isf(1e-4) * error, f"FDR {false_share.mean():.3f} exceeds {fdr}"


def test_the_false_discovery_rate_is_at_most_that_asked_for():
    false_share, power = discoveries(n_runs=150)
    assert_fdr(false_share, 0.2)
    assert power.mean() > 0.5
    assert false_share.mean() > 0.02  # calls are made: the bound is not kept by silence
    nothing_novel, _ = discoveries(n_runs=100, share=0.0)
    assert_fdr(nothing_novel, 0.2)
    drifting, _ = discoveries(n_runs=30, drift=1.5)
    with pytest.raises(AssertionError, match="exceeds"):
        assert_fdr(drifting, 0.2)


def test_adjusted_e_values_call_what_e_bh_calls(rng):
    e = np.where(rng.random(40) < 0.5, 0, rng.exponential(30, 40))
    for level in (0.05, 0.2, 0.5):
        ranked = np.sort(e)[::-1]
        n_called = np.flatnonzero(ranked >= 40 / (level * np.arange(1, 41))).max(initial=-1) + 1
        assert (_e_adjusted(e) <= level).sum() == n_called


def test_settings_are_checked(rng):
    with pytest.raises(SettingError, match=r"restart=0 must lie"):
        Diffusion(restart=0)
    with pytest.raises(DataError, match=r"neighbours=10 of 8 rows"):
        find_novel_by_diffusion(rng.normal(size=(4, 2)), rng.normal(size=(4, 2)))
