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

// Lines with a label each; one without goes on with the line above.
export function rows(pairs) {
  const line = ([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value));
  return make("table", { class: "rows" }, make("tbody", {}, ...pairs.map(line)));
}

// right: numbers of the columns whose cells end flush.
export function table(heads, lines, right = []) {
  const kind = (i) => (right.includes(i) ? { class: "number" } : {});
  const head = make("tr", {}, ...heads.map((name, i) => make("th", { scope: "col", ...kind(i) }, name)));
  const body = lines.map((line) => make("tr", {}, ...line.map((text, i) => make("td", kind(i), text))));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
}

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

// The object that the server answers; a list is a field that is there several times. An Error with its sentence if it refuses.
export async function ask(path, fields = {}, signal) {
  const given = Object.entries(fields).filter(([, value]) => value != null && value !== "");
  const query = new URLSearchParams(given.flatMap(([name, value]) => [value].flat().map((each) => [name, each])));
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

export const COMPUTING = "computing; the first time, kernels are compiled";

// What is in a place once `work` is done: meanwhile a note, and its sentence if it fails. A later
// work for the same place ends an earlier one.
const latest = new WeakMap();
export async function fill(place, work, words = "…") {
  latest.get(place)?.abort();
  const turn = new AbortController();
  latest.set(place, turn);
  const note = make("p", { class: "quiet", role: "status" }, words);
  const wait = setTimeout(() => place.replaceChildren(note), 150);
  let found;
  try {
    found = await work(turn.signal);
  } catch (error) {
    found = [make("p", { class: "fault", role: "alert" }, error.message)];
  }
  clearTimeout(wait);
  if (latest.get(place) === turn) place.replaceChildren(...[found].flat());
}

// Scroll a list or a picture, and it alone, until a node of it is seen.
export function reveal(node) {
  const frame = node?.closest(".scroll");
  if (!frame) return;
  const [inner, outer] = [node, frame].map((each) => each.getBoundingClientRect());
  if (inner.top < outer.top || inner.bottom > outer.bottom)
    frame.scrollTop += inner.top - outer.top - (outer.height - inner.height) / 2;
  if (inner.left < outer.left || inner.right > outer.right)
    frame.scrollLeft += inner.left - outer.left - (outer.width - inner.width) / 2;
}

// An address inside this page: #/graph?section=1.
export function address(view, fields = {}) {
  const given = Object.entries(fields).filter(([, value]) => value != null && value !== "");
  const query = new URLSearchParams(given).toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

// Go to such an address without a step for the back button, as where something is played.
export function replaced(place) {
  history.replaceState(null, "", place);
  window.dispatchEvent(new Event("hashchange"));
}
