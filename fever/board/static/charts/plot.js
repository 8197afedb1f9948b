// From a scene (what to draw, see chart.js) to uPlot's series, bands and columns.

import uPlot from "../uplot/uPlot.esm.js";
import { colour } from "../core/theme.js";
import * as format from "../core/format.js";
import { extent } from "./smooth.js";
import { curveColour, curveDash, transparent } from "./palette.js";
import { drawDots, drawMarks, overlayExtent } from "./overlay.js";

const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

/** The colour of a curve, of points or of a line: by its number, or by its name in the style sheet. */
export function colourOf(item) {
  return typeof item.colour === "number" ? curveColour(item.colour) : colour(item.colour);
}

/**
 * The columns that one curve becomes, main line last: its band's edges, its unsmoothed self, itself. Each is
 * [role, values].
 */
function partsOf(curve) {
  const parts = [];
  if (curve.low && curve.high) parts.push(["low", curve.low], ["high", curve.high]);
  if (curve.raw) parts.push(["raw", curve.raw]);
  parts.push(["line", curve.y]);
  return parts;
}

/** A text that is equal for scenes that need the same series, so that the same uPlot can draw them. */
export function shapeOf(scene) {
  const rolesOf = (curve) => partsOf(curve).map(([role]) => role);
  const curves = scene.curves.map((curve) => [curve.key, curve.colour, curve.width, curve.fill, rolesOf(curve)]);
  return JSON.stringify([scene.x.label, ...curves]);
}

/** Columns for uPlot: the common x, then all parts of all curves. Curves with x of their own are joined. */
export function columnsOf(scene) {
  const { curves } = scene;
  if (!curves.length) return [overlayRange(scene), [null, null]]; // uPlot wants a series to have a y axis
  if (curves.every((curve) => curve.x === curves[0].x)) {
    return [curves[0].x, ...curves.flatMap((curve) => partsOf(curve).map(([, values]) => values))];
  }
  return uPlot.join(curves.map((curve) => [curve.x, ...partsOf(curve).map(([, values]) => values)]));
}

/** Series and bands of a scene, and for each curve its key and the numbers of its series. */
export function seriesOf(scene, hidden) {
  const series = [{}];
  const bands = [];
  const members = [];
  for (const curve of scene.curves) {
    const stroke = colourOf(curve);
    const shown = !hidden.has(curve.key);
    const own = { key: curve.key, all: [], line: 0 };
    for (const [role] of partsOf(curve)) {
      own.all.push(series.length);
      if (role === "line") own.line = series.length;
      if (role === "high") {
        bands.push({ series: [series.length, series.length - 1], fill: transparent(stroke, curve.fill ?? 0.18) });
      }
      series.push({
        show: shown,
        label: curve.label,
        spanGaps: true,
        stroke: role === "line" ? stroke : role === "raw" ? transparent(stroke, 0.25) : undefined,
        width: role === "line" ? (curve.width ?? 2) : role === "raw" ? 1 : 0,
        dash: role === "line" && typeof curve.colour === "number" ? curveDash(curve.colour) : undefined,
        // A curve of one or two points would not be seen as a line.
        points:
          role === "line"
            ? { show: (u, index, first, last) => last - first < 2, size: 6, fill: stroke }
            : { show: false },
      });
    }
    members.push(own);
  }
  if (!members.length) series.push({ points: { show: false } });
  return { series, bands, members };
}

/** Where the points begin and end on the x axis, for a scene without curves. */
function overlayRange(scene) {
  const ends = [...(scene.dots ?? []), ...(scene.whiskers ?? [])]
    .map((item) => extent(item.x, item.x))
    .filter(([low]) => Number.isFinite(low));
  return ends.length ? [Math.min(...ends.map(([low]) => low)), Math.max(...ends.map(([, high]) => high))] : [0, 1];
}

/** Options of a new uPlot for a chart (chart.js) of this size. */
export function optionsOf(chart, width, height) {
  const { scene, hidden, settings } = chart;
  const { series, bands, members } = seriesOf(scene, hidden);
  const grid = { stroke: colour("--grid"), width: 1 };
  const axis = { stroke: colour("--muted"), font: FONT, grid, ticks: { show: false } };
  chart.members = members;
  return {
    width,
    height,
    series,
    bands,
    legend: { show: false },
    padding: [10, 20, 0, 0],
    scales: {
      x: { time: false, range: (u, low, high) => xRange(chart.scene, low, high) },
      y: { range: (u, low, high) => yRange(chart, low, high) },
    },
    axes: [
      {
        ...axis,
        size: 28,
        gap: 6,
        space: 70,
        ...(scene.x.steps && { incrs: scene.x.steps }),
        values: (u, splits) => splits.map((value) => (chart.scene.x.tick ?? chart.scene.x.format)(value)),
      },
      {
        ...axis,
        size: 52,
        gap: 6,
        space: height < 180 ? 24 : 34,
        values: (u, splits) => splits.map(settings.formatAxis ?? format.number),
      },
    ],
    cursor: {
      y: false,
      points: { size: 7, width: 2 },
      drag: { x: true, y: false, setScale: false, dist: 6 },
      sync: settings.sync && { key: settings.sync, scales: ["x", null], setSeries: false, filters: onlyMoves() },
      bind: { dblclick: () => () => chart.zoom(null, null) },
    },
    hooks: {
      drawAxes: [(u) => drawDots(u, chart.scene, hidden, colourOf)],
      draw: [(u) => drawMarks(u, chart.scene, hidden, colourOf)],
      setCursor: [() => chart.showValues()],
      setSelect: [(u) => select(chart, u)],
    },
  };
}

/** Charts with the same x move their cursors together, but each is zoomed by its own mouse. */
function onlyMoves() {
  const moves = (type) => type === "mousemove" || type === "mouseleave";
  return { pub: moves, sub: moves };
}

function select(chart, u) {
  const { left, width } = u.select;
  if (width < 6) return;
  const from = u.posToVal(left, "x");
  const to = u.posToVal(left + width, "x");
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  chart.zoom(from, to);
}

function xRange(scene, low, high) {
  if (scene.x.from !== null && scene.x.to !== null) return [scene.x.from, scene.x.to];
  if (low === null || !Number.isFinite(low)) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

function yRange(chart, low, high) {
  if (chart.settings.yRange) return chart.settings.yRange;
  const { from, to } = chart.scene.x;
  const [least, greatest] = overlayExtent(chart.scene, chart.hidden, from ?? -Infinity, to ?? Infinity);
  const bottom = Math.min(low ?? Infinity, least);
  const top = Math.max(high ?? -Infinity, greatest);
  if (bottom > top) return [0, 1];
  if (bottom === top) return bottom === 0 ? [0, 1] : [bottom - Math.abs(bottom) / 10, top + Math.abs(top) / 10];
  return uPlot.rangeNum(bottom, top, 0.06, true);
}

export { uPlot };
