// Keeps a page current: the server renders changed parts once for all clients, and sends them.
(() => {
  const badge = document.querySelector("[data-live]");
  let source = null;
  let latest = 0;

  const show = (state, text) => {
    badge.dataset.state = state;
    badge.lastElementChild.textContent = text;
    document.body.classList.toggle("stale", state === "lost");
  };

  const open = () => {
    if (source) return;
    source = new EventSource(badge.dataset.live);
    source.addEventListener("open", () => { latest = Date.now(); show("on", "live"); document.dispatchEvent(new Event("live")); });
    source.addEventListener("error", () => {
      show("lost", "no connection");
      // The login or the server has ended; the browser does not reconnect by itself.
      if (source.readyState === EventSource.CLOSED) { close(); setTimeout(open, 5000); }
    });
    source.addEventListener("missed", (event) => {
      show("on", `live, ${JSON.parse(event.data).updates} updates skipped`);
      document.dispatchEvent(new Event("live"));
    });
    source.addEventListener("point", (event) => {
      latest = Date.now();
      if (badge.dataset.state !== "on") show("on", "live");
      document.dispatchEvent(new CustomEvent("point", { detail: JSON.parse(event.data) }));
    });
    for (const id of ["head", "tiles", "engines", "partitions", "sinks", "slowest", "hooks", "triggers", "streams"]) {
      source.addEventListener(id, (event) => tidemill.replace(document.getElementById(id), event.data));
    }
  };

  const close = () => { source?.close(); source = null; };

  // A hidden tab must not cost the server anything.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { close(); show("off", "paused"); } else open();
  });
  setInterval(() => {
    const seconds = Math.round((Date.now() - latest) / 1000);
    if (source && latest && seconds > 5) show("lost", `${seconds} s old`);
  }, 1000);
  open();
})();
