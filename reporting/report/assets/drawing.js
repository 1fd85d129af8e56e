// How runs and parts of memory look: each by colour, and by dash, mark or hatching, which black and white keeps.
"use strict";

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [14, 5]];
const MARKS = ["circle", "square", "triangle", "diamond", "cross", "ring"];
const NUM_COLOURS = 8;

function cssValue(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Colour, dash and mark of a run. No two of the first 120 are alike. */
function runStyle(index) {
  return {
    colour: cssValue(`--run-${index % NUM_COLOURS}`),
    dash: DASHES[index % DASHES.length],
    mark: MARKS[index % MARKS.length],
  };
}

/** The colour for every single step, below a mean. */
function faint(colour) {
  return `color-mix(in srgb, ${colour} 38%, ${cssValue("--surface")})`;
}

/** A mark's outline around a place, `size` being half its width. */
function markPath(mark, x, y, size) {
  const path = new Path2D();
  if (mark === "circle" || mark === "ring") path.arc(x, y, size, 0, 2 * Math.PI);
  if (mark === "square") path.rect(x - 0.9 * size, y - 0.9 * size, 1.8 * size, 1.8 * size);
  const corners = {
    triangle: [[0, -1.2], [1.1, 0.8], [-1.1, 0.8]],
    diamond: [[0, -1.3], [1.1, 0], [0, 1.3], [-1.1, 0]],
  }[mark];
  if (corners) {
    corners.forEach(([right, down], i) => path[i ? "lineTo" : "moveTo"](x + right * size, y + down * size));
    path.closePath();
  }
  if (mark === "cross") {
    for (const way of [1, -1]) {
      path.moveTo(x - size, y - way * size);
      path.lineTo(x + size, y + way * size);
    }
  }
  return path;
}

/** Draw a mark: crosses and rings are open, all others filled. */
function drawMark(context, mark, x, y, size, colour) {
  const path = markPath(mark, x, y, size);
  context.lineWidth = size / 2.2;
  context.strokeStyle = colour;
  context.fillStyle = mark === "ring" ? cssValue("--surface") : colour;
  if (mark !== "cross") context.fill(path);
  if (mark === "cross" || mark === "ring") context.stroke(path);
}

/** The fill of a part of memory: its colour, hatched in a way of its own. */
function hatch(context, index, ratio) {
  const size = Math.round(8 * ratio);
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  const colour = cssValue(`--part-${index}`);
  pen.globalAlpha = 0.32;
  pen.fillStyle = colour;
  pen.fillRect(0, 0, size, size);
  pen.globalAlpha = 0.95;
  pen.strokeStyle = pen.fillStyle = colour;
  pen.lineWidth = 1.3 * ratio;
  const line = (x0, y0, x1, y1) => {
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  };
  const slopes = { 1: [1], 3: [-1], 4: [] }[index] || [];
  for (const way of slopes) {
    for (const shift of [-size, 0, size]) line(shift, way > 0 ? size : 0, shift + size, way > 0 ? 0 : size);
  }
  if (index === 0) pen.fillRect(0, 0, size, size);
  if (index === 2) {
    pen.beginPath();
    pen.arc(size / 2, size / 2, 1.5 * ratio, 0, 2 * Math.PI);
    pen.fill();
  }
  return context.createPattern(tile, "repeat");
}

/** A small canvas that shows how something is drawn. */
function swatch(width, height, draw) {
  const ratio = window.devicePixelRatio || 1;
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  draw(canvas.getContext("2d"), ratio, canvas);
  return canvas;
}

function runSwatch(index) {
  const { colour, dash, mark } = runStyle(index);
  return swatch(34, 12, (context, ratio, canvas) => {
    context.strokeStyle = colour;
    context.lineWidth = 2 * ratio;
    context.setLineDash(dash.map((length) => length * ratio));
    context.beginPath();
    context.moveTo(0, canvas.height / 2);
    context.lineTo(canvas.width, canvas.height / 2);
    context.stroke();
    context.setLineDash([]);
    drawMark(context, mark, canvas.width / 2, canvas.height / 2, 4 * ratio, colour);
  });
}

function partSwatch(index) {
  return swatch(22, 14, (context, ratio, canvas) => {
    context.fillStyle = hatch(context, index, ratio);
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.strokeStyle = cssValue(`--part-${index}`);
    context.lineWidth = ratio;
    context.strokeRect(0, 0, canvas.width, canvas.height);
  });
}

function fillKeys(root) {
  for (const key of root.querySelectorAll(".key[data-run]")) key.replaceChildren(runSwatch(Number(key.dataset.run)));
}
