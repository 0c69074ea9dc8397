"use strict";
// Numbers of an axis, all in one format, and single ones.
const pyggmlTicks = (() => {
  const MOST_DECIMALS = 4, LARGE = 1e7;

  function short(value) {  // 0.00021, 1.5e-7, 12,300
    if (value == null) return "";
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= LARGE)) return value.toExponential(1).replace(".0", "");
    return value.toLocaleString("en", {maximumSignificantDigits: 4});
  }

  // How many decimals tell these numbers exactly.
  function decimals(values) {
    const isWhole = d => values.every(v => Math.abs(v * 10 ** d - Math.round(v * 10 ** d)) < 1e-6);
    for (let d = 0; d < 15; d++) if (isWhole(d)) return d;
    return 15;
  }

  // The ticks of an axis as text; null, where a logarithmic axis has no room for one, is "".
  // 0, 0.05, 0.10; or with one power of ten: 0, 0.5e-4, 1.0e-4, 1.5e-4. Logarithmic: 0.01, 0.1, 1.
  function oneFormat(values, isLog = false) {
    const known = values.filter(v => v != null), sizes = known.map(Math.abs).filter(v => v);
    const least = Math.min(...sizes), most = Math.max(...sizes), d = decimals(known);
    const told = form => values.map(v => (v == null ? "" : form(v)));
    const isPlain = !sizes.length || (most < LARGE && (isLog ? least >= 1e-4 : d <= MOST_DECIMALS));
    if (isPlain && isLog) return told(v => v.toLocaleString("en", {maximumFractionDigits: MOST_DECIMALS}));
    if (isPlain) return told(v => v.toLocaleString("en", {minimumFractionDigits: d, maximumFractionDigits: d}));
    if (isLog) return told(v => v.toExponential());
    const power = Math.floor(Math.log10(most) + 1e-9), scaled = known.map(v => v / 10 ** power);
    const places = decimals(scaled.map(v => Number(v.toPrecision(6))));
    return told(v => (v ? `${(v / 10 ** power).toFixed(places)}e${power}` : "0"));
  }

  return {oneFormat, short};
})();
