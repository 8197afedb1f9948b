// The tab with the curves of a run.

import { h, own, theirs } from "../core/dom.js";
import { number, percent } from "../core/format.js";
import { go, numberOf } from "../core/route.js";
import { Chart } from "../charts/chart.js";
import { join, split } from "../core/lists.js";
import { controls } from "../charts/controls.js";
import { LEARNING, learning, overlaps, REPLAY, single, stack, TIMES, X_AXES } from "./scenes.js";

// What is drawn at first, as far as the algorithm has it.
const FIRST_PICKS = ["entropy", "explained_variance", "loss", "value_mean", "kl"];
const PICKS_AT_FIRST = 3;
const SHARES = new Set(["buffer_fill", "epsilon"]);

export class CurvesTab {
  constructor(data) {
    this.data = data;
    this.charts = new Map(); // name -> Chart
    this.build();
    const draw = () => this.draw();
    this.listeners = { info: draw, series: draw, episodes: draw };
    for (const [name, listener] of Object.entries(this.listeners)) data.addEventListener(name, listener);
  }

  build() {
    this.tools = controls();
    this.speed = h("div.chart-grid", {});
    this.replayTitle = h("h2", { hidden: true }, "Replay");
    this.replay = h("div.chart-grid.small", {});
    this.select = h("select", { "aria-label": "Draw another metric", onchange: () => this.pick(this.select.value) });
    this.otherHead = h("div.section-head", {}, h("h2", {}, "Other metrics"), this.select);
    this.others = h("div.chart-grid", {});
    this.main = h("div", {});
    this.empty = h("p.empty", { hidden: true }, "No iteration has ended yet.");
    this.element = h(
      "div.curves",
      {},
      h("div.tools", {}, this.tools.element),
      this.empty,
      this.main,
      this.speed,
      this.replayTitle,
      this.replay,
      this.otherHead,
      this.others,
    );
  }

  show(query) {
    this.query = query;
    const x = Object.hasOwn(X_AXES, query.get("x") ?? "") ? query.get("x") : "steps";
    this.weight = Math.min(0.999, Math.max(0, numberOf(query, "smooth") ?? 0));
    this.window = { x, from: numberOf(query, "from"), to: numberOf(query, "to") };
    if (this.window.from === null || this.window.to === null) this.window.from = this.window.to = null;
    this.tools.show({ x, smooth: this.weight });
    this.fetch();
    this.draw();
  }

  fetch() {
    if (!this.data.info) return; // it says which metrics there are
    const names = [...LEARNING, "steps_per_second", ...TIMES, ...REPLAY, ...this.picks()];
    this.data.want({ names: names.filter((name) => this.data.has(name)), episodes: true, window: this.window });
  }

  /** Names of the other metrics that are drawn: those of the address, or some that the algorithm has. */
  picks() {
    const chosen = this.query.get("metrics");
    if (chosen !== undefined) return chosen === "none" ? [] : split(chosen);
    return FIRST_PICKS.filter((name) => this.data.has(name)).slice(0, PICKS_AT_FIRST);
  }

  pick(name) {
    if (name) go({ metrics: join([...this.picks(), name]) });
  }

  drop(name) {
    go({ metrics: join(this.picks().filter((each) => each !== name)) || "none" });
    this.select.focus();
  }

  draw() {
    if (!this.query || !this.data.info) return;
    this.empty.hidden = this.data.info.metrics.length > 0;
    this.tools.element.hidden = this.otherHead.hidden = !this.empty.hidden;
    if (!this.empty.hidden) return;
    this.fetch(); // a metric may just have appeared
    const { data, weight } = this;
    this.tools.zoomed(
      this.window.from !== null && data.exact !== null
        ? data.exact
          ? "every row of this part"
          : `${data.x.length} rows, evenly spread: zoom in for all of them`
        : "",
    );
    this.chart("learning", this.main, { title: "Learning curve", height: 320 }).draw(learning(data, weight));
    const speed = this.chart("steps_per_second", this.speed, {
      title: "Throughput",
      note: "environment steps per second",
      height: 210,
    });
    speed.draw(single(data, "steps_per_second", weight));
    this.drawTimes();
    const replay = REPLAY.filter((name) => data.has(name));
    this.replayTitle.hidden = !replay.length;
    for (const name of replay) {
      const share = SHARES.has(name) ? { format: percent, formatAxis: percent } : {};
      this.chart(name, this.replay, { title: name, note: this.unit(name), height: 150, ...share }).draw(
        single(data, name, weight),
      );
    }
    this.drawPicks();
  }

  drawTimes() {
    const { data } = this;
    if (!data.has("time_env") && !data.has("time_learn")) return;
    const apart = overlaps(data);
    const sets = apart
      ? [
          ["workers", "Where workers' time goes", TIMES.slice(0, 2)],
          ["learner", "Where the learner's time goes", TIMES.slice(2)],
        ]
      : [["times", "Where the time goes", TIMES]];
    for (const key of ["times", "workers", "learner"]) if (!sets.some((set) => set[0] === key)) this.forget(key);
    for (const [key, title, names] of sets) {
      const note = apart ? "share of wall time; workers and learner work at the same time" : "share of wall time";
      const chart = this.chart(key, this.speed, {
        title,
        note,
        height: 210,
        yRange: [0, 1],
        format: percent,
        formatAxis: percent,
      });
      chart.draw(stack(data, names));
    }
  }

  drawPicks() {
    const { data } = this;
    const picks = this.picks();
    for (const [name, chart] of this.charts) {
      if (name.startsWith("pick ") && !picks.includes(name.slice(5))) {
        chart.destroy();
        this.charts.delete(name);
      }
    }
    picks.forEach((name, index) => {
      const remove = () =>
        h(
          "button.quiet",
          { type: "button", "aria-label": `Remove the chart of ${name.slice(0, 80)}`, onclick: () => this.drop(name) },
          "Remove",
        );
      const chart = this.chart(`pick ${name}`, this.others, () => ({
        title: name,
        note: this.unit(name),
        height: 190,
        controls: [remove()],
      }));
      chart.draw(single(data, name, this.weight, index % 8));
    });
    const names = data.info.metrics.filter((name) => !picks.includes(name)).sort();
    const text = JSON.stringify(names);
    if (text === this.namesBefore) return;
    this.namesBefore = text;
    this.select.replaceChildren(
      h("option", { value: "" }, "Draw a metric …"),
      ...names.map((name) => h("option", { value: name }, theirs(name, 80).textContent)),
    );
  }

  /** Unit and meaning of a metric, as far as they are documented. */
  unit(name) {
    const known = own(this.data.info.units, name);
    return known ? [known.meaning, known.unit && `(${known.unit})`].filter(Boolean).join(" ").slice(0, 160) : "";
  }

  chart(key, place, settings) {
    if (!this.charts.has(key)) {
      const given = typeof settings === "function" ? settings() : settings;
      const chart = new Chart({
        format: number,
        sync: `run ${this.data.id}`,
        onZoom: (from, to) => go({ from, to }),
        ...given,
      });
      this.charts.set(key, chart);
      place.append(chart.element);
    }
    return this.charts.get(key);
  }

  forget(key) {
    this.charts.get(key)?.destroy();
    this.charts.delete(key);
  }

  /** Keys of this tab; true if the key was used. */
  key(event) {
    if (event.key !== "Escape" || this.window?.from === null) return false;
    go({ from: null, to: null });
    return true;
  }

  close() {
    for (const [name, listener] of Object.entries(this.listeners)) this.data.removeEventListener(name, listener);
    for (const chart of this.charts.values()) chart.destroy();
  }
}
