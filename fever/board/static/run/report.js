// What `fever scale` found, as sentences and a table. A report may be anybody's: whatever is missing is left out.

import { h, visible } from "../core/dom.js";
import { count, duration, number, percent } from "../core/format.js";

// Parts of the time -> their names, as in the charts of a run.
const PARTS = { environment: "Environment", inference: "Inference", transfer: "Transfer", learner: "Learner" };
const LONGEST = 2000; // characters of a sentence
const list = (value) => (Array.isArray(value) ? value.filter((one) => one && typeof one === "object") : []);
const known = (value, write) => (typeof value === "number" ? write(value) : "–");

function speedup(row) {
  const [low, high] = Array.isArray(row.speedup_interval) ? row.speedup_interval : [];
  const span = typeof low === "number" && typeof high === "number" ? ` (${number(low)} to ${number(high)})` : "";
  return known(row.speedup, number) + span + (row.verdict ? `, ${visible(row.verdict, 40)}` : "");
}

function line(row, predicted, timed) {
  const cells = [
    known(row.samples_per_second, count),
    predicted ? "–" : known(row.updates_per_second, count),
    ...(timed ? [known(row.target_seconds, duration)] : []),
    predicted ? known(row.speedup, number) : speedup(row),
    known(row.efficiency, percent),
    predicted ? "predicted" : known(row.error, percent),
  ];
  const head = h("th", { scope: "row" }, known(row.count, String));
  return h(predicted ? "tr.predicted" : "tr", {}, head, ...cells.map((cell) => h("td", {}, cell)));
}

/** A table that scrolls sideways where it does not fit. */
function table(name, heads, rows) {
  const head = h("tr", {}, ...heads.map((text) => h("th", { scope: "col" }, text)));
  const element = h("table.plain", {}, h("thead", {}, head), h("tbody", {}, ...rows));
  return h("div.scroll", { tabindex: "0", role: "region", "aria-label": name }, element);
}

/** Where the time went, a row for every number that was run; nothing if the algorithm does not say. */
function times(kind, counts) {
  const parts = Object.keys(PARTS).filter((part) => counts.some((row) => typeof row.time?.[part] === "number"));
  if (!parts.length) return [];
  const rows = counts.map((row) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, known(row.count, String)),
      ...parts.map((part) => h("td", {}, known(row.time?.[part], percent))),
    ),
  );
  return [
    h("h3", {}, "Where the time went"),
    table("Where the time went", [kind, ...parts.map((part) => PARTS[part])], rows),
  ];
}

/** How far the model is off, in the report's own words; those of earlier versions have none. */
function trusted(report, counts) {
  const { predictions } = report;
  if (typeof predictions === "string") return [h("p", {}, `Predictions: ${visible(predictions, LONGEST)}`)];
  const errors = counts.map((row) => row.error).filter((error) => typeof error === "number");
  if (!errors.length) return [];
  const off = `The model is at most ${percent(Math.max(...errors.map(Math.abs)))} off for what was run`;
  const held = report.model?.held_out_error;
  const last = counts.at(-1)?.count;
  const words =
    typeof held === "number" ? `; fitted without ${last}, it is ${percent(Math.abs(held))} off for ${last}` : "";
  return [h("p", {}, `${off}${words}.`)];
}

/** The parts of a report, in order. */
export function describeReport(report) {
  const counts = list(report.counts);
  const word = visible(report.kind ?? "count", 40);
  const kind = word.charAt(0).toUpperCase() + word.slice(1);
  const timed = typeof report.target === "number";
  const heads = [kind, "Samples/s", "Updates/s", ...(timed ? [`Time to ${number(report.target)}`] : [])];
  heads.push("Speedup", "Efficiency", "Model is off by");
  const rows = [
    ...counts.map((row) => line(row, false, timed)),
    ...list(report.predicted).map((row) => line(row, true, timed)),
  ];
  const notes = Array.isArray(report.notes) ? report.notes : [];
  const failed = list(report.failed).map((one) => `${one.count}, round ${one.round}: ${one.problem}`);
  return [
    h("p", {}, h("strong", {}, visible(report.answer ?? "", LONGEST))),
    h("p", {}, `Bottleneck: ${visible(report.bottleneck ?? "–", LONGEST)}`),
    table("Speed", heads, rows),
    ...trusted(report, counts),
    ...times(kind, counts),
    h("ul.notes", {}, ...[...notes, ...failed].map((text) => h("li", {}, visible(text, LONGEST)))),
  ];
}
