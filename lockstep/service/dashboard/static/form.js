// The form of a new job: fields, uploads, the mistakes beside them.

import { getJson, upload } from "./api.js";
import { FIELDS, SECTIONS } from "./configform.js";
import { fill, h, number, say, scrollBox } from "./dom.js";

const MAX_ROWS_SHOWN = 3;

/** The fields, what is in them, and a place for a mistake at each. `onChange` is called when one of them changes. */
export function buildForm(onChange) {
  const inputs = new Map();
  const problems = new Map();
  let datasets = [];
  const [models, sets] = [h("datalist", { id: "models" }), h("datalist", { id: "datasets" })];
  const sections = SECTIONS.map((section) => {
    const fields = section.fields.map((field) => buildField(field, inputs, problems, () => form.refresh()));
    return h("fieldset", {}, h("legend", {}, section.legend), h("div", { class: "fields" }, fields));
  });
  const priority = h("input", {
    id: "priority",
    type: "number",
    step: "1",
    min: "-1000",
    max: "1000",
    placeholder: "0",
  });
  const restarts = h("input", {
    id: "max-restarts",
    type: "number",
    step: "1",
    min: "0",
    max: "100",
    placeholder: "0",
  });
  const place = (label, input) => h("div", { class: "field" }, h("label", { for: input.id }, label), input);
  const queueFields = h(
    "fieldset",
    {},
    h("legend", {}, "In the queue"),
    h("div", { class: "fields" }, place("Priority", priority), place("Restarts after a failure, at most", restarts)),
  );
  const form = {
    byHand: false,
    element: h("div", {}, models, sets, sections),
    queueFields,
    datasets: () => datasets,
    values: () =>
      Object.fromEntries(
        FIELDS.map((field) => [field.key, field.check ? inputs.get(field.key).checked : inputs.get(field.key).value]),
      ),
    extras: () =>
      Object.fromEntries(
        [
          ["priority", priority],
          ["max_restarts", restarts],
        ]
          .filter(([, input]) => input.value)
          .map(([name, input]) => [name, Number(input.value)]),
      ),
    setByHand(byHand) {
      form.byHand = byHand;
      for (const section of sections) section.disabled = byHand;
    },
    clearProblems() {
      for (const [key, text] of problems) {
        say(text, "");
        text.hidden = true;
        inputs.get(key).removeAttribute("aria-invalid");
      }
    },
    showProblem(key, text) {
      say(problems.get(key), text);
      problems.get(key).hidden = false;
      inputs.get(key).setAttribute("aria-invalid", "true");
      return inputs.get(key);
    },
    refresh() {
      for (const field of FIELDS) if (field.needs) inputs.get(field.key).disabled = !inputs.get(field.needs).checked;
      onChange();
    },
    async load(signal) {
      const [{ jobs }, found] = await Promise.all([
        getJson("/api/jobs?limit=100", { signal }),
        getJson("/api/datasets", { signal }),
      ]);
      datasets = found.datasets.map((dataset) => dataset.name);
      fill(
        models,
        [...new Set(jobs.map((job) => job.model))].map((model) => h("option", { value: model })),
      );
      fill(
        sets,
        found.datasets.map((dataset) =>
          h("option", { value: `dataset:${dataset.name}` }, `${number(dataset.rows)} rows`),
        ),
      );
    },
  };
  return form;
}

function buildField(field, inputs, problems, onChange) {
  const id = `field-${field.key.replace(".", "-")}`;
  const described = [`${id}-problem`, field.hint ? `${id}-hint` : null].filter(Boolean).join(" ");
  const common = { id, "aria-describedby": described, oninput: onChange };
  const input = field.choices
    ? h(
        "select",
        common,
        field.choices.map(([value, name]) => h("option", { value }, name)),
      )
    : h("input", {
        ...common,
        ...(field.check
          ? { type: "checkbox", checked: field.checked }
          : { type: "text", autocomplete: "off", ...field.input }),
        required: field.required,
      });
  const problem = h("p", { class: "problem", id: `${id}-problem`, hidden: true });
  inputs.set(field.key, input);
  problems.set(field.key, problem);
  const label = h("label", { for: id }, field.label);
  const kind = ["field", field.whole ? "whole" : "", field.check ? "check" : ""].join(" ").trim();
  return h(
    "div",
    { class: kind },
    field.check ? [input, label] : [label, input],
    field.hint ? h("p", { class: "hint", id: `${id}-hint` }, field.hint) : null,
    problem,
    field.upload ? uploadControls(input, onChange) : null,
  );
}

function uploadControls(target, onChange) {
  const note = h("span", { class: "quiet", role: "status" });
  const rows = scrollBox("Rows");
  rows.hidden = true;
  const file = h("input", {
    type: "file",
    accept: ".jsonl,.json",
    id: "upload-file",
    "aria-label": "Upload a JSONL file",
    onchange: () => send(),
  });
  const preview = h("button", { type: "button", class: "small", onclick: () => look() }, "Look at the rows");
  async function send() {
    const [chosen] = file.files;
    if (!chosen) return;
    const name = datasetName(chosen.name);
    try {
      say(note, "Uploading");
      const dataset = await upload(`/api/datasets/${encodeURIComponent(name)}`, chosen, (share) =>
        say(note, share < 1 ? `Uploading ${Math.round(share * 100)} %` : "Checking the rows"),
      );
      say(note, `${number(dataset.rows)} rows as ${dataset.name}`);
      target.value = `dataset:${dataset.name}`;
      onChange();
    } catch (error) {
      say(note, `Not uploaded: ${error.message}`);
    }
    file.value = "";
  }
  async function look() {
    rows.hidden = false;
    const name = target.value.replace(/^dataset:/, "");
    try {
      const found = await getJson(`/api/datasets/${encodeURIComponent(name)}/preview?rows=${MAX_ROWS_SHOWN}`);
      fill(
        rows,
        found.rows.map((row) => h("pre", { class: "yaml" }, JSON.stringify(row, null, 1))),
      );
    } catch (error) {
      fill(rows, h("p", { class: "problem" }, error.message));
    }
  }
  return [h("div", { class: "upload" }, h("label", { for: "upload-file" }, "Upload"), file, preview, note), rows];
}

/** A file's name without what a data set's name cannot have. */
const datasetName = (file) =>
  file
    .replace(/\.(jsonl|json)$/i, "")
    .replace(/[^\w.-]+/g, "-")
    .replace(/^[.-]+/, "")
    .slice(0, 64) || "rows";
