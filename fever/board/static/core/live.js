// The connection over which the server tells what is new. One per page, made anew when other runs are watched.
//
// Events of this object:
//   afresh    connected: what was fetched before may be old, fetch it again
//   runs, points, episodes, workers, log, changed    with the server's object as `detail`
//   lost      the connection broke; it is tried again by itself

import { join } from "./lists.js";

const FIRST_PAUSE = 500; // ms until a broken connection is tried again; doubled up to
const LONGEST_PAUSE = 8000;
const HIDDEN_PAUSE = 5000; // a page that nobody has looked at for so long lets go of its connection
const EVENTS = ["runs", "points", "episodes", "workers", "log", "changed"];

class Live extends EventTarget {
  constructor() {
    super();
    this.watched = [];
    this.source = null;
    this.pause = FIRST_PAUSE;
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.look());
    addEventListener("online", () => this.source === null && this.connect());
  }

  /** Hear of these runs from now on, besides the list. A view calls it before it fetches: nothing is lost between. */
  watch(ids) {
    const same = ids.length === this.watched.length && ids.every((id, index) => id === this.watched[index]);
    this.watched = [...ids];
    if (!same || this.source === null) this.connect();
  }

  connect() {
    this.disconnect();
    if (document.hidden) return; // `look` connects when the page is seen
    const query = this.watched.length ? `?watch=${encodeURIComponent(join(this.watched))}` : "";
    const source = (this.source = new EventSource(`/api/events${query}`));
    source.onopen = () => {
      if (source !== this.source) return;
      this.pause = FIRST_PAUSE;
      this.tell("afresh", null);
    };
    source.onerror = () => {
      if (source !== this.source) return;
      // The browser's own way of trying again gives up on some errors, so it is done here.
      this.disconnect();
      this.tell("lost", null);
      this.timer = setTimeout(() => this.connect(), this.pause);
      this.pause = Math.min(2 * this.pause, LONGEST_PAUSE);
    };
    for (const name of EVENTS) {
      source.addEventListener(name, (event) => {
        if (source === this.source) this.tell(name, JSON.parse(event.data));
      });
    }
  }

  disconnect() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  look() {
    clearTimeout(this.hiding);
    if (document.hidden) this.hiding = setTimeout(() => this.disconnect(), HIDDEN_PAUSE);
    else if (this.source === null) this.connect();
  }

  tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  /** Call handlers {event name: function of the detail} until the function that this gives is called. */
  listen(handlers) {
    const controller = new AbortController();
    for (const [name, handler] of Object.entries(handlers)) {
      this.addEventListener(name, (event) => handler(event.detail), { signal: controller.signal });
    }
    return () => controller.abort();
  }
}

export const live = new Live();
