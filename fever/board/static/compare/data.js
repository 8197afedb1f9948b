// Curves of one metric of several runs, and means over seeds, kept up to date.

import { ask, onlyLatest } from "../core/api.js";
import { own, throttled } from "../core/dom.js";
import { live } from "../core/live.js";

const POINTS = 1000;
const GROUP_POINTS = 300;
const MOST = 3000; // points of a curve on the page; beyond, they are fetched anew, thinned
const AT_ONCE = 4; // questions to the server

/** Apply an action to all items, a few at a time. */
async function each(items, action) {
  const rest = [...items];
  const work = async () => {
    while (rest.length) await action(rest.shift());
  };
  await Promise.all(Array.from({ length: Math.min(AT_ONCE, rest.length) }, work));
}

/**
 * Events: "change". `infos` has what /api/run says of each run, `errors` a sentence for those that cannot be read,
 * `curves` {x, y, iteration} of each run, `means` {x, mean, low, high, runs} of each experiment with several runs.
 */
export class CompareData extends EventTarget {
  constructor() {
    super();
    this.ids = [];
    this.infos = new Map();
    this.errors = new Map();
    this.curves = new Map();
    this.means = new Map();
    this.asked = null; // {metric, x, from, to, band}
    this.exact = true;
    this.latest = { infos: onlyLatest(), curves: onlyLatest() };
    this.groupsSoon = throttled(1500, () => this.loadMeans().catch(() => {}));
    this.againSoon = throttled(2000, () => this.loadCurves());
    this.infosSoon = throttled(1000, () => this.loadInfos());
    this.stop = live.listen({
      afresh: () => this.load(),
      lost: () => this.infos.size === 0 && this.load(),
      points: (news) => this.ids.includes(news.id) && this.add(news),
      changed: (news) => this.ids.includes(news.id) && this.infosSoon(),
    });
  }

  /** Compare these runs: metric, x axis, window, and whether seeds are taken together. */
  show(ids, asked) {
    const same = this.asked !== null && JSON.stringify(ids) === JSON.stringify(this.ids);
    const sameAsked = JSON.stringify(asked) === JSON.stringify(this.asked);
    this.ids = ids;
    this.asked = asked;
    if (!same) {
      live.watch(ids); // the answer comes as "afresh" if the connection was made anew
      this.load();
    } else if (!sameAsked) {
      this.loadCurves();
    }
  }

  async load() {
    await this.loadInfos();
    await this.loadCurves();
  }

  async loadInfos() {
    const found = await this.latest.infos(async (signal) => {
      const [infos, errors] = [new Map(), new Map()];
      await each(this.ids, (id) =>
        ask("run", { id }, signal).then(
          (info) => infos.set(id, info),
          (error) => errors.set(id, error.message),
        ),
      );
      return { infos, errors };
    });
    if (!found) return;
    Object.assign(this, found);
    this.tell();
  }

  /** Experiments with several of the runs: key -> ids. */
  get experiments() {
    const groups = new Map();
    for (const id of this.ids) {
      const experiment = this.infos.get(id)?.row.experiment;
      if (experiment) groups.set(experiment, [...(groups.get(experiment) ?? []), id]);
    }
    return new Map([...groups].filter(([, ids]) => ids.length > 1));
  }

  async loadCurves() {
    const { metric, x, from, to, band } = this.asked;
    const points = from === null ? POINTS : 2 * POINTS;
    this.meanwhile = []; // rows told while the server reads: they may not be in its answers
    const found = await this.latest.curves(async (signal) => {
      const curves = new Map();
      let exact = true;
      await each([...this.infos.keys()], async (id) => {
        if (!this.infos.get(id).metrics.includes(metric)) return;
        const answer = await ask("series", { id, names: [metric], x, from, to, points }, signal).catch(() => null);
        if (!answer) return;
        exact &&= answer.exact;
        curves.set(id, { x: answer.x[x] ?? [], y: own(answer.y, metric) ?? [], iteration: answer.x.iteration ?? [] });
      });
      return { curves, exact };
    });
    if (!found) return;
    Object.assign(this, found);
    for (const news of this.meanwhile) this.append(news);
    this.meanwhile = null;
    if (band) await this.loadMeans().catch(() => {});
    this.tell();
  }

  async loadMeans() {
    const { metric, x, band } = this.asked;
    if (!band) return;
    const means = new Map();
    await each(this.experiments, async ([experiment, ids]) => {
      const answer = await ask("group", { ids, metric, x, points: GROUP_POINTS }).catch(() => null);
      if (answer) means.set(experiment, answer);
    });
    this.means = means;
    this.tell();
  }

  add(news) {
    this.meanwhile?.push(news);
    if (!this.curves.has(news.id)) return this.againSoon(); // its first rows
    const { iteration } = this.curves.get(news.id);
    // Rows that are here already: a resumed run repeats them, or they were written while the rest was fetched.
    if (news.columns.iteration?.[0] <= iteration.at(-1) || iteration.length > MOST) this.againSoon();
    this.append(news);
    if (this.asked.band) this.groupsSoon();
    this.tell();
  }

  /** Add those rows that are newer than all and within the window. */
  append({ id, columns }) {
    const { metric, x, from, to } = this.asked;
    const curve = this.curves.get(id);
    for (const [index, number] of (columns.iteration ?? []).entries()) {
      const place = columns[x]?.[index] ?? null;
      const inside = place !== null && (from === null || (place >= from && place <= to));
      if (!curve || !inside || number <= (curve.iteration.at(-1) ?? -1)) continue;
      curve.x.push(place);
      curve.y.push(own(columns, metric)?.[index] ?? null);
      curve.iteration.push(number);
    }
  }

  tell() {
    this.dispatchEvent(new Event("change"));
  }

  close() {
    this.stop();
    for (const later of [this.groupsSoon, this.againSoon, this.infosSoon]) later.cancel();
    for (const latest of Object.values(this.latest)) latest.cancel();
  }
}
