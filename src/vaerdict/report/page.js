for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("thead th").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = row => row.cells[column].dataset.v;
      const order = (a, b) => {
        if (key(a) === "" || key(b) === "") return (key(a) === "") - (key(b) === "");
        const by = isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b)) : key(a) - key(b);
        return down ? -by : by;
      };
      body.append(...[...body.rows].sort(order));
    });
  });
}

// The side menu is open where there is room beside the text. Its links open what is folded and leave the address alone,
// which may hold the state of the page.
const menu = document.querySelector("nav.menu details"), beside = window.matchMedia("(min-width: 64rem)");
if (menu) {
  const fold = () => { menu.open = beside.matches; };
  beside.addEventListener("change", fold);
  fold();
  menu.addEventListener("click", event => {
    const link = event.target.closest("a[href^='#']"), target = link && document.getElementById(link.hash.slice(1));
    if (!target) return;
    event.preventDefault();
    for (const details of target.querySelectorAll(":scope > details")) details.open = true;
    target.tabIndex = -1;
    target.focus({ preventScroll: true });
    target.scrollIntoView();
    if (!beside.matches) menu.open = false;
  });
}
