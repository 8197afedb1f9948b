// The tab with the end of the log, which follows what is written.

import { ask } from "../core/api.js";
import { h, setText, visible } from "../core/dom.js";
import { live } from "../core/live.js";

const MOST = 400000; // characters on the page

export class LogTab {
  constructor(data) {
    this.data = data;
    this.follow = h("input", { type: "checkbox", checked: true, onchange: () => this.scroll() });
    this.note = h("span.muted", {});
    this.text = h("pre.log", { tabindex: "0", role: "region", "aria-label": "Log", onscroll: () => this.scrolled() });
    this.element = h(
      "div.log-tab",
      {},
      h("div.tools", {}, h("label.inline", {}, this.follow, "follow what is written"), this.note),
      this.text,
    );
    this.stop = live.listen({
      afresh: () => this.load(),
      changed: (news) => news.id === data.id && news.what.includes("log") && this.load(), // it was shortened
      log: (news) => news.id === data.id && this.add(news.text),
    });
    this.load();
  }

  show() {}

  async load() {
    try {
      const { text, cut } = await ask("log", { id: this.data.id, bytes: 65536 });
      this.text.replaceChildren(visible(text, Infinity));
      setText(this.note, cut ? "the last 64 kB of log.txt" : text ? "" : "Nothing has been logged yet.");
    } catch (error) {
      setText(this.note, error.message);
    }
    this.scroll();
  }

  add(text) {
    this.text.append(visible(text, Infinity));
    setText(this.note, this.note.textContent.startsWith("Nothing") ? "" : this.note.textContent);
    // The oldest pieces go when there is too much.
    for (let length = this.text.textContent.length; length > MOST && this.text.childNodes.length > 1;) {
      length -= this.text.firstChild.data.length;
      this.text.firstChild.remove();
    }
    this.scroll();
  }

  scroll() {
    if (this.follow.checked) this.text.scrollTop = this.text.scrollHeight;
  }

  /** Who scrolls up wants to read; who comes back to the end wants to follow. */
  scrolled() {
    this.follow.checked = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 30;
  }

  close() {
    this.stop();
  }
}
