"""The command `vaerdict diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vaerdict.cli.common import Json, print_json, print_rows, screen
from vaerdict.cli.progress import messages

if TYPE_CHECKING:
    from torch import Tensor


_FEW_DRAWS = 100  # with fewer, and more observations, the array is suspected to be transposed


def diagnose(
    weights: Annotated[
        Path, typer.Argument(help="A .npy array of log-weights: draws x observations, or the draws of one.")
    ],
    as_json: Json = False,
) -> None:
    """Say whether log-weights from anywhere can be trusted: k-hat, effective sample size and verdict of each column.

    The exit code is 1 if the weights of any observation are refused.
    """
    from vaerdict import diagnostics
    from vaerdict.diagnostics import Verdict

    log_w = _read_weights(weights)
    khat, ess = diagnostics.khat(log_w), diagnostics.ess(log_w)
    verdict = diagnostics.verdict(khat, ess, log_w.shape[0])
    rows = [
        {"observation": i, "khat": "inf" if k == float("inf") else k, "ess": e, "verdict": Verdict(v).name.lower()}
        for i, (k, e, v) in enumerate(zip(khat.tolist(), ess.tolist(), verdict.tolist(), strict=True))
    ]
    n, threshold = log_w.shape[0], diagnostics.khat_threshold(log_w.shape[0])
    refused = bool((verdict == Verdict.REFUSE).any())
    if n < min(len(rows), _FEW_DRAWS):
        messages.print(f"note: {n} draws of {len(rows)} observations; if it is the reverse, transpose the array.")
    if as_json:
        print_json({"draws": n, "khat_threshold": threshold if threshold > 0 else None, "rows": rows})
        raise typer.Exit(int(refused))
    limit = f"k-hat must stay below {threshold:.2f}" if threshold > 0 else "too few for any k-hat"
    print_rows(f"{n} draws; {limit}", rows[:50])
    if len(rows) > 50:
        screen.print(f"... and {len(rows) - 50} more observations (--json lists all)")
    counts = {v.name.lower(): int((verdict == v).sum()) for v in Verdict}
    screen.print(f"{', '.join(f'{name} {count}' for name, count in counts.items())} of {len(rows)} observations")
    raise typer.Exit(int(refused))


def _read_weights(path: Path) -> Tensor:
    import numpy as np
    import torch

    from vaerdict import core

    if not path.is_file():
        raise core.DataError(f"{path} does not exist or is no file.")
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise core.DataError(f"{path} is no whole .npy array of numbers; save log-weights with numpy.save.") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise core.DataError(f"{path} holds no plain numeric array; save one array of log-weights with numpy.save.")
    if array.ndim not in (1, 2) or array.size == 0:
        raise core.ShapeError(f"{path} has shape {array.shape}; expected draws x observations.")
    if array.ndim == 2 and 1 in array.shape:
        raise core.ShapeError(
            f"{path} has shape {array.shape}: one column of draws, or one draw of many observations? "
            "For a single observation save a one-dimensional array of its draws."
        )
    log_w = torch.from_numpy(array.astype(np.float64))
    return core.check_log_weights(log_w.unsqueeze(1) if array.ndim == 1 else log_w)
