"use strict";
/* The head, the recipe and the facts of the runs; then everything in its order, and the news of a live run. */
function stateChip(run) { return element("span", { class: `state ${run.state}`, text: run.state }); }

function tile(label, value, title) { return value == null ? null : element("div", { class: "tile", title }, element("b", { text: value }), element("span", { text: label })); }

function last(run, name) {
  const column = run.table.columns[name];
  if (column) for (let i = column.length - 1; i >= 0; i--) if (!Number.isNaN(column[i])) return column[i];
  return null;
}

function showHead() {
  const head = byId("head"), children = [];
  if (PAGE.runs.length === 1) {
    const run = PAGE.runs[0];
    children.push(element("h1", { text: run.name }), element("p", { class: "lead" }, stateChip(run), ` ${run.headline}`));
    const speed = last(run, "tokens_per_second");
    children.push(element("div", { class: "tiles" },
      run.held_out ? tile(run.held_out.label, `${run.held_out.before.toFixed(3)} → ${run.held_out.after.toFixed(3)}`) : null,
      run.best ? tile(`best ${run.best.name.startsWith("eval/") ? "held-out" : run.best.name.replace("/mean", "")}, step ${run.best.step.toLocaleString("en")}`, shown(run.best.value), run.best.name) : null,
      tile("last reward", last(run, "reward/mean") != null ? shown(last(run, "reward/mean")) : null),
      tile("steps", `${run.step.toLocaleString("en")}${run.total_steps ? ` / ${run.total_steps.toLocaleString("en")}` : ""}`),
      tile("time", run.duration), run.left ? tile(`left${run.left.doubt}`, `≈ ${run.left.time}`) : null, tile("tokens/s, last step", speed != null ? shown(speed) : null),
      tile("peak memory", last(run, "peak_memory_gb/max") != null ? `${shown(last(run, "peak_memory_gb/max"))} GB` : null),
      tile("TFLOP/s per device", last(run, "train/tflops_per_device") != null ? shown(last(run, "train/tflops_per_device")) : null),
      tile("MFU of the update", last(run, "mfu/train") != null ? `${(100 * last(run, "mfu/train")).toFixed(1)}%` : null)));
    if (run.error) children.push(element("div", { class: "warnings", text: run.error }));
    if (run.warnings) children.push(element("div", { class: "warnings", text: run.warnings }));
  } else {
    children.push(element("h1", { text: `${PAGE.runs.length} runs` }));
    const columns = [["run", (run, r) => element("label", {}, element("input", { type: "checkbox", checked: !run.hidden, "aria-label": `show ${run.name}`, onchange: (event) => { run.hidden = !event.target.checked; redrawAll(); } }), " ", element("i", { class: "dot", style: `background:${COLOURS[r % COLOURS.length]}` }), run.name)], ["state", (run) => stateChip(run)],
      ["steps", (run) => run.step.toLocaleString("en")], ["time", (run) => run.duration + (run.left ? `, about ${run.left.time} left` : "")], ["held-out before", (run) => shown(run.held_out?.before)], ["held-out after", (run) => shown(run.held_out?.after)],
      ["best", (run) => (run.best ? `${shown(run.best.value)} at ${run.best.step}` : "–")], ["last reward", (run) => shown(last(run, "reward/mean"))], ["tokens/s", (run) => shown(last(run, "tokens_per_second"))]];
    children.push(element("div", { class: "scroll" }, element("table", { id: "runs-table" }, element("thead", {}, element("tr", {}, ...columns.map(([name]) => element("th", { text: name })))), element("tbody", {}, ...PAGE.runs.map((run, r) => element("tr", {}, ...columns.map(([, cell]) => element("td", {}, cell(run, r)))))))));
    PAGE.runs.forEach((run) => { const text = [run.error, run.warnings].filter(Boolean).join("\n"); if (text) children.push(element("div", { class: "warnings", text: `${run.name}: ${text}` })); });
  }
  head.replaceChildren(...children);
}

function written(value) { return value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value); }

function showRecipe() {
  const runs = PAGE.runs, keys = [...new Set(runs.flatMap((run) => run.recipe.map(([key]) => key)))];
  if (!keys.length) return;
  byId("recipe").hidden = false;
  const values = runs.map((run) => new Map(run.recipe.map(([key, value, standard]) => [key, { value, standard }])));
  const rows = keys.map((key) => {
    const own = values.map((each) => written(each.get(key)?.value)), standard = written(values.map((each) => each.get(key)).find(Boolean).standard);
    return { key, own, standard, differs: new Set(own).size > 1, changed: own.some((each) => each !== standard) };
  });
  const kinds = [["changed", "what is not the default", (row) => row.changed], ["all", "every key", () => true]];
  if (runs.length > 1) kinds.unshift(["differs", "what differs between the runs", (row) => row.differs]);
  const what = byId("recipe-what"), find = byId("recipe-find"), table = byId("recipe-table");
  what.replaceChildren(...kinds.map(([name, label]) => element("option", { value: name, text: label })));
  const draw = () => {
    const keep = kinds.find(([name]) => name === what.value)[2], text = find.value.toLowerCase();
    const chosen = rows.filter((row) => keep(row) && row.key.toLowerCase().includes(text));
    table.replaceChildren(
      element("thead", {}, element("tr", {}, element("th", { text: "key" }), ...runs.map((run) => element("th", { text: runs.length > 1 ? run.name : "value" })), element("th", { text: "default" }))),
      element("tbody", {}, ...chosen.map((row) => element("tr", { class: row.differs ? "differs" : "" }, element("td", { class: "mono key", text: row.key }), ...row.own.map((each) => element("td", { class: "mono", text: each })), element("td", { class: "mono note", text: row.standard })))));
    if (!chosen.length) table.append(element("tbody", {}, element("tr", {}, element("td", { text: "nothing" }))));
  };
  what.addEventListener("change", draw); find.addEventListener("input", draw);
  draw();
}

/* Show the links to the parts that the page has. */
function showLinks() { document.querySelectorAll("nav a").forEach((link) => { link.hidden = byId(link.hash.slice(1)).hidden; }); }

function factsCard(title, facts) {
  const rows = facts.filter(([, value]) => value != null && value !== "");
  return rows.length ? element("article", { class: "card" }, element("h3", { text: title }), element("table", {}, element("tbody", {}, ...rows.map(([name, value]) => element("tr", {}, element("td", { class: "note key", text: name }), element("td", { text: value })))))) : null;
}

function showAbout() {
  byId("about-cards").replaceChildren(...PAGE.runs.flatMap((run) => {
    const of = PAGE.runs.length > 1 ? ` of ${run.name}` : "";
    return [factsCard(`Set-up${of}`, run.facts), factsCard(`Versions${of}`, run.versions), factsCard(`Machine of the driver${of}`, run.machine),
      factsCard(`Folder${of}`, [["folder", run.folder], ["began", run.began], ["changed", run.changed], ["command", run.command]])].filter(Boolean);
  }));
}

/* Follow runs that go on: ask for what is new every two seconds, and append it. */
async function follow() {
  const badge = byId("live");
  badge.textContent = "live";
  for (let failed = 0; ;) {
    await new Promise((done) => setTimeout(done, document.hidden || failed > 5 ? 10000 : 2000));
    try {
      const answer = await fetch("state", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const states = await answer.json();
      failed = 0;
      badge.textContent = states.some((each) => each.state === "running" || each.state === "setup") ? "live" : "ended"; badge.classList.remove("lost");
      let news = false;
      for (const [r, state] of states.entries()) {
        const run = PAGE.runs[r];
        // A run that goes on from a checkpoint has cut its steps back, and may have made them anew since.
        const isOther = state.beginnings !== run.beginnings;
        if (isOther || state.rows !== run.table.n || state.state !== run.state || state.error !== run.error) {
          news = true;
          if (isOther) run.table = await tableBlock(`${r}-metrics`);
          else if (state.rows > run.table.n) run.table = appended(run.table, await tableBlock(`${r}-metrics`, `?from=${run.table.n}`));
          Object.assign(run, state);
        }
        if (window.followSamples) await window.followSamples(run, r, state);
        if (window.followTimeline) await window.followTimeline(run, r, state);
      }
      if (news) {
        showHead(); showAbout();
        buildCharts();
        redrawAll();
      }
      showLinks();
    } catch (error) {
      failed += 1;
      badge.textContent = failed > 1 ? "no answer" : "waiting"; badge.classList.add("lost");
    }
  }
}

(async function () {
  await Promise.all(PAGE.runs.map(async (run, r) => { run.table = await tableBlock(`${r}-metrics`); }));
  showHead(); showRecipe(); showAbout(); setUpControls(); buildCharts();
  if (window.showTimelines) await window.showTimelines();
  if (window.showSamples) await window.showSamples();
  byId("others-details").addEventListener("toggle", redrawAll);
  showLinks();
  performance.mark("readable");
  await runPlotly();
  await drawInTurn();
  performance.mark("ready");
  document.documentElement.dataset.ready = "yes";
  if (PAGE.live) follow();
})();
