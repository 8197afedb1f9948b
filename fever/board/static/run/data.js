// What the page knows of one run: fetched once, then kept up to date by what the server tells.

import { ask, onlyLatest } from "../core/api.js";
import { own, throttled } from "../core/dom.js";
import { live } from "../core/live.js";
import { interpolation } from "../charts/smooth.js";

const POINTS = 1000; // of a curve over the whole run
const ZOOM_POINTS = 2000; // of one part of it
const EPISODES = 1500;
const MOST = 3000; // points on the page; beyond, they are fetched anew, thinned
const AXES = ["steps", "seconds", "episodes", "iteration"];

/**
 * Events: "info" (of /api/run), "series", "episodes", "workers", "error".
 * `columns` has the x axes and the wanted metrics as arrays of equal length.
 */
export class RunData extends EventTarget {
  constructor(id) {
    super();
    this.id = id;
    this.info = null;
    this.error = null; // a sentence
    this.wanted = new Set();
    this.columns = emptyColumns();
    this.exact = null; // whether every row of the window is here; null: not known yet
    this.episodes = null; // {steps, return, length, worker, info}, once somebody wants them
    this.workers = null;
    this.window = { x: "steps", from: null, to: null };
    this.latest = { info: onlyLatest(), series: onlyLatest(), episodes: onlyLatest() };
    this.infoSoon = throttled(500, () => this.loadInfo());
    this.seriesSoon = throttled(2000, () => this.loadSeries());
    this.stop = live.listen({
      afresh: () => this.load(),
      lost: () => this.info === null && this.load(),
      points: (news) => news.id === id && this.addPoints(news.columns),
      episodes: (news) => news.id === id && this.addEpisodes(news),
      workers: (news) => news.id === id && this.setWorkers(news),
      changed: (news) => news.id === id && this.infoSoon(),
    });
  }

  /** Everything afresh: after connecting, since what happened before was not told. */
  async load() {
    const again = { series: this.wanted.size > 0, episodes: this.episodes !== null };
    await this.loadInfo(); // at first, the views ask for the rest once they see what there is
    this.episodesOf = again.episodes ? null : this.episodesOf; // after the series, which say where a zoom is in steps
    if (again.series) this.loadSeries();
    else if (again.episodes) this.loadEpisodes();
    if (this.workers !== null) this.loadWorkers();
  }

  async loadInfo() {
    try {
      const info = await this.latest.info((signal) => ask("run", { id: this.id }, signal));
      if (!info) return;
      this.info = info;
      this.error = null;
      this.tell("info");
    } catch (error) {
      this.error = error.message;
      this.tell("error");
    }
  }

  /** Have these metrics fetched, and episodes if `episodes` says so, for the window {x, from, to}. */
  want({ names, episodes, infoNames = [], window }) {
    const others = names.filter((name) => !this.wanted.has(name));
    const moved = JSON.stringify(window) !== JSON.stringify(this.window);
    const more = infoNames.some((name) => !this.infoNames?.includes(name));
    if (moved) {
      this.window = window;
      this.exact = null;
    }
    for (const name of others) this.wanted.add(name);
    this.infoNames = [...new Set([...(this.infoNames ?? []), ...infoNames])];
    if (others.length || moved) this.loadSeries();
    if (episodes && (this.episodes === null || more || moved)) {
      this.episodes ??= emptyEpisodes();
      if (!moved) this.loadEpisodes(); // otherwise once the steps of the window are known
    }
  }

  async loadSeries() {
    this.meanwhile = []; // rows told while the server reads: they may not be in its answer
    const { x, from, to } = this.window;
    const names = [...this.wanted].filter((name) => this.has(name));
    try {
      const points = from === null ? POINTS : ZOOM_POINTS;
      const answer = await this.latest.series((signal) =>
        ask("series", { id: this.id, names, x, from, to, points }, signal),
      );
      if (!answer) return;
      this.columns = emptyColumns();
      for (const axis of AXES) this.columns[axis] = answer.x[axis] ?? [];
      for (const name of names) this.columns[name] = own(answer.y, name) ?? missing(this.columns.steps.length);
      this.exact = answer.exact;
      for (const news of this.meanwhile) this.append(news);
      this.meanwhile = null;
      this.tell("series");
      if (this.episodes !== null && this.episodesOf !== this.window) this.loadEpisodes();
    } catch (error) {
      this.error = error.message;
      this.tell("error");
    }
  }

  async loadEpisodes() {
    this.episodesOf = this.window;
    const [from, to] = this.stepsShown();
    if (this.window.from !== null && from === null) return; // a zoom to where there is nothing
    const query = { id: this.id, from, to, points: EPISODES, info: this.infoNames };
    const answer = await this.latest.episodes((signal) => ask("episodes", query, signal)).catch(() => null);
    if (!answer) return;
    this.episodes = answer;
    this.tell("episodes");
  }

  async loadWorkers() {
    this.workers ??= { written: null, workers: [], hosts: {} };
    const answer = await ask("workers", { id: this.id }).catch(() => null);
    if (answer) this.setWorkers(answer);
  }

  /** The window in steps, which episodes are asked for in: [from, to], nulls without a zoom. */
  stepsShown() {
    const { x, from, to } = this.window;
    if (from === null || x === "steps") return [from, to];
    const { steps } = this.columns;
    return steps.length ? [steps[0], steps[steps.length - 1]] : [null, null];
  }

  /** Whether a place on the x axis is shown. */
  isShown(at) {
    const { from, to } = this.window;
    return from === null || (at >= from && at <= to);
  }

  addPoints(news) {
    const fresh = Object.keys(news).filter(
      (name) => !AXES.includes(name) && this.info && !this.info.metrics.includes(name),
    );
    if (fresh.length) {
      this.info.metrics.push(...fresh);
      this.tell("info");
    }
    this.meanwhile?.push(news);
    // Rows that are here already: a resumed run repeats them, or they were written while the rest was fetched.
    if (news.iteration?.[0] <= this.columns.iteration.at(-1)) this.seriesSoon();
    this.append(news);
    if (this.columns.iteration.length > MOST) this.seriesSoon();
    this.tell("series");
  }

  /** Add those rows that are newer than all and within the window. */
  append(news) {
    const { iteration } = this.columns;
    for (const [index, number] of (news.iteration ?? []).entries()) {
      if (number <= (iteration.at(-1) ?? -1) || !this.isShown(news[this.window.x]?.[index])) continue;
      for (const name of Object.keys(this.columns)) this.columns[name].push(own(news, name)?.[index] ?? null);
    }
  }

  addEpisodes(news) {
    if (this.episodes === null) return;
    const [from, to] = this.stepsShown();
    const { episodes } = this;
    for (let index = 0; index < news.steps.length; index += 1) {
      if (from !== null && (news.steps[index] < from || news.steps[index] > to)) continue;
      for (const name of ["steps", "return", "length", "worker"]) episodes[name].push(news[name]?.[index] ?? null);
      for (const name of Object.keys(episodes.info)) episodes.info[name].push(own(news.info, name)?.[index] ?? null);
    }
    if (episodes.steps.length > MOST) {
      // The newest are kept whole, every second of the older ones: the picture stays the same.
      const keep = (values) => values.filter((_, index) => index % 2 || index > MOST - EPISODES / 2);
      for (const name of ["steps", "return", "length", "worker"]) episodes[name] = keep(episodes[name]);
      for (const name of Object.keys(episodes.info)) episodes.info[name] = keep(episodes.info[name]);
    }
    this.tell("episodes");
  }

  setWorkers(news) {
    this.workers = news;
    this.tell("workers");
  }

  /** The x axis as it is chosen. */
  get x() {
    return this.columns[this.window.x] ?? [];
  }

  /** Places on the chosen x axis for values that are known by their steps. */
  xOfSteps(steps) {
    if (this.window.x === "steps") return steps;
    return steps.map(interpolation(this.columns.steps, this.x));
  }

  has(name) {
    return this.info?.metrics.includes(name) ?? false;
  }

  column(name) {
    return own(this.columns, name) ?? missing(this.columns.steps.length);
  }

  tell(name) {
    this.dispatchEvent(new Event(name));
  }

  close() {
    this.stop();
    this.infoSoon.cancel();
    this.seriesSoon.cancel();
    for (const latest of Object.values(this.latest)) latest.cancel();
  }
}

function missing(length) {
  return new Array(length).fill(null);
}

function emptyColumns() {
  // Without a prototype: a metric may be called "__proto__".
  return Object.assign(Object.create(null), Object.fromEntries(AXES.map((axis) => [axis, []])));
}

function emptyEpisodes() {
  return { steps: [], return: [], length: [], worker: [], info: {} };
}
