"""The documentation says what the code says: generated parts are current, limits and names are those of the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import vaerdict as vd
from vaerdict.de import analysis, data
from vaerdict.de.effects import ESTIMANDS, INTERVAL
from vaerdict.de.options import ENOUGH_CELLS, FEWEST_SEEN, PRIORS, SHARE_SEEN, DEOptions
from vaerdict.de.prior import profile
from vaerdict.de.prior.prediction import BLOCKS
from vaerdict.de.prior.stage import FEWEST_DF, FEWEST_GENES, FEWEST_OTHER
from vaerdict.de.shrinkage import WIDTHS
from vaerdict.de.verdict import CAUTION, CERTIFIED, DECIDERS, FEW, GOOD_PREDICTION, MOST_CONTRADICTED, most_shift
from vaerdict.options import options_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DE, COUNTS, PRIOR, CALIBRATE = (
    (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("de", "counts", "prior", "calibrate")
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
MOST_WORDS = {"README.md": 900, "a page": 1700}


@pytest.fixture(scope="module")
def made() -> dict:
    return runpy.run_path(str(DOCS / "generate.py"))


# -------------------------------------------------------------------------------------------------------- generated
def test_the_reference_lists_every_public_name():
    listed = re.findall(r"^(?:   |\.\. py:data:: )(\w+)$", (DOCS / "api.rst").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(vd.__all__)


def test_generated_tables_are_current(made):
    for name, texts in made["blocks"]().items():
        page = (DOCS / name).read_text(encoding="utf-8")
        assert page == made["filled"](page, texts), f"run `make docs`: {name}"
        assert set(re.findall(r"<!-- generated:([\w-]+) -->", page)) == texts.keys()


def test_bars_inside_cells_do_not_split_them(made):
    table = "| a | b |\n|---|---|\n| `x` | at least |LFC| of 1 |"
    assert made["_escaped"](table).splitlines()[-1] == r"| `x` | at least \|LFC\| of 1 |"
    assert made["_escaped"](made["_escaped"](table)) == made["_escaped"](table)
    for line in (DE + CALIBRATE).splitlines():
        if line.startswith("| `--") or line.startswith("| `lfc"):
            assert len(re.split(r"(?<!\\)\|", line)) in (4, 5), line


# ------------------------------------------------------------------------------------------ differential expression
ROW = r"^\| `([^`]+)` \| (.*) \|$"


def rows_under(heading: str) -> dict[str, str]:
    """The table under a heading of docs/de.md: the code in its first column, and the rest."""
    section = DE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.finditer(ROW, section, re.MULTILINE)
    return {row[1]: row[2] for row in rows}


def test_de_names_every_file_that_a_run_writes(tmp_path):
    pytest.importorskip("anndata")
    from test_de_pipeline import simulated

    options = {"check_model": True, "quick": True, "n_draws": 50}
    vd.differential_expression(simulated(n=120), "group", "A", "B", out=tmp_path, **options).report(tmp_path)
    written = {f"{path.name}/" if path.is_dir() else path.name for path in tmp_path.iterdir()}
    assert rows_under("Files").keys() == written


def test_de_describes_every_scale_as_the_code_does():
    scales = rows_under("Scales")
    assert scales.keys() == ESTIMANDS.keys()
    assert all(meaning.startswith(ESTIMANDS[name].target) for name, meaning in scales.items())


def test_de_describes_the_verdict_as_the_code_does():
    parts = rows_under("Read the verdict")
    assert parts.keys() == {"decided_by", "replicates", "size", "centre", "prior", "agreement", "fit", "inference"}
    assert all(name in parts["decided_by"] for name in DECIDERS)
    assert f"at least {FEW['cells']} cells, or {FEW['samples']} samples" in parts["size"]
    assert f"half of delta (at least {most_shift(0.0):g})" in parts["centre"]
    assert f"at least {GOOD_PREDICTION}, less" in parts["prior"]
    assert f"the counts of more than {100 * MOST_CONTRADICTED:.0f} % of the genes contradict" in parts["agreement"]
    assert f"at least {100 * CERTIFIED:.0f} %, at least {100 * CAUTION:.0f} %, fewer" in parts["inference"]


def test_de_states_the_limits_of_the_code():
    text = " ".join((DE + COUNTS).split())
    assert f"{INTERVAL:.0%} credible" in text
    assert f"fewer than {FEW['cells']} cells or {FEW['samples']} samples" in text
    assert f"at most {data.MEMORY // 2**20} MB" in text
    assert f"At most {analysis.MOST_TRAINING:,} cells" in text
    assert f"seen in at least {ENOUGH_CELLS} of the cells compared" in text
    small = next(n for n in range(1000) if round(SHARE_SEEN * n) >= ENOUGH_CELLS)
    assert f"for groups of fewer than {small} cells in {100 * SHARE_SEEN:.0f} % of the smaller group's" in text
    assert f"number of cells, and at least {FEWEST_SEEN})" in text
    assert f"(standard deviation {WIDTHS[-1]:g})" in text


def test_de_tells_when_a_model_runs():
    named = set(rows_under("When to add a model"))
    assert named == {"--prior model", "--check-model", "--model DIR", "--scale pair"}
    assert {name.split()[0] for name in named} - {"--model"} <= {option.flag for option in options_of(DEOptions)}


def test_de_describes_the_prior_as_the_code_does():
    text = " ".join(PRIOR.split())
    rows = {row[1]: row[2] for row in re.finditer(ROW, PRIOR, re.MULTILINE)}
    record = {"kind", "n_other", "correlation", "slope", "share_following", "n_counts", "n_by_prior"}
    assert rows.keys() - record == {f"--prior {kind}" for kind in PRIORS}
    assert record <= rows.keys()
    assert "the default" in rows[f"--prior {DEOptions.prior}"]
    assert f"at most {profile.CLUSTERS} clusters" in rows["--prior profile"]
    assert f"{analysis.MOST_OTHER:,} of them are used" in text
    assert f"fewer than {FEWEST_OTHER} cells that are not compared" in text
    assert f"fewer than {FEWEST_GENES} expressed genes" in text
    assert f"fewer than {FEWEST_DF} degrees of freedom" in text
    assert BLOCKS == 5
    assert "into five blocks" in text


# --------------------------------------------------------------------------------------------------------- verdicts
def test_verdicts_explains_reasons_that_the_code_gives():
    page = (DOCS / "verdicts.md").read_text(encoding="utf-8")
    reasons = re.findall(r"^\| `([^`]+)` \|", page.split("\n## Refusals\n")[1].split("\n## ")[0], re.MULTILINE)
    source = "".join(
        (ROOT / f"src/vaerdict/inference/{name}.py").read_text() for name in ("escalation", "posterior", "sampling")
    )
    assert len(reasons) > 5
    assert not [reason for reason in reasons if reason not in source]


def test_pictures_are_small():
    sizes = {path.name: path.stat().st_size for path in (DOCS / "figures").glob("*.png")}
    assert len(sizes) == 6
    assert max(sizes.values()) < 80_000, sizes


# ------------------------------------------------------------------------------------------------------------ pages
def test_the_readme_is_short():
    words = len((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert words <= MOST_WORDS["README.md"], f"README.md has {words} words"


def test_pages_are_short():
    """But for tables and their notes, which are rendered from results or from the code."""
    texts = {
        path.name: re.sub(r"^(\||<sub>).*$", "", path.read_text(encoding="utf-8"), flags=re.M) for path in PAGES[3:]
    }
    words = {name: len(text.split()) for name, text in texts.items()}
    assert max(words.values()) <= MOST_WORDS["a page"], words


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in headings(there), f"{page.name} links to {target}"
