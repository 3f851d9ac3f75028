// The state of the page, also in its address, and what all parts read. Names are set as text only, never as markup.

const PAGE_ROWS = 25, UNTESTED_ROWS = 8;
const MOST_STRENGTH = 300, WIDE = 25;   // of -log10 q: the most that is drawn, and where the scale is compressed
const root = document.getElementById("de"), packed = JSON.parse(document.getElementById("de-data").textContent);
const part = name => document.getElementById("de-" + name);
const state = {
  contrast: 0, gene: "", sort: "", dir: "asc", search: "", only: false, prior: false, page: 0, extra: false, focus: -1,
  step: -1, colour: "contrast",
};
let shown = [];   // rows that match the search, in order
let plots = [];   // what is drawn, to redraw and to find marks in

const contrast = () => packed.contrasts[state.contrast];
const column = name => contrast().values[name] || [];
const finite = v => v !== null && v !== undefined;

// Where a gene is in the table of a contrast, -1 if it is not.
function rowOf(gene, of = contrast()) {
  of.rows = of.rows || new Map(of.values.gene.map((name, i) => [name, i]));
  return of.rows.has(gene) ? of.rows.get(gene) : -1;
}

// ---------------------------------------------------------------- elements
// An element with attributes, properties of its dataset excepted, and children; strings become text.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") element.className = value;
    else if (key === "click") element.addEventListener("click", value);
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function geneButton(gene, look, ...children) {
  return make("button", { type: "button", class: look, title: `Show ${gene}`, click: () => openGene(gene) }, ...children);
}

// ---------------------------------------------------------------- names and numbers in print
// Titles and meanings of columns with the names of the groups, which a function as replacement inserts literally.
const named = text => text.replace(/\{([ab])\}|group_([ab])/g, (_, x, y) => contrast()[x || y]);
const clipped = (name, most = 24) => name.length > most ? name.slice(0, most - 1) + "\u2026" : name;
// Contrasts of the same groups in several cell types go by the cell type.
const typesOnly = packed.contrasts.length > 1 &&
  packed.contrasts.every(of => of.within !== null && of.a === packed.contrasts[0].a && of.b === packed.contrasts[0].b);
const shortName = of => typesOnly ? of.within : of.name;
const foldChange = () => `log2 fold change, ${clipped(contrast().a)} over ${clipped(contrast().b)}`;
const hasPrior = () => column("by_prior").some(Boolean);
const byPrior = i => column("by_prior")[i] ? ", only thanks to the prior" : "";
const outcome = kind => kind === NOT_CALLED ? "not called" : `called, higher in ${kind === UP ? contrast().a : contrast().b}`;
const count = n => n.toLocaleString("en");
const percent = share => Number((100 * share).toPrecision(3)) + "%";

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

// ---------------------------------------------------------------- calls and ranks
function direction(i, of = contrast()) {
  if (i < 0 || !(of.values.is_de || [])[i]) return NOT_CALLED;
  return of.values.lfc_mean[i] < 0 ? DOWN : UP;
}

function ranked(rows, of = contrast()) {
  const { q_value: q, lfc_mean: lfc } = of.values, last = v => finite(v) ? v : Infinity;
  return rows.sort((a, b) => last(q[a]) - last(q[b]) || Math.abs(lfc[b]) - Math.abs(lfc[a]) || a - b);
}

// The called genes of each direction, the surest first; where none is called those of smallest q.
function leading(of, most) {
  const rows = of.values.gene.map((_, i) => i), up = i => of.values.lfc_mean[i] > 0;
  const called = rows.filter(i => of.values.is_de[i]), pool = called.length ? called : rows.filter(i => finite(of.values.lfc_mean[i]));
  return [ranked(pool.filter(up), of).slice(0, most), ranked(pool.filter(i => !up(i)), of).slice(0, most)];
}

// Why a gene was not tested in this contrast; empty where the page does not know it.
function whyNot(gene) {
  for (const [reason, steps, seen] of contrast().untested) {
    let at = -1;
    for (let i = 0; i < steps.length; i += 1) {
      at += steps[i];
      if (packed.untested[at].toLowerCase() === gene.toLowerCase())
        return `${packed.untested[at]} was not tested: ${seen[i] ? `seen in ${count(seen[i])} cells; ` : ""}${reason}.`;
    }
  }
  return "";
}

// ---------------------------------------------------------------- the state, also in the address
function fromAddress() {
  const address = new URLSearchParams(location.hash.slice(1)), at = Number(address.get("contrast") || 0);
  const sort = address.get("sort") || "";
  return {
    contrast: packed.contrasts[at] ? at : 0, sort: packed.columns.some(c => c.name === sort) ? sort : "",
    dir: address.get("dir") === "desc" ? "desc" : "asc", gene: address.get("gene") || "", search: address.get("search") || "",
    only: address.get("only") === "1", prior: address.get("prior") === "1", extra: address.get("extra") === "1",
    page: Math.max(0, (parseInt(address.get("page"), 10) || 1) - 1),
  };
}

function toAddress() {
  const address = new URLSearchParams(), { contrast, gene, sort, dir, search, only, prior, extra, page } = state;
  if (contrast) address.set("contrast", contrast);
  if (gene) address.set("gene", gene);
  if (sort) { address.set("sort", sort); address.set("dir", dir); }
  if (search) address.set("search", search);
  if (only) address.set("only", "1");
  if (prior) address.set("prior", "1");
  if (extra) address.set("extra", "1");
  if (page) address.set("page", page + 1);
  if (address.toString() !== location.hash.slice(1)) history.replaceState(null, "", "#" + address);
}

function go(change) {
  const moved = "contrast" in change && change.contrast !== state.contrast, other = change.gene !== undefined && change.gene !== state.gene;
  Object.assign(state, change);
  if (moved) { state.focus = state.step = -1; part("tip").hidden = true; }
  show(moved, moved || other);
  toAddress();
}

// Everything that the state changes: all plots only where the contrast did, the panel where it or the gene did.
function show(redraw, panel) {
  drawTable();
  if (redraw) drawResult();
  if (panel) drawGene();
  if (redraw) drawPlots();
  if (panel) drawCells();
}

function openGene(gene) {
  go({ gene });
  const section = part("gene").closest("section");
  section.scrollIntoView({ behavior: window.matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  part("gene-title").focus({ preventScroll: true });
}
