// The live page: a lane per executor. The server sends updates once a second. Text is never inserted as markup.
(() => {
  const KEPT = 60; // seconds that the lanes show
  const MOST_BARS = 3000;
  const element = (id) => document.getElementById(id);
  const badge = document.querySelector("[data-updates]");
  const lanes = element("lanes");
  const prefix = document.documentElement.dataset.prefix || "";
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  let source = null;
  let picture = null; // the newest update
  let number = null; // of the last applied update; null: fetch the whole state
  let skew = 0; // the browser's clock minus the server's, in seconds
  let origin = 0; // the time at the left end of all tracks
  let isFrozen = false;
  let isFetching = false;
  let latest = 0;
  const tracks = new Map(); // "engine.executor" -> the track of its lane
  const bars = new Map(); // id of a task that has ended -> its bar
  const running = new Map(); // "engine.executor" -> the bar of the running task

  const now = () => Date.now() / 1000 - skew;
  const scale = () => Math.max(1, (lanes.clientWidth - 64) / KEPT);
  const show = (state, text) => { badge.dataset.state = state; badge.lastElementChild.textContent = text; };
  const duration = (seconds) => seconds < 1 ? `${Math.round(seconds * 1000)} ms`
    : seconds < 60 ? `${seconds.toFixed(1)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  const position = (task) => task.offset < 0 ? `${task.topic}:${task.partition}` : `${task.topic}:${task.partition}:${task.offset}`;

  const describe = (task) => {
    const parts = [task.task_id, position(task), `attempt ${task.attempt}`];
    if (task.label) parts.push(task.label);
    if (task.outcome) parts.push(task.outcome === "ok" ? "ok" : `failed (${task.outcome})`, duration(task.seconds));
    else parts.push(`running for ${duration(Math.max(0, now() - task.at))}`);
    if (task.of > 1) parts.push(`1 of ${task.of} tasks`);
    return tidemill.visible(parts.join(" · "));
  };

  const link = (path, text) => Object.assign(document.createElement("a"), { href: `${prefix}${path}`, textContent: tidemill.visible(text) });
  const taskLink = (task) => link(`/tasks?task=${encodeURIComponent(task.task_id)}`, task.task_id);
  const messageLink = (topic, partition, offset, text) => offset < 0 ? document.createTextNode(text)
    : link(`/messages/${encodeURIComponent(topic)}/${partition}/${offset}`, text);

  const findTrack = (engine, executor) => {
    const key = `${engine}.${executor}`;
    if (tracks.has(key)) return tracks.get(key);
    const lane = document.createElement("div");
    const name = document.createElement("span");
    const frame = document.createElement("div");
    const track = document.createElement("div");
    lane.className = "lane";
    frame.className = "frame";
    track.className = "track";
    name.textContent = key;
    name.title = `engine ${engine}, executor ${executor}`;
    lane.dataset.order = engine * 100000 + executor;
    frame.append(track);
    lane.append(name, frame);
    const after = [...lanes.children].find((other) => Number(other.dataset.order) > Number(lane.dataset.order));
    lanes.insertBefore(lane, after || null);
    tracks.set(key, track);
    return track;
  };

  const lay = (bar) => {
    const { task } = bar;
    const seconds = task.outcome ? task.seconds : Math.max(0, now() - task.at);
    bar.style.left = `${(task.at - origin) * scale()}px`;
    const width = Math.max(3, seconds * scale());
    bar.style.width = `${width}px`;
    bar.classList.toggle("narrow", width < 28); // no room for a label
  };

  const draw = (task) => {
    const bar = document.createElement("a");
    bar.className = `task ${task.outcome === "" ? "running" : task.outcome === "ok" ? "ok" : "failed"}`;
    bar.href = `${prefix}/tasks?task=${encodeURIComponent(task.task_id)}`;
    bar.tabIndex = -1;
    bar.textContent = tidemill.visible((task.of > 1 ? `1 of ${task.of}: ` : "") + (task.label || task.task_id));
    bar.task = task;
    lay(bar);
    findTrack(task.engine, task.executor).append(bar);
    return bar;
  };

  // One tab stop per lane; arrow keys move within it.
  const setStops = () => {
    for (const track of tracks.values()) {
      const focused = track.contains(document.activeElement) ? document.activeElement : track.lastElementChild;
      for (const bar of track.children) bar.tabIndex = bar === focused ? 0 : -1;
    }
  };

  const removeOld = () => {
    const since = now() - KEPT - 2;
    let over = bars.size - MOST_BARS;
    for (const [id, bar] of bars) {
      if ((bar.task.at + bar.task.seconds < since || over-- > 0) && bar !== document.activeElement) { bar.remove(); bars.delete(id); }
    }
  };

  const fill = (id, rows) => {
    element(id).replaceChildren(...rows.map((cells) => {
      const row = document.createElement("tr");
      for (const [content, isNumber] of cells) {
        const cell = document.createElement("td");
        if (isNumber) cell.className = "n";
        cell.append(content);
        row.append(cell);
      }
      return row;
    }));
  };

  const list = () => {
    const at = now();
    const sum = (name) => picture.engines.reduce((total, engine) => total + engine[name], 0);
    element("running-count").textContent = `${sum("running")} of ${sum("executors")} busy`;
    element("waiting-count").textContent = String(sum("queued"));
    element("backing-off-count").textContent = String(sum("retrying"));
    element("windows-count").textContent = String(picture.windows.length);
    element("left-out").textContent = picture.left_out ? `${picture.left_out} ended tasks are not shown` : "";
    const message = (task) => messageLink(task.topic, task.partition, task.offset, position(task));
    fill("waiting", picture.waiting.map((task) => [[taskLink(task)], [message(task)], [duration(Math.max(0, at - task.at)), true]]));
    fill("backing-off", picture.backing_off.map((task) => [
      [taskLink(task)], [message(task)], [String(task.attempt), true], [duration(Math.max(0, task.at - at)), true],
    ]));
    fill("windows", picture.windows.map((one) => [
      [`${one.topic}/${one.partition}`],
      [messageLink(one.topic, one.partition, one.first, String(one.first))],
      [String(one.messages), true], [String(one.tasks), true], [duration(Math.max(0, at - one.at)), true],
    ]));
  };

  const apply = (next) => {
    picture = next;
    skew = Date.now() / 1000 - next.at;
    if (!origin || now() - origin > 3600) { origin = now() - KEPT; bars.forEach(lay); }
    for (const engine of next.engines) for (let number = 0; number < Math.min(engine.executors, 256); number += 1) findTrack(engine.slot, number);
    for (const task of next.ended) if (!bars.has(task.id)) bars.set(task.id, draw(task));
    const busy = new Set();
    for (const task of next.running) {
      const key = `${task.engine}.${task.executor}`;
      busy.add(key);
      const bar = running.get(key);
      if (bar && bar.task.task_id === task.task_id && bar.task.attempt === task.attempt) continue;
      bar?.remove();
      running.set(key, draw(task));
    }
    for (const [key, bar] of running) if (!busy.has(key)) { bar.remove(); running.delete(key); }
    removeOld();
    setStops();
    list();
  };

  const fetchAll = async () => {
    if (isFetching) return;
    isFetching = true;
    try {
      const answer = await fetch(badge.dataset.all, { headers: { Accept: "application/json" } });
      if (!answer.ok) throw new Error(String(answer.status));
      const all = await answer.json();
      number = all.number;
      if (!isFrozen) apply(all);
    } catch { show("lost", "no connection"); } finally { isFetching = false; }
  };

  const take = (next) => {
    latest = Date.now();
    if (badge.dataset.state !== "on" && !isFrozen) show("on", "live");
    if (isFrozen) { number = null; return; } // fetched again on resume
    if (number === null || next.number > number + 1) { fetchAll(); return; }
    if (next.number <= number) return;
    number = next.number;
    apply(next);
  };

  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource(badge.dataset.updates);
    source.addEventListener("open", () => { latest = Date.now(); number = null; show("on", "live"); });
    source.addEventListener("tasks", (event) => take(JSON.parse(event.data)));
    source.addEventListener("missed", (event) => {
      element("missed").hidden = false;
      element("missed").textContent = `This page is too slow; ${JSON.parse(event.data).updates} updates were skipped.`;
      setTimeout(() => { element("missed").hidden = true; }, 10000);
    });
    source.addEventListener("error", () => {
      show("lost", "no connection");
      if (source.readyState === EventSource.CLOSED) { close(); setTimeout(open, 5000); }
    });
  };
  const close = () => { source?.close(); source = null; };

  // The lanes stop moving while the pointer or the focus is on them.
  const isHeld = () => isFrozen || lanes.matches(":hover") || lanes.contains(document.activeElement);
  const move = () => {
    if (!origin || isHeld()) return;
    lanes.style.setProperty("--shift", `${(origin + KEPT - now()) * scale()}px`);
    running.forEach(lay);
  };

  const say = (event) => {
    const bar = event.target.closest?.(".task");
    if (bar) { element("detail").textContent = describe(bar.task); bar.title = describe(bar.task); }
  };
  lanes.addEventListener("mouseover", say);
  lanes.addEventListener("focusin", say);
  lanes.addEventListener("keydown", (event) => {
    const bar = event.target.closest(".task");
    if (!bar) return;
    const byTime = [...bar.parentElement.children].sort((one, other) => one.task.at - other.task.at);
    const lane = bar.closest(".lane");
    let next = null;
    if (event.key === "ArrowLeft") next = byTime[byTime.indexOf(bar) - 1];
    else if (event.key === "ArrowRight") next = byTime[byTime.indexOf(bar) + 1];
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      let other = lane;
      do other = event.key === "ArrowUp" ? other.previousElementSibling : other.nextElementSibling;
      while (other && !other.querySelector(".task"));
      next = other?.querySelector(".track").lastElementChild;
    } else if (event.key === "Escape") { bar.blur(); return; } else return;
    event.preventDefault();
    next?.focus();
    setStops();
  });
  element("freeze").addEventListener("click", () => {
    isFrozen = !isFrozen;
    element("freeze").setAttribute("aria-pressed", String(isFrozen));
    element("freeze").textContent = isFrozen ? "Resume" : "Freeze";
    show(isFrozen ? "off" : "on", isFrozen ? "frozen" : "live");
    if (!isFrozen) fetchAll();
  });
  addEventListener("resize", () => { bars.forEach(lay); move(); });
  // A hidden tab must not cost the server and the engines anything.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { close(); show("off", "paused"); } else open();
  });
  setInterval(move, still.matches ? 1000 : 50);
  setInterval(() => {
    const seconds = Math.round((Date.now() - latest) / 1000);
    if (source && latest && seconds > 5 && !isFrozen) show("lost", `${seconds} s old`);
  }, 1000);
  if (document.hidden) show("off", "paused");
  open();
})();
