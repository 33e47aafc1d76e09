// Draws charts. Data comes from /api/v1/series, and then a point with each live update.
(() => {
  const holder = document.querySelector("[data-series]");
  if (!holder || !window.uPlot) return;
  const KEPT = 900;
  const JUMP = 10; // seconds
  const range = Number(holder.dataset.range);
  const isFollowed = !("polled" in holder.dataset) && Boolean(document.querySelector("[data-live]"));
  const isLive = isFollowed && range <= KEPT; // other charts are reloaded periodically
  const short = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
    return size >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : `${+value.toPrecision(2)}`;
  };
  const duration = (value) => {
    if (value == null) return "–";
    return value < 1 ? `${+(value * 1000).toPrecision(3)} ms` : `${+value.toPrecision(3)} s`;
  };
  // UTC, with the date where it changes, unless all ticks are of today.
  const stamp = (at) => new Date(at * 1000).toISOString().slice(0, 19).split("T");
  const labelTimes = (ticks, now = Date.now() / 1000) => {
    const step = ticks.length > 1 ? ticks[1] - ticks[0] : 60;
    const days = ticks.map((at) => stamp(at)[0]);
    const isToday = days.every((day) => day === stamp(now)[0]);
    return ticks.map((at, index) => {
      const clock = step >= 86400 ? "" : stamp(at)[1].slice(0, step < 60 ? 8 : 5);
      const day = isToday || days[index] === days[index - 1] ? "" : days[index].slice(5);
      return [clock, day].filter(Boolean).join("\n");
    });
  };
  const CHARTS = {
    throughput: { format: short, lines: [["done", "done", 1], ["consumed", "read", 2]] },
    lag: { format: short, lines: [["lag", "lag", 1], ["in_flight", "in flight", 2]] },
    tasks: { format: duration, lines: [["task_p50", "p50", 1], ["task_p95", "p95", 2], ["task_p99", "p99", 3]] },
    failures: { format: short, lines: [["failed", "failed", 3], ["retried", "retried", 4], ["letters", "dead letters", 5]] },
    lanes: { format: short, lines: [["broadcast", "broadcast", 2], ["resolved", "resolved", 4], ["advanced", "advanced", 1]] },
  };
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let columns = null;
  let plots = [];
  Object.assign(window.tidemill, { labelTimes }); // for tests, since a canvas has no text

  // Without the pointer on the chart, the legend shows the newest values.
  const latest = (plot, index) => (plot.cursor.idx == null ? plot.data[index].at(-1) : null);

  const size = (figure) => ({ width: Math.max(200, figure.clientWidth - 20), height: 150 });

  const draw = () => {
    for (const { plot } of plots) plot.destroy();
    const axis = { stroke: color("--faint"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    plots = [...holder.querySelectorAll("[data-chart]")].map((figure) => {
      const chart = CHARTS[figure.dataset.chart];
      const series = chart.lines.map(([, label, tone]) => ({
        label, stroke: color(`--series-${tone}`), width: 1.5, points: { show: false }, spanGaps: false,
        value: (plot, value, index) => chart.format(value ?? latest(plot, index)),
      }));
      const options = {
        ...size(figure),
        padding: [8, 18, 0, 0],
        cursor: { y: false, sync: { key: "overview" } },
        legend: { live: true, markers: { width: 0, fill: (plot, index) => plot.series[index].stroke() } },
        scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
        axes: [
          { ...axis, size: 40, space: 70, values: (_, ticks) => labelTimes(ticks) },
          { ...axis, size: 52, space: 34, values: (_, ticks) => ticks.map(chart.format) },
        ],
        tzDate: (at) => uPlot.tzDate(new Date(at * 1000), "Etc/UTC"), // ticks at whole hours and days in UTC
        series: [{ label: "UTC", value: (_, at) => (at == null ? "now" : stamp(at).join(" ")) }, ...series],
      };
      return { figure, chart, plot: new uPlot(options, pick(chart), figure) };
    });
  };

  const pick = (chart) => [columns.at, ...chart.lines.map(([name]) => columns[name])];

  const load = async () => {
    try {
      const response = await fetch(holder.dataset.series);
      if (!response.ok) return;
      columns = await response.json();
    } catch { return; } // keep the drawn data; the page shows that the connection is lost
    if (plots.length) for (const { plot, chart } of plots) plot.setData(pick(chart));
    else draw();
  };

  document.addEventListener("point", (event) => {
    if (!columns || !isLive) return;
    const from = event.detail;
    if (!from.at.length) return;
    const last = columns.at.at(-1);
    // The clock was adjusted, or updates were missed: reload all points from the server.
    if (last !== undefined && Math.abs(from.at[0] - last) > JUMP) return void load();
    if (from.at[0] <= last) return;
    for (const name of Object.keys(columns)) {
      columns[name].push(from[name][0]);
      if (columns[name].length > KEPT) columns[name].shift();
    }
    for (const { plot, chart } of plots) plot.setData(pick(chart));
  });
  document.addEventListener("live", load);
  if (!isFollowed) load();
  if (!isLive) setInterval(() => document.hidden || load(), Math.max(10, range / 480) * 1000);
  document.addEventListener("theme", () => columns && draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => columns && draw());
  new ResizeObserver(() => {
    for (const { plot, figure } of plots) plot.setSize(size(figure));
  }).observe(holder);
})();
