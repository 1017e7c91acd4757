// Tables are sorted by the column whose heading is pressed; numbers begin with the largest.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const numbers = head.classList.contains("number");
      const up = head.ariaSort ? head.ariaSort === "descending" : !numbers;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.ariaSort = up ? "ascending" : "descending";
      const value = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
      const order = (one, other) => {
        const [left, right] = [value(one), value(other)];
        // What was not measured is last in both directions.
        if (!left || !right) return !left - !right;
        return (numbers ? left - right : left.localeCompare(right, "en", {numeric: true})) * (up ? 1 : -1);
      };
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
    });
  });
}
