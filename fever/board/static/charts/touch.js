// Zooming with a finger: uPlot knows the mouse only. A finger that moves sideways selects, as a mouse that drags;
// one that moves up or down scrolls the page (css/chart.css, touch-action). A tap reads the values there.

const LEAST = 24; // pixels that select; less is a tap

/** Let fingers select in a uPlot; `onSelect(from, to)` gets the range in values of x. */
export function allowTouch(u, onSelect) {
  const { over } = u;
  let begin = null;
  const placeOf = (event) => Math.max(0, Math.min(over.clientWidth, event.clientX - over.getBoundingClientRect().left));
  const select = (left, width) => u.setSelect({ left, top: 0, width, height: over.clientHeight }, false);
  over.addEventListener("pointerdown", (event) => {
    begin = event.pointerType === "touch" && event.isPrimary ? placeOf(event) : null;
  });
  over.addEventListener("pointermove", (event) => {
    if (begin === null || !event.isPrimary) return;
    const place = placeOf(event);
    select(Math.min(begin, place), Math.abs(place - begin));
  });
  over.addEventListener("pointerup", (event) => {
    if (begin === null || !event.isPrimary) return;
    const [left, right] = [begin, placeOf(event)].sort((a, b) => a - b);
    begin = null;
    select(0, 0);
    if (right - left >= LEAST) onSelect(u.posToVal(left, "x"), u.posToVal(right, "x"));
    else u.setCursor({ left, top: over.clientHeight / 2 });
  });
  over.addEventListener("pointercancel", () => {
    begin = null;
    select(0, 0);
  });
}
