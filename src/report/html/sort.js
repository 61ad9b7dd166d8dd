// Numbers sort by value, with their units; texts follow them in alphabetical order.
const units = {
  ns: 1e-9, "µs": 1e-6, ms: 1e-3, s: 1, min: 60, minutes: 60, hour: 3600, hours: 3600, day: 86400, days: 86400,
  KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3, TiB: 1024 ** 4, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12,
};
function value(text) {
  const match = text.replaceAll(",", "").match(/^([<×±+$]?)\s*(-?[\d.]+(?:e[+-]?\d+)?)\s*([A-Za-zµ]+)?/);
  if (!match) return null;
  const [, sign, number, unit] = match;
  // `<0.001` lies between 0 and 0.001.
  return parseFloat(number) * (units[unit] ?? 1) * (sign === "<" ? 0.5 : 1);
}
function compare(a, b) {
  const [x, y] = [value(a), value(b)];
  if (x === null || y === null) return (x === null) - (y === null) || a.localeCompare(b);
  return x - y;
}
document.addEventListener("click", event => {
  const title = event.target.closest("th button")?.parentElement;
  if (!title) return;
  const index = [...title.parentElement.children].indexOf(title);
  const ascending = title.getAttribute("aria-sort") !== "ascending";
  for (const other of title.parentElement.children) other.removeAttribute("aria-sort");
  title.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const body = title.closest("table").tBodies[0];
  const rows = [...body.rows];
  rows.sort((a, b) => compare(a.cells[index].innerText, b.cells[index].innerText) * (ascending ? 1 : -1));
  body.append(...rows);
});
