// The page: controls, keys, copying, CSV files, and news of a run that goes on.
"use strict";

const LINE_CHARTS = [
  { id: "loss", from: "train", column: "loss", label: "training loss", isLoss: true },
  { id: "eval_loss", from: "eval", column: "loss", label: "evaluation loss", isLoss: true },
  { id: "rougeL", from: "eval", column: "rougeL", label: "ROUGE-L", fromZero: true },
  { id: "tokens_per_second", from: "train", column: "tokens_per_second", label: "tokens per second", fromZero: true },
  { id: "wait_percent", from: "train", column: "wait_percent", label: "data wait", fromZero: true },
  { id: "grad_norm", from: "train", column: "grad_norm", label: "gradient norm", fromZero: true },
  { id: "lr", from: "train", column: "lr", label: "learning rate", fromZero: true },
  { id: "model_tflops_per_device", from: "train", column: "model_tflops_per_device", label: "model TFLOP/s", fromZero: true },
];
const POLL_SECONDS = 3;

let data = JSON.parse(document.getElementById("data").textContent);
const charts = new Map(); // uPlot by the id of its figure
const view = { axis: "step", log: false, means: true, shown: data.runs.map(() => true), memoryRun: 0, memoryRank: 0, span: null };
const element = (id) => document.getElementById(id);

function draw() {
  for (const u of charts.values()) u.destroy();
  charts.clear();
  for (const spec of LINE_CHARTS) place(spec.id, (host) => lineChart(host, spec, data.runs, view), hasPoints(spec));
  const run = data.runs[view.memoryRun];
  const hasMemory = data.runs.some((other) => other.memory.step.length > 0);
  element("memory-section").hidden = !hasMemory;
  data.phases.forEach((_, phase) => {
    place(`memory-${phase}`, (host) => memoryChart(host, phase, run, view.memoryRank, data.parts, view), hasMemory);
  });
  element("nothing").textContent = LINE_CHARTS.some(hasPoints) ? "" : "No step is done yet.";
  if (view.span) zoomAll(view.span);
  fillKeys(document);
}

function hasPoints(spec) {
  return data.runs.some((run) => run[spec.from][spec.column].some((value) => value != null));
}

function place(id, make, isUseful) {
  const figure = element(id);
  const host = figure.querySelector(".plot");
  figure.hidden = !isUseful;
  host.replaceChildren();
  const chart = isUseful ? make(host) : null;
  if (chart) charts.set(id, chart);
  else if (isUseful) host.append("Nothing to show.");
}

// Controls

function makeControls() {
  const withPrice = data.runs.some((run) => run.price_per_second != null);
  for (const [name, { label: text }] of Object.entries(AXES)) {
    if (name === "price" && !withPrice) continue;
    const choice = document.createElement("label");
    choice.className = "choice";
    const input = Object.assign(document.createElement("input"), { type: "radio", name: "axis", value: name });
    input.checked = name === view.axis;
    input.addEventListener("change", () => {
      view.axis = name;
      view.span = null;
      draw();
    });
    choice.append(input, text + (name === "step" ? "s" : ""));
    element("axes").append(choice);
  }
  element("log").addEventListener("change", (event) => {
    view.log = event.target.checked;
    draw();
  });
  element("means").addEventListener("change", (event) => {
    view.means = event.target.checked;
    draw();
    sayWhatIsLeftOut();
  });
  for (const box of document.querySelectorAll("[data-show]")) {
    box.addEventListener("change", () => {
      view.shown[Number(box.dataset.show)] = box.checked;
      draw();
    });
  }
  element("memory-run").addEventListener("change", (event) => {
    view.memoryRun = Number(event.target.value);
    view.memoryRank = 0;
    fillRanks();
    draw();
  });
  element("memory-rank").addEventListener("change", (event) => {
    view.memoryRank = Number(event.target.value);
    draw();
  });
  for (const plot of document.querySelectorAll(".plot")) plot.addEventListener("keydown", onKey);
  fillRanks();
}

function fillRanks() {
  const ranks = data.runs[view.memoryRun].memory.ranks;
  const options = ranks.map((rank, place) => new Option(place === 0 && ranks.length > 1 ? `${rank}, the fullest` : rank, place));
  element("memory-rank").replaceChildren(...options);
  element("memory-rank").value = String(view.memoryRank);
}

function onKey(event) {
  const figure = event.currentTarget.closest("figure");
  const u = charts.get(figure.id);
  if (!u || event.ctrlKey || event.altKey || event.metaKey) return;
  const { min, max } = u.scales.x;
  const [first, last] = [u.valToIdx(min), u.valToIdx(max)];
  const far = event.shiftKey ? 10 : 1;
  const at = u.cursor.left >= 0 ? u.valToIdx(u.posToVal(u.cursor.left, "x")) : null;
  const goTo = (index) => {
    const place = Math.min(last, Math.max(first, index));
    u.setCursor({ left: u.valToPos(u.data[0][place], "x"), top: u.over.clientHeight / 2 });
    figure.querySelector("output").textContent = said(u);
  };
  const middle = at === null ? (min + max) / 2 : u.data[0][at];
  const zoom = (factor) => zoomAll([middle - (middle - min) * factor, middle + (max - middle) * factor]);
  const actions = {
    ArrowLeft: () => goTo(at === null ? last : at - far),
    ArrowRight: () => goTo(at === null ? first : at + far),
    Home: () => goTo(first),
    End: () => goTo(last),
    "+": () => zoom(0.5),
    "=": () => zoom(0.5),
    "-": () => (view.span ? zoom(2) : null),
    0: () => zoomAll(null),
    Escape: () => u.setCursor({ left: -10, top: -10 }),
  };
  if (!(event.key in actions)) return;
  event.preventDefault();
  actions[event.key]();
}

/** What the legend shows, in words for a screen reader. */
function said(u) {
  const values = [...u.root.querySelectorAll(".u-legend .u-value")].map((cell) => cell.textContent);
  return u.series.map((series, i) => `${series.plain_label ?? AXES[view.axis].label} ${values[i]}`).join(", ");
}

// Copying and files

function tableRows() {
  return [...element("table").rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim().replace(/\s+/g, " ")));
}

function asMarkdown(rows) {
  const line = (cells) => `| ${cells.map((cell) => cell.replaceAll("|", "\\|")).join(" | ")} |`;
  const full = rows.filter((cells) => cells.length > 1);
  return [line(full[0]), line(full[0].map((_, i) => (i ? "---:" : "---"))), ...full.slice(1).map(line)].join("\n");
}

/** Copy the table by a selection: navigator.clipboard is missing where a page is served over plain http. */
function copy(kind) {
  const rows = tableRows();
  const text = kind === "markdown" ? asMarkdown(rows) : rows.map((cells) => cells.join("\t")).join("\n");
  const area = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  element("said").textContent = copied ? "Copied." : "This browser does not let the page copy; save the figures as CSV instead.";
}

/** A cell of a CSV file. A spreadsheet would calculate a text that begins like a formula. */
function cell(value) {
  if (value == null) return "";
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const CSV = {
  figures: () => [["figure", ...data.runs.map((run) => run.name)], ...data.figures.map((row) => [row.name, ...row.values])],
  curves: () => {
    const columns = ["step", "tokens", "seconds", ...new Set(data.runs.flatMap((run) => [...Object.keys(run.train), ...Object.keys(run.eval)]))];
    const names = [...new Set(columns)];
    const rows = data.runs.flatMap((run) =>
      ["train", "eval"].flatMap((event) =>
        run[event].step.map((_, row) => [run.name, event, ...names.map((name) => run[event][name]?.[row])]),
      ),
    );
    return [["run", "event", ...names], ...rows];
  },
  memory: () => {
    const rows = data.runs.flatMap((run) =>
      run.memory.step.flatMap((step, row) =>
        run.memory.ranks.flatMap((rank, place) =>
          data.phases.map((phase, k) => [run.name, step, rank, phase, ...data.memory_columns.map((name) => run.memory.values[name][k][place][row])]),
        ),
      ),
    );
    return [["run", "step", "rank", "phase", ...data.memory_columns.map((name) => `${name}_gib`)], ...rows];
  },
};

function download(kind) {
  const text = CSV[kind]().map((row) => row.map(cell).join(",") + "\r\n").join("");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = `${kind}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  element("said").textContent = `${kind}.csv`;
}

function sayWhatIsLeftOut() {
  const averaged = data.runs.filter((run) => run.averaged_steps > 0);
  element("means-choice").hidden = averaged.length === 0;
  const means = averaged.map((run) => `${run.name}: ${run.averaged_steps} steps`).join("; ");
  element("averaged").textContent = averaged.length && view.means ? `Bold curves are means of the last steps (${means}); the faint ones below are every step.` : "";
  const thinned = data.runs.filter((run) => run.train.step.length < run.num_steps);
  const parts = thinned.map((run) => `${run.name}: ${run.train.step.length} of ${run.num_steps} steps`).join("; ");
  element("thinned").textContent = thinned.length
    ? `Curves are thinned out, and keep the lowest and highest values of each span (${parts}). The run's metrics.jsonl has every step.`
    : "";
}

// News

async function poll(tag) {
  let next = tag;
  try {
    const answer = await fetch(location.pathname, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
    if (answer.status === 200) {
      next = answer.headers.get("ETag");
      takeUp(new DOMParser().parseFromString(await answer.text(), "text/html"));
    }
    setLive(answer.ok || answer.status === 304);
  } catch {
    setLive(false);
  }
  setTimeout(poll, 1000 * POLL_SECONDS, next);
}

function setLive(isLive) {
  const badge = element("live");
  badge.textContent = isLive ? "live" : "connection lost";
  badge.classList.toggle("lost", !isLive);
}

/** Show what a newer page says, and keep what is chosen, zoomed and opened. */
function takeUp(page) {
  for (const old of document.querySelectorAll("[data-live]")) {
    const fresh = page.querySelector(`[data-live="${old.dataset.live}"]`);
    const opened = [...old.querySelectorAll("details")].map((details) => details.open);
    const scrolled = [...old.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
    old.replaceChildren(...fresh.childNodes);
    if (opened.length === old.querySelectorAll("details").length) {
      old.querySelectorAll("details").forEach((details, i) => (details.open = opened[i]));
    }
    old.querySelectorAll(".scroll").forEach((box, i) => (box.scrollLeft = scrolled[i] ?? 0));
  }
  data = JSON.parse(page.getElementById("data").textContent);
  view.memoryRank = Math.min(view.memoryRank, Math.max(0, data.runs[view.memoryRun].memory.ranks.length - 1));
  fillRanks();
  sayWhatIsLeftOut();
  draw();
}

for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button.dataset.copy));
for (const button of document.querySelectorAll("[data-csv]")) button.addEventListener("click", () => download(button.dataset.csv));
makeControls();
sayWhatIsLeftOut();
draw();
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) draw(); // phones resize in height while they scroll
  width = window.innerWidth;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
if (data.live) setTimeout(poll, 1000 * POLL_SECONDS, null);
