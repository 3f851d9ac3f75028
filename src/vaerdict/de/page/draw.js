// Plots on canvas: a frame with axes, marks distinguished by shape and colour, and a search for the nearest mark.

const MARGIN = { left: 52, right: 14, top: 12, bottom: 42 };
const NOT_CALLED = 0, UP = 1, DOWN = 2;   // UP: higher in the first group

function steps(low, high, wanted) {
  const raw = (high - low) / Math.max(wanted, 1), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw);
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i += 1) ticks.push(i * step);
  return { ticks, digits: Math.max(0, -Math.floor(Math.log10(step))) };
}

function range(values, around) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (v !== null && isFinite(v)) { if (v < low) low = v; if (v > high) high = v; }
  for (const v of around) { low = Math.min(low, v); high = Math.max(high, v); }
  const pad = (high - low || 1) * 0.04;
  return [low - pad, high + pad];
}

function minus(text) { return text.replace("-", "\u2212"); }

// A canvas frame sharp for the screen, with axes and the two maps from data to pixels.
function newFrame(canvas, spec) {
  const width = canvas.clientWidth || 480, height = spec.height || Math.round(Math.min(380, Math.max(250, width * 0.72)));
  const margin = { ...MARGIN, ...spec.margin };
  const ratio = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = height + "px";
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  const look = getComputedStyle(canvas), colour = name => look.getPropertyValue(name).trim();
  const box = { x0: margin.left, x1: width - margin.right, y0: height - margin.bottom, y1: margin.top };
  const scale = (low, high, from, to) => v => from + (v - low) / (high - low) * (to - from);
  const frame = { pen, box, colour, spec, x: scale(...spec.xRange, box.x0, box.x1), y: scale(...spec.yRange, box.y0, box.y1) };
  drawAxes(frame);
  return frame;
}

function drawAxes({ pen, box, colour, spec, x, y }) {
  pen.font = "12px system-ui, sans-serif";
  pen.lineWidth = 1;
  pen.strokeStyle = colour("--line");
  pen.fillStyle = colour("--soft");
  if (spec.bare) return;
  const across = steps(...spec.xRange, (box.x1 - box.x0) / 70), up = steps(...spec.yRange, (box.y0 - box.y1) / 55);
  const name = (tick, digits, log) => minus(log ? powerOfTen(tick) : tick.toFixed(digits));
  pen.textAlign = "center";
  for (const tick of across.ticks) {
    if (spec.xLog && tick % 1) continue;
    rule(pen, x(tick), box.y0, x(tick), box.y1);
    pen.fillText(name(tick, across.digits, spec.xLog), x(tick), box.y0 + 16);
  }
  pen.textAlign = "right";
  for (const [at, text] of spec.yTicks || up.ticks.map(tick => [tick, name(tick, up.digits, false)])) {
    rule(pen, box.x0, y(at), box.x1, y(at));
    pen.fillText(text, box.x0 - 6, y(at) + 4);
  }
  pen.fillStyle = colour("--ink");
  pen.textAlign = "center";
  pen.fillText(spec.xTitle, (box.x0 + box.x1) / 2, box.y0 + 35);
  if (!spec.yTitle) return;
  pen.save();
  pen.translate(13, (box.y0 + box.y1) / 2);
  pen.rotate(-Math.PI / 2);
  pen.fillText(spec.yTitle, 0, 0);
  pen.restore();
}

function powerOfTen(exponent) {
  const e = Math.round(exponent);
  return Math.abs(e) <= 3 ? String(Number((10 ** e).toPrecision(1))) : "1e" + e;
}

function rule(pen, xa, ya, xb, yb) {
  pen.beginPath();
  pen.moveTo(xa, ya);
  pen.lineTo(xb, yb);
  pen.stroke();
}

function dashed(frame, xa, ya, xb, yb) {
  const { pen, colour } = frame;
  pen.save();
  pen.strokeStyle = colour("--ink");
  pen.lineWidth = 1;
  pen.setLineDash([5, 4]);
  rule(pen, xa, ya, xb, yb);
  pen.restore();
}

// Shape and colour both distinguish: dots are not called, triangles point in the direction of the change, hollow ones
// are called only thanks to the prior.
function mark(pen, x, y, kind, size) {
  pen.beginPath();
  if (kind === NOT_CALLED) {
    pen.arc(x, y, size * 0.55, 0, 2 * Math.PI);
  } else {
    const sign = kind === UP ? -1 : 1;
    pen.moveTo(x, y + sign * size * 1.15);
    pen.lineTo(x - size, y - sign * size * 0.75);
    pen.lineTo(x + size, y - sign * size * 0.75);
    pen.closePath();
  }
}

function colours(frame) { return [frame.colour("--quiet"), frame.colour("--up"), frame.colour("--down")]; }

function scatter(frame, data) {
  const { pen } = frame, tint = colours(frame);
  let drawn = 0;
  for (const kind of [NOT_CALLED, DOWN, UP]) {
    pen.fillStyle = pen.strokeStyle = tint[kind];
    pen.lineWidth = 1.4;
    pen.globalAlpha = kind === NOT_CALLED ? 0.7 : 0.85;
    for (let i = 0; i < data.x.length; i += 1) {
      if (data.kind[i] !== kind || data.x[i] === null || data.y[i] === null) continue;
      mark(pen, frame.x(data.x[i]), frame.y(data.y[i]), kind, 4);
      if (kind !== NOT_CALLED && data.hollow[i]) pen.stroke(); else pen.fill();
      drawn += 1;
    }
  }
  pen.globalAlpha = 1;
  return drawn;
}

// Names beside the marks, or above them where marks lie in a row, as long as there is room.
function names(frame, data, order, label) {
  const { pen, box } = frame, taken = [];
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = frame.colour("--ink");
  pen.strokeStyle = frame.colour("--paper");
  pen.lineWidth = 3;
  pen.lineJoin = "round";
  pen.textAlign = "left";
  for (const i of order) {
    const text = label(i).slice(0, 14), width = pen.measureText(text).width;
    const px = frame.x(data.x[i]), py = frame.y(data.y[i]);
    const side = px + 7 + width < box.x1 ? px + 7 : px - 7 - width;
    const left = data.above ? Math.min(Math.max(px - width / 2, box.x0), box.x1 - width) : side;
    const spots = (data.above ? [-13, 16, 30] : [0]).map(dy => ({ a: left - 3, b: left + width + 3, y: py + dy }));
    const spot = spots.find(s => !taken.some(t => s.a < t.b && t.a < s.b && Math.abs(s.y - t.y) < 13));
    if (!spot) continue;
    taken.push(spot);
    pen.strokeText(text, left, spot.y + 4);
    pen.fillText(text, left, spot.y + 4);
  }
}

function ring(frame, data, i) {
  const { pen } = frame, px = frame.x(data.x[i]), py = frame.y(data.y[i]);
  pen.strokeStyle = frame.colour("--ink");
  pen.lineWidth = 2;
  if (data.low && data.low[i] !== null && data.high[i] !== null) rule(pen, px, frame.y(data.low[i]), px, frame.y(data.high[i]));
  if (data.left && data.left[i] !== null && data.right[i] !== null) rule(pen, frame.x(data.left[i]), py, frame.x(data.right[i]), py);
  pen.beginPath();
  pen.arc(px, py, 8, 0, 2 * Math.PI);
  pen.stroke();
}

function copied(canvas) {
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  copy.getContext("2d").drawImage(canvas, 0, 0);
  return copy;
}

function restored(pen, copy) {
  pen.save();
  pen.resetTransform();
  pen.clearRect(0, 0, copy.width, copy.height);
  pen.drawImage(copy, 0, 0);
  pen.restore();
}

function ribbon(frame, x, low, high) {
  const { pen, box } = frame;
  pen.save();
  pen.beginPath();
  pen.rect(box.x0, box.y1, box.x1 - box.x0, box.y0 - box.y1);
  pen.clip();
  pen.beginPath();
  x.forEach((v, i) => pen[i ? "lineTo" : "moveTo"](frame.x(v), frame.y(high[i])));
  for (let i = x.length - 1; i >= 0; i -= 1) pen.lineTo(frame.x(x[i]), frame.y(low[i]));
  pen.closePath();
  pen.globalAlpha = 0.25;
  pen.fillStyle = frame.colour("--up");
  pen.fill();
  pen.restore();
}

function line(frame, x, y) {
  const { pen } = frame;
  pen.beginPath();
  x.forEach((v, i) => pen[i ? "lineTo" : "moveTo"](frame.x(v), frame.y(y[i])));
  pen.strokeStyle = frame.colour("--up");
  pen.lineWidth = 2;
  pen.stroke();
}

function nearest(frame, data, px, py, reach) {
  let best = -1, least = reach * reach;
  for (let i = 0; i < data.x.length; i += 1) {
    if (data.x[i] === null || data.y[i] === null) continue;
    const distance = (frame.x(data.x[i]) - px) ** 2 + (frame.y(data.y[i]) - py) ** 2;
    if (distance < least) { least = distance; best = i; }
  }
  return best;
}
