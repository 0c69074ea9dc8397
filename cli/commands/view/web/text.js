// A text as the model reads it. What is asked, and what is chosen in the answer, stand in the
// address: #/text?text=…&model=RUN&ask=attention&block=3&head=1&at=7

import { address, ask, card, digits, make, replaced, send } from "./page.js";
import { attended, gridOfHeads } from "./attention.js";
import { compared } from "./compare.js";
import { attributed, lensed } from "./lens.js";
import { walked } from "./tokens.js";

// By path: the button, what draws the answer, and which fields of the address it depends on.
const QUESTIONS = {
  losses: ["Losses", coloured, []],
  heads: ["All heads", gridOfHeads, []],
  lens: ["Logit lens", lensed, []],
  attribution: ["Attribution", attributed, ["at"]],
  compare: ["Base and adapter", compared, []],
  attention: ["Attention", attended, ["block"]],
};

export function text(place, state) {
  const area = make("textarea", { rows: 4, name: "text", "aria-label": "Text", placeholder: "A text to look into" });
  const block = make("input", { type: "number", min: 0, value: 0, name: "block" });
  const model = make("select", { name: "model", "aria-label": "Model" }, make("option", { value: "" }, "the file alone"));
  for (const { name, kind } of state.runs ?? [])
    if (kind) model.append(make("option", { value: name }, kind === "model" ? `the model of ${name}` : `with ${name}`));
  const buttons = Object.entries(QUESTIONS).map(([name, [label]]) =>
    make("button", { type: name === "losses" ? "submit" : "button", name, click: () => name !== "losses" && pose(name) }, label));
  const stop = make("button", { type: "button", disabled: true, click: () => running?.abort() }, "Stop");
  const note = make("p", { class: "quiet", role: "status" }), result = make("section", { class: "card", hidden: true });
  const [ofModel, ofBlock] = [make("label", {}, "model", model), make("label", {}, "block", block)];
  const fields = make("div", { class: "fields" }, ofModel, ...buttons.slice(0, -1), make("div", { class: "fields" }, ofBlock, buttons.at(-1)), stop);
  const form = make("form", {}, area, fields, note);
  let running = null, computed = "", shown = null, asked = {}, isReady = false;
  place.append(card(make("h2", {}, "A text"), form), result);

  function pose(name) {
    const to = address("text", { text: area.value, model: model.value, ask: name, block: name === "attention" ? block.value : null });
    if (to === location.hash) computed = "";
    location.hash === to ? follow() : (location.hash = to);
  }
  const change = (changed) => replaced(address("text", { ...asked, ...changed }));

  // What the address asks.
  function follow() {
    const question = Object.hasOwn(QUESTIONS, asked.ask ?? "") ? QUESTIONS[asked.ask] : null;
    if (!isReady || !question || !asked.text) return;
    const [, draw, needs] = question;
    const key = JSON.stringify([asked.text, asked.model, asked.ask, ...needs.map((name) => asked[name])]);
    if (key === computed) return void shown?.show?.(asked);
    computed = key;
    const numbers = needs.filter((name) => asked[name] != null).map((name) => [name, Number(asked[name])]);
    if (asked.ask === "attention" && asked.block == null) numbers.push(["block", 0]);
    compute(asked.ask, { text: asked.text, run: asked.model || null, ...Object.fromEntries(numbers) }, draw);
  }

  async function compute(path, body, draw) {
    running?.abort();
    const mine = (running = new AbortController());
    const began = performance.now();
    const seconds = () => ((performance.now() - began) / 1000).toFixed(1);
    const clock = setInterval(() => (note.textContent = `computing, ${seconds()} s; the first time, kernels are compiled`), 200);
    stop.disabled = false;
    note.className = "quiet";
    try {
      const found = await send(path, body, mine.signal);
      shown = draw(found, asked, change);
      result.replaceChildren(...shown.nodes);
      shown.show?.(asked);
      result.hidden = false;
      const part = found.n_all > found.n_tokens ? `the first ${found.n_tokens} of ${found.n_all}` : found.n_tokens;
      note.textContent = `${part} tokens, ${seconds()} s`;
    } catch (error) {
      if (running === mine) computed = "";
      note.textContent = error.name === "AbortError" ? "stopped" : error.message;
      if (error.name !== "AbortError") note.className = "fault";
    }
    clearInterval(clock);
    if (running === mine) stop.disabled = true;
  }

  const arrange = () => {
    form.elements.compare.disabled = !model.value || !isReady;
    for (const button of buttons) button.classList.toggle("main", button.name === (asked.ask ?? "losses"));
  };
  model.addEventListener("change", arrange);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    pose("losses");
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  ask("model").then(({ fault, n_layer, sample }) => {
    area.value ||= sample;
    block.max = n_layer - 1;
    buttons.forEach((each) => (each.disabled = Boolean(fault)));
    note.textContent = fault;
    isReady = !fault;
    arrange();
    follow();
  });

  return {
    go(rest, given) {
      asked = Object.fromEntries(given);
      if (asked.text) area.value = asked.text;
      if (asked.text) model.value = asked.model ?? "";
      if (asked.ask === "attention") block.value = asked.block ?? 0;
      if (!asked.ask) [computed, result.hidden] = ["", true];
      arrange();
      follow();
    },
  };
}

function coloured({ html, about, loss }, asked, change) {
  const place = make("div"), told = make("pre", { role: "status" }, "Choose a token, with a click or the arrow keys.");
  place.innerHTML = html; // the server's fragment, in which nothing of a text is markup
  const mark = walked([...place.querySelectorAll(".tokens [title]")], (at) => change({ at }));
  const heading = make("h2", {}, `Loss of each token: ${digits(loss)} on average, perplexity ${digits(Math.exp(loss))}`);
  const show = ({ at }) => {
    if (!about[at]) return;
    mark(Number(at));
    told.textContent = about[at];
  };
  return { nodes: [heading, place, told], show };
}
