// Questions to the server. Every answer is JSON; an error is one sentence.

import { join } from "./lists.js";

/** Thrown with the sentence that the user is to read. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/**
 * Ask the server: ask("series", {id, names: [...]}, signal). Lists are joined with commas, empty values left out.
 * Raises ServerError with a sentence, or the browser's AbortError.
 */
export async function ask(what, query = {}, signal) {
  const words = Object.entries(query)
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([key, value]) => `${key}=${encodeURIComponent(Array.isArray(value) ? join(value) : value)}`);
  let answer;
  try {
    answer = await fetch(`/api/${what}${words.length ? "?" : ""}${words.join("&")}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The board's server does not answer. Is `fever board` still running?", 0);
  }
  let content = null;
  try {
    content = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
  }
  if (!answer.ok || content === null) {
    throw new ServerError(content?.error ?? `The server answered with an error (${answer.status}).`, answer.status);
  }
  return content;
}

/** The address of a video or a picture of a run. */
export function fileAddress(id, name) {
  return `/file?id=${encodeURIComponent(id)}&name=${encodeURIComponent(name)}`;
}

/**
 * A question whose newer version makes older ones void: `latest(action)` calls `action(signal)` after it has
 * cancelled the call before, and gives undefined if it was itself cancelled.
 */
export function onlyLatest() {
  let controller = null;
  const latest = async (action) => {
    controller?.abort();
    const mine = (controller = new AbortController());
    try {
      const result = await action(mine.signal);
      return mine.signal.aborted ? undefined : result;
    } catch (error) {
      if (mine.signal.aborted) return undefined;
      throw error;
    }
  };
  latest.cancel = () => controller?.abort();
  return latest;
}
