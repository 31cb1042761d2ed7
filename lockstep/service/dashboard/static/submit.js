// A new job: a form that writes the YAML, the YAML itself for everything else, the plan, and the way into the queue.

import { ApiError, getJson, jobPath, poll, postJson, Unreachable } from "./api.js";
import { go } from "./app.js";
import { readProblems, toYaml } from "./configform.js";
import { facts, fill, h, number, say, speak } from "./dom.js";
import { buildForm } from "./form.js";

const PLAN_DEADLINE_MS = 150_000;

export async function show(root, _, signal) {
  document.title = "Submit · Lockstep";
  const page = new SubmitPage(signal);
  fill(root, h("h1", { class: "heading" }, "Submit a job"), page.element);
  await page.load(new URLSearchParams(location.search).get("from"));
}

class SubmitPage {
  #signal;
  #lastTry = null;
  #form = buildForm(() => this.#form.byHand || this.#writeYaml());
  #yaml = h("textarea", {
    id: "yaml",
    spellcheck: "false",
    autocapitalize: "off",
    autocomplete: "off",
    "aria-describedby": "yaml-hint",
    oninput: () => this.#setByHand(true),
  });
  #back = h(
    "button",
    { type: "button", class: "plain", hidden: true, onclick: () => this.#setByHand(false) },
    "Use the form instead",
  );
  #outcome = h("div", { class: "outcome", "aria-live": "polite" });
  #plan = h(
    "button",
    { type: "button", onclick: () => this.#attempt(this.#plan, PLANNING, () => this.#showPlan()) },
    "Plan",
  );
  #submit = h("button", { type: "submit", class: "primary" }, "Submit");
  element;

  constructor(signal) {
    this.#signal = signal;
    const hint = "The form writes it. You may also change it by hand, and use any other key. ";
    const onsubmit = (event) => {
      event.preventDefault();
      this.#attempt(this.#submit, SUBMITTING, () => this.#send());
    };
    this.element = h(
      "form",
      { class: "submit", novalidate: true, onsubmit },
      this.#form.element,
      h(
        "div",
        {},
        h("label", { for: "yaml" }, h("b", {}, "Configuration (YAML)")),
        h("p", { class: "quiet small", id: "yaml-hint" }, hint, this.#back),
        this.#yaml,
        this.#form.queueFields,
        h("div", { class: "actions" }, this.#plan, this.#submit),
        this.#outcome,
      ),
    );
  }

  /** `from` is a job whose configuration is to be submitted again. */
  async load(from) {
    this.#writeYaml();
    await poll(async () => {
      await this.#form.load(this.#signal);
      if (from) {
        this.#yaml.value = await configOf(from, this.#form.datasets(), this.#signal);
        this.#setByHand(true);
      }
      return "done";
    }, this.#signal);
  }

  #writeYaml() {
    this.#yaml.value = toYaml(this.#form.values());
  }

  #setByHand(byHand) {
    this.#form.setByHand(byHand);
    this.#back.hidden = !byHand;
    if (!byHand) this.#writeYaml();
  }

  async #attempt(button, { doing, explanation }, work) {
    this.#form.clearProblems();
    const name = button.textContent;
    this.#plan.disabled = this.#submit.disabled = true;
    say(button, doing);
    fill(this.#outcome, h("p", { class: "quiet" }, explanation));
    try {
      await work();
    } catch (error) {
      if (!this.#signal.aborted) showRefusal(this.#outcome, this.#form, this.#yaml, error);
    } finally {
      this.#plan.disabled = this.#submit.disabled = false;
      say(button, name);
    }
  }

  async #showPlan() {
    const options = { signal: this.#signal, deadlineMs: PLAN_DEADLINE_MS };
    const found = await postJson("/api/plan", { config: this.#yaml.value }, options);
    fill(this.#outcome, describePlan(found.plan));
    speak("The plan is shown");
  }

  async #send() {
    const request = { config: this.#yaml.value, ...this.#form.extras() };
    const content = JSON.stringify(request);
    // If the answer was lost, the same content goes under the same id: it cannot become two jobs.
    if (this.#lastTry?.content !== content) this.#lastTry = { content, id: `job-${randomHex()}` };
    const job = await postJson("/api/jobs", { id: this.#lastTry.id, ...request });
    go(`/jobs/${encodeURIComponent(job.id)}`);
  }
}

const PLANNING = {
  doing: "Planning",
  explanation: "The service reads the data and the model's description. This takes a while.",
};
const SUBMITTING = { doing: "Submitting", explanation: "The service looks at the configuration." };

const randomHex = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(6)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** A job's configuration names the files of data sets; their names can be submitted again. */
async function configOf(id, datasets, signal) {
  const { yaml } = await getJson(jobPath(id, "config"), { signal });
  const file = /^(\s*(?:- )?path: ).*\/datasets\/([\w.-]+)\.jsonl$/gm;
  return yaml.replace(file, (line, start, name) => (datasets.includes(name) ? `${start}dataset:${name}` : line));
}

// --- answers of the service -----------------------------------------------------------------------------------------

function describePlan(plan) {
  const { warnings = [], ...rest } = plan;
  const shown = Object.entries(rest).map(([name, value]) => [
    name.replaceAll("_", " "),
    typeof value === "number" ? number(value) : String(value),
  ]);
  return h(
    "div",
    { class: "box", id: "plan" },
    h("h2", {}, "What would be trained"),
    warnings.length
      ? h(
          "ul",
          { class: "warnings" },
          warnings.map((text) => h("li", {}, text)),
        )
      : null,
    facts(shown),
  );
}

function showRefusal(place, form, yaml, error) {
  if (!(error instanceof ApiError)) {
    const away = error instanceof Unreachable;
    if (!away) console.error(error);
    fill(
      place,
      h(
        "div",
        { class: "box bad" },
        h("h2", {}, "Not done"),
        h(
          "p",
          {},
          away
            ? `The service does not answer (${error.message}). Try again: the same job is not submitted twice.`
            : error.message,
        ),
      ),
    );
    return;
  }
  const problems = readProblems(error.message);
  const inputs = problems
    .map(({ key, text }) => (key && !form.byHand ? form.showProblem(key, text) : null))
    .filter(Boolean);
  const entry = ({ text, line }) =>
    h(
      "li",
      {},
      line
        ? h("button", { type: "button", class: "plain", onclick: () => selectLine(yaml, line) }, `line ${line}`)
        : null,
      line ? ": " : null,
      text,
    );
  fill(
    place,
    h(
      "div",
      { class: "box bad", id: "refusal" },
      h("h2", {}, "The service refuses this configuration"),
      h("ul", {}, problems.map(entry)),
    ),
  );
  const first = problems.find(({ line }) => line);
  if (inputs.length) inputs[0].focus();
  else if (first) selectLine(yaml, first.line);
}

function selectLine(yaml, line) {
  const lines = yaml.value.split("\n");
  const start = lines.slice(0, line - 1).reduce((sum, text) => sum + text.length + 1, 0);
  yaml.focus();
  yaml.setSelectionRange(start, start + (lines[line - 1]?.length ?? 0));
}
