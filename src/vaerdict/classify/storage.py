"""Files of fitted classifiers: tensors in safetensors, the rest as JSON in the header; reading runs no code."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vaerdict.classify.agreement import Agreement, Bin
from vaerdict.classify.fitting import new_model
from vaerdict.classify.novelty import Rows
from vaerdict.core import SettingError
from vaerdict.inference.m1m2_steps import M1M2Score, M1M2Steps
from vaerdict.noise import seeded
from vaerdict.training.checkpoint import file_of, read_checkpoint, save_checkpoint

log = logging.getLogger(__name__)

_FORMAT = "vaerdict selective classifier 3"
_JSON_ATTRIBUTES = (
    "seed_",
    "likelihood_",
    "n_held_out_",
    "estimator_",
    "log_scores_",
    "reject_by_",
    "threshold_",
    "n_features_in_",
)


def write(classifier: Any, path: Path) -> Path:
    """Write a fitted classifier to ``path.safetensors`` and return that path."""
    names = getattr(classifier, "feature_names_in_", None)
    random_state = classifier.random_state
    notes = {
        "format": _FORMAT,
        "parameters": classifier.get_params()
        | {"random_state": random_state if isinstance(random_state, int | None) else classifier.seed_},
        "classes": {"kind": classifier.classes_.dtype.str, "values": classifier.classes_.tolist()},
        "feature_names": None if names is None else names.tolist(),
        "proposals": list(classifier.steps_.recognitions),
        "selection": classifier.selection_,
        "agreement": None if classifier._agreement is None else classifier._agreement._asdict(),
        "fitted": {name: getattr(classifier, name) for name in _JSON_ATTRIBUTES},
    }
    tensors = {name: torch.from_numpy(getattr(classifier, f"{name}_")) for name in ("center", "spread")}
    tensors |= {f"rows {name}": torch.from_numpy(part) for name, part in classifier.rows_._asdict().items()}
    for prefix, module in _modules(classifier.steps_).items():
        tensors |= {f"{prefix}.{name}": value for name, value in module.state_dict().items()}
    try:
        save_checkpoint(path, tensors, notes)
    except TypeError as error:
        raise SettingError(f"only numbers and strings can be saved as classes or parameters ({error}).") from error
    return file_of(path)


def read(kind: Any, path: Path, device: str | None = None) -> Any:
    """Read a classifier of class `kind` from a file of `write` onto `device`, by default the one it was fitted on.

    A classifier fitted on a GPU is read onto the CPU where there is no GPU.
    """
    tensors, notes = read_checkpoint(path)
    if notes.get("format") != _FORMAT:
        raise SettingError(f"{path} holds {notes.get('format')!r}, not {_FORMAT!r}; was it written by `save`?")
    out = kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in notes["parameters"].items()})
    out.device = _available(out.device) if device is None else device
    for name, value in notes["fitted"].items():
        setattr(out, name, value)
    out.classes_ = np.array(notes["classes"]["values"], dtype=notes["classes"]["kind"])
    if notes["feature_names"] is not None:
        out.feature_names_in_ = np.array(notes["feature_names"], dtype=object)
    out.selection_ = tuple(M1M2Score(*row) for row in notes["selection"])
    out._agreement = _agreement(notes["agreement"])
    out.center_, out.spread_ = (tensors[name].numpy() for name in ("center", "spread"))
    out.rows_ = Rows(*(tensors[f"rows {name}"].numpy() for name in Rows._fields))
    new = {name: new_model(out, seeded(0)) for name in notes["proposals"]}
    out.steps_ = M1M2Steps(next(iter(new.values()))[0], {name: q for name, (_, q) in new.items()}, out.selection_)
    for prefix, module in _modules(out.steps_).items():
        state = {name.removeprefix(f"{prefix}."): t for name, t in tensors.items() if name.startswith(f"{prefix}.")}
        module.double().load_state_dict(state)
        module.eval().to(out.device)
    return out


def _available(device: str) -> str:
    if torch.device(device).type != "cuda" or torch.cuda.is_available():
        return device
    log.warning("the classifier was fitted on %s, which is not available; it is read onto the cpu", device)
    return "cpu"


def _modules(steps: M1M2Steps) -> dict[str, nn.Module]:
    return {"model": steps.model, **{f"recognition {name}": q for name, q in steps.recognitions.items()}}


def _agreement(fields: dict[str, Any] | None) -> Agreement | None:
    if fields is None:
        return None
    fields["bins"] = tuple(Bin(*b) for b in fields["bins"])
    return Agreement(**fields)
