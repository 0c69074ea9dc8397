// The gradients of a run, layer by module, at each step that was measured.

import { ask, card, fill, make, picture } from "./page.js";

export function gradientsOf(name) {
  const kind = make("select", { name: "kind" }), slider = make("input", { type: "range", min: 0, "aria-label": "Step" });
  const told = make("output", {}), maps = make("div", { class: "maps" });
  const fields = make("div", { class: "fields" }, make("label", {}, "what", kind), told);
  const place = card(make("h2", {}, "Gradients"), fields, slider, maps);
  let steps = [];
  place.hidden = true;

  function draw() {
    const step = steps[slider.value];
    told.value = `step ${step}, measured at ${steps.length} steps`;
    slider.setAttribute("aria-valuetext", `step ${step}`);
    fill(maps, (signal) => mapsOf(name, kind, step, signal));
  }
  kind.addEventListener("change", draw);
  slider.addEventListener("input", draw);
  return {
    place,
    // The last step is shown, and newer ones as they come, unless the reader has chosen another.
    update(measured) {
      if (measured.length === steps.length) return;
      const atEnd = Number(slider.value) === steps.length - 1 || !steps.length;
      steps = measured;
      place.hidden = false;
      slider.max = steps.length - 1;
      if (atEnd) slider.value = steps.length - 1;
      draw();
    },
  };
}

async function mapsOf(name, kind, step, signal) {
  const chosen = kind.value || "norm";
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
