// The memory of a pass: which tensor lies where, when, and what is alive at a chosen moment.

import { address, ask, bytes, card, facts, fill, make, picture, replaced, shape, table } from "./page.js";
import { axis } from "./graph.js";
import { passForm, passOf } from "./pass.js";
import { stepper } from "./stepper.js";

export function plan(place) {
  const lanes = card(), moment = make("section", { class: "card", "aria-live": "polite" });
  const form = passForm((pass) => (location.hash = address("plan", pass)));
  let drawn = "", shown = null;
  place.append(card(form), lanes, moment);

  return {
    async go(rest, fields) {
      const pass = passOf(fields), same = JSON.stringify(pass);
      form.take(pass);
      if (drawn !== same) {
        drawn = same;
        shown = null;
        moment.replaceChildren();
        await fill(lanes, async (signal) => {
          const found = await ask("plan", { ...pass, wide: axis() }, signal);
          form.answered(found.pass);
          shown = lanesOf(found, (node) => replaced(address("plan", { ...pass, node })), moment, pass);
          return shown.nodes;
        });
      }
      shown?.go(fields.get("node"));
    },
  };
}

function lanesOf(found, moved, moment, pass) {
  const svg = picture(found.svg), n = found.used.length, [EDGE, WIDTH] = found.axis; // its margin, its length
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  line.setAttribute("class", "now");
  const label = document.createElementNS("http://www.w3.org/2000/svg", "text");
  label.setAttribute("class", "title label");
  svg.append(line, label);
  const steps = stepper("Moment: the node that runs", choose, 0.4);
  const peak = make("button", { type: "button" }, "Peak");

  function move(i) {
    const x = EDGE + ((i + 0.5) / n) * WIDTH, height = svg.viewBox.baseVal.height;
    const ends = { x1: x, x2: x, y1: EDGE - 12, y2: height - EDGE };
    for (const [name, value] of Object.entries(ends)) line.setAttribute(name, value);
    steps.update(n, i, `node ${i} of ${n}: ${bytes(found.used[i])} in use`);
    label.textContent = `node ${i}: ${bytes(found.used[i])}`;
    label.setAttribute("x", x);
    label.setAttribute("y", EDGE - 16);
    label.setAttribute("text-anchor", i < n / 10 ? "start" : i > 0.9 * n ? "end" : "middle");
    fill(moment, (signal) => aliveOf(pass, i, signal));
  }
  function choose(i) {
    moved(Math.max(0, Math.min(n - 1, Math.round(i))));
  }
  peak.addEventListener("click", () => choose(found.peak));
  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    choose((((event.clientX - box.left) * scale - EDGE) / WIDTH) * n - 0.5);
  });
  const how =
    "A rectangle is a tensor: as wide as it lives, as high as it is large. The upright line is the moment " +
    "that is told of below. Click, play, or press the arrow keys, to see what is alive at another.";
  steps.node.firstElementChild.append(peak);
  const hint = make("p", { class: "quiet" }, how);
  const drawn = make("div", { class: "lanes" }, svg);
  return {
    nodes: [make("h2", {}, "Memory plan"), facts(found.facts), steps.node, drawn, hint],
    go: (node) => move(node == null ? found.peak : Math.max(0, Math.min(n - 1, Number(node) || 0))),
  };
}

async function aliveOf(pass, node, signal) {
  const found = await ask("plan/moment", { ...pass, node }, signal);
  const what = `${found.node.op} ${found.node.name}`.trim();
  const heading = make("h2", {}, `While ${what} runs: ${bytes(found.bytes)} in ${found.tensors} tensors`);
  const lines = found.kinds.map(([kind, count, n]) => [kind, count.toLocaleString("en"), bytes(n)]);
  const result = make("p", { class: "quiet" }, `its result is ${found.node.type} ${shape(found.node.shape)}`);
  return [heading, result, table(["op, type and shape", "tensors", "bytes"], lines, [1, 2])];
}
