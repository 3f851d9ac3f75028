// The first screen and the overview: leading genes, dots by group, contrasts in the menu and the heat map.

const LEADING = 8, CHIPS = 6, MOST_GROUPS = 12, HEAT_ROWS = 40, HEAT_COLUMNS = 30, MENU = 60;

function drawResult() {
  const of = contrast(), [up, down] = leading(of, LEADING), called = of.n_called;
  part("contrast").value = state.contrast;
  part("sizes").textContent = `${size(of, "a")} against ${size(of, "b")}`;
  part("up").textContent = outcome(UP);
  part("down").textContent = outcome(DOWN);
  part("hollow").hidden = !hasPrior();
  chips("top-up", "up", `Higher in ${of.a}`, of.n_up, up);
  chips("top-down", "down", `Higher in ${of.b}`, of.n_down, down);
  part("none").hidden = called > 0;
  drawDots([...up, ...down]);
  for (const link of document.querySelectorAll("#de-contrasts button")) {
    if (Number(link.dataset.contrast) === state.contrast) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  drawHeat();
}

function size(of, side) {
  const samples = of[`n_samples_${side}`], cells = of[`n_cells_${side}`];
  const parts = [finite(samples) ? `${count(samples)} samples` : "", finite(cells) ? `${count(cells)} cells` : ""].filter(Boolean);
  return of[side] + (parts.length ? ` (${parts.join(", ")})` : "");
}

function chips(name, look, title, n, rows) {
  const label = make("span", { class: look }, `${look === "up" ? "\u25b2" : "\u25bc"} ${title}`, ` (${count(n)})`);
  const genes = contrast().n_called ? rows.slice(0, CHIPS).map(i => geneButton(column("gene")[i], "chip",
    clipped(column("gene")[i], 16) + (column("by_prior")[i] ? "*" : ""),
    make("span", { class: look }, printed(column("lfc_mean")[i], "lfc")))) : [];
  part(name).replaceChildren(make("p", { class: "side" }, label), ...genes);
}

// ---------------------------------------------------------------- dots: mean expression and share of cells by group
// The groups of this contrast first, then those that others compare within the same cells.
function groupsShown() {
  const here = contrast(), groups = [[here, "a"], [here, "b"]], names = new Set([here.a, here.b]);
  for (const of of packed.contrasts) {
    for (const side of ["a", "b"]) {
      if (names.has(of[side]) || of.within !== here.within || (side === "b" && of.against_rest)) continue;
      names.add(of[side]);
      groups.push([of, side]);
    }
  }
  return groups.slice(0, MOST_GROUPS);
}

function drawDots(rows) {
  const table = part("dots"), groups = groupsShown(), has = column("mean_a").length && column("seen_a").length;
  table.closest("figure").hidden = !has;
  if (!has) return;
  const heads = groups.map(([of, side]) => make("th", { scope: "col" }, make("span", {}, clipped(of[side], 30))));
  table.tHead.replaceChildren(make("tr", {}, make("th", { scope: "col" }, "gene"), ...heads));
  table.classList.toggle("turned", groups.length > 3);
  table.tBodies[0].replaceChildren(...rows.map((i, rank) => {
    const gene = column("gene")[i], kind = direction(i), values = groups.map(([of, side]) => {
      const row = rowOf(gene, of);
      return row < 0 ? [null, null] : [of.values[`mean_${side}`][row], of.values[`seen_${side}`][row]];
    });
    const most = Math.max(...values.map(([mean]) => mean || 0)) || 1;
    const name = make("th", { scope: "row" }, geneButton(gene, "gene" + (kind === UP ? " up" : kind === DOWN ? " down" : ""), clipped(gene, 18)));
    const break_ = rank && column("lfc_mean")[rows[rank - 1]] > 0 && column("lfc_mean")[i] <= 0;
    return make("tr", break_ ? { class: "break" } : {}, name, ...values.map(([mean, seen]) => dot(mean, seen, most)));
  }));
}

function dot(mean, seen, most) {
  if (!finite(mean) || !finite(seen)) return make("td", { title: "not tested" }, "\u00b7");
  const words = `mean share of counts ${printed(mean, "small")}, seen in ${Math.round(100 * seen)}% of cells`;
  const mark = make("span", { class: "dot", role: "img", "aria-label": words });
  mark.style.setProperty("--size", Math.sqrt(seen).toFixed(3));
  mark.style.setProperty("--tone", `${Math.round(100 * mean / most)}%`);
  return make("td", { title: words }, mark);
}

// ---------------------------------------------------------------- contrasts in the menu, and genes by contrasts
function listContrasts() {
  packed.contrasts.forEach((of, i) => part("contrast").add(new Option(`${of.name} (${count(of.n_called)})`, i)));
  part("contrast").parentElement.hidden = packed.contrasts.length < 2;
  if (part("contrasts")) part("contrasts").replaceChildren(...packed.contrasts.slice(0, MENU).map((of, i) => {
    const button = make("button", { type: "button", "data-contrast": i, click: () => {
      go({ contrast: i, page: 0 });
      root.closest("section").scrollIntoView();
    } }, make("span", {}, clipped(shortName(of), 60)), make("span", { class: "number" }, count(of.n_called)));
    return make("li", {}, button);
  }));
}

function drawHeat() {
  const table = part("heat");
  if (!table) return;
  const columns = packed.contrasts.slice(0, HEAT_COLUMNS);
  const each = Math.max(1, Math.floor(HEAT_ROWS / (2 * columns.length))), genes = new Set();
  for (const of of columns) if (of.n_called) for (const rows of leading(of, each)) for (const i of rows) genes.add(of.values.gene[i]);
  const heads = columns.map((of, i) => make("th", { scope: "col" }, make("button", {
    type: "button", title: of.name, click: () => go({ contrast: i, page: 0 }),
  }, make("span", {}, clipped(shortName(of), 34)))));
  table.tHead.replaceChildren(make("tr", {}, make("th", { scope: "col" }, "gene"), ...heads));
  table.tBodies[0].replaceChildren(...[...genes].map(gene => make("tr", {},
    make("th", { scope: "row" }, geneButton(gene, "gene", clipped(gene, 18))), ...columns.map(of => heat(of, gene)))));
  part("heat-note").textContent = (columns.length < packed.contrasts.length
    ? `The first ${columns.length} of ${packed.contrasts.length} contrasts. ` : "") + "Bold: called. A dot: not tested.";
}

const FULL = 3;   // log2 fold changes beyond it have the full colour

function heat(of, gene) {
  const row = rowOf(gene, of), value = row < 0 ? null : of.values.lfc_mean[row];
  if (!finite(value)) return make("td", { title: "not tested" }, "\u00b7");
  const cell = make("td", { class: (value > 0 ? "high" : "low") + (of.values.is_de[row] ? " called" : "") },
    minus((value > 0 ? "+" : "") + value.toFixed(1)));
  cell.title = `${gene} in ${of.name}: LFC ${printed(value, "lfc")}, q ${printed(of.values.q_value[row], "small")}`;
  cell.style.setProperty("--tone", Math.min(Math.abs(value) / FULL, 1).toFixed(2));
  return cell;
}
