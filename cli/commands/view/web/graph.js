// The graph on its way through its passes: sections with equal blocks folded, the inside of each,
// and every node in words.

import { address, ask, card, facts, fill, make, picture, replaced, shape } from "./page.js";
import { passForm, passOf } from "./pass.js";
import { stepper } from "./stepper.js";
import { list } from "./tree.js";
import { framed } from "./zoom.js";

export function graph(place) {
  const overview = make("div"), hits = make("div"), inside = card(), about = make("p", { class: "quiet" });
  const form = passForm((pass) => (location.hash = address("graph", pass)));
  const example = "Find nodes, such as blk.3.attn_q or silu";
  const sought = make("input", { type: "search", placeholder: example, "aria-label": "Find nodes" });
  const search = make("form", { role: "search" }, sought);
  const here = (fields) => address("graph", { ...pass, stage, words: asked, ...place_, ...fields });
  const steps = stepper("Passes", (i) => replaced(here({ stage: i, node: null })), 2);
  let pass = {}, stage = null, drawn = "", opened = "", asked = "", place_ = {}, nodes = null;
  inside.hidden = true;
  const finding = card(make("h2", {}, "Search"), search, hits), passes = card(make("h2", {}, "Passes"));
  const whole = card(make("h2", {}, "The graph, pass by pass"), steps.node, about, overview);
  const beside = make("div", { class: "stack" }, passes, finding);
  place.append(card(form), make("div", { class: "split left" }, whole, beside), inside);

  search.addEventListener("submit", (event) => {
    event.preventDefault();
    location.hash = here({ words: sought.value });
  });

  const open = (section, direction, node) => (location.hash = here({ section, direction, node }));

  // Which pass is shown, and what it does.
  function tell(found) {
    form.answered(found.pass);
    const labels = found.stages.map((each) => `${each.name}: ${each.told}`), known = labels.join("\n");
    if (passes.dataset.known !== known) {
      passes.dataset.known = known;
      passes.replaceChildren(passes.firstElementChild, list("Passes", labels, (i) => (location.hash = here({ stage: i, node: null }))));
    }
    passes.lastElementChild.select(found.stage);
    const { name, about: words, told } = found.stages[found.stage];
    steps.update(found.stages.length, found.stage, `${found.stage + 1} of ${found.stages.length}: ${name}, ${told}`);
    about.replaceChildren(words);
  }

  return {
    async go(rest, fields) {
      pass = passOf(fields);
      stage = fields.get("stage");
      asked = fields.get("words") ?? "";
      form.take(pass);
      sought.value = asked;
      const same = JSON.stringify([pass, stage]);
      if (drawn !== same) fill(overview, (signal) => overviewOf({ ...pass, stage }, open, tell, signal));
      const section = fields.get("section"), direction = fields.get("direction") ?? "forward";
      place_ = section == null ? {} : { section, direction, node: fields.get("node") };
      const now = section == null ? "" : `${same} ${section} ${direction}`;
      if (hits.dataset.words !== `${asked} ${same}`) {
        hits.dataset.words = `${asked} ${same}`;
        fill(hits, (signal) => hitsOf({ ...pass, stage }, asked, open, signal));
      }
      inside.hidden = !now;
      const isNew = now && opened !== now, isOther = !opened && drawn;
      drawn = same;
      opened = now;
      if (isNew) {
        nodes = null;
        await fill(inside, async (signal) => {
          const found = await insideOf({ ...pass, stage }, section, direction, open, signal);
          nodes = found.nodes;
          return found.parts;
        });
        if (isOther) inside.scrollIntoView({ block: "nearest" });
      }
      nodes?.show(Number(fields.get("node") ?? -1));
    },
  };
}

async function overviewOf(pass, open, tell, signal) {
  const found = await ask("graph", pass, signal);
  tell(found);
  if (found.plan) return planned(pass, signal);
  const counts = { nodes: found.n_nodes, leaves: found.n_leaves, "kinds of ops": found.ops.length };
  const told = Object.entries(counts).map(([name, n]) => [name, n.toLocaleString("en")]);
  const legend = make("p", { class: "quiet" }, make("span", { class: "new" }, "made by this pass"), " ", make("span", { class: "gone" }, "taken away by it"));
  if (found.svg) return [facts(told), framed(picture(found.svg), "The graph").node, legend];
  const rows = found.sections.flatMap((section, i) => [
    partOf(section, "forward", open), partOf(section, "backward", open),
    ...(i < found.streams.length ? [stream("↓", found.streams[i]), stream(section.backward ? "↑" : "", found.streams[i])] : []),
  ]);
  return [facts(told), make("div", { class: "parts" }, ...rows), legend];
}

// Its sections are one below the other, the forward pass on the left; a click opens one.
function partOf(section, direction, open) {
  if (!section[direction]) return make("span");
  const { new: n_new, gone } = section[`${direction}_marked`];
  const ops = section[`${direction}_ops`].map(([name, n]) => (n > 1 ? `${name}\u00a0×${n}` : name)).join(", ");
  const marks = [n_new && make("span", { class: "new" }, `${n_new} made`), gone && make("span", { class: "gone" }, `${gone} taken`)];
  const title = `${section.title}${section.n > 1 ? ` ×${section.n}` : ""}, ${direction}`;
  const about = make("span", { class: "quiet" }, ops);
  const attributes = { type: "button", class: `part ${direction}`, "data-section": section.index, click: () => open(section.index, direction) };
  return make("button", attributes, make("b", {}, title), " ", ...marks.filter(Boolean), about);
}

const stream = (arrow, what) => make("span", { class: "quiet stream" }, arrow && `${arrow} ${what}`);

async function planned(pass, signal) {
  const { svg, facts: told } = await ask("plan", { ...pass, stage: null, wide: axis() }, signal);
  const link = make("a", { href: address("plan", { ...pass, stage: null }) }, "What is alive at each moment");
  return [facts(told), framed(picture(svg), "The memory plan").node, make("p", {}, link)];
}

// Pixels of a plan's axis, where the window is too narrow for the usual one.
export const axis = () => (window.innerWidth < 600 ? Math.max(200, window.innerWidth - 182) : null);

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

async function insideOf(pass, section, direction, open, signal) {
  const found = await ask("graph/section", { ...pass, section, direction }, signal);
  const heading = make("h2", {}, `${found.title}, ${direction}: ${found.nodes.length} nodes`);
  const svg = picture(found.svg), about = make("div", { "aria-live": "polite" });
  const labels = found.nodes.map((node) => `${node.op}  ${node.name || weightOf(node)}${{ new: "  (made)", gone: "  (taken away)" }[node.mark] ?? ""}`);
  const choose = (i) => open(section, direction, i);
  const nodes = list("Nodes", labels, choose), drawn = framed(svg, heading.textContent);
  drawn.node.classList.add("picked");
  svg.addEventListener("click", (event) => {
    const node = event.target.closest("[data-node]");
    if (node) choose(node.dataset.node);
  });
  nodes.show = (i) => {
    nodes.select(i);
    svg.querySelectorAll("[data-chosen]").forEach((node) => node.removeAttribute("data-chosen"));
    const box = svg.querySelector(`[data-node="${i}"]`);
    box?.setAttribute("data-chosen", "");
    drawn.show(box);
    about.replaceChildren(...(found.nodes[i] ? aboutNode(found.nodes[i]) : []));
  };
  const title = make("h3", {}, "Nodes, in the order of execution");
  const listed = make("div", {}, title, make("div", { class: "scroll half" }, nodes));
  const beside = make("div", { class: "split" }, listed, about);
  return { nodes, parts: [heading, make("p", { class: "quiet" }, INSIDE[direction]), drawn.node, beside] };
}

function aboutNode(node) {
  const result = (tensor) => `${tensor.type} ${shape(tensor.shape)}`;
  const rows = [["op", node.op], ["result", result(node)], ["bytes", node.bytes.toLocaleString("en")]];
  if (node.planned) rows.push(["lives", node.lives ? `from node ${node.lives[0]} to ${node.lives[1] ?? "the end"}` : "in its leaf"]);
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
