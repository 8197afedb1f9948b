// Numbers, durations and times as people read them.

import { h, setText } from "./dom.js";

/** A value with about four digits: 481.5, 0.0003, 12.3k, 1.2M; "–" where there is none. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  for (const [limit, unit] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e4, "k"],
  ]) {
    // What would round up to 1000k is written as 1M.
    if (size >= limit * (limit === 1e4 ? 1 : 0.99995)) {
      return `${trim(value / (limit === 1e4 ? 1e3 : limit), 1)}${unit}`;
    }
  }
  if (size >= 1000) return trim(value, 0);
  if (size >= 100) return trim(value, 1);
  if (size >= 0.01) return Number(value.toPrecision(3)).toString();
  return size < 1e-4 ? value.toExponential(2).replace(/\.?0+e/, "e") : Number(value.toPrecision(3)).toString();
}

function trim(value, digits) {
  return Number(value.toFixed(digits)).toString();
}

/** A count: 950, 24.6k, 1.2M. */
export function count(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return Math.abs(value) < 1000 || Math.abs(value) >= 1e4 ? number(Math.round(value)) : `${trim(value / 1e3, 1)}k`;
}

/** Seconds: 8.3 s, 3 m 20 s, 2 h 10 m, 4 d 3 h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 60) return `${trim(seconds, seconds < 10 ? 1 : 0)} s`;
  const whole = Math.floor(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 86400)
    return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} m`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** The same without a last part that is zero: 5 m, 2 h. */
export function shortDuration(seconds) {
  return duration(seconds).replace(/ 00? [ms]$| 0 h$/, "");
}

/** Bytes: 820 kB, 4.2 MB. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1e6) return `${Math.max(1, Math.round(value / 1e3))} kB`;
  return value < 1e9 ? `${(value / 1e6).toFixed(1)} MB` : `${(value / 1e9).toFixed(1)} GB`;
}

/** A share between 0 and 1 as a percentage. */
export function percent(value) {
  return value === null || value === undefined ? "–" : `${trim(100 * value, value < 0.1 ? 1 : 0)} %`;
}

let ahead = 0; // seconds that the server's clock is ahead of this computer's

/** Learn the server's clock from the `now` of an answer. */
export function setClock(now) {
  if (Number.isFinite(now)) ahead = now - Date.now() / 1000;
}

/** Seconds since a moment, by the server's clock. */
export function since(moment) {
  return Math.max(0, Date.now() / 1000 + ahead - moment);
}

/** A moment relative to now: "just now", "40 s ago", "5 min ago", "3 h ago", "12 days ago". */
export function ago(moment) {
  const seconds = since(moment);
  if (seconds < 10) return "just now";
  if (seconds < 60) return `${10 * Math.floor(seconds / 10)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  const days = Math.floor(seconds / 86400);
  return days === 1 ? "yesterday" : `${days} days ago`;
}

/** A <time> that says how long ago a moment was, and the moment in its title. It is kept up to date by `tick`. */
export function moment(seconds) {
  const element = h("time", {});
  setMoment(element, seconds);
  return element;
}

/** Give a <time> another moment; null empties it. */
export function setMoment(element, seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) {
    delete element.dataset.at;
    setText(element, "–");
    return;
  }
  if (element.dataset.at !== String(seconds)) {
    const date = new Date(1000 * seconds);
    element.dataset.at = seconds;
    element.dateTime = date.toISOString();
    element.title = date.toLocaleString();
  }
  setText(element, ago(seconds));
}

/** Renew the texts of all moments on the page. */
export function tick() {
  for (const element of document.querySelectorAll("time[data-at]")) setText(element, ago(Number(element.dataset.at)));
}
