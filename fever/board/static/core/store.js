// The rows of all runs, as the server last told them.

import { ask } from "./api.js";
import { setClock } from "./format.js";
import { live } from "./live.js";

class Store extends EventTarget {
  constructor() {
    super();
    this.rows = new Map(); // id -> row, newest run first
    this.folder = "";
    this.loaded = false;
    this.error = null; // a sentence
    live.listen({ afresh: () => this.load(), runs: (news) => this.take(news) });
  }

  async load() {
    try {
      const answer = await ask("runs");
      setClock(answer.now);
      this.folder = answer.folder;
      this.rows = new Map(answer.runs.map((row) => [row.id, row]));
      this.loaded = true;
      this.error = null;
    } catch (error) {
      this.error = error.message;
    }
    this.dispatchEvent(new Event("change"));
  }

  take({ rows, gone, now }) {
    setClock(now);
    const fresh = rows.filter((row) => !this.rows.has(row.id));
    for (const row of rows) if (this.rows.has(row.id)) this.rows.set(row.id, row);
    // New runs come first, as in the whole list.
    if (fresh.length) this.rows = new Map([...fresh.map((row) => [row.id, row]), ...this.rows]);
    for (const id of gone ?? []) this.rows.delete(id);
    if (rows.length || gone?.length) this.dispatchEvent(new Event("change"));
  }

  /** Call `listener` after every change until the function that this gives is called. */
  listen(listener) {
    this.addEventListener("change", listener);
    return () => this.removeEventListener("change", listener);
  }
}

export const store = new Store();
