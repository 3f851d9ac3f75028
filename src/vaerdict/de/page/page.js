// The state of the page, and the table and plots that follow it. Names are set as text only, never as markup.

const PAGE_ROWS = 25, UNTESTED_ROWS = 8;
const MOST_STRENGTH = 300, WIDE = 25;   // of -log10 q: the most that is drawn, and where the scale is compressed
const root = document.getElementById("de"), packed = JSON.parse(document.getElementById("de-data").textContent);
const part = name => document.getElementById("de-" + name);
const state = { contrast: 0, sort: "", dir: "asc", search: "", only: false, prior: false, page: 0, extra: false, focus: -1, step: -1 };
let shown = [];   // rows that match the search, in order
let plots = [];   // what is drawn, to redraw and to find marks in

const contrast = () => packed.contrasts[state.contrast];
const column = name => contrast().values[name] || [];
const finite = v => v !== null && v !== undefined;

// Titles and meanings of columns with the names of the groups, which a function as replacement inserts literally.
const named = text => text.replace(/\{([ab])\}|group_([ab])/g, (_, x, y) => contrast()[x || y]);
const clipped = name => name.length > 24 ? name.slice(0, 23) + "\u2026" : name;
const foldChange = () => `log2 fold change, ${clipped(contrast().a)} over ${clipped(contrast().b)}`;
const byPrior = i => column("by_prior")[i] ? ", only thanks to the prior" : "";
const hasPrior = () => column("by_prior").some(Boolean);
const outcome = kind => kind === NOT_CALLED ? "not called" : `called, higher in ${kind === UP ? contrast().a : contrast().b}`;

// ---------------------------------------------------------------- numbers in print
function printed(value, kind, direction) {
  if (!finite(value)) return "\u2013";
  if (kind === "text") return value;
  if (kind === "flag") return value ? (direction === DOWN ? "\u25bc down" : direction === UP ? "\u25b2 up" : "yes") : "no";
  if (kind === "lfc") return minus((value > 0 ? "+" : "") + value.toFixed(2));
  if (kind === "prob") return value.toFixed(3);
  if (value === 0) return "0";
  if (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5) return minus(value.toExponential(2));
  return minus(value.toPrecision(3).replace(/e\+?(-?\d+)$/, "e$1"));
}

function direction(i) {
  if (!column("is_de")[i]) return NOT_CALLED;
  return column("lfc_mean")[i] < 0 ? DOWN : UP;
}

function count(n) { return n.toLocaleString("en"); }

// ---------------------------------------------------------------- which rows, in which order
function matching() {
  const terms = state.search.toLowerCase().split(/[\s,;]+/).filter(Boolean), genes = column("gene"), flags = column("is_de");
  const rows = [];
  for (let i = 0; i < genes.length; i += 1) {
    if (state.only && !flags[i] || state.prior && hasPrior() && !column("by_prior")[i]) continue;
    const gene = genes[i].toLowerCase();
    if (!terms.length || gene.includes(state.search.toLowerCase()) || terms.some(term => gene.includes(term))) rows.push(i);
  }
  return rows;
}

// Genes that match the search and were not tested, those of exactly this name first, each with the reason.
function untested() {
  const terms = state.search.toLowerCase().split(/[\s,;]+/).filter(Boolean), exact = [], others = [];
  for (const [reason, steps, seen] of terms.length ? contrast().untested : []) {
    let at = -1;
    steps.forEach((step, i) => {
      const gene = packed.untested[at += step], name = gene.toLowerCase();
      const list = terms.includes(name) ? exact : terms.some(term => name.includes(term)) ? others : null;
      if (list) list.push(`${gene} (${seen[i] ? `seen in ${count(seen[i])} cells; ` : ""}${reason})`);
    });
  }
  return [...exact, ...others];
}

function drawUntested() {
  const left = untested(), more = left.length - UNTESTED_ROWS;
  part("untested").hidden = !left.length;
  part("untested").textContent = `Not tested in this contrast: ${left.slice(0, UNTESTED_ROWS).join(", ")}` +
    (more > 0 ? ` and ${count(more)} more.` : ".");
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
function visibleColumns() { return packed.columns.filter(c => (state.extra || !c.extra) && column(c.name).length); }

function heading({ name, title, meaning, kind }) {
  const head = document.createElement("th"), button = document.createElement("button"), text = document.createElement("abbr");
  head.scope = "col";
  if (name === state.sort) head.setAttribute("aria-sort", state.dir === "asc" ? "ascending" : "descending");
  if (kind === "text" || kind === "flag") head.className = "text";
  text.textContent = named(title);
  text.title = named(meaning);
  button.type = "button";
  button.dataset.key = name;
  button.append(text);
  button.addEventListener("click", () => {
    const first = kind === "text" || ["q_value", "lfsr", "mcse"].includes(name) ? "asc" : "desc";
    const turned = state.dir === "asc" ? "desc" : "asc";
    go({ sort: name, dir: state.sort === name ? turned : first, page: 0 });
    root.querySelector(`thead button[data-key="${name}"]`).focus();
  });
  head.append(button);
  return head;
}

function tableRow(i, columns) {
  const row = document.createElement("tr");
  for (const { name, kind } of columns) {
    const cell = document.createElement(name === "gene" ? "th" : "td");
    const change = name === "is_de" ? direction(i) : NOT_CALLED;
    if (name === "gene") cell.scope = "row";
    if (kind === "flag") cell.className = "flag" + (change === UP ? " up" : change === DOWN ? " down" : "");
    cell.textContent = printed(column(name)[i], kind, change);
    row.append(cell);
  }
  row.addEventListener("pointerenter", () => focusOn(i));
  return row;
}

function drawTable() {
  shown = ordered(matching());
  const pages = Math.max(1, Math.ceil(shown.length / PAGE_ROWS));
  state.page = Math.min(Math.max(state.page, 0), pages - 1);
  const from = state.page * PAGE_ROWS, rows = shown.slice(from, from + PAGE_ROWS), columns = visibleColumns();
  const head = document.createElement("tr");
  head.append(...columns.map(heading));
  part("table").tHead.replaceChildren(head);
  part("table").tBodies[0].replaceChildren(...rows.map(i => tableRow(i, columns)));
  part("where").textContent = rows.length
    ? `${count(from + 1)}\u2013${count(from + rows.length)} of ${count(shown.length)} genes` : "No gene that was tested matches.";
  drawUntested();
  for (const name of ["first", "back"]) part(name).disabled = state.page === 0;
  for (const name of ["next", "last"]) part(name).disabled = state.page === pages - 1;
  part("save").textContent = `Download ${count(shown.length)} rows as CSV`;
  Object.assign(root.dataset, { sort: state.sort, dir: state.dir, search: state.search, page: state.page, rows: shown.length });
}

function csv() {
  const quoted = v => /[",\r\n]/.test(v) ? `"${v.replaceAll('"', '""')}"` : v;
  const text = v => !finite(v) ? "" : v === true ? "True" : v === false ? "False" : quoted(String(v));
  const { name, group_a: a, group_b: b } = contrast(), keys = packed.columns.map(c => c.name).filter(key => column(key).length);
  const lines = shown.map(i => [name, a, b, ...keys.map(key => column(key)[i])].map(text).join(","));
  return [["contrast", "group_a", "group_b", ...keys].join(","), ...lines].join("\r\n") + "\r\n";
}

function save() {
  const link = document.createElement("a"), address = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
  link.href = address;
  link.download = "de-" + contrast().name.replace(/[^0-9A-Za-z]+/g, "-").slice(0, 60) + ".csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// ---------------------------------------------------------------- the plots
function logs(values) { return values.map(v => finite(v) && v > 0 ? Math.log10(v) : null); }

function volcano(kind) {
  const q = column("q_value"), level = contrast().level, strength = v => Math.min(-Math.log10(v), MOST_STRENGTH);
  const top = 1.05 * q.reduce((most, v) => v > 0 ? Math.max(most, strength(v)) : most, finite(level) ? 1 - Math.log10(level) : 2);
  const wide = top > WIDE, scaled = v => wide ? Math.log10(1 + v) : v;
  const data = {
    x: column("lfc_mean"), y: q.map(v => finite(v) ? scaled(v > 0 ? strength(v) : top) : null), kind,
    left: column("lfc_low"), right: column("lfc_high"), above: true,
  };
  const lines = frame => {
    const delta = contrast().delta, { box } = frame;
    if (finite(level) && level > 0) dashed(frame, box.x0, frame.y(scaled(-Math.log10(level))), box.x1, frame.y(scaled(-Math.log10(level))));
    if (delta) for (const at of [-delta, delta]) dashed(frame, frame.x(at), box.y0, frame.x(at), box.y1);
  };
  return { data, lines, spec: {
    xRange: range(data.x, [-1, 1]), yRange: range(data.y, [0, scaled(top)]),
    yTicks: wide ? [0, 1, 2, 5, 10, 20, 50, 100, 200, 300].filter(v => v <= top).map(v => [scaled(v), String(v)]) : null,
    xTitle: foldChange(), yTitle: "\u2212log10 q" + (wide ? ", compressed" : ""),
  } };
}

function ma(kind) {
  const a = column("mean_a"), b = column("mean_b");
  const x = logs(a.map((v, i) => finite(v) && finite(b[i]) ? (v + b[i]) / 2 : null));
  const data = { x, y: column("lfc_mean"), kind, low: column("lfc_low"), high: column("lfc_high") };
  const lines = frame => dashed(frame, frame.box.x0, frame.y(0), frame.box.x1, frame.y(0));
  return { data, lines, spec: {
    xRange: range(x, []), yRange: range(data.y, [-1, 1]), xLog: true,
    xTitle: "mean expression (log scale)", yTitle: foldChange(),
  } };
}

function truth(kind) {
  const data = { x: contrast().truth, y: column("lfc_mean"), kind, low: column("lfc_low"), high: column("lfc_high") };
  const both = range([...data.x, ...data.y], [-1, 1]);
  const lines = frame => dashed(frame, frame.x(both[0]), frame.y(both[0]), frame.x(both[1]), frame.y(both[1]));
  return { data, lines, spec: { xRange: both, yRange: both, xTitle: "true log2 fold change", yTitle: "estimated log2 fold change" } };
}

function drawScatter(name, build) {
  const canvas = part(name), { data, lines, spec } = build(column("gene").map((_, i) => direction(i)));
  const frame = newFrame(canvas, spec);
  data.hollow = column("by_prior");
  lines(frame);
  canvas.dataset.points = scatter(frame, data);
  names(frame, data, labelled(data), i => column("gene")[i]);
  canvas.setAttribute("aria-label", description(spec));
  plots.push({ canvas, frame, data, base: copied(canvas) });
}

// The surest genes in each direction get a label.
function labelled(data) {
  const drawn = i => finite(data.x[i]) && finite(data.y[i]);
  const by = kind => ranked(data.kind.map((_, i) => i).filter(i => data.kind[i] === kind && drawn(i))).slice(0, 6);
  return [...by(UP), ...by(DOWN)];
}

function description(spec) {
  const kinds = column("gene").map((_, i) => direction(i)), n = kind => count(kinds.filter(k => k === kind).length);
  return `${spec.yTitle} against ${spec.xTitle} of ${count(kinds.length)} genes: ${n(UP)} ${outcome(UP)}; ${n(DOWN)} ` +
    `${outcome(DOWN)}; ${n(NOT_CALLED)} not called. Arrow keys step through the called genes, Enter finds one in the table.`;
}

// Lists far beyond the FDR asked for are cut off, so that the part of interest fills the plot.
function curveEnd({ k, expected }, level) {
  const beyond = expected.findIndex(v => v > 6 * level);
  return beyond < 2 ? k.length : beyond + 1;
}

function drawCurve() {
  const curve = contrast().curve, canvas = part("fdr");
  canvas.closest("figure").hidden = !curve || !curve.k.length;
  if (!curve || !curve.k.length) return;
  const level = contrast().level, end = curveEnd(curve, level || 0.05), cut = values => values.slice(0, end);
  const [k, expected, low, high] = [curve.k, curve.expected, curve.low || curve.expected, curve.high || curve.expected].map(cut);
  const frame = newFrame(canvas, {
    xRange: [0, k[k.length - 1]], yRange: [0, 1.2 * Math.max(expected[k.length - 1], 2 * (level || 0.05))],
    xTitle: "genes in the list", yTitle: "expected FDR",
  });
  ribbon(frame, k, low, high);
  line(frame, k, expected);
  if (finite(level)) dashed(frame, frame.box.x0, frame.y(level), frame.box.x1, frame.y(level));
  const n = contrast().n_discoveries;
  if (n) dashed(frame, frame.x(n), frame.box.y0, frame.x(n), frame.box.y1);
  canvas.setAttribute("aria-label", `Expected false discovery rate against the length of the list: ` +
    `${count(n || 0)} genes at a level of ${level}. Arrow keys read the curve.`);
  plots.push({ canvas, frame, data: { x: k, y: expected, low, high }, base: copied(canvas), isCurve: true });
}

function draw() {
  plots = [];
  drawScatter("volcano", volcano);
  if (column("mean_a").length && column("mean_b").length) drawScatter("ma", ma);
  else part("ma").closest("figure").hidden = true;
  part("truth").closest("figure").hidden = !contrast().truth;
  if (contrast().truth) drawScatter("truth", truth);
  drawCurve();
  highlight();
}

// ---------------------------------------------------------------- the gene in focus
// All marks are drawn once; the highlight is drawn on a copy.
function highlight() {
  for (const { frame, data, base, isCurve } of plots) {
    const i = isCurve ? state.step : state.focus;
    restored(frame.pen, base);
    if (i >= 0 && finite(data.x[i]) && finite(data.y[i])) ring(frame, data, i);
  }
}

function showTip(plot, i, lines) {
  const tip = part("tip"), [name, ...rest] = lines, strong = document.createElement("strong");
  strong.textContent = name;
  tip.replaceChildren(strong, ...rest.flatMap(text => [document.createElement("br"), text]));
  tip.hidden = false;
  const area = tip.offsetParent.getBoundingClientRect(), at = plot.canvas.getBoundingClientRect();
  const x = at.left - area.left + plot.frame.x(plot.data.x[i]), y = at.top - area.top + plot.frame.y(plot.data.y[i]);
  tip.style.left = Math.max(0, Math.min(x + 14, area.width - tip.offsetWidth)) + "px";
  tip.style.top = y + 16 + "px";
}

function geneLines(i) {
  const show = (key, kind) => printed(column(key)[i], kind);
  const lines = [
    column("gene")[i],
    `LFC ${show("lfc_mean", "lfc")} [${show("lfc_low", "lfc")}, ${show("lfc_high", "lfc")}]`,
    `q ${show("q_value", "small")}, P(DE) ${show("prob_de", "prob")}`,
  ];
  if (contrast().truth && finite(contrast().truth[i])) lines.push(`true LFC ${printed(contrast().truth[i], "lfc")}`);
  if (finite(column("lfc_counts")[i])) lines.push(`counts alone ${show("lfc_counts", "lfc")}, predicted ${show("lfc_predicted", "lfc")}`);
  return [...lines, outcome(direction(i)) + byPrior(i)];
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
    showTip(plot, i, [`${count(plot.data.x[i])} genes`,
      `expected FDR ${share(plot.data.y[i])} [${share(plot.data.low[i])}, ${share(plot.data.high[i])}]`]);
  } else {
    focusOn(i);
    showTip(plot, i, geneLines(i));
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
    const i = nearest(plot().frame, plot().data, event.clientX - at.left, event.clientY - at.top, plot().isCurve ? 60 : 14);
    if (i >= 0) point(plot(), i); else if (!part("tip").hidden) clear();
  });
  canvas.addEventListener("pointerleave", clear);
  canvas.addEventListener("blur", clear);
  canvas.addEventListener("click", () => { if (!plot().isCurve && state.focus >= 0) lookUp(); });
  canvas.addEventListener("keydown", event => onKey(event, plot()));
}

function onKey(event, plot) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
  if (event.key === "Escape") return clear();
  if (event.key === "Enter" && !plot.isCurve && state.focus >= 0) return lookUp();
  if (!step) return;
  event.preventDefault();
  const stops = plot.isCurve ? plot.data.x.map((_, i) => i) : stopsOf(plot);
  const at = stops.indexOf(plot.isCurve ? state.step : state.focus);
  const to = Math.min(Math.max(at + step, 0), stops.length - 1);
  if (stops.length) point(plot, stops[to]);
}

function stopsOf(plot) {
  const drawn = column("gene").map((_, i) => i).filter(i => finite(plot.data.x[i]) && finite(plot.data.y[i]));
  const called = drawn.filter(i => direction(i) !== NOT_CALLED);
  return ranked(called.length ? called : drawn);
}

function lookUp() {
  const gene = column("gene")[state.focus];
  go({ search: gene, only: false, prior: false, page: 0 });
  part("search").focus();
}

// ---------------------------------------------------------------- the state, also in the address
function fromAddress() {
  const address = new URLSearchParams(location.hash.slice(1)), at = Number(address.get("contrast") || 0);
  const sort = address.get("sort") || "";
  return {
    contrast: packed.contrasts[at] ? at : 0, sort: packed.columns.some(c => c.name === sort) ? sort : "", dir: address.get("dir") === "desc" ? "desc" : "asc",
    search: address.get("search") || "", only: address.get("only") === "1", prior: address.get("prior") === "1", extra: address.get("extra") === "1",
    page: Math.max(0, (parseInt(address.get("page"), 10) || 1) - 1),
  };
}

function toAddress() {
  const address = new URLSearchParams(), { contrast, sort, dir, search, only, prior, extra, page } = state;
  if (contrast) address.set("contrast", contrast);
  if (sort) { address.set("sort", sort); address.set("dir", dir); }
  if (search) address.set("search", search);
  if (only) address.set("only", "1");
  if (prior) address.set("prior", "1");
  if (extra) address.set("extra", "1");
  if (page) address.set("page", page + 1);
  if (address.toString() !== location.hash.slice(1)) history.replaceState(null, "", "#" + address);
}

function go(change) {
  const moved = "contrast" in change && change.contrast !== state.contrast;
  Object.assign(state, change);
  if (moved) { state.focus = state.step = -1; part("tip").hidden = true; }
  show(moved);
  toAddress();
}

function show(redraw) {
  const { name, level, n_called: called, n_genes: all, n_untested: left } = contrast(), loaded = column("gene").length;
  const percent = share => Number((100 * share).toPrecision(3)) + "%";
  part("contrast").value = state.contrast;
  part("now").textContent = `${name}: ${count(called)} of ${count(all)} genes called` +
    (finite(level) ? ` at an FDR of ${percent(level)}` : "") +
    (contrast().joint_fdr ? ` over all contrasts; ${percent(contrast().expected_fdr)} of this list are expected to be false.` : ".") +
    (left ? ` ${count(left)} other genes were not tested: the search says why, not_tested.csv lists them.` : "") +
    (loaded < all ? ` This page holds the ${count(loaded)} genes with the smallest q; de.csv holds all.` : "");
  part("up").textContent = outcome(UP);
  part("down").textContent = outcome(DOWN);
  part("meanings").replaceChildren(...packed.columns.flatMap(meaningOf));
  if (part("search").value !== state.search) part("search").value = state.search;
  part("only").checked = state.only;
  part("prior").checked = state.prior;
  part("prior").parentElement.hidden = part("hollow").hidden = !hasPrior();
  part("extra").checked = state.extra;
  root.dataset.contrast = state.contrast;
  drawTable();
  if (redraw) draw();
}

function meaningOf(spec) {
  const term = document.createElement("dt"), meaning = document.createElement("dd");
  term.textContent = `${named(spec.title)} (${spec.name})`;
  meaning.textContent = named(spec.meaning);
  return [term, meaning];
}

function start() {
  packed.contrasts.forEach((c, i) => part("contrast").add(new Option(c.name, i)));
  part("contrast").parentElement.hidden = packed.contrasts.length < 2;
  part("contrast").addEventListener("change", event => go({ contrast: Number(event.target.value), page: 0 }));
  part("search").addEventListener("input", event => go({ search: event.target.value, page: 0 }));
  part("only").addEventListener("change", event => go({ only: event.target.checked, page: 0 }));
  part("prior").addEventListener("change", event => go({ prior: event.target.checked, page: 0 }));
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
