// Pages of DAGs: the form that triggers a run, and the log of a task. Text is never inserted as markup.
(() => {
  const root = document.documentElement;

  const form = document.querySelector("[data-trigger]");
  const openForm = () => { if (location.hash === "#trigger") document.getElementById("trigger")?.setAttribute("open", ""); };
  openForm();
  addEventListener("hashchange", openForm);

  const readConf = () => {
    const conf = {};
    for (const field of form.querySelectorAll("[data-param]")) {
      // Unchanged fields are not sent, so that the DAG's own defaults apply, whatever their types.
      if (field.value === field.dataset.start) continue;
      const name = field.dataset.param;
      try {
        conf[name] = field.dataset.kind === "json" ? JSON.parse(field.value) : field.value;
      } catch {
        throw new Error(`${name} is not valid JSON`);
      }
    }
    let more = {};
    try { more = JSON.parse(form.elements.conf.value || "{}"); } catch { throw new Error("the configuration is not valid JSON"); }
    if (more === null || typeof more !== "object" || Array.isArray(more)) throw new Error("the configuration must be a JSON object");
    return { ...conf, ...more };
  };

  const readDate = () => {
    const text = form.elements.logical.value.trim().replace(" ", "T");
    return text ? `${text.includes("T") ? text : `${text}T00:00`}Z` : null;
  };

  const post = (path, order) => fetch(root.dataset.prefix + path, {
    method: "POST", body: JSON.stringify(order),
    headers: { "X-CSRF-Token": root.dataset.csrf || "", "Content-Type": "application/json" },
  });

  // Lists that tasks are mapped over are sent in parts if they are long; the rest of the configuration is returned.
  // One with a schema can be checked as a whole only if it is shorter.
  const LONG = 64 * 1024, LONG_WITH_SCHEMA = 20 * 1024, MOST_VALUES = 1000, MOST_CHARACTERS = 200_000;
  const sendLists = async (order, tell) => {
    const random = crypto.getRandomValues(new Uint32Array(2));
    const stage = (random[0] % 2 ** 20) * 2 ** 32 + random[1] + 1;
    for (const [name, hasSchema] of Object.entries(JSON.parse(form.dataset.lists))) {
      const values = order.conf[name];
      if (!Array.isArray(values) || JSON.stringify(values).length < (hasSchema ? LONG_WITH_SCHEMA : LONG)) continue;
      delete order.conf[name];
      let first = 0;
      while (first < values.length) {
        let end = first, size = 0;
        while (end < values.length && end - first < MOST_VALUES && (end === first || size < MOST_CHARACTERS)) {
          size += JSON.stringify(values[end]).length;
          end += 1;
        }
        const response = await post(form.dataset.parts, { stage, name, first, values: values.slice(first, end) });
        if (!response.ok) throw new Error((await response.json()).detail);
        first = end;
        tell(`${name}: ${first} of ${values.length} values sent`);
      }
      order.lists = { ...order.lists, [name]: values.length };
      order.stage = stage;
    }
    return order;
  };

  form?.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    const label = button.textContent;
    button.disabled = true;
    try {
      const order = { conf: readConf(), logical_date: readDate(), run_id: form.elements.run_id.value.trim() || null, request: crypto.getRandomValues(new Uint32Array(4)).join("-") };
      await sendLists(order, (text) => { button.textContent = text; });
      const response = await post(form.dataset.trigger, order);
      const answer = await response.json();
      if (response.ok) {
        location.assign(root.dataset.prefix + form.dataset.runs + encodeURIComponent(answer.run.run_id));
        return;
      }
      tidemill.toast(answer.detail, "bad");
    } catch (error) {
      tidemill.toast(error instanceof TypeError ? "The server does not answer." : error.message, "bad");
    }
    button.textContent = label;
    button.disabled = false;
  });

  const log = document.querySelector("[data-log]");
  if (!log) return;
  const MOST_LINES = 20000;
  const state = document.getElementById("log-state");
  let cursor = "";

  const append = (rows) => {
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 30;
    const part = document.createDocumentFragment();
    for (const row of rows) {
      const line = document.createElement("span");
      line.className = `line level-${row.level}`;
      const time = document.createElement("time");
      time.textContent = new Date(row.at * 1000).toISOString().slice(11, 23);
      time.title = new Date(row.at * 1000).toISOString();
      const source = document.createElement("i");
      source.textContent = row.source;
      // Like a terminal: text after a carriage return overwrites the line, as progress bars do.
      const text = row.text.split("\n").map((each) => each.replace(/\r+$/, "").replace(/^.*\r/, "")).join("\n");
      line.append(time, " ", source, " ", text, "\n");
      part.append(line);
    }
    log.append(part);
    while (log.childElementCount > MOST_LINES) log.firstElementChild.remove();
    if (follows) log.scrollTop = log.scrollHeight;
  };

  // Callbacks may still run after their task has ended.
  const isOver = () => {
    const { tries, over } = document.getElementById("state").dataset;
    const shown = Number(log.dataset.try);
    return shown > 0 && (over === "1" || shown < Number(tries));
  };
  const describe = () => {
    const what = log.dataset.try === "0" ? "no output of callbacks" : "no output";
    if (isOver()) return log.childElementCount ? "this try has ended" : `${what}; this try has ended`;
    return log.childElementCount ? "following" : `${what} yet; following`;
  };

  const follow = async () => {
    let pause = 1000;
    if (!document.hidden) {
      try {
        const response = await fetch(log.dataset.log + (cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""));
        const answer = await response.json();
        if (response.ok) {
          append(answer.rows);
          cursor = answer.cursor || cursor;
          if (!answer.ended) pause = 0;
          else state.textContent = describe();
        } else {
          state.textContent = answer.detail;
          pause = 5000;
        }
      } catch {
        state.textContent = "no connection";
        pause = 5000;
      }
    }
    setTimeout(follow, pause);
  };
  follow();
})();
