"""The report framework: records, tables, documents, figures and pages."""

from __future__ import annotations

import ast
import base64
import hashlib
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from de_runs import run_in as de_run
from page_checks import NASTY, Outline, outline
from vaerdict import report
from vaerdict.core import DataError, SettingError
from vaerdict.report import brief, markdown, render, tables, text, write_page
from vaerdict.report.document import Document, Live, Picture, Section, present, slug
from vaerdict.report.figures import INK, blank, inline, label
from vaerdict.report.page import page
from vaerdict.report.records import grouped, rows_of
from vaerdict.report.tables import Column, Table, Value


@dataclass(frozen=True)
class Finding:
    """A statement with one line of evidence."""

    text: str
    verdict: str = "holds"
    tone: str = "good"
    lines: tuple[str, ...] = ("difference +1.0 (se 0.1)",)


def picture(name: str = "a curve") -> Picture:
    def draw() -> Any:
        figure, axes = blank()
        axes.plot([0, 1], [0, 1], label=label(NASTY))
        axes.legend()
        return figure

    return Picture(name, f"Caption of {name}.", f"A straight line from zero to one, drawn for {name}.", draw)


COLUMNS = (Column("name", "name"), Column("x", "x"))


def table(name: str = "t", **changes: Any) -> Table:
    rows = [{"name": NASTY, "x": Value(1.0, best=True)}, {"name": "b", "x": 22.0}]
    return Table(name, f"Caption of table {name}", COLUMNS, rows, **changes)


def document(**changes: Any) -> Document:
    sections = [
        Section("Findings", ["A paragraph.", [Finding("It works."), Finding("It fails.", "does not hold", "bad")]]),
        Section(
            "Numbers", [table(), picture("one two"), picture("two"), table("detail", detail=True), Live("<p>!</p>")]
        ),
    ]
    return Document("Title", ["First sentence.", "Second sentence."], sections, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A directory with the page of a document, shared by tests that only read it."""
    folder = tmp_path_factory.mktemp("page")
    write_page(document(manifest={"command": ["vaerdict", NASTY]}), folder)
    return folder


# --------------------------------------------------------------------------------------------------------- records
def test_rows_are_checked():
    assert rows_of({}, "models", "seed") == []
    with pytest.raises(DataError, match=r"record 1 of 'models' in results\.json lacks seed"):
        rows_of({"models": [{"seed": 0}, {}]}, "models", "seed")
    with pytest.raises(DataError, match="not a list of records"):
        rows_of({"models": {"seed": 0}}, "models")


def test_rows_are_grouped_in_order_of_appearance():
    rows = [{"a": 2, "b": 1}, {"a": 1}, {"a": 2, "b": 3}]
    assert grouped(rows, "a") == {(2,): [rows[0], rows[2]], (1,): [rows[1]]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"experiment": "de", "points": [{"mod', "not complete JSON"),
        (b"\xff\xfe\x00", "not complete JSON"),
        (b"[1, 2]", "holds a list"),
        (b"{}", "experiment None; reports exist for .*de"),
        (b'{"experiment": ["de"]}', r"experiment \['de'\]"),
        (b'{"experiment": "unknown"}', "experiment 'unknown'"),
        (b'{"experiment": "calibrate"}', "holds no verdict"),
    ],
)
def test_unusable_results_are_named(tmp_path, content, message):
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        render(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_missing_runs_and_damaged_manifests_are_named(tmp_path):
    with pytest.raises(DataError, match="does not exist; give the directory of a finished run"):
        render(tmp_path / "nowhere")
    run = de_run(tmp_path, n_genes=20)
    (run / "manifest.json").write_text('{"command": [')
    with pytest.raises(DataError, match=r"manifest\.json is not complete JSON"):
        render(run)
    (run / "manifest.json").unlink()
    assert "what produced them is not known" in render(run).read_text(encoding="utf-8")


def test_records_that_cannot_be_drawn_are_the_files_fault(tmp_path):
    def draw() -> Any:
        raise KeyError("grid")

    broken = Document("T", [], [Section("S", [replace(picture(), draw=draw)])])
    with pytest.raises(DataError, match="'grid'"):
        write_page(broken, tmp_path)


# ---------------------------------------------------------------------------------------------------------- tables
def test_cells_print_scale_sign_and_spread():
    column = Column("a", "A", 2, 100, signed=True)
    assert column.text(Value(0.0123, 0.002)) == "+1.23 ± 0.20"
    assert column.text(-0.5) == "\N{MINUS SIGN}50.00"
    assert (column.text(None), column.text("a-b"), column.text(7)) == (tables.ABSENT, "a-b", "7")
    assert column.text(Value(0.01, remark=" (3 missing)")) == "+1.00 (3 missing)"


def test_the_best_of_a_row_and_of_a_column_is_marked():
    row = tables.mark({"a": Value(2.0), "b": Value(1.0), "c": "text", "d": None})
    assert [key for key, cell in row.items() if tables.is_best(cell)] == ["b"]
    assert not tables.is_best(tables.mark({"a": Value(1.0), "b": None})["a"])  # nothing to compare with
    rows = tables.mark_column([{"x": Value(1.0)}, {"x": Value(3.0)}, {}], "x", max)
    assert [tables.is_best(row["x"]) for row in rows] == [False, True, False]


def test_plain_text_is_aligned_and_markdown_is_safe():
    shown = replace(table(note="note"), columns=(Column("name", "na|me"), Column("x", "x")), caption="A *caption*")
    lines = tables.plain(shown).splitlines()
    assert lines[2].index("x", 5) == len(lines[2]) - 1
    assert lines[4].endswith("1.00*")
    assert lines[-1] == "note"
    source = tables.markdown(shown)
    rows = [line for line in source.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows)
    assert "<script" not in source
    assert "**1.00**" in source


# ------------------------------------------------------------------------------------------------------- documents
def test_text_and_markdown_leave_out_details_and_pictures():
    plain, source = text(document()), markdown(document())
    assert "HOLDS: It works.\n    difference +1.0 (se 0.1)" in plain
    assert "| It fails. | **does not hold** | difference +1.0 (se 0.1) |" in source
    for form in (plain, source):
        assert "Second sentence." in form
        assert "Caption of table t" in form
        assert "Caption of table detail" not in form
        assert "Caption of one two" not in form
    assert "Caption of table t" not in text(document(), 1)


def test_a_brief_document_has_verdicts_without_their_evidence():
    short = brief(document())
    assert "- **does not hold**: It fails." in short
    assert "(se 0.1)" not in short
    assert short.index("<details><summary>") < short.index("| ---") < short.index("</details>")
    assert "<details>" not in markdown(document())
    alone = replace(document(), sections=[Section("Numbers", [table()])])
    assert "<details>" not in brief(alone)  # a table without statements is not folded


def test_absent_blocks_and_empty_sections_are_left_out():
    sections = present([("A", [None, [], ""]), ("B", [None, "text"])])
    assert sections == [Section("B", ["text"])]


# ----------------------------------------------------------------------------------------------------------- pages
def test_page_is_complete_and_loads_nothing(folder):
    seen, source = outline(folder / "report.html")
    assert seen.tags["h1"] == 1
    assert seen.tags["table"] == 3  # with the manifest
    assert not set(seen.tags) & {"link", "img", "iframe", "object", "embed", "base", "image"}
    assert "http:" not in source.replace("http-equiv", "")
    assert "https:" not in source
    assert "@import" not in source
    for _, attributes in seen.attributes:
        assert "src" not in attributes
        assert all((attributes.get(key) or "#").startswith("#") for key in ("href", "xlink:href"))


def test_only_the_page_s_own_script_may_run(folder):
    seen, _ = outline(folder / "report.html")
    policy = next(a["content"] for tag, a in seen.attributes if tag == "meta" and a.get("http-equiv"))
    script = (Path(report.__file__).parent / "page.js").read_text().strip()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy is not None
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert seen.tags["script"] == 1


def test_summary_comes_first_and_verdicts_have_badges(folder):
    seen, source = outline(folder / "report.html")
    assert source.index("First sentence.") < source.index("It works.") < source.index("<table")
    badges = [a["class"] for tag, a in seen.attributes if (a.get("class") or "").startswith("verdict")]
    assert badges == ["verdict good", "verdict bad"]
    assert "✗ does not hold It fails." in seen.text


def test_page_can_be_used_without_eyes_and_without_a_mouse(folder):
    seen, _ = outline(folder / "report.html")
    drawings = [a for tag, a in seen.attributes if tag == "svg"]
    assert len(drawings) == 2
    assert all(a["role"] == "img" and len(a["aria-label"] or "") > 40 for a in drawings)
    ids = Counter(a["id"] for _, a in seen.attributes if "id" in a)
    assert max(ids.values()) == 1
    boxes = [a for _, a in seen.attributes if a.get("class") == "scroll"]
    assert len(boxes) == seen.tags["table"]
    assert all(a["tabindex"] == "0" and a["aria-labelledby"] in ids for a in boxes)
    assert all(a["scope"] in ("col", "row") for tag, a in seen.attributes if tag == "th")


def test_drawings_follow_the_colour_of_the_page_and_are_files_too(folder):
    _, source = outline(folder / "report.html")
    assert "currentColor" in source.split("</style>", 1)[1]
    assert INK not in source
    assert {path.name for path in (folder / "figures").iterdir()} == {
        f"{stem}{suffix}" for stem in ("one-two", "two") for suffix in (".svg", ".png")
    }
    assert INK in (folder / "figures" / "two.svg").read_text()
    assert (folder / "figures" / "two.png").read_bytes().startswith(b"\x89PNG")


def test_rendering_twice_gives_the_same_bytes_and_leaves_matplotlib_alone(folder, tmp_path):
    import matplotlib

    def settings() -> dict[str, Any]:  # asking for the backend would choose one
        return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}

    before, had_pyplot = settings(), "matplotlib.pyplot" in sys.modules
    write_page(document(manifest={"command": ["vaerdict", NASTY]}), tmp_path)
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot
    assert settings() == before
    for path in (folder / "report.html", *(folder / "figures").iterdir()):
        assert (tmp_path / path.relative_to(folder)).read_bytes() == path.read_bytes()


def test_names_of_any_kind_are_printed_literally(tmp_path):
    nasty = Table(NASTY, NASTY, (Column("a", NASTY),), [{"a": NASTY}], NASTY, detail=True)
    finding = Finding(NASTY, NASTY, "open", (NASTY,))
    blocks = [NASTY, nasty, table(), [finding], picture(NASTY)]
    source = write_page(
        Document(NASTY, [NASTY], [Section(NASTY, blocks)], {NASTY: {NASTY: [NASTY, 1.0, None]}}), tmp_path
    ).read_text(encoding="utf-8")
    seen = Outline(source)
    assert seen.tags["script"] == 1
    assert source.count("<script>") == 1
    assert "名前" in source.split("<svg", 1)[1]
    assert "alert('x')</script> \"&\" $\\frac$ 名前 a|b `c` \ufffd" in seen.text
    shown = replace(document(), summary=[NASTY], title=NASTY)
    assert "\x07" not in source + text(shown) + markdown(shown)
    assert slug("../" + NASTY).isascii()
    assert "/" not in slug("../x")


def test_a_document_may_bring_its_own_style_and_script():
    source = page(document(style=".own {}", script="let own;"), {"one two": "<svg></svg>", "two": "<svg></svg>"})
    assert ".own {}</style>" in source
    assert "let own;</script>" in source
    assert "<p>!</p>" in source


def test_a_page_is_written_completely_or_not_at_all(tmp_path, monkeypatch):
    written = write_page(Document("Old", [], []), tmp_path)

    def torn(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("vaerdict.io.os.replace", torn)
    with pytest.raises(OSError, match="disk full"):
        write_page(Document("New", [], []), tmp_path)
    assert "<title>Old</title>" in written.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_matplotlib_is_loaded_only_to_draw(tmp_path, monkeypatch):
    for path in Path(report.__file__).parent.glob("*.py"):
        at_import = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [node for node in at_import if re.search("matplotlib|rich", ast.unparse(node))]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "It works." in markdown(document())
    with pytest.raises(SettingError, match=r"pip install 'vaerdict\[plot\]'"):
        write_page(document(), tmp_path)


def test_inline_drawings_have_ids_of_their_own():
    parts = '<g id="a"/><use xlink:href="#a"/></svg>'
    source = f'<?xml?><svg xmlns="http://x" viewBox="0 0 1 1"><metadata>http://y</metadata>{parts}'
    one = replace(picture("one two"), alt='say "<alt>"')
    assert inline(source, one) == (
        '<svg viewBox="0 0 1 1" role="img" aria-label="say &quot;&lt;alt&gt;&quot;">'
        '<g id="one-two-a"/><use xlink:href="#one-two-a"/></svg>'
    )
    assert 'id="two-a"' in inline(source, replace(one, name="two"))


def test_the_side_menu_leads_to_every_section(tmp_path):
    sections = [Section("A b", ["x"]), Section("A b", ["y"], folded=True), Section(NASTY, ["z"])]
    menu = Live('<ul id="more"></ul>')
    seen, source = outline(write_page(Document("T", ["s"], sections, menu=menu), tmp_path))
    links = [a["href"] for tag, a in seen.attributes if tag == "a"]
    ids = {a.get("id") for tag, a in seen.attributes if tag == "section"}
    assert len(set(links)) == 3
    assert {f"#{name}" for name in ids if name} == set(links)
    assert source.index("<nav") < source.index('id="more"') < source.index("<main>")
    assert re.search(r"<details>\s*<summary><h2>A b</h2></summary>", source)
    alone, _ = outline(write_page(Document("T", ["s"], sections[:1]), tmp_path / "alone"))
    assert alone.count("nav") == 0
