// What attends to what: all heads small, and one of them with the tokens beside it.

import { address, digits, make } from "./page.js";
import { plain, positionIn, quoted, reading, shade } from "./tokens.js";

const CELL = 14; // pixels of a token in the map

export function attended({ tokens, maps }, asked, change) {
  const head = make("select", { name: "head" }, ...maps.map((_, i) => make("option", { value: i }, String(i))));
  const told = make("p", { role: "status" }), block = asked.block ?? 0;
  const map = make("canvas", { class: "map", role: "img", width: tokens.length, height: tokens.length });
  map.style.width = map.style.height = `${CELL * tokens.length}px`;
  const named = (kind) => make("div", { class: kind, "aria-hidden": "true" }, ...tokens.map((token) => make("span", {}, plain(token))));
  const framed = make("div", { class: "scroll" }, make("div", { class: "mapped" }, named("columns"), named("rows"), map));
  const text = reading(tokens, (at) => change({ at }));
  head.addEventListener("change", () => change({ head: head.value }));
  map.addEventListener("click", (event) => {
    const box = map.getBoundingClientRect();
    change({ at: Math.min(tokens.length - 1, Math.floor(((event.clientY - box.top) / box.height) * tokens.length)) });
  });
  function show(fields) {
    head.value = maps[fields.head] ? fields.head : 0;
    const reader = positionIn(fields, tokens.length), rows = maps[head.value], row = rows[reader];
    text.mark(reader);
    text.spans.forEach((node, i) => (node.style.backgroundColor = shade(row[i] ?? 0)));
    const best = row.map((weight, i) => [weight, i]).sort((a, b) => b[0] - a[0]).slice(0, 5);
    const shares = best.map(([weight, i]) => `${quoted(tokens[i])} ${digits(100 * weight, 3)} %`);
    told.textContent = `${quoted(tokens[reader])} reads ${shares.join(", ")}`;
    map.ariaLabel = `attention of head ${head.value} of block ${block}: rows read columns`;
    paint(map, rows, reader);
  }
  const how =
    "Choose the token that reads, with a click or the arrow keys. The colour of the others is how much " +
    "it reads of them. In the map, a row reads its columns.";
  const heading = make("h2", {}, `Attention in block ${block}`), hint = make("p", { class: "quiet" }, how);
  const fields = make("div", { class: "fields" }, make("label", {}, "head", head));
  return { nodes: [heading, fields, hint, text.node, told, framed], show };
}

// Rows are the tokens that read, columns those that are read; the chosen row stands out.
function paint(canvas, rows, reader) {
  const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  context.clearRect(0, 0, canvas.width, canvas.height);
  rows.forEach((row, y) => {
    context.fillStyle = style.getPropertyValue(y === reader ? "--third" : "--main");
    row.forEach((weight, x) => {
      context.globalAlpha = Math.min(1, Math.sqrt(weight));
      context.fillRect(x, y, 1, 1);
    });
  });
}

// Every head of every block, small; a click leads to it.
export function gridOfHeads({ tokens, blocks }, asked) {
  const n = tokens.length, most = Math.max(...blocks.map(({ heads }) => heads.length));
  const link = (block, head) => (location.hash = address("text", { ...asked, ask: "attention", block, head, at: null }));
  const cell = (block, head, points) => {
    const label = `head ${head} of block ${block}`, canvas = make("canvas", { width: n, height: n });
    dot(canvas, points);
    return make("td", {}, make("button", { type: "button", title: label, "aria-label": label, click: () => link(block, head) }, canvas));
  };
  const line = ({ block, heads }) => make("tr", {}, make("th", { scope: "row" }, String(block)), ...heads.map((points, head) => cell(block, head, points)));
  const top = make("tr", {}, make("th", { scope: "col" }, "block"), ...Array.from({ length: most }, (_, i) => make("th", { scope: "col" }, `head ${i}`)));
  const table = make("table", { class: "heads" }, make("thead", {}, top), make("tbody", {}, ...blocks.map(line)));
  const hint = make("p", { class: "quiet" }, "A row of a map reads its columns; the root of the share is shown. A click leads to the head.");
  return { nodes: [make("h2", {}, "All heads"), hint, make("div", { class: "scroll", tabindex: 0 }, table)] };
}

// points: a byte for each pair of tokens, in base64.
function dot(canvas, points) {
  const context = canvas.getContext("2d"), bytes = Uint8Array.from(atob(points), (sign) => sign.charCodeAt(0));
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--main");
  context.fillRect(0, 0, 1, 1);
  const [red, green, blue] = context.getImageData(0, 0, 1, 1).data;
  const image = context.createImageData(canvas.width, canvas.height);
  bytes.forEach((share, i) => image.data.set([red, green, blue, share], 4 * i));
  context.putImageData(image, 0, 0);
}
