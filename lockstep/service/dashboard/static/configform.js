// The fields of a configuration that most runs set, and the YAML that they make.

const BASE = "https://huggingface.co/";
const POSITIVE = { type: "number", min: "1", step: "1", inputmode: "numeric" };
const RATE = { type: "text", inputmode: "decimal", pattern: "auto|[0-9.]+(e-?[0-9]+)?" };

/** `key` is where it goes in the configuration; what is left empty is left out, and then has its default. */
export const SECTIONS = [
  {
    legend: "What to train",
    fields: [
      {
        key: "model",
        aliases: ["model.path"],
        label: "Model",
        whole: true,
        required: true,
        input: { list: "models", placeholder: "HuggingFaceTB/SmolLM2-135M-Instruct" },
        hint: "A Hub name, or a folder that the service may read.",
        clean: (text) => text.replace(BASE, ""),
      },
      {
        key: "algorithm",
        aliases: ["algorithm.kind"],
        label: "Kind",
        choices: [
          ["", "sft: learn answers"],
          ["dpo", "dpo: learn from pairs"],
          ["kto", "kto: learn from labels"],
          ["simpo", "simpo: pairs, no reference"],
          ["orpo", "orpo: pairs, no reference"],
          ["cpo", "cpo: pairs, no reference"],
        ],
      },
      { key: "name", label: "Name", input: { placeholder: "run", maxlength: "100" } },
    ],
  },
  {
    legend: "Data",
    fields: [
      {
        key: "data.train",
        aliases: ["data"],
        label: "Training rows",
        whole: true,
        required: true,
        upload: true,
        input: { list: "datasets", placeholder: "dataset:NAME" },
        hint: "A data set of the service, or a Hub data set. A file you upload becomes a data set.",
      },
      { key: "data.validation", label: "Validation rows", input: { list: "datasets", placeholder: "none" } },
      {
        key: "data.validation_fraction",
        label: "or hold out a share",
        input: { type: "number", min: "0", max: "0.99", step: "any", placeholder: "0" },
      },
      { key: "data.max_length", label: "Tokens in a row, at most", input: { ...POSITIVE, placeholder: "2048" } },
    ],
  },
  {
    legend: "How",
    fields: [
      { key: "lora", label: "LoRA: train small adapters", check: true, checked: true, whole: true },
      { key: "lora.rank", label: "LoRA rank", input: { ...POSITIVE, placeholder: "16" }, needs: "lora" },
      {
        key: "lora.alpha",
        label: "LoRA alpha",
        input: { type: "number", min: "0", step: "any", placeholder: "32" },
        needs: "lora",
      },
      { key: "optim.learning_rate", label: "Learning rate", input: { ...RATE, placeholder: "auto" } },
      { key: "optim.epochs", label: "Epochs", input: { type: "number", min: "0", step: "any", placeholder: "1" } },
      { key: "optim.max_steps", label: "Steps, at most", input: { ...POSITIVE, placeholder: "no limit" } },
      { key: "batch.samples", label: "Rows in a step", input: { ...POSITIVE, placeholder: "16" } },
      {
        key: "evaluation.every_steps",
        label: "Validate every (steps)",
        input: { ...POSITIVE, min: "0", placeholder: "50" },
      },
      {
        key: "checkpoint.every_steps",
        label: "Checkpoint every (steps)",
        input: { ...POSITIVE, min: "0", placeholder: "100" },
      },
      { key: "launch.procs", label: "Processes (one for each GPU)", input: { ...POSITIVE, placeholder: "1" } },
    ],
  },
];

export const FIELDS = SECTIONS.flatMap((section) => section.fields);

/** From {key: text or boolean} to YAML text, sections in the order of the fields. */
export function toYaml(values) {
  const sections = new Map();
  for (const field of FIELDS) {
    const [section, leaf] = field.key.split(".");
    const value = values[field.key];
    if (field.needs && !values[field.needs]) continue;
    const text = field.check ? (value ? "true" : "") : (field.clean ?? String)(String(value ?? "").trim());
    if (!text) continue;
    const written = field.check ? text : scalar(text, isNumber(field));
    if (leaf === undefined) sections.set(section, { value: written, leaves: [] });
    else {
      if (!sections.has(section)) sections.set(section, { leaves: [] });
      sections.get(section).leaves.push(`  ${leaf}: ${written}\n`);
    }
  }
  // A section with settings of its own is on without saying so: "lora: true" is for one that has none.
  const write = ([name, { value, leaves }]) => (leaves.length ? `${name}:\n${leaves.join("")}` : `${name}: ${value}\n`);
  return [...sections].map(write).join("");
}

const isNumber = (field) => field.input?.type === "number" || field.input?.inputmode === "decimal";

/** 1e-4 gets the point that YAML wants of a number. Text is quoted where YAML could read it as something else. */
function scalar(text, isNumber) {
  if (isNumber && /^-?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text)) {
    const [mantissa, exponent] = text.toLowerCase().split("e");
    if (exponent === undefined) return text;
    const sign = /^[+-]/.test(exponent) ? "" : "+";
    return `${mantissa.includes(".") ? mantissa : `${mantissa}.0`}e${sign}${exponent}`;
  }
  const plain = /^[A-Za-z_][\w./-]*(:[\w./-]+)*$/.test(text) && !/^(true|false|null|yes|no|on|off|y|n)$/i.test(text);
  return plain ? text : JSON.stringify(text);
}

/** The service's sentence in its parts: [{text, key, line}], with the field or the line that each is about. */
export function readProblems(message) {
  return message.split(/; (?=the configuration)/).map((part) => {
    const line = /^the configuration:(\d+)/.exec(part);
    const text = part.replace(/^the configuration(:\d+)?: /, "");
    const names = FIELDS.flatMap((field) => [field.key, ...(field.aliases ?? [])].map((name) => [name, field.key]));
    const named = names
      .map(([name, key]) => ({ key, at: mentions(text, name), length: name.length }))
      .filter(({ at }) => at >= 0)
      .sort((one, other) => one.at - other.at || other.length - one.length)[0];
    return { text, key: named?.key ?? null, line: line ? Number(line[1]) : null };
  });
}

/** Where a dotted key stands in a sentence as itself, not as a part of a longer one. One word alone is no key. */
function mentions(text, key) {
  const escaped = key.replace(/[.]/g, "\\.");
  const pattern = key.includes(".") ? `(?<![\\w.])${escaped}(?![\\w]|\\.\\w)` : `^${escaped}(?=[:. ])`;
  return text.search(new RegExp(pattern));
}
