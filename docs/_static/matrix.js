// Sort a table of class "matrix" by its headers, and filter its rows by a text. Nothing is requested from the network.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.matrix")) {
    const body = table.tBodies[0];
    const filter = document.createElement("input");
    Object.assign(filter, { type: "search", className: "matrix-filter", placeholder: "Filter the rows, such as: transformer" });
    filter.setAttribute("aria-label", "Filter the rows of the table");
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/);
      for (const row of body.rows) {
        row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      }
    });
    (table.closest(".pst-scrollable-table-container") ?? table).before(filter);
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const button = document.createElement("button");
      button.append(...header.childNodes);
      header.append(button);
      button.addEventListener("click", () => {
        const sign = header.ariaSort === "ascending" ? -1 : 1;
        for (const other of table.tHead.rows[0].cells) other.ariaSort = "none";
        header.ariaSort = sign === 1 ? "ascending" : "descending";
        const text = (row) => row.cells[column].textContent.trim();
        const missing = (row) => ["", "-"].includes(text(row));  // last, in both directions
        const compare = (a, b) => text(a).localeCompare(text(b), "en", { numeric: true });
        body.append(...[...body.rows].sort((a, b) => missing(a) - missing(b) || sign * compare(a, b)));
      });
    });
  }
});
