// The runs of a folder: a table that is sorted by a click, and charts of those that are laid over
// each other. #/run/NAME?sort=final loss&down=1&with=a/b

import { ask, card, make } from "./page.js";
import { drawCharts } from "./lines.js";

const MOST_LAID = 6; // as many as the server draws

// go(fields): what of this view's state changes in the address.
export function runsTable(go) {
  const home = make("div", { class: "scroll" }), charts = make("div", { class: "charts" });
  const hint = make("p", { class: "quiet" }), laid = make("section", { class: "contents", "aria-label": "Runs laid over each other" }, charts);
  const place = card(make("h2", {}, "Runs"), home, hint);
  let found = null, drawn = "", overlaid = "", now = {};

  function draw() {
    const { name, sort, down, laidOver, query } = now;
    hint.textContent = laidOver.length > 1 ? "" : "Tick two runs or more to lay them over each other; a column's name sorts.";
    const rows = sorted(found, sort, down), box = (row) => chosen(row.name, laidOver, go);
    home.replaceChildren(
      make("table", { class: "runs" }, make("thead", {}, headOf(found.columns, sort, down, go)),
        make("tbody", {}, ...rows.map((row) => rowOf(row, name, box(row), query)))),
    );
  }

  async function look(version) {
    if (drawn !== version) {
      drawn = version;
      const answer = await ask("runs").catch(() => null);
      if (!answer) return void (drawn = "");
      found = answer;
    }
    if (!found) return;
    const focused = document.activeElement?.dataset?.key;
    draw();
    if (focused) home.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
    const want = now.laidOver.length > 1 ? JSON.stringify([now.laidOver, version]) : "";
    if (want === overlaid) return;
    overlaid = want;
    if (!want) {
      delete charts.dataset.titles;
      return charts.replaceChildren();
    }
    try {
      const { charts: given } = await ask("runs/overlay", { name: now.laidOver });
      if (overlaid === want) drawCharts(charts, given);
    } catch (error) {
      charts.replaceChildren(make("p", { class: "fault" }, error.message));
    }
  }

  return {
    place,
    laid,
    // name: of the run that is shown below; version: of the files of all runs
    update(name, fields, version) {
      const laidOver = (fields.get("with") ?? "").split("/").filter(Boolean);
      now = { name, sort: fields.get("sort"), down: fields.get("down") === "1", laidOver, query: String(fields) };
      return look(version);
    },
  };
}

// Runs without a number come last, in either direction.
function sorted({ columns, rows }, sort, down) {
  const i = columns.indexOf(sort), way = down ? -1 : 1;
  if (sort === "run") return rows.toSorted((a, b) => way * a.name.localeCompare(b.name));
  if (i < 0) return rows; // the newest first
  const order = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
  const missing = (row) => row.cells[i].value == null;
  return rows.toSorted((a, b) => missing(a) - missing(b) || way * order(a.cells[i].value, b.cells[i].value) || 0);
}

function headOf(columns, sort, down, go) {
  const head = (title, i) => {
    const is = title === sort, order = is ? (down ? "descending" : "ascending") : "none";
    const act = () => go({ sort: title, down: is && !down ? "1" : "" });
    const button = make("button", { type: "button", click: act, "data-key": `sort ${title}` }, title);
    return make("th", { scope: "col", "aria-sort": order, class: i > 0 && "number" }, button);
  };
  return make("tr", {}, make("th", { scope: "col" }, "over"), head("run", 0), ...columns.map(head));
}

function rowOf({ name, cells }, shown, box, query) {
  const link = make("a", { href: `#/run/${encodeURIComponent(name)}${query && `?${query}`}` }, name);
  const texts = cells.map(({ text }, i) => make("td", { class: i > 0 && "number" }, text));
  return make("tr", { "aria-current": String(name === shown) }, make("td", {}, box), make("td", {}, link), ...texts);
}

function chosen(name, laidOver, go) {
  const is = laidOver.includes(name), full = !is && laidOver.length >= MOST_LAID;
  const label = `Lay ${name} over others`, title = full ? `at most ${MOST_LAID}` : "";
  const box = make("input", { type: "checkbox", "aria-label": label, title, checked: is, disabled: full, "data-key": `box ${name}` });
  box.addEventListener("change", () => {
    const others = laidOver.filter((each) => each !== name);
    go({ with: (box.checked ? [...laidOver, name] : others).join("/") });
  });
  return box;
}
