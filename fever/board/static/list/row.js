// One line of the table of runs. It is built once; later only the cells that changed are written.

import { h, setAttribute, setText, svg, theirs, visible } from "../core/dom.js";
import * as format from "../core/format.js";
import { link } from "../core/route.js";
import { badge, stateIcon, STATES } from "../core/state.js";
import { meanOf } from "./arrange.js";
import { Sparkline } from "./sparkline.js";

/** Columns of the table: name of its sort, heading, class. Phones show each row as a card and these as labels. */
export const COLUMNS = [
  ["name", "Name"],
  ["state", "State"],
  ["env", "Environment"],
  ["algo", "Algorithm"],
  ["seed", "Seed"],
  [null, "Curve"],
  ["return", "Return"],
  ["steps", "Steps"],
  ["speed", "Steps/s"],
  ["time", "Time"],
  ["updated", "Updated"],
];

const KIND_WORDS = { search: ["trial", "trials"], scaling: ["run", "runs"] };

function cell(name, label, ...children) {
  return h(`td.${name}`, { role: "cell", "data-label": label }, ...children);
}

/**
 * A row. `actions` has choose(line, on), open(line) and fold(line). `element` is the <tr>, `update(line, chosen)`
 * writes it, `main` is its link or button.
 */
export class Row {
  constructor(line, actions) {
    this.line = line;
    this.actions = actions;
    this.before = {};
    this.box = h("input", { type: "checkbox", onchange: () => actions.choose(this.line, this.box.checked) });
    this.badge = badge();
    this.states = h("span.states", {});
    this.time = format.moment(null);
    this.spark = new Sparkline();
    this.main =
      line.kind === "group"
        ? h("button.fold.name-button", { type: "button", onclick: () => actions.fold(this.line) })
        : h("a.name-link", {});
    this.fold =
      line.kind === "parent"
        ? h("button.fold.quiet", { type: "button", onclick: () => actions.fold(this.line) })
        : null;
    this.note = h("span.row-note.muted", {});
    const cells = COLUMNS.map(([name, label]) => [label, cell(`c-${name ?? "curve"}`, label)]);
    this.cells = Object.fromEntries(cells);
    this.cells.Name.append(h("div.name-box", {}, this.fold ?? "", this.main, this.note));
    this.cells.State.append(line.kind === "group" ? this.states : this.badge.element);
    this.cells.Curve.append(this.spark.element);
    this.cells.Updated.append(this.time);
    this.element = h(
      `tr.row.${line.kind}`,
      { role: "row", onclick: (event) => this.click(event) },
      h("td.c-choose", { role: "cell" }, h("label.choose", {}, this.box)),
      ...cells.map(([, element]) => element),
    );
  }

  click(event) {
    if (event.target.closest("a, button, input, label") || getSelection().toString()) return;
    if (this.line.kind === "group") this.actions.fold(this.line);
    else location.hash = this.main.hash;
  }

  update(line, chosen) {
    this.line = line;
    const { row, members } = line;
    const group = line.kind === "group";
    this.element.classList.toggle("inner", line.depth > 0);
    this.element.classList.toggle("chosen", chosen);
    this.box.checked = chosen;
    const title = group ? row.experiment_name || row.name : row.name;
    this.once("title", title, () => this.writeTitle(title));
    this.box.disabled = line.kind === "parent" && !members.length;
    if (!group) this.badge.update(row);
    else this.once("states", JSON.stringify(members.map((each) => each.state)), () => this.writeStates(members));
    this.writeNote(line);
    const rows = group ? members : [row];
    this.once("env", row.env, () =>
      this.cells.Environment.replaceChildren(row.env === null ? "–" : theirs(row.env, 80)),
    );
    this.once("algo", row.algo, () =>
      this.cells.Algorithm.replaceChildren(row.algo === null ? "–" : theirs(row.algo, 60)),
    );
    setText(this.cells.Seed, group ? seedsOf(members) : row.seed === null ? "–" : String(row.seed).slice(0, 24));
    this.writeReturn(line, rows);
    setText(this.cells.Steps, format.count(meanOf(rows, (each) => each.steps)));
    setAttribute(
      this.cells.Steps,
      "title",
      group ? "mean over the seeds" : row.steps === null ? null : `${row.steps.toLocaleString("en")} steps`,
    );
    setText(this.cells["Steps/s"], format.count(meanOf(rows, (each) => each.steps_per_second)));
    setText(this.cells.Time, format.duration(meanOf(rows, (each) => each.seconds)));
    const updated = Math.max(...rows.map((each) => each.updated ?? each.began ?? -Infinity));
    format.setMoment(this.time, Number.isFinite(updated) ? updated : null);
    for (const button of [group ? this.main : this.fold])
      if (button) setAttribute(button, "aria-expanded", String(line.open));
    this.spark.update(line);
  }

  once(name, value, write) {
    if (this.before[name] === value && name in this.before) return;
    this.before[name] = value;
    write();
  }

  writeTitle(title) {
    const { line } = this;
    this.main.replaceChildren(...(line.kind === "group" ? [chevron()] : []), theirs(title, 160));
    if (line.kind !== "group") this.main.setAttribute("href", link("run", line.row.id));
    if (this.fold) {
      this.fold.replaceChildren(chevron());
      this.fold.setAttribute("aria-label", `Show what belongs to ${visible(title, 80)}`);
    }
    this.main.title = visible(title, 500);
    this.box.setAttribute("aria-label", `Choose ${visible(title, 80)} for a comparison`);
  }

  writeNote(line) {
    const { row, members } = line;
    let note = "";
    if (line.kind === "parent") {
      const [one, many] = KIND_WORDS[row.kind] ?? ["run", "runs"];
      note = `${row.kind}, ${members.length} ${members.length === 1 ? one : many}`;
    } else if (line.kind === "run" && row.reason !== null && ["damaged", "failed"].includes(row.state)) {
      note = row.reason;
    }
    if (this.before.note !== note) {
      this.before.note = note;
      this.note.replaceChildren(note ? theirs(note, 200) : "");
      this.note.title = visible(note, 1000);
    }
  }

  writeStates(members) {
    const counts = STATES.map((state) => [state, members.filter((row) => row.state === state).length]).filter(
      ([, count]) => count,
    );
    this.states.replaceChildren(
      ...counts.map(([state, count]) =>
        h(
          "span.badge",
          { "data-state": state },
          stateIcon(state),
          h("span", {}, `${count === members.length ? "" : `${count} `}${state}`),
        ),
      ),
    );
  }

  writeReturn(line, rows) {
    const text = format.number(meanOf(rows, (row) => row.return));
    setText(this.cells.Return, text);
    const { row } = line;
    let title =
      line.kind === "group"
        ? "mean over the seeds"
        : row.evaluation === null
          ? null
          : `last evaluation: ${format.number(row.evaluation)}`;
    if (row.goal !== null && row.goal !== undefined)
      title = `${title ? `${title}; ` : ""}goal: ${format.number(row.goal)}`;
    setAttribute(this.cells.Return, "title", title);
  }
}

/** How many seeds there are; runs that repeat one make them runs. */
function seedsOf(rows) {
  const seeds = new Set(rows.map((row) => row.seed)).size;
  return `${rows.length} ${seeds === rows.length ? "seeds" : "runs"}`;
}

function chevron() {
  return svg(
    "svg",
    { viewBox: "0 0 16 16", class: "icon chevron", "aria-hidden": "true" },
    svg("path", { d: "M6 3.5 L10.5 8 L6 12.5" }),
  );
}
