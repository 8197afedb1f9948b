// Runs before the first paint, so that no page in the other theme flashes. A classic script for that reason.
{
  const root = document.documentElement;
  let choice = null;
  try {
    choice = localStorage.getItem("fever-theme");
  } catch {
    // Storage is switched off: the system's theme is used.
  }
  root.dataset.choice = choice === "dark" || choice === "light" ? choice : "system";
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = root.dataset.choice === "system" ? (dark ? "dark" : "light") : root.dataset.choice;
}
