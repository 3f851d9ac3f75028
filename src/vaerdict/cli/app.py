"""The commands, those of this package and those that other packages add."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from vaerdict import __version__
from vaerdict.cli.annotate import EPILOG as ANNOTATE_EPILOG
from vaerdict.cli.annotate import annotate
from vaerdict.cli.audit import EPILOG as AUDIT_EPILOG
from vaerdict.cli.audit import audit
from vaerdict.cli.calibrate import EPILOG as CALIBRATE_EPILOG
from vaerdict.cli.calibrate import calibrate
from vaerdict.cli.common import screen
from vaerdict.cli.de import EPILOG as DE_EPILOG
from vaerdict.cli.de import de
from vaerdict.cli.demo import demo
from vaerdict.cli.diagnose import diagnose
from vaerdict.cli.options import naming_options

COMMANDS = "vaerdict.commands"
"""The group of entry points by which another package adds commands: functions as typer wants them."""

PAPER = ("reproduce", "bench")
"""The commands of the package in ``paper/``."""


def build() -> typer.Typer:
    """The whole command."""
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_main)
    app.command(epilog="Example:  vaerdict demo --out demo && open demo/report.html")(naming_options(demo))
    app.command(epilog=DE_EPILOG, context_settings={"allow_extra_args": True})(naming_options(de))
    app.command(epilog=CALIBRATE_EPILOG, context_settings={"allow_extra_args": True})(naming_options(calibrate))
    app.command(epilog=ANNOTATE_EPILOG)(naming_options(annotate))
    app.command(epilog=AUDIT_EPILOG)(naming_options(audit))
    app.command(epilog="Example:  vaerdict diagnose log_weights.npy --json")(naming_options(diagnose))
    app.command(epilog="Example:  vaerdict report runs/de")(naming_options(report))
    added = {entry.name: entry for entry in entry_points(group=COMMANDS)}
    for name, entry in added.items():
        command = entry.load()
        app.command(name, epilog=getattr(command, "epilog", None))(naming_options(command))
    for name in set(PAPER) - added.keys():
        app.command(name, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
            _absent
        )
    return app


def _version(wanted: bool) -> None:
    if wanted:
        screen.print(f"vaerdict {__version__}")
        raise typer.Exit


def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Decisions you can trust from variational autoencoders."""


def report(run_dir: Annotated[Path, typer.Argument(help="A run directory: a folder that a command wrote.")]) -> None:
    """Rebuild tables, figures and page from the result files; trains nothing."""
    from vaerdict.report import render

    screen.print(f"Page: {render(run_dir)}", markup=False)


def _absent(more: typer.Context) -> None:
    """Say where a command of the paper's reproduction comes from."""
    from vaerdict.core import SettingError

    raise SettingError(
        f"`vaerdict {more.info_name}` comes with the reproduction of the paper; install it from a checkout with "
        "`pip install ./paper`."
    )
