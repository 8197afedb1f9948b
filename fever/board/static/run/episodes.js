// The tab with single episodes: returns, lengths, and the numbers that the environment itself reported.

import { h } from "../core/dom.js";
import { go, numberOf } from "../core/route.js";
import { Chart } from "../charts/chart.js";
import { X_AXES } from "./scenes.js";

const MOST_INFO = 12; // scalars of the environment that are drawn

export class EpisodesTab {
  constructor(data) {
    this.data = data;
    this.charts = new Map();
    this.place = h("div.chart-grid", {});
    this.note = h("p.muted", {});
    this.element = h("div.episodes", {}, this.note, this.place);
    this.listener = () => this.draw();
    for (const name of ["info", "episodes"]) data.addEventListener(name, this.listener);
  }

  show(query) {
    const from = numberOf(query, "from");
    const to = numberOf(query, "to");
    // Episodes are drawn over steps. A zoom that was made over another axis is not one of theirs.
    const zoomed = (query.get("x") ?? "steps") === "steps" && from !== null && to !== null;
    this.window = { x: "steps", from: zoomed ? from : null, to: zoomed ? to : null };
    this.draw();
  }

  get infoNames() {
    return (this.data.info?.info_names ?? []).slice(0, MOST_INFO);
  }

  draw() {
    const { data } = this;
    if (!data.info || !this.window) return;
    data.want({ names: [], episodes: true, infoNames: this.infoNames, window: this.window });
    const { episodes } = data;
    if (!episodes) return;
    this.chart("return", "Return").draw(this.scene("return", episodes.return, 0));
    this.chart("length", "Length in steps").draw(this.scene("length", episodes.length, 2));
    for (const name of this.infoNames) {
      const values = Object.hasOwn(episodes.info, name) ? episodes.info[name] : [];
      this.chart(`info ${name}`, `info/${name}`).draw(this.scene(name, values, 3));
    }
    const more = data.info.info_names.length - MOST_INFO;
    this.note.textContent =
      more > 0 ? `${more} more scalars are under “Other metrics” of the curves, as info/NAME.` : "";
  }

  scene(name, values, colour) {
    const dots = [{ key: name, label: name, shape: "dot", colour, x: this.data.episodes.steps, y: values }];
    return {
      x: { ...X_AXES.steps, from: this.window.from, to: this.window.to },
      curves: [],
      dots,
      empty: "No episode has ended yet.",
    };
  }

  chart(key, title) {
    if (!this.charts.has(key)) {
      const chart = new Chart({ title, height: 220, onZoom: (from, to) => go({ from, to, x: null }) });
      this.charts.set(key, chart);
      this.place.append(chart.element);
    }
    return this.charts.get(key);
  }

  key(event) {
    if (event.key !== "Escape" || this.window?.from === null) return false;
    go({ from: null, to: null });
    return true;
  }

  close() {
    for (const name of ["info", "episodes"]) this.data.removeEventListener(name, this.listener);
    for (const chart of this.charts.values()) chart.destroy();
  }
}
