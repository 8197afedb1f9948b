// What is drawn on a chart besides its curves: single points, intervals at single points, horizontal lines.
// uPlot wants one x for all series; these have an x of their own, so they are drawn by hand.

import { extent } from "./smooth.js";
import { transparent } from "./palette.js";

const BEYOND = 5; // pixels beside the plot: a point at its edge, such as the last evaluation, is seen whole

/** Least and greatest y of what a scene has besides curves, within the x range shown. */
export function overlayExtent(scene, hidden, from, to) {
  let low = Infinity;
  let high = -Infinity;
  const include = (pair) => {
    low = Math.min(low, pair[0]);
    high = Math.max(high, pair[1]);
  };
  for (const dots of scene.dots ?? []) if (!hidden.has(dots.key)) include(extent(dots.y, dots.x, from, to));
  for (const marks of scene.whiskers ?? []) {
    if (hidden.has(marks.key)) continue;
    for (const values of [marks.y, marks.low, marks.high]) include(extent(values, marks.x, from, to));
  }
  for (const line of scene.lines ?? []) include([line.y, line.y]);
  return [low, high];
}

/** Draw the points, below the curves. `u` is the uPlot. */
export function drawDots(u, scene, hidden, colourOf) {
  clipped(u, (context, ratio) => {
    for (const dots of scene.dots ?? []) {
      if (hidden.has(dots.key)) continue;
      // Many points overlap: the more there are, the fainter is each.
      context.fillStyle = transparent(colourOf(dots), dots.y.length > 600 ? 0.28 : 0.45);
      const size = (dots.y.length > 600 ? 2 : 3) * ratio;
      for (let index = 0; index < dots.y.length; index += 1) {
        if (dots.y[index] === null) continue;
        const x = u.valToPos(dots.x[index], "x", true);
        const y = u.valToPos(dots.y[index], "y", true);
        context.fillRect(x - size / 2, y - size / 2, size, size);
      }
    }
  });
}

/** Draw horizontal lines and the points with intervals, above the curves. */
export function drawMarks(u, scene, hidden, colourOf) {
  clipped(u, (context, ratio) => {
    for (const line of scene.lines ?? []) drawLine(u, context, ratio, line, colourOf(line));
    for (const marks of scene.whiskers ?? []) {
      if (!hidden.has(marks.key)) drawWhiskers(u, context, ratio, marks, colourOf(marks));
    }
  });
}

function drawLine(u, context, ratio, line, colour) {
  const y = Math.round(u.valToPos(line.y, "y", true));
  context.strokeStyle = colour;
  context.lineWidth = ratio;
  context.setLineDash([6 * ratio, 4 * ratio]);
  context.beginPath();
  context.moveTo(u.bbox.left, y);
  context.lineTo(u.bbox.left + u.bbox.width, y);
  context.stroke();
  context.setLineDash([]);
  context.fillStyle = colour;
  context.font = `${11 * ratio}px system-ui, sans-serif`;
  context.textAlign = "left";
  // Above the line, unless that is outside of the chart.
  context.textBaseline = y - 16 * ratio < u.bbox.top ? "top" : "bottom";
  context.fillText(line.label, u.bbox.left + 6 * ratio, y + (context.textBaseline === "top" ? 3 : -3) * ratio);
}

function drawWhiskers(u, context, ratio, marks, colour) {
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = 1.5 * ratio;
  for (let index = 0; index < marks.y.length; index += 1) {
    if (marks.y[index] === null) continue;
    const x = u.valToPos(marks.x[index], "x", true);
    const y = u.valToPos(marks.y[index], "y", true);
    context.beginPath();
    if (marks.low[index] !== null && marks.high[index] !== null) {
      const bottom = u.valToPos(marks.low[index], "y", true);
      const top = u.valToPos(marks.high[index], "y", true);
      const half = 3 * ratio;
      context.moveTo(x, bottom);
      context.lineTo(x, top);
      for (const end of [bottom, top]) {
        context.moveTo(x - half, end);
        context.lineTo(x + half, end);
      }
      context.stroke();
    }
    context.beginPath();
    context.arc(x, y, 3.2 * ratio, 0, 2 * Math.PI);
    context.fill();
  }
}

function clipped(u, draw) {
  const { ctx: context, bbox } = u;
  const beyond = BEYOND * devicePixelRatio;
  context.save();
  context.beginPath();
  context.rect(bbox.left - beyond, bbox.top, bbox.width + 2 * beyond, bbox.height);
  context.clip();
  draw(context, devicePixelRatio);
  context.restore();
}
