// Text for figures, and small helpers for elements.

const digits = (value) => (Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0);

function seconds(value) {
  for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) {
    if (Math.abs(value) >= scale) return `${(value / scale).toFixed(digits(value / scale))} ${unit}`;
  }
  return value ? `${(value * 1e6).toFixed(2)} µs` : "0 s";
}

function bytes(count) {
  let size = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024) return unit === "B" ? `${size.toFixed(0)} B` : `${size.toFixed(digits(size))} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(digits(size))} TiB`;
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;

/** By how much a number changed: "+2.1%", "no change". */
function change(now, was) {
  if (now === was) return "no change";
  if (!was) return "";
  const share = now / was - 1;
  if (Math.abs(share) < 5e-4) return "about the same";
  return `${share > 0 ? "+" : "−"}${percent(Math.abs(share))}`;
}

const byId = (id) => document.getElementById(id);

/** A new element with text; names come from files, so nothing is ever read as HTML. */
function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

function svgElement(tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

/** Round steps for an axis: about `count` of them up to `most`, each 1, 2 or 5 times a power of `base`. */
function ticks(from, to, count) {
  const rough = (to - from) / count;
  if (!(rough > 0)) return [];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  const found = [];
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to * (1 + 1e-12); k++) found.push(k * step);
  return found;
}

/** Times on an axis, in one unit and with as many digits as tell neighbours apart. */
function timeLabels(times) {
  const most = Math.max(...times.map(Math.abs));
  const [scale, unit] = [[1, "s"], [1e-3, "ms"]].find(([size]) => most >= size) ?? [1e-6, "µs"];
  const step = times.length > 1 ? (times[1] - times[0]) / scale : most / scale || 1;
  const places = Math.min(Math.max(Math.ceil(-Math.log10(step) - 1e-9), 0), 9);
  return times.map((time) => (time ? `${(time / scale).toFixed(places)} ${unit}` : "0 s"));
}

/** Sizes for a logarithmic axis: powers of two, every second one where they would be many. */
function byteDecades(least, most) {
  const found = [];
  for (let power = Math.ceil(Math.log2(least)); 2 ** power <= most; power++) found.push(2 ** power);
  return found.length > 7 ? found.filter((_, k) => k % 2) : found;
}

/** The same for bytes: steps that are round in their own unit. */
function byteTicks(most, count) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log(Math.max(most, 1)) / Math.log(1024)));
  return ticks(0, most / unit, count).map((value) => value * unit);
}
