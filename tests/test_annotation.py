"""Annotation: the rate of novel calls, what the gate refuses, labels, groups, and components."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse, stats

import annotate_toys as toys
import vaerdict as vd
from vaerdict.annotation import groups, novelty
from vaerdict.annotation.labels import label_probabilities
from vaerdict.de.components import principal_components
from vaerdict.selective import ConformalUnits
from vaerdict.selective.units import MAX_UNITS

CENTERS = 5 * np.eye(6)
TYPES = np.array(["a", "b", "c", "d", "e", "f"])


def rows_of(rng: np.random.Generator, n: int, share: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Rows of five known types, normal around their centres, and the types. Shapes: ``-> (n, 6), (n,)``."""
    code = rng.choice(5, n, p=share)
    return CENTERS[code] + rng.normal(size=(n, 6)), TYPES[code]


def judged(seed: int, *, n_novel: int = 60, shift: float = 0.0, share: np.ndarray | None = None, **options):
    """What is found in 300 known query rows and some novel ones, and which are novel."""
    rng = np.random.default_rng(seed)
    (reference, types), (query, _) = rows_of(rng, 500), rows_of(rng, 300, share)
    query = np.concatenate([query + shift, CENTERS[5] + rng.normal(size=(n_novel, 6))])
    found = novelty.find_novel_cells(reference, types, query, **{"fdr": 0.1, "level": 0.1, "seed": seed, **options})
    return found, np.arange(len(query)) >= 300


def fdp(found: novelty.Novelty, novel: np.ndarray) -> float:
    return (found.novel & ~novel).sum() / max(1, found.novel.sum())


# ------------------------------------------------------------------------------------------------ the rate
def assert_rate(shares: list[float], level: float = 0.1) -> None:
    """The mean share of false calls is at most the level, at a false-alarm rate of 1e-4 (normal approximation)."""
    error = np.std(shares, ddof=1) / len(shares) ** 0.5
    assert np.mean(shares) <= level + stats.norm.isf(1e-4) * error, f"{np.mean(shares):.3f}, standard error {error:.3f}"


def test_the_share_of_false_calls_is_controlled_and_novel_cells_are_found():
    runs = [judged(seed) for seed in range(25)]
    assert_rate([fdp(*run) for run in runs])
    power = [run[0].novel[run[1]].mean() for run in runs]
    assert np.mean(power) > 0.8
    with pytest.raises(AssertionError, match="standard error"):  # the check can fail
        assert_rate([fdp(*run) + 0.1 for run in runs])


def test_nothing_is_called_where_nothing_is_novel():
    """Runs with a call have a probability of at most 10 %; false-alarm rate 1e-4."""
    n_called = sum(judged(seed, n_novel=0)[0].novel.any() for seed in range(25))
    assert stats.binom.sf(n_called - 1, 25, 0.1) > 1e-4


def test_another_composition_is_neither_refused_nor_novel():
    share = np.array([0.7, 0.2, 0.05, 0.03, 0.02])
    runs = [judged(seed, n_novel=0, share=share)[0] for seed in range(20)]
    assert stats.binom.sf(sum(not run.promised for run in runs) - 1, 20, 0.1) > 1e-4
    assert_rate([float(run.novel.any()) for run in runs])


def test_the_rate_holds_where_the_composition_differs_and_cells_are_novel():
    """Cells of a type that is rare in the reference and frequent in the query are not called for that."""
    rng, known, runs = np.random.default_rng(2), np.array(["alpha", "beta", "gamma"]), []
    for seed in range(10):
        reference = toys.cells(rng.choice(known, 300, p=[0.2, 0.3, 0.5]), seed=2 * seed + 50)
        kinds = np.concatenate([rng.choice(known, 250, p=[0.7, 0.2, 0.1]), np.repeat("delta", 50)])
        counts = np.concatenate([reference.X, toys.cells(kinds, seed=2 * seed + 51).X])
        rows = principal_components(sparse.csr_matrix(counts), counts.sum(1).astype(float), 20, seed=seed)
        types = reference.obs["cell_type"].to_numpy().astype(str)
        found = novelty.find_novel_cells(rows[:300], types, rows[300:], fdr=0.1, level=0.001, seed=seed)
        assert found.weighted
        runs.append((found, kinds == "delta"))
    assert_rate([fdp(*run) for run in runs])
    assert np.mean([found.novel[novel].mean() for found, novel in runs]) > 0.4


def test_a_shift_is_refused_and_its_cells_are_ranked():
    found, novel = judged(0, shift=1.0)
    assert not found.promised
    assert not found.novel.any()
    assert np.isnan(found.p).all()
    assert np.isnan(found.q).all()
    assert "differ within groups" in found.gate.message
    assert found.score[novel].mean() > found.score[~novel].mean() + 0.5  # after the types were moved onto the query


def test_calibration_cells_of_the_query_restore_the_rate_under_a_shift():
    shares, power = [], []
    for seed in range(12):
        rng = np.random.default_rng(1000 + seed)
        calibration = np.concatenate([rng.random(300) < 0.4, np.zeros(90, dtype=bool)])
        found, novel = judged(seed, n_novel=90, shift=1.0, calibration=calibration)
        assert np.isnan(found.p[calibration]).all()
        shares.append(fdp(found, novel))
        power.append(found.novel[novel].mean() if found.promised else np.nan)
    assert_rate(shares)
    assert np.nanmean(power) > 0.3


def test_novel_cells_do_not_make_the_gate_refuse():
    """Refusals at a level of 10 % of 20 runs with a fifth of novel cells; false-alarm rate 1e-4."""
    n_refused = sum(not judged(seed, n_novel=75)[0].promised for seed in range(20))
    assert stats.binom.sf(n_refused - 1, 20, 0.1) > 1e-4


# ------------------------------------------------------------------------------------------------ units
def test_novel_rows_have_large_scores_which_the_seed_determines():
    rng = np.random.default_rng(3)
    known, types = rows_of(rng, 200)
    pool = np.concatenate([rows_of(rng, 150)[0], CENTERS[5] + rng.normal(size=(30, 6))])
    score = ConformalUnits()(known, types, pool)
    assert score[150:].min() > np.median(score[:150])
    np.testing.assert_array_equal(score, ConformalUnits()(known, types, pool))
    assert not np.array_equal(score, ConformalUnits(seed=1)(known, types, pool))


def test_units_grow_with_the_number_of_rows(monkeypatch):
    from vaerdict.selective import units

    rng = np.random.default_rng(4)
    known, types = rows_of(rng, 400)
    pool = rows_of(rng, 400)[0]
    monkeypatch.setattr(units, "MAX_UNITS", 10)
    monkeypatch.setattr(units, "_FIT_ROWS", 300)  # most rows are then assigned to units fitted on others
    answer = ConformalUnits().judge(known, types, pool)
    assert answer.unit.max() < 10 <= MAX_UNITS
    assert len(answer.unit) == len(answer.score) == len(answer.predicted) == 400
    assert (answer.predicted_known == types).mean() > 0.95


@pytest.mark.parametrize("settings", [{"sizes": ()}, {"sizes": (1, 20)}, {"repeats": 0}])
def test_units_of_no_size_are_refused(settings):
    with pytest.raises(vd.SettingError, match=r"sizes=|repeats="):
        ConformalUnits(**settings)


# ------------------------------------------------------------------------------------------------ the rest
def test_every_type_is_audited():
    rng = np.random.default_rng(5)
    rows, types = rows_of(rng, 500)
    close = rows[types == "a"][:40]  # no type of its own: every second of a type's cells
    records = novelty.audit_types(
        np.concatenate([rows, close]), np.concatenate([types, np.repeat("twin", 40)]), fdr=0.1, seed=0, progress=silent
    )
    found = {record["type"]: record["found"] for record in records}
    assert set(found) == {"a", "b", "c", "d", "e", "twin"}
    assert min(found[name] for name in "bcde") > 0.8
    assert found["twin"] < 0.3


def silent(*_: object) -> None:
    pass


def test_probabilities_of_labels_are_calibrated():
    """The mean probability of the label is its accuracy, within 4 standard errors."""
    rng = np.random.default_rng(6)
    code = rng.integers(0, 3, 3000)
    rows = 1.5 * np.eye(3)[code] + rng.normal(size=(3000, 3))
    answer = label_probabilities(rows[:1500], TYPES[code[:1500]], rows[1500:], seed=0)
    correct = answer.types[answer.prob.argmax(1)] == TYPES[code[1500:]]
    confidence = answer.prob.max(1)
    assert abs(confidence.mean() - correct.mean()) < 4 * (confidence * (1 - confidence)).sum() ** 0.5 / 1500
    assert abs(answer.calibration.accuracy - correct.mean()) < 0.06
    assert answer.confusion.sum() == 1500


def test_units_of_one_kind_are_one_group():
    rng = np.random.default_rng(7)
    near, far = rng.normal(size=(60, 6)), rng.normal(size=(20, 6)) + 12
    unit = np.concatenate([np.arange(60) % 3, np.full(20, 3)])
    group = groups.group_cells(np.concatenate([near, far]), unit, CENTERS)
    assert (group[:60] == 1).all()
    assert (group[60:] == 2).all()
    assert groups.group_cells(near[:1], unit[:1], CENTERS).tolist() == [1]


def test_components_are_those_of_the_dense_matrix():
    rng = np.random.default_rng(8)
    counts = rng.poisson(rng.gamma(1, 1, (80, 1)) * rng.gamma(1, 1, 30))
    counts[:, 0] += 1
    totals = counts.sum(1).astype(float)
    x = np.log1p(counts * (np.median(totals) / totals)[:, None])
    x = np.minimum(x / np.maximum(x.std(0), 0.05), 10)
    u, s, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    found = principal_components(sparse.csr_matrix(counts), totals, 4, seed=0)
    np.testing.assert_allclose(np.abs(found), np.abs(u[:, :4] * s[:4]), atol=1e-6)
    with pytest.raises(vd.DataError, match="too few"):
        principal_components(sparse.csr_matrix(counts[:2]), totals[:2], 4, seed=0)


def test_cells_of_a_hidden_type_are_one_novel_group_with_its_markers():
    reference, query = toys.pair(400, hidden="delta")
    answer = vd.annotate(reference, query, "cell_type", audit=False, seed=1)
    truth = query.obs["cell_type"].to_numpy()
    novel = (answer.table["call"] == "novel").to_numpy()
    assert novel[truth == "delta"].mean() > 0.9
    assert (truth[novel] == "delta").mean() > 0.8
    labelled = (answer.table["call"] == "label").to_numpy()
    assert (answer.table["label"].to_numpy()[labelled] == truth[labelled]).mean() > 0.95
    genes = [m["gene"] for m in answer.results["novel"][0]["markers"]]
    assert len(genes) >= 10
    assert set(genes) <= set(toys.markers("delta"))


def test_the_same_seed_gives_the_same_table_in_memory_and_from_files(tmp_path):
    reference, query = toys.pair(200)
    first = vd.annotate(reference, query, "cell_type", audit=False, markers=False)
    for name, adata in (("r", reference), ("q", query)):
        adata.write_h5ad(tmp_path / f"{name}.h5ad")
    second = vd.annotate(tmp_path / "r.h5ad", tmp_path / "q.h5ad", "cell_type", audit=False, markers=False)
    assert first.table.equals(second.table)


def test_batches_are_judged_one_by_one():
    reference, query = toys.pair(400, hidden=None)
    shifted = toys.cells(query.obs["cell_type"].to_numpy()[:200], seed=9, shift=0.6, prefix="s")
    ad = pytest.importorskip("anndata")
    both = ad.concat([query, shifted])
    both.obs["batch"] = np.repeat(["like", "shifted"], [400, 200])
    reference.obs["batch"] = "like"
    answer = vd.annotate(reference, both, "cell_type", batch_key="batch", level=0.01, audit=False, markers=False)
    promised = {b["batch"]: b["promised"] for b in answer.results["batches"]}
    assert promised == {"like": True, "shifted": False}
    assert answer.verdict is vd.Verdict.CAUTION
    words = set(answer.table["verdict"][:400])
    assert words == {"ok"}
    assert set(answer.table["verdict"][400:]) <= {"caution", "refuse"}


# ------------------------------------------------------------------------------------------------ odd input
def quick(reference, query, **options):
    return vd.annotate(reference, query, "cell_type", **{"audit": False, "markers": False, **options})


def test_seeds_are_any_numbers_of_32_bits():
    rng = np.random.default_rng(9)
    (known, types), (pool, _) = rows_of(rng, 60), rows_of(rng, 60)
    assert np.isfinite(ConformalUnits(repeats=1, seed=20240101)(known, types, pool)).all()
    with pytest.raises(vd.SettingError, match="seed=4294967296 must be less"):
        quick(*toys.pair(50), seed=2**32)


@pytest.mark.parametrize("n_empty", [4, 5])
def test_types_are_counted_without_cells_that_have_no_counts(n_empty):
    reference, query = toys.pair(100, hidden=None)
    cells = np.flatnonzero(reference.obs["cell_type"] == "delta")
    reference.X[cells[:n_empty]] = 0
    kept = np.setdiff1d(np.arange(100), cells[5:])
    with pytest.raises(vd.DataError, match=rf"fewer than 5 reference cells with counts: 'delta' \({5 - n_empty}\)"):
        quick(reference[kept].copy(), query)


def test_markers_have_the_names_of_gene_symbols_and_missing_symbols_are_not_shared():
    reference, query = toys.pair(300)
    for adata, prefix in ((reference, "x"), (query, "y")):
        adata.var["symbol"] = list(adata.var_names)
        adata.var_names = [f"{prefix}{i}" for i in range(adata.n_vars)]
        adata.var.loc[adata.var_names[-1], "symbol"] = None
    answer = quick(reference, query, gene_symbols="symbol", markers=True)
    assert answer.results["n_genes_shared"] == toys.N_GENES - 1
    assert {m["gene"] for m in answer.results["novel"][0]["markers"]} <= set(toys.markers("delta"))


def test_a_backed_query_is_left_as_it_was_and_a_view_of_it_is_saved_as_such(tmp_path):
    ad = pytest.importorskip("anndata")
    reference, query = toys.pair(300)
    query.write_h5ad(tmp_path / "q.h5ad")
    backed = ad.read_h5ad(tmp_path / "q.h5ad", backed="r")
    backed.obs[groups.GROUP] = "mine"
    before = backed.obs.copy()
    assert quick(reference, backed, markers=True).results["novel"][0]["markers"]
    assert backed.obs.equals(before)
    part = backed[50:]
    saved = quick(reference, part, markers=True).save(tmp_path / "part")
    stored = ad.read_h5ad(saved / "annotated.h5ad")
    np.testing.assert_array_equal(stored.X, query.X[50:])
    assert list(stored.obs_names) == list(query.obs_names[50:])


def test_a_loaded_annotation_is_the_saved_one(tmp_path):
    reference, query = toys.pair(200)
    query.X[:3] = 0
    answer = quick(reference, query, out=tmp_path)
    pd = pytest.importorskip("pandas")
    pd.testing.assert_frame_equal(vd.Annotation.load(tmp_path).table, answer.table, check_dtype=False)


def test_the_fewest_cells_follow_from_the_smallest_p_value_also_with_weights():
    found, _ = judged(1, share=np.array([0.7, 0.2, 0.05, 0.03, 0.02]), level=0.001)
    assert found.weighted
    assert found.fewest == np.ceil(len(found.p) * found.p.min() / 0.1)  # a cell beyond all of calibration is there
    assert found.callable


def test_calls_at_a_rate_are_counted_up_to_rounding():
    assert novelty.at_most(np.array([0.1, 0.1 + 1e-17, 0.1 + 1e-12, 0.11, np.nan]), 0.1).tolist() == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_query_that_cannot_be_written_is_named(tmp_path):
    reference, query = toys.pair(60)
    query.obs["mixed"] = [1 if i % 2 else "a" for i in range(60)]
    with pytest.raises(vd.DataError, match=r"cannot be written to annotated.h5ad .*mixed"):
        quick(reference, query, out=tmp_path)
