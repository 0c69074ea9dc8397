// A text as the model reads it: the loss of every token, and what each attends to.

import { ask, card, digits, make, send } from "./page.js";

export function text(place, state) {
  const area = make("textarea", { rows: 4, name: "text", "aria-label": "Text", placeholder: "A text to look into" });
  const block = make("input", { type: "number", min: 0, value: 0, name: "block" });
  const model = make("select", { name: "model", "aria-label": "Model" }, make("option", { value: "" }, "the file alone"));
  for (const { name, kind } of state.runs ?? [])
    if (kind) model.append(make("option", { value: name }, kind === "model" ? `the model of ${name}` : `with ${name}`));
  const loss = make("button", { type: "submit", class: "main" }, "Losses");
  const attention = make("button", { type: "button" }, "Attention");
  const stop = make("button", { type: "button", disabled: true }, "Stop");
  const note = make("p", { class: "quiet", role: "status" }), result = make("section", { class: "card", hidden: true });
  const [ofModel, ofBlock] = [make("label", {}, "model", model), make("label", {}, "block", block)];
  const fields = make("div", { class: "fields" }, ofModel, loss, ofBlock, attention, stop);
  const form = make("form", {}, area, fields, note);
  let running = null;
  place.append(card(make("h2", {}, "A text"), form), result);

  async function compute(path, body, drawn) {
    running?.abort();
    const mine = (running = new AbortController());
    const began = performance.now();
    const seconds = () => ((performance.now() - began) / 1000).toFixed(1);
    const clock = setInterval(() => (note.textContent = `computing, ${seconds()} s; the first time, kernels are compiled`), 200);
    stop.disabled = false;
    note.className = "quiet";
    try {
      const found = await send(path, { text: area.value, run: model.value || null, ...body }, mine.signal);
      result.replaceChildren(...drawn(found));
      result.hidden = false;
      const part = found.n_all > found.n_tokens ? `the first ${found.n_tokens} of ${found.n_all}` : found.n_tokens;
      note.textContent = `${part} tokens, ${seconds()} s`;
    } catch (error) {
      note.textContent = error.name === "AbortError" ? "stopped" : error.message;
      if (error.name !== "AbortError") note.className = "fault";
    }
    clearInterval(clock);
    if (running === mine) stop.disabled = true;
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    compute("losses", {}, coloured);
  });
  attention.addEventListener("click", () =>
    compute("attention", { block: Number(block.value) }, (found) => attended(found, block.value)));
  stop.addEventListener("click", () => running?.abort());
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  ask("model").then(({ fault, n_layer, sample }) => {
    area.value ||= sample;
    block.max = n_layer - 1;
    loss.disabled = attention.disabled = Boolean(fault);
    note.textContent = fault;
  });
}

const shade = (share) => `color-mix(in srgb, var(--heat) ${Math.round(75 * Math.min(Math.max(share, 0), 1))}%, transparent)`;

// Tokens that are walked with the arrow keys; chosen(i) hears which one is chosen.
function walked(nodes, chosen) {
  const choose = (i) => {
    nodes.forEach((node, j) => {
      node.setAttribute("aria-pressed", i === j);
      node.tabIndex = i === j ? 0 : -1;
    });
    chosen(i);
  };
  nodes.forEach((node, i) => {
    node.setAttribute("role", "button");
    node.setAttribute("aria-pressed", "false");
    node.tabIndex = i ? -1 : 0;
    node.addEventListener("click", () => choose(i));
    node.addEventListener("keydown", (event) => {
      const last = nodes.length - 1;
      const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: last, Enter: i, " ": i }[event.key];
      if (!nodes[to]) return;
      event.preventDefault();
      nodes[to].focus();
      choose(to);
    });
  });
  return choose;
}

function coloured({ html, about, loss }) {
  const place = make("div"), told = make("pre", { role: "status" }, "Choose a token, with a click or the arrow keys.");
  place.innerHTML = html; // the server's fragment, in which nothing of a text is markup
  walked([...place.querySelectorAll(".tokens [title]")], (i) => (told.textContent = about[i]));
  const heading = make("h2", {}, `Loss of each token: ${digits(loss)} on average, perplexity ${digits(Math.exp(loss))}`);
  return [heading, place, told];
}

const CELL = 14; // pixels of a token in the map
const plain = (token) => token.replace("\n", "") || "‥";

function attended({ tokens, maps }, block) {
  const head = make("select", { name: "head" }, ...maps.map((_, i) => make("option", { value: i }, String(i))));
  const told = make("p", { role: "status" });
  const map = make("canvas", { class: "map", role: "img", width: tokens.length, height: tokens.length });
  map.style.width = map.style.height = `${CELL * tokens.length}px`;
  const named = (kind) => make("div", { class: kind, "aria-hidden": "true" }, ...tokens.map((token) => make("span", {}, plain(token))));
  const framed = make("div", { class: "scroll" }, make("div", { class: "mapped" }, named("columns"), named("rows"), map));
  const nodes = tokens.map((token) => make("span", {}, token || "‥"));
  let reader = tokens.length - 1;
  const choose = walked(nodes, (i) => {
    reader = i;
    draw();
  });
  function draw() {
    const rows = maps[head.value], row = rows[reader];
    nodes.forEach((node, i) => (node.style.backgroundColor = shade(row[i] ?? 0)));
    const best = row.map((weight, i) => [weight, i]).sort((a, b) => b[0] - a[0]).slice(0, 5);
    const quoted = (i) => `“${plain(tokens[i])}”`;
    const shares = best.map(([weight, i]) => `${quoted(i)} ${digits(100 * weight, 3)} %`);
    told.textContent = `${quoted(reader)} reads ${shares.join(", ")}`;
    map.ariaLabel = `attention of head ${head.value} of block ${block}: rows read columns`;
    paint(map, rows, reader);
  }
  head.addEventListener("change", draw);
  map.addEventListener("click", (event) => {
    const box = map.getBoundingClientRect();
    choose(Math.min(tokens.length - 1, Math.floor(((event.clientY - box.top) / box.height) * tokens.length)));
  });
  choose(reader);
  const fields = make("div", { class: "fields" }, make("label", {}, "head", head));
  const how =
    "Choose the token that reads, with a click or the arrow keys. The colour of the others is how much " +
    "it reads of them. In the map, a row reads its columns.";
  const heading = make("h2", {}, `Attention in block ${block}`), hint = make("p", { class: "quiet" }, how);
  return [heading, fields, hint, make("div", { class: "reading" }, ...nodes), told, framed];
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
