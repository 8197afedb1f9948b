// The tab with the workers: a tile for each, by host, and who is silent.

import { h, setAttribute, setText, theirs } from "../core/dom.js";
import { count, duration, percent } from "../core/format.js";
import { stateIcon } from "../core/state.js";

const ICONS = { alive: "running", silent: "damaged", ended: "done" };

/** One worker. */
class Tile {
  constructor(worker) {
    this.state = h("span.tile-state", {});
    this.speed = h("strong", {});
    this.lines = h("dl", {});
    this.values = {};
    for (const name of ["last report", "weights' age", "restarts", "episodes"]) {
      this.values[name] = h("dd", {});
      this.lines.append(h("div", {}, h("dt", {}, name), this.values[name]));
    }
    this.shares = h("div.tile-shares", { role: "img" }, h("span.env", {}), h("span.inference", {}));
    this.element = h(
      "li.tile",
      {},
      h("div.tile-head", {}, h("span.tile-name", {}, `worker ${Number(worker.worker)}`), this.state),
      h("p.tile-speed", {}, this.speed, h("span.muted", {}, " steps/s")),
      this.shares,
      this.lines,
    );
  }

  update(worker) {
    const state = Object.hasOwn(ICONS, worker.state) ? worker.state : "silent";
    if (this.element.dataset.worker !== state) {
      this.element.dataset.worker = state;
      this.state.replaceChildren(stateIcon(ICONS[state]), state);
    }
    setText(this.speed, count(worker.steps_per_second));
    const when = state === "ended" ? "before its end" : "ago";
    setText(this.values["last report"], worker.age === null ? "–" : `${duration(worker.age)} ${when}`);
    setText(
      this.values["weights' age"],
      worker.weights_age === null
        ? "–"
        : `${count(worker.weights_age)} ${worker.weights_age === 1 ? "update" : "updates"}`,
    );
    setText(this.values.restarts, count(worker.restarts));
    setText(this.values.episodes, count(worker.episodes));
    const { time_env: env, time_inference: inference } = worker;
    this.shares.hidden = !Number.isFinite(env);
    if (this.shares.hidden) return;
    this.shares.children[0].style.width = `${100 * Math.min(1, env)}%`;
    this.shares.children[1].style.width = `${100 * Math.min(1, inference ?? 0)}%`;
    const text = `environment ${percent(env)}, inference ${percent(inference)} of its time`;
    setAttribute(this.shares, "aria-label", text);
    setAttribute(this.shares, "title", text);
  }
}

export class WorkersTab {
  constructor(data) {
    this.data = data;
    this.tiles = new Map(); // worker -> Tile
    this.hosts = new Map(); // host -> {element, list, note}
    this.summary = h("p.muted", { role: "status" });
    this.place = h("div.hosts", {});
    this.empty = h(
      "p.empty",
      { hidden: true },
      "No worker has reported yet. A run without workers samples in its learner's process.",
    );
    this.legend = h(
      "p.tile-key.muted",
      {},
      h("span", {}, "shares of a worker's time:"),
      h("span.tile-key", {}, h("span.swatch.area.env", {}), "environment"),
      h("span.tile-key", {}, h("span.swatch.area.inference", {}), "inference"),
    );
    this.element = h("div.workers", {}, this.summary, this.place, this.legend, this.empty);
    this.listener = () => this.write();
    data.addEventListener("workers", this.listener);
    data.loadWorkers();
  }

  show() {
    this.write();
  }

  write() {
    const known = this.data.workers;
    if (!known) return;
    const { workers } = known;
    this.empty.hidden = workers.length > 0 || known.written === undefined;
    this.legend.hidden = !workers.length;
    const alive = workers.filter((worker) => worker.state === "alive").length;
    const silent = workers.filter((worker) => worker.state === "silent").length;
    const hosts = Object.keys(known.hosts).length;
    const words = [`${alive} of ${workers.length} workers alive`, `on ${hosts} ${hosts === 1 ? "host" : "hosts"}`];
    if (silent) words.splice(1, 0, `${silent} silent`);
    setText(this.summary, workers.length ? words.join(", ") : "");
    const used = new Set();
    for (const worker of workers) {
      if (!this.tiles.has(worker.worker)) this.tiles.set(worker.worker, new Tile(worker));
      const tile = this.tiles.get(worker.worker);
      tile.update(worker);
      used.add(worker.worker);
      const host = this.hostOf(String(worker.host ?? "this machine"));
      if (tile.element.parentElement !== host.list) host.list.append(tile.element);
    }
    for (const [number, tile] of this.tiles) {
      if (used.has(number)) continue;
      tile.element.remove();
      this.tiles.delete(number);
    }
    for (const [name, host] of this.hosts) this.writeHost(name, host, workers);
  }

  writeHost(name, host, workers) {
    const mine = workers.filter((worker) => String(worker.host ?? "this machine") === name);
    host.element.hidden = !mine.length;
    const speeds = mine.map((worker) => worker.steps_per_second).filter(Number.isFinite);
    const speed = speeds.length ? `, ${count(speeds.reduce((sum, each) => sum + each, 0))} steps/s` : "";
    setText(host.note, `${mine.length} ${mine.length === 1 ? "worker" : "workers"}${speed}`);
  }

  hostOf(name) {
    if (!this.hosts.has(name)) {
      const list = h("ul.tiles", {});
      const note = h("span.muted", {});
      const element = h("section.host", {}, h("h2", {}, theirs(name, 100), " ", note), list);
      this.hosts.set(name, { element, list, note });
      this.place.append(element);
    }
    return this.hosts.get(name);
  }

  close() {
    this.data.removeEventListener("workers", this.listener);
  }
}
