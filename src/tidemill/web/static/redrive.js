// Starts a dry run from the form; the state below the form updates itself.
(() => {
  const form = document.querySelector("[data-redrive]");
  const lines = (name) => form.elements[name].value.split("\n").map((line) => line.trim()).filter(Boolean);
  const number = (name) => (form.elements[name].value === "" ? null : Number(form.elements[name].value));

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const order = {
      ids: lines("ids"), kinds: lines("kinds"), sinks: lines("sinks"), keys: lines("keys"),
      text: form.elements.text.value, since: form.elements.since.value.trim(), until: form.elements.until.value.trim(),
      to: form.elements.to.value.trim(), rate: number("rate"), limit: number("limit"),
      restart: form.elements.restart.checked,
    };
    const button = form.querySelector("button");
    button.disabled = true;
    try {
      const root = document.documentElement;
      const response = await fetch(root.dataset.prefix + form.dataset.redrive, {
        method: "POST", body: JSON.stringify(order),
        headers: { "X-CSRF-Token": root.dataset.csrf || "", "Content-Type": "application/json" },
      });
      const answer = await response.json();
      if (!response.ok) tidemill.toast(answer.detail, "bad");
    } catch {
      tidemill.toast("The server does not answer.", "bad");
    }
    button.disabled = false;
    button.focus();
  });
})();
