"""What all commands share: options, devices and engines, printing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vaerdict.cli.progress import messages

if TYPE_CHECKING:
    from vaerdict.engines import Engine

screen = Console()

RUNNING = "Running"
"""The heading of the options that do not change a result."""

Out = Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False, rich_help_panel=RUNNING)]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Replace the run that --out holds, or write beside the files there.", rich_help_panel=RUNNING
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random; the same seed gives the same answer.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON instead of tables.", rich_help_panel=RUNNING)
]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.", rich_help_panel=RUNNING)]
EngineName = Annotated[
    str,
    typer.Option(help="Where tasks run: local (this machine) or ray (a cluster).", rich_help_panel=RUNNING),
]
Address = Annotated[
    str | None,
    typer.Option(help="With --engine ray: the address of its head node, host:port.", rich_help_panel=RUNNING),
]


def choose_device(name: str) -> str:
    """What ``auto`` stands for; a device that is not there is refused."""
    import torch

    from vaerdict.core import SettingError

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise SettingError(f"device {name!r}; choose auto, cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingError("device cuda was asked for, but torch sees no CUDA device; use auto or cpu.")
    return name


def choose_engine(name: str, address: str | None, workers: int | None, device: str) -> Engine | None:
    """None stands for processes of this machine, whose number depends on the device each experiment uses."""
    from vaerdict.core import SettingError
    from vaerdict.engines import Ray

    if name not in ("local", "ray"):
        raise SettingError(f"engine {name!r}; choose local or ray.")
    if name == "ray":
        return Ray(address, workers, gpus=float(device == "cuda"))
    if address is not None:
        raise SettingError(f"address {address!r} is that of a Ray cluster; say --engine ray too.")
    return None


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """Print records as a table."""
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column, justify="right" if rows and isinstance(rows[0].get(column), (int, float)) else "left")
    for row in rows:
        table.add_row(*(escape(_cell(row.get(column))) for column in columns))
    screen.print(table)


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "not assessed"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_text(body: str, page: Path) -> None:
    """Print a report, and where its page is."""
    screen.print(body, markup=False, highlight=False, soft_wrap=True)
    screen.print(f"Page: {page}", markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print JSON, null for numbers that are not finite."""
    from vaerdict.io import finite

    sys.stdout.write(json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def print_error(message: str) -> None:
    """Print a message on stderr as it is: paths in it may look like markup."""
    messages.print("error: ", style="bold red", end="")
    messages.print(message, markup=False, highlight=False, soft_wrap=True)
