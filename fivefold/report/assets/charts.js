"use strict";
/* Curves, bars and heat maps of metrics. A chart is drawn when it comes into view, with the points that its width can show. */
const BESIDE = ["generation", "weight staging", "weight swap", "checkpoint write"]; // phases that go on while others do
const POINTS = 1200, BARS = 240, FEW_STEPS = 10;
const CONFIG = { responsive: true, displayModeBar: "hover", displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"] };
const CHARTS = [];
const SETTINGS = { smoothing: 0.6, axis: "step", log: false };

/* [section, title, metrics (names or patterns), unit, options] */
const CURVES = [
  ["curve", "Reward", ["reward/mean"], "reward"],
  ["curve", "Held-out accuracy", ["eval/accuracy"], "share", { marks: true }],
  ["curve", "Accuracy", ["accuracy"], "share"],
  ["curve", "Pass at k", [/^pass_at\//], "share"],
  ["curve", "Held-out reward", ["eval/reward"], "reward", { marks: true }],
  ["curve", "Held-out loss", ["eval/nll", "eval/loss"], "", { marks: true }],
  ["curve", "Held-out margin", ["eval/margin"], "reward", { marks: true }],
  ["curve", "Divergence from the teacher", ["teacher_kl"], "nats"],
  ["curve", "Rewards by name", [/^reward\/(?!(?:mean|std|min|max|penalty)$)[^/]+$/, /^reward\/(?!source\/)[^/]+\/mean$/], "reward"],
  ["curve", "Rewards by data source", [/^reward\/source\/.+\/mean$/], "reward"],
  ["curve", "Range of the reward", ["reward/min", "reward/max", "reward/std", "reward/penalty"], "reward"],
  ["curve", "KL", ["kl_ref", "ppo_kl_k3", "kl"], "nats", { canLog: true }],
  ["curve", "Entropy", ["entropy"], "nats"],
  ["curve", "Entropy by the quarter of a response", [/^entropy_quarter\//], "nats"],
  ["curve", "Percentiles of the response length", [/^response_length\/p\d+$/], "tokens"],
  ["curve", "Response length", ["response_length/mean", "response_length/max", "eval/response_length"], "tokens"],
  ["curve", "Truncated", ["truncated"], "share"],
  ["curve", "Clipped tokens", [/^clip_fraction/], "share"],
  ["curve", "Gradient norm", ["grad_norm", "critic/grad_norm"], "", { canLog: true }],
  ["curve", "Loss", ["loss", "policy_loss", "nll", "critic/loss", "critic/value_loss"], ""],
  ["curve", "Learning rate", ["lr", "critic/lr"], "", { exact: true }],
  ["curve", "Groups that teach nothing", ["zero_variance_groups"], "share"],
  ["curve", "Advantage", [/^advantage\//], ""],
  ["curve", "Margin", ["margin"], "reward"],
  ["curve", "Critic", ["critic/explained_variance"], "share"],
  ["mismatch", "Mismatch of log-probs", ["rollout_mismatch", "rollout_mismatch/max"], "nats", { log: true }],
  ["mismatch", "KL of rollout and trainer", ["rollout_mismatch_kl", "rollout_mismatch_kl_reverse"], "nats", { log: true }],
  ["mismatch", "Ratio of trainer and rollout", ["rollout_ratio", "rollout_ratio/max"], "ratio"],
  ["mismatch", "Effective sample size", ["rollout_ess", "correction/ess"], "share"],
  ["mismatch", "Correction", [/^correction\/(?!ess)/], ""],
  ["mismatch", "Staleness", ["staleness/mean", "staleness/max"], "steps", { exact: true }],
  ["mismatch", "Samples by their age", [/^staleness\/share\//], "share"],
  ["mismatch", "Reward by the age of samples", [/^staleness\/reward\//], "reward"],
  ["mismatch", "Response length by the age of samples", [/^staleness\/response_length\//], "tokens"],
  ["mismatch", "KL of rollout and trainer by the age of tokens", [/^staleness\/mismatch_kl\//], "nats", { log: true }],
  ["mismatch", "Ratio of trainer and rollout by the age of tokens", [/^staleness\/ratio\//], "ratio"],
  ["mismatch", "Tokens whose weight was cut, by their age", [/^staleness\/cut\//], "share"],
  ["mismatch", "Samples of several versions", ["staleness/mixed"], "share"],
  ["mismatch", "Wait for a step", [/^staleness\/wait_seconds/], "s"],
  ["expert", "Imbalance of the experts", [/^(critic\/)?experts\/imbalance(\/max)?$/], "largest / mean"],
  ["expert", "Experts without a token", [/^(critic\/)?experts\/dead$/], "count"],
  ["speed", "Tokens per second", ["tokens_per_second", "train/tokens_per_second_per_device"], "tokens/s"],
  ["speed", "Model TFLOP/s per device", ["train/tflops_per_device"], "TFLOP/s"],
  ["speed", "MFU and HFU of the update", [/^[mh]fu\/(critic )?train$/], "share"],
  ["speed", "MFU of forward passes", [/^mfu\/(?!(critic )?train$)/], "share"],
  ["speed", "Bubble of the pipeline", [/^(critic\/)?pipeline\/bubble$/], "share"],
  ["speed", "Memory", [/memory_gb|memory\//, /^offload\//], "GB"],
  ["speed", "Idle time", [/^idle\//], "share"],
  ["speed", "Load of the replicas", [/^replica_busy\//], "share"],
  ["speed", "Seconds of a step", ["seconds/step"], "s"],
];
const LAYERED = /^(?:(.*?)[\/_-])?layers?[\/_-]?(\d+)(?:[\/_-](.*))?$/i, EXPERT = /experts?[\/_-]?(\d+)$/i;

function baseLayout(chart) {
  const grid = css("--grid"), faint = css("--faint");
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, tickfont: { color: faint, size: 11 } };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), size: 11 },
    margin: { l: 46, r: 10, t: 8, b: 24 }, showlegend: false, hovermode: "x unified", uirevision: SETTINGS.axis, modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--line"), activecolor: css("--accent") }, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink"), size: 11 } },
    xaxis: { ...axis, ticklabeloverflow: "allow", ...(SETTINGS.axis === "step" && PAGE.runs.every((run) => run.step <= FEW_STEPS) ? { dtick: 1 } : {}) }, yaxis: { ...axis, automargin: true },
    // A chart follows its card when the window changes, but not when the page is laid out for paper.
    ...(document.documentElement.classList.contains("printing") ? { width: chart.plot.clientWidth } : {}),
  };
}

/* Return the x of every row: its step, or the hours of all steps until then. */
function xOf(run) {
  if (SETTINGS.axis === "step") return run.table.columns.step;
  const seconds = run.table.columns["seconds/step"] || run.table.columns["seconds/train"];
  if (!seconds) return run.table.columns.step;
  const hours = new Float32Array(seconds.length);
  let sum = 0;
  for (let i = 0; i < seconds.length; i++) { sum += seconds[i] || 0; hours[i] = sum / 3600; }
  return hours;
}

/* Return the exponential moving average, without the bias of its start. */
function smoothed(values, weight) {
  const out = new Float32Array(values.length);
  let mean = 0, total = 0;
  for (let i = 0; i < values.length; i++) {
    if (!Number.isNaN(values[i])) { mean = weight * mean + (1 - weight) * values[i]; total = weight * total + (1 - weight); }
    out[i] = Number.isNaN(values[i]) || total === 0 ? NaN : mean / total;
  }
  return out;
}

/* Return the rows to draw between two x: all, or of each stretch the ones with the least and the largest value. */
function rowsToDraw(x, values, from, to) {
  const rows = [];
  for (let i = 0; i < values.length; i++) if (!Number.isNaN(values[i]) && x[i] >= from && x[i] <= to) rows.push(i);
  if (rows.length <= POINTS) return rows;
  const size = rows.length / (POINTS / 2), chosen = [];
  for (let start = 0; start < rows.length; start += size) {
    let low = rows[Math.floor(start)], high = low;
    for (let j = Math.floor(start); j < Math.min(rows.length, Math.floor(start + size)); j++) {
      if (values[rows[j]] < values[low]) low = rows[j];
      if (values[rows[j]] > values[high]) high = rows[j];
    }
    chosen.push(...(low === high ? [low] : low < high ? [low, high] : [high, low]));
  }
  if (chosen[chosen.length - 1] !== rows[rows.length - 1]) chosen.push(rows[rows.length - 1]);
  return chosen;
}

function matching(names, wanted) {
  return [...new Set(wanted.flatMap((each) => names.filter((name) => (each instanceof RegExp ? each.test(name) : each === name))))];
}

function hasValues(run, name) { const column = run.table.columns[name]; return column && column.some((value) => !Number.isNaN(value)); }

/* Return how many points the longest line of a chart has. */
function pointsOf(run, names) {
  return Math.max(0, ...names.map((name) => (run.table.columns[name] || []).filter((value) => !Number.isNaN(value)).length + (run.before[name] == null ? 0 : 1)));
}

/* A card with a plot that is drawn by `draw(plot, chart)` when it can be seen, and again when settings or data change. */
function addChart(parent, title, note, draw, options = {}) {
  const plot = element("div", { class: options.tall ? "plot tall" : "plot" });
  const swatches = element("div", { class: "swatches" });
  const chart = { plot, swatches, draw, visible: false, stale: true, log: options.log || false, range: null, title };
  const button = options.canLog === false ? null : element("button", { text: "log", title: "logarithmic axis", "aria-pressed": String(chart.log), onclick: () => { chart.log = !chart.log; button.setAttribute("aria-pressed", String(chart.log)); redraw(chart); } });
  const card = element("article", { class: options.wide ? "card wide" : "card", "data-chart": title }, element("header", {}, element("h3", {}, title + " ", element("small", { text: note })), button), plot, swatches);
  chart.card = card;
  parent.append(card);
  CHARTS.push(chart);
  SIGHT.observe(card);
  return chart;
}

const SIGHT = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = CHARTS.find((each) => each.card === entry.target);
    if (!chart) continue;
    chart.visible = entry.isIntersecting;
    if (chart.visible && chart.stale) redraw(chart);
  }
}, { rootMargin: "200px" });

function redraw(chart) {
  chart.stale = !window.Plotly;
  if (window.Plotly) chart.draw(chart);
}
/* Draw the charts in view, one after another, so that each can be seen before the next one is drawn. */
async function drawInTurn() {
  for (const chart of CHARTS) {
    if (!chart.visible || !chart.stale) continue;
    redraw(chart);
    await new Promise((done) => { setTimeout(done); });
  }
}
function redrawAll() { for (const chart of CHARTS) { if (chart.visible) redraw(chart); else chart.stale = true; } }

/* Draw lines of metrics of all runs; smoothing draws the values themselves faintly behind. */
function drawLines(chart, names, unit, { marks, exact } = {}) {
  const traces = [], labels = [], dashed = new Set(), several = PAGE.runs.length > 1, log = chart.log || SETTINGS.log;
  const [from, to] = chart.range || [-Infinity, Infinity];
  PAGE.runs.forEach((run, r) => names.forEach((name, k) => {
    if (!hasValues(run, name) || run.hidden) return;
    let values = run.table.columns[name], x = xOf(run);
    if (run.before[name] != null) { values = [run.before[name], ...values]; x = [0, ...x]; }
    const colour = COLOURS[(several ? r : k) % COLOURS.length], dash = several ? ["solid", "dash", "dot", "dashdot"][k % 4] : "solid";
    const label = several ? (names.length > 1 ? `${run.name} ${name}` : run.name) : name;
    const add = (series, options, width, opacity) => {
      const rows = rowsToDraw(x, series, from, to);
      traces.push({ type: "scatter", mode: marks || rows.length === 1 ? "lines+markers" : "lines", x: rows.map((i) => x[i]), y: rows.map((i) => series[i]), name: label, line: { color: colour, width, dash }, marker: { size: 5, color: colour }, opacity, ...options });
    };
    if (SETTINGS.smoothing > 0 && !marks && !exact && run.table.n > 2) {
      add(values, { hoverinfo: "skip" }, 1, 0.35);
      add(smoothed(values, SETTINGS.smoothing), { hovertemplate: `%{y:.4~g}` }, 2, 1);
    } else add(values, { hovertemplate: `%{y:.4~g}` }, 1.8, 1);
    if (!several && names.length > 1) labels.push([colour, name]);
    else if (several && names.length > 1) dashed.add(k);
  }));
  names.forEach((name, k) => { if (dashed.has(k)) labels.push([null, `${["—", "– –", "···", "–·"][k % 4]} ${name}`]); });
  const layout = baseLayout(chart);
  if (SETTINGS.axis === "time") Object.assign(layout, { margin: { ...layout.margin, b: 36 }, xaxis: { ...layout.xaxis, title: { text: "hours", standoff: 4 } } });
  layout.yaxis.type = log ? "log" : "linear";
  const most = traces.flatMap((trace) => trace.y).reduce((largest, value) => Math.max(largest, Math.abs(value) || 0), 0);
  layout.yaxis.exponentformat = log ? "power" : most < 0.01 ? "e" : "B";
  Plotly.react(chart.plot, traces, layout, CONFIG);
  chart.swatches.replaceChildren(...labels.map(([colour, name]) => element("span", {}, colour ? element("i", { style: `background:${colour}` }) : null, name)));
  if (!chart.listening) {
    chart.listening = true;
    chart.plot.on("plotly_relayout", (change) => {
      const range = "xaxis.range[0]" in change ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : change["xaxis.autorange"] ? null : undefined;
      if (range !== undefined) { chart.range = range; redraw(chart); }
    });
  }
}

/* Return the unit of the phases, and which of them go on while others do, so that a bar is longer than its step. */
function phasesNote(run) {
  const beside = BESIDE.filter((phase) => hasValues(run, `seconds/${phase}`));
  return beside.length ? `seconds; beside the others: ${beside.join(", ")}` : "seconds";
}

/* Draw the phases of the steps as stacked bars; many steps are averaged into one bar. */
function drawPhases(chart, run) {
  const phases = run.table.names.filter((name) => name.startsWith("seconds/") && name !== "seconds/step" && hasValues(run, name));
  const n = run.table.n, size = Math.max(1, Math.ceil(n / BARS)), step = run.table.columns.step;
  const x = [], width = [];
  for (let i = 0; i < n; i += size) { const end = Math.min(n, i + size); x.push((step[i] + step[end - 1]) / 2); width.push(end - i); }
  const traces = phases.map((name, k) => {
    const column = run.table.columns[name], y = [];
    for (let i = 0; i < n; i += size) { let sum = 0; const end = Math.min(n, i + size); for (let j = i; j < end; j++) sum += column[j] || 0; y.push(sum / (end - i)); }
    return { type: "bar", x, y, name: name.slice(8), marker: { color: COLOURS[k % COLOURS.length], line: { width: 0 } }, hovertemplate: "%{y:.3~g} s" };
  });
  const layout = baseLayout(chart);
  Object.assign(layout, { barmode: "stack", bargap: n > 60 ? 0 : 0.15 });
  layout.yaxis.title = { text: "s" };
  layout.yaxis.type = chart.log ? "log" : "linear";
  Plotly.react(chart.plot, traces, layout, CONFIG);
  chart.swatches.replaceChildren(...phases.map((name, k) => element("span", {}, element("i", { style: `background:${COLOURS[k % COLOURS.length]}` }), name.slice(8))));
}

/* Draw values by layer over the steps, or by layer and expert at the last step. */
function drawHeat(chart, run, names) {
  const cells = names.map((name) => { const [, , layer, rest] = name.match(LAYERED); return { name, layer: Number(layer), expert: rest && rest.match(EXPERT) ? Number(rest.match(EXPERT)[1]) : null }; });
  const layers = [...new Set(cells.map((cell) => cell.layer))].sort((a, b) => a - b);
  const experts = [...new Set(cells.map((cell) => cell.expert))].filter((each) => each != null).sort((a, b) => a - b);
  let x, z, label;
  if (experts.length) {
    x = experts; label = "expert";
    z = layers.map((layer) => experts.map((expert) => { const cell = cells.find((each) => each.layer === layer && each.expert === expert); const known = cell ? run.table.columns[cell.name].filter((v) => !Number.isNaN(v)) : []; return known.length ? known[known.length - 1] : null; }));
  } else {
    const size = Math.max(1, Math.ceil(run.table.n / BARS)); x = []; label = "step";
    for (let i = 0; i < run.table.n; i += size) x.push(run.table.columns.step[i]);
    z = layers.map((layer) => { const column = run.table.columns[cells.find((cell) => cell.layer === layer).name], row = []; for (let i = 0; i < run.table.n; i += size) { let sum = 0, count = 0; for (let j = i; j < Math.min(run.table.n, i + size); j++) if (!Number.isNaN(column[j])) { sum += column[j]; count++; } row.push(count ? sum / count : null); } return row; });
  }
  const layout = baseLayout(chart);
  layout.hovermode = "closest";
  if (experts.length) delete layout.xaxis.dtick;
  layout.xaxis.title = { text: label, standoff: 4 }; layout.margin.b = 36; layout.yaxis.title = { text: "layer" };
  Plotly.react(chart.plot, [{ type: "heatmap", x, y: layers, z, colorscale: isDark() ? "Viridis" : "YlGnBu", reversescale: !isDark(), colorbar: { thickness: 10, tickfont: { color: css("--faint") } }, hovertemplate: `${label} %{x}, layer %{y}: %{z:.4~g}<extra></extra>` }], layout, CONFIG);
}

/* Make the charts of the metrics that the runs have. Those of a live page are made anew when a run has further metrics. */
function buildCharts() {
  const planned = [], plan = (names, ...chart) => planned.push({ names, chart });
  const all = [...new Set(PAGE.runs.flatMap((run) => run.table.names))].filter((name) => PAGE.runs.some((run) => hasValues(run, name)));
  const used = new Set(["step"]);
  const layered = all.filter((name) => LAYERED.test(name));
  layered.forEach((name) => used.add(name));
  const parents = { curve: byId("curve-charts"), mismatch: byId("mismatch-charts"), expert: byId("expert-charts"), speed: byId("speed-charts") };
  PAGE.runs.forEach((run) => {
    if (all.some((name) => name.startsWith("seconds/") && name !== "seconds/step")) {
      plan([], parents.speed, PAGE.runs.length > 1 ? `Phases of ${run.name}` : "Phases of a step", phasesNote(run), (chart) => drawPhases(chart, run), { wide: true, canLog: false });
    }
    const groups = new Map();
    layered.filter((name) => hasValues(run, name)).forEach((name) => { const [, before = "", , after] = name.match(LAYERED); const key = `${before} ${(after || "").replace(EXPERT, "").replace(/[\/_-]$/, "")}`.trim() || "layers"; groups.set(key, [...(groups.get(key) || []), name]); });
    groups.forEach((names, key) => plan(names, byId("expert-charts"), PAGE.runs.length > 1 ? `${key} of ${run.name}` : key, "by layer", (chart) => drawHeat(chart, run, names), { canLog: false }));
  });
  all.filter((name) => name.startsWith("seconds/")).forEach((name) => used.add(name));
  for (const [section, title, wanted, unit, options = {}] of CURVES) {
    const names = matching(all, wanted).filter((name) => !layered.includes(name));
    if (!names.length || PAGE.runs.every((run) => pointsOf(run, names) < 2)) continue;
    names.forEach((name) => used.add(name));
    plan(names, parents[section], title, names.length > 1 ? unit : [names[0] === title.toLowerCase() ? "" : names[0], unit].filter(Boolean).join(", "), (chart) => drawLines(chart, names, unit, options), options);
  }
  all.filter((name) => !used.has(name) && PAGE.runs.some((run) => pointsOf(run, [name]) > 1)).forEach((name) => plan([name], byId("other-charts"), name, "", (chart) => drawLines(chart, [name], "")));
  const key = JSON.stringify(planned.map(({ names, chart: [, title] }) => [title, names]));
  if (key === CHARTS.key) return;
  const before = new Map(CHARTS.map((chart) => [chart.title, chart]));
  for (const chart of CHARTS.splice(0)) { SIGHT.unobserve(chart.card); chart.card.remove(); if (window.Plotly) Plotly.purge(chart.plot); }
  CHARTS.key = key;
  for (const { chart: [parent, title, note, draw, options] } of planned) {
    const old = before.get(title);
    addChart(parent, title, note, draw, { ...options, ...(old ? { log: old.log } : {}) }).range = old ? old.range : null;
  }
  for (const [section, holder] of [["curves", "curve-charts"], ["mismatch", "mismatch-charts"], ["experts", "expert-charts"], ["speed", "speed-charts"], ["others", "other-charts"]]) byId(section).hidden = !byId(holder).childElementCount;
}

function setUpControls() {
  const value = byId("smoothing-value"), slider = byId("smoothing");
  const show = () => { value.textContent = SETTINGS.smoothing.toFixed(2); };
  slider.addEventListener("input", () => { SETTINGS.smoothing = Number(slider.value); show(); redrawAll(); });
  byId("axis").addEventListener("change", (event) => { SETTINGS.axis = event.target.value; CHARTS.forEach((chart) => { chart.range = null; }); redrawAll(); });
  byId("log").addEventListener("click", (event) => { SETTINGS.log = !SETTINGS.log; event.target.setAttribute("aria-pressed", String(SETTINGS.log)); redrawAll(); });
  THEME.listeners.push(redrawAll);
  addEventListener("beforeprint", () => CHARTS.filter((chart) => chart.plot.clientWidth).forEach(redraw));
  show();
}
