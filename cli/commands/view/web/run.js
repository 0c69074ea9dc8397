// A run, finished or under way, in parts, the overview first: its charts grow as it writes.

import { address, ask, card, facts, make, replaced, rows } from "./page.js";
import { drawCharts } from "./lines.js";
import { dataCard } from "./data.js";
import { gradientsOf } from "./gradients.js";
import { runsTable } from "./table.js";
import { tabs } from "./tabs.js";

const PARTS = { overview: "Overview", charts: "Charts", gradients: "Gradients", data: "Data", settings: "Settings" };

const STATES = {
  starting: "It has started; its first step is under way, for which kernels may be compiled.",
  running: "under way",
  finished: "finished",
  "ended early": "ended early: its validations were no better any more (--patience)",
  stopped: "stopped before its end",
  empty: "It has left no step.",
};

const MODELS = {
  other: "It trains a model of other contents: ",
  none: "",
  unknown: "It trains a model that is not there any more, so that it cannot be compared: ",
};

export function run(place, state) {
  const view = make("div", { class: "contents" });
  let name = "", version = "", parts = null, asked = new URLSearchParams();
  const place_ = (changed) => address(`run/${encodeURIComponent(name)}`, { ...Object.fromEntries(asked), ...changed });
  const go = (changed) => (location.hash = place_(changed));
  const table = runsTable(go);
  place.append(table.place, table.laid, view);

  async function look() {
    if (!name) name = state.runs?.[0]?.name ?? "";
    table.place.hidden = !(state.runs?.length > 1);
    if (!table.place.hidden)
      table.update(name, asked, state.runs.map((each) => `${each.name} ${each.version} ${each.running}`).join());
    const listed = state.runs?.find((each) => each.name === name);
    if (!listed) {
      [version, parts] = ["", null];
      return void view.replaceChildren(card(make("p", {}, missing(state, name))));
    }
    const now = `${listed.version} ${listed.running}`;
    if (now === version) return parts?.show(asked);
    version = now;
    const found = await ask("run", { name }).catch((error) => ({ fault: error.message }));
    if (found.fault) return void view.replaceChildren(card(make("p", { class: "fault" }, found.fault)));
    if (listed.name !== name) return; // another was chosen meanwhile
    parts = parts?.name === name && parts.isThere() ? parts : shownIn(view, name, go, (changed) => replaced(place_(changed)));
    parts.update(found);
    parts.show(asked);
  }

  return {
    go(rest, fields) {
      if (rest.join("/") !== name) version = "";
      name = rest.join("/");
      asked = fields;
      look();
    },
    heard: look,
  };
}

function missing({ runs }, name) {
  if (runs === null) return "No folder of runs was given: start with pyggml view --run FOLDER.";
  if (name) return `The folder has no run ${name}.`;
  return "The folder has no run yet. As soon as pyggml-finetune -o FOLDER/adapter.gguf writes one into it, it is shown here.";
}

// The places of a run's parts; update() fills them, and leaves those alone that have not changed;
// show() shows one of them.
function shownIn(view, name, go, change) {
  const status = make("div"), choice = tabs("Parts of the run", PARTS, (part) => go({ part: part === "overview" ? null : part }));
  const charts = make("section", { class: "charts", "aria-label": "Charts" }), gradients = gradientsOf(name, change);
  const [answers, data, settings] = [make("div"), make("div"), make("div", { class: "stack" })];
  const parts = { answers: ["overview"], charts: ["overview", "charts"], gradients: ["gradients"], data: ["data"], settings: ["settings"] };
  const places = { charts, answers, gradients: gradients.place, data, settings };
  view.replaceChildren(card(status, choice.node), ...Object.values(places));
  let told = "";
  return {
    name,
    isThere: () => status.isConnected,
    update(found) {
      status.replaceChildren(...statusOf(found));
      drawCharts(charts, found.charts);
      gradients.update(found.measured);
      const now = JSON.stringify([found.settings, found.about, found.answers, found.data]);
      if (now !== told) {
        answers.replaceChildren(...answersOf(found));
        data.replaceChildren(...(found.data ? [dataCard(found.data)] : []));
        settings.replaceChildren(...settingsOf(found));
      }
      told = now;
      const isThere = { charts: found.charts.length > 1, gradients: found.measured.length, data: found.data, settings: settings.childElementCount };
      for (const [part, is] of Object.entries(isThere)) choice.offer(part, Boolean(is));
    },
    show(fields) {
      const part = choice.select(fields.get("part") ?? "overview");
      for (const [key, node] of Object.entries(places)) node.hidden = !parts[key].includes(part);
      charts.classList.toggle("first", part === "overview");
      gradients.show(fields.get("kind"), fields.get("step"));
    },
  };
}

function statusOf(found) {
  const left = found.left ? `, about ${found.left} left` : "";
  const said = found.n_steps ? `${STATES[found.state]}: step ${found.step} of ${found.n_steps}${left}` : STATES[found.state];
  const parts = [make("h2", {}, found.name), make("p", { role: "status" }, said)];
  if (found.n_steps) parts.push(make("progress", { max: found.n_steps, value: found.step, "aria-label": "Steps made" }));
  if (MODELS[found.model]) parts.push(make("p", { class: found.model === "other" ? "fault" : "quiet" }, MODELS[found.model] + found.settings.model));
  if (found.adapter) found.facts.push(["adapter", found.adapter]);
  return [...parts, facts(found.facts)];
}

// To the graph and the memory of one of its passes.
function leads(settings) {
  const { ctx, batch, lora_rank: rank, lora_modules: modules } = settings;
  const pass = { ctx, batch, rank, modules, keep: settings.grad_checkpointing ? "layers" : "costly" };
  const link = (view, words) => make("a", { href: address(view, pass) }, words);
  return rank ? [make("p", {}, "One of its passes: ", link("graph", "the graph"), ", ", link("plan", "the memory"))] : [];
}

function answersOf({ prompt, answers }) {
  if (!answers.length) return [];
  const told = (text) => make("pre", {}, make("mark", {}, prompt), text);
  const each = answers.map(([label, text]) => make("article", {}, make("h3", {}, label), told(text)));
  return [card(make("h2", {}, "Before and after"), make("div", { class: "answers" }, ...each))];
}

function settingsOf({ about, settings }) {
  const parts = about.length ? [card(make("h2", {}, "The run"), rows(about), ...leads(settings))] : [];
  const pairs = Object.entries(settings);
  if (pairs.length) {
    const line = ([key, value]) => [make("span", { class: "quiet" }, key), make("code", {}, String(value))];
    const each = pairs.map((pair) => make("div", {}, ...line(pair)));
    parts.push(card(make("h2", {}, "Settings"), make("div", { class: "settings" }, ...each)));
  }
  return parts;
}
