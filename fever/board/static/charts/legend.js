// One entry of a legend: a button that shows and hides a curve, with its colour and its value.

import { h, setAttribute, setText, theirs } from "../core/dom.js";

/** {element, value(text), show(bool)} for a curve, points or marks of a scene. */
export function legendEntry(item, shown, onToggle) {
  const value = h("span.legend-value", {});
  const swatch = h("span.swatch", { "data-colour": typeof item.colour === "number" ? item.colour % 8 : null });
  if (typeof item.colour === "string") swatch.style.setProperty("--own", `var(${item.colour})`);
  if (item.shape) swatch.classList.add(item.shape);
  if (typeof item.colour === "number" && item.colour >= 8) swatch.classList.add("dashed");
  const element = h(
    "button.legend-entry",
    { type: "button", "aria-pressed": String(shown), title: item.detail ?? null, onclick: onToggle },
    swatch,
    h("span.legend-label", {}, theirs(item.label, 60)),
    value,
  );
  return {
    element,
    value: (text) => setText(value, text),
    show: (visible) => setAttribute(element, "aria-pressed", String(visible)),
  };
}
