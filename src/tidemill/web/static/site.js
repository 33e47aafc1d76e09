// Shared by all pages: times, filters, actions. Text is never inserted as markup.
(() => {
  const root = document.documentElement;
  // UTC, as in logs, files, filters and on the command line; the reader's own time is in the tooltip.
  const shorten = (within) => {
    const day = new Date().toISOString().slice(0, 10);
    for (const element of within.querySelectorAll("time[datetime]:not([title])")) {
      const at = new Date(element.dateTime);
      const [date, clock] = at.toISOString().split("T");
      element.title = at.toLocaleString(undefined, { timeZoneName: "short" });
      element.textContent = (date === day ? "" : `${date} `) + clock.slice(0, element.dataset.precision === "milliseconds" ? 12 : 8);
    }
  };

  // Like the server's templates: invisible and bidirectional control characters are shown as their code points.
  const visible = (text) => String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu, (char) => `\\u${char.codePointAt(0).toString(16).padStart(4, "0")}`);

  const toast = (text, tone) => {
    const element = document.createElement("p");
    element.className = `note ${tone}`;
    element.textContent = visible(text);
    document.querySelector(".toasts").append(element);
    setTimeout(() => element.remove(), 8000);
  };

  // Lengths of a pause; every pause ends by itself.
  const times = [["5 minutes", 300], ["15 minutes", 900], ["1 hour", 3600], ["4 hours", 14400], ["1 day", 86400]];

  const ask = (text, word, seconds) => new Promise((resolve) => {
    const dialog = document.createElement("dialog");
    const form = document.createElement("form");
    form.method = "dialog";
    const say = document.createElement("p");
    say.textContent = text;
    form.append(say);
    const input = document.createElement("input");
    const yes = Object.assign(document.createElement("button"), { textContent: "Yes", value: "yes", className: "main" });
    if (word) {
      const label = document.createElement("label");
      label.textContent = `Type “${word}” to confirm `;
      input.autocomplete = "off";
      label.append(input);
      form.append(label);
      yes.disabled = true;
      input.addEventListener("input", () => { yes.disabled = input.value !== word; });
    }
    const select = document.createElement("select");
    if (seconds) {
      const label = document.createElement("label");
      label.textContent = "For ";
      for (const [name, value] of times) select.append(new Option(name, value, false, String(value) === seconds));
      label.append(select);
      form.append(label);
    }
    const no = Object.assign(document.createElement("button"), { textContent: "No", value: "no", type: "button" });
    no.addEventListener("click", () => dialog.close("no"));
    const row = document.createElement("div");
    row.className = "row";
    row.append(yes, no);
    form.append(row);
    dialog.append(form);
    dialog.addEventListener("close", () => { dialog.remove(); resolve(dialog.returnValue === "yes" ? { seconds: Number(select.value), typed: input.value } : null); });
    document.body.append(dialog);
    dialog.showModal();
  });

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-action]");
    if (!button) return;
    const { ask: text, word, seconds, confirm } = button.dataset;
    const said = await ask(text, word, seconds);
    if (!said) return;
    const given = { ...(seconds ? { seconds: said.seconds } : {}), ...(confirm === undefined ? {} : { confirm: said.typed }) };
    const body = button.dataset.body || Object.keys(given).length ? { ...JSON.parse(button.dataset.body || "{}"), ...given } : null;
    button.disabled = true;
    try {
      const response = await fetch(root.dataset.prefix + button.dataset.action, {
        method: "POST",
        headers: { "X-CSRF-Token": root.dataset.csrf || "", ...(body ? { "Content-Type": "application/json" } : {}) },
        body: body && JSON.stringify(body),
      });
      const answer = await response.json();
      toast(response.ok ? answer.text : answer.detail, response.ok ? "good" : "bad");
    } catch {
      toast("The server does not answer.", "bad");
    }
    button.disabled = false;
  });

  document.addEventListener("input", (event) => {
    const selector = event.target.dataset && event.target.dataset.filter;
    if (!selector) return;
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const element of document.querySelectorAll(selector)) {
      const text = element.textContent.toLowerCase();
      element.hidden = !words.every((word) => text.includes(word));
    }
    for (const group of document.querySelectorAll("[data-filter-group]")) {
      group.hidden = !group.querySelector(`${selector}:not([hidden])`);
    }
  });

  // "/" focuses the search.
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input, textarea, select, dialog");
    if (event.key !== "/" || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    const search = document.querySelector("input[type=search]");
    const messages = document.querySelector("nav.links a[href$='/messages']");
    if (search || messages) event.preventDefault();
    if (search) search.focus();
    else if (messages) location.assign(`${messages.href}#search`);
  });
  if (location.hash === "#search") document.querySelector("input[type=search]")?.focus();

  // "Show more" replaces its own row: move the keyboard focus to the first new row.
  let pressed = null;
  document.addEventListener("htmx:beforeSwap", (event) => {
    const row = event.target.closest("tr.more");
    pressed = row && row.contains(document.activeElement) ? { body: row.parentElement, index: row.sectionRowIndex } : null;
  });
  document.addEventListener("htmx:afterSettle", () => {
    if (!pressed) return;
    pressed.body.rows[pressed.index]?.querySelector("a, button, input")?.focus();
    pressed = null;
  });

  // Signing out aborts pending requests and starts no more; they would be rejected while the page is being left.
  let isLeaving = false;
  document.querySelector("form.leave")?.addEventListener("submit", () => { isLeaving = true; window.stop(); });
  document.addEventListener("htmx:beforeRequest", (event) => { if (isLeaving) event.preventDefault(); });

  document.addEventListener("htmx:configRequest", (event) => {
    event.detail.headers["X-CSRF-Token"] = root.dataset.csrf || "";
  });
  document.addEventListener("htmx:afterSettle", (event) => shorten(event.target));
  document.addEventListener("htmx:responseError", () => toast("The server rejected the request; reload the page.", "bad"));
  document.addEventListener("htmx:sendError", () => toast("The server does not answer.", "bad"));

  // Keep a part while text in it is selected; otherwise keep its focus and scroll position.
  const replace = (part, html) => {
    const held = getSelection();
    if (!part || (held && !held.isCollapsed && part.contains(held.anchorNode))) return;
    const focused = part.contains(document.activeElement) ? document.activeElement : {};
    // A link without an id is identified by its address.
    const isSame = (one) => (focused.id ? one.id === focused.id : focused.href && one.href === focused.href);
    const findAlike = () => [...part.querySelectorAll("a, button, input, select, summary")].filter(isSame);
    const number = findAlike().indexOf(focused);
    const scrolled = [...part.querySelectorAll(".scroll")].map((element) => element.scrollLeft);
    part.innerHTML = html; // rendered by the server's templates, which escape all text
    shorten(part);
    part.querySelectorAll(".scroll").forEach((element, index) => { element.scrollLeft = scrolled[index] || 0; });
    findAlike()[number]?.focus({ preventScroll: true });
  };

  // Slow parts are loaded after the page, and reloaded periodically. A part with data-every is in the page already; it
  // is marked while its data is stale.
  for (const part of document.querySelectorAll("[data-load]")) {
    const seconds = Number(part.dataset.every || 0);
    const mark = (isOld) => {
      const badge = seconds && document.querySelector(".live");
      if (!badge) return;
      badge.dataset.state = isOld ? "lost" : "on";
      badge.lastElementChild.textContent = isOld ? "no connection" : "live";
      document.body.classList.toggle("stale", isOld);
    };
    const load = async () => {
      if (document.hidden || isLeaving) return;
      try {
        const response = await fetch(part.dataset.load, { redirect: "error" });
        if (response.ok) replace(part, await response.text());
        mark(!response.ok);
      } catch { mark(true); /* retry at the next interval */ }
    };
    if (seconds) document.addEventListener("visibilitychange", load);
    else load();
    setInterval(load, (seconds || 10) * 1000);
  }

  window.tidemill = { replace, shorten, toast, visible };
  shorten(document);
})();
