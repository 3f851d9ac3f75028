// The plots of genes and the gene under the pointer or the keys.

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
    `${outcome(DOWN)}; ${n(NOT_CALLED)} not called. Arrow keys step through the called genes, Enter shows one.`;
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

function drawPlots() {
  plots = [];
  drawScatter("volcano", volcano);
  if (column("mean_a").length && column("mean_b").length) drawScatter("ma", ma);
  else part("ma").closest("figure").hidden = true;
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
  const tip = part("tip"), [name, ...rest] = lines;
  tip.replaceChildren(make("strong", {}, name), ...rest.flatMap(text => [make("br"), text]));
  plot.canvas.parentElement.append(tip);
  tip.hidden = false;
  const area = tip.parentElement.getBoundingClientRect(), at = plot.canvas.getBoundingClientRect();
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
  canvas.addEventListener("click", () => { if (!plot().isCurve && state.focus >= 0) openGene(column("gene")[state.focus]); });
  canvas.addEventListener("keydown", event => onKey(event, plot()));
}

function onKey(event, plot) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
  if (event.key === "Escape") return clear();
  if (event.key === "Enter" && !plot.isCurve && state.focus >= 0) return openGene(column("gene")[state.focus]);
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
