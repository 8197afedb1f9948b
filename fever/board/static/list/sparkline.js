// Small learning curves in the list. They are fetched for rows that are on the screen only, two at a time.

import { ask } from "../core/api.js";
import { svg } from "../core/dom.js";
import { extent } from "../charts/smooth.js";

const WIDTH = 96;
const HEIGHT = 24;
const POINTS = 48;
const PAUSE = 10; // seconds until the curve of a run that trains is fetched again
const AT_ONCE = 2;

const known = new Map(); // key of a line -> {version, fetched, x, y}
const queue = new Set();
let busy = 0;

const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const sparkline = owners.get(entry.target);
      sparkline.onScreen = entry.isIntersecting;
      sparkline.look();
    }
  },
  { rootMargin: "100px" },
);
const owners = new WeakMap();

/** The curve of one line of the table. It is decoration: screen readers have the numbers beside it. */
export class Sparkline {
  constructor() {
    this.path = svg("path", {});
    this.element = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" }, this.path);
    this.onScreen = false;
    owners.set(this.element, this);
    seen.observe(this.element);
  }

  update(line) {
    const rows = line.kind === "group" ? line.members : [line.row];
    this.key = line.key;
    this.ids = rows
      .filter((row) => row.iteration && row.state !== "damaged")
      .map((row) => row.id)
      .slice(0, 20);
    this.version = JSON.stringify(rows.map((row) => row.steps));
    this.look();
  }

  look() {
    if (!this.onScreen || !this.ids?.length) return;
    const have = known.get(this.key);
    if (have) this.draw(have);
    if (have?.version === this.version || performance.now() / 1000 - (have?.fetched ?? -Infinity) < PAUSE) return;
    queue.add(this);
    work();
  }

  async fetch() {
    const { key, version } = this;
    const shared = { points: POINTS };
    const answer =
      this.ids.length > 1
        ? await ask("group", { ids: this.ids, metric: "return_mean", x: "steps", ...shared })
        : await ask("series", { id: this.ids[0], names: ["return_mean"], x: "steps", ...shared });
    const x = answer.x.steps ?? answer.x;
    known.set(key, { version, fetched: performance.now() / 1000, x, y: answer.mean ?? answer.y?.return_mean ?? [] });
    if (key === this.key) this.draw(known.get(key));
  }

  draw({ x, y }) {
    const [low, high] = extent(y, x);
    const points = [];
    for (let index = 0; index < y.length; index += 1) {
      if (y[index] === null) continue;
      const across = (WIDTH - 2) * ((x[index] - x[0]) / (x[x.length - 1] - x[0] || 1)) + 1;
      const up = (HEIGHT - 4) * (high > low ? (y[index] - low) / (high - low) : 0.5) + 2;
      points.push(`${across.toFixed(1)} ${(HEIGHT - up).toFixed(1)}`);
    }
    this.path.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
  }
}

function work() {
  while (busy < AT_ONCE && queue.size && !document.hidden) {
    const [next] = queue;
    queue.delete(next);
    if (!next.onScreen || !next.element.isConnected) continue;
    busy += 1;
    next
      .fetch()
      .catch(() => known.set(next.key, { version: next.version, fetched: performance.now() / 1000, x: [], y: [] }))
      .finally(() => {
        busy -= 1;
        work();
      });
  }
}
