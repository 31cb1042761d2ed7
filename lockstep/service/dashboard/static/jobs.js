// The list of jobs: every state, live, with a search, counts, filters and pages. Rows are updated in place, so focus stays where it is.

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
const TYPING_MS = 250;

export async function show(root, _, signal) {
  document.title = "Jobs · Lockstep";
  const asked = new URLSearchParams(location.search);
  const view = {
    state: STATES.includes(asked.get("state")) ? asked.get("state") : null,
    search: (asked.get("search") ?? "").slice(0, 200),
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
  const filters = makeFilters(view);
  const found = h("p", { class: "unseen", role: "status" });
  const controls = h("div", { class: "finding" }, makeSearch(view, signal, filters.point), filters.element);
  fill(root, heading, controls, found, h("p", { class: "quiet", id: "first" }, "Loading"), table, empty, pages);
  table.hidden = true;

  await poll(async () => {
    const query = new URLSearchParams({ ...asIs(view), limit: PAGE_SIZE, offset: view.offset });
    const { jobs, total, counts } = await getJson(`/api/jobs?${query}`, { signal });
    if (query.get("search") !== (view.search || null)) return; // more was typed meanwhile
    root.querySelector("#first")?.remove();
    filters.update(counts);
    say(found, view.search ? `${number(total)} ${total === 1 ? "job matches" : "jobs match"}` : "");
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

/** What of a view is asked for, and stands in its address. */
function asIs({ state, search }) {
  return { ...(state ? { state } : {}), ...(search ? { search } : {}) };
}

function addressOf(view, more = {}) {
  const query = String(new URLSearchParams({ ...asIs(view), ...more }));
  return query ? `/?${query}` : "/";
}

/** Looks while one types; the address follows, so that a search can be kept and sent. */
function makeSearch(view, signal, onChange) {
  const field = h("input", {
    type: "search",
    id: "search",
    maxlength: 200,
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "name, id, owner or model",
  });
  field.value = view.search;
  let timer = null;
  const look = () => {
    clearTimeout(timer);
    if (signal.aborted || field.value.trim() === view.search) return;
    [view.search, view.offset] = [field.value.trim(), 0];
    history.replaceState(null, "", addressOf(view));
    onChange();
    document.dispatchEvent(new Event("retry"));
  };
  field.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(look, TYPING_MS);
  });
  const submitted = (event) => {
    event.preventDefault();
    look();
  };
  const label = h("label", { for: "search" }, "Search");
  return h("form", { role: "search", class: "search", onsubmit: submitted }, label, field);
}

function makeFilters(view) {
  const links = [null, ...STATES].map((state) => {
    const count = h("span", { class: "count" });
    const link = h("a", { "aria-current": view.state === state ? "true" : null }, state ?? "all", " ", count);
    return { state, count, link };
  });
  const update = (counts) => {
    const all = Object.values(counts).reduce((sum, count) => sum + count, 0);
    for (const { state, count } of links) say(count, number(state ? (counts[state] ?? 0) : all));
  };
  const point = () => links.forEach(({ state, link }) => (link.href = addressOf({ ...view, state })));
  point();
  const element = h("nav", { class: "filters", "aria-label": "Filter by state" }, links.map(({ link }) => link));
  return { element, update, point };
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
  const about = JSON.stringify(view);
  if (!isEmpty || place.dataset.about === about) return;
  place.dataset.about = about;
  if (view.offset && total)
    fill(place, h("p", {}, "There are not so many jobs any more."), h("a", { href: "/" }, "Back to the first"));
  else if (view.search)
    fill(
      place,
      h("p", {}, `No ${view.state ?? ""} job matches “${view.search}”.`.replace("  ", " ")),
      h("a", { href: "/" }, "All jobs"),
    );
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
  const address = (offset) => addressOf(view, { offset });
  const text = total > PAGE_SIZE ? `${number(view.offset + 1)} to ${number(last)} of ${number(total)}` : "";
  const about = `${text} ${address(0)}`;
  if (place.dataset.about === about) return;
  place.dataset.about = about;
  fill(
    place,
    text && view.offset > 0 ? h("a", { href: address(Math.max(view.offset - PAGE_SIZE, 0)) }, "Newer") : null,
    text ? h("span", { class: "quiet" }, text) : null,
    text && last < total ? h("a", { href: address(last) }, "Older") : null,
  );
}
