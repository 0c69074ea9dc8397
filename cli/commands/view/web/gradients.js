// The gradients of a run, layer by module, at each step that was measured.

import { ask, card, fill, make, picture } from "./page.js";
import { stepper } from "./stepper.js";

// change(fields): what of this part's state changes in the address.
export function gradientsOf(name, change) {
  const kind = make("select", { name: "kind" }), maps = make("div", { class: "maps" });
  const walk = stepper("Step", (i) => change({ step: i === steps.length - 1 ? null : steps[i] }), 0.6);
  const place = card(make("h2", {}, "Gradients"), make("div", { class: "fields" }, make("label", {}, "what", kind)), walk.node, maps);
  let steps = [], drawn = "";
  kind.addEventListener("change", () => change({ kind: kind.value }));

  // The last step, and newer ones as they come, unless the address has another.
  function show(what, step) {
    if (place.hidden || !steps.length) return;
    const chosen = what || "norm", at = steps.includes(Number(step)) && step ? steps.indexOf(Number(step)) : steps.length - 1;
    walk.update(steps.length, at, `step ${steps[at]}, measured at ${steps.length} steps`);
    const now = `${chosen} ${steps[at]}`;
    if (now === drawn) return;
    drawn = now;
    fill(maps, (signal) => mapsOf(name, kind, chosen, steps[at], signal));
  }
  return { place, show, update: (measured) => (steps = measured) };
}

async function mapsOf(name, kind, chosen, step, signal) {
  const found = await ask("run/gradients", { name, kind: chosen, step }, signal);
  const option = ([value, title]) => make("option", { value, selected: value === chosen }, title);
  kind.replaceChildren(...Object.entries(found.kinds).map(option));
  const findings = found.findings.map((sentence) => make("li", {}, sentence));
  const sound = make("p", { class: "quiet" }, "Nothing was dead, exploding or not finite.");
  const parts = [framed(found.map), findings.length ? make("ul", {}, ...findings) : sound];
  if (found.over) parts.push(make("details", {}, make("summary", {}, "Over steps"), framed(found.over)));
  return parts;
}

const framed = (drawn) => make("div", { class: "scroll", tabindex: 0 }, picture(drawn));
