
"use strict";
// Each chart of the page, drawn in the page's colours; drawn anew when these or its width change.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const style = getComputedStyle(document.documentElement);
  const colour = name => style.getPropertyValue("--" + name).trim();

  function mixed(depth) {  // a hue between those of the first block and the last
    const [a, b] = ["shallow", "deep"].map(n => colour(n).split(" ").map(parseFloat));
    const [h, s, l] = a.map((x, i) => x + (b[i] - x) * depth);
    return `hsl(${h} ${s}% ${l}%)`;
  }

  function short(value) {  // 0.00021, 1.5e-7, 12,300
    if (value == null) return "";
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(1).replace(".0", "");
    return value.toLocaleString("en", {maximumSignificantDigits: 4});
  }

  function line(series) {
    const depth = typeof series.role === "number";
    const points = series.role === "points";
    const stroke = depth ? mixed(series.role) : colour(series.role);
    return {
      label: series.name, stroke, width: series.role === "faint" ? 1 : depth ? 1.25 : 2,
      spanGaps: true, points: points ? {show: true, size: 7, fill: stroke} : {show: false},
      value: (u, v) => short(v),
    };
  }

  function draw(place) {
    const chart = charts[place.dataset.chart];
    const axis = {stroke: colour("quiet"), grid: {stroke: colour("line"), width: 1},
                  ticks: {show: false}, font: "12px system-ui, sans-serif"};
    const options = {
      width: place.clientWidth, height: place.closest(".wide") ? 300 : 210,
      scales: {x: {time: false}, y: chart.log ? {distr: 3} : {}},
      legend: {live: chart.series.length <= 8},
      cursor: {points: {size: 6}},
      axes: [{...axis, values: (u, v) => v.map(short)},
             {...axis, size: 62, values: (u, v) => v.map(short)}],
      series: [{label: "step", value: (u, v) => short(v)}, ...chart.series.map(line)],
    };
    place.replaceChildren();
    new uPlot(options, [chart.x, ...chart.series.map(s => s.y)], place);
  }

  const places = [...document.querySelectorAll(".chart")];
  const watch = new ResizeObserver(seen => requestAnimationFrame(() => seen.forEach(({target}) => {
    if (target.dataset.width !== String(target.clientWidth)) {
      target.dataset.width = target.clientWidth;
      draw(target);
    }
  })));
  places.forEach(place => watch.observe(place));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => places.forEach(draw));
})();
