// A chart: title, legend with values and toggles, the drawing, and the same numbers as a table.

import { h, setAttribute, setText, throttled, visible } from "../core/dom.js";
import * as format from "../core/format.js";
import { onTheme } from "../core/theme.js";
import { legendEntry } from "./legend.js";
import { columnsOf, optionsOf, shapeOf, uPlot } from "./plot.js";
import { lastOf } from "./smooth.js";
import { fillTable } from "./table.js";
import { allowTouch } from "./touch.js";

/**
 * settings: {title, note, height, format (of values), formatAxis, yRange [low, high] if fixed, sync (a name that
 * charts share whose cursors move together), onZoom(from, to) with nulls for "everything", controls (elements)}.
 *
 * draw(scene) with
 *   x: {label, format, tick, steps, from, to}    from and to are null, or the range that is zoomed to; tick is the
 *           format along the axis and steps are the distances of its ticks, if they are not the usual ones
 *   curves: [{key, label, colour, x, y, low, high, raw, values, width, fill}]    arrays with equal lengths;
 *           low and high are the edges of a band, raw is what y smooths, values is what to show in the legend if not y
 *   dots: [{key, label, colour, x, y}]     faint single points
 *   whiskers: [{key, label, colour, x, y, low, high}]    points with intervals
 *   lines: [{label, y, colour}]            horizontal lines
 */
export class Chart {
  constructor(settings) {
    this.settings = settings;
    this.scene = null;
    this.hidden = new Set(); // keys of curves that the legend has switched off
    this.u = null;
    this.shape = "";
    this.entries = new Map(); // key -> entry of the legend
    this.build();
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.area);
    this.endTheme = onTheme(() => this.scene && this.rebuild());
    this.describe = throttled(1000, () => this.writeDescription());
  }

  build() {
    const { title, note, height = 260, controls = [] } = this.settings;
    this.area = h("div.chart-area", {
      role: "img",
      tabindex: "0",
      "aria-label": title,
      onkeydown: (event) => this.key(event),
    });
    this.area.style.height = `${height}px`;
    this.empty = h("p.chart-empty.muted", { hidden: true });
    this.legend = h("div.legend", { role: "group", "aria-label": `Curves of ${title}` });
    this.where = h("span.legend-where.muted", {});
    this.reset = h(
      "button.quiet.chart-reset",
      { type: "button", hidden: true, onclick: () => this.zoom(null, null) },
      "Reset zoom",
    );
    this.tableButton = h(
      "button.quiet",
      { type: "button", "aria-pressed": "false", onclick: () => this.toggleTable() },
      "Table",
    );
    this.tableArea = h("div.chart-table", {
      hidden: true,
      tabindex: "0",
      role: "region",
      "aria-label": `Numbers of ${title}`,
    });
    this.heading = h("h2", {}, visible(title, 120));
    this.element = h(
      "section.chart",
      { "aria-label": visible(title, 120) },
      h("div.chart-head", {}, this.heading, h("span.spring", {}), ...controls, this.reset, this.tableButton),
      note && h("p.muted.chart-note", { title: note }, note),
      this.legend,
      h("div.chart-frame", {}, this.area, this.empty),
      this.tableArea,
    );
  }

  /** Give the chart another title. */
  rename(title) {
    this.settings.title = title;
    setText(this.heading, visible(title, 120));
    setAttribute(this.element, "aria-label", visible(title, 120));
  }

  /** Show a scene. Calls between two frames of the screen are one. */
  draw(scene) {
    this.scene = scene;
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.paint();
    });
  }

  paint() {
    const { scene } = this;
    const zoomed = scene.x.from !== null;
    this.reset.hidden = !zoomed;
    this.writeEmpty();
    const shape = shapeOf(scene);
    if (this.u === null || shape !== this.shape) {
      this.shape = shape;
      this.rebuild();
    } else {
      this.u.setData(columnsOf(scene));
    }
    this.writeLegend();
    this.showValues();
    this.describe();
    // What is drawn, for scripts that look at the page.
    const [x] = this.u?.data ?? [[]];
    Object.assign(this.area.dataset, { points: x.length, first: x[0] ?? "", last: x[x.length - 1] ?? "" });
  }

  rebuild() {
    const width = this.area.clientWidth;
    this.u?.destroy();
    this.u = null;
    if (width === 0) return; // not on the page yet: `resize` comes back
    this.u = new uPlot(optionsOf(this, width, this.settings.height ?? 260), columnsOf(this.scene), this.area);
    allowTouch(this.u, (from, to) => this.zoom(from, to));
  }

  resize() {
    const width = this.area.clientWidth;
    if (!this.scene || width === 0) return;
    if (this.u === null) this.rebuild();
    else if (this.u.width !== width) this.u.setSize({ width, height: this.settings.height ?? 260 });
  }

  writeEmpty() {
    const { curves, dots = [], whiskers = [], empty = "No data yet." } = this.scene;
    const some = [...curves, ...dots, ...whiskers].some((item) =>
      item.y.some((value) => value !== null && value !== undefined),
    );
    this.empty.hidden = some;
    setText(this.empty, empty);
  }

  writeLegend() {
    const items = [...this.scene.curves, ...(this.scene.dots ?? []), ...(this.scene.whiskers ?? [])];
    const keys = items.map((item) => item.key);
    const order = JSON.stringify(keys.concat(items.map((item) => [item.label, item.colour, item.detail])));
    if (order !== this.legendOrder) {
      this.legendOrder = order;
      this.entries = new Map(
        items.map((item) => [item.key, legendEntry(item, !this.hidden.has(item.key), () => this.toggle(item.key))]),
      );
      this.legend.replaceChildren(...[...this.entries.values()].map((entry) => entry.element), this.where);
    }
  }

  toggle(key) {
    const show = this.hidden.delete(key);
    if (!show) this.hidden.add(key);
    this.entries.get(key)?.show(show);
    const member = this.members?.find((each) => each.key === key);
    if (member) this.u?.batch(() => member.all.forEach((index) => this.u.setSeries(index, { show })));
    this.u?.setData(this.u.data); // the range of y depends on what is shown
  }

  /** Write the values at the cursor, or the last ones, into the legend. */
  showValues() {
    if (!this.scene || !this.u) return;
    const { idx, idxs } = this.u.cursor;
    const write = this.settings.format ?? format.number;
    const inside = idx !== null && idx !== undefined;
    for (const [number, curve] of this.scene.curves.entries()) {
      const column = curve.values ?? null;
      const index = inside ? idxs?.[this.members[number].line] : null;
      const values = column ?? this.u.data[this.members[number].line];
      const value = inside ? (index === null || index === undefined ? null : values[index]) : lastOf(values);
      this.entries.get(curve.key)?.value(write(value));
    }
    for (const item of [...(this.scene.dots ?? []), ...(this.scene.whiskers ?? [])]) {
      this.entries.get(item.key)?.value(inside ? "" : (item.summary ?? write(lastOf(item.y))));
    }
    const { x } = this.scene;
    const at = this.scene.curves.length ? this.u.data[0][idx] : this.u.posToVal(this.u.cursor.left, "x");
    setText(this.where, inside ? `at ${x.format(at)} ${x.label}` : "");
  }

  /** Ask for another x range; nulls mean all of it. */
  zoom(from, to) {
    if (from === null) this.settings.onZoom?.(null, null);
    // A thousandth of the range is finer than a hand, and makes a short address.
    const digits = Math.max(0, 3 - Math.floor(Math.log10(to - from)));
    if (to > from) this.settings.onZoom?.(Number(from.toFixed(digits)), Number(to.toFixed(digits)));
  }

  key(event) {
    if (!this.u || event.ctrlKey || event.metaKey || event.altKey) return;
    const { min, max } = this.u.scales.x;
    const index = this.u.cursor.idx ?? null;
    const middle = index === null ? (min + max) / 2 : this.u.data[0][index];
    if (event.key === "ArrowLeft") this.moveCursor(index === null ? Infinity : index - (event.shiftKey ? 10 : 1));
    else if (event.key === "ArrowRight") this.moveCursor(index === null ? 0 : index + (event.shiftKey ? 10 : 1));
    else if (event.key === "+" || event.key === "=") this.zoom(middle - (max - min) / 4, middle + (max - min) / 4);
    else if (event.key === "-" && this.scene.x.from !== null)
      this.zoom(Math.max(0, middle - (max - min)), middle + (max - min));
    else if (event.key === "0") this.zoom(null, null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  moveCursor(index) {
    const { u } = this;
    const at = Math.max(0, Math.min(u.data[0].length - 1, index));
    if (u.data[0].length) u.setCursor({ left: u.valToPos(u.data[0][at], "x"), top: u.over.clientHeight / 2 });
  }

  toggleTable() {
    this.tableArea.hidden = !this.tableArea.hidden;
    setAttribute(this.tableButton, "aria-pressed", String(!this.tableArea.hidden));
    if (this.scene) fillTable(this.tableArea, this.scene, this.settings.format ?? format.number);
  }

  /** The text alternative: what is drawn, and its last values. */
  writeDescription() {
    const write = this.settings.format ?? format.number;
    const items = [...this.scene.curves, ...(this.scene.dots ?? []), ...(this.scene.whiskers ?? [])].slice(0, 12);
    const values = items.map((item) => `${visible(item.label, 60)} ${write(lastOf(item.values ?? item.y))}`).join(", ");
    const { x } = this.scene;
    const range = x.from === null ? "" : `, ${x.label} ${x.format(x.from)} to ${x.format(x.to)}`;
    const told = values ? `Last values: ${values}.` : "No data yet.";
    const text = `Chart of ${visible(this.settings.title, 120)} over ${x.label}${range}. ${told}`;
    setAttribute(this.area, "aria-label", text);
    if (!this.tableArea.hidden) fillTable(this.tableArea, this.scene, write);
  }

  destroy() {
    cancelAnimationFrame(this.frame);
    this.describe.cancel();
    this.sizes.disconnect();
    this.endTheme();
    this.u?.destroy();
    this.u = null;
    this.element.remove();
  }
}
