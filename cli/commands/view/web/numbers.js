// The first numbers of a tensor as a table, coloured by sign and size, and what all are like.

import { digits, make } from "./page.js";

export function numbersOf(value) {
  if (!value) return [make("p", { class: "quiet" }, "no numbers")];
  const { first, rows, columns, min, max } = value;
  const most = Math.max(...first.flat().map((x) => Math.abs(x ?? 0)), Number.MIN_VALUE);
  const cell = (x) => {
    const node = make("td", {}, x == null ? "not finite" : digits(x, 3));
    const colour = x < 0 ? "--third" : "--second";
    if (x) node.style.backgroundColor = `color-mix(in srgb, var(${colour}) ${Math.round((55 * Math.abs(x)) / most)}%, transparent)`;
    return node;
  };
  const body = first.map((row) => make("tr", {}, ...row.map(cell)));
  const part = rows > first.length || columns > (first[0]?.length ?? 0) ? `the first of ${rows} × ${columns}; ` : "";
  const all = min == null ? "none is finite" : `from ${digits(min, 3)} to ${digits(max, 3)}, mean ${digits(value.mean, 3)}, length ${digits(value.length, 3)}`;
  const sampled = value.sampled ? `, of a sample of ${value.sampled.toLocaleString("en")}` : "";
  const fault = value.finite ? [] : [make("p", { class: "fault" }, "not all are finite")];
  const table = make("table", { class: "numbers" }, make("tbody", {}, ...body));
  return [make("div", { class: "scroll", tabindex: 0 }, table), make("p", { class: "quiet" }, part + all + sampled), ...fault];
}
