// Starts a probe from the form; the state below the form updates itself.
(() => {
  const form = document.querySelector("[data-probe]");
  const { source, partition, offset, key, nokey, encoding, value, headers } = form.elements;
  const pasted = form.querySelector(".pasted");

  const show = () => {
    pasted.hidden = pasted.disabled = source.value === "recorded";
    value.disabled = encoding.value === "none";
  };
  key.addEventListener("input", () => { nokey.checked = false; });
  form.addEventListener("change", show);
  show();

  const split = (line) => {
    const at = line.indexOf(":");
    return at < 0 ? { name: line.trim(), value: null } : { name: line.slice(0, at).trim(), value: line.slice(at + 1).trim() };
  };

  const read = () => {
    const position = { partition: Number(partition.value), offset: Number(offset.value) };
    if (source.value === "recorded") return { recorded: true, ...position };
    return {
      ...position,
      key: nokey.checked ? null : key.value,
      value: encoding.value === "none" ? null : value.value,
      encoding: encoding.value === "base64" ? "base64" : "text",
      headers: headers.value.split("\n").filter((line) => line.trim()).map(split),
    };
  };

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    button.disabled = true;
    try {
      const root = document.documentElement;
      const response = await fetch(root.dataset.prefix + form.dataset.probe, {
        method: "POST", body: JSON.stringify(read()),
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
