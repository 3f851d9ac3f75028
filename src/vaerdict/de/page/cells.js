// The cells of the page: counts of the leading genes, and the map, coloured by group, gene or k-hat.

const HUES = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a7a00", "#7e57c2", "#8d6e63", "#c2185b"];
const KHAT_LIMIT = 0.7;

const counted = new Map(packed.cells ? packed.cells.genes : []);   // genes with counts of cells

// The sides of the cells in this contrast: 1 in the first group, 2 in the second; null where the page has none.
function cellSides() {
  const given = packed.cells && packed.cells.sides[state.contrast];
  return given ? Array.from(given, Number) : null;
}

// log(1 + counts in 10,000) of every cell, from the steps between cells that have counts, and their counts.
function expression(gene) {
  const { totals } = packed.cells, values = new Array(totals.length).fill(0);
  const bytes = Uint8Array.from(atob(counted.get(gene)), c => c.charCodeAt(0));
  let at = 0, cell = -1;
  const next = () => {
    let value = 0;
    for (let shift = 1; ; shift *= 128) {
      const byte = bytes[at++];
      value += (byte & 127) * shift;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    cell += next();
    values[cell] = Math.log1p(1e4 * next() / totals[cell]);
  }
  return values;
}

// ---------------------------------------------------------------- the map
function colourings() {
  const { groups, samples, khat } = packed.cells;
  return [["contrast", "the groups compared"], ...(groups.length > 1 ? [["group", "all groups"]] : []),
    ...(samples.length > 1 ? [["sample", "samples"]] : []), ["gene", "expression of the gene shown"], ...(khat ? [["khat", "k-hat"]] : [])];
}

function drawCells() {
  const canvas = part("map"), cells = packed.cells;
  if (!canvas) return;
  const { legend, tint, order, words } = colouring(canvas);
  const frame = newFrame(canvas, { xRange: range(cells.x, []), yRange: range(cells.y, []), bare: true,
    margin: { left: 6, right: 6, top: 6, bottom: 6 }, height: Math.round(Math.min(560, Math.max(300, canvas.clientWidth * 0.6))) });
  const { pen } = frame, radius = cells.x.length > 2500 ? 1.9 : 2.6;
  for (const i of order) {
    pen.fillStyle = tint(i);
    pen.beginPath();
    pen.arc(frame.x(cells.x[i]), frame.y(cells.y[i]), radius, 0, 2 * Math.PI);
    pen.fill();
  }
  part("map-legend").replaceChildren(...legend.map(([colour, text]) => {
    const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = colour;
    return make("li", {}, swatch, text);
  }));
  canvas.setAttribute("aria-label", `Map of ${count(cells.x.length)} cells, ${cells.map}, coloured by ${words}.`);
  canvas.dataset.colour = state.colour;
}

// How cells are coloured: colours of the legend, the colour of a cell, and the order in which cells are drawn.
function colouring(canvas) {
  const cells = packed.cells, look = getComputedStyle(canvas), colour = name => look.getPropertyValue(name).trim();
  const every = cells.x.map((_, i) => i), quiet = colour("--line"), sides = cellSides() || [];
  const byName = (codes, names, words) => ({
    words, order: every, tint: i => codes[i] < 0 ? quiet : HUES[codes[i] % HUES.length],
    legend: names.map((name, i) => [HUES[i % HUES.length], name]),
  });
  if (state.colour === "group") return byName(cells.group, cells.groups, "group");
  if (state.colour === "sample") return byName(cells.sample, cells.samples, "sample");
  if (state.colour === "khat") return gradient(cells.khat, 1, "k-hat", [[0, "k-hat 0 or less"], [KHAT_LIMIT, "0.7, the limit"], [1, "1 or more"]], colour("--down"), quiet, every);
  const gene = geneShown();
  if (state.colour === "gene" && counted.has(gene)) {
    const values = expression(gene), top = values.reduce((a, b) => Math.max(a, b), 0) || 1;
    return gradient(values, top, `expression of ${gene}`, [[0, `${gene} not seen`], [top, `log(1 + counts in 10,000) = ${top.toFixed(1)}`]], colour("--up"), quiet, every);
  }
  const tints = [quiet, colour("--up"), colour("--down")];
  return {
    words: "the groups compared", tint: i => tints[sides[i] || 0], order: [...every].sort((i, j) => Boolean(sides[i]) - Boolean(sides[j])),
    legend: [[tints[1], contrast().a], [tints[2], contrast().b], ...(sides.some(s => s === 0) ? [[quiet, "not in this contrast"]] : [])],
  };
}

function gradient(values, top, words, legend, full, none, every) {
  const [a, b] = [none, full].map(channels), mix = v => `rgb(${a.map((x, i) => Math.round(x + (b[i] - x) * Math.min(1, Math.max(0, v / top)))).join()})`;
  return { words, tint: i => mix(finite(values[i]) ? values[i] : 0), legend: legend.map(([v, text]) => [mix(v), text]),
    order: every.sort((i, j) => (values[i] || 0) - (values[j] || 0)) };
}

const channels = hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));

function startCells() {
  if (!part("map")) return;
  part("colour").replaceChildren(...colourings().map(([key, text]) => new Option(text, key)));
  part("colour").addEventListener("change", event => { state.colour = event.target.value; drawCells(); });
}
