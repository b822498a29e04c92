"use strict";
const summary = JSON.parse(document.getElementById("summary").textContent);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const announce = (text) => { document.getElementById("status").textContent = text; };

// Downloads, generated from the summary.
const METRICS = ["accuracy", "nll", "ece"];
const DIFFERENCE = ["mean", "low", "high", "low_images", "high_images", "p", "p_holm", "p_smallest", "mde", "seeds_for_half", "verdict"];
const numbersOf = (difference) => [difference ? difference.seeds.length : 0, ...DIFFERENCE.map((name) => difference ? difference[name] : null)];
const curve = (name) => (cell) => [["arm", "x", "low", "median", "high"],
  ...cell.arms.flatMap((arm) => arm[name].x.map((x, i) => [arm.name, x, arm[name].low[i], arm[name].median[i], arm[name].high[i]]))];
const TABLES = {
  ranking: (cell) => [["arm", "kind", "call", "metric", "arm_mean", "pairs", ...DIFFERENCE, "set_aside"],
    ...cell.arms.flatMap((arm) => METRICS.map((metric) => [arm.name, arm.kind, arm.call, metric, arm.means[metric],
      ...numbersOf(arm.against_none?.[metric]), Object.keys(arm.set_aside).join(" ")]))],
  seeds: (cell) => [["arm", "metric", "seed", "value", "difference"],
    ...cell.arms.flatMap((arm) => METRICS.flatMap((metric) => (arm.values[metric] ?? []).map((value, i) => {
      const difference = arm.against_none?.[metric];
      const at = difference ? difference.seeds.indexOf(arm.seeds[i]) : -1;
      return [arm.name, metric, arm.seeds[i], value, at < 0 ? null : difference.values[at]];
    })))],
  between: (cell) => [["a", "b", "metric", "pairs", ...DIFFERENCE],
    ...cell.between.map((one) => [one.a, one.b, one.metric, ...numbersOf(one.difference)])],
  train_loss: curve("train_loss"),
  validation_accuracy: curve("validation_accuracy"),
  validation_nll: curve("validation_nll"),
  rate: curve("rate"),
  realised: (cell) => [["arm", "site", "asked", "dropped"],
    ...cell.arms.flatMap((arm) => arm.realised.map((site) => [arm.name, site.name, site.asked, site.dropped]))],
  calibration: (cell) => [["arm", "confidence", "accuracy", "count"],
    ...cell.arms.flatMap((arm) => arm.calibration.map((bin) => [arm.name, bin.confidence, bin.accuracy, bin.count]))],
  cost: (cell) => [["arm", "what", "low", "median", "high"],
    ...cell.arms.flatMap((arm) => ["time", "memory"].filter((what) => arm[what]).map((what) => [arm.name, what, arm[what].low, arm[what].median, arm[what].high]))],
  tuning: (cell) => [["arm", "method", "settings", "score", "chosen"],
    ...cell.arms.filter((arm) => arm.tuning).flatMap((arm) => arm.tuning.trials.map((trial) => [arm.name, arm.tuning.method,
      JSON.stringify(trial.settings), trial.score, JSON.stringify(trial.settings) === JSON.stringify(arm.tuning.chosen)]))],
};
const field = (value) => {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};
const csv = (rows) => rows.map((row) => row.map(field).join(",") + "\r\n").join("");
const safe = (name) => name.replace(/[^\w.]+/g, "-");

function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  announce(`${name} saved.`);
}

function download(table, cell) {
  if (table === "summary") return save("summary.json", "application/json", JSON.stringify(summary, null, 1));
  if (table === "masks") {
    const masks = cell.arms.filter((arm) => arm.mask).map((arm) => ({ arm: arm.name, ...arm.mask }));
    return save(safe(`${cell.slug}-masks.json`), "application/json", JSON.stringify(masks, null, 1));
  }
  return save(safe(`${cell.slug}-${table}.csv`), "text/csv", csv(TABLES[table](cell)));
}
for (const button of all(".download")) {
  button.addEventListener("click", () => download(button.dataset.table, summary.cells[button.dataset.cell]));
}

// Sorting: rows without a value stay last.
function valueOf(row, key, metric) {
  const data = [...row.children].find((cell) => cell.dataset.col === key).dataset;
  const text = data.sort ?? data["sort" + metric[0].toUpperCase() + metric.slice(1)] ?? "";
  return text === "" ? null : Number.isNaN(Number(text)) ? text : Number(text);
}
function compare(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}
function sort(header, direction) {
  const key = header.querySelector(".sort").dataset.key;
  const table = header.closest("table");
  const metric = table.closest(".cell").dataset.metric;
  for (const other of all("th[aria-sort]", table)) other.setAttribute("aria-sort", other === header ? direction : "none");
  for (const body of table.tBodies) {
    const rows = all("tr:not(.group)", body).map((row) => [valueOf(row, key, metric), row]);
    rows.sort((a, b) => compare(a[0], b[0], direction === "ascending" ? 1 : -1));
    body.append(...rows.map((row) => row[1]));
  }
}
const better = (cell) => Number(cell.querySelector("input[type=radio]:checked").dataset.better);
const best = (cell) => better(cell) > 0 ? "descending" : "ascending";
for (const button of all(".sort")) {
  button.addEventListener("click", () => {
    const header = button.closest("th");
    const now = header.getAttribute("aria-sort");
    const first = button.dataset.first === "best" ? best(header.closest(".cell")) : button.dataset.first;
    const direction = now === "none" ? first : now === "ascending" ? "descending" : "ascending";
    sort(header, direction);
    announce(`Sorted by ${button.firstChild.textContent}, ${direction}.`);
  });
}

// The metric, the filter and the visible arms are specific to each cell.
for (const cell of all(".cell")) {
  const form = cell.querySelector(".tools");
  const rows = all(".ranking tbody tr:not(.group)", cell);
  const choose = () => {
    cell.dataset.metric = form.querySelector("input[type=radio]:checked").value;
    for (const header of all("th[aria-sort]:not([aria-sort=none])", cell)) {
      const button = header.querySelector(".sort");
      sort(header, button.dataset.first === "best" ? best(cell) : header.getAttribute("aria-sort"));
    }
    announce(`Differences in ${form.querySelector("input[type=radio]:checked").parentElement.textContent.trim()}.`);
  };
  const filter = () => {
    const words = form.elements.text.value.toLowerCase().split(/\s+/);
    const kinds = all("input[name=kind]:checked", form).map((input) => input.value);
    for (const row of rows) {
      const text = row.dataset.text.toLowerCase();
      row.hidden = !kinds.includes(row.dataset.kind) || !words.every((word) => text.includes(word));
    }
    for (const group of all(".ranking .group", cell)) {
      group.hidden = all("tr:not(.group)", group.parentElement).every((row) => row.hidden);
    }
    announce(`${rows.filter((row) => !row.hidden).length} of ${rows.length} arms shown.`);
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  all("input[type=radio]", form).forEach((input) => input.addEventListener("change", choose));
  all("input[name=kind]", form).forEach((input) => input.addEventListener("change", filter));
  form.elements.text.addEventListener("input", filter);

  const show = (arm, shown) => {
    for (const button of all(`.legend [data-arm="${arm}"]`, cell)) button.setAttribute("aria-pressed", String(shown));
    for (const drawn of all(`svg [data-arm="${arm}"]`, cell)) drawn.classList.toggle("gone", !shown);
  };
  for (const button of all(".arm", cell)) {
    button.addEventListener("click", () => show(button.dataset.arm, button.getAttribute("aria-pressed") !== "true"));
  }
  for (const button of all(".all", cell)) {
    button.addEventListener("click", () => all(".arm", button.parentElement).forEach((arm) => show(arm.dataset.arm, true)));
  }
}

// Copying: without access to the clipboard, the text is selected instead.
for (const button of all(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(code.textContent);
      announce("Copied.");
      button.firstChild.textContent = "Copied";
      setTimeout(() => { button.firstChild.textContent = "Copy"; }, 2000);
    } catch {
      getSelection().selectAllChildren(code);
      announce("Selected: press the copy shortcut.");
    }
  });
}

// The color scheme follows the system until the button is used.
const theme = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const dark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
const label = () => { theme.textContent = dark() ? "Light colors" : "Dark colors"; };
theme.addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; label(); });
system.addEventListener("change", label);
label();
