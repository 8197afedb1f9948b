// From the rows of the server to the lines of the table: what is found, in which order, and what is folded into what.

import { statesOf } from "../core/state.js";

/**
 * Columns that sort: name -> the value of a row, and whether its first click shows the largest first.
 * Lines of groups are sorted by their members' mean.
 */
export const SORTS = {
  state: [(row) => row.state, false],
  name: [(row) => row.name, false],
  env: [(row) => row.env, false],
  algo: [(row) => row.algo, false],
  seed: [(row) => row.seed, false],
  return: [(row) => row.return, true],
  steps: [(row) => row.steps, true],
  speed: [(row) => row.steps_per_second, true],
  time: [(row) => row.seconds, true],
  began: [(row) => row.began, true],
  updated: [(row) => row.updated, true],
};

/** Whether a row has one of the states asked for, and all words of the search; words may be in any of its texts. */
export function isFound(row, { q, states }) {
  if (states.size && !statesOf(row).some((state) => states.has(state))) return false;
  const words = q.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return true;
  const text = [
    row.id,
    row.name,
    row.env,
    row.algo,
    row.state,
    row.reason,
    row.host,
    row.experiment_name,
    row.kind,
    `seed=${row.seed}`,
  ]
    .filter((part) => part !== null && part !== undefined)
    .join("\n")
    .toLowerCase();
  return words.every((word) => text.includes(word));
}

/** The mean of what rows have of a value; null if none has. */
export function meanOf(rows, valueOf) {
  const values = rows.map(valueOf).filter((value) => Number.isFinite(value));
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function compare(a, b) {
  if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1; // what is missing comes last
  if (b === null || b === undefined) return -1;
  return typeof a === "number" && typeof b === "number"
    ? a - b
    : String(a).localeCompare(String(b), undefined, { numeric: true });
}

/**
 * Lines of the table: [{key, kind: "run" | "group" | "parent", row, members, depth, open}].
 * view: {q, states (a Set), sort, descending, open (a Set of keys)}.
 */
export function arrange(rows, view) {
  const found = rows.filter((row) => isFound(row, view));
  const byId = new Map(rows.map((row) => [row.id, row]));
  const children = new Map(); // id of a search -> its rows that were found
  const seeds = new Map(); // experiment -> its rows
  const entries = [];
  const parents = new Set();
  for (const row of found) {
    if (row.parent !== null && byId.has(row.parent)) {
      if (!children.has(row.parent)) children.set(row.parent, []);
      children.get(row.parent).push(row);
      parents.add(row.parent);
    } else if (row.kind === "run" && row.experiment !== null) {
      if (!seeds.has(row.experiment)) {
        seeds.set(row.experiment, []);
        entries.push({ experiment: row.experiment });
      }
      seeds.get(row.experiment).push(row);
    } else {
      parents.add(row.id);
    }
  }
  // A search is shown if it is found itself, or one of its trials.
  for (const id of parents) entries.push({ id });
  const tops = entries.map((entry) => {
    if (entry.id !== undefined) {
      const row = byId.get(entry.id);
      return line(
        row.kind === "run" || row.kind === "trial" ? "run" : "parent",
        row,
        children.get(row.id) ?? [],
        row.id,
      );
    }
    const members = seeds.get(entry.experiment);
    return members.length === 1
      ? line("run", members[0], [], members[0].id)
      : line("group", members[0], members, `group ${entry.experiment}`);
  });
  const sorted = sort(tops, rows, view);
  return sorted.flatMap((top) => {
    top.open = view.open.has(top.key);
    if (!top.open || !top.members.length) return [top];
    const inner = top.members.map((row) => line("run", row, [], row.id, 1));
    return [
      top,
      ...sort(inner, rows, top.kind === "group" && view.sort === "began" ? { sort: "seed", descending: false } : view),
    ];
  });
}

function line(kind, row, members, key, depth = 0) {
  return { kind, row, members, key, depth, open: false };
}

function sort(lines, rows, view) {
  const place = new Map(rows.map((row, index) => [row.id, index])); // newest first: settles what is otherwise equal
  const [valueOf] = SORTS[view.sort] ?? SORTS.began;
  const value = (each) => {
    if (each.kind !== "group") return valueOf(each.row);
    if (view.sort === "began" || view.sort === "updated")
      return Math.max(...each.members.map((row) => valueOf(row) ?? 0));
    return typeof valueOf(each.row) === "number" ? meanOf(each.members, valueOf) : valueOf(each.row);
  };
  const keyed = lines.map((each) => ({ each, value: value(each), place: place.get(each.row.id) }));
  keyed.sort((a, b) => {
    const missing = (a.value ?? null) === null || (b.value ?? null) === null;
    return compare(a.value, b.value) * (view.descending && !missing ? -1 : 1) || a.place - b.place;
  });
  return keyed.map(({ each }) => each);
}
