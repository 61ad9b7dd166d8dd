// Numbers sort by value, with their units; other cells by text.
const units = { n: 1e-9, "µ": 1e-6, m: 1e-3, K: 1024, M: 1024 ** 2, G: 1024 ** 3, T: 1024 ** 4 };
function value(text) {
  const match = text.replaceAll(",", "").match(/^[×±+]?(-?[\d.]+(?:e[+-]?\d+)?)\s*([nµm](?=s)|[KMGT](?=i?B))?/);
  return match ? parseFloat(match[1]) * (units[match[2]] ?? 1) : null;
}
function compare(a, b) {
  const [x, y] = [value(a), value(b)];
  return x !== null && y !== null ? x - y : a.localeCompare(b);
}
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const title = button.parentElement;
    const index = [...title.parentElement.children].indexOf(title);
    const ascending = title.getAttribute("aria-sort") !== "ascending";
    for (const other of title.parentElement.children) other.removeAttribute("aria-sort");
    title.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const body = title.closest("table").tBodies[0];
    const rows = [...body.rows];
    rows.sort((a, b) => compare(a.cells[index].innerText, b.cells[index].innerText) * (ascending ? 1 : -1));
    body.append(...rows);
  });
}
