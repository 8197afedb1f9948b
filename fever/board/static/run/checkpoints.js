// The tab with the checkpoints.

import { h, theirs } from "../core/dom.js";
import { bytes, count, moment, number } from "../core/format.js";

export class CheckpointsTab {
  constructor(data) {
    this.data = data;
    this.element = h("div.checkpoints", {});
    this.listener = () => this.write();
    data.addEventListener("info", this.listener);
  }

  show() {
    this.write();
  }

  write() {
    const checkpoints = this.data.info?.checkpoints;
    if (!checkpoints) return;
    const text = JSON.stringify(checkpoints);
    if (text === this.before) return;
    this.before = text;
    if (!checkpoints.length) {
      this.element.replaceChildren(h("p.empty", {}, "There is no checkpoint yet."));
      return;
    }
    const heads = ["Iteration", "", "Steps", "Score", "Size", "Written"].map((name) =>
      h("th", { scope: "col" }, name || h("span.spoken", {}, "Which")),
    );
    const rows = [...checkpoints]
      .sort((a, b) => b.iteration - a.iteration)
      .map((each) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, String(each.iteration)),
          h("td", {}, each.best && h("span.mark.best", {}, "★ best"), each.last && h("span.mark", {}, "last")),
          h("td", {}, count(each.steps)),
          h(
            "td",
            {},
            number(each.score),
            each.score !== null && each.score_of && h("span.muted", {}, " by ", theirs(each.score_of, 40)),
          ),
          h("td", {}, bytes(each.bytes)),
          h("td", {}, moment(each.written)),
        ),
      );
    this.element.replaceChildren(
      h(
        "div.panel.scroll",
        { tabindex: "0", role: "region", "aria-label": "Checkpoints" },
        h("table.plain", {}, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows)),
      ),
      h(
        "p.muted",
        {},
        h("code", {}, "fever eval"),
        ", ",
        h("code", {}, "watch"),
        " and ",
        h("code", {}, "export"),
        " take the best checkpoint, ",
        h("code", {}, "fever resume"),
        " the last one.",
      ),
    );
  }

  close() {
    this.data.removeEventListener("info", this.listener);
  }
}
