// What all pages share: times in the reader's zone, filters, actions. Text is only ever set as text.
(() => {
  const root = document.documentElement;
  const zone = new Intl.DateTimeFormat(undefined, {
    year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit",
    hour12: false,
  });
  const today = new Intl.DateTimeFormat(undefined, {
    hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false,
  });

  const localize = (within) => {
    for (const element of within.querySelectorAll("time[datetime]:not([title])")) {
      const at = new Date(element.dateTime);
      element.title = element.textContent;
      const isToday = at.toDateString() === new Date().toDateString();
      const milliseconds = element.dataset.precision === "milliseconds" ? `.${String(at.getMilliseconds()).padStart(3, "0")}` : "";
      element.textContent = (isToday ? today : zone).format(at) + milliseconds;
    }
  };

  const toast = (text, tone) => {
    const element = document.createElement("p");
    element.className = `note ${tone}`;
    element.textContent = text;
    document.querySelector(".toasts").append(element);
    setTimeout(() => element.remove(), 8000);
  };

  // How long a pause may last: it always ends by itself.
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
      label.textContent = `Type ${word} to confirm `;
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
    dialog.addEventListener("close", () => { dialog.remove(); resolve(dialog.returnValue === "yes" ? { seconds: Number(select.value) } : null); });
    document.body.append(dialog);
    dialog.showModal();
  });

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-action]");
    if (!button) return;
    const { ask: text, word, seconds } = button.dataset;
    const said = await ask(text, word, seconds);
    if (!said) return;
    const body = button.dataset.body || seconds ? { ...JSON.parse(button.dataset.body || "{}"), ...(seconds ? said : {}) } : null;
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

  // "/" leads to the search, as elsewhere.
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input, textarea, select, dialog");
    if (event.key !== "/" || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    const search = document.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.focus(); }
  });

  document.addEventListener("htmx:configRequest", (event) => {
    event.detail.headers["X-CSRF-Token"] = root.dataset.csrf || "";
  });
  document.addEventListener("htmx:afterSettle", (event) => localize(event.target));
  document.addEventListener("htmx:responseError", () => toast("The server refused; reload the page.", "bad"));
  document.addEventListener("htmx:sendError", () => toast("The server does not answer.", "bad"));

  window.tidemill = { localize, toast };
  localize(document);
})();
