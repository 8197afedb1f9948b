// The tab with videos, which play in the page, and pictures.

import { fileAddress } from "../core/api.js";
import { h, theirs, visible } from "../core/dom.js";
import { bytes, count, moment } from "../core/format.js";

/** A picture or a video in a frame with its name; `written` makes the address of a new version a new one. */
export function picture(id, item) {
  const address = `${fileAddress(id, item.name)}&written=${encodeURIComponent(item.written ?? 0)}`;
  return h(
    "figure.medium",
    {},
    h(
      "a",
      { href: address, target: "_blank", rel: "noopener" },
      h("img", { src: address, alt: `picture ${visible(item.name, 100)}`, loading: "lazy" }),
    ),
    h("figcaption.muted", {}, theirs(item.name, 120), " · ", moment(item.written)),
  );
}

function video(id, item) {
  const address = fileAddress(id, item.name);
  const name = visible(item.name.replace(/^videos\//, ""), 120);
  const screen =
    item.type === "image/gif"
      ? h("img", { src: address, alt: `animation ${name}`, loading: "lazy" })
      : h("video", { controls: true, loop: true, preload: "metadata", "aria-label": `video ${name}`, src: address });
  const steps = item.steps === null || item.steps === undefined ? "" : `after ${count(item.steps)} steps · `;
  return h(
    "figure.medium",
    {},
    screen,
    h("figcaption.muted", {}, steps, theirs(name), ` · ${bytes(item.bytes)} · `, moment(item.written)),
  );
}

export class MediaTab {
  constructor(data) {
    this.data = data;
    this.videos = h("div.media", {});
    this.pictures = h("div.media", {});
    this.empty = h(
      "div.empty",
      { hidden: true },
      h(
        "p",
        {},
        "There is no video yet. ",
        h("code", {}, "fever watch"),
        " makes one, and training does with ",
        h("code", {}, "--video-every"),
        ".",
      ),
    );
    this.element = h("div.media-tab", {}, this.videos, this.pictures, this.empty);
    this.made = new Map(); // name and time -> figure: a video that plays is not replaced
    this.listener = () => this.write();
    data.addEventListener("info", this.listener);
  }

  show() {
    this.write();
  }

  write() {
    const { info } = this.data;
    if (!info) return;
    const newestFirst = [...info.videos].sort((a, b) => (b.written ?? 0) - (a.written ?? 0));
    this.fill(this.videos, newestFirst, video);
    this.fill(this.pictures, info.pictures, picture);
    this.empty.hidden = info.videos.length + info.pictures.length > 0;
  }

  fill(place, items, make) {
    const figures = items.map((item) => {
      const key = `${item.name} ${item.written}`;
      if (!this.made.has(key)) this.made.set(key, make(this.data.id, item));
      return this.made.get(key);
    });
    const same =
      figures.length === place.children.length && figures.every((figure, index) => figure === place.children[index]);
    if (same) return;
    for (const child of [...place.children]) if (!figures.includes(child)) child.remove();
    figures.forEach(
      (figure, index) => place.children[index] !== figure && place.insertBefore(figure, place.children[index] ?? null),
    );
  }

  close() {
    this.data.removeEventListener("info", this.listener);
  }
}
