// The fragment of the address says what is shown, so that every view is a link: #/run/ID?x=steps&from=10&to=20

/** A fragment as {view, id, query}; `query` is a Map of texts. */
export function parse(fragment) {
  const [path, words = ""] = fragment.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [view, ...rest] = path.split("/");
  return { view: view || "runs", id: decode(rest.join("/")), query: new Map(new URLSearchParams(words)) };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a link that somebody cut in the middle of a character
  }
}

/** The fragment of a view; null and empty values are left out. */
export function link(view, id, query = {}) {
  const words = Object.entries(query)
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([key, value]) => `${key}=${encodeURIComponent(value).replaceAll("%2C", ",").replaceAll("%2F", "/")}`);
  return `#/${view}${id ? `/${encodeURIComponent(id)}` : ""}${words.length ? "?" : ""}${words.join("&")}`;
}

/** The current view with some values changed (null removes one). */
export function changed(changes) {
  const { view, id, query } = parse(location.hash);
  return link(view, id, { ...Object.fromEntries(query), ...changes });
}

/** Show the current view with changed values, as a new step of the browser's history. */
export function go(changes) {
  const next = changed(changes);
  if (next !== location.hash) location.hash = next;
}

/** The same without a new step: for what changes while one types or drags. */
export function replace(changes) {
  const next = changed(changes);
  if (next === location.hash) return;
  history.replaceState(history.state, "", next);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

/** A number of the query, or null. */
export function numberOf(query, name) {
  const value = query.get(name);
  return value === undefined || value === "" || !Number.isFinite(Number(value)) ? null : Number(value);
}
