"use strict";
// A click on a heading sorts by its column: first ascending, then descending; blanks stay last.
function key(row, column) {
  const cell = row.cells[column];
  const text = cell.textContent.trim();
  const figure = cell.dataset.sort;
  return { blank: text === "" || text === "–", figure: figure === undefined ? NaN : Number(figure.replace("inf", "Infinity")), text };
}
function compare(a, b, sign) {
  if (a.blank || b.blank) return a.blank - b.blank;
  const bare = Number.isNaN(a.figure) - Number.isNaN(b.figure);
  if (bare) return bare;
  if (!Number.isNaN(a.figure)) return a.figure === b.figure ? 0 : a.figure < b.figure ? -sign : sign;
  return sign * a.text.localeCompare(b.text, undefined, { numeric: true });
}
document.addEventListener("click", (event) => {
  const heading = event.target.closest("th button")?.parentElement;
  if (!heading) return;
  const body = heading.closest("table").tBodies[0];
  const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  const keyed = Array.from(body.rows, (row) => ({ row, key: key(row, heading.cellIndex) }));
  keyed.sort((a, b) => compare(a.key, b.key, sign));
  body.append(...keyed.map((each) => each.row));
});
// Paper has nothing to click on: all sections are open while it prints.
const folded = new Set();
matchMedia("print").addEventListener("change", (event) => {
  if (event.matches) {
    for (const each of document.querySelectorAll("details:not([open])")) {
      folded.add(each);
      each.open = true;
    }
  } else {
    for (const each of folded) each.open = false;
    folded.clear();
  }
});
