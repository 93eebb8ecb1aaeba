"use strict";
// Draws figures (figures.py has their format) as SVG. Colours are the style's variables, so that the theme and the
// printer need nothing. What a reader did to a figure (hidden names, an enlarged part, the pointer) stays with its place.

const SVG = "http://www.w3.org/2000/svg";
const STAR = "M0 -7L1.7 -2.3 6.7 -2.2 2.7 .9 4.1 5.7 0 2.8 -4.1 5.7 -2.7 .9 -6.7 -2.2 -1.7 -2.3Z";
const SYMBOLS = {
  circle: "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z", square: "M-4.5 -4.5h9v9h-9Z", diamond: "M0 -6.5L6.5 0 0 6.5 -6.5 0Z",
  triangle: "M0 -6L6 5H-6Z", cross: "M-5 -2l3 -3 2 2 2 -2 3 3 -2 2 2 2 -3 3 -2 -2 -2 2 -3 -3 2 -2Z", star: STAR,
};
const DASHES = { dot: "2 4", dash: "7 4" };
const SHADES = 24; // of a heat map
const FEW = 30; // points of a line that are marked

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function paint(colour) { return `var(--${colour})`; }

function shade(part) { return `color-mix(in oklab, ${paint("s1")} ${Math.round(part * 100)}%, ${paint("s0")})`; }

const pen = document.createElement("canvas").getContext("2d");

function widthOf(text) {
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

function fitted(text, width) {
  if (widthOf(text) <= width) return text;
  while (text && widthOf(text + "…") > width) text = text.slice(0, -1);
  return text + "…";
}

// ---- numbers and axes ----

function words(value) {
  for (const [size, sign] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e4, " k"]]) {
    if (Math.abs(value) >= size) return Number((value / (sign === " k" ? 1e3 : size)).toPrecision(4)) + sign;
  }
  return String(Number(value.toPrecision(4)));
}

function spelled(value, axis) {
  if (value === null || value === undefined) return "–";
  return axis.percent ? `${words(value * 100)}%` : words(value) + (axis.unit || "");
}

// Plain numbers at most `most` apart; on a logarithmic axis powers of ten, between few of them also their 2 and 5.
function ticksOf(low, high, most, log) {
  const found = [];
  if (log && high > 5 * low) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const every = Math.ceil((last - first) / (most + 2)), factors = high <= 100 * low ? [1, 2, 5] : [1];
    for (let power = first; power <= last; power += every) found.push(...factors.map((factor) => Number(`${factor}e${power}`)));
    return found.filter((tick) => tick >= low && tick <= high);
  }
  const rough = (high - low || 1) / most, unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 2.5, 5, 10].find((factor) => factor * unit >= rough * 0.999);
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(10)));
  return found;
}

function rangeOf(axis, values) {
  if (axis.names) return [axis.names.length - 0.5, -0.5];
  if (axis.range) return axis.range;
  const known = values.filter((value) => Number.isFinite(value) && (!axis.log || value > 0));
  if (!known.length) return axis.log ? [1, 10] : [0, 1];
  const [low, high] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  if (axis.tight) return low < high ? [low, high] : [low - 1, high + 1];
  if (axis.log) return low < high ? [low / 1.1, high * 1.1] : [low / 2, high * 2];
  const space = (high - low || Math.abs(high) || 1) * 0.06;
  return axis.zero && low >= 0 ? [0, (high || 1) * 1.06] : [low - space, high + space];
}

function scaleOf(axis, [low, high], from, to) {
  const bend = axis.log ? Math.log : (value) => value, unbend = axis.log ? Math.exp : (value) => value;
  const start = bend(low), each = (to - from) / (bend(high) - start || 1);
  const at = (value) => Number((from + (bend(value) - start) * each).toFixed(1));
  return { low, high, at, back: (pixel) => unbend(start + (pixel - from) / each) };
}

// ---- marks ----

// Areas and bars lie on those before them.
function stacked(marks) {
  let top = [];
  return marks.map((mark) => {
    const base = top, sizes = { area: mark.y, bar: mark.x }[mark.kind] || [];
    top = sizes.map((size, i) => (base[i] || 0) + size);
    return { ...mark, base: sizes.map((_, i) => base[i] || 0), top };
  });
}

const KINDS = {
  line(mark, { x, y, figure }) {
    const style = `stroke: ${paint(mark.colour)}; stroke-width: ${mark.width || 2}; opacity: ${mark.faint ? 0.3 : 1}`;
    const marked = mark.label !== "" && !mark.step && mark.x.length <= FEW, dots = [];
    let path = "", gap = true;
    mark.x.forEach((value, i) => {
      const missing = mark.y[i] === null || (figure.y.log && mark.y[i] <= 0);
      if (!missing) {
        const across = x.at(value), down = y.at(mark.y[i]);
        path += gap ? `M${across} ${down}` : mark.step ? `H${across}V${down}` : `L${across} ${down}`;
        if (marked) dots.push(svg("circle", { cx: across, cy: down, r: 3, style: `fill: ${paint(mark.colour)}` }));
      }
      gap = missing;
    });
    return [svg("path", { d: path, class: "line", style, "stroke-dasharray": DASHES[mark.dash] || "" }), ...dots];
  },
  area(mark, { x, y }) {
    const over = mark.x.map((value, i) => `${x.at(value)} ${y.at(mark.top[i])}`);
    const under = mark.x.map((value, i) => `${x.at(value)} ${y.at(mark.base[i])}`).reverse();
    return [svg("path", { d: `M${over.concat(under).join("L")}Z`, class: "area", style: `fill: ${paint(mark.colour)}` })];
  },
  bar(mark, { x, y }) {
    const half = Math.min(13, Math.abs(y.at(1) - y.at(0)) * 0.36);
    return mark.top.map((top, row) => svg("rect", { x: x.at(mark.base[row]), width: x.at(top) - x.at(mark.base[row]),
      y: y.at(row) - half, height: 2 * half, class: "bar", style: `fill: ${paint(mark.colour)}` }));
  },
  dots(mark, { x, y }) {
    return mark.x.map((value, i) => svg("path", { d: SYMBOLS[mark.symbol] || STAR, class: "dot",
      transform: `translate(${x.at(value)} ${y.at(mark.y[i])})`, style: `fill: ${paint(mark.colour)}` }));
  },
  // Cells of one shade are one path.
  heat(mark, { x, y, right }) {
    const paths = {}, { part } = heatScale(mark);
    mark.z.forEach((cells, row) => cells.forEach((value, i) => {
      if (value === null || (mark.log && value <= 0)) return;
      const left = x.at(mark.x[i]), end = i + 1 < cells.length ? x.at(mark.x[i + 1]) : right;
      const fill = shade(Math.round(part(value) * SHADES) / SHADES);
      paths[fill] = `${paths[fill] || ""}M${left} ${y.at(row - 0.5)}H${end}V${y.at(row + 0.5)}H${left}Z`;
    }));
    return Object.entries(paths).map(([fill, path]) => svg("path", { d: path, class: "heat", style: `fill: ${fill}` }));
  },
};

function heatScale(mark) {
  const [low, high] = rangeOf({ tight: true, log: mark.log }, mark.z.flat());
  const scale = scaleOf(mark, [mark.low ?? low, mark.high ?? high], 0, 1000);
  return { ...scale, part: (value) => Math.min(1, Math.max(0, scale.at(value) / 1000)) };
}

function heatKey(mark, left, top, bottom) {
  const scale = heatScale(mark), height = (bottom - top) / SHADES;
  const boxes = [...Array(SHADES).keys()].map((i) => svg("rect", { x: left, width: 10, y: bottom - (i + 1) * height,
    height: height + 0.5, style: `fill: ${shade((i + 0.5) / SHADES)}` }));
  const ticks = ticksOf(scale.low, scale.high, Math.max(2, (bottom - top) / 40), mark.log);
  return [...boxes, ...ticks.map((tick) => svg("text", { x: left + 15, y: bottom - scale.part(tick) * (bottom - top) + 4 },
    spelled(tick, mark)))];
}

// ---- what the pointer shows ----

function nearest(values, wanted) {
  return values.reduce((best, value, i) => (Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? i : best), 0);
}

// Returns {at: pixels from the left, head, rows: [mark, text]}, or null where there is nothing.
function reading(marks, { figure, x, y }, across, down) {
  const { kind } = figure.marks[0], row = Math.round(y.back(down)), value = x.back(across);
  const shown = marks.filter((mark) => mark.label !== "" && mark.x.length);
  if (!shown.length) return null;
  if (kind === "dots") {
    const all = shown.flatMap((mark) => mark.x.map((when, i) => ({ mark, i, away: Math.hypot(x.at(when) - across, y.at(mark.y[i]) - down) })));
    const { mark, i, away } = all.reduce((best, one) => (one.away < best.away ? one : best));
    return away < 25 ? { at: x.at(mark.x[i]), head: spelled(mark.x[i], figure.x), rows: [[mark, mark.text[i]]] } : null;
  }
  if (kind === "bar") {
    const rows = shown.map((mark) => [mark, `${mark.name}: ${spelled(mark.x[row], figure.x)}`]);
    return { at: null, head: figure.y.names[row] || "", rows };
  }
  const head = (one) => `${figure.x.title || ""} ${spelled(one, figure.x).trim()}`;
  if (kind === "heat") {
    const [mark] = shown, column = Math.max(0, mark.x.findLastIndex((step) => step <= value));
    const rows = [[{ colour: "s1" }, `${figure.y.names[row]}: ${mark.z[row] && spelled(mark.z[row][column], mark)}`]];
    return mark.z[row] ? { at: across, head: head(mark.x[column]), rows } : null;
  }
  const found = shown.map((mark) => {
    const i = mark.step ? Math.max(0, mark.x.findLastIndex((one) => one <= value)) : nearest(mark.x, value);
    return { mark, i, distance: mark.step ? 0 : Math.abs(x.at(mark.x[i]) - across) };
  });
  const closest = found.reduce((best, one) => (one.distance < best.distance ? one : best));
  return { at: closest.mark.step ? across : x.at(closest.mark.x[closest.i]), head: head(closest.mark.x[closest.i]),
    rows: found.filter((one) => one.distance <= closest.distance + 12)
      .map(({ mark, i }) => [mark, `${mark.label || mark.name}: ${spelled(mark.y[i], figure.y)}`]) };
}

function watch(picture, tip, marks, frame, place) {
  const { figure, left, right, top, bottom, x, y } = frame, isFixed = figure.marks[0].kind === "bar";
  const ruler = svg("line", { class: "pointer", y1: top, y2: bottom }), chosen = svg("rect", { class: "chosen", y: top, height: bottom - top });
  const within = (value, low, high) => Math.min(high, Math.max(low, value));
  const placeOf = ({ clientX, clientY }) => {
    const box = picture.getBoundingClientRect();
    return [within(clientX - box.left, left, right), clientY - box.top];
  };
  let from = null;
  picture.append(chosen, ruler);
  function point(at) {
    const found = at && reading(marks, frame, ...at);
    place.at = at;
    picture.classList.toggle("pointed", Boolean(found));
    tip.hidden = !found;
    if (!found) return;
    ruler.setAttribute("transform", `translate(${found.at ?? -99} 0)`);
    tip.replaceChildren(element("b", {}, found.head), ...found.rows.map(([mark, text]) => element("div", {}, key(mark), text)));
    const beside = at[0] < (left + right) / 2 ? Math.min(at[0] + 16, place.clientWidth - tip.offsetWidth) : at[0] - 16 - tip.offsetWidth;
    tip.style.top = `${picture.getBoundingClientRect().top - place.getBoundingClientRect().top + top}px`;
    tip.style.left = `${Math.max(0, beside)}px`;
  }
  function enlarge(range) {
    if (isFixed) return;
    place.enlarged = range;
    draw(figure, place);
  }
  picture.addEventListener("pointermove", (event) => {
    const at = placeOf(event);
    point(at);
    chosen.setAttribute("x", Math.min(from ?? at[0], at[0]));
    chosen.setAttribute("width", isFixed ? 0 : Math.abs(at[0] - (from ?? at[0])));
  });
  picture.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") point(null); });
  picture.addEventListener("blur", () => point(null));
  picture.addEventListener("pointerdown", (event) => {
    point(placeOf(event));
    if (event.pointerType === "mouse" && event.button === 0) [from] = place.at;
  });
  picture.addEventListener("pointerup", (event) => {
    const ends = [from, placeOf(event)[0]].sort((a, b) => a - b), isLarge = from !== null && ends[1] - ends[0] > 8;
    from = null;
    if (isLarge) enlarge(ends.map(x.back));
  });
  picture.addEventListener("dblclick", () => enlarge(null));
  picture.addEventListener("keydown", (event) => {
    const [across, down] = place.at || [(left + right) / 2, (top + bottom) / 2], quarter = (right - left) / 4;
    const far = event.shiftKey ? 1 : 12, row = figure.y.names ? Math.abs(y.at(1) - y.at(0)) : far;
    const [dx, dy] = { ArrowLeft: [-far, 0], ArrowRight: [far, 0], ArrowUp: [0, -row], ArrowDown: [0, row] }[event.key] || [0, 0];
    if (dx || dy) point([within(across + dx, left, right), within(down + dy, top, bottom - 1)]);
    else if (event.key === "+") enlarge([across - quarter, across + quarter].map((end) => x.back(within(end, left, right))));
    else if (event.key === "-" || event.key === "Escape") enlarge(null);
    else return;
    event.preventDefault();
  });
  if (place.at) point(place.at);
}

function key(mark) {
  const style = `stroke: ${paint(mark.colour)}; fill: ${paint(mark.colour)}`;
  const sign = { dots: () => svg("path", { d: SYMBOLS[mark.symbol] || STAR, transform: "translate(8 7)", style }),
    line: () => svg("path", { d: "M0 7H16", "stroke-width": 3, "stroke-dasharray": DASHES[mark.dash] || "", style }) }[mark.kind];
  return svg("svg", { class: "key", viewBox: "0 0 16 14" }, sign ? sign() : svg("rect", { x: 2, y: 1, width: 12, height: 12, rx: 2, style }));
}

function legend(figure, place) {
  const named = new Map(figure.marks.filter((mark) => mark.name && !mark.faint).reverse().map((mark) => [mark.name, mark]));
  if (named.size < 2) return [];
  const keys = [...named.values()].reverse().map((mark) => {
    const button = element("button", { type: "button", "aria-pressed": !place.hiding.has(mark.name) }, key(mark), mark.name);
    button.addEventListener("click", () => {
      if (!place.hiding.delete(mark.name)) place.hiding.add(mark.name);
      draw(figure, place);
    });
    return button;
  });
  return [element("p", { class: "keys" }, ...keys)];
}

// ---- a figure ----

function heightOf(figure, narrow) {
  const rows = (figure.y.names || []).length, { kind } = figure.marks[0];
  if (!rows) return narrow ? 240 : 290;
  return 44 + (kind === "heat" ? Math.min(420, Math.max(110, rows * 16)) : rows * (kind === "bar" ? 34 : 28));
}

// The range of each axis; of the values only those between the ends of an enlarged part count.
function rangesOf(figure, marks, enlarged) {
  const kind = figure.marks[0].kind, ends = kind === "bar" || kind === "dots" ? [0] : [];
  if (kind === "heat") ends.push(2 * marks.at(0)?.x.at(-1) - marks.at(0)?.x.at(-2));
  const along = marks.flatMap((mark) => (kind === "bar" ? mark.top : mark.x));
  const across = enlarged || rangeOf({ ...figure.x, tight: true }, [...ends, ...along]);
  const seen = (values, mark) => values.filter((_, i) => mark.x[i] >= across[0] && mark.x[i] <= across[1]);
  const heights = figure.y.names ? [] : marks.flatMap((mark) => seen(kind === "area" ? mark.top : mark.y, mark));
  return [across, rangeOf(kind === "area" ? { ...figure.y, zero: true } : figure.y, heights)];
}

function draw(figure, place) {
  place.hiding = place.hiding || new Set();
  const marks = stacked(figure.marks.filter((mark) => !place.hiding.has(mark.name)));
  const heat = figure.marks.find((mark) => mark.kind === "heat"), names = figure.y.names;
  const [xRange, yRange] = rangesOf(figure, marks, place.enlarged);
  const width = place.clientWidth || 400, height = heightOf(figure, width < 480);
  const top = 10, bottom = height - (figure.x.title ? 40 : 24), every = names && Math.ceil(names.length * 13 / (bottom - top));
  const labels = names ? names.map((name, row) => [row, fitted(name, width * 0.3)]).filter(([row]) => row % every === 0)
    : ticksOf(...yRange, width < 480 ? 5 : 6, figure.y.log).map((tick) => [tick, spelled(tick, figure.y)]);
  const left = Math.max(12, ...labels.map(([, text]) => widthOf(text) + 12)), right = width - (heat ? 66 : 16);
  const x = scaleOf(figure.x, xRange, left, right), y = scaleOf(figure.y, yRange, bottom, top);
  const frame = { figure, x, y, left, right, top, bottom }, parts = [];
  for (const [value, text] of labels) {
    if (!names) parts.push(svg("line", { class: "grid", x1: left, x2: right, y1: y.at(value), y2: y.at(value) }));
    parts.push(svg("text", { x: left - 8, y: y.at(value) + 4, "text-anchor": "end" }, text));
  }
  for (const tick of figure.x.ticks || ticksOf(x.low, x.high, Math.max(4, (right - left) / 58), figure.x.log)) {
    if (/^steps?$/.test(figure.x.title) && !Number.isInteger(tick)) continue;
    const text = spelled(tick, figure.x), at = x.at(tick);
    if (names && !heat) parts.push(svg("line", { class: "grid", x1: at, x2: at, y1: top, y2: bottom }));
    parts.push(svg("text", { x: Math.min(at, width - widthOf(text) / 2), y: bottom + 18, "text-anchor": "middle" }, text));
  }
  if (figure.x.title) parts.push(svg("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, figure.x.title));
  const rulers = (figure.rulers || []).map((ruler) => svg("line", { class: "ruler", ...("x" in ruler
    ? { x1: x.at(ruler.x), x2: x.at(ruler.x), y1: top, y2: bottom }
    : { x1: left, x2: right, y1: y.at(ruler.y), y2: y.at(ruler.y) }) }));
  const inside = svg("rect", { x: left - 6, y: top - 6, width: right - left + 12, height: bottom - top + 12 });
  parts.push(svg("clipPath", { id: `clip-${figure.id}` }, inside),
    svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    svg("g", { "clip-path": `url(#clip-${figure.id})` }, ...marks.flatMap((mark) => KINDS[mark.kind](mark, frame)), ...rulers),
    ...(heat ? heatKey(heat, right + 10, top, bottom) : []));
  const picture = svg("svg", { class: "figure", viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, "aria-label": figure.title }, ...parts);
  const tip = element("div", { class: "tip", role: "status", hidden: "" }), { at } = place;
  const focused = [...place.querySelectorAll("button, .figure")].indexOf(document.activeElement);
  place.replaceChildren(...legend(figure, place), picture, tip);
  place.at = at;
  watch(picture, tip, marks, frame, place);
  place.querySelectorAll("button, .figure")[focused]?.focus({ preventScroll: true });
}
