// What state a run is in: a word, a shape and a colour, never a colour alone.

import { h, setAttribute, svg } from "./dom.js";

// Shapes in a box of 16 x 16: a triangle that plays, a tick, a cross …
const SHAPES = {
  running: "M5 3.5 L12.5 8 L5 12.5 Z",
  queued: "M8 3 V8 L11 10 M8 1.8 A6.2 6.2 0 1 0 8.01 1.8",
  done: "M3 8.5 L6.5 12 L13 4.5",
  failed: "M4 4 L12 12 M12 4 L4 12",
  killed: "M4 4 H12 V12 H4 Z",
  damaged: "M8 2.5 V9.5 M8 12.2 V13.2",
  elsewhere: "M2.5 8 H13 M9 4 L13 8 L9 12",
};
export const STATES = Object.keys(SHAPES);

/** The states of a row for the filter: its own and, if it is a copy of what trains on other machines, "elsewhere". */
export function statesOf(row) {
  return row.elsewhere ? [row.state, "elsewhere"] : [row.state];
}

/** A small drawing of a state. */
export function stateIcon(state) {
  return svg(
    "svg",
    { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" },
    svg("path", { d: SHAPES[state] ?? SHAPES.damaged }),
  );
}

/** A badge for a row: {element, update(row)}. */
export function badge() {
  const element = h("span.badge", {});
  let before = "";
  return {
    element,
    update(row) {
      const now = `${row.state} ${row.elsewhere} ${row.host} ${row.reason}`;
      if (now === before) return;
      before = now;
      element.dataset.state = SHAPES[row.state] ? row.state : "damaged";
      const where = row.elsewhere
        ? h("span.badge-where", {}, stateIcon("elsewhere"), h("span.spoken", {}, "elsewhere"))
        : null;
      element.replaceChildren(stateIcon(row.state), h("span", {}, String(row.state).slice(0, 12)), where ?? "");
      const details = [
        row.reason,
        row.elsewhere && `trained elsewhere${row.host ? `, on ${row.host}` : ""}: this is the copy`,
      ];
      setAttribute(element, "title", details.filter(Boolean).join("; ").slice(0, 500) || null);
    },
  };
}
