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


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_example_files_run(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    assert "OK" in capsys.readouterr().out


def test_the_readme_runs(capsys):
    """Both snippets, the second with the names it leaves to the reader filled in."""
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
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(snippets) == 2
    short = "objectives=[vd.VAE, vd.IWAE, vd.WW, vd.CHI]"
    assert short in snippets[1]
    for snippet in snippets:
        exec(snippet.replace(short, f"{short}, settings=vd.Settings(n_particles=4, epochs=4)"), names)
    assert names["posterior"].log_w.shape == (1000, 20)
    assert len(names["steps"].selection) == 4
    assert "tensor" in capsys.readouterr().out
