// The graph: sections with equal blocks folded, the inside of each, and every node in words.

import { address, ask, card, facts, fill, make, picture, reveal, shape } from "./page.js";
import { passForm, passOf } from "./pass.js";
import { list } from "./tree.js";

export function graph(place) {
  const overview = card(), hits = make("div"), inside = card();
  const form = passForm((pass) => (location.hash = address("graph", pass)));
  const example = "Find nodes, such as blk.3.attn_q or silu";
  const sought = make("input", { type: "search", placeholder: example, "aria-label": "Find nodes" });
  const search = make("form", { role: "search" }, sought);
  let pass = {}, drawn = "", opened = "", asked = "";
  inside.hidden = true;
  const finding = card(make("h2", {}, "Search"), search, hits);
  place.append(card(form), make("div", { class: "split left" }, overview, finding), inside);

  search.addEventListener("submit", (event) => {
    event.preventDefault();
    location.hash = address("graph", { ...pass, words: sought.value });
  });

  const open = (section, direction, node) => (location.hash = address("graph", { ...pass, words: asked, section, direction, node }));

  return {
    async go(rest, fields) {
      pass = passOf(fields);
      asked = fields.get("words") ?? "";
      form.take(pass);
      sought.value = asked;
      const same = JSON.stringify(pass);
      if (drawn !== same) fill(overview, (signal) => overviewOf(pass, open, form, signal));
      const section = fields.get("section"), direction = fields.get("direction") ?? "forward";
      const now = section == null ? "" : `${same} ${section} ${direction}`;
      if (hits.dataset.words !== `${asked} ${same}`) {
        hits.dataset.words = `${asked} ${same}`;
        fill(hits, (signal) => hitsOf(pass, asked, open, signal));
      }
      inside.hidden = !now;
      const isNew = now && opened !== now;
      drawn = same;
      opened = now;
      if (isNew) {
        await fill(inside, (signal) => insideOf(pass, section, direction, open, signal));
        inside.scrollIntoView({ block: "nearest" });
      }
      inside.querySelector('[role="listbox"]')?.show(Number(fields.get("node") ?? -1));
    },
  };
}

async function overviewOf(pass, open, form, signal) {
  const found = await ask("graph", pass, signal);
  form.answered(found.pass);
  const svg = picture(found.svg);
  svg.addEventListener("click", (event) => {
    const box = event.target.closest("[data-section]");
    if (box) open(box.dataset.section, box.querySelector(".backward") ? "backward" : "forward");
  });
  const counts = { nodes: found.n_nodes, leaves: found.n_leaves, "kinds of ops": found.ops.length };
  const told = Object.entries(counts).map(([name, n]) => [name, n.toLocaleString("en")]);
  const buttons = found.sections.map((section, i) => buttonsOf(section, i, open));
  return [
    make("h2", {}, "The graph"),
    facts(told),
    make("div", { class: "scroll" }, fitted(svg)),
    make("h3", {}, "Look inside"),
    make("ul", { class: "sections" }, ...buttons),
  ];
}

function buttonsOf(section, i, open) {
  const directions = ["forward", "backward"].filter((direction) => section[direction]);
  const button = (direction) => make("button", { click: () => open(i, direction) }, `${section[direction]} ${direction}`);
  return make("li", {}, `${section.title}${section.n > 1 ? ` ×${section.n}` : ""}: `, ...directions.map(button));
}

async function hitsOf(pass, words, open, signal) {
  const hint = "By a tensor's name, an op, or a weight that is read. Enter searches.";
  if (!words) return [make("p", { class: "quiet" }, hint)];
  const { hits, n_hits } = await ask("graph/search", { ...pass, words }, signal);
  const labels = hits.map(({ op, name, title, direction }) => `${op}  ${name}  – ${title}, ${direction}`);
  const more = n_hits > hits.length ? `, the first ${hits.length} of them` : "";
  const go = (i) => open(hits[i].section, hits[i].direction, hits[i].node);
  const said = make("p", { class: "quiet", role: "status" }, `${n_hits} nodes${more}`);
  return [said, make("div", { class: "scroll tall" }, list("Nodes found", labels, go))];
}

const INSIDE = {
  forward: "Dashed: what is read of other sections, such as the residual stream. Green: reads what is trained.",
  backward: "Dashed: gradients of other sections. Green: reads what is trained. Activations that are read stand in a node's details.",
};

// A picture as wide as its place: smaller, as long as it can be read, and not larger than it is.
function fitted(svg) {
  const width = svg.viewBox.baseVal.width;
  Object.assign(svg.style, { width: "100%", height: "auto", maxWidth: `${width}px`, minWidth: `${0.62 * width}px` });
  return svg;
}

async function insideOf(pass, section, direction, open, signal) {
  const found = await ask("graph/section", { ...pass, section, direction }, signal);
  const svg = picture(found.svg), about = make("div", { "aria-live": "polite" });
  const labels = found.nodes.map((node) => `${node.op}  ${node.name || weightOf(node)}`);
  const choose = (i) => open(section, direction, i);
  const nodes = list("Nodes", labels, choose);
  const drawn = make("div", { class: "scroll picked" }, fitted(svg));
  svg.addEventListener("click", (event) => {
    const node = event.target.closest("[data-node]");
    if (node) choose(node.dataset.node);
  });
  nodes.show = (i) => {
    nodes.select(i);
    svg.querySelectorAll("[data-chosen]").forEach((node) => node.removeAttribute("data-chosen"));
    const box = svg.querySelector(`[data-node="${i}"]`);
    box?.setAttribute("data-chosen", "");
    reveal(box);
    about.replaceChildren(...(found.nodes[i] ? aboutNode(found.nodes[i]) : []));
  };
  const heading = make("h2", {}, `${found.title}, ${direction}: ${found.nodes.length} nodes`);
  const title = make("h3", {}, "Nodes, in the order of execution");
  const listed = make("div", {}, title, make("div", { class: "scroll half" }, nodes));
  const beside = make("div", { class: "split" }, listed, about);
  const hint = make("p", { class: "quiet" }, INSIDE[direction]);
  return [heading, hint, drawn, beside];
}

function aboutNode(node) {
  const lives = node.lives ? `from node ${node.lives[0]} to ${node.lives[1] ?? "the end"}` : "in its leaf";
  const result = (tensor) => `${tensor.type} ${shape(tensor.shape)}`;
  const rows = [["op", node.op], ["result", result(node)], ["bytes", node.bytes.toLocaleString("en")], ["lives", lives]];
  if (node.constants) rows.push(["constants", node.constants]);
  const quiet = (source) => make("span", { class: "quiet" }, `  ${result(source)}`);
  const reads = node.reads.map((source) => make("li", {}, named(source), quiet(source)));
  return [make("h3", {}, node.name || node.op), facts(rows), make("h3", {}, "reads"), make("ul", {}, ...reads)];
}

// The weight that a node without a name reads.
const weightOf = (node) => node.reads.find(({ op, name }) => op === "leaf" && name)?.name ?? "";

// A tensor of the file, or an update of one, leads to its numbers.
function named(source) {
  const file = source.name.replace(/\.lora_\w+$/, "");
  if (source.op !== "leaf" || !/\.(weight|bias)$/.test(file)) return source.name || source.op;
  return make("a", { href: `#/model/${encodeURIComponent(file)}` }, source.name);
}
