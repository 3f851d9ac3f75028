"""Run the tutorials in a new kernel; as a script, write them back with new outputs (`make tutorials`)."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))

METADATA = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
"""The metadata of a notebook that do not depend on the machine."""


def executed(path: Path, folder: Path, facts: str = "") -> tuple[Any, dict[str, Any]]:
    """The notebook after a run from top to bottom in `folder`, and the value of the expression `facts` at its end."""
    notebook = nbformat.read(path, as_version=4)
    if facts:
        notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({facts}))"))
    # no history, profile or settings of the user
    quiet = {"IPYTHONDIR": str(folder / ".ipython"), "JUPYTER_CONFIG_DIR": str(folder / ".jupyter")}
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=500,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=os.environ | quiet)
    return notebook, json.loads(notebook.cells.pop().outputs[0].text) if facts else {}


def tidied(notebook: Any) -> Any:
    """The notebook without what depends on the machine and the day."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
    return notebook


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(tidied(executed(path, Path(folder))[0]), path)
        print(f"{path.name}: {path.stat().st_size // 1000} kB")
