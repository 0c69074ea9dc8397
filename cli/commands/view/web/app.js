// Which view is shown: #/model/TENSOR, #/graph?stage=2, #/backward?step=7, #/plan?node=7, #/run/NAME, #/text.

import { make } from "./page.js";
import { model } from "./model.js";
import { graph } from "./graph.js";
import { backward } from "./backward.js";
import { plan } from "./plan.js";
import { run } from "./run.js";
import { text } from "./text.js";

const VIEWS = { model, graph, backward, plan, run, text };
const POLL = 2000; // ms between looks at the runs
const place = document.getElementById("view"), notice = document.getElementById("notice");
const state = { model: "there", runs: null, first: "model" };
let shown = null; // {name, go(rest, fields), heard(state)}

function route() {
  if (location.hash && !location.hash.startsWith("#/")) return; // the link to the content
  const [path, query] = location.hash.slice(2).split("?");
  const [name, ...rest] = path.split("/").map(decoded);
  const view = Object.hasOwn(VIEWS, name) ? name : state.first;
  if (shown?.name !== view) {
    const home = make("div", { class: "view" }); // what comes late for another view is drawn nowhere
    place.replaceChildren(home);
    shown = { name: view, ...VIEWS[view](home, state) };
    for (const link of document.querySelectorAll("nav a"))
      link.setAttribute("aria-current", link.hash === `#/${view}` ? "page" : "false");
  }
  shown.go?.(rest, new URLSearchParams(query));
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return ""; // half of a character
  }
}

function tell(sentence) {
  if (notice.textContent !== sentence) notice.replaceChildren(sentence);
  notice.hidden = !sentence;
}

const GONE = {
  there: "",
  gone: "The model file is gone from the disk; what is shown is the file as it was opened.",
  changed: "The model file has changed on the disk; start the view again to see the new one.",
};

async function look() {
  if (document.hidden) return;
  try {
    const response = await fetch("api/state");
    const found = await response.json();
    if (!response.ok) return tell(found.error.message);
    Object.assign(state, found);
    tell(GONE[found.model]);
    shown?.heard?.(state);
  } catch {
    tell("The server does not answer: it has ended, or is busy. What is shown is what it said last.");
  }
}

window.addEventListener("hashchange", route);
document.addEventListener("visibilitychange", look);
look().then(route);
setInterval(look, POLL);
