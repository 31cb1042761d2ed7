// Several runs side by side: one chart for each metric, and what their configurations do not have in common.

import { ApiError, getJson, jobPath, poll } from "./api.js";
import { ChartGrid, swatch } from "./charts.js";
import { fill, h, say, scrollBox, stateChip } from "./dom.js";
import { readMetrics } from "./job.js";
import { chartsOfRuns, Metrics } from "./metrics.js";

const MAX_RUNS = 8;
const MAX_CHOICES = 200;
const ENDED = new Set(["completed", "failed", "cancelled"]);

export async function show(root, _, signal) {
  document.title = "Compare · Lockstep";
  const title = h("h1", { class: "heading" }, "Compare runs");
  fill(root, title);
  const asked = (new URLSearchParams(location.search).get("jobs") ?? "").split(",").filter(Boolean).slice(0, MAX_RUNS);
  let jobs = [];
  await poll(async () => {
    jobs = await findJobs(asked, signal);
    return "done";
  }, signal);
  if (signal.aborted) return;
  if (!jobs.length) {
    const link = h("a", { href: "/submit" }, "Submit a job");
    fill(root, title, h("div", { class: "empty" }, h("p", {}, "There are no jobs to compare yet."), link));
    return;
  }
  const comparison = new Comparison(jobs, asked, signal);
  fill(root, title, comparison.elements);
  await poll(() => comparison.refresh(), signal);
}

/** The newest jobs, and those that were asked for, which come first. One that is gone is left out. */
async function findJobs(asked, signal) {
  const { jobs } = await getJson(`/api/jobs?limit=${MAX_CHOICES}`, { signal });
  const known = new Map(jobs.map((job) => [job.id, job]));
  for (const id of asked) {
    if (!known.has(id)) {
      const job = await getJson(jobPath(id), { signal }).catch(passOverMissing);
      if (job) known.set(id, job);
    }
  }
  return [...known.values()].sort((one, other) => asked.includes(other.id) - asked.includes(one.id));
}

function passOverMissing(error) {
  if (!(error instanceof ApiError) || error.status >= 500) throw error;
  return null;
}

class Comparison {
  #signal;
  #runs = new Map();
  #boxes = new Map();
  #names = h("ul", { class: "legend runs" });
  #note = h("p", { class: "quiet", role: "status" });
  #charts;
  #mark = null;
  #differences = scrollBox("What differs");
  elements;

  constructor(jobs, asked, signal) {
    this.#signal = signal;
    this.#charts = new ChartGrid(signal);
    const chooser = h("div", { class: "chooser", role: "group", "aria-label": "Runs to compare" });
    fill(
      chooser,
      jobs.map((job) => this.#choice(job, asked.includes(job.id))),
    );
    const curves = h("h2", { class: "unseen" }, "Curves");
    this.elements = [chooser, this.#names, this.#note, curves, this.#charts.element, this.#differences];
    for (const id of asked)
      this.#choose(
        jobs.find((job) => job.id === id),
        true,
      );
  }

  #choice(job, checked) {
    const box = h("input", { type: "checkbox", checked, onchange: () => this.#choose(job, box.checked) });
    this.#boxes.set(job.id, box);
    return h(
      "label",
      {},
      box,
      h("span", {}, job.name, " ", h("span", { class: "quiet small" }, job.id)),
      stateChip(job),
    );
  }

  #choose(job, yes) {
    if (!job) return;
    if (yes) this.#runs.set(job.id, { job, colour: freeColour(this.#runs), metrics: new Metrics(), offset: 0 });
    else this.#runs.delete(job.id);
    const runs = [...this.#runs.values()];
    for (const [id, box] of this.#boxes) box.disabled = runs.length >= MAX_RUNS && !this.#runs.has(id);
    nameApart(runs);
    const link = (run) => h("a", { href: `/jobs/${encodeURIComponent(run.job.id)}` }, run.label);
    fill(
      this.#names,
      runs.map((run) => h("li", {}, swatch(run.colour, false), link(run))),
    );
    const ids = [...this.#runs.keys()].map(encodeURIComponent).join(",");
    history.replaceState(null, "", ids ? `/compare?jobs=${ids}` : "/compare");
    document.dispatchEvent(new Event("retry")); // look again now
  }

  async refresh() {
    await Promise.all([...this.#runs.values()].map((run) => refreshRun(run, this.#signal)));
    const runs = [...this.#runs.values()]; // another may have been chosen meanwhile
    const withCurves = runs.filter((run) => run.metrics.keys.size);
    say(this.#note, describe(runs, withCurves));
    this.#charts.show(chartsOfRuns(withCurves));
    const compared = runs.filter((run) => run.config);
    const mark = compared.map((run) => run.label).join("\n");
    if (mark !== this.#mark) fill(this.#differences, differencesTable(compared));
    this.#mark = mark;
    this.#differences.hidden = !this.#differences.childElementCount;
  }
}

/** A run keeps its colour while others come and go. */
function freeColour(runs) {
  const taken = new Set([...runs.values()].map((run) => run.colour));
  return Array.from({ length: MAX_RUNS }, (_, colour) => colour).find((colour) => !taken.has(colour)) ?? 0;
}

/** Runs of the same name are told apart by their ids. */
function nameApart(runs) {
  for (const run of runs) {
    const same = runs.filter((other) => other.job.name === run.job.name);
    run.label = same.length > 1 ? `${run.job.name} ${run.job.id}` : run.job.name;
  }
}

/** Its configuration once, its curves until it has ended. One that is deleted meanwhile stays as it was. */
async function refreshRun(run, signal) {
  if (run.complete) return;
  const load = async () => {
    run.config ??= (await getJson(jobPath(run.job.id, "config"), { signal })).config;
    const job = await getJson(jobPath(run.job.id), { signal });
    run.offset = await readMetrics(run.job.id, run.metrics, run.offset, signal);
    return job;
  };
  const job = await load().catch(passOverMissing);
  run.complete = job === null || ENDED.has(job.state);
}

function describe(runs, withCurves) {
  if (!runs.length) return `Choose up to ${MAX_RUNS} runs.`;
  const without = runs.filter((run) => !withCurves.includes(run)).map((run) => run.label);
  return without.length ? `No curves yet: ${without.join(", ")}` : "Solid curves are training, dotted ones validation.";
}

function differencesTable(runs) {
  if (runs.length < 2) return [];
  const flat = runs.map((run) => flatten(run.config));
  const keys = [...new Set(flat.flatMap((values) => [...values.keys()]))];
  const differing = keys.filter((key) => new Set(flat.map((values) => values.get(key))).size > 1);
  if (!differing.length) return h("p", { class: "quiet" }, "Their configurations are the same.");
  const head = h(
    "tr",
    {},
    h("th", { scope: "col" }, "Key"),
    runs.map((run) => h("th", { scope: "col" }, run.label)),
  );
  const rows = differing.map((key) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, key),
      flat.map((values) => h("td", {}, values.get(key) ?? "")),
    ),
  );
  return [
    h("h2", {}, "What differs"),
    h("table", { class: "differences" }, h("thead", {}, head), h("tbody", {}, rows)),
  ];
}

function flatten(value, prefix = "", found = new Map()) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [key, child] of Object.entries(value)) flatten(child, prefix ? `${prefix}.${key}` : key, found);
  } else found.set(prefix, typeof value === "string" ? value : JSON.stringify(value));
  return found;
}
