// Elements made from data. Whatever a run wrote becomes a text node or an attribute, never markup.

const SVG = "http://www.w3.org/2000/svg";

// Control characters, and characters that turn the direction of text or take no space: they would let one name
// look like another. They are shown as their code.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\uffff]/g;

/** The text with hidden characters as codes, cut to a length at which no layout suffers. */
export function visible(text, longest = 300) {
  const short = String(text).length > longest ? `${String(text).slice(0, longest - 1)}…` : String(text);
  return short.replace(HIDDEN, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** Whether a text has characters that a terminal might obey, or that are not seen. */
export function hasHidden(text) {
  return String(text).search(HIDDEN) >= 0 || /[\n\r\t]/.test(String(text));
}

/**
 * An element: h("button.quiet", {type: "button", onclick: f}, "text", child, …).
 * Attributes that are null or false are left out; functions named on… become listeners. There is deliberately no
 * way to give markup, and none to give a style (the security policy refuses style attributes).
 */
export function h(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An SVG element with attributes. */
export function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes ?? {})) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Text that a run wrote, kept apart from the direction of the text around it. */
export function theirs(text, longest) {
  return h("bdi", {}, visible(text, longest));
}

/** Set a text only if it differs: unchanged cells cost no layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an attribute only if it differs; null removes it. */
export function setAttribute(element, name, value) {
  if (value === null || value === undefined) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** A property that an object from the server itself has: names of metrics may be "constructor" or "__proto__". */
export function own(object, name) {
  return object && Object.hasOwn(object, name) ? object[name] : undefined;
}

/** Say something to people who use a screen reader. */
export function speak(text) {
  document.getElementById("spoken").textContent = text;
}

/** Call `action` at most once in `pause` milliseconds; the last call is never lost. */
export function throttled(pause, action) {
  let timer = null;
  let last = -Infinity;
  const run = () => {
    timer = null;
    last = performance.now();
    action();
  };
  const call = () => {
    if (timer === null) timer = setTimeout(run, Math.max(0, last + pause - performance.now()));
  };
  call.cancel = () => clearTimeout(timer);
  return call;
}

/** A button that copies a text and says that it did. */
export function copyButton(text) {
  const button = h("button.quiet.copy", { type: "button", "aria-label": `Copy: ${visible(text)}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      // Without HTTPS or permission there is no clipboard: mark the text, so that Ctrl-C copies it.
      getSelection().selectAllChildren(button.previousElementSibling ?? button);
      button.textContent = "Press Ctrl-C";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return button;
}
