"use strict";
/* Data and small tools that all parts of the page share. Everything that a run wrote is shown as text, never as HTML. */
const PAGE = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#4477dd", "#e8833a", "#2f9e60", "#cc4c5e", "#8a63c9", "#98693f", "#d65fa8", "#6b7785", "#a9a11f", "#1f9fb4"];

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

const byId = (id) => document.getElementById(id);

/* Return a number as a person reads it: 0.938, 5,162, 1.5e-7. */
function shown(value) {
  if (value == null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e7 || size < 1e-4) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

/* Return the element of a block, which may stand further down than the browser has read; null if the page lacks it. */
async function elementOf(name) {
  const find = () => document.querySelector(`script[data-block="${name}"]`);
  if (find() || PAGE.live || document.readyState !== "loading") return find();
  await new Promise((done) => { document.addEventListener("DOMContentLoaded", done, { once: true }); });
  return find();
}

/* Unpack a block: from this page, or from the server of a live one. */
async function block(name, query = "") {
  let stream;
  const inPage = await elementOf(name);
  if (inPage) {
    const text = atob(inPage.textContent);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    stream = new Blob([bytes]).stream();
  } else {
    const answer = await fetch(`blocks/${name}${query}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
    stream = answer.body;
  }
  return new Response(stream.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

async function textBlock(name, query) {
  return JSON.parse(new TextDecoder().decode(await block(name, query)));
}

/* Unpack a table into {n, names, columns: {name: Float32Array}} and what else its header says. */
async function tableBlock(name, query) {
  const buffer = await block(name, query);
  const size = new DataView(buffer).getUint32(0, true);
  const table = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  table.columns = {};
  table.names.forEach((each, i) => { table.columns[each] = new Float32Array(buffer, 4 + size + 4 * i * table.n, table.n); });
  return table;
}

/* Run plotly's script. Nothing takes longer, so it is unpacked before all else, and run when the page shows all else; the
   browser compiles a script that has an address beside its other work. */
const PLOTLY = block("plotly");
async function runPlotly() {
  const address = URL.createObjectURL(new Blob([await PLOTLY], { type: "text/javascript" }));
  const script = element("script", { src: address });
  await new Promise((done, failed) => { script.onload = done; script.onerror = () => failed(new Error("plotly's script cannot be run")); document.head.append(script); });
  URL.revokeObjectURL(address);
}

/* Append the rows of `more` to `table`; a column that one of them lacks is NaN there. */
function appended(table, more) {
  if (!table) return more;
  const names = [...new Set([...table.names, ...more.names])];
  const columns = {};
  for (const name of names) {
    const column = new Float32Array(table.n + more.n).fill(NaN);
    if (table.columns[name]) column.set(table.columns[name]);
    if (more.columns[name]) column.set(more.columns[name], table.n);
    columns[name] = column;
  }
  return { ...more, names, columns, n: table.n + more.n };
}

function isDark() { return document.documentElement.dataset.theme === "dark"; }
function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

/* Light or dark: the system's choice until the button is pressed. */
const THEME = { listeners: [] };
(function () {
  let stored = null;
  try { stored = localStorage.getItem("fivefold-theme"); } catch (error) { /* pages of some browsers have no storage */ }
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = (dark) => { document.documentElement.dataset.theme = dark ? "dark" : "light"; THEME.listeners.forEach((f) => f()); };
  apply(stored ? stored === "dark" : system.matches);
  system.addEventListener("change", () => { if (!stored) apply(system.matches); });
  byId("theme").addEventListener("click", () => {
    stored = isDark() ? "light" : "dark";
    try { localStorage.setItem("fivefold-theme", stored); } catch (error) { /* it holds until the page is closed */ }
    apply(stored === "dark");
  });
  const printing = (on) => { document.documentElement.classList.toggle("printing", on); if (on) document.documentElement.dataset.theme = "light"; else apply(stored ? stored === "dark" : system.matches); THEME.listeners.forEach((f) => f()); };
  addEventListener("beforeprint", () => printing(true));
  addEventListener("afterprint", () => printing(false));
})();
