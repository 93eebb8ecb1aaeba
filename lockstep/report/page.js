"use strict";
// Builds the page from its data. Text goes in as text; colours named "@x" are the style's variable --x.

const page = document.getElementById("page");
let shown = null;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

function withCode(text) {
  return text.split("`").map((part, place) => (place % 2 ? element("code", {}, part) : part));
}

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function coloured(value) {
  if (value === "@scale") return [[0, variable("s0")], [0.5, variable("s1")], [1, variable("s2")]];
  if (typeof value === "string" && /^@[a-z]+\d?$/.test(value)) return variable(value.slice(1));
  if (Array.isArray(value)) return value.map(coloured);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, inside]) => [key, coloured(inside)]));
}

// ---- words ----

function header(data) {
  const title = data.plain ? data.title : data.runs.length > 1 ? `${data.runs.length} runs compared` : data.runs[0].name;
  return element("header", {}, element("h1", {}, title),
    ...(data.plain || data.runs.length > 1 ? [] : [badge(data.runs[0].status)]),
    element("p", { class: "made" }, `${data.live ? "live, " : ""}${data.made}`));
}

function badge(word, shownAs = word) {
  return element("span", { class: `badge ${word}` }, shownAs);
}

function runCard(run, several) {
  const dot = element("span", { class: "dot" });
  dot.style.background = coloured(run.colour);
  const tiles = run.tiles.map(([label, value, more]) => element("div", { class: "tile" },
    element("div", { class: "label" }, label), element("div", { class: "value" }, value),
    element("div", { class: "more" }, more)));
  const facts = run.facts.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]);
  const lines = run.lines.slice(1).flatMap((line) => [element("dt", {}, ""), element("dd", {}, line)]);
  return element("section", { class: "card run" },
    several ? element("div", { class: "name" }, dot, run.name, badge(run.status)) : null,
    element("div", { class: "tiles" }, ...tiles), element("dl", {}, ...facts, ...lines));
}

function adviceSection(advice) {
  if (advice === null) return [];
  const words = { bad: "failure", warn: "costs", info: "hint" };
  const cards = advice.map((one) => element("div", { class: "card" }, badge(one.level, words[one.level]),
    element("div", {}, element("p", { class: "found" }, (one.run ? one.run + ": " : "") + one.found),
      element("p", {}, ...withCode(one.do)), element("p", { class: "evidence" }, "Evidence: " + one.evidence))));
  if (!cards.length) {
    cards.push(element("div", { class: "card" }, badge("well", "well"),
      element("p", {}, "Nothing stands out in what was measured.")));
  }
  return [element("h2", {}, "What to do next"), element("section", { class: "advice" }, ...cards)];
}

function tableCard(table) {
  const head = element("tr", {}, ...table.head.map((name) => element("th", { scope: "col" }, name)));
  const rows = table.rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell.href ? element("a", { href: cell.href }, cell.text) : cell))));
  const grid = element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head),
    element("tbody", {}, ...rows)));
  const body = table.folded
    ? element("details", {}, element("summary", {}, `${table.rows.length} lines`), grid) : grid;
  return [element("h2", {}, table.title), element("section", { class: "card" }, body)];
}

function sampleCards(samples = []) {
  if (!samples.length) return [];
  const cards = samples.map((group) => element("section", { class: "card sample" }, element("h3", {}, group.name),
    element("p", { class: "note" }, group.note), ...group.items.map((item) => element("figure", {},
      item.image ? element("img", { src: item.image, alt: `${group.name}, step ${item.step}` })
        : element("pre", {}, item.text),
      element("figcaption", { class: "note" }, `step ${item.step.toLocaleString("en")}`
        + (item.size ? `, ${item.size[0]} × ${item.size[1]} pixels` : ""))))));
  return [element("h2", {}, "What it logged"), element("section", { class: "samples" }, ...cards)];
}

function configs(all) {
  if (!all.length) return [];
  const parts = all.map((one) => element("details", {}, element("summary", {}, one.name),
    element("pre", {}, one.text)));
  return [element("h2", {}, "Config"), element("section", { class: "card" }, ...parts)];
}

// ---- charts ----

function layoutOf(chart, width) {
  const narrow = width < 480;
  const axis = (given = {}) => ({
    gridcolor: variable("grid"), linecolor: variable("line"), zerolinecolor: variable("line"), automargin: true,
    tickfont: { size: narrow ? 10 : 11.5 }, nticks: narrow ? 5 : undefined, ...given,
    title: given.title ? { standoff: 6, font: { size: 12 }, ...given.title } : undefined,
  });
  const { xaxis, yaxis, short, ...rest } = coloured(chart.layout);
  const legend = chart.data.filter((trace) => trace.showlegend !== false && trace.type !== "heatmap").length > 1;
  const long = chart.data.some((trace) => (trace.name || "").length > 14);
  const columns = narrow ? (long ? 1 : 2) : chart.wide ? 6 : 3;
  const rows = legend ? Math.ceil(chart.data.filter((trace) => trace.showlegend !== false).length / columns) : 0;
  return {
    height: (short ? 150 : narrow ? 240 : 290) + rows * 20, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 8, r: 10, t: 12 + rows * 20, b: 8 }, hovermode: "x unified", dragmode: false, showlegend: legend,
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: variable("soft") },
    legend: { orientation: "h", x: 0, y: 1, xanchor: "left", yanchor: "bottom", font: { size: 12 }, traceorder: "normal", maxheight: 1,
      bgcolor: "rgba(0,0,0,0)" },
    hoverlabel: { bgcolor: variable("card"), bordercolor: variable("line"), font: { color: variable("ink"), size: 12 } },
    bargap: 0.35, xaxis: axis(xaxis), yaxis: axis(yaxis), ...rest,
  };
}

function draw(chart, place) {
  if (shown.plain) return drawLines(chart, place);
  const data = coloured(chart.data);
  const options = { displayModeBar: false, responsive: false, scrollZoom: false, showTips: false };
  Plotly.react(place, data, layoutOf(chart, place.clientWidth || 400), options);
}

function chartCard(chart) {
  const place = element("div", { class: "plot", role: "img", "aria-label": chart.title, id: "chart-" + chart.id });
  return element("section", { class: "card chart" + (chart.wide ? " wide" : "") }, element("h3", {}, chart.title),
    element("p", { class: "note" }, chart.note), place);
}

function drawAll() {
  for (const chart of shown.charts) draw(chart, document.getElementById("chart-" + chart.id));
  document.documentElement.dataset.drawn = String(shown.charts.length);
}

// ---- all of it ----

function show(data) {
  const same = shown && shown.charts.map((chart) => chart.id).join() === data.charts.map((chart) => chart.id).join();
  const kept = same ? page.querySelector(".charts") : null;
  const open = [...page.querySelectorAll("details")].map((part) => part.open);
  shown = data;
  const grid = kept || element("section", { class: "charts" }, ...data.charts.map(chartCard));
  const several = data.plain || data.runs.length > 1;
  page.replaceChildren(header(data), ...(several ? tableCard(data.tables[0]) : []),
    ...data.runs.map((run) => runCard(run, several)), ...adviceSection(data.advice), ...(data.charts.length && !data.plain ? [element("h2", {}, "What it did")] : []), grid,
    ...sampleCards(data.samples),
    ...data.tables.slice(several ? 1 : 0).flatMap(tableCard), ...configs(data.configs));
  page.querySelectorAll("details").forEach((part, place) => { part.open = open[place] || false; });
  drawAll();
}

async function follow() {
  try {
    const answer = await fetch("data.json", { cache: "no-store" });
    if (answer.ok) show({ ...(await answer.json()), live: true });
  } catch { /* the server has gone: the page stays as it was */ }
  setTimeout(follow, 2000);
}

let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => { if (shown) drawAll(); }, 150); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (shown) show(shown); });
async function begin() {
  const packed = Uint8Array.from(atob(document.getElementById("drawing").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(element("script", {}, await new Response(stream).text()));
  show(JSON.parse(document.getElementById("data").textContent));
  if (shown.live) setTimeout(follow, 2000);
}
begin();
