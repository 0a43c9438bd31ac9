"use strict";
/* The time line: a row for each process and thread. The wheel or two buttons zoom, dragging moves. */
const LINE = 22;

/* Return a colour for each of any number of names. */
const colourOf = (k) => `hsl(${Math.round((k * 137.5 + 215) % 360)} 48% 46%)`;

class TimelineView {
  constructor(run, number, parent) {
    this.run = run; this.number = number;
    this.canvas = element("canvas", { role: "img", "aria-label": `time line of ${run.name}`, style: "width:100%;display:block;touch-action:pan-y;cursor:grab" });
    this.tip = element("div", { class: "card note", style: "position:fixed;pointer-events:none;z-index:30;padding:3px 8px", hidden: true });
    this.note = element("span", { class: "note" });
    this.from = element("input", { type: "number", min: 1, "aria-label": "first step", onchange: () => this.toSteps() });
    this.to = element("input", { type: "number", min: 1, "aria-label": "last step", onchange: () => this.toSteps() });
    parent.append(element("div", { class: "controls" }, element("label", {}, "steps", this.from, "to", this.to), element("button", { text: "+", title: "zoom in", onclick: () => this.zoom(0.6) }), element("button", { text: "−", title: "zoom out", onclick: () => this.zoom(1 / 0.6) }), element("button", { text: "save as a trace", title: "for ui.perfetto.dev", onclick: () => this.save() }), this.note), element("div", { class: "card" }, this.canvas), this.legend = element("div", { class: "swatches" }), this.tip);
    this.canvas.addEventListener("wheel", (event) => { if (!event.ctrlKey && !event.metaKey && !event.altKey) return; event.preventDefault(); this.zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX); }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => { this.dragged = { x: event.offsetX, from: this.view[0] }; this.canvas.setPointerCapture(event.pointerId); });
    this.canvas.addEventListener("pointerup", () => { this.dragged = null; });
    this.canvas.addEventListener("pointermove", (event) => this.pointed(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    THEME.listeners.push(() => this.draw());
  }

  async open() {
    this.table = await tableBlock(`${this.number}-timeline`);
    const { since } = this.table.columns;
    this.starts = new Float64Array(this.table.n);
    for (let i = 0, at = 0; i < this.table.n; i++) { at += since[i]; this.starts[i] = at; }
    const steps = this.table.steps, last = steps.length ? steps[steps.length - 1][0] : null;
    if (last != null && !this.touched) { this.to.value = last; this.from.value = Math.max(steps[0][0], last - 3); this.toSteps(false); }
    else if (!this.view) { this.view = [0, this.end()]; this.draw(); } else this.draw();
    this.note.textContent = this.table.left_out ? `the newest ${this.table.n.toLocaleString("en")} events; ${this.table.left_out.toLocaleString("en")} older ones: fivefold timeline` : "";
  }

  end() { let end = 1; for (let i = 0; i < this.table.n; i++) end = Math.max(end, this.starts[i] + this.table.columns.seconds[i]); return end; }

  toSteps(touched = true) {
    this.touched = touched;
    const at = new Map(this.table.steps), from = Number(this.from.value), to = Number(this.to.value);
    if (!at.has(to)) return;
    this.view = [at.has(from - 1) ? at.get(from - 1) : 0, at.get(to)];
    if (!at.has(from - 1)) { const first = this.starts.find((start) => start > 0) || 0; this.view[0] = from <= 1 ? first : Math.max(first, 0); }
    this.draw();
  }

  zoom(factor, x) {
    const [from, to] = this.view, at = from + (to - from) * (x == null ? 0.5 : Math.max(0, (x - this.left) / (this.width - this.left)));
    this.view = [at - (at - from) * factor, at + (to - at) * factor];
    this.touched = true;
    this.draw();
  }

  pointed(event) {
    if (this.dragged) {
      const length = this.view[1] - this.view[0], move = ((event.offsetX - this.dragged.x) / (this.width - this.left)) * length;
      this.view = [this.dragged.from - move, this.dragged.from - move + length]; this.touched = true;
      this.draw();
      return;
    }
    const hit = this.boxes.findLast(([x, y, width]) => event.offsetX >= x && event.offsetX <= x + width && event.offsetY >= y && event.offsetY < y + LINE - 3);
    this.tip.hidden = !hit;
    if (hit) {
      const i = hit[3], { track, name, seconds } = this.table.columns;
      this.tip.textContent = `${this.table.tracks[track[i]]}: ${this.table.labels[name[i]]}, ${shown(seconds[i])} s`;
      this.tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 220)}px`; this.tip.style.top = `${event.clientY + 14}px`;
    }
  }

  draw() {
    if (!this.table || !this.view) return;
    const { tracks, labels, steps } = this.table, { track, name, seconds } = this.table.columns, ratio = devicePixelRatio || 1;
    this.width = this.canvas.clientWidth || 800;
    const height = tracks.length * LINE + 24;
    this.canvas.style.height = `${height}px`; this.canvas.width = this.width * ratio; this.canvas.height = height * ratio;
    const narrow = this.width < 600;
    this.left = narrow ? 104 : 190;
    const pen = this.canvas.getContext("2d"), [from, to] = this.view, scale = (this.width - this.left) / (to - from);
    pen.scale(ratio, ratio); pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
    const busy = new Float64Array(tracks.length), until = new Float64Array(tracks.length).fill(-Infinity);
    const inView = new Set();
    this.boxes = [];
    for (let i = 0; i < this.table.n; i++) {
      const start = this.starts[i], end = start + seconds[i];
      if (end < from || start > to) continue;
      const x = this.left + Math.max(0, start - from) * scale, right = this.left + Math.min(to - from, end - from) * scale, y = track[i] * LINE + 2;
      busy[track[i]] += Math.max(0, Math.min(to, end) - Math.max(from, start, until[track[i]])); until[track[i]] = Math.max(until[track[i]], end);
      pen.fillStyle = colourOf(name[i]);
      pen.fillRect(x, y, Math.max(1, right - x), LINE - 4);
      const wide = right - x;
      inView.add(name[i]);
      if (wide > 12 && pen.measureText(labels[name[i]]).width < wide - 8) { pen.fillStyle = "#fff"; pen.fillText(labels[name[i]], x + 4, y + LINE / 2 - 2); }
      this.boxes.push([x, y, Math.max(2, wide), i]);
    }
    pen.fillStyle = css("--ink");
    tracks.forEach((title, k) => {
      const share = `${Math.round((100 * busy[k]) / (to - from))}%`, begin = this.left - 6 - pen.measureText(share).width;
      pen.fillText(share, begin, k * LINE + LINE / 2);
      pen.save(); pen.beginPath(); pen.rect(0, k * LINE, begin - 4, LINE); pen.clip(); pen.fillText(narrow ? title.replace(", ", " · ") : title, 2, k * LINE + LINE / 2); pen.restore();
    });
    pen.strokeStyle = css("--faint"); pen.fillStyle = css("--faint"); pen.setLineDash([3, 3]);
    // A line ends a step; its number stands in its middle.
    let before = this.left, free = -Infinity;
    for (const [step, at] of steps) {
      const x = this.left + (at - from) * scale;
      if (x < this.left) continue;
      if (x <= this.width) { pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, tracks.length * LINE); pen.stroke(); }
      const label = `step ${step}`, size = pen.measureText(label).width, begin = (before + Math.min(x, this.width)) / 2 - size / 2;
      if (x > this.left + 1 && begin > Math.max(free, this.left) && begin + size < this.width) { pen.fillText(label, begin, tracks.length * LINE + 12); free = begin + size + 8; }
      before = x;
      if (x > this.width) break;
    }
    this.legend.replaceChildren(...labels.map((label, k) => (inView.has(k) ? element("span", {}, element("i", { style: `background:${colourOf(k)}` }), label) : "")), element("span", { text: `${shown(to - from)} s in view; percentages: busy in it` }), element("span", { class: "by-hand", text: "Ctrl and wheel zoom, drag moves" }));
  }

  save() {
    const { track, name, seconds } = this.table.columns, events = [];
    this.table.tracks.forEach((title, k) => events.push({ ph: "M", name: "process_name", pid: k + 1, tid: k + 1, args: { name: title } }));
    for (let i = 0; i < this.table.n; i++) events.push({ ph: "X", name: this.table.labels[name[i]], pid: track[i] + 1, tid: track[i] + 1, ts: this.starts[i] * 1e6, dur: seconds[i] * 1e6 });
    for (const [step, at] of this.table.steps) events.push({ ph: "i", s: "g", name: `end of step ${step}`, pid: 1, tid: 1, ts: at * 1e6 });
    const link = element("a", { href: URL.createObjectURL(new Blob([JSON.stringify({ traceEvents: events })], { type: "application/json" })), download: "trace.json" });
    link.click();
    URL.revokeObjectURL(link.href);
  }
}

window.showTimelines = async function () {
  const runs = PAGE.runs.map((run, r) => [run, r]).filter(([run]) => run.timeline);
  if (!runs.length) return;
  byId("timeline").hidden = false;
  for (const [run, r] of runs) {
    if (run.view) continue;
    const part = element("div", { "data-timeline": run.name }, runs.length > 1 ? element("h3", { text: run.name }) : null);
    byId("timeline-body").append(part);
    run.view = new TimelineView(run, r, part);
    await run.view.open();
  }
};

window.followTimeline = async function (run, r, state) {
  run.timeline = state.timeline;
  if (!run.timeline) return;
  if (!run.view) await window.showTimelines();
  else if (state.rows !== run.drawnRows) await run.view.open();
  run.drawnRows = state.rows;
};
