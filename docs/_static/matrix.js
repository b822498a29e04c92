// Sort a table of class "matrix" by its headers, and filter its rows by a text. Nothing is requested from the network.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.matrix")) {
    const body = table.tBodies[0];
    const filter = document.createElement("input");
    Object.assign(filter, { type: "search", className: "matrix-filter", placeholder: "Filter, such as: ViT overfit" });
    filter.setAttribute("aria-label", "Filter the rows of the table");
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/);
      for (const row of body.rows) {  // the last column, keywords, is found but not shown
        row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      }
    });
    (table.closest(".pst-scrollable-table-container") ?? table).before(filter);
    for (const cell of body.querySelectorAll("td:first-child")) {  // long names wrap between their words
      const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
      const found = [];
      while (texts.nextNode()) found.push(texts.currentNode);
      for (const text of found) {
        const parts = text.data.split(/(?<=_)|(?<=[a-z])(?=[A-Z])/);
        text.replaceWith(...parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
      }
    }
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
