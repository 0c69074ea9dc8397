// The tokens of a text: walked with the arrow keys, coloured by shares or by signed numbers.

import { make } from "./page.js";

export const plain = (token) => token.replace("\n", "") || "‥";
export const quoted = (token) => `“${plain(token)}”`;
const mixed = (colour, share) => `color-mix(in srgb, var(${colour}) ${Math.round(75 * Math.min(Math.max(share, 0), 1))}%, transparent)`;
export const shade = (share) => mixed("--heat", share);
export const signed = (x, most) => mixed(x < 0 ? "--third" : "--second", Math.abs(x) / (most || 1));

// Nodes of which one is chosen: chosen(i) hears which.
export function walked(nodes, chosen) {
  const mark = (i) => nodes.forEach((node, j) => {
    node.setAttribute("aria-pressed", i === j);
    node.tabIndex = i === j ? 0 : -1;
  });
  const choose = (i) => {
    mark(i);
    chosen(i);
  };
  nodes.forEach((node, i) => {
    node.setAttribute("role", "button");
    node.setAttribute("aria-pressed", "false");
    node.tabIndex = i ? -1 : 0;
    node.addEventListener("click", () => choose(i));
    node.addEventListener("keydown", (event) => {
      const last = nodes.length - 1;
      const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: last, Enter: i, " ": i }[event.key];
      if (!nodes[to]) return;
      event.preventDefault();
      nodes[to].focus();
      choose(to);
    });
  });
  return mark;
}

// A text whose tokens are chosen: {node, spans, mark(i)}.
export function reading(tokens, chosen) {
  const spans = tokens.map((token) => make("span", {}, token || "‥"));
  return { node: make("div", { class: "reading" }, ...spans), spans, mark: walked(spans, chosen) };
}

// The position in an address, within a text of n tokens.
export const positionIn = (fields, n) => Math.max(0, Math.min(n - 1, fields.at == null ? n - 1 : Number(fields.at) || 0));
