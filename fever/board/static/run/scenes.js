// What the charts of one run show, from its data. A scene is described in charts/chart.js.

import { count, duration, number, shortDuration } from "../core/format.js";
import { lastOf, smooth } from "../charts/smooth.js";

const SECONDS = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 432000, 864000];

/** How each x axis is named and written; `steps` are the distances between its ticks, where multiples of ten are odd. */
export const X_AXES = {
  steps: { label: "steps", format: count },
  seconds: { label: "training time", format: duration, tick: shortDuration, steps: SECONDS },
  episodes: { label: "episodes", format: count },
};

/** Names of metrics that the curves always need. */
export const LEARNING = ["return_mean", "return_min", "return_max"];
export const TIMES = ["time_env", "time_inference", "time_transfer", "time_learn"];
export const REPLAY = [
  "buffer_fill",
  "replay_ratio",
  "updates_per_second",
  "transitions_lost",
  "priority_mean",
  "weights_age",
  "epsilon",
];

const TIME_LABELS = {
  time_env: "environment",
  time_inference: "inference",
  time_transfer: "transfer",
  time_learn: "learning",
};
const TIME_COLOURS = { time_env: 2, time_inference: 6, time_transfer: 4, time_learn: 5 };

function axis(data) {
  const { x, from, to } = data.window;
  return { ...X_AXES[x], from, to };
}

/** A metric as a curve, smoothed if `weight` is not 0. */
function curve(data, name, label, colour, weight) {
  const values = data.column(name);
  return { key: name, label, colour, x: data.x, y: smooth(values, weight), raw: weight ? values : null };
}

/** The learning curve: mean return with its spread, episodes, evaluations and the goal. */
export function learning(data, weight) {
  const main = {
    ...curve(data, "return_mean", "mean return", 0, weight),
    detail: "mean return of the last episodes; the band goes from the lowest to the highest of them",
  };
  if (data.has("return_min"))
    Object.assign(main, { low: data.column("return_min"), high: data.column("return_max"), fill: 0.13 });
  const scene = {
    x: axis(data),
    curves: [main],
    dots: [],
    whiskers: [],
    lines: [],
    empty: "No episode has ended yet.",
  };
  const { episodes, info } = data;
  if (episodes?.steps.length && data.x.length) {
    scene.dots.push({
      key: "episodes",
      label: "episodes",
      shape: "dot",
      colour: 7,
      summary: "",
      x: data.xOfSteps(episodes.steps),
      y: episodes.return,
      detail: "the return of single episodes",
    });
  }
  const evaluations = info?.evaluations;
  if (evaluations?.steps.length) {
    const places = evaluations[data.window.x] ?? [];
    const kept = evaluations.steps
      .map((_, index) => index)
      .filter((index) => Number.isFinite(places[index]) && data.isShown(places[index]));
    const pick = (values) => kept.map((index) => values[index]);
    scene.whiskers.push({
      key: "evaluations",
      label: "evaluations",
      shape: "dot",
      colour: 1,
      detail: "mean of an evaluation, with its 95 % interval",
      x: pick(places),
      y: pick(evaluations.mean),
      low: pick(evaluations.low),
      high: pick(evaluations.high),
    });
  }
  const goal = info?.row.goal;
  if (Number.isFinite(goal)) scene.lines.push({ label: `goal ${number(goal)}`, y: goal, colour: "--muted" });
  return scene;
}

/** One metric. */
export function single(data, name, weight, colour = 0) {
  return { x: axis(data), curves: [curve(data, name, name, colour, weight)] };
}

/** Shares of time as a stack of areas: every curve stands on the one before. */
export function stack(data, names) {
  const length = data.x.length;
  let floor = new Array(length).fill(0);
  const curves = [];
  for (const name of names) {
    const values = data.column(name);
    const base = floor;
    const top = values.map((value, index) => (value === null ? null : base[index] + value));
    floor = top.map((value, index) => value ?? base[index]);
    curves.push({
      key: name,
      label: TIME_LABELS[name],
      colour: TIME_COLOURS[name],
      shape: "area",
      x: data.x,
      y: top,
      values,
      low: base,
      high: top,
      fill: 0.55,
      width: 1,
    });
  }
  return { x: axis(data), curves };
}

/**
 * Whether workers and learner work at the same time: all four shares together are then more than the wall time.
 * A little more than 1 is rounding.
 */
export function overlaps(data) {
  const columns = TIMES.map((name) => data.column(name));
  return data.x.some((_, index) => columns.reduce((sum, values) => sum + (values[index] ?? 0), 0) > 1.02);
}

/** The last value of a metric. */
export function latest(data, name) {
  return lastOf(data.column(name));
}
