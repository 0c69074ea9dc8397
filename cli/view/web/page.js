// What all views are made of. Texts of files only ever become text nodes.

// An element: attributes by name, those that are functions as listeners, children as text or nodes.
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export const card = (...children) => make("section", { class: "card" }, ...children);

export function facts(pairs) {
  const rows = pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  return make("dl", { class: "facts" }, ...rows);
}

// rows: lists of cells, numbers on the right.
export function table(heads, rows) {
  const cell = (tag) => (value) =>
    make(tag, typeof value === "number" ? { class: "number" } : {}, value instanceof Node ? value : show(value));
  const head = make("tr", {}, ...heads.map((name) => make("th", { scope: "col" }, name)));
  const body = rows.map((row) => make("tr", {}, ...row.map(cell("td"))));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
}

const show = (value) => (typeof value === "number" ? value.toLocaleString("en") : String(value));

// A picture that the server drew.
export function picture(text) {
  const found = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  return document.importNode(found, true);
}

export function bytes(n) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (n < 999.5) return `${unit === "B" || n >= 99.95 ? n.toFixed(0) : n.toFixed(1)} ${unit}`;
    n /= 1000;
  }
  return `${n.toFixed(1)} TB`;
}

export const digits = (x, n = 4) => (x == null ? "" : String(Number(x.toPrecision(n))));

export const shape = (sizes) => sizes.join(" × ") || "1";

// The object that the server answers; an Error with its sentence if it refuses.
export async function ask(path, fields = {}, signal) {
  const given = Object.entries(fields).filter(([, value]) => value != null && value !== "");
  const query = new URLSearchParams(given);
  return answered(await fetch(`api/${path}?${query}`, { signal }));
}

export async function send(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return answered(await fetch(`api/${path}`, { method: "POST", headers, body: JSON.stringify(body), signal }));
}

async function answered(response) {
  const found = await response.json().catch(() => null);
  if (response.ok) return found;
  throw new Error(found?.error?.message ?? `the server answered ${response.status}`);
}

// What is in a place once `work` is done: meanwhile a note, and its sentence if it fails. Of several
// works for one place the last one counts.
const latest = new WeakMap();
export async function fill(place, work) {
  const turn = {};
  latest.set(place, turn);
  const note = make("p", { class: "quiet", role: "status" }, "…");
  const wait = setTimeout(() => place.replaceChildren(note), 150);
  let found;
  try {
    found = await work();
  } catch (error) {
    found = [make("p", { class: "fault", role: "alert" }, error.message)];
  }
  clearTimeout(wait);
  if (latest.get(place) === turn) place.replaceChildren(...[found].flat());
}

// An address inside this page: #/graph?section=1.
export function address(view, fields = {}) {
  const given = Object.entries(fields).filter(([, value]) => value != null && value !== "");
  const query = new URLSearchParams(given).toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}
