from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse

from vaerdict.core import DataError, SettingError, VaerdictError
from vaerdict.de import analysis
from vaerdict.de import contrasts as plan
from vaerdict.de import data as inputs
from vaerdict.de.analysis import Analysis
from vaerdict.de.options import DEOptions
from vaerdict.de.sums import CellGroups
from vaerdict.de.variable_genes import GeneSums, most_variable

ad = pytest.importorskip("anndata")
pd = pytest.importorskip("pandas")


def small(n: int = 60, genes: int = 8, seed: int = 0) -> Any:
    """Counts of two groups, A and B, with two samples and two types in each."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(3.0, size=(n, genes)).astype(np.float32)
    obs = pd.DataFrame(
        {
            "group": ["A", "B"] * (n // 2),
            "type": ["t", "t", "u", "u"] * (n // 4),
            "sample": [f"s{i % 6}" for i in range(n)],
        },
        index=[f"c{i}" for i in range(n)],
    )
    return ad.AnnData(counts, obs=obs, var=pd.DataFrame(index=[f"g{i}" for i in range(genes)]))


def analysed(adata: Any, **options: Any) -> Analysis:
    """What `differential_expression` reads of groups A and B."""
    labels = plan.Labels("group", inputs.column(adata, options.pop("groupby", "group"), role="groupby"))
    pairs = plan.pairs_to_compare(labels, options.pop("group_a", "A"), options.pop("group_b", "B"), None)
    return analysis.read(adata, DEOptions(groupby="group", pairs=tuple(pairs), **options), labels, None)


def genes_tested(found: Analysis) -> list[str]:
    """Names of the genes that are tested."""
    return [found.source.names[g] for g in found.genes(found.contrasts[0]).tested]


def counts_of(adata: Any, genes: int | None = None, **options: Any) -> inputs.Counts:
    """The counts of all cells and of the first genes."""
    return inputs.read_counts(adata, np.arange(adata.n_obs), np.arange(genes or adata.n_vars), **options)


def changed(change: Callable[[Any], Any]) -> Any:
    adata = small()
    return change(adata) or adata


def filled(value: float) -> Callable[[Any], None]:
    def change(adata: Any) -> None:
        adata.X[3, 2] = value

    return change


def normalised(logged: bool) -> Callable[[Any], None]:
    def change(adata: Any) -> None:
        share = 1e4 * adata.X / adata.X.sum(1, keepdims=True)
        adata.layers["counts"] = adata.X.copy()
        adata.X = np.log1p(share) if logged else share

    return change


def few_of_b(adata: Any) -> Any:
    return adata[np.r_[np.flatnonzero(adata.obs.group == "A"), np.flatnonzero(adata.obs.group == "B")[:2]]].copy()


BAD = {
    "missing column": (lambda a: None, {"groupby": "grop"}, SettingError, "no column of obs .did you mean 'group'"),
    "unknown group": (lambda a: None, {"group_b": "C"}, SettingError, "group_b='C' is no group.*there are A, B"),
    "equal groups": (lambda a: None, {"group_b": "A"}, SettingError, "group 'A' is compared with itself"),
    "group_b alone": (lambda a: None, {"group_a": None}, SettingError, "without group_a"),
    "too few cells": (few_of_b, {}, SettingError, "group B has 2 cells; at least 3"),
    "negative": (filled(-1), {}, DataError, r"negative values \(down to -1\)"),
    "not whole": (filled(1.5), {}, DataError, "no whole numbers, such as 1.5; start from the raw counts"),
    "NaN": (filled(np.nan), {}, DataError, "1 values that are NaN"),
    "infinite": (filled(np.inf), {}, DataError, "1 values that are NaN or infinite"),
    "log-normalised": (normalised(True), {}, DataError, "log-normalised values .*10000.*layer of raw counts .*counts"),
    "normalised": (normalised(False), {}, DataError, "holds normalised values .*10000 in every cell"),
    "no such layer": (normalised(True), {"layer": "cuonts"}, SettingError, "did you mean 'counts'"),
    "no genes": (lambda a: a[:, :0].copy(), {}, DataError, "60 cells and 0 genes"),
    "unknown gene": (lambda a: None, {"keep_genes": ["g1", "G3"]}, SettingError, "1 genes .*'G3' .did you mean 'g3'"),
    "no such symbols": (lambda a: None, {"gene_symbols": "symbol"}, SettingError, "no column of var; there are none"),
    "rare genes": (
        lambda a: None,
        {"min_cells": 99},
        DataError,
        "0 genes are seen in at least 99 of the cells of A vs B",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_its_remedy(case):
    change, options, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        analysed(changed(change), **options)


def test_good_input_passes():
    found = analysed(small())
    assert genes_tested(found) == [f"g{i}" for i in range(8)]
    assert found.warnings == []
    assert len(found.cells) == 60


KINDS = {
    "dense float32": lambda x: x,
    "dense int": lambda x: x.astype(np.int64),
    "csr": sparse.csr_matrix,
    "csr int": lambda x: sparse.csr_matrix(x.astype(np.int32)),
    "csc": sparse.csc_matrix,
    "csr array": sparse.csr_array,
    "float64": lambda x: x.astype(np.float64),
}


@pytest.mark.parametrize("backed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_matrix_gives_the_same_counts(kind, backed, tmp_path):
    adata = small()
    truth = adata.X.copy()
    adata.X = KINDS[kind](adata.X)
    if backed:
        adata.write_h5ad(tmp_path / "a.h5ad")
        adata = inputs.open_data(tmp_path / "a.h5ad")
    found = counts_of(adata).tensor().numpy()
    assert found.dtype == np.float32
    assert np.array_equal(found, truth)
    side = analysed(adata).scan.sums["A", None, None]
    assert side.total.tolist() == truth[::2].sum(0).tolist()
    assert side.squares.tolist() == (truth[::2] ** 2).sum(0).tolist()


def test_a_layer_takes_the_place_of_x():
    adata = changed(normalised(True))
    assert np.array_equal(counts_of(adata, layer="counts").tensor().numpy(), adata.layers["counts"])
    side = analysed(adata, layer="counts").scan.sums["B", None, None]
    assert side.total.tolist() == adata.layers["counts"][1::2].sum(0).tolist()


def test_empty_cells_and_rare_genes_are_left_out_and_said():
    adata = small()
    adata.X[4] = 0
    adata.X[:, 5] = 0
    adata.X[[7, 8], 5] = 2  # in two cells only
    found = analysed(adata)
    assert "g5" not in genes_tested(found)
    assert 4 not in found.cells
    assert found.side(found.contrasts[0].a).n_cells == 29
    assert found.warnings == ["1 of 60 cells have no counts; left out."]
    assert found.selection == "7 of 8 genes: seen in at least 9 of the cells compared"
    assert "g5" in genes_tested(analysed(adata, min_cells=2))


def test_which_genes_are_tested_does_not_depend_on_the_labels():
    """Only on the size of the smaller side: a gene of one side only is tested like one of both."""
    adata = small()
    adata.X[:, 5] = 0
    adata.X[:20:2, 5] = 1  # ten cells of A
    assert "g5" in genes_tested(analysed(adata))
    swapped = genes_tested(analysed(adata, group_a="B", group_b="A"))
    assert swapped == genes_tested(analysed(adata))


def test_libraries_and_rates_are_of_all_genes_whichever_are_tested():
    adata = small(genes=40)
    total = float(adata.X[::2].sum())
    for options in ({}, {"n_top_genes": 5}):
        found = analysed(adata, **options)
        side = found.side(found.contrasts[0].a)
        assert float(side.library) == total
        np.testing.assert_allclose(side.rate.numpy(), adata.X[::2].sum(0) / total)


def test_genes_of_one_name_are_told_apart():
    adata = small()
    adata.var_names = ["a", "b", "a", "a-1", "a", "c", "d", "e"]
    found = analysed(adata)
    assert found.source.names == ["a", "b", "a-2", "a-1", "a-3", "c", "d", "e"]
    assert "2 genes had the name of another" in found.warnings[0]


def test_variable_genes_are_chosen_and_failure_is_said(monkeypatch):
    adata = small(genes=40)
    adata.X[:, 7] = 6 * (np.arange(60) % 2)  # the same mean as the others
    adata.X[:, 11] = 12 * (np.arange(60) % 4 == 0)
    found = analysed(adata, n_top_genes=5)
    assert len(genes_tested(found)) == 5
    assert {"g7", "g11"} <= set(genes_tested(found))
    assert found.selection.startswith("5 of 40 genes: seen in at least 9 of the cells compared")
    assert found.selection.endswith("5 most variable (seurat_v3)")

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("near singularities")

    monkeypatch.setattr(inputs, "most_variable", fail)
    found = analysed(adata, n_top_genes=5)
    assert len(genes_tested(found)) == 40
    assert "near singularities" in found.selection


def test_genes_asked_for_are_tested_whatever_their_variance():
    adata = small(genes=40)
    adata.X[:, 7] = 6 * (np.arange(60) % 2)
    adata.X[:, 3] = 0
    adata.X[:2, 3] = 1  # too rare to be tested
    found = analysed(adata, n_top_genes=5, keep_genes=("g20", "g7", "g3", "g20"))
    assert len(genes_tested(found)) == 6
    assert {"g7", "g20"} <= set(genes_tested(found))
    assert found.warnings == ["seen in fewer than 9 of the cells compared and not tested: g3."]


def test_symbols_name_the_genes_and_the_names_of_the_file_are_kept():
    adata = small()
    adata.var["symbol"] = ["CD3D", "CD3D", None, "LYZ", *"abcd"]
    found = analysed(adata, gene_symbols="symbol", keep_genes=("LYZ",))
    assert found.source.names == ["CD3D", "CD3D-1", "g2", "LYZ", *"abcd"]
    assert found.source.ids == list(adata.var_names)
    assert analysed(adata).source.ids is None


def uneven(n: int, genes: int) -> Any:
    """Counts of which some are far above what a gene's mean and variance lead to expect."""
    adata, rng = small(n, genes), np.random.default_rng(1)
    rate = np.exp(rng.normal(0, 1.5, genes)) * rng.gamma(2.0, 0.5, (n, genes))
    adata.X = rng.poisson(rate).astype(np.float32)
    adata.X[rng.integers(n, size=20), rng.integers(genes, size=20)] = 500
    return adata


def test_the_most_variable_genes_are_scanpys(monkeypatch):
    scanpy = pytest.importorskip("scanpy")
    monkeypatch.setattr(inputs, "BLOCK", 37)  # several blocks, the last one smaller
    adata = uneven(120, 300)
    adata.X = sparse.csr_matrix(adata.X)
    found = genes_tested(analysed(adata, n_top_genes=50, min_cells=1))
    theirs = scanpy.pp.highly_variable_genes(adata, flavor="seurat_v3", n_top_genes=50, inplace=False)
    assert found == list(adata.var_names[theirs["highly_variable"]])


def test_a_scan_is_the_same_in_blocks_of_any_size():
    adata = uneven(120, 40)
    adata.X[3] = 0
    matrix = sparse.csr_matrix(adata.X.astype(np.float64))
    groups = CellGroups({"a": np.arange(50), "b": np.arange(40, 120)}, 120)
    one, many = (
        inputs.scan((matrix[start : start + size] for start in range(0, 120, size)), groups, 40) for size in (120, 11)
    )
    assert np.array_equal(one.totals, many.totals)
    assert one.totals.tolist() == adata.X.sum(1).tolist()
    for part, same in zip((*one.sums["b"][:6], *one.genes), (*many.sums["b"][:6], *many.genes), strict=True):
        assert np.array_equal(np.asarray(part), np.asarray(same))
    chosen = most_variable(one.genes.take(np.arange(30)), 120, lambda: [matrix[:, :30]], 5)
    assert len(set(chosen)) == 5
    assert GeneSums.of(matrix).squares.tolist() == (adata.X**2).sum(0).tolist()


@pytest.mark.parametrize("kind", ["csr", "dense float32"])
def test_what_is_too_much_to_keep_is_read_again(kind, tmp_path, monkeypatch):
    """Rows from disk are those from memory: in any order, of some cells and genes, with batches behind, and sent."""
    adata, cpu = uneven(120, 40), torch.device("cpu")
    adata.X[5] = 0
    adata.X = KINDS[kind](adata.X)
    adata.write_h5ad(tmp_path / "a.h5ad")
    batch = torch.eye(2).repeat(60, 1)[:119]
    kept = counts_of(inputs.open_data(tmp_path / "a.h5ad"), 20)
    monkeypatch.setattr(inputs, "MEMORY", 100)
    again = counts_of(inputs.open_data(tmp_path / "a.h5ad"), 20)
    assert isinstance(again.matrix, inputs.StoredCounts)
    assert not isinstance(kept.matrix, inputs.StoredCounts)
    assert (again.digest, again.genes) == (kept.digest, kept.genes)
    assert np.array_equal(again.totals, kept.totals)
    memory, disk = (counts.rows(cpu, batch) for counts in (kept, again))
    disk = pickle.loads(pickle.dumps(disk))
    assert memory.n == disk.n == 119
    for index in (torch.arange(119), torch.tensor([7, 3, 3, 118]), torch.tensor([0, 118])):
        assert torch.equal(disk.take(index), memory.take(index))
        assert torch.equal(disk.select(index).take(torch.tensor([1])), memory.take(index[1:2]))


def test_part_of_a_file_is_kept_for_its_rows_are_others(tmp_path, monkeypatch):
    uneven(60, 20).write_h5ad(tmp_path / "a.h5ad")
    monkeypatch.setattr(inputs, "MEMORY", 100)
    whole = inputs.open_data(tmp_path / "a.h5ad")
    found = counts_of(whole[10:])
    assert not isinstance(found.matrix, inputs.StoredCounts)
    assert torch.equal(found.tensor(), counts_of(whole).tensor()[10:])


def broken(tmp_path: Any, case: str) -> Any:
    path = tmp_path / f"{case}.h5ad"
    if case == "empty":
        path.write_bytes(b"")
    elif case == "text":
        path.write_text("gene,cell\n1,2\n")
    elif case == "truncated":
        small().write_h5ad(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("absent", "does not exist"),
        ("empty", "is empty"),
        ("text", "cannot be read as .h5ad"),
        ("truncated", "cannot be read as .h5ad .*cut short"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, case, message):
    path = broken(tmp_path, case)
    with pytest.raises(DataError, match=message):
        inputs.open_data(path)


def labels(adata: Any, **keys: str) -> plan.Labels:
    found = {name: inputs.column(adata, key, role=name) for name, key in keys.items()}
    return plan.Labels("group", inputs.column(adata, "group", role="groupby"), **found)


def test_within_makes_a_contrast_of_each_type_and_says_which_it_leaves_out():
    adata, said = small(), []
    adata.obs["type"] = adata.obs["type"].astype(object)
    adata.obs.loc[adata.obs_names[:2], "type"] = "rare"
    found = plan.contrasts(labels(adata, within="type"), [("A", "B")], said)
    assert [c.name for c in found] == ["A vs B within t", "A vs B within u"]
    assert len(said) == 1
    assert "within rare has 1 cell;" in said[0]


def test_names_of_groups_cannot_be_taken_for_ours():
    """A group called "not X" is not the rest of X, nor one called "rest" the rest."""
    names = ["responder", "not responder", "'not responder'", "rest", "a vs b", "b", "a"]
    group = np.repeat(np.array(names, dtype=object), np.arange(3, 10))
    pairs = [*plan.pairs_to_compare(plan.Labels("g", group), None, None, None), ("a", "rest"), ("a", "b")]
    found = plan.contrasts(plan.Labels("g", group), pairs, [])
    assert len({c.name for c in found}) == len(found) == 9
    cells = {}
    for side in (side for c in found for side in (c.a, c.b)):
        assert cells.setdefault(side.name, side.cells.tolist()) == side.cells.tolist()
    assert len(cells) == 2 * len(names)
    by_name = {c.name: c for c in found}
    assert by_name["responder vs rest"].b.name == "not responder"
    assert (by_name["a vs rest"].rest, by_name["a vs 'rest'"].rest) == (True, False)
    assert len(by_name["a vs 'rest'"].b.cells) == 6


def batched(batch: list[str | None]) -> plan.Labels:
    """Cells of groups A, B and C in turn, in these batches."""
    group = np.array(["A", "B", "C"] * (len(batch) // 3), dtype=object)
    return plan.Labels("group", group, batch=np.array(batch, dtype=object))


def test_what_batches_confound_is_left_out_before_anything_is_trained():
    known, said = batched(["x", "x", "y"] * 6), []
    (found,) = plan.contrasts(known, [("A", "B"), ("A", "C")], said)
    assert (found.name, found.used) == ("A vs B", (6, 6))
    assert said == [
        "left out: no batch holds 2 cells of both sides of A vs C: groups and batches cannot be told apart; leave "
        "batch_key out, or compare other groups."
    ]
    with pytest.raises(DataError, match="sides of A vs C: groups and batches cannot be told apart"):
        plan.contrasts(known, [("A", "C")], [])


def test_cells_whose_batch_lacks_the_other_side_are_counted():
    said: list[str] = []
    known = batched(["x", "x", "x"] * 4 + ["a", "x", "x"] * 2 + [None, "b", "x"] + ["one", "one", "x"])
    (found,) = plan.contrasts(known, [("A", "B")], said)
    assert (len(found.a.cells), found.used) == (8, (4, 6))
    assert said == [
        "A vs B: 4 of 8 cells of A and 2 of 8 cells of B are not compared because their batches do not hold both sides."
    ]


def test_samples_and_batches_that_cannot_be_told_apart_are_refused():
    group = np.array(["A", "A", "B", "B"] * 3, dtype=object)
    sample = np.array(["a0", "a1", "b0", "b1"] * 3, dtype=object)

    def used(*batch: str, paired: bool = False) -> tuple[int, int]:
        owner = np.array(["s0", "s1"] * 6, dtype=object) if paired else sample
        known = plan.Labels("group", group, sample=owner, batch=np.array(batch * 3, dtype=object))
        return plan.contrasts(known, [("A", "B")], [])[0].used

    assert used("x", "x", "x", "y") == (6, 3)
    assert used("x", "x", "y", "y", paired=True) == (6, 6)
    with pytest.raises(DataError, match="no batch holds 2 cells of both sides"):
        used("x", "x", "y", "y")
    with pytest.raises(DataError, match="no batch holds two samples of a side of A vs B beside one of the other"):
        used("x", "y", "x", "y")


def test_small_samples_and_cells_of_none_are_counted():
    adata, said = small(), []
    sample = adata.obs["sample"].astype(object).to_numpy()
    sample[[0, 2]], sample[[4, 6, 8]] = "tiny", None
    adata.obs["sample"] = sample
    (found,) = plan.contrasts(labels(adata, sample="sample"), [("A", "B")], said)
    assert len(found.a.cells) == 25
    assert said == ["left out of A: 1 samples of fewer than 3 cells (2 cells) and 3 cells of no sample."]


@pytest.mark.parametrize(
    ("shared", "paired", "words"),
    [
        (0, False, []),
        (1, False, ["A vs B: 1 of 5 samples have cells on both sides; none are paired."]),
        (3, True, []),
    ],
)
def test_samples_are_pairs_if_all_are_on_both_sides(shared, paired, words):
    adata, said = small(), []
    owner = np.arange(60) // 2 % 3
    adata.obs["sample"] = [f"s{i}" if i < shared else f"{g}{i}" for i, g in zip(owner, adata.obs["group"], strict=True)]
    (found,) = plan.contrasts(labels(adata, sample="sample"), [("A", "B")], said)
    assert (found.paired, said) == (paired, words)
    assert plan.contrasts(labels(adata), [("A", "B")], [])[0].paired is None


@pytest.mark.parametrize("name", [0, "0", 0.0, np.float32(0), np.int64(0)])
def test_whole_numbers_name_groups_however_they_are_written(name):
    adata = small()
    adata.obs["leiden"] = np.where(np.arange(60) % 7 == 0, np.nan, np.arange(60) % 3)
    found = inputs.column(adata, "leiden", role="groupby")
    assert set(found) == {"0", "1", "2", None}
    assert inputs.check_group(name, found, role="group_a", column="leiden") == "0"
    adata.obs["dose"] = [0.5, 1.0] * 30
    assert set(inputs.column(adata, "dose", role="groupby")) == {"0.5", "1"}


def test_samples_are_the_units_and_too_few_are_refused():
    adata = small()
    (found,) = plan.contrasts(labels(adata, sample="sample"), [("A", "B")], [])
    assert sorted(found.a.samples) == ["s0", "s2", "s4"]
    adata.obs["sample"] = ["one"] * 60
    with pytest.raises(SettingError, match="1 samples of 3 cells or more; samples as replicates need at least 2"):
        plan.contrasts(labels(adata, sample="sample"), [("A", "B")], [])


def test_one_against_the_rest_and_all_pairs():
    known = labels(small())
    assert plan.pairs_to_compare(known, None, None, None) == [("A", None), ("B", None)]
    assert plan.all_pairs(["A", "B", "C"]) == [("A", "B"), ("A", "C"), ("B", "C")]
    first, second = plan.contrasts(known, [("A", None), ("B", None)], [])
    assert first.name == "A vs rest"
    assert first.a.cells.tolist() == second.b.cells.tolist()


def test_cells_without_a_label_are_in_no_group():
    adata = small()
    adata.obs["group"] = adata.obs["group"].astype(object)
    adata.obs.loc[adata.obs_names[:6], "group"] = None
    known = labels(adata)
    (found,) = plan.contrasts(known, [("A", None)], [])
    assert min(found.b.cells.tolist()) >= 6
    assert known.atoms()[:6].tolist() == [-1] * 6


def test_batches_become_columns():
    hot, names = inputs.one_hot(np.array(["x", "y", "x"], dtype=object), role="batch_key")
    assert names == ["x", "y"]
    assert hot.tolist() == [[1, 0], [0, 1], [1, 0]]
    assert inputs.one_hot(np.array(["x", "x"], dtype=object), role="batch_key")[0].shape == (2, 0)
    with pytest.raises(VaerdictError, match="1 of 2 cells have no batch_key"):
        inputs.one_hot(np.array(["x", None], dtype=object), role="batch_key")
