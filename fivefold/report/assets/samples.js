"use strict";
/* The browser of samples: a list that holds any number of them, and one sample with its group and its prompt's history. */
const ROW = 52, CHUNK = 64;
const COLOURINGS = [
  ["none", "no colours"],
  ["logprob", "log-prob of the rollout"],
  ["gap", "trainer − rollout"],
  ["advantage", "advantage"],
  ["age", "age of the weights"],
];

class SampleBrowser {
  constructor(run, number, parent) {
    this.run = run; this.number = number; this.changes = run.samples.changes; this.chunks = new Map(); this.rows = new Int32Array(0); this.chosen = null; this.search = 0;
    this.build(parent);
  }

  async open() {
    this.table = await tableBlock(`${this.number}-samples-index`);
    this.offerAges();
    this.filter();
  }

  /* Offer the ages of samples and tokens only in runs that have older ones than their step's weights. */
  offerAges() {
    const old = (this.table.columns.age || []).some((age) => age > 0);
    this.root.querySelectorAll("option[value=age], option[value='-age']").forEach((option) => { option.hidden = option.disabled = !old; });
  }

  /* Return a sample's texts; the chunk that holds them is unpacked once. */
  async text(id) {
    const k = Math.floor(id / CHUNK);
    if (!this.chunks.has(k)) {
      const n = this.table.n;
      const promise = textBlock(`${this.number}-samples-chunk-${k}`, `?n=${n}`);
      this.chunks.set(k, promise);
      promise.then((list) => { if (list.length < CHUNK && PAGE.live) this.chunks.delete(k); }, () => this.chunks.delete(k));
      if (this.chunks.size > 2000) this.chunks.delete(this.chunks.keys().next().value);
    }
    const sample = (await this.chunks.get(k))[id % CHUNK];
    sample.id = id;
    return sample;
  }

  value(name, id) { const column = this.table.columns[name]; return column ? column[id] : NaN; }
  rewardNames() { return this.table.names.filter((name) => name.startsWith("reward/")); }

  build(parent) {
    this.root = parent;
    const input = (key, attributes) => { const made = element("input", { ...attributes, "data-filter": key, oninput: () => { clearTimeout(this.timer); this.timer = setTimeout(() => this.filter(), key === "text" ? 250 : 60); } }); this.inputs[key] = made; return made; };
    const pair = (label, name) => element("label", {}, label, input(`${name}-from`, { type: "number", placeholder: "from", step: "any", "aria-label": `${label} from` }), input(`${name}-to`, { type: "number", placeholder: "to", step: "any", "aria-label": `${label} to` }));
    this.inputs = {};
    this.sort = element("select", { "aria-label": "order", onchange: () => this.filter() }, ...[["step", "first step first"], ["-step", "last step first"], ["-reward", "highest reward first"], ["reward", "lowest reward first"], ["-length", "longest first"], ["length", "shortest first"], ["-age", "oldest weights first"]].map(([value, text]) => element("option", { value, text })));
    this.colouring = element("select", { "aria-label": "colour of tokens", onchange: () => this.show() }, ...COLOURINGS.map(([value, text]) => element("option", { value, text })));
    this.colouring.value = "logprob";
    this.count = element("span", { class: "note", role: "status", "data-count": "" });
    this.list = element("div", { class: "card list", tabindex: "0", role: "listbox", "aria-label": "samples", onscroll: () => this.draw(), onkeydown: (event) => this.key(event) });
    this.space = element("div");
    this.list.append(this.space);
    this.detail = element("div", { class: "card detail" });
    parent.append(
      element("div", { class: "controls" }, input("text", { type: "search", placeholder: "find text", "aria-label": "find text" }), pair("step", "step"), pair("reward", "reward"), pair("length", "length"), element("label", {}, "order", this.sort), element("label", {}, "tokens", this.colouring), element("button", { text: "clear", onclick: () => { Object.values(this.inputs).forEach((each) => { each.value = ""; }); this.prompt = null; this.filter(); } })),
      element("p", {}, this.count, this.run.samples.note ? element("span", { class: "note warn", text: ` ${this.run.samples.note}` }) : null),
      element("div", { class: "browser" }, this.list, this.detail));
    THEME.listeners.push(() => this.show());
  }

  range(name) {
    const number = (key, other) => { const text = this.inputs[`${name}-${key}`].value; return text === "" ? other : Number(text); };
    return [number("from", -Infinity), number("to", Infinity)];
  }

  /* Choose the rows that the filters let through; a text is looked for chunk by chunk, so that the page stays responsive. */
  async filter() {
    const search = ++this.search, { step, reward, length, prompt } = this.table.columns;
    const [s0, s1] = this.range("step"), [r0, r1] = this.range("reward"), [l0, l1] = this.range("length");
    let ids = [];
    for (let i = 0; i < this.table.n; i++) {
      if (step[i] >= s0 && step[i] <= s1 && length[i] >= l0 && length[i] <= l1 && ((reward[i] >= r0 - 1e-6 && reward[i] <= r1 + 1e-6) || (Number.isNaN(reward[i]) && r0 === -Infinity && r1 === Infinity)) && (this.prompt == null || prompt[i] === this.prompt)) ids.push(i);
    }
    const text = this.inputs.text.value.toLowerCase();
    if (text) {
      const found = [];
      let shownAt = 0;
      for (let j = 0; j < ids.length; j++) {
        const sample = await this.text(ids[j]);
        if (search !== this.search) return;
        if ((sample.response || "").toLowerCase().includes(text) || (sample.prompt || "").toLowerCase().includes(text)) found.push(ids[j]);
        if (performance.now() - shownAt > 150) { shownAt = performance.now(); this.count.textContent = `looking: ${found.length.toLocaleString("en")} of ${(j + 1).toLocaleString("en")} so far`; await new Promise((done) => setTimeout(done)); if (search !== this.search) return; }
      }
      ids = found;
    }
    const key = this.sort.value.replace("-", ""), sign = this.sort.value.startsWith("-") ? -1 : 1, column = this.table.columns[key];
    this.rows = Int32Array.from(ids);
    if (this.sort.value !== "step") this.rows.sort((a, b) => sign * ((column[a] || 0) - (column[b] || 0)) || a - b);
    this.count.textContent = `${this.rows.length.toLocaleString("en")} of ${this.table.n.toLocaleString("en")} samples`;
    this.space.style.height = `${this.rows.length * ROW}px`;
    if (!this.rows.includes(this.chosen)) this.chosen = this.rows.length ? this.rows[0] : null;
    this.draw(); this.show();
  }

  /* Draw the rows in view. */
  draw() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 4), last = Math.min(this.rows.length, first + Math.ceil(this.list.clientHeight / ROW) + 8);
    const made = [];
    for (let j = first; j < last; j++) {
      const id = this.rows[j], reward = this.value("reward", id), line = element("div", { text: "…" });
      const row = element("div", { class: `row${id === this.chosen ? " chosen" : ""}`, role: "option", "aria-selected": String(id === this.chosen), style: `top:${j * ROW}px`, onclick: () => this.choose(id) },
        element("div", { class: "top" }, element("span", { class: `reward ${this.level(reward)}`, text: shown(reward) }), element("span", { text: `step ${this.value("step", id)}` }), element("span", { text: `${this.value("length", id)} ${this.run.samples.unit}` })), line);
      this.text(id).then((sample) => { line.textContent = (sample.response || "").replace(/\s+/g, " ").slice(0, 160) || "(empty)"; }, (error) => { line.textContent = String(error); });
      made.push(row);
    }
    this.space.replaceChildren(...made);
  }

  level(reward) {
    if (this.limits == null || this.limits.n !== this.table.n) {
      let low = Infinity, high = -Infinity;
      for (const each of this.table.columns.reward) { if (each < low) low = each; if (each > high) high = each; }
      this.limits = { low, high, n: this.table.n };
    }
    const { low, high } = this.limits;
    return high > low ? (reward >= high - (high - low) / 3 ? "high" : reward <= low + (high - low) / 3 ? "low" : "") : "";
  }

  key(event) {
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (!move || !this.rows.length) return;
    event.preventDefault();
    const place = Math.min(this.rows.length - 1, Math.max(0, this.rows.indexOf(this.chosen) + move));
    if (place * ROW < this.list.scrollTop) this.list.scrollTop = place * ROW;
    if ((place + 1) * ROW > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = (place + 1) * ROW - this.list.clientHeight;
    this.choose(this.rows[place]);
  }

  choose(id) {
    this.chosen = id;
    const top = this.rows.indexOf(id) * ROW, { scrollTop, clientHeight } = this.list;
    if (top >= 0 && (top < scrollTop || top + ROW > scrollTop + clientHeight)) this.list.scrollTop = top - clientHeight / 2;
    this.draw(); this.show();
  }

  /* Show the chosen sample, its group side by side, and the samples of its prompt at other steps. */
  async show() {
    const id = this.chosen;
    if (id == null || !this.table) { this.detail.replaceChildren(element("p", { class: "note", text: "no sample" })); return; }
    const { step, prompt } = this.table.columns, group = [], others = [];
    for (let i = 0; i < this.table.n; i++) if (prompt[i] === prompt[id]) (step[i] === step[id] ? group : others).push(i);
    const sample = await this.text(id), texts = await Promise.all(group.map((each) => this.text(each)));
    if (id !== this.chosen) return;
    const scale = this.scale(texts), facts = [["reward", shown(this.value("reward", id))], ...this.rewardNames().map((name) => [name.slice(7), shown(this.value(name, id))]), ["step", this.value("step", id)], ["length", `${this.value("length", id)} ${this.run.samples.unit}`], ["weights of version", this.versions(id)], ["ended", { length: "at the limit", stop: "by itself", done: "by itself", turns: "out of turns", context: "out of context", time: "out of time", parse: "at a call that cannot be read", failed: "by an error of its environment" }[sample.finish_reason] || sample.finish_reason || "–"], ["source", sample.data_source]];
    const children = [
      element("h3", { text: "Prompt" }), element("pre", { class: "text", "data-part": "prompt", text: sample.prompt || "" }),
      element("h3", { text: "Completion" }), element("div", { class: "facts" }, ...facts.filter(([, value]) => value != null && value !== "–").map(([name, value]) => element("span", { text: `${name} ${value}` }))), this.completion(sample, scale), this.legend(sample, scale),
      element("h3", { text: "Ground truth" }), element("pre", { class: "text", "data-part": "truth", text: sample.ground_truth == null ? "–" : sample.ground_truth }),
    ];
    if (group.length > 1) children.push(element("h3", { text: `Group: ${group.length} logged completions of this prompt at step ${step[id]}` }), element("div", { class: "group" }, ...group.map((each, j) => element("div", { class: each === id ? "chosen" : "", onclick: () => this.choose(each) }, element("div", { class: "note" }, element("span", { class: `reward ${this.level(this.value("reward", each))}`, text: shown(this.value("reward", each)) }), ` ${this.value("length", each)} ${this.run.samples.unit}`), this.completion(texts[j], scale)))));
    if (others.length) {
      const lines = [...others, id].sort((a, b) => step[a] - step[b]).slice(0, 400);
      const history = element("tbody", {}, ...lines.map((each) => { const cell = element("td", { class: "mono", text: "…" }); this.text(each).then((other) => { cell.textContent = (other.response || "").slice(0, 300); }); return element("tr", { class: each === id ? "differs" : "", onclick: () => this.choose(each) }, element("td", { class: "number", text: step[each] }), element("td", { class: `number reward ${this.level(this.value("reward", each))}`, text: shown(this.value("reward", each)) }), cell); }));
      children.push(element("h3", { text: `This prompt over the steps: ${others.length + 1} logged completions` }), element("button", { text: "list only this prompt", onclick: () => { this.prompt = prompt[id]; this.filter(); } }), element("div", { class: "scroll" }, element("table", { "data-part": "history" }, element("thead", {}, element("tr", {}, element("th", { class: "number", text: "step" }), element("th", { class: "number", text: "reward" }), element("th", { text: "completion" }))), history)));
    }
    this.detail.replaceChildren(...children);
  }

  /* Return the versions of the weights that wrote a sample, and how old they were when it was trained. */
  versions(id) {
    const newest = this.value("version", id), age = this.value("age", id), oldest = this.value("step", id) - 1 - age;
    if (Number.isNaN(newest)) return null;
    return `${oldest < newest ? `${oldest} to ` : ""}${newest}${age > 0 ? `, ${age} ${age === 1 ? "step" : "steps"} old` : ""}`;
  }

  /* Return the age of each token's weights; tokens of a sample that has none of their own are as old as the sample. */
  ages(sample) {
    if (sample.id === undefined || !sample.tokens) return undefined;
    const age = this.value("age", sample.id), trained = this.value("step", sample.id) - 1;
    if (Number.isNaN(age)) return undefined;
    return sample.versions ? sample.versions.map((version) => trained - version) : sample.tokens.map(() => age);
  }

  values(sample) {
    const { rollout_logprobs: rollout, trainer_logprobs: trainer, advantages } = sample;
    if (this.colouring.value === "logprob") return rollout;
    if (this.colouring.value === "gap") return rollout && trainer ? rollout.map((each, i) => (each == null || trainer[i] == null ? null : trainer[i] - each)) : undefined;
    if (this.colouring.value === "age") return this.ages(sample);
    return this.colouring.value === "advantage" ? advantages : undefined;
  }

  /* Return the value at which the colour is full: 4 nats of a log-prob, else the largest of the group. */
  scale(samples) {
    if (this.colouring.value === "logprob") return 4;
    const all = samples.flatMap((each) => this.values(each) || []).map(Math.abs);
    return Math.max({ gap: 0.01, age: 1 }[this.colouring.value] || 1e-6, ...all);
  }

  colour(value, scale) {
    if (value == null) return "transparent";
    const strength = Math.min(1, Math.abs(value) / scale), dark = isDark();
    const hue = this.colouring.value === "age" ? (dark ? "150,110,220" : "130,90,210") : this.colouring.value === "logprob" ? (dark ? "220,120,60" : "230,110,40") : value > 0 ? (dark ? "60,160,90" : "40,160,80") : (dark ? "215,75,85" : "225,60,70");
    return `rgba(${hue},${(0.75 * strength).toFixed(3)})`;
  }

  completion(sample, scale) {
    const values = this.values(sample), text = element("pre", { class: "text", "data-part": "response" });
    if (!sample.tokens || !values) { text.append(...this.turns(sample)); return text; }
    const reads = new Map((sample.reads || []).map((read) => [read.at, read.text]));
    sample.tokens.forEach((token, i) => {
      if (reads.has(i)) text.append(this.read(reads.get(i)));
      const facts = [["log-prob", sample.rollout_logprobs], ["trainer", sample.trainer_logprobs], ["advantage", sample.advantages], ["version", sample.versions]].filter(([, list]) => list && list[i] != null).map(([name, list]) => `${name} ${list[i]}`);
      text.append(element("span", { text: token, title: [JSON.stringify(token), ...facts].join("\n"), style: `background:${this.colour(values[i], scale)}` }));
    });
    return text;
  }

  /* Return the turns of an episode, with what the model read between them, which logs have in ⟦brackets⟧. */
  turns(sample) {
    const response = sample.response || "";
    if (["stop", "length", undefined].includes(sample.finish_reason)) return [response];
    return response.split(/⟦([^⟧]*)⟧/).map((part, i) => (i % 2 ? this.read(part) : part));
  }

  read(text) { return element("div", { class: "read", title: "read, not trained", text }); }

  legend(sample, scale) {
    const kind = this.colouring.value;
    if (kind === "none") return null;
    if (!sample.tokens) return element("p", { class: "note", text: "The values of this sample's tokens are not in the log or not in this page." });
    if (!this.values(sample)) return element("p", { class: "note", text: kind === "gap" ? "The trainer's log-probs of this sample were not computed before the update (actor.recompute_logprob)." : "This value was not logged." });
    const oneSided = kind === "logprob" || kind === "age", from = oneSided ? 0 : -scale, to = kind === "logprob" ? -scale : scale;
    const unit = { advantage: "", age: " steps", logprob: " nats", gap: " nats" }[kind];
    return element("p", { class: "note" }, `${shown(from)} `, element("i", { class: "scale", style: `background:linear-gradient(90deg, ${this.colour(from, scale)}, transparent ${oneSided ? "0%" : "50%"}, ${this.colour(to, scale)})` }), ` ${shown(to)}${unit}`);
  }
}

window.showSamples = async function () {
  const holder = byId("samples-body"), runs = PAGE.runs.map((run, r) => [run, r]).filter(([run]) => run.samples && run.samples.n);
  if (!runs.length) return;
  byId("samples").hidden = false;
  const open = async (run, r) => { holder.querySelector(".body").replaceChildren(); run.browser = new SampleBrowser(run, r, holder.querySelector(".body")); PAGE.browser = run.browser; await run.browser.open(); };
  const choice = element("select", { "aria-label": "run", onchange: (event) => open(PAGE.runs[event.target.value], Number(event.target.value)) }, ...runs.map(([run, r]) => element("option", { value: r, text: run.name })));
  holder.replaceChildren(...(runs.length > 1 ? [element("div", { class: "controls" }, element("label", {}, "run", choice))] : []), element("div", { class: "body" }));
  await open(...runs[0]);
};

window.followSamples = async function (run, r, state) {
  if (!state.samples || !run.samples) return;
  const before = run.browser && run.browser.table ? run.browser.table.n : 0;
  run.samples = state.samples;
  const areOthers = run.browser && run.browser.changes !== state.samples.changes;
  if (state.samples.n === before && !areOthers) return;
  if (!run.browser) { if (byId("samples").hidden) await window.showSamples(); return; }
  if (areOthers) { run.browser.chunks.clear(); run.browser.changes = state.samples.changes; }
  run.browser.table = await tableBlock(`${r}-samples-index`);
  run.browser.offerAges();
  await run.browser.filter();
};
