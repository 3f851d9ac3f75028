"""The command line: parsing and printing only."""

from __future__ import annotations

import errno
import sys


def main() -> None:
    """Run the command `vaerdict`; errors that were foreseen, and of files, are one line and exit code 2."""
    try:
        from vaerdict.cli.app import build
        from vaerdict.cli.common import print_error
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.exit(f"error: the command needs {error.name}; install it with `pip install 'vaerdict[cli]'`.")
    try:
        build()()
    except OSError as error:
        print_error(_about_file(error))
        sys.exit(2)
    except Exception as error:
        from vaerdict.core import VaerdictError

        if not isinstance(error, VaerdictError):
            raise
        print_error(str(error))
        sys.exit(2)


def _about_file(error: OSError) -> str:
    """What is wrong with a file or folder, and the remedy."""
    reason = error.strerror or " ".join(str(error).split()) or type(error).__name__
    place = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{place}{reason}; free some space and give the same command again, which goes on where it stopped."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.ENAMETOOLONG):
        return f"{place}{reason}; name a file or folder that can be used."
    return f"{place}{reason}."
