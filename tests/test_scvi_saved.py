"""Saved scvi-tools models are read without running code from their file."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from vaerdict.core import DataError
from vaerdict.datasets.genes import appendix
from vaerdict.models.scvi.saved import load_scvi, read_scvi
from vaerdict.optional import isolated

scvi = pytest.importorskip("scvi", reason="scvi-tools is not installed (extra `scvi`)")
anndata = pytest.importorskip("anndata")


@pytest.fixture(scope="module")
def cells():
    data = appendix(0, n_cells=60, n_genes=12)
    adata = anndata.AnnData(data.counts.numpy())
    adata.obs["type"] = np.array(["a", "b"])[data.labels.numpy()]
    return adata


@pytest.fixture(scope="module")
def folder(cells, tmp_path_factory) -> Path:
    """A model with the history of its training, which holds tables of pandas."""
    adata, path = cells.copy(), tmp_path_factory.mktemp("saved") / "model"
    with isolated(0):
        scvi.model.SCVI.setup_anndata(adata, labels_key="type")
        model = scvi.model.SCVI(adata, n_latent=2, n_hidden=4)
        model.train(max_epochs=1, accelerator="cpu", enable_progress_bar=False)
        model.save(str(path))
    return path


@pytest.fixture
def altered(folder, tmp_path):
    """A folder whose file holds the saved model with changes."""

    def write(**changes: object) -> Path:
        saved = torch.load(folder / "model.pt", weights_only=False)
        torch.save(saved | changes, tmp_path / "model.pt")
        return tmp_path

    return write


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_model_is_read_whole(folder, cells):
    model = load_scvi(folder, cells.copy())
    assert type(model).__name__ == "SCVI"
    saved = torch.load(folder / "model.pt", weights_only=False)["model_state_dict"]
    for name, value in model.module.state_dict().items():
        torch.testing.assert_close(value, saved[name])
    assert "history_" not in read_scvi(folder)["attr_dict"]


def test_a_pickle_that_would_run_code_is_refused(altered, cells, tmp_path):
    target = tmp_path / "ran"
    with pytest.raises(DataError, match=r"refused.*posix.mkdir"):
        load_scvi(altered(extra=Malicious(target)), cells.copy())
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Malicious(target)))
    with pytest.raises(DataError, match=r"not written by torch.save"):
        load_scvi(tmp_path, cells.copy())
    assert not target.exists()
    torch.load(altered(extra=Malicious(target)) / "model.pt", weights_only=False)  # the file could have
    assert target.exists()


def test_a_file_of_another_kind_is_refused(altered, folder, cells, tmp_path):
    attributes = read_scvi(folder)["attr_dict"]
    for name in ("MyVAE", "utils"):
        registry = attributes["registry_"] | {"model_name": name}
        with pytest.raises(DataError, match=f"class '{name}'"):
            load_scvi(altered(attr_dict=attributes | {"registry_": registry}), cells.copy())
    registry = attributes["registry_"] | {"setup_method_name": "setup_mudata"}
    with pytest.raises(DataError, match="a MuData"):
        load_scvi(altered(attr_dict=attributes | {"registry_": registry}), cells.copy())
    with pytest.raises(DataError, match="no model of scvi-tools"):
        read_scvi(altered(attr_dict=None))
    with pytest.raises(DataError, match="cannot be loaded with these data"):
        load_scvi(folder, cells[:, :5].copy())
    (tmp_path / "model.pt").write_bytes((folder / "model.pt").read_bytes()[:1000])
    with pytest.raises(DataError, match="cut short"):
        read_scvi(tmp_path)
    with pytest.raises(DataError, match=r"holds no model.pt"):
        read_scvi(tmp_path / "nowhere")


def test_what_a_program_of_pyro_left_behind_is_not_read(folder, cells, tmp_path):
    pyro = pytest.importorskip("pyro")
    saved = torch.load(folder / "model.pt", weights_only=False)
    store = pyro.get_param_store()
    before = store.get_state()
    with isolated(0):
        pyro.param("loc", torch.zeros(2))
        pyro.param("scale", torch.ones(2), constraint=torch.distributions.constraints.positive)
        saved["model_state_dict"]["pyro_param_store"] = store.get_state()
    store.set_state(before)
    torch.save(saved, tmp_path / "model.pt")
    assert "pyro_param_store" not in read_scvi(tmp_path)["model_state_dict"]
    assert type(load_scvi(tmp_path, cells.copy())).__name__ == "SCVI"
