// Sorts a table by the column whose heading is pressed: once for the largest first, again for the smallest.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  const inPrint = [...body.rows];
  const value = (row, i) => row.cells[i].dataset.value;
  headings.forEach((heading, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const falling = heading.getAttribute("aria-sort") !== "descending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const numbers = inPrint.every((row) => value(row, i) === "" || !isNaN(value(row, i)));
      const compare = (a, b) =>
        numbers ? value(a, i) - value(b, i) : value(a, i).localeCompare(value(b, i), undefined, { numeric: true });
      const known = inPrint.filter((row) => value(row, i) !== "");
      known.sort((a, b) => (falling ? compare(b, a) : compare(a, b)));
      body.append(...known, ...inPrint.filter((row) => value(row, i) === "")); // what was not measured comes last
    });
  });
}
