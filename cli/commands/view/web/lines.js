// Charts of lines, which get more numbers as a run goes on, and say in words what they show.

import { make } from "./page.js";

// charts: as cli/web/report/series.py has them; the first one is wide.
export function drawCharts(place, charts) {
  const titles = charts.map((chart) => chart.title).join("\n");
  if (place.dataset.titles !== titles) {
    place.dataset.titles = titles;
    place.replaceChildren(...charts.map((chart, i) => {
      const caption = make("figcaption", {}, `${chart.title} `, make("span", { class: "quiet" }, chart.note));
      return make("figure", { class: i ? "card" : "card wide" }, caption, make("div", { class: "chart", role: "img" }));
    }));
  }
  charts.forEach((chart, i) => {
    const at = place.children[i].querySelector(".chart");
    at.ariaLabel = inWords(chart);
    pyggmlCharts.show(at, chart);
  });
}

function inWords({ title, series, x }) {
  const said = series.map(({ name, y }) => {
    const known = y.filter((value) => value != null);
    return `${name} from ${known[0]?.toPrecision(4)} to ${known.at(-1)?.toPrecision(4)}`;
  });
  return `${title}, steps ${x[0]} to ${x.at(-1)}: ${said.slice(0, 4).join("; ")}`;
}
