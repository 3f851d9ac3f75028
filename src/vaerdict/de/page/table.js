// The table of genes: search, order, pages, download and copy.

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
    part("table").querySelector(`thead button[data-key="${name}"]`).focus();
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
    const text = printed(column(name)[i], kind, change);
    cell.append(name === "gene" ? geneButton(text, "gene", text) : text);
    row.append(cell);
  }
  row.addEventListener("pointerenter", () => focusOn(i));
  return row;
}

function drawTable() {
  drawTools();
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
  part("copy").textContent = `Copy ${count(shown.length)} names`;
  Object.assign(root.dataset, { contrast: state.contrast, sort: state.sort, dir: state.dir, search: state.search, page: state.page, rows: shown.length });
}

function drawTools() {
  const { n_called: called, n_genes: all, n_untested: left } = contrast(), loaded = column("gene").length;
  part("now").textContent = `${count(called)} of ${count(all)} genes called` +
    (finite(contrast().level) ? ` at an FDR of ${percent(contrast().level)}` : "") +
    (contrast().joint_fdr ? ` over all contrasts; ${percent(contrast().expected_fdr)} of this list are expected to be false.` : ".") +
    (left ? ` ${count(left)} other genes were not tested: the search says why, not_tested.csv lists them.` : "") +
    (loaded < all ? ` This page holds the ${count(loaded)} genes with the smallest q; de.csv holds all.` : "");
  part("meanings").replaceChildren(...packed.columns.flatMap(meaningOf));
  if (part("search").value !== state.search) part("search").value = state.search;
  part("only").checked = state.only;
  part("extra").checked = state.extra;
  part("prior").checked = state.prior;
  part("prior").parentElement.hidden = !hasPrior();
}

function meaningOf(spec) {
  return [make("dt", {}, `${named(spec.title)} (${spec.name})`), make("dd", {}, named(spec.meaning))];
}

function csv() {
  const quoted = v => /[",\r\n]/.test(v) ? `"${v.replaceAll('"', '""')}"` : v;
  const guarded = v => typeof v === "string" && /^'*[=+\-@\t\r]/.test(v) ? `'${v}` : String(v); // no formulas
  const text = v => !finite(v) ? "" : v === true ? "True" : v === false ? "False" : quoted(guarded(v));
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


// The names of the genes shown, one per line: by the clipboard, or where a browser keeps it from files, by a selection.
async function copyNames() {
  const text = shown.map(i => column("gene")[i]).join("\n"), button = part("copy");
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { class: "aside" }, text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = `Copied ${count(shown.length)} names`;
}
