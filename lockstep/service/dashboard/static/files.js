// What a job has made beside curves and log: checkpoints, files, sample answers, events.

import { getJson, jobPath, send, token } from "./api.js";
import { bytes, complain, fill, h, moment, number, scrollBox } from "./dom.js";

const MAX_FILES = 300;
const MAX_SAMPLES = 12;
// What a sample may be called in the record, in the order in which a person reads it.
const TEXTS = [
  ["prompt", "Prompt"],
  ["messages", "Prompt"],
  ["answer", "Answer"],
  ["completion", "Answer"],
  ["reference", "Expected"],
];

/** [element, update]: `update` asks again. */
export function checkpointsSection(job, signal) {
  const place = scrollBox("Checkpoints");
  const update = async () => {
    const { checkpoints } = await getJson(jobPath(job.id, "checkpoints"), { signal });
    const losses = checkpoints.map((checkpoint) => checkpoint.validation_loss).filter((loss) => loss !== null);
    const best = losses.length > 1 ? Math.min(...losses) : null;
    const row = (checkpoint) =>
      h(
        "tr",
        {},
        h("td", { class: "number" }, number(checkpoint.step)),
        h(
          "td",
          { class: "number" },
          number(checkpoint.validation_loss),
          checkpoint.validation_loss === best && best !== null ? " (best)" : null,
        ),
        h("td", { class: "number" }, bytes(checkpoint.bytes)),
        h("td", {}, moment(checkpoint.created_at)),
      );
    fill(
      place,
      checkpoints.length
        ? table(["Step", "Validation loss", "Size", "Written"], checkpoints.map(row))
        : nothing("No checkpoint yet."),
    );
  };
  return [h("section", {}, h("h2", {}, "Checkpoints"), place), update];
}

export function artifactsSection(job, signal) {
  const place = scrollBox("Files");
  const every = h("input", { type: "checkbox", id: "all-files", onchange: () => update() });
  const update = async () => {
    const { artifacts } = await getJson(jobPath(job.id, "artifacts"), { signal });
    const shown = artifacts.filter((artifact) => every.checked || /^(export\/|skipped\.jsonl)/.test(artifact.path));
    const row = (artifact) =>
      h(
        "tr",
        {},
        h("td", { class: "path" }, downloadLink(artifactAddress(job, artifact.path), artifact.path)),
        h("td", { class: "number" }, bytes(artifact.bytes)),
      );
    const left = shown.length - MAX_FILES;
    fill(
      place,
      shown.length
        ? table(["File", "Size"], shown.slice(0, MAX_FILES).map(row))
        : nothing(every.checked ? "No files yet." : "Nothing is exported yet."),
      left > 0 ? h("p", { class: "quiet" }, `${left} more: lockstep artifacts ${job.id} --all lists them`) : null,
    );
  };
  const label = h("label", { for: "all-files" }, "also checkpoints, logs and metrics");
  return [h("section", {}, h("h2", {}, "Files"), h("div", { class: "controls" }, every, label), place), update];
}

const artifactAddress = (job, path) => jobPath(job.id, "artifacts", ...path.split("/").map(encodeURIComponent));

/** With a token the browser cannot fetch a file by itself: we do, and hand it over. */
function downloadLink(address, path) {
  const name = path.split("/").at(-1);
  const link = h("a", { href: address, download: name }, path);
  if (token.get() === null) return link;
  link.addEventListener("click", async (event) => {
    event.preventDefault();
    link.setAttribute("aria-busy", "true");
    try {
      const blob = await (await send("GET", address, { deadlineMs: 0 })).blob();
      const local = URL.createObjectURL(blob);
      h("a", { href: local, download: name }).click();
      setTimeout(() => URL.revokeObjectURL(local), 60_000);
    } catch (error) {
      complain(error);
    } finally {
      link.removeAttribute("aria-busy");
    }
  });
  return link;
}

export function samplesSection(job, signal) {
  const place = h("div", { class: "pair" });
  const section = h("section", { hidden: true }, h("h2", {}, "Sample answers"), place);
  let shown = "";
  const update = async () => {
    const { samples } = await getJson(jobPath(job.id, `samples?limit=${MAX_SAMPLES}`), { signal });
    const mark = JSON.stringify(samples);
    if (mark === shown) return;
    shown = mark;
    section.hidden = !samples.length;
    fill(place, samples.reverse().map(describeSample));
  };
  return [section, update];
}

function describeSample(sample) {
  const texts = TEXTS.filter(([key]) => key in sample);
  const known = new Set(["step", "time", ...texts.map(([key]) => key)]);
  const others = Object.entries(sample).filter(([key]) => !known.has(key));
  const facts = others
    .map(([key, value]) => `${key} ${typeof value === "number" ? number(value) : asText(value)}`)
    .join(" · ");
  const blocks = texts.map(([key, name]) => [h("dt", {}, name), h("dd", { class: "said" }, asText(sample[key]))]);
  return h(
    "article",
    { class: "sample" },
    h(
      "p",
      { class: "quiet small" },
      "step" in sample ? `step ${number(sample.step)}` : null,
      facts ? ` · ${facts}` : null,
    ),
    h("dl", {}, blocks),
  );
}

function asText(value) {
  if (typeof value === "string") return value;
  if (Array.isArray(value) && value.every((turn) => typeof turn?.content === "string")) {
    return value.map((turn) => `${turn.role}: ${turn.content}`).join("\n");
  }
  return JSON.stringify(value);
}

/** Warnings go to the top of the page, the rest into a list. */
export function eventsSection(job, signal) {
  const warnings = h("ul", { class: "warnings", hidden: true });
  const place = scrollBox("Events");
  let shown = -1;
  const update = async () => {
    const { events } = await getJson(jobPath(job.id, "events"), { signal });
    if (events.length === shown) return;
    shown = events.length;
    const texts = [
      ...new Set(events.filter((event) => event.event === "warning").map((event) => asText(event.message ?? ""))),
    ];
    warnings.hidden = !texts.length;
    fill(
      warnings,
      texts.map((text) => h("li", {}, text)),
    );
    const row = (event) =>
      h(
        "tr",
        {},
        h("td", { class: "when" }, moment(event.time)),
        h("td", {}, asText(event.event)),
        h("td", { class: "what" }, describeEvent(event)),
      );
    fill(
      place,
      events.length ? table(["When", "What", "Details"], events.map(row).reverse()) : nothing("Nothing has happened yet."),
    );
  };
  return {
    warnings,
    element: h("details", { class: "section" }, h("summary", {}, h("h2", {}, "Events")), place),
    update,
  };
}

function describeEvent(event) {
  const fields = Object.entries(event).filter(([key, value]) => !["time", "event"].includes(key) && value !== null);
  return fields
    .map(([key, value]) =>
      key === "message" ? asText(value) : `${key} ${typeof value === "number" ? number(value) : asText(value)}`,
    )
    .join(" · ");
}

function table(names, rows) {
  return h(
    "table",
    {},
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        names.map((name) => h("th", { scope: "col" }, name)),
      ),
    ),
    h("tbody", {}, rows),
  );
}

const nothing = (text) => h("p", { class: "quiet" }, text);
