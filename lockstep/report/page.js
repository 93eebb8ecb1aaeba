"use strict";
// Builds the page from its data. Text goes in as text.

const page = document.getElementById("page");
const HINT = "A click on a name hides its line. Drag to enlarge a part, double-click to see all again; on the keyboard: Tab, arrows, + and -. ";
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
  dot.style.background = paint(run.colour);
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

function chartCard(chart) {
  const place = element("div", { class: "plot", role: "group", "aria-label": chart.title, id: "chart-" + chart.id });
  return element("section", { class: "card chart" + (chart.wide ? " wide" : "") }, element("h3", {}, chart.title),
    element("p", { class: "note" }), place);
}

function drawAll() {
  for (const chart of shown.charts) {
    const place = document.getElementById("chart-" + chart.id);
    place.previousElementSibling.textContent = chart.note;
    draw(chart, place);
  }
  document.documentElement.dataset.drawn = String(shown.charts.length);
}

// ---- all of it ----

function show(data) {
  const same = shown && shown.charts.map((chart) => chart.id + chart.title).join() === data.charts.map((chart) => chart.id + chart.title).join();
  const kept = same ? page.querySelector(".charts") : null;
  const open = [...page.querySelectorAll("details")].map((part) => part.open);
  shown = data;
  const grid = kept || element("section", { class: "charts" }, ...data.charts.map(chartCard));
  const several = data.plain || data.runs.length > 1;
  page.replaceChildren(header(data), ...(several ? tableCard(data.tables[0]) : []),
    ...data.runs.map((run) => runCard(run, several)), ...adviceSection(data.advice),
    ...(data.charts.length && !data.plain ? [element("h2", {}, "What it did"), element("p", { class: "note hint" }, HINT + data.left_out)] : []),
    ...((data.not_read || []).length ? [element("p", { class: "note hint" }, "Left out: " + data.not_read.join("; ") + ".")] : []),
    grid, ...sampleCards(data.samples), ...data.tables.slice(several ? 1 : 0).flatMap(tableCard), ...configs(data.configs));
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
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(drawAll, 150); });
for (const [event, printing] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => {
    document.documentElement.classList.toggle("printing", printing);
    for (const part of page.querySelectorAll("details")) part.open ||= printing;
    drawAll();
  });
}
show(JSON.parse(document.getElementById("data").textContent));
if (shown.live) setTimeout(follow, 2000);
