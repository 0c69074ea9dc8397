// The card on a run's data: what may be wrong with rows, how long they are, languages, and losses.

import { make } from "./page.js";

export function dataCard({ rows, counts, lengths, shares, losses, n_losses: n }) {
  const parts = [make("h2", {}, "Data"), make("p", {}, rows), make("ul", { class: "counts" }, ...counts.map(count))];
  const quantiles = lengths.map(([title, numbers]) => [title, ...numbers]);
  const measures = [measured(["", "shortest", "median", "90\u00a0%", "longest"], quantiles)];
  for (const [title, each] of shares) measures.push(measured([title, "share", ""], each.map(share), "shares"));
  parts.push(make("div", { class: "measures" }, ...measures));
  if (losses.length) {
    const lines = losses.map(([label, numbers, text]) => [label, ...numbers, text]);
    parts.push(measured(["loss", "before", "after", "what is learned of the row"], lines, "losses"));
    const about = `The mean loss of a row before and after training, of ${n} rows spread over all. `;
    parts.push(make("p", { class: "quiet" }, about, "A row whose loss stays high is often a bad one."));
  }
  return make("section", { class: "card data", "aria-label": "Data" }, ...parts);
}

function count({ n, text, examples }) {
  const said = [make("strong", {}, n.toLocaleString("en")), ` ${n === 1 ? "row" : "rows"} ${text}`];
  if (examples.length) {
    const summary = make("summary", {}, n === 1 ? "what is learned of it" : "what is learned of some");
    said.push(make("details", {}, summary, ...examples.map((each) => make("p", {}, each))));
  }
  return make("li", n ? {} : { class: "none" }, ...said);
}

function share([name, part]) {
  const percent = `${Number((100 * part).toPrecision(3))} %`;
  return [name, percent, make("progress", { max: 1, value: part, "aria-label": `${name}: ${percent}` })];
}

function measured(heads, lines, kind) {
  const head = make("tr", {}, ...heads.map((name) => make("th", { scope: "col" }, name)));
  const line = ([name, ...cells]) =>
    make("tr", {}, make("th", { scope: "row" }, name), ...cells.map((cell) => make("td", {}, cell)));
  return make("table", { class: kind }, make("thead", {}, head), make("tbody", {}, ...lines.map(line)));
}
