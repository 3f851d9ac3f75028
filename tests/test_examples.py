"""Every example runs: the files under examples/ and the Python of the README."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

import vaerdict as vd
from vaerdict.datasets import linear_gaussian

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """Examples and snippets write into a temporary folder."""
    monkeypatch.chdir(tmp_path)


# a minute's work each: these run at toy size in the tests of what they show
LONG = {"digits.py"}
QUICK = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name not in LONG]


@pytest.mark.parametrize("path", QUICK, ids=lambda p: p.name)
def test_example_files_run(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    assert "OK" in capsys.readouterr().out


def snippets() -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(found) == 4
    return found


def shortened(snippet: str, old: str, new: str) -> str:
    """The snippet with settings that make it quick."""
    assert old in snippet
    return snippet.replace(old, new)


def test_the_readme_runs(capsys):
    """The first two snippets, the second with the names it leaves to the reader filled in."""
    data = linear_gaussian(0)
    names = {
        "vd": vd,
        "torch": torch,
        "MyDecoder": lambda: vd.models.PPCA(data.weight, 1.0),
        "x_train": data.x_train[:300],
        "x_valid": data.x_train[300:400],
        "x_test": data.x_test[:20],
        "loss": lambda z: torch.stack([(z[..., 0] > 1).double() * 3, (z[..., 0] <= 1).double()], -1),
    }
    own, steps = snippets()[:2]
    exec(own, names)
    all_four = "objectives=[vd.VAE, vd.IWAE, vd.WW, vd.CHI]"
    exec(shortened(steps, all_four, f"{all_four}, settings=vd.Settings(n_particles=4, epochs=4)"), names)
    assert names["posterior"].log_w.shape == (1000, 20)
    assert len(names["steps"].selection) == 4
    assert "tensor" in capsys.readouterr().out


def test_the_classifier_of_the_readme_runs():
    datasets = pytest.importorskip("sklearn.datasets")
    x, digit = datasets.load_digits(return_X_y=True)
    names = {"vd": vd, "X": x[:300] / 16, "y": digit[:300], "X_new": x[300:320] / 16}
    quick = "cost=0.1, epochs=2, objectives=('VAE',), proposals=(), n_draws=50, "
    exec(shortened(snippets()[2], "cost=0.1, ", quick), names)
    assert names["decided"].action.shape == (20,)
    assert "inference" in names["classifier"].agreement_.words


def test_a_scvi_model_is_asked_as_the_readme_says():
    pytest.importorskip("scvi")
    from vaerdict.datasets.genes import SIMULATORS
    from vaerdict_paper.experiments.rivals import train_scvi

    data = SIMULATORS["appendix"](0, n_cells=60, n_genes=12)
    names = {"vd": vd, "scvi_model": train_scvi(data.counts, seed=0, max_epochs=2).model}
    exec(shortened(snippets()[3], "model.observations()", "model.observations()[:5]"), names)
    assert names["answer"].value.shape == (5,)
