"""The style and the script that every page carries inside itself."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --tint: #f6f8fa;
  --good: #006e51; --bad: #a63d00; --open: #57606a; --best: #e8f3ee; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --paper: #0f1318; --ink: #e6e9ec; --soft: #9aa4ae; --line: #30363d;
  --tint: #171c22; --good: #3fcf9f; --bad: #ff9a62; --open: #9aa4ae; --best: #12352a; --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--line); }
p, li { max-width: 46rem; overflow-wrap: anywhere; }
a { color: var(--accent); }
.summary { background: var(--tint); border: 1px solid var(--line); border-left: 5px solid var(--accent);
  border-radius: 6px; padding: .4rem 1.1rem; font-size: 1.06rem; }
.claims { list-style: none; padding: 0; margin: 0; }
.claims li { border-top: 1px solid var(--line); padding: .75rem 0; max-width: none; }
.claims li:first-child { border-top: 0; }
.claims p { margin: .15rem 0; max-width: 58rem; }
.evidence { color: var(--soft); font-size: .93rem; }
.word { display: inline-block; font-weight: 600; font-size: .85rem; padding: .05rem .6rem; margin-right: .4rem;
  border: 1.5px solid currentColor; border-radius: 1rem; white-space: nowrap; }
.holds { color: var(--good); } .does-not-hold { color: var(--bad); } .not-resolved, .not-run { color: var(--open); }
figure { margin: 1.4rem 0; }
figcaption { font-size: .95rem; max-width: 46rem; margin-bottom: .5rem; }
.note { color: var(--soft); font-size: .88rem; max-width: 46rem; margin: .4rem 0 0; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; max-width: 100%; width: fit-content; }
.scroll:focus-visible, button:focus-visible, summary:focus-visible {
  outline: 3px solid var(--accent); outline-offset: 1px; }
table { border-collapse: separate; border-spacing: 0; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; border-top: 1px solid var(--line); text-align: right; white-space: nowrap; }
thead th { border-top: 0; background: var(--tint); vertical-align: bottom; font-weight: 600; white-space: normal;
  min-width: 4.5rem; }
thead th.text { text-align: left; }
thead th:first-child, tbody th { text-align: left; position: sticky; left: 0; background: var(--paper); }
thead th:first-child { background: var(--tint); }
tbody th { font-weight: 600; white-space: normal; overflow-wrap: anywhere; min-width: 6.5rem; }
td.text { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
td.best { background: var(--best); font-weight: 700; }
th button { all: unset; cursor: pointer; display: inline; }
th button::after { content: "\\a0\\2195"; color: var(--soft); font-weight: 400; }
th[aria-sort=ascending] button::after { content: "\\a0\\2191"; color: var(--ink); }
th[aria-sort=descending] button::after { content: "\\a0\\2193"; color: var(--ink); }
.picture svg { display: block; width: 100%; max-width: 36rem; height: auto; }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; }
@media print { .scroll { overflow: visible; } th button::after { content: ""; } }
""".strip()

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("thead th").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = row => row.cells[column].dataset.v;
      const order = (a, b) => {
        if (key(a) === "" || key(b) === "") return (key(a) === "") - (key(b) === "");
        const by = isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b)) : key(a) - key(b);
        return down ? -by : by;
      };
      body.append(...[...body.rows].sort(order));
    });
  });
}
""".strip()
