// The file at a glance: facts, tensors folded by block, metadata; and one tensor in detail.

import { ask, bytes, card, facts, fill, make, table } from "./page.js";
import { tree } from "./tree.js";
import { tensor } from "./tensor.js";

export function model(place, state) {
  let known = null; // the answer, once it is there
  let chosen = "", tensors = null;
  const details = make("section", { class: "card", "aria-label": "Tensor", "aria-live": "polite" });

  fill(place, async () => {
    known = await ask("model");
    const found = content(known, details);
    tensors = found.querySelector('[role="tree"]').parentElement;
    choose();
    return [...found.children];
  });

  function choose() {
    if (!known) return;
    tensors.querySelector('[role="tree"]').select(chosen);
    if (chosen) tensor(details, chosen, state);
    else details.replaceChildren(make("p", { class: "quiet" }, "Choose a tensor to see its numbers."));
  }

  return {
    go(rest) {
      chosen = rest.join("/");
      choose();
    },
  };
}

function content(known, details) {
  const found = make("div");
  found.append(card(facts(known.facts), known.fault && make("p", { class: "fault" }, known.fault)));
  found.append(make("div", { class: "split" }, tensorsOf(known.tensors), details), metadataOf(known.metadata));
  return found;
}

function tensorsOf(tensors) {
  const place = make("div", { class: "scroll tall" });
  const sought = make("input", { type: "search", placeholder: "Find a tensor", "aria-label": "Find a tensor" });
  const choose = (name) => (location.hash = `#/model/${encodeURIComponent(name)}`);
  const draw = () => {
    const words = sought.value.toLowerCase();
    const fitting = tensors.filter(([name]) => name.toLowerCase().includes(words));
    place.replaceChildren(tree("Tensors", folded(fitting), choose));
    if (words && fitting.length <= 100)
      place.querySelectorAll("[aria-expanded]").forEach((node) => (node.ariaExpanded = "true"));
  };
  sought.addEventListener("input", draw);
  draw();
  return card(make("h2", {}, "Tensors"), sought, place);
}

// Tensors of a block are one branch.
function folded(tensors) {
  const items = [], blocks = new Map();
  for (const [name, type, sizes, n] of tensors) {
    const leaf = { label: name, note: `${type}  ${sizes.join("×")}`, value: name };
    const block = name.match(/^(.*?blk\.\d+)\./)?.[1];
    if (!block) {
      items.push(leaf);
      continue;
    }
    if (!blocks.has(block)) {
      blocks.set(block, { label: block, children: [], bytes: 0, types: new Set() });
      items.push(blocks.get(block));
    }
    const branch = blocks.get(block);
    branch.children.push({ ...leaf, label: name.slice(block.length + 1) });
    branch.bytes += n;
    branch.types.add(type);
  }
  for (const branch of blocks.values())
    branch.note = `${branch.children.length} tensors, ${bytes(branch.bytes)}, ${[...branch.types].join(" ")}`;
  return items;
}

function metadataOf(rows) {
  const place = make("div", { class: "scroll" });
  const sought = make("input", { type: "search", placeholder: "Find a key", "aria-label": "Find a metadata key" });
  const draw = () => {
    const words = sought.value.toLowerCase();
    const fitting = rows.filter(({ key }) => key.toLowerCase().includes(words));
    place.replaceChildren(table(["key", "type", "value"], fitting.map(({ key, type, value }) => [key, type, value])));
  };
  sought.addEventListener("input", draw);
  draw();
  const summary = make("summary", {}, `Metadata: ${rows.length} keys`);
  return card(make("details", {}, summary, sought, place));
}
