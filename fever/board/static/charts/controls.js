// Controls above charts that say what is drawn: x axis and smoothing. They write the address; the view reads it.

import { h, setAttribute, setText } from "../core/dom.js";
import { go, replace } from "../core/route.js";

const AXES = [
  ["steps", "Steps"],
  ["seconds", "Time"],
  ["episodes", "Episodes"],
];

/** {element, show({x, smooth}), zoomed(text)}. */
export function controls() {
  const buttons = AXES.map(([name, label]) =>
    // Another x axis has other numbers: the zoom ends.
    h(
      "button",
      {
        type: "button",
        "data-x": name,
        onclick: () => go({ x: name === "steps" ? null : name, from: null, to: null }),
      },
      label,
    ),
  );
  const slider = h("input", {
    type: "range",
    min: "0",
    max: "0.99",
    step: "0.01",
    "aria-label": "Smoothing",
    oninput: () => replace({ smooth: slider.value === "0" ? null : slider.value }),
  });
  const value = h("output", {}, "0");
  const state = h("span.muted", { role: "status" });
  const element = h(
    "div.controls",
    {},
    h("span.segments", { role: "group", "aria-label": "x axis" }, ...buttons),
    h("label.inline", { title: "exponential moving average; the raw curve stays, faint" }, "Smoothing", slider, value),
    state,
  );
  return {
    element,
    show({ x, smooth }) {
      for (const button of buttons) setAttribute(button, "aria-pressed", String(button.dataset.x === x));
      slider.value = smooth;
      setText(value, String(smooth));
    },
    zoomed(text) {
      setText(state, text);
    },
  };
}
