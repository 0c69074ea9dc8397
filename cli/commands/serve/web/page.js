// The page of `pyggml serve --web`: one prompt, one or two models, answers as they are made.
// Texts of users and models only ever become text nodes.

const $ = (id) => document.getElementById(id);
const mode = $("mode"), both = $("both"), prompt = $("prompt"), notice = $("notice");
let key = "";
let running = null; // the AbortController of the answers under way

class Column {
  constructor(id) {
    this.root = $(id);
    this.model = this.root.querySelector("select");
    this.log = this.root.querySelector(".log");
    this.messages = []; // of the chat so far: each column has its own model's answers
  }

  clear() {
    this.messages = [];
    this.log.replaceChildren();
  }

  add(kind, text = "") {
    const node = document.createElement("div");
    node.className = kind;
    node.textContent = text;
    this.log.append(node);
    this.log.scrollTop = this.log.scrollHeight;
    return node;
  }

  // Make a change; the end stays in sight, unless the reader has scrolled up.
  growing(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    change();
    if (scrollHeight - scrollTop - clientHeight < 40) this.log.scrollTop = this.log.scrollHeight;
  }

  // Ask this column's model, and write its answer as it comes.
  async ask(text, settings, signal) {
    const chat = mode.value === "chat";
    const body = { ...settings, model: this.model.value, stream: true };
    body.stream_options = { include_usage: true };
    let asked = null;
    if (chat) {
      asked = { role: "user", content: text };
      body.messages = [...this.messages, asked];
      if ($("system").value.trim())
        body.messages.unshift({ role: "system", content: $("system").value });
      this.add("said", text);
    } else {
      body.prompt = text;
    }
    const answer = this.add("answer");
    if (!chat) {
      const given = document.createElement("span");
      given.className = "given";
      given.textContent = text;
      answer.append(given);
    }
    const note = this.add("note", "…");
    await this.follow(body, chat, asked, answer, note, signal);
  }

  async follow(body, chat, asked, answer, note, signal) {
    const began = performance.now();
    const written = document.createTextNode("");
    answer.append(written);
    let first = 0, reason = "stopped", usage = null;
    try {
      const path = chat ? "v1/chat/completions" : "v1/completions";
      for await (const event of events(path, body, signal)) {
        const choice = event.choices?.[0];
        const piece = (chat ? choice?.delta.content : choice?.text) ?? "";
        if (piece && !first) first = performance.now();
        this.growing(() => written.appendData(piece));
        reason = choice?.finish_reason ?? reason;
        usage = event.usage ?? usage;
      }
      note.textContent = summary(reason, usage, began, first, body.seed);
    } catch (error) {
      if (error.name !== "AbortError") note.classList.add("fault");
      note.textContent = error.name === "AbortError" ? "stopped" : error.message;
    }
    if (chat && written.data)
      this.messages.push(asked, { role: "assistant", content: written.data });
  }
}

const left = new Column("left"), right = new Column("right");
const columns = () => (right.root.hidden ? [left] : [left, right]);

function summary(reason, usage, began, first, seed) {
  const seconds = (performance.now() - first) / 1000;
  const found = [{ length: "most tokens reached", stop: "done" }[reason] ?? reason];
  if (usage) {
    const n = usage.completion_tokens;
    found.push(`${n} tokens`);
    if (first && n > 1) found.push(`${(n / seconds).toFixed(1)} tokens/s`);
    if (first) found.push(`first after ${Math.round(first - began)} ms`);
  }
  found.push(`seed ${seed}`);
  return found.join(" · ");
}

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const fault = await response.json().catch(() => null);
  if (response.status === 401) $("key-form").hidden = false;
  throw new Error(fault?.error?.message ?? `the server answered ${response.status}`);
}

// The objects of a stream of server-sent events.
async function* events(path, body, signal) {
  const response = await call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function settings() {
  const found = {};
  for (const input of document.querySelectorAll("#settings input[name]"))
    if (input.value !== "") found[input.name] = Number(input.value);
  // One seed for both columns, also where none was chosen.
  found.seed ??= Math.floor(Math.random() * 2 ** 31);
  return found;
}

async function send() {
  const text = prompt.value;
  if (running || !text) return;
  running = new AbortController();
  busy(true);
  notice.hidden = true;
  if (mode.value === "chat") prompt.value = "";
  const same = settings();
  await Promise.all(columns().map((column) => column.ask(text, same, running.signal)));
  running = null;
  busy(false);
  prompt.focus();
}

function busy(is) {
  $("send").disabled = is;
  $("stop").disabled = !is;
  $("fresh").disabled = is;
  mode.disabled = both.disabled = is;
}

function fresh() {
  left.clear();
  right.clear();
  prompt.focus();
}

function arrange() {
  right.root.hidden = !both.checked;
  $("system-label").hidden = mode.value !== "chat";
  prompt.placeholder = mode.value === "chat" ? "Say something" : "A text to continue";
}

async function start() {
  try {
    const { data } = await (await call("v1/models")).json();
    $("key-form").hidden = true;
    notice.hidden = true;
    for (const column of [left, right])
      column.model.replaceChildren(...data.map(({ id }) => new Option(id, id)));
    right.model.selectedIndex = Math.min(1, data.length - 1);
    both.checked = data.length > 1;
    arrange();
  } catch (error) {
    notice.textContent = error.message;
    notice.hidden = false;
  }
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  start();
});
$("stop").addEventListener("click", () => running?.abort());
$("fresh").addEventListener("click", fresh);
both.addEventListener("change", () => { right.clear(); left.clear(); arrange(); });
mode.addEventListener("change", () => { fresh(); arrange(); });
for (const column of [left, right]) column.model.addEventListener("change", () => column.clear());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
start();
