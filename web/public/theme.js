// Runs before the first paint, so that a chosen theme never flashes the other one. src/lib/theme.ts does the rest.
try {
  const theme = localStorage.getItem("ponder.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be forbidden; the system's preference holds then.
}
