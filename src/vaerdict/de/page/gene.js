// The panel of one gene: what is reported, its distribution in both groups, and its fold changes.

const MOST_LINES = 24, BINS = 28, MOST_MARKS = 250;

// The gene in the panel: the one chosen, otherwise the leading one of the contrast.
function geneShown() {
  if (state.gene && rowOf(state.gene) >= 0) return state.gene;
  const [first] = ranked(leading(contrast(), 1).flat());
  return state.gene || (first === undefined ? "" : column("gene")[first]);
}

function drawGene() {
  const gene = geneShown(), i = rowOf(gene), tested = i >= 0;
  part("gene-title").textContent = gene || "No gene";
  part("gene-name").value = gene;
  part("gene-facts").replaceChildren(...(tested ? facts(i) : [whyNot(gene) || `${gene} is not in the table of this contrast.`])
    .map(text => make("p", {}, text)));
  part("estimates").closest("figure").hidden = !tested;
  if (tested) drawEstimates(gene, i);
  drawDistribution(gene);
  root.dataset.gene = gene;
}

function findGene(event) {
  event.preventDefault();
  const name = part("gene-name").value.trim(), wanted = name.toLowerCase();
  const gene = column("gene").find(g => g === name) || column("gene").find(g => g.toLowerCase() === wanted);
  go({ gene: gene || name });
}

// ---------------------------------------------------------------- in words
function facts(i) {
  const show = (key, kind) => printed(column(key)[i], kind), { a, b } = contrast(), word = outcome(direction(i)) + byPrior(i);
  const lines = [
    `${word[0].toUpperCase()}${word.slice(1)}. LFC ${show("lfc_mean", "lfc")}, ${percent(packed.interval)} interval ` +
      `${show("lfc_low", "lfc")} to ${show("lfc_high", "lfc")}; q ${show("q_value", "small")}, P(DE) ${show("prob_de", "prob")}.`,
  ];
  if (column("mean_a").length) lines.push(`Share of the counts: ${show("mean_a", "small")} in ${a}, ${show("mean_b", "small")} in ${b}.` +
    (column("seen_a").length ? ` Seen in ${percent(column("seen_a")[i])} and ${percent(column("seen_b")[i])} of the cells.` : ""));
  if (finite(column("lfc_predicted")[i])) lines.push(`The counts alone say ${show("lfc_counts", "lfc")} (lfsr ${show("lfsr_counts", "small")}); ` +
    `without them the prior predicts ${show("lfc_predicted", "lfc")}. Together: ${show("lfc_mean", "lfc")}.`);
  if (finite(column("model_lfc")[i])) lines.push(`The model alone says ${show("model_lfc", "lfc")}.`);
  return lines;
}

// ---------------------------------------------------------------- fold changes with their intervals
function estimates(gene, i) {
  const value = (label, key) => ({ label, at: column(key)[i] }), of = contrast(), rows = [
    { label: "reported", at: column("lfc_mean")[i], low: column("lfc_low")[i], high: column("lfc_high")[i], kind: direction(i) },
    value("counts alone", "lfc_counts"), value("predicted by the prior", "lfc_predicted"), value("model alone", "model_lfc"),
    { label: "truth (simulated)", at: of.truth && of.truth[i] },
  ];
  for (const other of packed.contrasts) {
    const row = other === of ? -1 : rowOf(gene, other);
    if (row >= 0) rows.push({ label: shortName(other), at: other.values.lfc_mean[row], low: other.values.lfc_low[row],
      high: other.values.lfc_high[row], kind: direction(row, other) });
  }
  return rows.filter(row => finite(row.at)).slice(0, MOST_LINES);
}

function drawEstimates(gene, i) {
  const rows = estimates(gene, i), canvas = part("estimates"), delta = contrast().delta || 0;
  const frame = newFrame(canvas, lined(canvas, rows.length, 30, {
    xRange: range(rows.flatMap(row => [row.at, row.low, row.high].filter(finite)), [-1, 1]), xTitle: "log2 fold change",
  }));
  const { pen, box } = frame, tint = colours(frame);
  for (const at of delta ? [-delta, delta] : []) dashed(frame, frame.x(at), box.y0, frame.x(at), box.y1);
  pen.strokeStyle = frame.colour("--soft");
  rule(pen, frame.x(0), box.y0, frame.x(0), box.y1);
  rows.forEach((row, line) => {
    const y = frame.y(line), kind = row.kind || NOT_CALLED;
    pen.strokeStyle = pen.fillStyle = tint[kind];
    pen.lineWidth = 2;
    if (finite(row.low) && finite(row.high)) rule(pen, frame.x(row.low), y, frame.x(row.high), y);
    mark(pen, frame.x(row.at), y, kind, 6);
    if (row.kind === undefined) pen.stroke(); else pen.fill();
  });
  lineNames(frame, rows.map(row => row.label));
  canvas.setAttribute("aria-label", "Log2 fold changes of " + gene + ": " + rows.map(row => `${row.label} ${printed(row.at, "lfc")}` +
    (finite(row.low) ? ` [${printed(row.low, "lfc")}, ${printed(row.high, "lfc")}]` : "")).join("; ") + ".");
}

// A frame with a name to the left of each line.
function lined(canvas, n, step, spec) {
  const left = Math.round(Math.min(190, Math.max(96, canvas.clientWidth * 0.34)));
  return { ...spec, yRange: [n - 0.4, -0.6], yTicks: [], yTitle: "", margin: { left, top: 4 }, height: 54 + n * step };
}

function lineNames(frame, names) {
  const { pen, box } = frame;
  pen.fillStyle = frame.colour("--ink");
  pen.textAlign = "right";
  pen.font = "12px system-ui, sans-serif";
  names.forEach((name, line) => {
    let text = name;
    while (text.length > 4 && pen.measureText(text).width > box.x0 - 10) text = text.slice(0, -2).trimEnd() + "\u2026";
    pen.fillText(text, box.x0 - 7, frame.y(line) + 4);
  });
}

// ---------------------------------------------------------------- distribution in both groups, and in their samples
function distributions(gene) {
  const values = expression(gene), sides = cellSides(), { a, b } = contrast(), rows = [];
  for (const [side, name, kind] of [[1, a, UP], [2, b, DOWN]]) {
    const members = sides.map((s, cell) => s === side ? cell : -1).filter(cell => cell >= 0);
    rows.push({ name, kind, values: members.map(cell => values[cell]) });
    const { sample, samples } = packed.cells;
    for (let s = 0; samples.length > 1 && s < samples.length; s += 1) {
      const own = members.filter(cell => sample[cell] === s);
      if (own.length) rows.push({ name: `\u2003${samples[s]}`, kind, values: own.map(cell => values[cell]) });
    }
  }
  return rows.slice(0, MOST_LINES);
}

function drawDistribution(gene) {
  const canvas = part("distribution"), has = counted.has(gene) && cellSides();
  canvas.closest("figure").hidden = !has;
  part("no-cells").hidden = Boolean(has);
  part("no-cells").textContent = packed.cells
    ? `This page holds cells of ${count(counted.size)} leading genes, and of those named by --keep-genes.`
    : "This page holds no cells (the run directory has no cells.npz).";
  if (!has) return;
  const rows = distributions(gene), most = rows.reduce((top, row) => row.values.reduce((t, v) => Math.max(t, v), top), 1);
  const step = Math.round(Math.max(28, Math.min(72, 240 / rows.length)));
  const frame = newFrame(canvas, lined(canvas, rows.length, step, { xRange: [-0.02 * most, 1.03 * most], xTitle: "log(1 + counts in 10,000)" }));
  rows.forEach((row, line) => violin(frame, row, line, most));
  lineNames(frame, rows.map(row => row.name));
  canvas.setAttribute("aria-label", `Expression of ${gene}: ` + rows.map(row => `${row.name.trim()}: mean ${average(row.values).toFixed(2)}, ` +
    `seen in ${Math.round(100 * share(row.values))}% of ${count(row.values.length)} cells`).join("; ") + ".");
}

const average = values => values.reduce((sum, v) => sum + v, 0) / Math.max(values.length, 1);
const share = values => values.filter(v => v > 0).length / Math.max(values.length, 1);

// The density of the cells in which the gene is seen, its height by their share; dots are cells, the diamond the mean.
function violin(frame, { values, kind }, line, most) {
  const { pen } = frame, y = frame.y(line), half = 0.42 * Math.abs(frame.y(1) - frame.y(0)), bins = new Array(BINS).fill(0);
  pen.fillStyle = pen.strokeStyle = colours(frame)[kind];
  for (const v of values) if (v > 0) bins[Math.min(BINS - 1, Math.floor(v / most * BINS))] += 1;
  const smooth = bins.map((_, i) => [-2, -1, 0, 1, 2].reduce((sum, d) => sum + (bins[i + d] || 0) * (3 - Math.abs(d)), 0) / 9);
  const top = Math.max(...smooth) || 1, height = half * Math.min(1, 0.25 + share(values)), at = i => frame.x((i + 0.5) / BINS * most);
  pen.globalAlpha = 0.28;
  pen.beginPath();
  smooth.forEach((v, i) => pen[i ? "lineTo" : "moveTo"](at(i), y - v / top * height));
  for (let i = BINS - 1; i >= 0; i -= 1) pen.lineTo(at(i), y + smooth[i] / top * height);
  pen.closePath();
  pen.fill();
  pen.globalAlpha = 0.55;
  const step = Math.max(1, Math.ceil(values.length / MOST_MARKS));
  for (let i = 0; i < values.length; i += step) {
    pen.beginPath();
    pen.arc(frame.x(values[i]), y + (((i + 1) * 0.618) % 1 - 0.5) * half, 1.3, 0, 2 * Math.PI);
    pen.fill();
  }
  pen.globalAlpha = 1;
  const x = frame.x(average(values));
  pen.fillStyle = frame.colour("--ink");
  pen.beginPath();
  for (const [dx, dy] of [[0, -6], [5, 0], [0, 6], [-5, 0]]) pen.lineTo(x + dx, y + dy);
  pen.closePath();
  pen.fill();
}
