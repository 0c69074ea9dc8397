// What every block would say if it were the last, with patches at a click; and what adds to a logit.

import { COMPUTING, digits, fill, make, send, table } from "./page.js";
import { plain, positionIn, quoted, reading, shade, signed } from "./tokens.js";

const PARTS = { out: "the stream after the block", mid: "the stream between attention and feed-forward", attn_out: "what attention adds", ffn_out: "what the feed-forward adds" };
export const ROUNDS = "Products round here, and so do small effects: pyggml view --compute f32 is exact.";
const percent = (p) => `${digits(100 * p, 3)} %`;

export function lensed({ tokens, rows, rounds }, asked, change) {
  const cells = rows.map((row, block) => row.map(([[best, p]], at) => {
    const node = make("td", { tabindex: -1, "aria-selected": "false", title: `block ${block}, after ${quoted(tokens[at])}: ${plain(best)} ${percent(p)}` }, plain(best));
    node.style.backgroundColor = shade(p);
    node.addEventListener("click", () => change({ block, at }));
    node.addEventListener("keydown", (event) => {
      const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] ?? [];
      const to = cells[block + right]?.[at + down];
      if (!to) return;
      event.preventDefault();
      to.focus();
      change({ block: block + right, at: at + down });
    });
    return node;
  }));
  const head = make("tr", {}, make("th", {}, "after"), ...rows.map((_, block) => make("th", { scope: "col" }, `block ${block}`)));
  const line = (token, at) => make("tr", {}, make("th", { scope: "row" }, plain(token)), ...cells.map((column) => column[at]));
  const drawn = make("table", { class: "lens" }, make("thead", {}, head), make("tbody", {}, ...tokens.map(line)));
  const what = make("select", { name: "part" }, ...Object.entries(PARTS).map(([name, label]) => make("option", { value: name }, label)));
  const other = make("input", { type: "text", name: "other", placeholder: "another text of as many tokens; empty: it is made 0", "aria-label": "Another text" });
  const told = make("div"), patch = make("div"), fields = make("div", { class: "fields" }, make("label", {}, "patched", what), make("label", { class: "more" }, "taken from", other));
  what.addEventListener("change", () => change({ part: what.value }));
  other.addEventListener("change", () => change({ other: other.value }));
  let patched = "";

  function show(fields) {
    const isChosen = fields.block != null && fields.at != null;
    what.value = Object.hasOwn(PARTS, fields.part ?? "") ? fields.part : "out";
    other.value = fields.other ?? "";
    const block = Math.max(0, Math.min(rows.length - 1, Number(fields.block) || 0)), at = positionIn(fields, tokens.length);
    cells.flat().forEach((cell) => {
      cell.setAttribute("aria-selected", isChosen && cell === cells[block][at]);
      cell.tabIndex = cell === cells[block][at] ? 0 : -1;
    });
    if (!isChosen) return void told.replaceChildren(make("p", { class: "quiet" }, "Choose a cell, with a click or the arrow keys, to patch the activation there."));
    const choices = rows[block][at].map(([token, p]) => `${quoted(token)} ${percent(p)}`).join(", ");
    told.replaceChildren(make("p", { role: "status" }, `Block ${block} after ${quoted(tokens[at])} would say ${choices}.`));
    const body = { text: fields.text, run: fields.model || null, name: `blk.${block}.${what.value}`, at, other: other.value };
    if (patched === JSON.stringify(body)) return;
    patched = JSON.stringify(body);
    fill(patch, async (signal) => movesOf(await send("patch", body, signal)), COMPUTING);
  }
  const hint = make("p", { class: "quiet" }, "Each cell is what its block would say after the token of its row, by the last norm and the output matrix; the colour is how sure it is.");
  const note = rounds ? [make("p", { class: "quiet" }, ROUNDS)] : [];
  const nodes = [make("h2", {}, "Logit lens"), hint, make("div", { class: "scroll tall" }, drawn), told, fields, ...note, patch];
  return { nodes, show };
}

function movesOf({ tokens, at, name, moved, logits }) {
  const text = reading(tokens, () => {}), most = Math.max(...moved, 1e-9);
  text.spans.forEach((span, i) => {
    span.style.backgroundColor = shade(moved[i] / most);
    span.title = `moved by ${digits(moved[i], 3)} nats`;
  });
  const by = (x) => `${x < 0 ? "−" : "+"}${digits(Math.abs(x), 3)}`;
  const lines = logits.map(([token, before, after, p, q]) => [quoted(token), `${digits(before, 3)} → ${digits(after, 3)}`, by(after - before), `${percent(p)} → ${percent(q)}`]);
  const heads = ["token", "logit", "moved by", "probability"];
  return [
    make("h3", {}, `${name} at ${quoted(tokens[at])}, patched: what is said after ${quoted(tokens.at(-1))}`),
    make("div", { class: "scroll moves" }, table(heads, lines, [1, 2, 3])),
    make("h3", {}, `How far each token's prediction moves, at most ${digits(most, 3)} nats`), text.node,
  ];
}

export function attributed({ tokens, at, best, parts, shares, rounds }, asked, change) {
  const text = reading(tokens, (i) => change({ at: i })), most = Math.max(...shares.map(Math.abs));
  text.spans.forEach((span, i) => {
    if (i > at) return span.classList.add("quiet");
    span.style.backgroundColor = signed(shares[i], most);
    span.title = digits(shares[i], 3);
  });
  text.mark(at);
  const longest = Math.max(...parts.map(([, value]) => Math.abs(value)));
  const lines = parts.flatMap(([name, value]) => {
    const fill = make("span"), bar = make("div", { class: "bar" }, fill), share = (50 * Math.abs(value)) / (longest || 1);
    fill.style.left = `${value < 0 ? 50 - share : 50}%`;
    fill.style.width = `${share}%`;
    fill.style.backgroundColor = `var(${value < 0 ? "--third" : "--second"})`;
    return [make("span", {}, name), bar, make("span", {}, digits(value, 3))];
  });
  const choices = best.map(([token, p]) => `${quoted(token)} ${percent(p)}`).join(", ");
  const nodes = [
    make("h2", {}, `What makes it say ${quoted(best[0][0])} after ${quoted(tokens[at])}`),
    make("p", { role: "status" }, `It would say ${choices}.`),
    make("p", { class: "quiet" }, "Choose another token, with a click or the arrow keys. The colour is how much a token's embedding raises (green) or lowers (orange) the logit, to first order."),
    text.node,
    make("h3", {}, "What each part adds to the logit, with the last norm's factor fixed"),
    make("div", { class: "signed" }, ...lines),
    ...(rounds ? [make("p", { class: "quiet" }, ROUNDS)] : []),
  ];
  return { nodes };
}
