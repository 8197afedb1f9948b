// Below the chart: the compared runs, and the settings in which they differ.

import { h, theirs, visible } from "../core/dom.js";
import { count, number } from "../core/format.js";
import { link } from "../core/route.js";
import { badge } from "../core/state.js";
import { lastOf } from "../charts/smooth.js";

// They differ without making the runs different.
const OWN_TO_A_RUN = new Set(["name", "runs", "seed"]);

/** The name of a setting: `stop.steps` is another one than the algorithm's `steps`. */
const nameOf = ({ group, name }) => (group === "stop" ? `stop.${name}` : name);

/** Names of settings whose values differ between runs, in the order of the configuration. */
function differing(infos) {
  const values = new Map(); // name -> the set of its values
  for (const info of infos) {
    for (const item of info.config) {
      const name = nameOf(item);
      if (OWN_TO_A_RUN.has(name)) continue;
      if (!values.has(name)) values.set(name, { kinds: new Set(), runs: 0, changed: false });
      const known = values.get(name);
      known.kinds.add(item.value);
      known.runs += 1;
      known.changed ||= item.changed;
    }
  }
  // Of settings that only some of the algorithms have, those that somebody has changed.
  const differs = ({ kinds, runs, changed }) => (runs === infos.length ? kinds.size > 1 : changed);
  return [...values].filter(([, known]) => differs(known)).map(([name]) => name);
}

export class RunTable {
  constructor(onDrop) {
    this.onDrop = onDrop;
    this.element = h("section.panel.scroll.compare-runs", { tabindex: "0", "aria-label": "The compared runs" });
  }

  write(data, curves, metric) {
    const known = data.ids.filter((id) => data.infos.has(id)).map((id) => [id, data.infos.get(id)]);
    const lines = known.map(([id, info]) => [id, info, number(lastOf(data.curves.get(id)?.y))]);
    const text = JSON.stringify([
      metric,
      lines.map(([id, info, last]) => [id, last, info.row.state, info.row.steps]),
      curves.map((curve) => [curve.key, curve.colour]),
    ]);
    if (text === this.before) return;
    this.before = text;
    this.element.hidden = !lines.length;
    const names = differing([...data.infos.values()]);
    const heads = ["Run", "State", `Last ${visible(metric, 40)}`, "Steps", "Seed"];
    const head = h(
      "tr",
      {},
      h("td", {}),
      ...heads.map((name) => h("th", { scope: "col" }, name)),
      ...names.map((name) => h("th", { scope: "col" }, theirs(name, 60))),
    );
    const focused = this.element.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    this.element.replaceChildren(
      h("h2", {}, names.length ? "Runs, and the settings in which they differ" : "Runs"),
      h(
        "table.plain",
        {},
        h("thead", {}, head),
        h("tbody", {}, ...lines.map((line) => this.line(...line, names, curves))),
      ),
    );
    if (focused)
      [...this.element.querySelectorAll("[data-id]")].find((element) => element.dataset.id === focused)?.focus();
  }

  line(id, info, last, names, curves) {
    const { row } = info;
    const mark = badge();
    mark.update(row);
    const curve = curves.find((each) => each.ids.includes(id));
    const swatch = h("span.swatch", { "data-colour": curve ? curve.colour % 8 : null, "aria-hidden": "true" });
    const values = names.map((name) => info.config.find((item) => nameOf(item) === name)?.value);
    return h(
      "tr",
      {},
      h(
        "td",
        {},
        h(
          "button.quiet.remove",
          {
            type: "button",
            "aria-label": `Remove ${visible(row.name, 80)}`,
            title: "Remove from the comparison",
            "data-id": id,
            onclick: () => this.onDrop(id),
          },
          "×",
        ),
      ),
      h(
        "th",
        { scope: "row" },
        swatch,
        " ",
        h("a", { href: link("run", id), title: visible(id, 500), "data-id": `open ${id}` }, theirs(row.name, 80)),
      ),
      h("td", {}, mark.element),
      h("td", {}, last),
      h("td", {}, count(row.steps)),
      h("td", {}, row.seed === null ? "–" : String(row.seed)),
      ...values.map((value) => h("td", {}, value === undefined ? "–" : theirs(value, 60))),
    );
  }
}
