// Sets the theme before the first paint: the reader's choice, or the system's.
(() => {
  const stored = () => { try { return localStorage.getItem("tidemill-theme") || ""; } catch { return ""; } };
  const apply = (theme) => { document.documentElement.dataset.theme = theme; };
  apply(stored());
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-theme-switch]")) return;
    const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
    const shown = document.documentElement.dataset.theme || (isDark ? "dark" : "light");
    const theme = shown === "dark" ? "light" : "dark";
    try { localStorage.setItem("tidemill-theme", theme); } catch { /* the choice applies to this page only */ }
    apply(theme);
    document.dispatchEvent(new Event("theme"));
  });
})();
