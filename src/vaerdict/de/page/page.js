// The page's state, and the table and plots that follow it. Names are only ever set as text, never as markup.

const PAGE_ROWS = 25;
const root = document.getElementById("de"), packed = JSON.parse(document.getElementById("de-data").textContent);
const part = name => document.getElementById("de-" + name);
const state = { contrast: 0, sort: "", dir: "asc", search: "", only: false, page: 0, extra: false, focus: -1, step: -1 };
let shown = [];   // the rows that pass the search, in order
let plots = [];   // what has been drawn, to redraw and to find marks in

const here = () => packed.contrasts[state.contrast];
const column = key => here().columns[key] || [];
const measure = key => packed.measures.find(m => m.key === key);
const finite = v => v !== null && v !== undefined;

// ---------------------------------------------------------------- numbers in print
function printed(value, kind, gene) {
  if (!finite(value)) return "\u2013";
  if (kind === "text") return value;
  if (kind === "flag") return value ? (gene === DOWN ? "\u25bc down" : gene === UP ? "\u25b2 up" : "yes") : "no";
  if (kind === "lfc") return minus((value > 0 ? "+" : "") + value.toFixed(2));
  if (kind === "prob") return value.toFixed(3);
  if (value === 0) return "0";
  if (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5) return minus(value.toExponential(2));
  return minus(value.toPrecision(3).replace(/e\+?(-?\d+)$/, "e$1"));
}

function side(i) {
  if (!column("is_de")[i]) return NOT_CALLED;
  return column("lfc_mean")[i] < 0 ? DOWN : UP;
}

function count(n) { return n.toLocaleString("en"); }

// ---------------------------------------------------------------- which rows, in which order
function matching() {
  const wanted = state.search.toLowerCase().split(/[\s,;]+/).filter(Boolean), genes = column("gene"), flags = column("is_de");
  const rows = [];
  for (let i = 0; i < genes.length; i += 1) {
    if (state.only && !flags[i]) continue;
    const gene = genes[i].toLowerCase();
    if (!wanted.length || gene.includes(state.search.toLowerCase()) || wanted.some(w => gene.includes(w))) rows.push(i);
  }
  return rows;
}

function ordered(rows) {
  if (!state.sort) return ranked(rows);
  const values = column(state.sort), sign = state.dir === "desc" ? -1 : 1;
  return rows.sort((a, b) => {
    const [u, v] = [values[a], values[b]];
    if (!finite(u) || !finite(v)) return finite(v) - finite(u) || a - b;
    return sign * (typeof u === "string" ? u.localeCompare(v, "en", { numeric: true }) : u - v) || a - b;
  });
}

function ranked(rows) {
  const q = column("q_value"), lfc = column("lfc_mean"), last = v => finite(v) ? v : Infinity;
  return rows.sort((a, b) => last(q[a]) - last(q[b]) || Math.abs(lfc[b]) - Math.abs(lfc[a]) || a - b);
}

// ---------------------------------------------------------------- the table
function visibleMeasures() { return packed.measures.filter(m => (state.extra || !m.extra) && column(m.key).length); }

function heading(m) {
  const head = document.createElement("th"), button = document.createElement("button"), name = document.createElement("abbr");
  head.scope = "col";
  if (m.key === state.sort) head.setAttribute("aria-sort", state.dir === "asc" ? "ascending" : "descending");
  if (m.kind === "text" || m.kind === "flag") head.className = "text";
  name.textContent = m.title;
  name.title = m.about;
  button.type = "button";
  button.dataset.key = m.key;
  button.append(name);
  button.addEventListener("click", () => {
    const first = m.kind === "text" || m.key === "q_value" || m.key === "mcse" ? "asc" : "desc";
    const turned = state.dir === "asc" ? "desc" : "asc";
    go({ sort: m.key, dir: state.sort === m.key ? turned : first, page: 0 });
    root.querySelector(`thead button[data-key="${m.key}"]`).focus();
  });
  head.append(button);
  return head;
}

function tableRow(i, measures) {
  const row = document.createElement("tr");
  for (const m of measures) {
    const cell = document.createElement(m.key === "gene" ? "th" : "td");
    const way = m.key === "is_de" ? side(i) : NOT_CALLED;
    if (m.key === "gene") cell.scope = "row";
    if (m.kind === "flag") cell.className = "flag" + (way === UP ? " up" : way === DOWN ? " down" : "");
    cell.textContent = printed(column(m.key)[i], m.kind, way);
    row.append(cell);
  }
  row.addEventListener("pointerenter", () => focusOn(i));
  return row;
}

function drawTable() {
  shown = ordered(matching());
  const pages = Math.max(1, Math.ceil(shown.length / PAGE_ROWS));
  state.page = Math.min(Math.max(state.page, 0), pages - 1);
  const from = state.page * PAGE_ROWS, rows = shown.slice(from, from + PAGE_ROWS), measures = visibleMeasures();
  const head = document.createElement("tr");
  head.append(...measures.map(heading));
  part("table").tHead.replaceChildren(head);
  part("table").tBodies[0].replaceChildren(...rows.map(i => tableRow(i, measures)));
  part("where").textContent = rows.length
    ? `${count(from + 1)}\u2013${count(from + rows.length)} of ${count(shown.length)} genes` : "No gene matches.";
  for (const name of ["first", "back"]) part(name).disabled = state.page === 0;
  for (const name of ["next", "last"]) part(name).disabled = state.page === pages - 1;
  part("save").textContent = `Download ${count(shown.length)} rows as CSV`;
  Object.assign(root.dataset, { sort: state.sort, dir: state.dir, search: state.search, page: state.page, rows: shown.length });
}

function csv() {
  const quoted = v => /[",\r\n]/.test(v) ? `"${v.replaceAll('"', '""')}"` : v;
  const text = v => !finite(v) ? "" : v === true ? "True" : v === false ? "False" : quoted(String(v));
  const keys = packed.measures.map(m => m.key).filter(key => column(key).length);
  const lines = shown.map(i => [here().name, ...keys.map(key => column(key)[i])].map(text).join(","));
  return [["contrast", ...keys].join(","), ...lines].join("\r\n") + "\r\n";
}

function save() {
  const link = document.createElement("a"), address = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
  link.href = address;
  link.download = "de-" + here().name.replace(/[^0-9A-Za-z]+/g, "-").slice(0, 60) + ".csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// ---------------------------------------------------------------- the plots
function logs(values) { return values.map(v => finite(v) && v > 0 ? Math.log10(v) : null); }

function volcano(kind) {
  const q = column("q_value"), positive = q.filter(v => v > 0), level = here().level;
  const floor = Math.max(1e-10, positive.reduce((a, b) => Math.min(a, b), finite(level) ? level / 10 : 0.01));
  const data = {
    x: column("lfc_mean"), y: q.map(v => finite(v) ? -Math.log10(Math.max(v, floor)) : null), kind,
    left: column("lfc_low"), right: column("lfc_high"), above: true,
  };
  const lines = made => {
    const delta = here().delta, { box } = made;
    if (finite(level) && level > 0) dashed(made, box.x0, made.y(-Math.log10(level)), box.x1, made.y(-Math.log10(level)));
    if (delta) for (const at of [-delta, delta]) dashed(made, made.x(at), box.y0, made.x(at), box.y1);
  };
  return { data, lines, spec: {
    xRange: range(data.x, [-1, 1]), yRange: range(data.y, [0, -1.1 * Math.log10(floor)]),
    xTitle: "log2 fold change", yTitle: "\u2212log10 q",
  } };
}

function ma(kind) {
  const a = column("mean_a"), b = column("mean_b");
  const x = logs(a.map((v, i) => finite(v) && finite(b[i]) ? (v + b[i]) / 2 : null));
  const data = { x, y: column("lfc_mean"), kind, low: column("lfc_low"), high: column("lfc_high") };
  const lines = made => dashed(made, made.box.x0, made.y(0), made.box.x1, made.y(0));
  return { data, lines, spec: {
    xRange: range(x, []), yRange: range(data.y, [-1, 1]), xLog: true,
    xTitle: "mean expression (log scale)", yTitle: "log2 fold change",
  } };
}

function truth(kind) {
  const data = { x: here().truth, y: column("lfc_mean"), kind, low: column("lfc_low"), high: column("lfc_high") };
  const both = range([...data.x, ...data.y], [-1, 1]);
  const lines = made => dashed(made, made.x(both[0]), made.y(both[0]), made.x(both[1]), made.y(both[1]));
  return { data, lines, spec: { xRange: both, yRange: both, xTitle: "true log2 fold change", yTitle: "estimate" } };
}

function drawScatter(name, build) {
  const canvas = part(name), { data, lines, spec } = build(column("gene").map((_, i) => side(i)));
  const made = frame(canvas, spec);
  lines(made);
  canvas.dataset.points = scatter(made, data);
  names(made, data, labelled(data), i => column("gene")[i]);
  canvas.setAttribute("aria-label", inWords(spec));
  plots.push({ canvas, made, data, base: copied(canvas) });
}

// The strongest of each side, so that the eye has names to start from.
function labelled(data) {
  const lfc = column("lfc_mean"), drawn = i => finite(data.x[i]) && finite(data.y[i]);
  const by = kind => lfc.map((_, i) => i).filter(i => data.kind[i] === kind && drawn(i))
    .sort((a, b) => Math.abs(lfc[b]) - Math.abs(lfc[a])).slice(0, 6);
  return [...by(UP), ...by(DOWN)];
}

function inWords(spec) {
  const kinds = column("gene").map((_, i) => side(i)), n = kind => count(kinds.filter(k => k === kind).length);
  return `${spec.yTitle} against ${spec.xTitle} of ${count(kinds.length)} genes: ${n(UP)} called up, ${n(DOWN)} called down, ` +
    `${n(NOT_CALLED)} not called. Arrow keys step through the called genes, Enter looks one up in the table.`;
}

// Lists far beyond the chosen rate are of no use to anyone, and would press the part that matters into a corner.
function curveEnd({ k, expected }, level) {
  const beyond = expected.findIndex(v => v > 6 * level);
  return beyond < 2 ? k.length : beyond + 1;
}

function drawCurve() {
  const curve = here().curve, canvas = part("fdr");
  canvas.closest("figure").hidden = !curve || !curve.k.length;
  if (!curve || !curve.k.length) return;
  const level = here().level, end = curveEnd(curve, level || 0.05), cut = values => values.slice(0, end);
  const [k, expected, low, high] = [curve.k, curve.expected, curve.low || curve.expected, curve.high || curve.expected].map(cut);
  const made = frame(canvas, {
    xRange: [0, k[k.length - 1]], yRange: [0, 1.2 * Math.max(expected[k.length - 1], 2 * (level || 0.05))],
    xTitle: "genes in the list", yTitle: "expected FDR",
  });
  ribbon(made, k, low, high);
  line(made, k, expected);
  if (finite(level)) dashed(made, made.box.x0, made.y(level), made.box.x1, made.y(level));
  const n = here().n_discoveries;
  if (n) dashed(made, made.x(n), made.box.y0, made.x(n), made.box.y1);
  canvas.setAttribute("aria-label", `Expected false discovery rate against the length of the list: ` +
    `${count(n || 0)} genes at a level of ${level}. Arrow keys read the curve.`);
  plots.push({ canvas, made, data: { x: k, y: expected, low, high }, base: copied(canvas), isCurve: true });
}

function draw() {
  plots = [];
  drawScatter("volcano", volcano);
  if (column("mean_a").length && column("mean_b").length) drawScatter("ma", ma);
  else part("ma").closest("figure").hidden = true;
  part("truth").closest("figure").hidden = !here().truth;
  if (here().truth) drawScatter("truth", truth);
  drawCurve();
  highlight();
}

// ---------------------------------------------------------------- the gene in focus
// Thirty thousand marks are drawn once; what moves is drawn upon the copy.
function highlight() {
  for (const { made, data, base, isCurve } of plots) {
    const i = isCurve ? state.step : state.focus;
    restored(made.pen, base);
    if (i >= 0 && finite(data.x[i]) && finite(data.y[i])) ring(made, data, i);
  }
}

function say(plot, i, lines) {
  const tip = part("tip"), [name, ...rest] = lines, strong = document.createElement("strong");
  strong.textContent = name;
  tip.replaceChildren(strong, ...rest.flatMap(text => [document.createElement("br"), text]));
  tip.hidden = false;
  const area = tip.offsetParent.getBoundingClientRect(), at = plot.canvas.getBoundingClientRect();
  const x = at.left - area.left + plot.made.x(plot.data.x[i]), y = at.top - area.top + plot.made.y(plot.data.y[i]);
  tip.style.left = Math.max(0, Math.min(x + 14, area.width - tip.offsetWidth)) + "px";
  tip.style.top = y + 16 + "px";
}

function geneWords(i) {
  const show = (key, kind) => printed(column(key)[i], kind);
  const words = [
    column("gene")[i],
    `LFC ${show("lfc_mean", "lfc")} [${show("lfc_low", "lfc")}, ${show("lfc_high", "lfc")}]`,
    `q ${show("q_value", "small")}, P(DE) ${show("prob_de", "prob")}`,
  ];
  if (here().truth && finite(here().truth[i])) words.push(`true LFC ${printed(here().truth[i], "lfc")}`);
  return [...words, ["not called", "called up", "called down"][side(i)]];
}

function focusOn(i) {
  if (i === state.focus) return;
  state.focus = i;
  highlight();
}

function point(plot, i) {
  if (plot.isCurve) {
    state.step = i;
    highlight();
    const share = v => (100 * v).toFixed(1) + "%";
    say(plot, i, [`${count(plot.data.x[i])} genes`,
      `expected FDR ${share(plot.data.y[i])} [${share(plot.data.low[i])}, ${share(plot.data.high[i])}]`]);
  } else {
    focusOn(i);
    say(plot, i, geneWords(i));
  }
}

function clear() {
  part("tip").hidden = true;
  state.focus = state.step = -1;
  highlight();
}

function listen(canvas) {
  const plot = () => plots.find(p => p.canvas === canvas);
  canvas.addEventListener("pointermove", event => {
    const at = canvas.getBoundingClientRect();
    const i = nearest(plot().made, plot().data, event.clientX - at.left, event.clientY - at.top, plot().isCurve ? 60 : 14);
    if (i >= 0) point(plot(), i); else if (!part("tip").hidden) clear();
  });
  canvas.addEventListener("pointerleave", clear);
  canvas.addEventListener("blur", clear);
  canvas.addEventListener("click", () => { if (!plot().isCurve && state.focus >= 0) lookUp(); });
  canvas.addEventListener("keydown", event => step(event, plot()));
}

function step(event, plot) {
  const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
  if (event.key === "Escape") return clear();
  if (event.key === "Enter" && !plot.isCurve && state.focus >= 0) return lookUp();
  if (!way) return;
  event.preventDefault();
  const stops = plot.isCurve ? plot.data.x.map((_, i) => i) : stopsOf(plot);
  const at = stops.indexOf(plot.isCurve ? state.step : state.focus);
  const to = Math.min(Math.max(at + way, 0), stops.length - 1);
  if (stops.length) point(plot, stops[to]);
}

function stopsOf(plot) {
  const drawn = column("gene").map((_, i) => i).filter(i => finite(plot.data.x[i]) && finite(plot.data.y[i]));
  const found = drawn.filter(i => side(i) !== NOT_CALLED);
  return ranked(found.length ? found : drawn);
}

function lookUp() {
  const gene = column("gene")[state.focus];
  go({ search: gene, only: false, page: 0 });
  part("search").focus();
}

// ---------------------------------------------------------------- the state, also in the address
function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), at = Number(given.get("contrast") || 0);
  const sort = given.get("sort") || "";
  return {
    contrast: packed.contrasts[at] ? at : 0, sort: measure(sort) ? sort : "", dir: given.get("dir") === "desc" ? "desc" : "asc",
    search: given.get("search") || "", only: given.get("only") === "1", extra: given.get("extra") === "1",
    page: Math.max(0, (parseInt(given.get("page"), 10) || 1) - 1),
  };
}

function toAddress() {
  const given = new URLSearchParams(), { contrast, sort, dir, search, only, extra, page } = state;
  if (contrast) given.set("contrast", contrast);
  if (sort) { given.set("sort", sort); given.set("dir", dir); }
  if (search) given.set("search", search);
  if (only) given.set("only", "1");
  if (extra) given.set("extra", "1");
  if (page) given.set("page", page + 1);
  if (given.toString() !== location.hash.slice(1)) history.replaceState(null, "", "#" + given);
}

function go(change) {
  const moved = "contrast" in change && change.contrast !== state.contrast;
  Object.assign(state, change);
  if (moved) { state.focus = state.step = -1; part("tip").hidden = true; }
  show(moved);
  toAddress();
}

function show(redraw) {
  const { name, level, columns, n_called: called, n_genes: all } = here(), held = columns.gene.length;
  part("contrast").value = state.contrast;
  part("now").textContent = `${name}: ${count(called)} of ${count(all)} genes called` +
    (finite(level) ? ` at a false discovery rate of ${Number((100 * level).toPrecision(3))}%.` : ".") +
    (held < all ? ` This page holds the ${count(held)} surest of them; de.csv holds all.` : "");
  if (part("search").value !== state.search) part("search").value = state.search;
  part("only").checked = state.only;
  part("extra").checked = state.extra;
  root.dataset.contrast = state.contrast;
  drawTable();
  if (redraw) draw();
}

function start() {
  packed.contrasts.forEach((c, i) => part("contrast").add(new Option(c.name, i)));
  part("contrast").parentElement.hidden = packed.contrasts.length < 2;
  part("contrast").addEventListener("change", event => go({ contrast: Number(event.target.value), page: 0 }));
  part("search").addEventListener("input", event => go({ search: event.target.value, page: 0 }));
  part("only").addEventListener("change", event => go({ only: event.target.checked, page: 0 }));
  part("extra").addEventListener("change", event => go({ extra: event.target.checked }));
  part("save").addEventListener("click", save);
  const turns = { first: () => 0, back: () => state.page - 1, next: () => state.page + 1, last: () => Infinity };
  for (const [name, page] of Object.entries(turns)) part(name).addEventListener("click", () => go({ page: page() }));
  for (const name of ["volcano", "ma", "truth", "fdr"]) listen(part(name));
  window.addEventListener("hashchange", () => go(fromAddress()));
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  Object.assign(state, fromAddress());
  root.hidden = false;
  show(true);
  root.dataset.ready = "yes";
}

start();
