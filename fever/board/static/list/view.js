// The list of runs: search, filter, sort, groups, and the choice of runs to compare.

import { h, setAttribute, setText, theirs, throttled } from "../core/dom.js";
import { live } from "../core/live.js";
import { join } from "../core/lists.js";
import { changed, go, link, replace } from "../core/route.js";
import { stateIcon, STATES, statesOf } from "../core/state.js";
import { store } from "../core/store.js";
import { arrange, isFound, SORTS } from "./arrange.js";
import { GroupChart } from "./group_chart.js";
import { COLUMNS, Row } from "./row.js";

const chosen = new Set(); // ids of runs; kept while one looks at a run and comes back
const opened = new Set(); // keys of open groups and searches
let left = null; // {scroll, key of the row that had the focus} when the list was left

/** What an address asks of the list. */
function viewOf(query) {
  const sort = query.get("sort") ?? "-began";
  return {
    q: query.get("q") ?? "",
    states: new Set((query.get("status") ?? "").split(",").filter(Boolean)),
    sort: sort.replace(/^-/, ""),
    descending: sort.startsWith("-"),
    open: opened,
  };
}

export class ListView {
  constructor(root) {
    this.rows = new Map(); // key -> Row
    this.charts = new Map(); // key of an open group -> GroupChart
    this.build(root);
    this.soon = throttled(100, () => this.write());
    this.endStore = store.listen(() => this.soon());
    document.title = "Runs · fever board";
  }

  show(query) {
    live.watch([]);
    this.view = viewOf(query);
    if (document.activeElement !== this.search) this.search.value = this.view.q;
    this.write();
  }

  build(root) {
    this.search = h("input.search", {
      type: "search",
      placeholder: "Search runs",
      "aria-label": "Search runs by name, environment, algorithm, host or state",
      "aria-keyshortcuts": "/",
      spellcheck: "false",
      oninput: () => replace({ q: this.search.value }),
    });
    this.filters = h("div.filters", { role: "group", "aria-label": "Show only runs in these states" });
    this.count = h("span.muted.count", { role: "status" });
    this.head = h(
      "tr",
      { role: "row" },
      h("th.c-choose", { role: "columnheader" }, h("span.spoken", {}, "Choose")),
      ...COLUMNS.map((column) => this.heading(column)),
    );
    this.body = h("tbody", { role: "rowgroup" });
    this.table = h(
      "table.runs",
      { role: "table", "aria-label": "Runs" },
      h("thead", { role: "rowgroup" }, this.head),
      this.body,
    );
    this.sorter = h("select", { "aria-label": "Sort by", onchange: () => go({ sort: this.sorter.value }) });
    for (const [name, label] of COLUMNS.filter(([name]) => name)) {
      this.sorter.append(
        h("option", { value: `${SORTS[name][1] ? "-" : ""}${name}` }, `Sort by ${label.toLowerCase()}`),
      );
    }
    this.sorter.prepend(h("option", { value: "-began" }, "Newest first"));
    this.message = h("div.empty", { hidden: true });
    this.bar = h("div.chosen-bar", { hidden: true, role: "region", "aria-label": "Chosen runs" });
    root.append(
      h("h1.spoken", { tabindex: "-1" }, "Runs"),
      h("div.tools", {}, this.search, this.filters, h("span.sorter", {}, this.sorter), this.count),
      h("div.table-frame", {}, this.table),
      this.message,
      this.bar,
    );
  }

  heading([name, label]) {
    const cell = h(`th.c-${name ?? "curve"}`, { role: "columnheader", scope: "col" });
    if (name)
      cell.append(h("button.sort", { type: "button", "data-sort": name, onclick: () => this.sortBy(name) }, label));
    else cell.append(label);
    return cell;
  }

  sortBy(name) {
    const largest = name === this.view.sort ? !this.view.descending : SORTS[name][1];
    go({ sort: `${largest ? "-" : ""}${name}` });
  }

  write() {
    const all = [...store.rows.values()];
    this.writeFilters(all);
    this.writeHead();
    this.writeMessage(all);
    const lines = arrange(all, this.view);
    const elements = [];
    const used = new Set();
    for (const line of lines) {
      const row = this.rowOf(line);
      used.add(row.key);
      row.update(line, this.isChosen(line));
      elements.push(row.element);
      if (line.kind === "group" && line.open) elements.push(this.chartOf(line).element);
    }
    this.place(elements);
    for (const [key, row] of this.rows) if (!used.has(key) && !store.rows.has(row.line.row.id)) this.rows.delete(key);
    for (const [key, chart] of this.charts) {
      if (lines.some((line) => line.key === key && line.open)) continue;
      chart.close();
      this.charts.delete(key);
    }
    const found = all.filter((row) => isFound(row, this.view)).length;
    const total = `${all.length} ${all.length === 1 ? "run" : "runs"}`;
    setText(this.count, !store.loaded || !all.length ? "" : found === all.length ? total : `${found} of ${total}`);
    this.table.hidden = !lines.length;
    this.writeBar();
  }

  rowOf(line) {
    const key = `${line.kind} ${line.key}`;
    if (!this.rows.has(key)) {
      const row = new Row(line, { choose: (each, on) => this.choose(each, on), fold: (each) => this.fold(each) });
      row.key = key;
      this.rows.set(key, row);
    }
    return this.rows.get(key);
  }

  chartOf(line) {
    if (!this.charts.has(line.key)) this.charts.set(line.key, new GroupChart());
    const chart = this.charts.get(line.key);
    chart.update(line);
    return chart;
  }

  /** Make these the rows of the table, moving only what is elsewhere; the focus stays where it is. */
  place(elements) {
    const wanted = new Set(elements);
    for (const child of [...this.body.children]) if (!wanted.has(child)) child.remove();
    let next = this.body.firstElementChild;
    for (const element of elements) {
      if (element === next) {
        next = next.nextElementSibling;
      } else {
        const focused = element.contains(document.activeElement) ? document.activeElement : null;
        this.body.insertBefore(element, next);
        focused?.focus({ preventScroll: true });
      }
    }
  }

  writeFilters(all) {
    const counts = new Map(STATES.map((state) => [state, 0]));
    for (const row of all) for (const state of statesOf(row)) counts.set(state, (counts.get(state) ?? 0) + 1);
    const shown = STATES.filter((state) => counts.get(state) || this.view.states.has(state));
    const text = JSON.stringify([shown.map((state) => counts.get(state)), shown, [...this.view.states]]);
    if (text === this.filtersBefore) return;
    this.filtersBefore = text;
    const focused = this.filters.contains(document.activeElement) ? document.activeElement.dataset.state : null;
    this.filters.replaceChildren(
      ...shown.map((state) =>
        h(
          "button.filter",
          {
            type: "button",
            "data-state": state,
            "aria-pressed": String(this.view.states.has(state)),
            onclick: () => this.filterBy(state),
          },
          stateIcon(state),
          `${state} `,
          h("span.filter-count", {}, String(counts.get(state))),
        ),
      ),
    );
    if (focused) this.filters.querySelector(`[data-state="${focused}"]`)?.focus();
  }

  filterBy(state) {
    const states = new Set(this.view.states);
    if (!states.delete(state)) states.add(state);
    go({ status: [...states].join(",") });
  }

  writeHead() {
    for (const button of this.head.querySelectorAll(".sort")) {
      const active = button.dataset.sort === this.view.sort;
      setAttribute(
        button.parentElement,
        "aria-sort",
        active ? (this.view.descending ? "descending" : "ascending") : null,
      );
    }
    this.sorter.value = `${this.view.descending ? "-" : ""}${this.view.sort}`;
  }

  writeMessage(all) {
    const lines = [];
    if (store.error && !store.loaded) lines.push(h("p", {}, store.error));
    else if (!store.loaded) lines.push(h("p.muted", {}, "Reading the runs …"));
    else if (!all.length) {
      lines.push(h("p", {}, "There is no run in ", h("code", {}, theirs(store.folder, 200)), " yet. Start one with"));
      lines.push(h("pre", {}, "fever train CartPole-v1"));
    } else if (!arrange(all, this.view).length) {
      lines.push(h("p", {}, "No run is like that."), h("p", {}, h("a", { href: link("runs") }, "Show all runs")));
    }
    this.message.hidden = !lines.length;
    if (lines.length) this.message.replaceChildren(...lines);
  }

  idsOf(line) {
    if (line.kind !== "run") return line.members.map((row) => row.id);
    return [line.row.id];
  }

  isChosen(line) {
    const ids = this.idsOf(line);
    return ids.length > 0 && ids.every((id) => chosen.has(id));
  }

  choose(line, on) {
    for (const id of this.idsOf(line)) on ? chosen.add(id) : chosen.delete(id);
    this.write();
  }

  fold(line) {
    if (!opened.delete(line.key)) opened.add(line.key);
    this.write();
  }

  writeBar() {
    for (const id of chosen) if (store.loaded && !store.rows.has(id)) chosen.delete(id);
    this.bar.hidden = !chosen.size;
    if (!chosen.size || this.barBefore === [...chosen].join("\n")) return;
    this.barBefore = [...chosen].join("\n");
    this.bar.replaceChildren(
      h("span", { role: "status" }, `${chosen.size} ${chosen.size === 1 ? "run" : "runs"} chosen`),
      h("a.primary.button", { href: this.compareLink() }, "Compare"),
      h(
        "button.quiet",
        { type: "button", onclick: () => (chosen.clear(), this.write(), this.search.focus()) },
        "Clear",
      ),
    );
  }

  compareLink() {
    return link("compare", null, { runs: join([...chosen]), band: chosen.size > 2 ? "1" : null });
  }

  /** Keys that work anywhere in the list; true if the key was used. */
  key(event) {
    const rows = [...this.body.querySelectorAll("tr.row")];
    const at = rows.indexOf(document.activeElement?.closest?.("tr.row"));
    const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
    if (step && (at >= 0 || event.key === "j")) {
      const next = rows[Math.max(0, Math.min(rows.length - 1, at + step))];
      next?.querySelector(".name-link, .name-button")?.focus();
    } else if (event.key === " " && document.activeElement?.matches?.(".name-link, .name-button")) {
      rows[at].querySelector("input").click();
    } else if (event.key === "c" && chosen.size) {
      location.hash = this.compareLink();
    } else if (event.key === "Escape" && (this.view.q || this.view.states.size)) {
      this.search.value = "";
      location.hash = changed({ q: null, status: null });
    } else {
      return false;
    }
    return true;
  }

  focusSearch() {
    this.search.focus();
    this.search.select();
  }

  /** Come back to where the list was left; false if it has not been shown before. */
  restore() {
    if (left === null) return false;
    scrollTo(0, left.scroll);
    const row = this.rows.get(left.key);
    if (!row?.element.isConnected) return false;
    row.main.focus({ preventScroll: true });
    return true;
  }

  close() {
    const focused = [...this.rows.values()].find((row) => row.element.contains(document.activeElement));
    left = { scroll: scrollY, key: focused?.key };
    this.endStore();
    this.soon.cancel();
    for (const chart of this.charts.values()) chart.close();
  }
}
