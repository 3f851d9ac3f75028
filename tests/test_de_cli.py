from __future__ import annotations

import json

import pytest

from test_de_pipeline import simulated
from vaerdict.cli import de as cli_de
from vaerdict.core import SettingError
from vaerdict.de import columns
from vaerdict.de.options import DEOptions
from vaerdict.models.scvi.saved import load_scvi
from vaerdict.optional import isolated
from vaerdict.options import options_of

ad = pytest.importorskip("anndata")


@pytest.fixture
def command(command):
    """Run `vaerdict de ...`."""
    return lambda *words: command("de", *words)


@pytest.fixture
def data(tmp_path):
    simulated(n=120).write_h5ad(tmp_path / "data.h5ad")
    return tmp_path / "data.h5ad"


def test_help_documents_every_column_and_has_an_example(command):
    code, out, _ = command("--help")
    assert code == 0
    assert all(column.name in out for column in columns.DE)
    assert all(flag in out for option in options_of(DEOptions) for flag in option.flag.split("/"))
    assert "Example:" in out
    assert "--sample-key" in out


def test_a_run_writes_its_folder_and_says_the_verdict_first(command, data, tmp_path):
    out_dir = tmp_path / "run"
    words = (data, "--groupby", "group", "--groups", "A", "B", "--quick", "--device", "cpu", "--out", out_dir)
    code, out, err = command(*words)
    assert (code, err) == (0, "")
    assert "genes are called in A vs B at an expected FDR of 0.05" in out.splitlines()[0]
    assert out.splitlines()[1] == "Tested: 40 of 40 genes: seen in at least 10 of the cells compared."
    assert "k-hat" not in out
    assert "higher in A: g" in out
    assert "g0" in out
    assert {"de.csv", "results.json", "manifest.json", "not_tested.csv", "report.html"} <= {
        path.name for path in out_dir.iterdir()
    }
    first = (out_dir / "de.csv").read_bytes()
    code, out, _ = command(*words, "--json")
    assert code == 0
    assert json.loads(out)["contrasts"][0]["name"] == "A vs B"
    assert (out_dir / "de.csv").read_bytes() == first


def test_workers_change_nothing(command, data, tmp_path):
    words = (data, "--groupby", "group", "--groups", "A", "B", "--quick", "--check-model", "--device", "cpu")
    for n in (1, 2):
        assert command(*words, "--workers", n, "--out", tmp_path / str(n))[0] == 0
    first, second = ((tmp_path / str(n) / "de.csv").read_bytes() for n in (1, 2))
    assert first == second


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--groupby", "group", "--groups", "A", "B", "--engine", "dask"), "choose local or ray"),
        (("--groupby", "group", "--groups", "A", "B", "--address", "h:1"), "say --engine ray too"),
        (("--groupby", "grp", "--groups", "A", "B"), "error: --groupby='grp' is no column of obs"),
        (("--groupby", "group", "--groups", "A", "Z"), "--groups='Z' is no group of 'group'"),
        (("--groupby", "group"), "name two with --groups"),
        (("--groupby", "group", "--groups", "A", "B", "--keep-genes", "g1, G2"), "'G2' (did you mean 'g2'?)"),
        (
            ("--groupby", "group", "--groups", "A", "B", "--gene-symbols", "name"),
            "--gene-symbols='name' is no column of",
        ),
        (("--groupby", "group", "--groups", "A", "B", "--scale", "ln"), "--scale='ln'"),
        (("--groupby", "group", "--groups", "A", "B", "--model", "nowhere"), "nowhere holds no model.pt"),
        (("--groupby", "group", "--groups", "A", "B", "--layer", "raw"), "--layer='raw' is not there"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(command, data, tmp_path, words, message):
    code, _, err = command(data, *words, "--out", tmp_path / "bad")
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "bad" / "de.csv").exists()


def test_a_missing_file_is_named(command, tmp_path):
    code, _, err = command(tmp_path / "no.h5ad", "--groupby", "group", "--groups", "A", "B")
    assert code == 2
    assert "does not exist" in err


def test_groups_on_the_command_line_become_pairs():
    assert cli_de.pairs_of(["A", "B"], False) == [("A", "B")]
    assert cli_de.pairs_of(["A", "B", "C"], False) == [("A", "B"), ("A", "C"), ("B", "C")]
    assert cli_de.pairs_of(["A"], False) == [("A", None)]
    assert cli_de.pairs_of(["A", "B"], True) == [("A", None), ("B", None)]
    assert cli_de.pairs_of([], True) is None
    with pytest.raises(SettingError, match="--one-vs-rest"):
        cli_de.pairs_of([], False)


@pytest.fixture
def saved(data, tmp_path):
    """The folder of a scvi-tools model of some kind, hardly trained, and its cells."""
    scvi = pytest.importorskip("scvi")

    def save(kind, **setup):
        adata, make = ad.read_h5ad(data), getattr(scvi.model, kind)
        with isolated(0):
            make.setup_anndata(adata, **setup)
            model = make(adata)
            model.train(max_epochs=1, accelerator="cpu", enable_progress_bar=False, logger=False)
            model.save(str(tmp_path / kind))
        return tmp_path / kind, adata

    return save


def test_a_saved_model_is_loaded_as_what_it_is(saved):
    assert type(load_scvi(*saved("LinearSCVI"))).__name__ == "LinearSCVI"


def test_a_saved_scanvi_is_refused_with_the_remedy(command, data, saved, tmp_path):
    folder, _ = saved("SCANVI", labels_key="type", unlabeled_category="none")
    words = (data, "--groupby", "group", "--groups", "A", "B", "--model", folder, "--out", tmp_path / "run")
    code, _, err = command(*words)
    assert (code, "pass the SCVI that it was made from" in " ".join(err.split())) == (2, True)
