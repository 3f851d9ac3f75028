// Listeners, and the first drawing.

function redraw() {
  drawPlots();
  drawGene();
  drawCells();
}

function start() {
  listContrasts();
  startCells();
  part("contrast").addEventListener("change", event => go({ contrast: Number(event.target.value), page: 0 }));
  part("search").addEventListener("input", event => go({ search: event.target.value, page: 0 }));
  part("only").addEventListener("change", event => go({ only: event.target.checked, page: 0 }));
  part("prior").addEventListener("change", event => go({ prior: event.target.checked, page: 0 }));
  part("extra").addEventListener("change", event => go({ extra: event.target.checked }));
  part("save").addEventListener("click", save);
  part("copy").addEventListener("click", copyNames);
  part("find").addEventListener("submit", findGene);
  const turns = { first: () => 0, back: () => state.page - 1, next: () => state.page + 1, last: () => Infinity };
  for (const [name, page] of Object.entries(turns)) part(name).addEventListener("click", () => go({ page: page() }));
  for (const name of ["volcano", "ma", "fdr"]) listen(part(name));
  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", () => { if (details.querySelector("canvas")) redraw(); });
  window.addEventListener("hashchange", () => { Object.assign(state, fromAddress()); show(true, true); });
  window.addEventListener("resize", redraw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  Object.assign(state, fromAddress());
  for (const part of document.querySelectorAll(".live")) part.hidden = false;
  show(true, true);
  root.dataset.ready = "yes";
}

start();
