"""Pages in a real browser, used as a reader would: part of the suite where one is installed."""

from __future__ import annotations

import csv
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browsers import AXE, CHROMIUM, DRIVER, Browser
from de_runs import NAMES, run_in, shown_cells
from test_calibration_page import run_in as calibration_in
from vaerdict.report import render

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver on the path"),
]
FEW = "seen in fewer than 10 of the cells compared"
KEY = {"right": "\ue014", "enter": "\ue007", "tab": "\ue004", "escape": "\ue00c"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    pytest.importorskip("selenium", reason="needs selenium: pip install 'vaerdict[browser]'")
    browser = Browser(tmp_path_factory.mktemp("downloads"))
    yield browser
    browser.driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    de = run_in(folder / "de", n_genes=600, cells=True, untested=((NAMES[0], "CD19", 3, FEW),))
    one = run_in(folder / "one", n_genes=60, names=NAMES[1:2], simulated=True, extra=("=SUM(A1)",))
    return {"de": render(de), "one": render(one), "calibrate": render(calibration_in(folder / "calibrate"))}


@pytest.fixture
def de(browser, pages) -> Browser:
    browser.open(pages["de"])
    return browser


def text(browser: Browser, name: str) -> str:
    return browser.run("return document.getElementById('de-' + arguments[0]).textContent", name)


def click(browser: Browser, selector: str) -> None:
    browser.run("document.querySelector(arguments[0]).click()", selector)


def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The value of the condition as soon as it is true."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return value


@pytest.mark.parametrize("name", ["de", "one", "calibrate"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_pages_load_without_a_complaint_and_fit_the_screen(browser, pages, name, width, dark):
    browser.open(pages[name], width=width, dark=dark)
    assert browser.complaints() == []
    assert browser.run("return document.documentElement.scrollWidth") <= width
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") != dark


@pytest.mark.skipif(AXE is None, reason="needs axe-core: set VAERDICT_AXE to the path of axe.min.js")
@pytest.mark.parametrize("name", ["de", "one", "calibrate"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_pages_have_no_accessibility_violations(browser, pages, name, width, dark):
    browser.open(pages[name], width=width, dark=dark)
    browser.run("for (const folded of document.querySelectorAll('main details')) folded.open = true")
    assert browser.violations() == []


def test_the_first_screen_holds_verdict_genes_and_plots(de):
    bottom = "return document.getElementById('de-' + arguments[0]).getBoundingClientRect().bottom"
    names = ("contrast", "top-up", "top-down", "volcano", "dots")
    assert {name: y for name in names if not 0 < (y := de.run(bottom, name)) <= 800} == {}
    lines = """return [...document.querySelectorAll('.summary p')].map(
        p => p.clientHeight / parseFloat(getComputedStyle(p).lineHeight))"""
    assert sum(map(round, de.run(lines))) <= 3
    genes = de.run("return [...document.querySelectorAll('#de-top-up .chip')].map(chip => chip.textContent)")
    assert len(genes) == 6
    assert all("+" in gene for gene in genes)


def test_the_menu_leads_to_sections_and_contrasts(de):
    click(de, 'nav.menu a[href="#section-how-far-to-trust-the-list"]')
    assert de.run("return document.querySelector('#section-how-far-to-trust-the-list details').open")
    assert de.run("return document.activeElement.id") == "section-how-far-to-trust-the-list"
    buttons = "return [...document.querySelectorAll('#de-contrasts button')].map(b => b.textContent)"
    assert [label.startswith(name) for label, name in zip(de.run(buttons), NAMES, strict=True)] == [True] * 3
    click(de, "#de-contrasts li:nth-child(3) button")
    assert text(de, "sizes").startswith("NK cells (340 cells)")
    assert "contrast=2" in de.run("return location.hash")


def test_the_table_sorts_and_searches_and_says_what_was_not_tested(de):
    first = "return document.querySelector('#de-table tbody th').textContent"
    click(de, '#de-table thead button[data-key="gene"]')
    assert de.run(first) == "GENE0"
    assert de.run("return document.querySelector('#de-table [aria-sort]').getAttribute('aria-sort')") == "ascending"
    de.run("document.getElementById('de-search').focus()")
    de.keys("GENE77")
    assert de.run(first) == "GENE77"
    de.run("document.getElementById('de-search').value = ''")
    de.keys("CD19")
    assert FEW in text(de, "untested")
    de.run("document.getElementById('de-gene-name').value = 'cd19'")
    click(de, "#de-find button")
    assert text(de, "gene-facts") == f"CD19 was not tested: seen in 3 cells; {FEW}."


def test_a_gene_has_a_panel_with_its_cells(de):
    click(de, "#de-top-down .chip")
    gene = text(de, "gene-title")
    assert gene in text(de, "top-down")
    assert "Called, higher in CD14+ Monocytes" in text(de, "gene-facts")
    de.run("document.getElementById('de-gene-name').value = 'GENE4'")
    click(de, "#de-find button")
    label = de.run("return document.getElementById('de-distribution').getAttribute('aria-label')")
    assert label.startswith("Expression of GENE4: B cells: mean ")
    assert "s2: mean" in label
    assert NAMES[1] in de.run("return document.getElementById('de-estimates').getAttribute('aria-label')")
    de.run("document.getElementById('de-gene-name').value = 'GENE500'")
    click(de, "#de-find button")
    assert "40 leading genes" in text(de, "no-cells")


def test_shares_in_the_panel_are_those_of_the_counts(de):
    """Counts go through bytes of seven bits and base64."""
    cells = shown_cells(NAMES, [f"GENE{i}" for i in range(600)])
    seen = cells.counts.toarray()[cells.sides[0] == 1, 4] > 0
    de.run("document.getElementById('de-gene-name').value = 'GENE4'")
    click(de, "#de-find button")
    label = de.run("return document.getElementById('de-distribution').getAttribute('aria-label')")
    found = re.search(r"B cells: mean [\d.]+, seen in (\d+)% of (\d+) cells", label)
    assert found is not None
    assert (int(found[1]), int(found[2])) == (round(100 * seen.mean()), len(seen))


@pytest.mark.parametrize("colour", ["group", "sample", "gene", "khat"])
def test_the_map_is_coloured_by_what_is_chosen(de, colour):
    before = de.run("return document.getElementById('de-map').toDataURL()")
    choose = (
        "const c = document.getElementById('de-colour'); c.value = arguments[0]; c.dispatchEvent(new Event('change'))"
    )
    de.run("document.getElementById('de-gene-name').value = 'GENE4'")
    click(de, "#de-find button")
    de.run(choose, colour)
    assert de.run("return document.getElementById('de-map').toDataURL()") != before
    legend = {"group": "NK cells", "sample": "s2", "gene": "GENE4", "khat": "0.7"}[colour]
    assert legend in text(de, "map-legend")


def test_the_volcano_is_read_by_keys(de):
    de.run("document.getElementById('de-volcano').focus()")
    de.keys(KEY["right"])
    assert not de.run("return document.getElementById('de-tip').hidden")
    gene = de.run("return document.querySelector('#de-tip strong').textContent")
    de.keys(KEY["escape"])
    assert de.run("return document.getElementById('de-tip').hidden")
    de.keys(KEY["right"], KEY["enter"])
    assert text(de, "gene-title") == gene
    assert de.run("return document.activeElement.id") == "de-gene-title"
    de.keys(KEY["tab"])
    assert de.run("return document.activeElement !== document.body")


def test_the_heat_map_compares_contrasts(de):
    heads = de.run("return [...document.querySelectorAll('#de-heat thead button')].map(b => b.textContent)")
    assert heads == list(NAMES)
    click(de, "#de-heat thead th:nth-child(3) button")
    assert text(de, "sizes").startswith("B cells (340 cells) against the rest")
    gene = de.run("return document.querySelector('#de-heat tbody button').textContent")
    click(de, "#de-heat tbody button")
    assert text(de, "gene-title") == gene


def test_the_list_is_downloaded_and_copied(de):
    de.run("document.getElementById('de-only').click()")
    n = int(de.run("return document.getElementById('de').dataset.rows"))
    click(de, "#de-save")
    file = until(lambda: next(de.downloads.glob("de-*.csv"), None))
    until(lambda: file.stat().st_size)
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == n
    assert {row["is_de"] for row in rows} == {"True"}
    de.driver.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    click(de, "#de-copy")
    until(lambda: text(de, "copy") == f"Copied {n} names")


def test_no_text_of_the_list_downloaded_is_a_formula(browser, pages):
    browser.open(pages["one"])
    before = set(browser.downloads.iterdir())
    click(browser, "#de-save")
    file = until(lambda: next((f for f in set(browser.downloads.iterdir()) - before if f.suffix == ".csv"), None))
    until(lambda: file.stat().st_size)
    with file.open(newline="") as lines:
        rows = {row["gene"]: row for row in csv.DictReader(lines)}
    assert "'=SUM(A1)" in rows
    assert "=SUM(A1)" not in rows
    assert any(row["lfc_mean"].startswith("-") for row in rows.values())  # numbers are as they are


def test_a_small_screen_folds_the_menu(browser, pages):
    browser.open(pages["de"], width=390)
    assert not browser.run("return document.querySelector('nav.menu details').open")
    browser.open(pages["de"])
    assert browser.run("return document.querySelector('nav.menu details').open")


def test_the_state_is_in_the_address(browser, pages):
    browser.open(pages["de"], address="#contrast=1&gene=GENE7&sort=lfc_mean&dir=desc")
    assert (text(browser, "gene-title"), browser.run("return document.getElementById('de-contrast').value")) == (
        "GENE7",
        "1",
    )
    values = browser.run("return [...document.querySelectorAll('#de-table tbody tr')].map(r => r.cells[1].textContent)")
    assert [float(v.replace("\N{MINUS SIGN}", "-")) for v in values] == sorted(
        (float(v.replace("\N{MINUS SIGN}", "-")) for v in values), reverse=True
    )


def test_contrasts_of_the_same_groups_go_by_their_cell_type(browser, tmp_path):
    names = ("stim vs ctrl within B", "stim vs ctrl within NK")
    folder = run_in(tmp_path, n_genes=40, names=names)
    results = json.loads((folder / "results.json").read_text())
    for contrast, within in zip(results["contrasts"], ("B", "NK"), strict=True):
        contrast |= {"group_a": "stim", "group_b": "ctrl", "within": within}
    (folder / "results.json").write_text(json.dumps(results))
    browser.open(render(folder))
    heads = browser.run("return [...document.querySelectorAll('#de-heat thead button')].map(b => b.textContent)")
    assert heads == ["B", "NK"]
