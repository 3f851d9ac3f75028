"""What `vaerdict.audit` returns, and the files it writes: each whole or not at all."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vaerdict.csv_files import guarded
from vaerdict.diagnostics import Verdict
from vaerdict.io import manifest, write_json, write_text
from vaerdict.runs import prepare_save

TABLE, CARD = "audit.csv", "audit.md"
"""The table of observations, and the block for a model card."""

_COLUMNS = {
    "khat_encoder": "khat_encoder",
    "ess_encoder": "ess_encoder",
    "verdict_encoder": "verdict_encoder",
    "khat": "khat_refined",
    "ess": "ess_refined",
    "verdict": "verdict_refined",
    "elbo": "elbo",
    "iwelbo": "iwelbo",
    "lower": "log_evidence_low",
    "upper": "log_evidence_high",
}


@dataclass(frozen=True, eq=False)
class Audit:
    """What an encoder is worth, with the evidence for it; print it for a summary.

    Attributes
    ----------
    results
        Verdict, shares, groups, quantities and evidence, as results.json holds them.
    columns
        Per observation: k-hat, ESS (as a share of the draws) and verdict of the encoder and of refined inference,
        bounds on the log evidence, posterior means of the latents, and the squared movement of every quantity in
        posterior variances. Shapes: ``(n_obs,)``, latents ``(n_obs, d)``.
    groups, names
        Label and name of every observation, if given.
    """

    results: dict[str, Any]
    columns: dict[str, Tensor] = field(repr=False)
    groups: Sequence[str] | None = field(default=None, repr=False)
    names: Sequence[Any] | None = field(default=None, repr=False)

    @property
    def verdict(self) -> Verdict:
        """The verdict on the encoder."""
        return Verdict[self.results["verdict"]["verdict"]]

    @property
    def reason(self) -> str:
        """The verdict in one sentence."""
        return self.results["verdict"]["reason"]

    @property
    def reliable(self) -> Tensor:
        """Observations for which importance weights of the encoder are reliable. Shapes: ``-> (n_obs,)``."""
        return self.columns["verdict_encoder"] == Verdict.OK

    @property
    def mean(self) -> Tensor:
        """Posterior means of the latents by refined inference. Shapes: ``-> (n_obs, d)``."""
        return self.columns["mean"]

    def to_markdown(self) -> str:
        """A block for a model card."""
        from vaerdict.auditing.page import card

        return card(self.results)

    def __str__(self) -> str:
        from vaerdict.auditing.page import document
        from vaerdict.report import text

        return text(document(self.results, None), 1)

    def save(self, path: str | Path, *, data_sha256: str | None = None) -> Path:
        """Write results.json, manifest.json, audit.csv (a row per observation) and audit.md to a folder."""
        settings, seconds = self.results["settings"], self.results["seconds"]
        out = prepare_save(path, "audit", settings, data_sha256)
        write_text(out / TABLE, self._table())
        write_text(out / CARD, self.to_markdown())
        write_json(out / "manifest.json", manifest(settings, seconds, data_sha256=data_sha256))
        write_json(out / "results.json", self.results)
        return out

    def report(self, path: str | Path, *, data_sha256: str | None = None) -> Path:
        """Write everything to a folder with one self-contained page, and return the page."""
        from vaerdict.auditing.page import from_run
        from vaerdict.report import write_page

        out = self.save(path, data_sha256=data_sha256)
        return write_page(from_run(out), out)

    def _table(self) -> str:
        """A row per observation as CSV."""
        n = len(self.columns["khat"])
        table: dict[str, Sequence[Any]] = {
            "observation": range(n) if self.names is None else [guarded(str(name)) for name in self.names]
        }
        if self.groups is not None:
            table["group"] = [guarded(group) if isinstance(group, str) else group for group in self.groups]
        for key, name in _COLUMNS.items():
            values = self.columns[key]
            table[name] = [Verdict(v).name for v in values.tolist()] if "verdict" in key else _numbers(values)
        for key in self.columns:
            if key.startswith("moved: "):
                table[f"{key.removeprefix('moved: ')}_moved_sd"] = _numbers(self.columns[key].clamp_min(0).sqrt())
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
        return buffer.getvalue()


def _numbers(values: Tensor) -> list[str]:
    """Numbers to six digits, empty where they are missing."""
    return ["" if value != value else f"{value:.6g}" for value in values.double().tolist()]
