"""The markup of the live parts of the page: the cards of the verdict, and the plots and the table of genes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vaerdict.report.document import Live
from vaerdict.report.page import text

_SYMBOLS = {"good": "✓", "open": "!", "bad": "✗"}

_PLOTS = {
    "volcano": "Volcano plot: q-value against fold change. Dashed: the FDR asked for and delta. Where q-values are "
    "very small, the vertical scale is compressed; those of zero are drawn at the top.",
    "ma": "MA plot: fold change against mean expression.",
    "fdr": "Expected FDR of the list of this contrast by its length; the band is the 90 % range of the share of false "
    "calls. Dashed: the FDR asked for and the length of the list.",
    "truth": "Estimated against true fold change, which is known because the data were simulated. Dashed: equality.",
}


class Card(NamedTuple):
    """A question, its answer, what the answer means, and its tone: good, open or bad."""

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
        f'<p class="answer">{symbol} {text(card.answer)}</p><p>{text(card.meaning)}</p></li>'
    )


def genes_view(data: str) -> Live:
    """The choice of contrast, the plots and the table around `data`, which is JSON made safe for a script element."""
    plots = "".join(
        f'<figure><figcaption id="de-{name}-caption">{text(caption)}</figcaption>\n'
        f'<canvas id="de-{name}" tabindex="0" role="application" aria-describedby="de-{name}-caption">'
        "</canvas></figure>\n"
        for name, caption in _PLOTS.items()
    )
    return Live(f"""<script type="application/json" id="de-data">{data}</script>
<noscript>
<p>The plots and the table of genes need scripts; de.csv beside this page holds the same numbers.</p>
</noscript>
<div class="de" id="de" hidden>
<p><label for="de-contrast">Contrast</label> <select id="de-contrast"></select></p>
<p id="de-now" role="status"></p>
<ul class="legend" aria-label="Marks in the plots">
<li><span class="up" aria-hidden="true">▲</span> <span id="de-up"></span></li>
<li><span class="down" aria-hidden="true">▼</span> <span id="de-down"></span></li>
<li id="de-hollow" hidden><span aria-hidden="true">△▽</span> called only thanks to the prior</li>
<li><span class="quiet" aria-hidden="true">●</span> not called</li>
</ul>
<p class="note">Point at a mark to read it, or focus a plot and use the arrow keys; Enter or a click
finds the gene in the table.</p>
<div class="plots">
{plots}<p class="tip" id="de-tip" role="status" hidden></p>
</div>
{_TABLE}
</div>""")


_TABLE = """<h3 id="de-title">All genes</h3>
<div class="tools" role="search">
<label>Search
<input type="search" id="de-search" placeholder="CD79A, LYZ" autocomplete="off" spellcheck="false"></label>
<label><input type="checkbox" id="de-only"> called genes only</label>
<label hidden><input type="checkbox" id="de-prior"> called only thanks to the prior</label>
<label><input type="checkbox" id="de-extra"> all columns</label>
<button type="button" class="act" id="de-save">Download as CSV</button>
</div>
<p class="note" id="de-untested" role="status" hidden></p>
<div class="scroll" role="region" tabindex="0" aria-labelledby="de-title">
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
</details>"""
