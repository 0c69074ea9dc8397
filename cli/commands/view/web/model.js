// The file at a glance: facts, tensors folded by block, metadata; and one tensor in detail:
// #/model/TENSOR?words=attn&rank=16&open=LoRA

import { address, ask, bytes, card, fill, make, replaced, rows, table } from "./page.js";
import { tree } from "./tree.js";
import { tensor } from "./tensor.js";

export function model(place, state) {
  let known = null; // the answer, once it is there
  let chosen = "", asked = {}, parts = null;
  const details = make("section", { class: "card", "aria-label": "Tensor", "aria-live": "polite" });
  const at = (name, fields) => address(name ? `model/${encodeURIComponent(name)}` : "model", fields);
  const change = (changed) => replaced(at(chosen, { ...asked, ...changed }));
  const choose = (name) => (location.hash = at(name, asked));

  fill(place, async () => {
    known = await ask("model");
    parts = content(known, details, choose, change);
    show();
    return parts.nodes;
  });

  function show() {
    if (!parts) return;
    parts.show(asked, chosen);
    if (!known.path) return;
    if (chosen) tensor(details, chosen, state);
    else details.replaceChildren(make("p", { class: "quiet" }, "Choose a tensor to see its numbers."));
  }

  return {
    go(rest, fields) {
      const isOther = rest.join("/") !== chosen || !parts;
      chosen = rest.join("/");
      asked = Object.fromEntries(fields);
      isOther ? show() : parts.show(asked, chosen);
    },
  };
}

function content(known, details, choose, change) {
  const first = make("div", { class: "pair" }), more = make("div", { class: "stack" });
  const fault = known.fault ? [card(make("p", { class: "fault" }, known.fault))] : [];
  if (!known.path) return { nodes: fault, show() {} }; // runs alone
  const tensors = tensorsOf(known.tensors, choose, change);
  let drawn = null;
  return {
    nodes: [...fault, first, make("div", { class: "split" }, tensors.node, details), more],
    show(asked, chosen) {
      tensors.show(asked.words ?? "", chosen);
      if (drawn !== (asked.rank ?? "")) glance(first, more, asked, change);
      drawn = asked.rank ?? "";
    },
  };
}

// What `pyggml inspect` shows: its first two sections before the tensors, the others behind them.
async function glance(first, more, { rank, open = "" }, change) {
  const wasRank = document.activeElement.name === "rank", titles = open.split(",");
  let found;
  try {
    found = await ask("glance", { rank });
  } catch (error) {
    return first.replaceChildren(card(make("p", { class: "fault" }, error.message)));
  }
  const [file, architecture, ...others] = found.sections.map((section) => ({ ...section, isOpen: titles.includes(section.title) }));
  const heads = architecture?.title === "architecture" ? [file, architecture] : [file];
  if (heads.length === 1) others.unshift(architecture);
  first.replaceChildren(...heads.map((section) => card(make("h2", { class: "titled" }, section.title), rows(section.rows))));
  more.replaceChildren(...others.filter(Boolean).map((section) => folded(section, found.rank, (value) => change({ rank: value }))));
  more.querySelectorAll("details").forEach((each) => each.addEventListener("toggle", () => {
    const now = [...more.querySelectorAll("details[open]")].map((details) => details.dataset.title).join(",");
    if (each.isConnected && now !== open) change({ open: (open = now) });
  }));
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

function tensorsOf(tensors, choose, change) {
  const place = make("div", { class: "scroll tall" });
  const sought = make("input", { type: "search", placeholder: "Find a tensor", "aria-label": "Find a tensor" });
  let drawn = null;
  const draw = (words) => {
    const fitting = tensors.filter(([name]) => name.toLowerCase().includes(words.toLowerCase()));
    place.replaceChildren(tree("Tensors", branches(fitting), choose));
    if (words && fitting.length <= 100)
      place.querySelectorAll("[aria-expanded]").forEach((node) => (node.ariaExpanded = "true"));
  };
  sought.addEventListener("input", () => change({ words: sought.value }));
  return {
    node: card(make("h2", {}, "Tensors"), sought, place),
    show(words, chosen) {
      if (sought.value !== words) sought.value = words;
      if (drawn !== words) draw((drawn = words));
      place.firstElementChild.select(chosen);
    },
  };
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
