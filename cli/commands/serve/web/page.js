// The page of `pyggml serve --web`: one prompt, one or two models, answers as they are made, and the
// chats so far. What users write is text nodes; what models write goes through markdown.js.

import { call, events, useKey } from "./api.js";
import { copyButton, showMarkdown } from "./markdown.js";
import { drop, keep, messagesOf, newChat, pastChats, titleOf } from "./store.js";

const $ = (id) => document.getElementById(id);
const mode = $("mode"), both = $("both"), prompt = $("prompt"), system = $("system"), notice = $("notice");
const SAMPLES = {
  chat: [
    "Explain in two sentences what a LoRA adapter is.",
    "Write a Python function that reverses a list, with an example.",
    "Name three things to see in Rome, as a list.",
    "Make this more polite: Send me the file now!",
  ],
  text: ["Once upon a time", "The capital of France is", "def fibonacci(n):", "It was a dark night, and"],
};
const REDRAW = 80; // ms between two looks of an answer that is being written
let chat = null, running = null; // the AbortController of the answers under way

const SIDES = ["left", "right"].map((id) => {
  const root = $(id);
  return { root, tab: $(`${id}-tab`), model: root.querySelector("select"), log: root.querySelector(".log") };
});
const shownSides = () => (both.checked ? [0, 1] : [0]);

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  node.className = className;
  node.append(...children);
  return node;
}

function button(label, act) {
  const node = make("button", "", label);
  node.type = "button";
  node.addEventListener("click", act);
  return node;
}

// -- the conversation ------------------------------------------------------------------------------

function draw() {
  SIDES.forEach(({ log }, side) => {
    log.replaceChildren(...(chat.turns.length ? chat.turns.map((_, i) => turnOf(i, side)) : [samples()]));
    log.scrollTop = log.scrollHeight;
  });
}

function samples() {
  const fill = (text) => button(text, () => send(text));
  const what = mode.value === "chat" ? "Say something, or begin with one of these:" : "Begin a text, or take one of these:";
  return make("div", "samples", make("p", "hint", what), ...SAMPLES[mode.value].map(fill));
}

// What was said and answered in turn i, on one side.
function turnOf(i, side) {
  const turn = chat.turns[i], answer = turn.answers[side];
  const node = make("article", "turn");
  node.dataset.turn = i;
  if (chat.mode === "chat")
    node.append(make("div", "said", turn.text), make("div", "acts", button("Edit", () => edit(node, i))));
  if (!answer) return node;
  const place = make("div", "answer"), note = make("p", answer.isFault ? "note fault" : "note", answer.note);
  showAnswer(place, turn.text, answer);
  const acts = make("div", "acts", copyButton(() => answer.content));
  if (i === chat.turns.length - 1) acts.append(button("Regenerate", () => regenerate(side)));
  acts.hidden = Boolean(running);
  node.append(place, note, acts);
  return node;
}

function showAnswer(place, given, answer) {
  if (chat.mode === "chat") return showMarkdown(place, answer.content);
  place.replaceChildren(make("span", "given", given), answer.content);
}

// Make a change; the end stays in sight, unless the reader has scrolled up.
function growing(log, change) {
  const { scrollHeight, scrollTop, clientHeight } = log;
  change();
  if (scrollHeight - scrollTop - clientHeight < 40) log.scrollTop = log.scrollHeight;
}

// Ask a side's model, and write its answer to turn i as it comes.
async function ask(i, side, settings, signal) {
  const { log, model } = SIDES[side], turn = chat.turns[i];
  const answer = (turn.answers[side] = { content: "", model: model.value, seed: settings.seed, note: "…", isFault: false });
  const body = { ...settings, model: model.value, stream: true, stream_options: { include_usage: true } };
  const isChat = chat.mode === "chat";
  Object.assign(body, isChat ? { messages: messagesOf(chat, side, i) } : { prompt: turn.text });
  log.querySelector(".samples")?.remove();
  const node = turnOf(i, side), place = node.querySelector(".answer");
  growing(log, () => log.querySelector(`[data-turn="${i}"]`)?.replaceWith(node) ?? log.append(node));
  log.scrollTop = log.scrollHeight;

  const began = performance.now();
  let first = 0, drawn = 0, reason = "stopped", usage = null;
  try {
    for await (const event of events(isChat ? "v1/chat/completions" : "v1/completions", body, signal)) {
      const choice = event.choices?.[0];
      const piece = (isChat ? choice?.delta.content : choice?.text) ?? "";
      const thinks = isChat && choice?.delta.reasoning_content;
      if ((piece || thinks) && !first) first = performance.now();
      if (thinks && !answer.content) node.querySelector(".note").textContent = "thinking…";
      answer.content += piece;
      reason = choice?.finish_reason ?? reason;
      usage = event.usage ?? usage;
      if (!piece || performance.now() - drawn < REDRAW) continue;
      drawn = performance.now();
      growing(log, () => showAnswer(place, turn.text, answer));
    }
    answer.note = summary(reason, usage, began, first, answer);
  } catch (error) {
    answer.isFault = error.name !== "AbortError";
    answer.note = answer.isFault ? error.message : "stopped";
    if (error.status === 401) $("key-form").hidden = false;
  }
  growing(log, () => node.replaceWith(turnOf(i, side)));
}

function summary(reason, usage, began, first, { model, seed }) {
  const seconds = (performance.now() - first) / 1000;
  const found = [model, { length: "most tokens reached", stop: "done" }[reason] ?? reason];
  if (usage) {
    const n = usage.completion_tokens;
    found.push(`${n} tokens`);
    if (first && n > 1) found.push(`${(n / seconds).toFixed(1)} tokens/s`);
    if (first) found.push(`first after ${Math.round(first - began)} ms`);
  }
  return [...found, `seed ${seed}`].join(" · ");
}

// -- what a reader does ----------------------------------------------------------------------------

function settings() {
  const found = {};
  for (const input of document.querySelectorAll("#settings input[name]"))
    if (input.value !== "") found[input.name] = Number(input.value);
  return found;
}

const randomSeed = () => Math.floor(Math.random() * 2 ** 31);

async function send(text) {
  if (running || !text) return;
  if (mode.value === "chat" && text === prompt.value) prompt.value = "";
  chat.turns.push({ text, answers: [null, null] });
  // One seed for both columns, also where none was chosen.
  await answer(shownSides(), { seed: randomSeed(), ...settings() });
  prompt.focus();
}

// The last answer once more, from another seed.
function regenerate(side) {
  const before = chat.turns.at(-1).answers[side], given = settings();
  const seed = given.seed == null ? randomSeed() : (before.seed ?? given.seed) + 1;
  return answer([side], { ...given, seed });
}

async function answer(sides, given) {
  running = new AbortController();
  Object.assign(chat, { system: system.value, models: SIDES.map(({ model }) => model.value), time: Date.now() });
  notice.hidden = true;
  arrange();
  const last = chat.turns.length - 1;
  await Promise.all(sides.map((side) => ask(last, side, given, running.signal)));
  running = null;
  arrange();
  draw();
  save();
}

// A message as a field; what follows it is forgotten once it is sent anew.
function edit(node, i) {
  if (running) return;
  const area = make("textarea", ""), form = make("form", "edit", area);
  area.value = chat.turns[i].text;
  area.rows = Math.min(8, area.value.split("\n").length + 1);
  area.ariaLabel = "Message";
  const again = make("button", "main", "Send");
  again.type = "submit";
  const follow = chat.turns.length - 1 - i;
  const told = follow ? `The ${follow === 1 ? "message" : `${follow} messages`} after it will be gone.` : "";
  form.append(make("div", "acts", again, button("Cancel", draw), make("span", "hint", told)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = area.value;
    if (!text) return;
    chat.turns.length = i;
    draw();
    send(text);
  });
  form.addEventListener("keydown", (event) => event.key === "Escape" && draw());
  node.querySelector(".said").replaceWith(form);
  node.querySelector(".acts:not(.edit .acts)").remove();
  area.focus();
}

// -- past chats ------------------------------------------------------------------------------------

function save() {
  if (!chat.turns.length) return;
  $("chats").querySelector(".hint").textContent = keep(chat);
  list();
}

function list() {
  const chats = pastChats();
  $("chats").querySelector("ul").replaceChildren(...chats.map((past) => {
    const open = button(titleOf(past), () => show(past));
    open.title = new Date(past.time).toLocaleString();
    open.setAttribute("aria-current", String(past.id === chat?.id));
    const gone = button("×", () => forget(past.id));
    gone.ariaLabel = `Delete ${titleOf(past)}`;
    open.disabled = gone.disabled = Boolean(running);
    return make("li", "", open, gone);
  }));
  const hint = $("chats").querySelector(".hint");
  hint.textContent ||= chats.length ? "" : "None yet. Chats are kept in this browser alone.";
  if (chats.length && hint.textContent.startsWith("None")) hint.textContent = "Kept in this browser alone.";
}

function forget(id) {
  $("chats").querySelector(".hint").textContent = drop(id);
  if (id === chat.id) fresh();
  else list();
}

function show(past) {
  if (running) return;
  chat = past;
  if (![...mode.options].find(({ value }) => value === chat.mode).disabled) mode.value = chat.mode;
  system.value = chat.system;
  SIDES.forEach(({ model }, side) => {
    if ([...model.options].some(({ value }) => value === chat.models[side])) model.value = chat.models[side];
  });
  if (chat.turns.some(({ answers }) => answers[1])) both.checked = true;
  closeSheets();
  arrange();
  draw();
  list();
}

function fresh() {
  if (running) return;
  chat = newChat(mode.value, system.value, SIDES.map(({ model }) => model.value));
  closeSheets();
  arrange();
  draw();
  list();
  prompt.focus();
}

const closeSheets = () => document.querySelectorAll(":popover-open").forEach((sheet) => sheet.hidePopover());

// -- how the page stands ---------------------------------------------------------------------------

const narrow = matchMedia("(max-width: 700px)");

function arrange() {
  const busy = Boolean(running);
  for (const id of ["send", "stop"]) $(id).hidden = $(id).disabled = (id === "send") === busy;
  for (const node of [$("fresh"), mode, both]) node.disabled = busy;
  document.querySelectorAll("#chats button, .turn .acts button").forEach((each) => (each.disabled = busy));
  SIDES[1].root.hidden = !both.checked;
  $("tabs").hidden = !both.checked;
  for (const { tab, model } of SIDES) {
    tab.textContent = model.value;
    tab.setAttribute("aria-selected", String(document.body.dataset.tab === tab.dataset.side));
  }
  if (!both.checked) document.body.dataset.tab = "left";
  $("system-label").hidden = mode.value !== "chat";
  prompt.placeholder = mode.value === "chat" ? "Say something" : "A text to continue";
  if (narrow.matches) $("settings").querySelector("h2").after($("bar"));
  else document.querySelector("h1").after($("bar"));
}

async function start() {
  try {
    const { data } = await (await call("v1/models")).json();
    $("key-form").hidden = notice.hidden = true;
    for (const { model } of SIDES) model.replaceChildren(...data.map(({ id }) => new Option(id, id)));
    SIDES[1].model.selectedIndex = Math.min(1, data.length - 1);
    both.checked = data.length > 1;
  } catch (error) {
    if (error.status === 401) $("key-form").hidden = false;
    notice.textContent = error.message;
    notice.hidden = false;
  }
  fresh();
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(prompt.value); });
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  start();
});
$("stop").addEventListener("click", () => running?.abort());
$("fresh").addEventListener("click", fresh);
both.addEventListener("change", arrange);
mode.addEventListener("change", fresh);
narrow.addEventListener("change", arrange);
for (const { model, tab } of SIDES) {
  model.addEventListener("change", arrange);
  tab.addEventListener("click", () => { document.body.dataset.tab = tab.dataset.side; arrange(); });
}
window.addEventListener("storage", list);
window.addEventListener("pagehide", () => chat && save());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(prompt.value);
});
start();
