"""The markup of the live parts of the page: the cards of the verdict, and the plots and the table of genes."""

from __future__ import annotations

from collections.abc import Sequence

from vaerdict.de.page.messages import Answer
from vaerdict.de.page.table import MEASURES
from vaerdict.report.document import Live
from vaerdict.report.page import text

_SYMBOLS = {"good": "✓", "open": "!", "bad": "✗"}

_PLOTS = (
    (
        "volcano",
        "Volcano plot: how large the change is against how sure. Dashed: the chosen rate and delta. Genes whose q "
        "is zero stand on the top edge.",
    ),
    ("ma", "MA plot: the change against how strongly the gene is expressed."),
    (
        "fdr",
        "Expected false discovery rate of this contrast's list by its length; the band is the range that the share of "
        "false calls may well take. Dashed: the chosen "
        "rate and the list it gives.",
    ),
    ("truth", "The estimate against the truth, known since the data were simulated. Dashed: equality."),
)


def cards(answers: Sequence[Answer]) -> Live:
    """The answers at a glance; a symbol and a word stand beside every colour."""
    return Live('<ul class="cards">\n' + "\n".join(map(_card, answers)) + "\n</ul>")


def _card(answer: Answer) -> str:
    symbol = f'<span aria-hidden="true">{_SYMBOLS[answer.tone]}</span>'
    return (
        f'<li class="{answer.tone}"><p class="question">{text(answer.question)}</p>'
        f'<p class="answer">{symbol} {text(answer.answer)}</p><p>{text(answer.meaning)}</p></li>'
    )


def genes_view(data: str) -> Live:
    """The chooser, the plots and the table of genes around `data`, which is JSON made safe for a script element."""
    return Live(f"""<script type="application/json" id="de-data">{data}</script>
<noscript>
<p>The plots and the table of genes need scripts; de.csv beside this page holds the same numbers.</p>
</noscript>
<div class="de" id="de" hidden>
<p><label for="de-contrast">Contrast</label> <select id="de-contrast"></select></p>
<p id="de-now" role="status"></p>
<ul class="legend" aria-label="Marks in the plots">
<li><span class="up" aria-hidden="true">▲</span> called, higher in group A</li>
<li><span class="down" aria-hidden="true">▼</span> called, lower in group A</li>
<li><span class="quiet" aria-hidden="true">●</span> not called</li>
</ul>
<p class="note">Point at a mark to read it, or focus a plot and use the arrow keys; Enter or a click
looks the gene up.</p>
<div class="plots">
{"".join(_plot(name, caption) for name, caption in _PLOTS)}<p class="tip" id="de-tip" role="status" hidden></p>
</div>
{_table()}
</div>""")


def _plot(name: str, caption: str) -> str:
    return (
        f'<figure><figcaption id="de-{name}-caption">{text(caption)}</figcaption>\n'
        f'<canvas id="de-{name}" tabindex="0" role="application" aria-describedby="de-{name}-caption">'
        "</canvas></figure>\n"
    )


def _table() -> str:
    return f"""<h3 id="de-title">All genes</h3>
<div class="tools" role="search">
<label>Search
<input type="search" id="de-search" placeholder="CD79A, LYZ" autocomplete="off" spellcheck="false"></label>
<label><input type="checkbox" id="de-only"> called genes only</label>
<label><input type="checkbox" id="de-extra"> all columns</label>
<button type="button" class="act" id="de-save">Download as CSV</button>
</div>
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
<dl class="meanings">
{_meanings()}
</dl>
<p class="note">Numbers on this page carry six significant digits; de.csv holds all of them.</p>
</details>"""


def _meanings() -> str:
    return "\n".join(f"<dt>{text(m.title)} ({text(m.key)})</dt><dd>{text(m.about)}</dd>" for m in MEASURES)
