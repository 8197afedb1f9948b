// Lists of names in one value of an address. Names may have commas of their own.

/** ["a", "b,c"] -> "a,b%2Cc" */
export function join(names) {
  return names.map((name) => name.replaceAll("%", "%25").replaceAll(",", "%2C")).join(",");
}

/** "a,b%2Cc" -> ["a", "b,c"] */
export function split(text) {
  return (text ?? "")
    .split(",")
    .filter(Boolean)
    .map((name) => name.replaceAll("%2C", ",").replaceAll("%25", "%"));
}
