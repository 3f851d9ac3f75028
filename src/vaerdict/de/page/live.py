"""The markup of the live parts of the page, which its script fills, and the cards of the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vaerdict.report.document import Live
from vaerdict.report.page import text

_SYMBOLS = {"good": "✓ ", "open": "! ", "bad": "✗ ", "plain": ""}

_PLOTS = {
    "volcano": "Volcano plot. Dashed: the FDR asked for, and delta.",
    "ma": "MA plot: fold change against mean expression.",
    "fdr": "Expected FDR of the list of this contrast by its length; the band is the 90 % range of the share of false "
    "calls. Dashed: the FDR asked for and the length of the list.",
}


class Card(NamedTuple):
    """A question, its answer, what the answer means, and its tone: good, open or bad, or plain for neither of them."""

    question: str
    answer: str
    meaning: str
    tone: str


def cards(answers: Sequence[Card]) -> Live:
    """The answers at a glance; a symbol accompanies every colour."""
    return Live('<ul class="cards">\n' + "\n".join(map(_card, answers)) + "\n</ul>")


def _card(card: Card) -> str:
    symbol = f'<span aria-hidden="true">{_SYMBOLS[card.tone]}</span>'
    return (
        f'<li class="{card.tone}"><p class="question">{text(card.question)}</p>'
        f'<p class="answer">{symbol}{text(card.answer)}</p><p>{text(card.meaning)}</p></li>'
    )


def _plot(name: str) -> str:
    return (
        f'<figure><canvas id="de-{name}" tabindex="0" role="application" aria-describedby="de-{name}-caption"></canvas>'
        f'<figcaption id="de-{name}-caption">{text(_PLOTS[name])}</figcaption></figure>'
    )


MENU = Live("""<div class="live" hidden><p class="heading" id="de-contrasts-title">Contrasts, genes called</p>
<ul id="de-contrasts" aria-labelledby="de-contrasts-title"></ul></div>
""")


def result_view(data: str) -> Live:
    """The choice of contrast, leading genes and first plots; `data` is JSON made safe for a script element."""
    return Live(f"""<script type="application/json" id="de-data">{data}</script>
<noscript>
<p>The plots and the table of genes need scripts; de.csv beside this page holds the same numbers.</p>
</noscript>
<div class="live" id="de" hidden>
<p class="tools"><label>Contrast <select id="de-contrast"></select></label> <span id="de-sizes"></span></p>
<p id="de-none" hidden>No gene is called; the plots show the genes of smallest q.</p>
<div class="chips" id="de-top-up"></div>
<div class="chips" id="de-top-down"></div>
<div class="plots">
{_plot("volcano")}
<figure><div class="scroll dots" role="region" tabindex="0" aria-labelledby="de-dots-caption">
<table id="de-dots"><thead></thead><tbody></tbody></table></div>
<figcaption id="de-dots-caption">Leading genes by group. Area: share of cells in which the gene is seen
<span class="key"><span class="dot" style="--size:.5;--tone:60%"></span> 25 %
<span class="dot" style="--size:1;--tone:60%"></span> 100 %</span>; colour: mean share of the counts, relative to the
largest in the row.</figcaption></figure>
</div>
<ul class="legend" aria-label="Marks in the plots">
<li><span class="up" aria-hidden="true">▲</span> <span id="de-up"></span></li>
<li><span class="down" aria-hidden="true">▼</span> <span id="de-down"></span></li>
<li id="de-hollow" hidden><span aria-hidden="true">△▽ *</span> called only thanks to the prior</li>
<li><span class="quiet" aria-hidden="true">●</span> not called</li>
</ul>
<p class="note">Point at a mark to read it, or focus a plot and use the arrow keys. A click, or Enter, shows the gene
below.</p>
<p class="tip" id="de-tip" role="status" hidden></p>
</div>""")


GENE = Live("""<div class="live" hidden id="de-gene">
<form class="tools" id="de-find" role="search" aria-label="Find one gene"><label>Gene
<input type="search" id="de-gene-name" autocomplete="off" spellcheck="false"></label>
<button type="submit" class="act">Show</button></form>
<h3 id="de-gene-title" tabindex="-1"></h3>
<div id="de-gene-facts" role="status"></div>
<p class="note" id="de-no-cells"></p>
<div class="plots">
<figure><canvas id="de-distribution" role="img"></canvas>
<figcaption>Cells in both groups, and in their samples where these are named. Shape: cells in which the gene is seen;
diamond: mean.</figcaption></figure>
<figure><canvas id="de-estimates" role="img"></canvas>
<figcaption>Log2 fold changes: as reported, by what else is known, and in the other contrasts. Dashed:
delta.</figcaption></figure>
</div></div>""")
"""The panel of one gene."""

HEAT = Live("""<div class="live" hidden>
<div class="scroll heat" role="region" tabindex="0" aria-labelledby="de-heat-caption">
<table id="de-heat"><thead></thead><tbody></tbody></table></div>
<p class="note"><span id="de-heat-caption">Log2 fold changes of the leading genes of each contrast.</span>
<span id="de-heat-note"></span></p></div>""")
"""Genes by contrasts."""

MORE_PLOTS = Live(f'<div class="live" hidden><div class="plots">\n{_plot("ma")}\n{_plot("fdr")}\n</div></div>')


def cells_view(name: str, n: int, of: int) -> Live:
    """The map of cells; `name` says what it is."""
    some = f" {n:,} of the {of:,} cells compared, drawn at random within groups." if n < of else ""
    return Live(f"""<div class="live" hidden>
<p class="tools"><label>Colour by <select id="de-colour"></select></label></p>
<ul class="legend" id="de-map-legend" aria-label="Colours of the map"></ul>
<figure><canvas id="de-map" role="img"></canvas>
<figcaption>{text(name[:1].upper() + name[1:])}.{some}</figcaption></figure>
</div>""")


TABLE = Live("""<div class="live" hidden>
<p id="de-now" role="status"></p>
<div class="tools" role="search" aria-label="Search the table">
<label>Search
<input type="search" id="de-search" placeholder="CD79A, LYZ" autocomplete="off" spellcheck="false"></label>
<label><input type="checkbox" id="de-only"> called genes only</label>
<label hidden><input type="checkbox" id="de-prior"> called only thanks to the prior</label>
<label><input type="checkbox" id="de-extra"> all columns</label>
<button type="button" class="act" id="de-save">Download as CSV</button>
<button type="button" class="act" id="de-copy">Copy names</button>
</div>
<p class="note" id="de-untested" role="status" hidden></p>
<div class="scroll" role="region" tabindex="0" aria-label="All genes">
<table id="de-table"><thead></thead><tbody></tbody></table>
</div>
<nav class="pager" aria-label="Pages of the table">
<button type="button" class="act" id="de-first">First</button>
<button type="button" class="act" id="de-back">Back</button>
<span id="de-where" role="status"></span>
<button type="button" class="act" id="de-next">Next</button>
<button type="button" class="act" id="de-last">Last</button>
</nav>
<details><summary>What the columns mean</summary>
<dl class="meanings" id="de-meanings"></dl>
<p class="note">Numbers on this page have six significant digits; de.csv holds all digits.</p>
</details></div>""")
"""The table of all genes."""
