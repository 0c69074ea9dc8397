"use strict";
// Charts by uPlot in the page's colours, drawn anew when these or their width change.
const pyggmlCharts = (() => {
  const style = getComputedStyle(document.documentElement);
  const colour = name => style.getPropertyValue("--" + name).trim();
  const shown = new Map();  // place → {chart, plot, width}

  const wholeSteps = [0, 1, 2, 3, 4, 5, 6].flatMap((n) => [1, 2, 5].map((k) => k * 10 ** n));

  function mixed(depth) {  // a ramp of one hue: the deeper a block, the more its line stands out
    const [a, b] = ["shallow", "deep"].map(n => colour(n).split(" ").map(parseFloat));
    const [h, s, l] = a.map((x, i) => x + (b[i] - x) * depth);
    return `hsl(${h} ${s}% ${l}%)`;
  }

  const {oneFormat, short} = pyggmlTicks;
  const lastOf = y => y.findLast(value => value != null);

  function line(series) {
    const depth = typeof series.role === "number";
    const points = series.role === "points";
    const stroke = depth ? mixed(series.role) : colour(series.role);
    return {
      label: series.name, stroke, width: series.role === "faint" ? 1 : depth ? 1.25 : 2,
      spanGaps: true, points: points ? {show: true, size: 7, fill: stroke} : {show: false},
      // Where nothing is pointed at, the legend has the last number.
      value: (u, v, i, at) => short(at == null ? lastOf(u.data[i]) : v),
    };
  }

  const numbers = chart => [chart.x, ...chart.series.map(s => s.y)];

  function draw(place, chart) {
    const axis = {stroke: colour("quiet"), grid: {stroke: colour("line"), width: 1},
                  ticks: {show: false}, font: "12px system-ui, sans-serif"};
    const options = {
      width: place.clientWidth, height: place.closest(".wide") ? 300 : 210,
      scales: {x: {time: false}, y: chart.log ? {distr: 3} : {}},
      legend: {live: chart.series.length <= 8, markers: {width: 0, fill: (u, i) => u.series[i].stroke()}},
      cursor: {points: {size: 6}},
      axes: [{...axis, incrs: wholeSteps, values: (u, v) => oneFormat(v)},
             {...axis, size: 62, values: (u, v) => oneFormat(v, chart.log)}],
      series: [{label: "step", value: (u, v, i, at) => short(at == null ? lastOf(u.data[0]) : v)},
               ...chart.series.map(line)],
    };
    place.replaceChildren();
    const plot = new uPlot(options, numbers(chart), place);
    shown.set(place, {chart, plot, width: place.clientWidth});
  }

  const watch = new ResizeObserver(seen => requestAnimationFrame(() => seen.forEach(({target}) => {
    const known = shown.get(target);
    if (!target.isConnected) { shown.delete(target); watch.unobserve(target); }
    else if (known && known.width !== target.clientWidth) draw(target, known.chart);
  })));
  matchMedia("(prefers-color-scheme: dark)").addEventListener(
    "change", () => shown.forEach(({chart}, place) => draw(place, chart)));

  const looks = chart => JSON.stringify([chart.log, chart.series.map(s => [s.name, s.role])]);

  // Draw a chart in an element; one of the same lines only gets more numbers, and stays zoomed.
  function show(place, chart) {
    const known = shown.get(place);
    if (!known || looks(known.chart) !== looks(chart)) {
      draw(place, chart);
      watch.observe(place);
      return;
    }
    const {min, max} = known.plot.scales.x, x = known.chart.x;
    const whole = min <= x[0] && max >= x[x.length - 1];
    known.chart = chart;
    known.plot.setData(numbers(chart), whole);
    if (!whole) known.plot.redraw();
  }

  return {show};
})();

for (const place of document.querySelectorAll(".chart[data-chart]"))  // those of the report
  pyggmlCharts.show(place, JSON.parse(document.getElementById("charts").textContent)[place.dataset.chart]);
