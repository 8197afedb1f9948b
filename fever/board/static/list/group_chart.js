// The line below an open group of seeds: the mean of its learning curves and the band around it.

import { ask, onlyLatest } from "../core/api.js";
import { h, throttled } from "../core/dom.js";
import * as format from "../core/format.js";
import { Chart } from "../charts/chart.js";
import { COLUMNS } from "./row.js";

export class GroupChart {
  constructor() {
    this.chart = new Chart({ title: "Mean over the seeds", note: "band: 95 % interval of the mean", height: 200 });
    this.element = h(
      "tr.group-chart",
      { role: "row" },
      h("td", { role: "cell", colspan: COLUMNS.length + 1 }, this.chart.element),
    );
    this.latest = onlyLatest();
    this.soon = throttled(3000, () => this.load());
    this.version = "";
  }

  update(line) {
    this.ids = line.members.map((row) => row.id);
    const version = JSON.stringify(line.members.map((row) => [row.id, row.steps]));
    if (version === this.version) return;
    this.version = version;
    this.goal = line.row.goal;
    this.soon();
  }

  async load() {
    const scene = { x: { label: "steps", format: format.count, from: null, to: null }, curves: [] };
    try {
      const answer = await this.latest((signal) =>
        ask("group", { ids: this.ids, metric: "return_mean", x: "steps", points: 300 }, signal),
      );
      if (!answer) return;
      const { x, mean, low, high } = answer;
      scene.curves.push({ key: "mean", label: `return, mean of ${answer.runs}`, colour: 0, x, y: mean, low, high });
      if (Number.isFinite(this.goal))
        scene.lines = [{ label: `goal ${format.number(this.goal)}`, y: this.goal, colour: "--muted" }];
      scene.empty = "No episode has ended yet.";
    } catch (error) {
      scene.empty = error.message;
    }
    this.chart.draw(scene);
  }

  close() {
    this.latest.cancel();
    this.soon.cancel();
    this.chart.destroy();
    this.element.remove();
  }
}
