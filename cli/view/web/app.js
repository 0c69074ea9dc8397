// Which view is shown: #/model/TENSOR, #/graph?section=1, #/plan?node=7, #/run/NAME, #/text.

import { model } from "./model.js";
import { graph } from "./graph.js";
import { plan } from "./plan.js";
import { run } from "./run.js";
import { text } from "./text.js";

const VIEWS = { model, graph, plan, run, text };
const POLL = 2000; // ms between looks at the runs
const place = document.getElementById("view"), notice = document.getElementById("notice");
const state = { model: "there", runs: null };
let shown = null; // {name, go(rest, fields), heard(state)}

function route() {
  if (location.hash && !location.hash.startsWith("#/")) return; // the link to the content
  const [path, query] = location.hash.slice(2).split("?");
  const [name, ...rest] = path.split("/").map(decodeURIComponent);
  const view = VIEWS[name] ? name : "model";
  if (shown?.name !== view) {
    shown?.close?.();
    place.replaceChildren();
    shown = { name: view, ...VIEWS[view](place, state) };
    for (const link of document.querySelectorAll("nav a"))
      link.setAttribute("aria-current", link.hash === `#/${view}` ? "page" : "false");
  }
  shown.go?.(rest, new URLSearchParams(query));
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
