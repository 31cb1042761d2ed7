// Curves, drawn by plotly. Its script is loaded with the first chart, and only charts in sight are drawn.
// Titles and legends are ours: plotly reads markup in texts, so it gets none that came from outside unescaped.

import { fill, h, number, say, visible } from "./dom.js";

const SCRIPT = "/static/plotly.min.js";
const MAX_POINTS = 1500;
const MAX_NAME = 40;
const NUM_COLOURS = 8;
let loading = null;

function loadPlotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = h("script", { src: SCRIPT });
    script.onload = () => resolve(globalThis.Plotly);
    script.onerror = () => {
      loading = null;
      script.remove();
      reject(new Error("the chart script could not be loaded"));
    };
    document.head.append(script);
  });
  return loading;
}

/** A stroke as the curve has it. `terse` curves are named once for all charts, and only have theirs here. */
export function swatch(colour, dashed) {
  return h("span", { class: dashed ? "swatch dashed" : "swatch", "data-colour": colour % NUM_COLOURS });
}

/** A grid of charts that `show(charts)` brings up to date. */
export class ChartGrid {
  #cards = new Map();
  #inSight = new IntersectionObserver((entries) => this.#look(entries), { rootMargin: "300px" });
  #dark = matchMedia("(prefers-color-scheme: dark)");
  element = h("div", { class: "charts" });

  constructor(signal) {
    const draw = (again) => this.#cards.forEach((card) => card.draw(again));
    this.#dark.addEventListener("change", () => draw(true), { signal });
    document.addEventListener("visibilitychange", () => draw(false), { signal }); // in the background none is drawn
    signal.addEventListener("abort", () => this.close());
  }

  show(charts) {
    const present = new Set(charts.map((chart) => chart.id));
    for (const [id, card] of this.#cards) if (!present.has(id)) this.#drop(id, card);
    charts.forEach((chart, place) => {
      if (!this.#cards.has(chart.id)) {
        const card = new Card();
        this.#cards.set(chart.id, card);
        this.#inSight.observe(card.element);
      }
      const card = this.#cards.get(chart.id);
      if (this.element.children[place] !== card.element)
        this.element.insertBefore(card.element, this.element.children[place] ?? null);
      card.take(chart);
    });
  }

  #look(entries) {
    for (const entry of entries) {
      const card = [...this.#cards.values()].find((known) => known.element === entry.target);
      if (card) card.setVisible(entry.isIntersecting);
    }
  }

  #drop(id, card) {
    this.#inSight.unobserve(card.element);
    card.close();
    this.#cards.delete(id);
  }

  close() {
    for (const [id, card] of this.#cards) this.#drop(id, card);
    this.#inSight.disconnect();
  }
}

class Card {
  #title = h("h3");
  #legend = h("ul", { class: "legend" });
  #plot = h("div", { class: "plot" });
  #chart = null;
  #mark = "";
  #drawn = "";
  #visible = false;
  element = h("figure", {}, h("figcaption", {}, this.#title, this.#legend), this.#plot);

  take(chart) {
    this.#chart = chart;
    const mark = chart.series.map(({ label, x, y }) => `${label}:${x.length}:${x.at(-1)}:${y.at(-1)}`).join();
    if (mark === this.#mark) return;
    this.#mark = mark;
    say(this.#title, chart.unit ? `${chart.title} (${chart.unit})` : chart.title);
    this.#showLegend(chart);
    this.draw();
  }

  setVisible(visible) {
    this.#visible = visible;
    this.draw();
  }

  #showLegend(chart) {
    const entries = chart.series.map((series) => {
      const label = h("span", { class: series.terse ? "unseen" : "label" }, series.label);
      return h(
        "li",
        { title: series.label },
        swatch(series.colour, series.dashed),
        label,
        h("b", {}, number(lastOf(series.y))),
      );
    });
    if (chart.left) entries.push(h("li", { class: "quiet" }, `${chart.left} more`));
    fill(this.#legend, entries);
  }

  async draw(again = false) {
    if (!this.#visible || this.#chart === null || document.hidden) return;
    if (!again && this.#drawn === this.#mark) return;
    this.#drawn = this.#mark;
    try {
      const plotly = await loadPlotly();
      if (!this.element.isConnected) return;
      await plotly.react(this.#plot, tracesOf(this.#chart), layoutOf(this.#chart), OPTIONS);
      this.#plot.dataset.points = Math.max(...this.#chart.series.map((series) => series.x.length));
    } catch (error) {
      this.#drawn = "";
      fill(this.#plot, h("p", { class: "problem" }, `No chart: ${error.message}`));
    }
  }

  close() {
    this.element.remove();
    globalThis.Plotly?.purge(this.#plot);
  }
}

const OPTIONS = { displayModeBar: false, responsive: true, scrollZoom: false };

function tracesOf(chart) {
  return chart.series.map((series) => {
    const thin = thinOut(series);
    const colour = variable(`--curve-${series.colour % NUM_COLOURS}`);
    return {
      type: "scatter",
      mode: thin.x.length < 40 ? "lines+markers" : "lines",
      name: escapeMarkup(visible(shortenName(series.label))),
      x: thin.x,
      y: thin.y,
      line: { color: colour, width: 1.8, dash: series.dashed ? "dot" : "solid" },
      marker: { color: colour, size: 4 },
    };
  });
}

function layoutOf(chart) {
  const [ink, line, paper] = [variable("--quiet"), variable("--line"), variable("--paper")];
  const axis = { gridcolor: line, linecolor: line, zeroline: false, automargin: true, color: ink };
  return {
    height: 220,
    margin: { l: 8, r: 12, t: 8, b: 8 },
    showlegend: false,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 11, color: ink },
    hovermode: "x unified",
    hoverlabel: { namelength: -1, bgcolor: paper, bordercolor: line, font: { color: variable("--ink") } },
    // On a phone, a finger on a chart scrolls the page.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    uirevision: "same",
    xaxis: { ...axis, title: { text: "step", standoff: 4 }, rangemode: "nonnegative", tickformat: ",d", nticks: 8 },
    yaxis: {
      ...axis,
      rangemode: chart.fromZero ? "tozero" : "normal",
      hoverformat: ".4~g",
      nticks: 6,
      exponentformat: "power",
    },
  };
}

const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const escapeMarkup = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// Plotly would cut it after escaping, in the middle of an escape.
const shortenName = (name) => (name.length > MAX_NAME ? `${name.slice(0, MAX_NAME)}…` : name);

const lastOf = (values) => values.findLast((value) => value !== null);

/** At most some 1,500 points: of each stretch the lowest and the highest, so that no spike disappears. */
export function thinOut({ x, y }) {
  if (x.length <= MAX_POINTS) return { x, y };
  const stretch = Math.ceil((2 * x.length) / MAX_POINTS);
  const kept = new Set([0, x.length - 1]);
  for (let start = 0; start < x.length; start += stretch) {
    let [low, high] = [start, start];
    for (let place = start; place < Math.min(start + stretch, x.length); place += 1) {
      if (y[place] === null || y[place] < y[low]) low = place;
      if (y[place] > y[high]) high = place;
    }
    kept.add(low).add(high);
  }
  const places = [...kept].sort((one, other) => one - other);
  return { x: places.map((place) => x[place]), y: places.map((place) => y[place]) };
}
