// One run: its head, and tabs of which one is shown at a time.

import { h, setAttribute, visible } from "../core/dom.js";
import { live } from "../core/live.js";
import { changed, go, link } from "../core/route.js";
import { store } from "../core/store.js";
import { CheckpointsTab } from "./checkpoints.js";
import { ConfigTab } from "./config.js";
import { CurvesTab } from "./curves.js";
import { RunData } from "./data.js";
import { EpisodesTab } from "./episodes.js";
import { Header } from "./header.js";
import { LogTab } from "./log.js";
import { MediaTab } from "./media.js";
import { OverviewTab } from "./overview.js";
import { WorkersTab } from "./workers.js";

// name -> [label, class]. Searches and scaling studies have no curves of their own, but runs.
const RUN_TABS = {
  curves: ["Curves", CurvesTab],
  workers: ["Workers", WorkersTab],
  episodes: ["Episodes", EpisodesTab],
  videos: ["Videos", MediaTab],
  checkpoints: ["Checkpoints", CheckpointsTab],
  config: ["Configuration", ConfigTab],
  log: ["Log", LogTab],
};
const PARENT_TABS = {
  overview: ["Overview", OverviewTab],
  config: ["Configuration", ConfigTab],
  log: ["Log", LogTab],
};

export class RunView {
  constructor(root, id) {
    this.id = id;
    this.data = new RunData(id);
    this.header = new Header();
    this.header.writeName(id);
    this.nav = h("nav.tabs", { "aria-label": "Parts of this run" });
    this.place = h("div.tab", {});
    this.message = h("p.error", { hidden: true, role: "alert" });
    this.tab = null; // {name, view}
    root.append(
      h("p.back", {}, h("a", { href: link("runs") }, "← All runs")),
      this.header.element,
      this.message,
      this.nav,
      this.place,
    );
    this.known = false; // whether the list had it
    this.endStore = store.listen(() => this.writeHead());
    this.data.addEventListener("info", () => this.writeInfo());
    this.data.addEventListener("error", () => this.writeHead());
    document.title = `${visible(id.split("/").at(-1), 80)} · fever board`;
  }

  show(query) {
    this.query = query;
    live.watch([this.id]);
    this.writeHead();
    this.writeTabs();
  }

  /** Scroll the tabs sideways, where they do not fit, so that this one is seen. */
  showTab(anchor) {
    requestAnimationFrame(() => {
      const end = anchor.offsetLeft + anchor.offsetWidth - this.nav.offsetLeft;
      if (end > this.nav.scrollLeft + this.nav.clientWidth) this.nav.scrollLeft = end - this.nav.clientWidth + 24;
      else this.nav.scrollLeft = Math.min(this.nav.scrollLeft, anchor.offsetLeft - this.nav.offsetLeft);
    });
  }

  /** The row as last heard: the list hears of changes first. */
  get row() {
    return store.rows.get(this.id) ?? this.data.info?.row ?? null;
  }

  get tabs() {
    return ["search", "scaling"].includes(this.row?.kind) ? PARENT_TABS : RUN_TABS;
  }

  writeInfo() {
    this.writeHead();
    this.writeTabs();
  }

  writeHead() {
    if (this.row) this.header.update(this.row, this.data.info);
    const { error, info } = this.data;
    this.known ||= store.rows.has(this.id);
    const gone = this.known && store.loaded && !store.rows.has(this.id);
    const problem = gone ? "This run is no longer in the folder: what is shown is what was known of it." : error;
    this.message.hidden = problem === null || this.row?.state === "damaged"; // its head says so
    this.message.textContent = problem ?? "";
    this.nav.hidden = this.place.hidden = error !== null && info === null;
  }

  writeTabs() {
    const names = Object.keys(this.tabs);
    const asked = this.query.get("tab");
    const name = names.includes(asked) ? asked : names[0];
    if (this.nav.dataset.names !== names.join()) {
      this.nav.dataset.names = names.join();
      this.nav.replaceChildren(
        ...names.map((each) => h("a", { "data-tab": each }, this.tabs[each][0], h("span.tab-count.muted", {}))),
      );
    }
    for (const anchor of this.nav.children) {
      anchor.href = changed({ tab: anchor.dataset.tab === names[0] ? null : anchor.dataset.tab });
      const current = anchor.dataset.tab === name;
      if (current && !anchor.hasAttribute("aria-current")) this.showTab(anchor);
      setAttribute(anchor, "aria-current", current ? "page" : null);
      anchor.lastElementChild.textContent = this.countOf(anchor.dataset.tab);
    }
    if (this.tab?.name !== name) {
      this.tab?.view.close();
      const view = new this.tabs[name][1](this.data);
      this.tab = { name, view };
      this.place.replaceChildren(view.element);
    }
    this.tab.view.show(this.query);
  }

  countOf(name) {
    const { info } = this.data;
    if (!info) return "";
    if (name === "videos") return String(info.videos.length + info.pictures.length || "");
    return name === "checkpoints" ? String(info.checkpoints.length || "") : "";
  }

  key(event) {
    if (this.tab?.view.key?.(event)) return true;
    const step = { "]": 1, "[": -1 }[event.key];
    if (!step) return false;
    const names = Object.keys(this.tabs);
    const next = names[names.indexOf(this.tab.name) + step];
    if (next) {
      go({ tab: next === names[0] ? null : next });
      this.nav.querySelector(`[data-tab="${next}"]`)?.focus();
    }
    return true;
  }

  close() {
    this.tab?.view.close();
    this.data.close();
    this.endStore();
  }
}
