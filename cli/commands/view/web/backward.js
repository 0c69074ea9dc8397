// One pass forward and back, node by node: #/backward?text=…&run=…&part=2&step=7; without a text
// that of the small net.

import { COMPUTING, address, ask, bytes, card, facts, fill, make, picture, replaced, send, shape } from "./page.js";
import { numbersOf } from "./numbers.js";
import { stepper } from "./stepper.js";
import { framed } from "./zoom.js";

export function backward(place, state) {
  const kind = make("select", { name: "kind" }, ...[["net", "a small net"], ["text", "a text"]].map(([value, label]) => make("option", { value }, label)));
  const area = make("textarea", { rows: 2, name: "text", "aria-label": "Text" }), model = make("select", { name: "run" });
  const part = make("select", { name: "part" });
  model.append(make("option", { value: "" }, "the file, with a new LoRA"));
  for (const { name, kind: wrote } of state.runs ?? []) if (wrote) model.append(make("option", { value: name }, `with ${name}`));
  const fields = [["of", kind], ["model", model], ["part", part]].map(([label, input]) => make("label", {}, label, input));
  const form = make("form", {}, area, make("div", { class: "fields" }, ...fields, make("button", { type: "submit", class: "main" }, "Show")));
  const home = card();
  let sample = "", drawn = "", shown = null, asked = {};
  place.append(card(make("h2", {}, "One backward pass"), form), home);

  const arrange = () => {
    const isNet = kind.value === "net";
    area.hidden = isNet;
    for (const input of [model, part]) input.parentElement.hidden = isNet;
    if (!isNet) area.value ||= sample;
  };
  const go = (changed = {}) => {
    const isNet = kind.value === "net";
    location.hash = address("backward", isNet ? {} : { text: area.value, run: model.value, part: part.value, ...changed });
  };
  kind.addEventListener("change", () => {
    arrange();
    if (kind.value === "net" || area.value) go();
  });
  part.addEventListener("change", () => go());
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    go();
  });
  ask("model").then((found) => {
    sample = found.sample;
    if (found.fault) kind.lastElementChild.disabled = true;
    arrange();
  });

  async function load(same, body) {
    drawn = same;
    shown = null;
    await fill(home, async (signal) => {
      const found = await send("backward", body, signal);
      part.replaceChildren(...found.parts.map((title, i) => make("option", { value: i, selected: i === found.part }, title)));
      shown = walkOf(found, (step) => replaced(address("backward", { ...asked, step })));
      return shown.nodes;
    }, COMPUTING);
  }

  return {
    async go(rest, given) {
      const text = given.get("text"), run = given.get("run"), at = given.get("part");
      asked = text ? { text, run, part: at } : {};
      kind.value = text ? "text" : "net";
      if (text) area.value = text;
      model.value = run ?? "";
      arrange();
      const same = JSON.stringify(asked);
      if (drawn !== same) await load(same, text ? { text, run, block: at == null || at === "" ? null : Number(at) } : {});
      if (drawn === same) shown?.show(given.get("step"));
    },
  };
}

function walkOf(found, choose) {
  const { tensors, steps, begin } = found, stepOf = new Map(steps.map((tensor, step) => [tensor, step]));
  const walk = stepper("Nodes, in the order of execution", choose), panel = make("div", { class: "told", "aria-live": "polite" });
  const views = found.pictures.map((each) => ({ ...each, svg: picture(each.svg) }));
  for (const view of views) view.frame = framed(view.svg, view.title);
  const drawn = views.map(({ title, frame }) => make("figure", {}, make("figcaption", { class: "titled" }, title), frame.node));
  let now = begin;
  const jump = (tensor) => (stepOf.has(tensor) ? choose(stepOf.get(tensor)) : tensor >= 0 && tell(tensor));
  const tell = (tensor) => panel.replaceChildren(...about(tensor, { found, now, stepOf, jump }));
  const boxes = ({ svg, tensors: numbers }) => [...svg.querySelectorAll("[data-node]")].map((box) => [box, numbers[box.dataset.node]]);

  for (const view of views) {
    const under = (event) => view.tensors[event.target.closest("[data-node]")?.dataset.node];
    view.svg.addEventListener("click", (event) => jump(under(event)));
    view.svg.addEventListener("pointerover", (event) => tell(under(event) >= 0 ? under(event) : steps[now]));
    view.svg.addEventListener("pointerleave", () => tell(steps[now]));
  }

  function show(given) {
    now = given == null ? begin : Math.max(0, Math.min(steps.length - 1, Number(given) || 0));
    const current = steps[now], { rule_of: rule, reads } = tensors[current];
    const read = new Set(reads.map(({ i }) => i));
    for (const view of views)
      for (const [box, tensor] of boxes(view)) {
        const isCurrent = tensor === current, step = stepOf.get(tensor);
        box.toggleAttribute("data-chosen", isCurrent);
        box.dataset.state = isCurrent ? "now" : read.has(tensor) ? "read" : tensor === rule?.i ? "rule" : step > now ? "later" : "";
        if (isCurrent) view.frame.show(box);
      }
    walk.update(steps.length, now, `${now + 1} of ${steps.length}: ${titleOf(tensors[current])}${now < begin ? ", forward" : ", backward"}`);
    tell(current);
  }
  const told = [["loss", found.loss?.toPrecision(5) ?? "not finite"], ["nodes", found.n_nodes.toLocaleString("en")], ["arena", bytes(found.arena)], ["what", found.about]];
  if (found.n_all > found.n_tokens) told.push(["tokens", `the first ${found.n_tokens} of ${found.n_all}`]);
  const hint = make("p", { class: "quiet" }, "Play, or press the arrow keys and the space bar. The pointer shows a node's numbers; a click goes to its step. Faint: not run yet. Thick: what is read.");
  const nodes = [make("h2", {}, "Node by node"), facts(told), walk.node, hint, make("div", { class: "split left" }, make("div", { class: "stack" }, ...drawn), panel)];
  return { nodes, show };
}

const titleOf = (tensor) => (tensor.op === "leaf" ? tensor.name || "leaf" : `${tensor.op} ${tensor.name}`.trim());

// A tensor in words and numbers, with its gradient, its memory and its neighbours.
function about(i, { found, now, stepOf, jump }) {
  const tensor = found.tensors[i], parts = [make("h3", { class: "of" }, titleOf(tensor))];
  const link = ({ i: other, name }) => (stepOf.has(other) ? make("button", { type: "button", class: "link", click: () => jump(other) }, name) : name);
  const links = (references) => references.flatMap((each, j) => (j ? [", ", link(each)] : [link(each)]));
  const line = (name, ...what) => make("div", {}, make("dt", {}, name), make("dd", {}, ...what));
  const lines = [line("result", `${tensor.type} ${shape(tensor.shape)}`)];
  if (tensor.formula) lines.push(line("computes", tensor.formula));
  if (tensor.constants) lines.push(line("constants", tensor.constants));
  if (tensor.rule_of) lines.push(line("backward of", link(tensor.rule_of), tensor.rule && `: ${tensor.rule}`));
  if (tensor.sums) lines.push(line("adds up the gradients of", link(tensor.sums)));
  if (tensor.gradient_of) lines.push(line("is the gradient of", link(tensor.gradient_of)));
  if (tensor.reads.length) lines.push(line("reads", ...links(tensor.reads)));
  lines.push(line("read by", ...(tensor.readers.length ? links(tensor.readers) : ["nobody: it is a result"])));
  lines.push(line("memory", ...memoryOf(tensor, link)));
  const step = stepOf.get(i), later = (at) => (at > now ? `, which comes at step ${at + 1}` : "");
  parts.push(make("dl", { class: "lines" }, ...lines));
  if (tensor.memory) parts.push(strip(found, tensor));
  parts.push(make("h3", {}, `numbers${later(step)}`), ...numbersOf(tensor.value));
  const gradient = tensor.gradient && found.tensors[tensor.gradient.i];
  if (tensor.gradient) parts.push(make("h3", {}, "its gradient: ", link(tensor.gradient), later(stepOf.get(tensor.gradient.i))));
  if (gradient) parts.push(...numbersOf(gradient.value));
  else if (tensor.gradient) parts.push(make("p", { class: "quiet" }, "its node is in another part"));
  return parts;
}

function memoryOf({ memory, op }, link) {
  if (!memory) return [op === "leaf" ? "a leaf's own, outside of the arena" : "that of a leaf, of which it is a view"];
  const { offset, bytes: n, lives, view_of, over } = memory;
  const parts = [`${n.toLocaleString("en")} bytes at byte ${offset.toLocaleString("en")} of the arena, from node ${lives[0]} to ${lives[1] ?? "the end"}`];
  if (view_of) parts.push(", as a view of ", link(view_of));
  if (over) parts.push(", over ", link(over), ", which dies here");
  return parts;
}

// Where in the arena it lies, with what it reads.
function strip(found, tensor) {
  const part = (memory, kind) => {
    const node = make("span", { class: kind });
    node.style.left = `${(100 * memory.offset) / found.arena}%`;
    node.style.width = `${(100 * memory.bytes) / found.arena}%`;
    return node;
  };
  const reads = tensor.reads.map(({ i }) => found.tensors[i]?.memory).filter(Boolean);
  const label = `the arena, ${bytes(found.arena)}: at byte ${tensor.memory.offset}`;
  return make("div", { class: "strip", role: "img", "aria-label": label }, ...reads.map((each) => part(each, "read")), part(tensor.memory, "own"));
}
