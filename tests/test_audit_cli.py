"""The command `vaerdict audit` on a saved scvi-tools model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from vaerdict.auditing.saved import audit_saved
from vaerdict.core import SettingError
from vaerdict.datasets.genes import appendix
from vaerdict.optional import isolated

scvi = pytest.importorskip("scvi", reason="scvi-tools is not installed (extra `scvi`)")
anndata = pytest.importorskip("anndata")

N_CELLS, N_GENES = 120, 15


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Path]:
    """The folder of a model, hardly trained, and the file of its cells."""
    folder, data = tmp_path_factory.mktemp("audit"), appendix(0, n_cells=N_CELLS, n_genes=N_GENES)
    adata = anndata.AnnData(data.counts.numpy())
    adata.var_names = [f"gene-{i}" for i in range(N_GENES)]
    adata.obs["type"] = np.array(["alpha", "<b>"])[data.labels.numpy()]
    adata.obs["batch"] = np.array(["one", "two"])[np.arange(N_CELLS) % 2]
    adata.write_h5ad(folder / "cells.h5ad")
    with isolated(0):
        scvi.model.SCVI.setup_anndata(adata, batch_key="batch")
        model = scvi.model.SCVI(adata, n_latent=3, n_hidden=8, gene_likelihood="nb")
        model.train(max_epochs=3, accelerator="cpu", enable_progress_bar=False)
        model.save(str(folder / "model"))
    return folder / "model", folder / "cells.h5ad"


def test_a_saved_model_is_audited(command, saved, tmp_path):
    code, out, err = command("audit", *saved, "--groupby", "type", "--n-cells", 40, "--out", tmp_path / "run", "--json")
    assert code == 0, err
    results = json.loads(out)
    assert results["n_observations"] == 40
    assert results["model"] == "SCVI in model"
    assert {row["group"] for row in results["groups"]} == {"alpha", "<b>"}
    names = [row["name"] for row in results["quantities"]]
    assert names == ["latent", "reconstruction", "normalised expression"]
    assert results["quantities"][2]["features"][0]["feature"].startswith("gene-")
    assert results["evidence"]["elbo"] < results["evidence"]["lower"] + 0.1
    source = (tmp_path / "run" / "report.html").read_text()
    assert "&lt;b&gt;" in source
    assert "<b>" not in source
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert len(manifest["data_sha256"]) == 64
    assert (tmp_path / "run" / "audit.csv").read_text().count("\n") == 41
    assert (tmp_path / "run" / "audit.md").read_text().startswith("### Audit of the encoder of SCVI")


def test_its_summary_is_printed(command, saved, tmp_path):
    code, out, _ = command("audit", *saved, "--n-cells", 20, "--workers", 1, "--out", tmp_path)
    assert code == 0
    assert "Audit of the encoder of SCVI in model" in out
    assert "Page: " in out
    code, _, err = command("audit", *saved, "--groupby", "typ", "--out", tmp_path)
    assert code == 2
    assert "did you mean 'type'?" in err


def test_a_pickle_from_strangers_is_refused(command, saved, tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    content = torch.load(saved[0] / "model.pt", weights_only=False)
    (tmp_path / "model").mkdir()
    torch.save(content | {"extra": Malicious()}, tmp_path / "model" / "model.pt")
    code, _, err = command("audit", tmp_path / "model", saved[1], "--out", tmp_path / "run")
    assert code == 2
    assert "posix.mkdir" in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()


def test_a_model_of_another_class_is_refused_by_its_name(command, saved, tmp_path):
    content = torch.load(saved[0] / "model.pt", weights_only=False)
    content["attr_dict"]["registry_"]["model_name"] = "OtherVI"
    torch.save(content, tmp_path / "model.pt")
    code, _, err = command("audit", tmp_path, saved[1])
    assert code == 2
    assert "'OtherVI'" in err


def test_a_folder_of_another_experiment_is_refused(command, saved, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"experiment": "de"}))
    code, _, err = command("audit", *saved, "--out", tmp_path)
    assert code == 2
    assert "'de'" in err


def test_all_cells_are_read_in_order(saved):
    audit = audit_saved(*saved)
    assert audit.names == [str(i) for i in range(N_CELLS)]
    with pytest.raises(SettingError, match="n_cells=0"):
        audit_saved(*saved, n_cells=0)
