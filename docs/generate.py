"""Writes the tables that the pages beside this file take from the code (`make docs`).

The text between ``<!-- generated:NAME -->`` and ``<!-- /generated:NAME -->`` is replaced.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import vaerdict as vd
from vaerdict.annotation.columns import CELLS
from vaerdict.annotation.options import AnnotateOptions
from vaerdict.de import columns
from vaerdict.de.calibration.strata import STRATA
from vaerdict.de.columns import column_table
from vaerdict.de.options import CalibrateOptions, DEOptions
from vaerdict.inference import sampling, search
from vaerdict.inference.posterior import _CONFIRMED_ERRORS
from vaerdict.options import option_table
from vaerdict_paper.benchmarks.de import PAIRS

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "paper" / "results"
BENCH = RESULTS / "bench"

EXTRAS = {
    "cli": "the commands, figures and everything that `vaerdict de` needs",
    "bio": "AnnData files and tables",
    "sklearn": "`SelectiveClassifier` and `annotate`",
    "rivals": "the tests that `vaerdict calibrate --rivals` compares with",
    "scvi": "fitted scvi-tools models",
    "pyro": "Pyro models and guides",
    "numpyro": "the example of a NumPyro guide",
    "sbi": "posteriors of sbi",
    "plot": "figures",
    "flows": "spline-flow proposals",
    "arviz": "export to arviz",
    "ray": "tasks on a cluster",
    "docs": "this site",
    "browser": "tests of pages in a browser",
    "dev": "tests, linter and type checker",
}
"""What each extra of pyproject.toml is for."""

TUNED_ON = ("digits", "breast cancer")
"""The tables on which the settings of ``novel`` were chosen."""

STAGES = {
    "REFINED": "local proposals at the modes found, the given proposals, wide Student-t kernels and the prior",
    "TILTED": "the same, and kernels where the query differs from its mean; only where the weights are reliable and "
    "the query is not, such as the probability of a rare event",
    "ADAPTED": "kernels fitted to weighted draws; only where the posterior does not have the shape of its curvature, "
    "or where mass was missed",
    "SMC": "kernels fitted to particles of sequential Monte Carlo from the prior, and refitted to weighted draws; only "
    "where the stages before do not answer",
}
"""Where the draws of each stage of escalation come from."""


# ----------------------------------------------------------------------------------------------- generated tables
def blocks() -> dict[str, dict[str, str]]:
    """The generated text of each page, by the name of its markers."""
    return {
        "de.md": {
            "options": _escaped(option_table(DEOptions)),
            "columns": _escaped(column_table(columns.DE)),
        },
        "calibrate.md": {
            "calibrate-options": _escaped(option_table(CalibrateOptions)),
            "calibrate-columns": _escaped(column_table(columns.CALIBRATE)),
            "calibrate-strata": _escaped(column_table(STRATA)),
        },
        "annotate.md": {
            "options": _escaped(option_table(AnnotateOptions)),
            "columns": _escaped(column_table(CELLS)),
        },
        "classify.md": {"scores": _scores()},
        "start.md": {"extras": _extras()},
        "verdicts.md": {"stages": _stages(), "limits": _limits(), **_captions()},
        "encoder.md": {"encoders": _encoders()},
        "khat.md": {"khat": _khat()},
        "counts.md": {"shrinkage": _shrinkage()},
        "compare.md": {
            "inference": _against_samplers(),
            "genes": _against_tests(),
            "scvi": _against_scvi(),
            "novelty": _against_novelty(),
        },
    }


def _escaped(table: str) -> str:
    """A Markdown table in which bars inside cells, such as those of |LFC|, are escaped."""
    lines = (line if line.startswith("|---") else _BAR.sub(r"\\|", line) for line in table.splitlines())
    return "\n".join(lines)


_BAR = re.compile(r"(?<!\\)\|(?=\S)|(?<=\S)(?<!\\)\|")


def _scores() -> str:
    rows = [f"| `{name}` | {score.meaning} |" for name, score in vd.selective.REJECT_SCORES.items()]
    return "\n".join(["| `reject_by` | score |", "|---|---|", *rows])


def _extras() -> str:
    declared = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    unknown = declared.keys() ^ EXTRAS.keys()
    if unknown:
        raise SystemExit(f"extras {', '.join(sorted(unknown))} are not both in pyproject.toml and in EXTRAS.")
    names = {extra: ", ".join(re.split(r"[<>=]", package)[0] for package in declared[extra]) for extra in EXTRAS}
    rows = [f"| `{extra}` | {EXTRAS[extra]} | {names[extra]} |" for extra in EXTRAS]
    return "\n".join(["| extra | for | packages |", "|---|---|---|", *rows])


def _stages() -> str:
    if STAGES.keys() != set(sampling.STAGES):
        raise SystemExit(f"STAGES must describe the stages of escalation: {', '.join(sampling.STAGES)}.")
    rows = [f"| `{name}` | {STAGES[name]} |" for name in sampling.STAGES]
    return "\n".join(["| stage | where its draws come from |", "|---|---|", *rows])


def _limits() -> str:
    """The constants on which a verdict depends."""
    limits = {
        "largest k-hat": f"min(1 - 1/log10 K, {vd.diagnostics.MAX_KHAT:g}) for K draws",
        "least share of effective draws, with one or two latents": ", ".join(
            f"{share:.0%} ({stage})" for stage, share in sampling._LEAST_ESS.items()
        ),
        "largest number of draws": f"{sampling.MAX_GROWTH:g} times `n`",
        "largest distance of planned from fresh draws": f"{sampling._AGREEMENT:g} standard errors",
        "event with few draws inside": f"fewer than {vd.diagnostics.FEW_HITS} effective ones",
        "largest share of searches that end alone, for ok": f"{search.MAX_ALONE:.0%}",
        "largest share of the posterior that may be missing, for ok": f"{search.MAX_MISSING:.0%}",
        "largest distance of a confirmed answer from its repetition": f"{_CONFIRMED_ERRORS:g} standard errors",
    }
    return "\n".join(["| limit | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in limits.items())])


def _captions() -> dict[str, str]:
    """The pictures of verdicts.md with the numbers of the run that drew them (figures/verdicts.py)."""
    results = json.loads((DOCS / "figures" / "verdicts.json").read_text(encoding="utf-8"))
    captions = {name: _caption(name, results[name]) for name in ("banana", "ring", "two-modes", "spike")}
    narrow, wider = results["spike"], results["wider-spike"]
    captions["spike"] += (
        f"\n\nThis question was asked {narrow['n_answers']} times, with independent searches. {_tally(narrow)}. "
        f"With a spike {wider['width'] / narrow['width']:.2g} times as wide: {_tally(wider)}."
    )
    return captions


def _tally(row: dict[str, Any]) -> str:
    wrong = row["n_ok"] - row["n_ok_right"]
    others = (
        f"{row['n_caution']} have the verdict caution and {row['n_answers'] - row['n_ok'] - row['n_caution']} refuse"
    )
    return f"{row['n_ok']} answers are ok, {wrong} of them off by more than the tolerance; {others}"


def _caption(name: str, row: dict[str, Any]) -> str:
    error = row["value"] - row["truth"]
    return (
        f"![Posterior, draws and modes found: {name}](figures/{name}.png)\n\n"
        f"*{row['question']}: {row['verdict'].lower()}, stage {row['stage']}. Answer {row['value']:.3f}, standard "
        f"error {row['mcse']:.3f}; the truth is {row['truth']:.3f}, so the true error is {abs(error):.3f} "
        f"({abs(error) / row['mcse']:.1f} standard errors). {row['draws']:,} draws, {row['cost']:,} evaluations. "
        f"Scope: {row['scope']}; `missing` is {row['missing']:.0%}.*"
    )


# ------------------------------------------------------------------------------------------------ committed results
def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _table(head: str, rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table: the names of columns separated by bars, and the rows."""
    names = head.split(" | ")
    lines = [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return "\n".join([f"| {head} |", "|---|" + "--:|" * (len(names) - 1), *lines])


def _encoders() -> str:
    panels = _read(RESULTS / "bivariate" / "results.json")["panels"]
    panel = next(p for p in panels if p["stage"] == "approximation" and p["loading"] == "entangled")
    ratios = ", ".join(f"{row['proposal']} {mean(row['variance_ratio']):.0%}" for row in panel["proposals"])
    return (
        f"*The correlation of the posterior is {panel['posterior']['correlation']:.2f}. Variance of each latent under "
        f"the encoder, as a share of its posterior variance: {ratios} (`vaerdict reproduce bivariate`).*"
    )


def _khat() -> str:
    rows = _read(DOCS / "figures" / "concepts.json")["khat"]
    cells = ([f"{r['scale']:g}", f"{r['k']:.2f}", f"{r['khat']:.2f}", f"{r['error_last']:.3f}"] for r in rows)
    return _table("s | k | mean k-hat | error with 10,000 draws", cells)


def _shrinkage() -> str:
    facts = _read(DOCS / "figures" / "concepts.json")["shrinkage"]
    return (
        f"*{facts['n_genes']:,} genes in {facts['n_cells']} cells of each group. Root mean square error: plain "
        f"{facts['plain']['rmse']:.2f}, reported {facts['reported']['rmse']:.2f}. The 90 % intervals cover "
        f"{facts['coverage']:.0%} of the true values; {facts['called']} genes are called, {facts['false']} of them "
        f"with a true change below 0.5.*"
    )


def _against_samplers() -> str:
    rows = _read(BENCH / "verdicts.json")["rows"]
    overall = [row for row in rows if (row["group"], row["target"]) == ("compared", "all")]

    def evaluations(row: dict) -> str:
        """For all questions on one observation: ours are asked one by one, the others' draws serve them all."""
        return f"{row['evaluations'] * (QUESTIONS if row['method'] == 'vaerdict' else 1):,.0f}"

    return _table(
        f"method | questions | answered | wrong | beyond the tolerance | evaluations for {QUESTIONS} questions",
        [(r["method"], r["questions"], r["answered"], r["wrong"], r["beyond"], evaluations(r)) for r in overall],
    )


QUESTIONS = 4  # on every observation of the comparison with samplers
METHODS = ("vaerdict", "edger", "edger-treat", "deseq2", "deseq2-threshold", "ttest", "wilcoxon")
DESIGNS = {"cells": "50", "samples": "8v8"}


def _against_tests() -> str:
    """How often tests find something where nothing changed, and what they find of planted changes.

    The shares are means over the kinds of cells, each of which counts the same.
    """
    rows = _read(BENCH / "de-methods.json")["rows"]
    cells = []
    for method in METHODS:
        mine = [row for row in rows if row["method"] == method]
        null = [row["n_called"] > 0 for row in mine if row["stage"] == "null" and row["replicates"] == "cells"]
        row = [f"`{method}`", f"{sum(null)} of {len(null)}"]
        for design in DESIGNS.values():
            by_data: dict[str, list[dict]] = {}
            for r in mine:
                if (r["stage"], r["design"]) == ("planted", design):
                    by_data.setdefault(r["data"], []).append(r)
            for key in ("fdp", "tpr_matched"):
                means = [mean(r[key] for r in part) for part in by_data.values()]
                row.append(f"{mean(means):.0%}" if means else "not run")
        cells.append(row)
    names = "50 v 50 cells: false calls | found if 5 % are false | 8 v 8 donors: false calls | found if 5 % are false"
    return _table(f"method | splits of cells with a discovery | {names}", cells)


def _against_scvi() -> str:
    rows = _read(BENCH / "de.json")["rows"]
    quality = "median k-hat | error of the stated FDR in percent | average precision"
    return _table(
        f"method | fold change between | {quality} | CPU seconds",
        [
            (
                r["method"].replace("model stage", f"vaerdict with the model, {r['lfc_draws']} joint draws"),
                r["between"],
                "no latents" if r["khat"] is None else f"{r['khat']:.2f}",
                "–" if r["between"] == PAIRS else f"{r['fdr_mae']:.1f}",  # noqa: RUF001
                f"{r['auprc']:.3f}",
                f"{r['cpu_s']:.2f}",
            )
            for r in rows
        ],
    )


SCORES = {
    "diffusion": "diffusion (default)",
    "conformal units": "conformal units (ours)",
    "forest v unlabelled": "random forest against unlabelled rows (ours)",
    "AdaDetect, random forest": "AdaDetect, random forest",
    "1-NN distance": "1-NN distance",
    "LOF": "LOF",
    "IsolationForest": "IsolationForest",
}


def _against_novelty() -> str:
    """Mean over hidden classes and numbers of labels of the tables on which no setting was chosen."""
    rows = [row for row in _read(BENCH / "novelty.json")["rows"] if row["data"] not in TUNED_ON]
    cells = []
    for method in SCORES:
        part = [row for row in rows if row["method"] == method]
        called = [row for row in part if row.get("rule") == "FDR 10 %"]
        shares = [f"{mean(row[key] for row in called):.0%}" if called else "no rate" for key in ("power", "fdp")]
        cells.append([SCORES[method], f"{mean(row['auroc'] for row in part):.3f}", *shares])
    return _table("score | AUROC of hidden classes | found at an FDR of 10 % | false calls", cells)


def filled(page: str, texts: dict[str, str]) -> str:
    """The page with the text between its markers replaced."""
    for name, text in texts.items():
        opening, closing = f"<!-- generated:{name} -->", f"<!-- /generated:{name} -->"
        before, rest = page.split(opening)
        page = f"{before}{opening}\n\n{text}\n\n{closing}{rest.split(closing)[1]}"
    return page


if __name__ == "__main__":
    for page, texts in blocks().items():
        path = DOCS / page
        path.write_text(filled(path.read_text(encoding="utf-8"), texts), encoding="utf-8")
