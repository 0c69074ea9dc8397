// One tensor: its shape, its numbers as a histogram, and what a run has changed of it.

import { ask, bytes, digits, facts, fill, make, shape } from "./page.js";
import { drawCharts } from "./lines.js";

export function tensor(place, name, state) {
  const run = state.runs?.[0]?.name, charts = make("div", { class: "one" });
  let found = {};
  return fill(place, async (signal) => {
    found = await ask("tensor", { name, run }, signal);
    const parts = [make("h2", {}, name), facts(about(found))];
    if (found.numbers) parts.push(...numbers(found.numbers, "Weights"));
    if (found.fault) parts.push(make("p", { class: "fault" }, found.fault));
    if (found.update) parts.push(...update(found.update, run));
    return found.charts?.length ? [...parts, charts] : parts;
  }).then(() => charts.isConnected && found.charts && drawCharts(charts, found.charts));
}

const about = (found) => [
  ["shape", shape(found.shape)],
  ["type", found.type],
  ["size", `${bytes(found.bytes)}, ${digits(found.bits, 3)} bits a weight`],
  ["weights", found.n.toLocaleString("en")],
];

function numbers(found, title) {
  const heading = make("h3", {}, title);
  if (!found.finite) return [heading, make("p", { class: "fault" }, "none of its numbers is finite")];
  const low = digits(found.edges[0], 3), high = digits(found.edges[1], 3);
  const [mean, std, zeros] = [found.mean, found.std, 100 * found.zeros].map((x) => digits(x, 3));
  const told = `mean ${mean}, standard deviation ${std}, zeros ${zeros} %`;
  const ends = make("div", { class: "under quiet" }, ...[low, told, high].map((text) => make("span", {}, text)));
  const of = `histogram of ${found.sampled.toLocaleString("en")} weights from ${low} to ${high}: ${told}`;
  const parts = [heading, bars(found.counts, of), ends];
  if (found.finite < found.sampled)
    parts.push(make("p", { class: "fault" }, `${found.sampled - found.finite} of ${found.sampled} are not finite`));
  return parts;
}

function bars(counts, title) {
  const most = Math.max(...counts);
  const box = { viewBox: `0 0 ${counts.length} 100`, preserveAspectRatio: "none" };
  const svg = svgOf("svg", { class: "bars", role: "img", "aria-label": title, ...box });
  counts.forEach((n, i) => {
    const height = (100 * n) / most;
    svg.append(svgOf("rect", { x: i + 0.05, width: 0.9, y: 100 - height, height }));
  });
  return svg;
}

function svgOf(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function update({ a, b, change, weight, alpha }, run) {
  const factor = (part) => `${shape(part.shape)}, length ${digits(part.norm)}`;
  const rows = [["A", factor(a)], ["B", factor(b)]];
  if (change != null) {
    rows.push(["change α/r · BA", `length ${digits(change)}, ${digits((100 * change) / weight, 3)} % of the weight's`]);
    rows.push(["α", digits(alpha)]);
  }
  const heading = make("h3", {}, `Its update by the run ${run}`);
  return [heading, facts(rows), ...numbers(a.numbers, "A"), ...numbers(b.numbers, "B")];
}
