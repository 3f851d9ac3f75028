"""The command line: parsing and printing only."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command `vaerdict`; errors that were foreseen are one line and exit code 2."""
    try:
        from vaerdict.cli.app import build
        from vaerdict.cli.common import print_error
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.exit(f"error: the command needs {error.name}; install it with `pip install 'vaerdict[cli]'`.")
    try:
        build()()
    except Exception as error:
        from vaerdict.core import VaerdictError

        if not isinstance(error, VaerdictError):
            raise
        print_error(str(error))
        sys.exit(2)
