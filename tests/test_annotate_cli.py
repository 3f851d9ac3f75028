"""The command `vaerdict annotate` end to end on simulated counts: files, refusal under a shift, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from annotate_toys import markers, pair
from vaerdict.annotation import annotate
from vaerdict.annotation.columns import CELLS
from vaerdict.annotation.options import AnnotateOptions
from vaerdict.cli.annotate import annotate as annotate_command
from vaerdict.cli.options import option_names
from vaerdict.options import options_of

ad, pd = pytest.importorskip("anndata"), pytest.importorskip("pandas")
pytest.importorskip("sklearn")
pytest.importorskip("typer")

COLUMNS = ["cell", "call", "label", "prob", "p_novel", "q_novel", "unit", "verdict"]
QUICK = ("--no-audit", "--no-markers")


@pytest.fixture
def command(command):
    """Run `vaerdict annotate ...`."""
    return lambda *words: command("annotate", *words)


def written(folder: Path, reference: Any, query: Any) -> tuple[Path, Path]:
    paths = folder / "reference.h5ad", folder / "query.h5ad"
    for path, adata in zip(paths, (reference, query), strict=True):
        adata.write_h5ad(path)
    return paths


@pytest.fixture
def files(tmp_path):
    """The files of reference and query, one type hidden."""
    return written(tmp_path, *pair())


@pytest.fixture
def shifted(tmp_path):
    """The same with a batch effect of the query; the types of a third of its known cells are in a column."""
    reference, query = pair(shift=0.3)
    known = (query.obs["cell_type"] != "delta") & (np.arange(query.n_obs) % 3 == 0)
    query.obs["sorted"] = np.where(known, query.obs["cell_type"], "")
    query.obs["few"] = np.where(np.arange(query.n_obs) < 10, "alpha", "")
    return written(tmp_path, reference, query)


def test_help_documents_every_column_and_option(command):
    code, out, _ = command("--help")
    assert code == 0
    assert [column.name for column in CELLS] == COLUMNS
    assert all(f"{name}:" in out for name in COLUMNS)
    assert all(flag in out for option in options_of(AnnotateOptions) for flag in option.flag.split("/"))
    assert "Example:" in out
    assert "exit code is 0" in " ".join(out.split())


# --------------------------------------------------------------------------------------------------------- whole runs
def test_a_hidden_type_is_called_novel(command, files, tmp_path):
    """At most a third of the calls are false, where 10 % are expected, and most hidden cells are called."""
    folder = tmp_path / "run"
    code, out, err = command(*files, "--labels", "cell_type", "--out", folder)
    assert (code, err) == (0, "")
    truth = ad.read_h5ad(files[1]).obs["cell_type"].to_numpy()
    table = pd.read_csv(folder / "cells.csv", dtype={"unit": str})
    assert table.columns.tolist() == COLUMNS
    novel = (table["call"] == "novel").to_numpy()
    assert (truth[novel] != "delta").mean() < 1 / 3
    assert novel[truth == "delta"].mean() > 0.7
    labelled = (table["call"] == "label").to_numpy()
    assert (table["label"].to_numpy()[labelled & (truth != "delta")] == truth[labelled & (truth != "delta")]).all()
    assert set(table["verdict"]) == {"ok"}

    assert out.startswith(f"Of 300 cells {labelled.sum()} have a label, {novel.sum()} are novel")
    assert "found if absent" in out
    genes = out.split("higher than in other cells (LFC): ")[1].splitlines()[0].split(", ")
    assert {gene.split()[0] for gene in genes} <= set(markers("delta"))
    assert f"Page: {folder / 'report.html'}" in out
    assert {path.name for path in folder.iterdir()} == {
        "cells.csv", "cells.parquet", "annotated.h5ad", "results.json", "manifest.json", "report.html", "figures",
        "run.json",
    }  # fmt: skip


def test_a_path_and_data_in_memory_give_the_same_files(files, tmp_path):
    options = {"audit": False}
    on_disk = annotate(*files, "cell_type", out=tmp_path / "disk", **options)
    annotate(*map(ad.read_h5ad, files), "cell_type", out=tmp_path / "memory", **options)
    assert (tmp_path / "disk" / "cells.csv").read_bytes() == (tmp_path / "memory" / "cells.csv").read_bytes()
    for name in ("disk", "memory"):
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / name / "cells.parquet"), on_disk.table)
        stored = ad.read_h5ad(tmp_path / name / "annotated.h5ad")
        for column in COLUMNS[1:]:
            expected = on_disk.table[column].to_numpy()
            np.testing.assert_array_equal(stored.obs[f"vaerdict_{column}"].to_numpy(), expected)
        np.testing.assert_array_equal(stored.X, ad.read_h5ad(files[1]).X)
        assert set(stored.obs) == {"cell_type", *(f"vaerdict_{column}" for column in COLUMNS[1:])}
        assert stored.obsm["X_vaerdict"].shape == (300, 30)
    assert "vaerdict_call" not in ad.read_h5ad(files[1]).obs


def test_the_same_seed_gives_the_same_files(command, files, tmp_path):
    for name in ("one", "two"):
        assert command(*files, "--labels", "cell_type", *QUICK, "--out", tmp_path / name)[0] == 0
    assert (tmp_path / "one" / "cells.csv").read_bytes() == (tmp_path / "two" / "cells.csv").read_bytes()
    assert (tmp_path / "one" / "report.html").stat().st_size > 20_000


def test_under_a_shift_the_rate_is_refused_and_the_exit_code_is_zero(command, shifted, tmp_path):
    code, out, err = command(*shifted, "--labels", "cell_type", "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    assert "No rate is stated for novel cells, and none is called" in out
    assert "--calibration=COLUMN" in out
    assert "Clusters that the reference explains least" in out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["verdict"]["verdict"] == "REFUSE"
    assert results["batches"][0]["median_auroc"] > 0.9
    table = pd.read_csv(tmp_path / "run" / "cells.csv")
    assert not (table["call"] == "novel").any()
    assert table[["p_novel", "q_novel"]].isna().all().all()
    assert set(table["verdict"]) == {"caution", "refuse"}
    truth = ad.read_h5ad(shifted[1]).obs["cell_type"].to_numpy()
    most = table["unit"].astype(str) == results["ranking"][0]["unit"]
    assert (truth[most.to_numpy()] == "delta").mean() > 0.8  # the hidden type leads the ranking


def test_calibration_in_the_query_restores_the_rate(command, shifted, tmp_path):
    words = (*shifted, "--labels", "cell_type", "--calibration", "sorted", *QUICK, "--out", tmp_path / "run", "--json")
    code, out, err = command(*words)
    assert (code, err) == (0, "")
    assert json.loads(out)["verdict"]["verdict"] == "OK"
    truth = ad.read_h5ad(shifted[1]).obs["cell_type"].to_numpy()
    novel = (pd.read_csv(tmp_path / "run" / "cells.csv")["call"] == "novel").to_numpy()
    assert novel[truth == "delta"].mean() > 0.7
    assert (truth[novel] != "delta").mean() < 1 / 3


# ---------------------------------------------------------------------------------------------------------- bad input
def refused(command, paths: tuple[Path, Path], *words: object, out: Path) -> str:
    """The one line of an error with exit code 2."""
    code, printed, err = command(*paths, *words, "--out", out)
    assert (code, printed) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("error: ")
    assert not (out / "cells.csv").exists()
    return err


def renamed(adata: Any) -> None:
    adata.var_names = [f"h{i}" for i in range(adata.n_vars)]


def with_ids(adata: Any) -> None:
    adata.var["symbol"] = adata.var_names
    adata.var_names = [f"ENSG{i:011}" for i in range(adata.n_vars)]


def log_normalised(adata: Any) -> None:
    adata.X = np.log1p(1e4 * adata.X / adata.X.sum(1, keepdims=True))


def with_one_rare(adata: Any) -> None:
    adata.obs.iloc[0, 0] = "rare"


def without_labels(adata: Any) -> None:
    adata.obs["cell_type"] = ""


def of_one_type(adata: Any) -> None:
    adata.obs["cell_type"] = "alpha"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (renamed, "reference and query share 0 genes (reference: h0, h1, h2; query: g0, g1, g2)"),
        (with_ids, "column 'symbol' of the reference matches 200 of them: name it as --gene-symbols"),
        (log_normalised, "reference: X holds log-normalised values"),
        (with_one_rare, "these types have fewer than 5 reference cells: 'rare' (1)"),
        (without_labels, "no cell of the reference has a label in 'cell_type'"),
        (of_one_type, "--labels='cell_type' names one type only, 'alpha'"),
    ],
)
def test_a_bad_reference_is_one_line(command, tmp_path, spoil, message):
    reference, query = pair(60)
    spoil(reference)
    assert message in refused(command, written(tmp_path, reference, query), "--labels", "cell_type", out=tmp_path / "x")


def test_gene_symbols_are_the_remedy(command, tmp_path):
    reference, query = pair()
    with_ids(reference)
    paths = written(tmp_path, reference, query)
    words = ("--labels", "cell_type", "--gene-symbols", "symbol", *QUICK, "--out", tmp_path / "run", "--json")
    code, out, _ = command(*paths, *words)
    assert code == 0
    assert json.loads(out)["n_genes_shared"] == 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--labels", "cell_typ"), "--labels='cell_typ' is no column of obs (did you mean 'cell_type'?)"),
        (("--labels", "cell_type", "--calibration", "few"), "--calibration='few' names the type of 10 cells"),
        (("--labels", "cell_type", "--calibration", "nothing"), "--calibration='nothing' is no column of obs"),
        (("--labels", "cell_type", "--batch-key", "donor"), "--batch-key='donor' is no column of obs"),
        (("--labels", "cell_type", "--layer", "raw"), "reference: --layer='raw' is not there"),
        (("--labels", "cell_type", "--gene-symbols", "name"), "--gene-symbols='name' is a column of var in neither"),
        (("--labels", "cell_type", "--fdr", "1.5"), "--fdr=1.5 must lie strictly between 0 and 1"),
        (("--labels", "cell_type", "--model", "nowhere"), "nowhere holds no model.pt"),
    ],
)
def test_bad_options_are_one_line_and_named_as_on_the_command_line(command, shifted, tmp_path, words, message):
    assert message in refused(command, shifted, *words, out=tmp_path / "x")


def test_a_missing_file_and_a_folder_of_another_experiment_are_refused(command, files, tmp_path):
    missing = (files[0], tmp_path / "no.h5ad")
    assert "no.h5ad does not exist" in refused(command, missing, "--labels", "cell_type", out=tmp_path / "x")
    (tmp_path / "de").mkdir()
    (tmp_path / "de" / "results.json").write_text(json.dumps({"experiment": "de"}))
    assert "'de'" in refused(command, files, "--labels", "cell_type", out=tmp_path / "de")
    assert command(*files)[0] == 2  # without --labels


def test_messages_name_options_and_leave_words_alone():
    message = "layer='raw': name a layer or batch_key; my_layer=2, --layer=3, labels='layer'"
    expected = "--layer='raw': name a layer or --batch-key; my_layer=2, --layer=3, --labels='layer'"
    assert option_names(message, annotate_command) == expected
