// The page: which view the address asks for, the keys that work everywhere, and the state of the connection.

import { setAttribute, setText, speak, visible } from "./core/dom.js";
import { tick } from "./core/format.js";
import { live } from "./core/live.js";
import { link, parse } from "./core/route.js";
import { store } from "./core/store.js";
import { changeTheme, startTheme } from "./core/theme.js";
import { CompareView } from "./compare/view.js";
import { ListView } from "./list/view.js";
import { RunView } from "./run/view.js";

// A view is made for one element, shows queries (`show(query)`) until it is closed, and may use keys (`key(event)`).
const VIEWS = { runs: ListView, run: RunView, compare: CompareView };

const main = document.getElementById("main");
const help = document.getElementById("help");
let current = null; // {name, id, view}
let searching = false; // the list is to open with the focus in its search
let lastList = link("runs"); // where Esc goes back to, with its search and filters

function route() {
  const { view: asked, id, query } = parse(location.hash);
  const name = Object.hasOwn(VIEWS, asked) ? asked : "runs";
  if (name === "runs") lastList = location.hash || link("runs");
  if (current?.name !== name || current.id !== id) {
    const first = current === null;
    current?.view.close();
    main.replaceChildren();
    main.className = name;
    current = { name, id, view: new VIEWS[name](main, id) };
    current.view.show(query);
    if (!first) {
      // A new view: keyboards and screen readers begin at its heading.
      if (searching) {
        current.view.focusSearch?.();
      } else if (!current.view.restore?.()) {
        scrollTo(0, 0);
        main.querySelector("h1")?.focus({ preventScroll: true });
      }
      searching = false;
      speak(document.title.replace(" · fever board", ""));
    }
  } else {
    current.view.show(query);
  }
}

function typing(element) {
  return element?.matches?.("input:not([type=checkbox]):not([type=range]), textarea, select") ?? false;
}

function key(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (help.open) {
    // Browsers close a dialog some time after the key; until then a second Escape would go to it, too.
    if (event.key !== "Escape") return;
    help.close();
    event.preventDefault();
    return;
  }
  const { target } = event;
  if (event.key === "Escape" && typing(target) && target.value && target.type === "search") return; // clears it
  if (typing(target) && event.key !== "Escape") return;
  if (event.key === "?") help.showModal();
  else if (event.key === "t") changeTheme();
  else if (event.key === "/") toSearch();
  else if (current.view.key?.(event)) event.preventDefault();
  else if (event.key === "Escape" && current.name !== "runs") location.hash = lastList;
  else if (event.key === "Escape") target.blur?.();
  else return;
  if (event.key === "/") event.preventDefault();
}

function toSearch() {
  searching = current.name !== "runs";
  if (searching)
    location.hash = lastList; // `route` goes on when the browser tells of the new address
  else current.view.focusSearch();
}

function showConnection(state) {
  const connection = document.getElementById("connection");
  const texts = { live: "live", lost: "connection lost, trying again …", wait: "" };
  connection.dataset.state = state;
  setText(connection, texts[state]);
}

function showFolder() {
  const folder = document.getElementById("folder");
  setText(folder, visible(store.folder, 200));
  setAttribute(folder, "title", visible(store.folder, 1000));
}

startTheme();
document.getElementById("help-button").addEventListener("click", () => help.showModal());
help.addEventListener("click", (event) => event.target === help && help.close()); // a click beside it
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // "#main" is no view
  main.focus();
});
document.addEventListener("keydown", key);
live.listen({ afresh: () => showConnection("live"), lost: () => showConnection("lost") });
store.listen(showFolder);
showConnection("wait");
addEventListener("hashchange", route);
setInterval(() => document.hidden || tick(), 10000); // "5 min ago" becomes "6 min ago"
route();
