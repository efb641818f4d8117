// Gives each cell the heading of its column, which wide.css shows on a phone. The first cell names its row.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const headings = [...table.querySelectorAll("thead th")].map((heading) => heading.textContent.trim());
    for (const cell of table.querySelectorAll("tbody td:not(:first-child)")) {
      if (headings[cell.cellIndex]) cell.dataset.label = headings[cell.cellIndex];
    }
  }
});
