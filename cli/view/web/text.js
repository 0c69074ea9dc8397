// A text as the model reads it: the loss of every token, and what each attends to.

import { ask, card, digits, make, send } from "./page.js";

const MOST = 8; // a loss from which on the colour stays the same, in nats

export function text(place) {
  const area = make("textarea", { rows: 4, name: "text", "aria-label": "Text", placeholder: "A text to look into" });
  const block = make("input", { type: "number", min: 0, value: 0, name: "block" });
  const loss = make("button", { type: "submit", class: "main" }, "Losses");
  const attention = make("button", { type: "button" }, "Attention");
  const stop = make("button", { type: "button", disabled: true }, "Stop");
  const note = make("p", { class: "quiet", role: "status" }), result = make("section", { class: "card", hidden: true });
  const fields = make("div", { class: "fields" }, loss, make("label", {}, "block", block), attention, stop);
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
      const found = await send(path, body, mine.signal);
      result.replaceChildren(...drawn(found));
      result.hidden = false;
      note.textContent = `${found.tokens.length} tokens, ${seconds()} s`;
    } catch (error) {
      note.textContent = error.name === "AbortError" ? "stopped" : error.message;
      if (error.name !== "AbortError") note.className = "fault";
    }
    clearInterval(clock);
    if (running === mine) stop.disabled = true;
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    compute("losses", { text: area.value }, coloured);
  });
  attention.addEventListener("click", () =>
    compute("attention", { text: area.value, block: Number(block.value) }, (found) => attended(found, block.value)));
  stop.addEventListener("click", () => running?.abort());
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  ask("model").then((known) => {
    const n = Number(known.facts.find(([name]) => name === "blocks")?.[1].replaceAll(",", ""));
    if (n) block.max = n - 1;
  });
}

const shade = (share) => `color-mix(in srgb, var(--heat) ${Math.round(75 * Math.min(Math.max(share, 0), 1))}%, transparent)`;

// Tokens as buttons in the order of the text; line breaks stay.
function tokens(texts, pressed) {
  const place = make("div", { class: "tokens", role: "group", "aria-label": "Tokens" });
  texts.forEach((token, i) => {
    const button = make("button", { type: "button", "aria-pressed": "false", click: () => press(i) }, token || "␀");
    place.append(button);
    if (token.endsWith("\n")) place.append(make("br"));
  });
  function press(i) {
    place.querySelectorAll("button").forEach((each, j) => each.setAttribute("aria-pressed", i === j));
    pressed(i);
  }
  place.paint = (share) => place.querySelectorAll("button").forEach((each, i) => (each.style.backgroundColor = shade(share(i))));
  place.press = press;
  place.addEventListener("keydown", (event) => {
    const all = [...place.querySelectorAll("button")], at = all.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || !all[to]) return;
    event.preventDefault();
    all[to].focus();
    press(to);
  });
  return place;
}

function coloured({ tokens: texts, losses, mean }) {
  const told = make("p", { role: "status" }, "Choose a token to see its loss.");
  const place = tokens(texts, (i) => {
    const sentence = i ? `loss ${digits(losses[i - 1])}, probability ${digits(100 * Math.exp(-losses[i - 1]), 3)} %` : "the first token has nothing before it that could predict it";
    told.replaceChildren(make("code", {}, JSON.stringify(texts[i])), ` ${sentence}`);
  });
  place.paint((i) => (i ? losses[i - 1] / MOST : 0));
  const heading = make("h2", {}, `Loss of each token: ${digits(mean)} on average, perplexity ${digits(Math.exp(mean))}`);
  return [heading, place, told, make("p", { class: "quiet" }, `The stronger the colour, the less expected; from ${MOST} nats on it stays the same.`)];
}

function attended({ tokens: texts, maps }, block) {
  const head = make("select", {}, ...maps.map((_, i) => make("option", { value: i }, String(i))));
  const told = make("p", { role: "status" });
  const map = make("canvas", { class: "map", role: "img", width: texts.length, height: texts.length });
  let reader = texts.length - 1;
  const place = tokens(texts, (i) => {
    reader = i;
    draw();
  });
  function draw() {
    const rows = maps[head.value], row = rows[reader];
    place.paint((i) => row[i] ?? 0);
    const best = row.map((weight, i) => [weight, i]).sort((a, b) => b[0] - a[0]).slice(0, 5);
    told.textContent = `${JSON.stringify(texts[reader])} reads ` + best.map(([weight, i]) => `${JSON.stringify(texts[i])} ${digits(100 * weight, 3)} %`).join(", ");
    map.ariaLabel = `attention of head ${head.value} of block ${block}: rows read columns`;
    paint(map, rows);
  }
  head.addEventListener("change", draw);
  map.addEventListener("click", (event) => {
    const box = map.getBoundingClientRect();
    place.press(Math.min(texts.length - 1, Math.floor(((event.clientY - box.top) / box.height) * texts.length)));
  });
  place.press(reader);
  const choice = make("div", { class: "fields" }, make("label", {}, "head", head));
  return [make("h2", {}, `Attention in block ${block}`), choice, make("p", { class: "quiet" }, "Choose the token that reads; the colour of the others is how much it reads of them."), place, told, map];
}

// Rows are the tokens that read, columns those that are read.
function paint(canvas, rows) {
  const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = style.getPropertyValue("--main");
  rows.forEach((row, y) => row.forEach((weight, x) => {
    context.globalAlpha = Math.min(1, Math.sqrt(weight));
    context.fillRect(x, y, 1, 1);
  }));
  context.globalAlpha = 1;
}
