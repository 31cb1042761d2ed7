// One job: how far it is, why it failed, its curves as they grow, log, configuration, and what it has made.

import { getJson, jobPath, poll, send } from "./api.js";
import { go } from "./app.js";
import { ChartGrid } from "./charts.js";
import {
  complain,
  confirmFirst,
  duration,
  facts,
  fill,
  h,
  modelName,
  moment,
  number,
  say,
  speak,
  stateChip,
  updateChip,
  visible,
} from "./dom.js";
import { artifactsSection, checkpointsSection, eventsSection, samplesSection } from "./files.js";
import { cancelJob, describeProgress, timeLeft } from "./jobs.js";
import { LogView } from "./log.js";
import { chartsOfRun, Metrics } from "./metrics.js";

const ENDED = new Set(["completed", "failed", "cancelled"]);
const SELDOM = 5; // looks at checkpoints, events and files are this many times rarer than at the job

export async function show(root, [id], signal) {
  let page = null;
  let round = 0;
  await poll(async () => {
    const job = await getJson(jobPath(id), { signal });
    page ??= buildPage(root, job, signal);
    const changed = page.update(job);
    await page.loadMetrics();
    if (changed || round % SELDOM === 0) await Promise.all(page.seldom.map((update) => update()));
    round += 1;
    if (!ENDED.has(job.state)) return "again";
    if (job.state === "failed") page.log.showLauncherIfEmpty();
    return "done";
  }, signal);
}

function buildPage(root, job, signal) {
  const head = buildHead(job);
  const charts = new ChartGrid(signal);
  const noCurves = h("p", { class: "quiet" }, "No curves yet: they begin with the first step.");
  const log = new LogView(job, signal);
  const [checkpoints, updateCheckpoints] = checkpointsSection(job, signal);
  const [artifacts, updateArtifacts] = artifactsSection(job, signal);
  const [samples, updateSamples] = samplesSection(job, signal);
  const events = eventsSection(job, signal);
  const curves = h("section", {}, h("h2", {}, "Curves"), noCurves, charts.element);
  fill(
    root,
    head.element,
    events.warnings,
    curves,
    log.element,
    samples,
    h("div", { class: "pair" }, checkpoints, artifacts),
    configSection(job, signal),
    events.element,
  );
  const metrics = new Metrics();
  let offset = 0;
  return {
    log,
    update: head.update,
    seldom: [updateCheckpoints, updateArtifacts, updateSamples, events.update],
    async loadMetrics() {
      offset = await readMetrics(job.id, metrics, offset, signal);
      noCurves.hidden = metrics.keys.size > 0;
      charts.show(chartsOfRun(metrics));
    },
  };
}

/** All records after `offset`, which may be several pages. Returns the new offset. */
export async function readMetrics(id, metrics, offset, signal) {
  for (;;) {
    const { records, next } = await getJson(jobPath(id, `metrics?after=${offset}`), { signal });
    metrics.add(records);
    if (next === offset) return offset;
    offset = next;
  }
}

function buildHead(job) {
  const chip = stateChip(job);
  const bar = h("progress", { max: 1, "aria-label": "Progress" });
  const [steps, left] = [h("span"), h("span", { class: "quiet" })];
  const failure = h("section", { class: "failure", role: "alert", hidden: true });
  const known = h("div");
  const cancel = h("button", { type: "button", class: "danger", onclick: () => cancelJob(job) }, "Cancel");
  const remove = h("button", { type: "button", onclick: () => deleteJob(job) }, "Delete");
  const again = h("a", { class: "button", href: `/submit?from=${encodeURIComponent(job.id)}` }, "Submit again");
  const compare = h("a", { class: "button", href: `/compare?jobs=${encodeURIComponent(job.id)}` }, "Compare");
  const title = h(
    "div",
    { class: "heading" },
    h("div", {}, h("h1", {}, job.name), h("p", { class: "quiet small" }, job.id)),
    h("div", { class: "actions" }, compare, again, cancel, remove),
  );
  const progress = h("div", { class: "progress wide" }, chip, bar, steps, left);
  let state = null;
  const update = (now) => {
    const changed = state !== now.state;
    if (changed && state !== null) speak(`${now.name} is ${now.state}`);
    state = now.state;
    const percent = Math.floor(now.progress.fraction * 100);
    document.title = visible(`${ENDED.has(now.state) ? now.state : `${percent} %`} · ${now.name} · Lockstep`);
    updateChip(chip, now);
    bar.value = now.progress.fraction;
    bar.dataset.state = now.state;
    say(steps, describeProgress(now));
    say(left, timeLeft(now) ? `${timeLeft(now)} left` : "");
    showFailure(failure, now);
    fill(known, describeJob(now));
    cancel.hidden = ENDED.has(now.state);
    cancel.disabled = now.cancelling;
    remove.hidden = !ENDED.has(now.state);
    return changed;
  };
  return { element: h("div", {}, title, progress, failure, known), update };
}

function showFailure(place, job) {
  const text = job.state === "failed" || (job.restarts > 0 && job.reason) ? job.reason : "";
  place.hidden = !text;
  if (place.dataset.text === text) return;
  place.dataset.text = text;
  const [sentence, ...rest] = text.split("\n");
  const more = rest.join("\n").trim();
  const title = job.state === "failed" ? "Why it failed" : "Why it was started again";
  fill(
    place,
    h("h2", {}, title),
    h("p", { class: "sentence" }, sentence),
    more ? h("pre", { tabindex: "0" }, more) : null,
  );
}

function describeJob(job) {
  const ended = job.finished_at ?? (job.state === "running" ? Date.now() / 1000 : null);
  const began = job.started_at ?? job.prepared_at;
  const loss = [
    number(job.metrics.train?.loss),
    job.metrics.validation ? `validation ${number(job.metrics.validation.loss)}` : "",
  ];
  return facts([
    ["Model", modelName(job.model)],
    ["Kind", job.kind],
    ["Loss", loss.filter(Boolean).join(", ")],
    ["Processes", job.devices.length ? `${job.procs} (GPU ${job.devices.join(", ")})` : String(job.procs)],
    ["Layout", job.layout],
    ["Plan", keepTogether(job.plan)],
    ["Submitted", moment(job.created_at)],
    ["Started", moment(job.started_at)],
    ["Finished", moment(job.finished_at)],
    ["Took", began && ended ? duration(ended - began) : ""],
    ["Time went to", whereTimeWent(job)],
    ["Owner", job.owner],
    ["Priority", job.priority ? String(job.priority) : ""],
    ["Restarts", job.max_restarts ? `${job.restarts} of ${job.max_restarts}` : ""],
  ]);
}

/** Of the plan beside what was measured: a line for each, and none ends between a figure and its unit or error. */
function keepTogether(text) {
  const lines = (text ?? "").replaceAll(/ (±|GiB|s\b)/g, "\u00a0$1").replaceAll("±\u0020", "±\u00a0").split("; ");
  return lines.length > 1 ? h("span", { class: "lines" }, lines.join("\n")) : lines[0];
}

/** What took a second or more, longest first. */
function whereTimeWent(job) {
  const parts = Object.entries(job.seconds ?? {})
    .filter(([, seconds]) => seconds >= 1)
    .sort(([, a], [, b]) => b - a)
    .map(([name, seconds]) => `${name} ${duration(seconds)}`);
  const { count = 0, seconds: compiling = 0, engine_seconds: inEngines = 0 } = job.compilations ?? {};
  if (parts.length && compiling >= 1) {
    parts.push(`of these ${duration(compiling)} compiling, ${count === 1 ? "once" : `${count} times`}`);
  }
  if (parts.length && inEngines >= 1) {
    parts.push(`engines compiled for up to ${duration(inEngines)}`);
  }
  return parts.join(", ");
}

async function deleteJob(job) {
  const sure = await confirmFirst(
    `Delete ${job.name}?`,
    "Its log, curves, checkpoints and exported model are removed from the service's disk.",
    "Delete for good",
  );
  if (!sure) return;
  try {
    await send("DELETE", jobPath(job.id), { deadlineMs: 45_000 });
    go("/");
  } catch (error) {
    complain(error);
  }
}

function configSection(job, signal) {
  const text = h("pre", { class: "yaml", tabindex: "0" }, "Loading");
  const details = h("details", { class: "section" }, h("summary", {}, h("h2", {}, "Configuration")), text);
  details.addEventListener(
    "toggle",
    async () => {
      const { yaml } = await getJson(jobPath(job.id, "config"), { signal });
      say(text, yaml);
    },
    { once: true },
  );
  return details;
}
