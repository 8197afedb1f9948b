// Smoothing of curves.

/**
 * Exponential moving average with debiasing: early values are not drawn towards zero, since the weights so far are
 * divided by their sum. `weight` is between 0 (the curve itself) and 1. Missing values stay missing.
 */
export function smooth(values, weight) {
  if (!weight) return values;
  let average = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    average = weight * average + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return average / total;
  });
}

/**
 * The value of `y` at each of `at`, linearly between the points (x, y); x ascends. Outside of x it is the nearest
 * end's. Gives a function, since callers ask for many.
 */
export function interpolation(x, y) {
  return (at) => {
    if (!x.length) return null;
    let low = 0;
    let high = x.length - 1;
    if (at <= x[0]) return y[0];
    if (at >= x[high]) return y[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] <= at) low = middle;
      else high = middle;
    }
    const share = (at - x[low]) / (x[high] - x[low] || 1);
    return y[low] + share * (y[high] - y[low]);
  };
}

/** The last value that is not missing, or null. */
export function lastOf(values) {
  for (let index = (values?.length ?? 0) - 1; index >= 0; index -= 1) {
    if (values[index] !== null && values[index] !== undefined) return values[index];
  }
  return null;
}

/** Least and greatest of the values whose x is within [from, to]; [Infinity, -Infinity] if there is none. */
export function extent(values, x, from = -Infinity, to = Infinity) {
  let low = Infinity;
  let high = -Infinity;
  for (let index = 0; index < values.length; index += 1) {
    const value = values[index];
    if (value === null || value === undefined || x[index] < from || x[index] > to) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}
