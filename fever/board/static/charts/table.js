// The numbers of a chart as a table, for those who cannot see the drawing or want to copy them.

import { h, theirs } from "../core/dom.js";
import { columnsOf } from "./plot.js";

const ROWS = 100; // of a longer column every n-th

/** Write the curves of a scene, or its points if it has no curves, into an element. */
export function fillTable(element, scene, write) {
  const single = [...(scene.whiskers ?? []), ...(scene.dots ?? [])].find((item) => item.y.length);
  const curves = scene.curves.length ? scene.curves : single ? [single] : [];
  // Of every curve one column; the bands are in the drawing alone.
  const columns = columnsOf({
    curves: curves.map(({ key, label, colour, x, y, values }) => ({ key, label, colour, x, y: values ?? y })),
  });
  const rows = columns[0].length;
  const step = Math.max(1, Math.ceil(rows / ROWS));
  const body = h("tbody", {});
  // The newest first: that is what one looks for.
  for (let index = rows - 1; index >= 0; index -= step) {
    const cells = columns.slice(1).map((column) => h("td", {}, write(column[index])));
    body.append(h("tr", {}, h("th", { scope: "row" }, scene.x.format(columns[0][index])), ...cells));
  }
  const scroll = element.scrollTop;
  element.replaceChildren(
    h(
      "table",
      {},
      h(
        "caption.muted",
        {},
        step > 1 ? `every ${step}th of ${rows} points, the last one first` : `${rows} points, the last one first`,
      ),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col" }, scene.x.label),
          ...curves.map((curve) => h("th", { scope: "col" }, theirs(curve.label, 60))),
        ),
      ),
      body,
    ),
  );
  element.scrollTop = scroll;
}
