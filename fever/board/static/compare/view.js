// Several runs over each other: any metric, with means over seeds, and what their configurations differ in.

import { h, own, setText, theirs, visible } from "../core/dom.js";
import { join, split } from "../core/lists.js";
import { go, link, numberOf } from "../core/route.js";
import { Chart } from "../charts/chart.js";
import { controls } from "../charts/controls.js";
import { smooth } from "../charts/smooth.js";
import { X_AXES } from "../run/scenes.js";
import { CompareData } from "./data.js";
import { RunTable } from "./table.js";

const MOST = 40; // runs in one chart

export class CompareView {
  constructor(root) {
    this.data = new CompareData();
    this.data.addEventListener("change", () => this.write());
    this.table = new RunTable((id) => this.drop(id));
    this.build(root);
    document.title = "Comparison · fever board";
  }

  build(root) {
    this.tools = controls();
    this.metric = h("select", {
      "aria-label": "Metric",
      onchange: () => go({ metric: this.metric.value === "return_mean" ? null : this.metric.value }),
    });
    this.band = h("input", { type: "checkbox", onchange: () => go({ band: this.band.checked ? "1" : null }) });
    this.bandLabel = h(
      "label.inline",
      { title: "runs that differ in nothing but the seed become one curve with the 95 % interval of its mean" },
      this.band,
      "mean over seeds",
    );
    this.message = h("p.error", { hidden: true, role: "alert" });
    this.chart = new Chart({ title: "return_mean", height: 420, onZoom: (from, to) => go({ from, to }) });
    root.append(
      h("p.back", {}, h("a", { href: link("runs") }, "← All runs")),
      h(
        "div.compare-view",
        {},
        h("h1", { tabindex: "-1" }, "Comparison"),
        h("div.tools", {}, this.metric, this.tools.element, this.bandLabel),
        this.message,
        this.chart.element,
        this.table.element,
      ),
    );
  }

  show(query) {
    this.query = query;
    const ids = [...new Set(split(query.get("runs")))];
    const x = Object.hasOwn(X_AXES, query.get("x") ?? "") ? query.get("x") : "steps";
    let [from, to] = [numberOf(query, "from"), numberOf(query, "to")];
    if (from === null || to === null) from = to = null;
    this.asked = { metric: query.get("metric") || "return_mean", x, from, to, band: query.get("band") === "1" };
    this.weight = Math.min(0.999, Math.max(0, numberOf(query, "smooth") ?? 0));
    this.band.checked = this.asked.band;
    this.tools.show({ x, smooth: this.weight });
    this.tooMany = ids.length - MOST;
    this.data.show(ids.slice(0, MOST), this.asked);
    this.write();
  }

  write() {
    this.writeMessage();
    this.writeMetrics();
    this.chart.rename(this.asked.metric);
    const { data, asked } = this;
    this.bandLabel.hidden = data.experiments.size === 0;
    this.tools.zoomed(
      asked.from === null ? "" : data.exact ? "every row of this part" : "thinned: zoom further in for every row",
    );
    const curves = asked.band ? this.grouped() : this.single();
    this.chart.draw({
      x: { ...X_AXES[asked.x], from: asked.from, to: asked.to },
      curves,
      empty: data.infos.size ? "None of these runs has this metric." : "Reading the runs …",
    });
    this.table.write(data, curves, asked.metric);
  }

  /** One curve for each run. Its colour is that of its place in the address, so that it stays when others go. */
  single() {
    const { data, weight } = this;
    return data.ids
      .filter((id) => data.curves.has(id))
      .map((id) => {
        const { x, y } = data.curves.get(id);
        const row = data.infos.get(id)?.row;
        return {
          key: id,
          ids: [id],
          label: row?.name ?? id,
          detail: visible(id, 500),
          colour: data.ids.indexOf(id),
          x,
          y: smooth(y, weight),
          raw: weight ? y : null,
        };
      });
  }

  /** One curve for each experiment with several seeds, and one for each run that has none. */
  grouped() {
    const { data, weight } = this;
    const { experiments } = data;
    const inside = new Set([...experiments.values()].flat());
    const curves = [];
    for (const [experiment, ids] of experiments) {
      const mean = data.means.get(experiment);
      if (!mean?.x.length) continue;
      const kept = mean.x
        .map((_, index) => index)
        .filter(
          (index) => this.asked.from === null || (mean.x[index] >= this.asked.from && mean.x[index] <= this.asked.to),
        );
      const pick = (values) => values && kept.map((index) => values[index]);
      const name = data.infos.get(ids[0]).row.experiment_name || ids[0];
      curves.push({
        key: `mean ${experiment}`,
        ids,
        label: `${name} (${mean.runs} ${mean.runs === 1 ? "seed" : "seeds"})`,
        detail: visible(ids.join("\n"), 2000),
        x: pick(mean.x),
        y: smooth(pick(mean.mean), weight),
        low: pick(mean.low),
        high: pick(mean.high),
        raw: weight ? pick(mean.mean) : null,
      });
    }
    curves.push(...this.single().filter((curve) => !inside.has(curve.key)));
    curves.forEach((curve, index) => (curve.colour = index));
    return curves;
  }

  writeMessage() {
    const { ids, errors } = this.data;
    let text = "";
    if (!ids.length) text = "No runs are chosen: tick some in the list of runs.";
    else if (errors.size) text = [...errors.values()][0];
    else if (this.asked.band && [...this.data.means.values()].some(({ x, runs }) => runs > 1 && x.length === 1))
      text = "Of some runs, one ends before all have begun on this axis: their mean is a point.";
    else if (this.tooMany > 0) text = `The first ${MOST} runs are shown; ${this.tooMany} more are left out.`;
    this.message.hidden = !text;
    if (text) setText(this.message, visible(text, 500));
  }

  writeMetrics() {
    const names = new Set(["return_mean", this.asked.metric]);
    for (const info of this.data.infos.values()) for (const name of info.metrics) names.add(name);
    const sorted = [...names].sort();
    const text = JSON.stringify(sorted);
    if (text !== this.metricsBefore) {
      this.metricsBefore = text;
      this.metric.replaceChildren(...sorted.map((name) => h("option", { value: name }, theirs(name, 80).textContent)));
    }
    this.metric.value = this.asked.metric;
    const units = [...this.data.infos.values()].map((info) => own(info.units, this.asked.metric)).find(Boolean);
    this.metric.title = units ? `${units.meaning ?? ""} ${units.unit ? `(${units.unit})` : ""}`.trim() : "";
  }

  drop(id) {
    go({ runs: join(this.data.ids.filter((each) => each !== id)) });
  }

  key(event) {
    if (event.key !== "Escape" || this.asked.from === null) return false;
    go({ from: null, to: null });
    return true;
  }

  close() {
    this.data.close();
    this.chart.destroy();
  }
}
