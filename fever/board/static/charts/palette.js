// Colours of curves: those of Okabe and Ito, which people with any colour vision tell apart, darkened or lightened
// until they stand out from the background of either theme. css/base.css has the values.

import { colour } from "../core/theme.js";

const COLOURS = 8;
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];

/** The colour of the n-th curve, as the style sheet has it now. */
export function curveColour(index) {
  return colour(`--curve-${index % COLOURS}`);
}

/** Its dashes: curves beyond the number of colours are told apart by them. */
export function curveDash(index) {
  return DASHES[Math.floor(index / COLOURS) % DASHES.length];
}

/** A colour made transparent. The style sheet writes colours as #rrggbb. */
export function transparent(hex, alpha) {
  return `${hex}${Math.round(255 * alpha)
    .toString(16)
    .padStart(2, "0")}`;
}
