// The list of jobs: every state, live, with filters and pages. Rows are updated in place, so focus stays where it is.

import { getJson, jobPath, poll, postJson } from "./api.js";
import { go } from "./app.js";
import {
  ago,
  complain,
  confirmFirst,
  duration,
  fill,
  h,
  modelName,
  moment,
  number,
  say,
  speak,
  stateChip,
  updateChip,
} from "./dom.js";

const STATES = ["running", "preparing", "queued", "completed", "failed", "cancelled"];
const ENDED = new Set(["completed", "failed", "cancelled"]);
const PAGE_SIZE = 50;

export async function show(root, _, signal) {
  document.title = "Jobs · Lockstep";
  const asked = new URLSearchParams(location.search);
  const view = {
    state: STATES.includes(asked.get("state")) ? asked.get("state") : null,
    offset: Math.max(Number(asked.get("offset")) || 0, 0),
  };
  const rows = new Map();
  const chosen = new Set();
  const body = h("tbody");
  const table = h("table", { class: "jobs" }, h("thead", {}, headings()), body);
  const empty = h("div", { class: "empty", hidden: true });
  const pages = h("nav", { class: "pages", "aria-label": "Pages" });
  const compare = h("button", {
    type: "button",
    onclick: () => go(`/compare?jobs=${[...chosen].map(encodeURIComponent).join(",")}`),
  });
  const choose = (id, yes) => {
    yes ? chosen.add(id) : chosen.delete(id);
    compare.disabled = chosen.size < 2;
    say(compare, chosen.size < 2 ? "Compare (choose two)" : `Compare ${chosen.size} runs`);
  };
  choose("", false);
  const heading = h(
    "div",
    { class: "heading" },
    h("h1", {}, "Jobs"),
    h("div", { class: "actions" }, compare, h("a", { class: "button primary", href: "/submit" }, "Submit a job")),
  );
  fill(root, heading, filters(view), h("p", { class: "quiet", id: "first" }, "Loading"), table, empty, pages);
  table.hidden = true;

  await poll(async () => {
    const query = new URLSearchParams({
      limit: PAGE_SIZE,
      offset: view.offset,
      ...(view.state ? { state: view.state } : {}),
    });
    const { jobs, total } = await getJson(`/api/jobs?${query}`, { signal });
    root.querySelector("#first")?.remove();
    update(body, rows, jobs, choose);
    for (const id of chosen) if (!rows.has(id)) choose(id, false);
    table.hidden = !jobs.length;
    showEmpty(empty, jobs.length === 0, view, total);
    showPages(pages, view, jobs.length, total);
  }, signal);
}

function headings() {
  const names = ["Job", "State", "Progress", "Time left", "Loss", "Kind", "Model", "Submitted"];
  return h(
    "tr",
    {},
    h("th", { scope: "col" }, h("span", { class: "unseen" }, "Compare")),
    names.map((name) => h("th", { scope: "col" }, name)),
    h("th", { scope: "col" }, h("span", { class: "unseen" }, "Actions")),
  );
}

function filters(view) {
  const link = (state, name) =>
    h("a", { href: state ? `/?state=${state}` : "/", "aria-current": view.state === state ? "true" : null }, name);
  return h(
    "nav",
    { class: "filters", "aria-label": "Filter by state" },
    link(null, "all"),
    STATES.map((state) => link(state, state)),
  );
}

function update(body, rows, jobs, choose) {
  const present = new Set(jobs.map((job) => job.id));
  for (const [id, row] of rows) if (!present.has(id)) (row.element.remove(), rows.delete(id));
  jobs.forEach((job, place) => {
    if (!rows.has(job.id)) rows.set(job.id, makeRow(job, choose));
    const row = rows.get(job.id);
    row.update(job);
    if (body.children[place] !== row.element) body.insertBefore(row.element, body.children[place] ?? null);
  });
}

function makeRow(job, choose) {
  const cell = (label, ...children) => h("td", { "data-label": label }, ...children);
  const box = h("input", {
    type: "checkbox",
    "aria-label": `Compare ${job.name}`,
    onchange: () => choose(job.id, box.checked),
  });
  const [chip, reason] = [stateChip(job), h("div", { class: "reason quiet" })];
  const [bar, steps] = [
    h("progress", { max: 1, "aria-label": `Progress of ${job.name}` }),
    h("div", { class: "quiet small" }),
  ];
  const [left, loss, age] = [cell("Time left"), cell("Loss"), cell("Submitted")];
  const cancel = h(
    "button",
    { type: "button", class: "small", "aria-label": `Cancel ${job.name}`, onclick: () => cancelJob(job) },
    "Cancel",
  );
  const title = h("a", { href: `/jobs/${encodeURIComponent(job.id)}` }, job.name);
  const model = h("td", { "data-label": "Model", class: "model" }, modelName(job.model));
  const element = h(
    "tr",
    {},
    h("td", { class: "choose" }, box),
    h("td", { class: "name" }, title, h("div", { class: "quiet small" }, job.id, job.owner ? ` · ${job.owner}` : null)),
    cell("State", chip, reason),
    h("td", { "data-label": "Progress", class: "progress" }, bar, steps),
    left,
    loss,
    cell("Kind", job.kind),
    model,
    age,
    h("td", { class: "act" }, cancel),
  );
  let state = job.state;
  return {
    element,
    update(now) {
      if (now.state !== state) speak(`${now.name} is ${now.state}`);
      state = now.state;
      updateChip(chip, now);
      say(reason, now.state === "failed" ? now.reason.split("\n", 1)[0] : "");
      bar.value = now.progress.fraction;
      bar.dataset.state = now.state;
      bar.hidden = now.state === "queued";
      say(steps, describeProgress(now));
      say(left, timeLeft(now));
      say(loss, number(now.metrics.train?.loss));
      say(age, ago(now.created_at));
      age.title = moment(now.created_at);
      cancel.hidden = ENDED.has(now.state);
      cancel.disabled = now.cancelling;
    },
  };
}

export function describeProgress(job) {
  const { step, total_steps: total, phase } = job.progress;
  if (job.state === "queued") return job.queue_position === 1 ? "next to start" : `${job.queue_position - 1} before it`;
  const steps = total ? `step ${number(step ?? 0)} of ${number(total)}` : "";
  const doing = phase && phase !== "training" && !ENDED.has(job.state) ? phase : "";
  return [steps, doing].filter(Boolean).join(" · ");
}

/** Nothing once the guess is used up: then it is only known to be wrong. */
export function timeLeft(job) {
  return job.state === "running" && job.progress.eta_s >= 1 ? duration(job.progress.eta_s) : "";
}

/** Asks, cancels, and says so. */
export async function cancelJob(job) {
  const sure = await confirmFirst(
    `Cancel ${job.name}?`,
    "Its processes end within seconds. What it has written stays.",
    "Cancel the job",
  );
  if (!sure) return;
  try {
    await postJson(jobPath(job.id, "cancel"), {});
    speak(`${job.name} is being cancelled`);
    document.dispatchEvent(new Event("retry")); // look again now
  } catch (error) {
    complain(error);
  }
}

function showEmpty(place, isEmpty, view, total) {
  place.hidden = !isEmpty;
  if (!isEmpty || place.childElementCount) return;
  if (view.offset && total)
    fill(place, h("p", {}, "There are not so many jobs any more."), h("a", { href: "/" }, "Back to the first"));
  else if (view.state) fill(place, h("p", {}, `No job is ${view.state}.`), h("a", { href: "/" }, "All jobs"));
  else
    fill(
      place,
      h("h2", {}, "No jobs yet"),
      h("p", {}, "A job trains a model from a configuration and data. Its curves, log and results will be here."),
      h(
        "p",
        {},
        h("a", { class: "button primary", href: "/submit" }, "Submit a job"),
        " or ",
        h("code", {}, "lockstep submit CONFIG"),
      ),
    );
}

function showPages(place, view, shown, total) {
  const last = view.offset + shown;
  const address = (offset) => `/?${new URLSearchParams({ ...(view.state ? { state: view.state } : {}), offset })}`;
  const text = total > PAGE_SIZE ? `${view.offset + 1} to ${last} of ${number(total)}` : "";
  if (place.dataset.text === text) return;
  place.dataset.text = text;
  fill(
    place,
    text && view.offset > 0 ? h("a", { href: address(Math.max(view.offset - PAGE_SIZE, 0)) }, "Newer") : null,
    text ? h("span", { class: "quiet" }, text) : null,
    text && last < total ? h("a", { href: address(last) }, "Older") : null,
  );
}
