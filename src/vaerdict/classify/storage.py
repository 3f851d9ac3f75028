"""A fitted classifier as a file: tensors in safetensors, the rest as JSON in its header; reading it runs no code."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vaerdict.classify.agreement import Agreement, Bin
from vaerdict.core import SettingError
from vaerdict.inference.semisupervised import ClassScore, SemiSteps
from vaerdict.noise import seeded
from vaerdict.training.checkpoint import file_of, read_checkpoint, save_checkpoint

log = logging.getLogger(__name__)

_FORMAT = "vaerdict selective classifier 1"
_PLAIN = ("seed_", "likelihood_", "n_held_out_", "estimator_", "log_scores_", "threshold_", "n_features_in_")


def write(classifier: Any, path: Path) -> Path:
    """Write a fitted classifier to ``path.safetensors`` and return that."""
    names = getattr(classifier, "feature_names_in_", None)
    given = classifier.random_state
    notes = {
        "format": _FORMAT,
        "parameters": classifier.get_params()
        | {"random_state": given if given is None or isinstance(given, int) else classifier.seed_},
        "classes": {"kind": classifier.classes_.dtype.str, "values": classifier.classes_.tolist()},
        "feature_names": None if names is None else names.tolist(),
        "proposals": list(classifier.steps_.recognitions),
        "selection": classifier.selection_,
        "agreement": None if classifier.agreement_ is None else classifier.agreement_._asdict(),
        "fitted": {name: getattr(classifier, name) for name in _PLAIN},
    }
    tensors = {name: torch.from_numpy(getattr(classifier, f"{name}_")) for name in ("center", "spread")}
    for part, module in _modules(classifier.steps_).items():
        tensors |= {f"{part}.{name}": value for name, value in module.state_dict().items()}
    try:
        save_checkpoint(path, tensors, notes)
    except TypeError as error:
        raise SettingError(f"only numbers and strings can be saved as classes or parameters ({error}).") from error
    return file_of(path)


def read(kind: Any, path: Path, device: str | None = None) -> Any:
    """A classifier of class `kind` from the file that `write` made, on `device`, by default the one it was fitted on.

    What was fitted on a GPU is read onto the CPU where there is none.
    """
    tensors, notes = read_checkpoint(path)
    if notes.get("format") != _FORMAT:
        raise SettingError(f"{path} holds {notes.get('format')!r}, not {_FORMAT!r}; was it written by `save`?")
    out = kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in notes["parameters"].items()})
    out.device = _at_hand(out.device) if device is None else device
    for name, value in notes["fitted"].items():
        setattr(out, name, value)
    out.classes_ = np.array(notes["classes"]["values"], dtype=notes["classes"]["kind"])
    if notes["feature_names"] is not None:
        out.feature_names_in_ = np.array(notes["feature_names"], dtype=object)
    out.selection_ = tuple(ClassScore(*row) for row in notes["selection"])
    out.agreement_ = _agreement(notes["agreement"])
    out.center_, out.spread_ = (tensors[name].numpy() for name in ("center", "spread"))
    fresh = {name: out._fresh(seeded(0)) for name in notes["proposals"]}
    out.steps_ = SemiSteps(next(iter(fresh.values()))[0], {name: q for name, (_, q) in fresh.items()}, out.selection_)
    for part, module in _modules(out.steps_).items():
        own = {name.removeprefix(f"{part}."): t for name, t in tensors.items() if name.startswith(f"{part}.")}
        module.double().load_state_dict(own)
        module.eval().to(out.device)
    return out


def _at_hand(device: str) -> str:
    if torch.device(device).type != "cuda" or torch.cuda.is_available():
        return device
    log.warning("the classifier was fitted on %s, which is not here; it is read onto the cpu", device)
    return "cpu"


def _modules(steps: SemiSteps) -> dict[str, nn.Module]:
    return {"model": steps.model, **{f"recognition {name}": q for name, q in steps.recognitions.items()}}


def _agreement(fields: dict[str, Any] | None) -> Agreement | None:
    if fields is None:
        return None
    fields["bins"] = tuple(Bin(*b) for b in fields["bins"])
    return Agreement(**fields)
