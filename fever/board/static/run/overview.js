// The tab of a search or a scaling study: its report, its runs, its pictures and its best settings.

import { h, own, theirs, visible } from "../core/dom.js";
import { count, number } from "../core/format.js";
import { link } from "../core/route.js";
import { badge } from "../core/state.js";
import { store } from "../core/store.js";
import { picture } from "./media.js";
import { describeReport } from "./report.js";

/** The value of a setting in a trial, as short as it can be read. */
function written(value) {
  if (value === undefined) return "–";
  return typeof value === "number" ? number(value) : theirs(value, 60);
}

export class OverviewTab {
  constructor(data) {
    this.data = data;
    this.pictures = h("div.media.large", {});
    this.best = h("section.panel", { hidden: true });
    this.report = h("section.panel", { hidden: true });
    this.runs = h("div", {});
    this.element = h("div.overview", {}, this.report, this.pictures, this.runs, this.best);
    this.listener = () => this.write();
    data.addEventListener("info", this.listener);
    this.endStore = store.listen(this.listener);
  }

  show() {
    this.write();
  }

  write() {
    const { info } = this.data;
    if (!info) return;
    const rows = [...store.rows.values()].filter((row) => row.parent === this.data.id || info.trials?.includes(row.id));
    const text = JSON.stringify([
      info.pictures,
      info.report,
      info.best_settings,
      info.searched,
      rows.map((row) => [row.id, row.state, row.steps, row.return]),
    ]);
    if (text === this.before) return;
    this.before = text;
    this.pictures.replaceChildren(...info.pictures.map((item) => picture(this.data.id, item)));
    this.best.hidden = !info.best_settings;
    if (info.best_settings) {
      this.best.replaceChildren(
        h("h2", {}, "Best settings so far"),
        h("pre.settings-text", { tabindex: "0" }, visible(info.best_settings, 20000)),
      );
    }
    this.report.hidden = !info.report;
    if (info.report) this.report.replaceChildren(h("h2", {}, "Report"), ...describeReport(info.report));
    this.runs.replaceChildren(
      rows.length ? this.tableOf(rows, info) : h("p.empty", {}, "None of its runs has begun yet."),
    );
  }

  tableOf(rows, info) {
    const { names, trials } = info.searched ?? { names: [], trials: {} };
    const trialOf = (row) => own(trials, String(Number.parseInt(row.name, 10))); // 0007-seed-1 is of trial 7
    const search = this.isSearch();
    const place = (row) => trialOf(row)?.score ?? -Infinity;
    if (search) rows.sort((a, b) => place(b) - place(a) || (b.return ?? -Infinity) - (a.return ?? -Infinity));
    else rows.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
    const heads = ["Run", "State", ...(search ? ["Score"] : []), "Return", "Steps", "Seed"];
    const head = [...heads.map((name) => h("th", { scope: "col" }, name))];
    head.push(...names.map((name) => h("th", { scope: "col" }, theirs(name, 60))));
    const lines = rows.map((row) => this.line(row, search, trialOf(row), names));
    return h(
      "section.panel.scroll",
      { tabindex: "0", "aria-label": "Its runs" },
      h("h2", {}, search ? "Its runs, the best score first" : "Its runs"),
      h("table.plain", {}, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...lines)),
    );
  }

  isSearch() {
    return this.data.info.row.kind === "search";
  }

  line(row, search, trial, names) {
    const mark = badge();
    mark.update(row);
    const cells = [mark.element, ...(search ? [number(trial?.score ?? null)] : [])];
    cells.push(number(row.return), count(row.steps), row.seed === null ? "–" : String(row.seed));
    cells.push(...names.map((_, index) => written(trial?.values[index])));
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, h("a", { href: link("run", row.id) }, theirs(row.name, 80))),
      ...cells.map((cell) => h("td", {}, cell)),
    );
  }

  close() {
    this.data.removeEventListener("info", this.listener);
    this.endStore();
  }
}
