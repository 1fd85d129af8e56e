// The charts, drawn by uPlot: curves of several runs, and the memory of one rank as stacked areas.
"use strict";

const AXES = {
  step: { label: "step", format: (value) => plain(value) },
  tokens: { label: "tokens", format: (value) => compact.format(value) },
  seconds: { label: "time", format: (value) => clock(value) },
  price: { label: "price", format: (value) => plain(value) },
};
const CLOCK_INCREMENTS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200];
for (let day = 86400; day < 1e10; day *= 2) CLOCK_INCREMENTS.push(day);
const HEIGHT = 220;
const MARK_SPACE = 80; // CSS pixels between marks of a long curve
const FEW_POINTS = 30; // all of them are marked

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });

/** A number to read. */
function plain(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  return size > 0 && (size < 1e-3 || size >= 1e7) ? value.toExponential(2) : digits.format(value);
}

function clock(seconds) {
  const whole = Math.round(seconds);
  if (seconds < 10 && whole !== seconds) return `${digits.format(seconds)} s`;
  const two = (value) => String(value).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

/** The labels of an axis: all with the decimals that tell neighbours apart. */
function ticks(splits) {
  const values = splits.filter((value) => value != null);
  const apart = values.length > 1 ? Math.min(...values.slice(1).map((value, i) => Math.abs(value - values[i]))) : 1;
  const largest = Math.max(...values.map(Math.abs), 0);
  let decimals = 0;
  while (decimals < 6 && Math.abs(apart * 10 ** decimals - Math.round(apart * 10 ** decimals)) > 1e-6) decimals += 1;
  return splits.map((value) => {
    if (value == null) return "";
    if (largest >= 1e5) return compact.format(value);
    if (largest < 1e-2 && largest > 0) return value === 0 ? "0" : value.toExponential(Math.min(2, Math.max(0, Math.round(Math.log10(largest / apart)))));
    return value.toFixed(decimals);
  });
}

/** The columns of a run over the axis that is chosen. */
function places(run, columns, axis) {
  return axis === "price" ? columns.seconds.map((seconds) => seconds * run.price_per_second) : columns[axis];
}

function base(host, title, axis, labels) {
  const soft = cssValue("--soft");
  const grid = { stroke: cssValue("--grid"), width: 1 };
  const font = "12px system-ui, 'DejaVu Sans', sans-serif";
  const common = { stroke: soft, font, grid, ticks: { show: false }, gap: 6 };
  const x = {
    ...common,
    space: axis === "seconds" ? 64 : 50,
    size: 30,
    values: (_, splits) => (axis === "seconds" ? splits.map(clock) : ticks(splits)),
  };
  if (axis === "seconds") x.incrs = [0.001, 0.01, 0.1, 0.5, ...CLOCK_INCREMENTS];
  if (axis === "step") x.incrs = [1, 2, 5].flatMap((first) => Array.from({ length: 13 }, (_, i) => first * 10 ** i)).sort((a, b) => a - b);
  return {
    width: Math.max(200, host.clientWidth),
    height: HEIGHT,
    scales: { x: { time: false } },
    axes: [x, { ...common, size: (_, values) => 16 + 7 * Math.max(2, ...(values || []).map((text) => text.length)), values: (_, splits) => ticks(splits) }],
    series: [{ label: AXES[axis].label, value: (_, value) => (value == null ? "–" : AXES[axis].format(value)) }, ...labels],
    legend: { markers: { show: false } },
    cursor: {
      sync: { key: "report", scales: ["x", null] },
      drag: { x: true, y: false, setScale: false },
      points: { size: 8 },
      dataIdx: nearest,
      bind: { dblclick: () => () => zoomAll(null) },
    },
    padding: [10, 22, 0, 0],
  };
}

/** The nearest point of a series to the cursor: runs have their points at different places. */
function nearest(u, series, index, x) {
  const values = u.data[series];
  if (series === 0 || values[index] != null) return index;
  const xs = u.data[0];
  let [left, right] = [index, index];
  while (left >= 0 && values[left] == null) left -= 1;
  while (right < xs.length && values[right] == null) right += 1;
  if (left < 0) return right < xs.length ? right : null;
  if (right >= xs.length) return left;
  return x - xs[left] <= xs[right] - x ? left : right;
}

/** Without a cursor the legend shows each curve's last value. */
function showLast(u) {
  const last = u.data.map((values) => values.findLastIndex((value) => value != null));
  u.setLegend({ idxs: last.map((index) => (index < 0 ? null : index)) }, false);
}

function label(canvas, text) {
  const element = document.createElement("span");
  element.append(canvas, ` ${text}`);
  return element;
}

/** One curve for each run that has points, and below it every step if the curve is a mean; null if none has points. */
function lineChart(host, spec, runs, view) {
  const curves = runs
    .map((run, index) => ({ run, index, columns: run[spec.from] }))
    .filter(({ index }) => view.shown[index])
    .map((curve) => ({ ...curve, mean: view.means ? curve.columns[`${spec.column}_mean`] : undefined }))
    .map((curve) => ({ ...curve, ...points(curve, spec, view) }))
    .filter(({ xs }) => xs.length > 0);
  if (curves.length === 0) return null;
  const raw = curves.filter(({ mean }) => mean);
  const rawSeries = raw.map(({ run, index }) => ({
    plain_label: `${run.name}, each step`,
    class: "raw",
    stroke: faint(runStyle(index).colour),
    width: 1,
    spanGaps: true,
    points: { show: false },
    value: (_, value) => plain(value),
  }));
  const series = curves.map(({ run, index, mean }) => {
    const { colour, dash } = runStyle(index);
    const name = runs.length > 1 ? run.name : spec.label;
    return {
      label: label(runSwatch(index), mean ? `${name}, mean` : name),
      plain_label: run.name,
      stroke: colour,
      width: mean ? 2 : 1.75,
      dash,
      spanGaps: true,
      points: { show: false },
      value: (_, value) => plain(value),
    };
  });
  const options = base(host, spec.label, view.axis, [...rawSeries, ...series]);
  const fromZero = { range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.08 : 1] };
  options.scales.y = spec.isLoss && view.log ? { distr: 3 } : spec.fromZero ? fromZero : {};
  options.hooks = {
    drawSeries: [(u, number) => number > raw.length && drawMarks(u, number, curves[number - raw.length - 1].index)],
    draw: [(u) => curves.forEach(({ run, index }) => drawResumes(u, run, index, view))],
    setCursor: [(u) => u.cursor.left < 0 && showLast(u)],
    setSelect: [zoomToSelection],
    ready: [showLast],
  };
  const tables = [...raw.map(({ xs, ys }) => [xs, ys]), ...curves.map(({ xs, ys, means }) => [xs, means ?? ys])];
  return new uPlot(options, tables.length > 1 ? uPlot.join(tables) : tables[0], host);
}

/** The points that can be drawn: over the axis that is chosen, with a value, above zero on a logarithmic scale. */
function points({ run, columns, mean }, spec, view) {
  const all = places(run, columns, view.axis);
  const values = columns[spec.column];
  const rows = all.map((_, row) => row).filter((row) => values[row] != null && (!(spec.isLoss && view.log) || values[row] > 0));
  return { xs: rows.map((row) => all[row]), ys: rows.map((row) => values[row]), means: mean && rows.map((row) => mean[row]) };
}

function drawMarks(u, number, index) {
  const ratio = window.devicePixelRatio || 1;
  const { colour, mark } = runStyle(index);
  const [xs, ys] = [u.data[0], u.data[number]];
  const [from, to] = u.series[0].idxs;
  const rows = [];
  for (let row = from; row <= to; row += 1) if (ys[row] != null) rows.push(row);
  let next = rows.length > FEW_POINTS ? u.bbox.left + ((12 + 29 * index) % MARK_SPACE) * ratio : 0;
  for (const row of rows) {
    const [x, y] = [u.valToPos(xs[row], "x", true), u.valToPos(ys[row], "y", true)];
    if (x < next || x < u.bbox.left - 1 || x > u.bbox.left + u.bbox.width + 1) continue;
    drawMark(u.ctx, mark, x, y, (rows.length > FEW_POINTS ? 3.6 : 3) * ratio, colour);
    if (rows.length > FEW_POINTS) next = x + MARK_SPACE * ratio;
  }
}

/** A dotted line where a run was resumed. */
function drawResumes(u, run, index, view) {
  const ratio = window.devicePixelRatio || 1;
  const train = run.train;
  const xs = places(run, train, view.axis);
  for (const step of run.resumed_after) {
    const row = train.step.findLastIndex((other) => other <= step);
    const x = row < 0 ? NaN : u.valToPos(xs[row], "x", true);
    if (!(x >= u.bbox.left && x <= u.bbox.left + u.bbox.width)) continue;
    u.ctx.save();
    u.ctx.strokeStyle = u.ctx.fillStyle = runStyle(index).colour;
    u.ctx.lineWidth = ratio;
    u.ctx.setLineDash([2 * ratio, 3 * ratio]);
    u.ctx.beginPath();
    u.ctx.moveTo(x, u.bbox.top);
    u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
    u.ctx.stroke();
    u.ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    u.ctx.textAlign = x > u.bbox.left + u.bbox.width / 2 ? "right" : "left";
    u.ctx.fillText("resumed", x + (u.ctx.textAlign === "right" ? -4 : 4) * ratio, u.bbox.top + 11 * ratio);
    u.ctx.restore();
  }
}

/** What holds one rank's memory at one phase, part upon part; the highest peak so far and the planned one as lines. */
function memoryChart(host, phase, run, rank, parts, view) {
  const memory = run.memory;
  const xs = places(run, memory, view.axis);
  if (xs.length === 0 || rank < 0) return null;
  const of = (column) => memory.values[column][phase][rank];
  const heights = [];
  parts.forEach((part, k) => heights.push(of(part).map((value, row) => Math.max(0, value ?? 0) + (k ? heights[k - 1][row] : 0))));
  const held = parts.map((part, k) => ({
    label: label(partSwatch(k), part),
    plain_label: part,
    stroke: cssValue(`--part-${k}`),
    width: 1,
    fill: (u) => hatch(u.ctx, k, window.devicePixelRatio || 1),
    points: { show: xs.length < 3, size: 4 },
    value: (_, __, ___, row) => (row == null ? "–" : plain(of(part)[row])),
  }));
  const line = (text, dash) => ({
    label: label(lineSwatch(dash), text),
    plain_label: text,
    stroke: cssValue("--ink"),
    width: 1.75,
    dash,
    points: { show: false },
    value: (_, value) => plain(value),
  });
  const lines = [line("peak so far", [6, 4])];
  const curves = [of("peak_allocated")];
  if (run.planned_peak_gib != null) {
    lines.push(line("planned peak", [2, 3]));
    curves.push(xs.map(() => run.planned_peak_gib));
  }
  const options = base(host, "memory", view.axis, [...held, ...lines]);
  const top = highestMemory(run, rank);
  options.scales.y = { range: [0, top > 0 ? 1.06 * top : 1] };
  options.bands = parts.slice(1).map((_, k) => ({ series: [k + 2, k + 1] }));
  options.hooks = {
    setCursor: [(u) => u.cursor.left < 0 && showLast(u)],
    setSelect: [zoomToSelection],
    ready: [showLast],
  };
  return new uPlot(options, [xs, ...heights, ...curves], host);
}

function lineSwatch(dash) {
  return swatch(22, 12, (context, ratio, canvas) => {
    context.strokeStyle = cssValue("--ink");
    context.lineWidth = 1.75 * ratio;
    context.setLineDash(dash.map((length) => length * ratio));
    context.beginPath();
    context.moveTo(0, canvas.height / 2);
    context.lineTo(canvas.width, canvas.height / 2);
    context.stroke();
  });
}

/** The highest figure of a rank in any phase, so that its charts have one scale. */
function highestMemory(run, rank) {
  let highest = run.planned_peak_gib ?? 0;
  for (const column of ["allocated", "peak_allocated"]) {
    for (const phase of run.memory.values[column]) for (const value of phase[rank]) highest = Math.max(highest, value ?? 0);
  }
  return highest;
}

function zoomToSelection(u) {
  const { left, width } = u.select;
  u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  if (width > 4) zoomAll([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
}

/** Every chart to the same span of x; null shows all. */
function zoomAll(span) {
  view.span = span;
  for (const u of charts.values()) {
    if (span === null) u.setData(u.data);
    else u.setScale("x", { min: span[0], max: span[1] });
  }
}
