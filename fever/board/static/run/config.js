// The tab with the configuration, what differs from the defaults, and facts about the run.

import { h, theirs, visible } from "../core/dom.js";
import { go } from "../core/route.js";

const GROUPS = [
  ["run", "Run"],
  ["stop", "Stop rules"],
  ["settings", "Settings of the algorithm"],
];

export class ConfigTab {
  constructor(data) {
    this.data = data;
    this.only = h("input", { type: "checkbox", onchange: () => go({ only: this.only.checked ? "changed" : null }) });
    this.filter = h("input.search", {
      type: "search",
      placeholder: "Find a setting",
      "aria-label": "Find a setting",
      spellcheck: "false",
      oninput: () => this.write(),
    });
    this.table = h("div.config-table", {});
    this.facts = h("section.panel", {});
    this.summary = h("section.panel", {});
    this.element = h(
      "div.config",
      {},
      h(
        "div.config-main",
        {},
        h("div.tools", {}, this.filter, h("label.inline", {}, this.only, "only what differs from the default")),
        this.table,
      ),
      h("div.config-side", {}, this.facts, this.summary),
    );
    this.listener = () => this.write();
    data.addEventListener("info", this.listener);
  }

  show(query) {
    this.only.checked = query.get("only") === "changed";
    this.write();
  }

  write() {
    const { info } = this.data;
    if (!info) return;
    const text = JSON.stringify([info.config, info.facts, info.summary, this.only.checked, this.filter.value]);
    if (text === this.before) return;
    this.before = text;
    const words = this.filter.value.toLowerCase();
    const shown = info.config.filter(
      (item) =>
        (!this.only.checked || item.changed) &&
        (!words || `${item.name} ${item.meaning}`.toLowerCase().includes(words)),
    );
    const sections = GROUPS.map(([group, title]) => [title, shown.filter((item) => item.group === group)]).filter(
      ([, items]) => items.length,
    );
    this.table.replaceChildren(
      ...sections.map(([title, items]) =>
        h("section.panel", {}, h("h2", {}, title), h("dl.settings", {}, ...items.map(setting))),
      ),
      ...(sections.length
        ? []
        : [
            h(
              "p.empty",
              {},
              info.config.length ? "Nothing here is like that." : "This run has no configuration that can be read.",
            ),
          ]),
    );
    this.facts.replaceChildren(h("h2", {}, "Facts"), pairs(info.facts));
    this.summary.hidden = !info.summary;
    if (info.summary) this.summary.replaceChildren(h("h2", {}, "Summary"), pairs(flat(info.summary)));
  }

  close() {
    this.data.removeEventListener("info", this.listener);
  }
}

function setting(item) {
  return h(
    item.changed ? "div.setting.changed" : "div.setting",
    {},
    h("dt", {}, theirs(item.name, 120), item.changed && h("span.changed-mark", {}, "changed")),
    h(
      "dd.setting-value",
      {},
      h("code", {}, theirs(item.value, 2000)),
      item.changed &&
        item.default !== null &&
        h("span.muted", {}, " default ", h("code", {}, theirs(item.default, 300))),
    ),
    item.meaning && h("dd.muted.meaning", {}, visible(item.meaning, 600)),
  );
}

function pairs(list) {
  return h(
    "dl.facts",
    {},
    ...list.map(([name, value]) =>
      h("div", {}, h("dt.muted", {}, theirs(name, 100)), h("dd", {}, theirs(value ?? "–", 2000))),
    ),
  );
}

/** An object of objects as pairs: {"a": {"b": 1}} gives ["a: b", "1"]. */
function flat(object, prefix = "") {
  return Object.entries(object).flatMap(([name, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value)
      ? flat(value, `${prefix}${name}: `)
      : [
          [
            `${prefix}${name}`,
            value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value),
          ],
        ],
  );
}
