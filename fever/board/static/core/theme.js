// Dark and light: the system's choice unless the button says otherwise, which is kept in this browser.

import { svg } from "./dom.js";

const SYSTEM = matchMedia("(prefers-color-scheme: dark)");
const NAMES = { system: "as the system", light: "light", dark: "dark" };
const listeners = new Set();

const root = document.documentElement; // its attributes are first set by early_theme.js

/** Call `listener` when colours change; gives a function that ends that. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** The value of a colour of the style sheet, such as "--line", for what is drawn on a canvas. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** The next of system, light, dark. */
export function changeTheme() {
  const names = Object.keys(NAMES);
  const next = (root.dataset.choice = names[(names.indexOf(root.dataset.choice) + 1) % names.length]);
  try {
    if (next === "system") localStorage.removeItem("fever-theme");
    else localStorage.setItem("fever-theme", next);
  } catch {
    // Storage is switched off: the choice holds until the page is left.
  }
  apply();
}

const ICONS = {
  system: "M3 4h14v9H3zM7 17h6M10 13v4",
  light:
    "M10 6.5a3.5 3.5 0 1 0 0 7a3.5 3.5 0 0 0 0-7M10 1.5v2M10 16.5v2M1.5 10h2M16.5 10h2M4 4l1.4 1.4M14.6 14.6L16 16M4 16l1.4-1.4M14.6 5.4L16 4",
  dark: "M16.5 12.2A7 7 0 0 1 7.8 3.5a7 7 0 1 0 8.700 8.700z",
};

function apply() {
  const { choice } = root.dataset;
  root.dataset.theme = choice === "system" ? (SYSTEM.matches ? "dark" : "light") : choice;
  const button = document.getElementById("theme");
  button.replaceChildren(svg("svg", { viewBox: "0 0 20 20", class: "icon" }, svg("path", { d: ICONS[choice] })));
  button.title = `Theme: ${NAMES[choice]} (t)`;
  button.setAttribute("aria-label", button.title);
  for (const listener of listeners) listener();
}

/** Connect the button. */
export function startTheme() {
  document.getElementById("theme").addEventListener("click", changeTheme);
  SYSTEM.addEventListener("change", apply);
  apply();
}
