// The file at a glance: facts, tensors folded by block, metadata; and one tensor in detail.

import { ask, bytes, card, fill, make, rows, table } from "./page.js";
import { tree } from "./tree.js";
import { tensor } from "./tensor.js";

export function model(place, state) {
  let known = null; // the answer, once it is there
  let chosen = "", tensors = null;
  const details = make("section", { class: "card", "aria-label": "Tensor", "aria-live": "polite" });

  fill(place, async () => {
    known = await ask("model");
    const found = content(known, details);
    tensors = found.querySelector('[role="tree"]')?.parentElement;
    choose();
    return [...found.children];
  });

  function choose() {
    if (!tensors) return;
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
  const found = make("div"), first = make("div", { class: "pair" }), more = make("div", { class: "stack" });
  if (known.fault) found.append(card(make("p", { class: "fault" }, known.fault)));
  if (!known.path) return found; // runs alone
  found.append(first, make("div", { class: "split" }, tensorsOf(known.tensors), details), more);
  glance(first, more);
  return found;
}

// What `pyggml inspect` shows: its first two sections before the tensors, the others behind them.
async function glance(first, more, rank) {
  const wasRank = document.activeElement.name === "rank";
  const open = [...more.querySelectorAll("details[open]")].map((each) => each.dataset.title);
  let found;
  try {
    found = await ask("glance", { rank });
  } catch (error) {
    return first.replaceChildren(card(make("p", { class: "fault" }, error.message)));
  }
  const [file, architecture, ...others] = found.sections.map((section) => ({ ...section, isOpen: open.includes(section.title) }));
  const heads = architecture?.title === "architecture" ? [file, architecture] : [file];
  if (heads.length === 1) others.unshift(architecture);
  first.replaceChildren(...heads.map((section) => card(make("h2", { class: "titled" }, section.title), rows(section.rows))));
  const again = (value) => glance(first, more, value);
  more.replaceChildren(...others.filter(Boolean).map((section) => folded(section, found.rank, again)));
  if (wasRank) more.querySelector("[name=rank]")?.focus();
}

function folded(section, rank, again) {
  const parts = [rows(section.rows)];
  if (section.title === "LoRA" && section.table) parts.unshift(rankField(rank, again));
  if (section.table) {
    const { columns, rows: lines, right } = section.table;
    parts.push(make("div", { class: "scroll" }, table(columns, lines, right)));
  }
  if (section.text) parts.push(make("pre", { class: "scroll tall" }, section.text));
  parts.push(...section.notes.map((note) => make("p", { class: "quiet" }, note)));
  const about = section.title === "metadata" ? `metadata: ${section.table.rows.length} keys` : section.title;
  const attributes = { "data-title": section.title, open: section.isOpen };
  return card(make("details", attributes, make("summary", { class: "titled" }, about), ...parts));
}

function rankField(rank, again) {
  const input = make("input", { type: "number", name: "rank", min: 1, max: 256, value: rank });
  input.addEventListener("change", () => input.checkValidity() && again(input.value));
  return make("div", { class: "fields" }, make("label", {}, "rank", input));
}

function tensorsOf(tensors) {
  const place = make("div", { class: "scroll tall" });
  const sought = make("input", { type: "search", placeholder: "Find a tensor", "aria-label": "Find a tensor" });
  const choose = (name) => (location.hash = `#/model/${encodeURIComponent(name)}`);
  const draw = () => {
    const words = sought.value.toLowerCase();
    const fitting = tensors.filter(([name]) => name.toLowerCase().includes(words));
    place.replaceChildren(tree("Tensors", branches(fitting), choose));
    if (words && fitting.length <= 100)
      place.querySelectorAll("[aria-expanded]").forEach((node) => (node.ariaExpanded = "true"));
  };
  sought.addEventListener("input", draw);
  draw();
  return card(make("h2", {}, "Tensors"), sought, place);
}

// Tensors of a block are one branch.
function branches(tensors) {
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
