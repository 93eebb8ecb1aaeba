// Draws figures of lines as SVG, where a page does without plotly. Colours are the style's variables, so that the theme
// and the printer need nothing; the pointer shows the values of all lines at one place.

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function paint(colour) { return `var(--${colour.slice(1)})`; }

function ticksOf(low, high, most, log) {
  if (log && high / low > 30) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) found.push(10 ** power);
    return found.filter((tick) => tick >= low && tick <= high);
  }
  const rough = (high - low || 1) / most, unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high * (1 + 1e-9); n++) found.push(Number((n * step).toPrecision(10)));
  return found;
}

function words(value) {
  for (const [size, sign] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
    if (Math.abs(value) >= 10 * size || (size > 1e3 && Math.abs(value) >= size)) return Number((value / size).toPrecision(4)) + sign;
  }
  return String(Number(value.toPrecision(4)));
}

function drawLines(chart, place) {
  const width = place.clientWidth || 400, height = width < 480 ? 240 : 300, left = 52, right = 24, top = 8, bottom = 40;
  const points = chart.data.flatMap((trace) => trace.x.map((x, i) => [x, trace.y[i]])).filter((p) => p[1] !== null);
  const range = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  const log = (chart.layout.yaxis || {}).type === "log", scale = log ? Math.log : (v) => v;
  const [x0, x1] = range(points.map((p) => p[0])), [y0, y1] = range(points.map((p) => p[1]));
  const across = (x) => left + (x - x0) / (x1 - x0 || 1) * (width - left - right);
  const down = (y) => top + (scale(y1) - scale(y)) / (scale(y1) - scale(y0) || 1) * (height - top - bottom);
  const parts = [];
  for (const y of ticksOf(y0, y1, 5, log)) {
    parts.push(svg("line", { x1: left, x2: width - right, y1: down(y), y2: down(y), style: "stroke: var(--grid)" }),
      svg("text", { x: left - 8, y: down(y) + 4, "text-anchor": "end" }, words(y)));
  }
  for (const x of ticksOf(x0, x1, width < 480 ? 3 : 5, false)) {
    parts.push(svg("text", { x: across(x), y: height - bottom + 18, "text-anchor": "middle" }, words(x)));
  }
  parts.push(svg("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, style: "stroke: var(--line)" }),
    svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, chart.layout.xaxis.title.text));
  for (const trace of chart.data) {
    const dots = trace.x.map((x, i) => [x, trace.y[i]]).filter((p) => p[1] !== null);
    const style = `stroke: ${paint(trace.line.color)}; stroke-width: ${trace.line.width}; opacity: ${trace.opacity || 1}`;
    parts.push(svg("polyline", { points: dots.map(([x, y]) => `${across(x).toFixed(1)},${down(y).toFixed(1)}`).join(" "),
      style, class: "js-line", "stroke-dasharray": trace.line.dash === "dot" ? "2 4" : trace.line.dash === "dash" ? "7 4" : "" }));
    if (dots.length === 1) parts.push(svg("circle", { cx: across(dots[0][0]), cy: down(dots[0][1]), r: 3.5, style: `fill: ${paint(trace.line.color)}` }));
  }
  const ruler = svg("line", { y1: top, y2: height - bottom, style: "stroke: var(--soft); visibility: hidden" });
  const picture = svg("svg", { class: "main-svg", width, height }, ...parts, ruler);
  const said = element("p", { class: "said" }, "\u00a0");
  picture.addEventListener("pointermove", (event) => {
    const x = x0 + (event.offsetX - left) / (width - left - right) * (x1 - x0);
    const values = chart.data.filter((trace) => trace.showlegend !== false).map((trace) => {
      const nearest = trace.x.reduce((best, value, i) => (Math.abs(value - x) < Math.abs(trace.x[best] - x) ? i : best), 0);
      return `${trace.name}: ${trace.y[nearest] === null ? "–" : words(trace.y[nearest])}`;
    });
    ruler.setAttribute("transform", `translate(${Math.min(Math.max(event.offsetX, left), width - right)} 0)`);
    ruler.style.visibility = "visible";
    said.textContent = `${words(Math.min(Math.max(x, x0), x1))} ${chart.layout.xaxis.title.text}: ${values.join(", ")}`;
  });
  const keys = chart.data.filter((trace) => trace.showlegend !== false).map((trace) => {
    const mark = element("span", { class: "key" });
    mark.style.borderTop = `3px ${{ dot: "dotted", dash: "dashed" }[trace.line.dash] || "solid"} ${paint(trace.line.color)}`;
    return element("span", {}, mark, trace.name);
  });
  place.replaceChildren(element("p", { class: "keys" }, ...keys), picture, said);
}
