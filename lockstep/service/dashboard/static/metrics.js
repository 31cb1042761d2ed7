// Records of metrics as they come in, and which charts they make.

// Facts about a record, not curves.
const NOT_CURVES = new Set(["step", "split", "time", "epoch", "row_range", "rows", "time_s", "straggler"]);
const SPLITS = ["train", "validation"];
const MIB = 1024 * 1024;
const MAX_SERIES = 16;
const MAX_CHARTS = 60;

// In this order; `single` ones have one key, so their curves are named by split alone. A key belongs to the first that
// knows it; what none knows has a chart of its own, or one with all keys of the same beginning ("answers/length").
const GROUPS = [
  { title: "Loss", single: true, knows: (key) => key === "loss" },
  { title: "Parts of the loss", knows: (key) => /^loss[_/](?!scale)/.test(key) },
  { title: "Rewards", knows: (key) => key === "margin" || /(^|_)rewards?($|[_/])/.test(key) },
  { title: "Accuracy", single: true, knows: (key) => key === "accuracy" },
  { title: "Answers", knows: (key) => /^(exact_match|numeric|rouge|bert|answers_cut)/.test(key) },
  { title: "Log-probabilities", knows: (key) => /(^|_)logprobs?$/.test(key) },
  { title: "Distance from the reference", knows: (key) => /^kl($|[_/])/.test(key) },
  { title: "Learning rate", single: true, knows: (key) => key === "learning_rate", fromZero: true },
  { title: "Gradient norm", single: true, knows: (key) => key === "grad_norm" },
  { title: "Speed", single: true, unit: "tokens/s", knows: (key) => key === "tokens_per_s", fromZero: true },
  {
    title: "Time of a step",
    unit: "s",
    knows: (key) => /^(step_time|compute|wait|straggler_compute)_s$/.test(key),
    fromZero: true,
  },
  { title: "Memory", unit: "GiB", knows: (key) => /^memory_gib/.test(key), fromZero: true },
  {
    title: "Communication",
    unit: "MiB a step",
    knows: (key) => key.startsWith("traffic/"),
    divide: MIB,
    fromZero: true,
  },
  {
    title: "Communication, the least possible",
    unit: "MiB a step",
    knows: (key) => key.startsWith("traffic_least/"),
    divide: MIB,
    fromZero: true,
  },
  { title: "Balance between ranks", knows: (key) => /_balance$/.test(key) },
  { title: "Tokens of a step", knows: (key) => /^(supervised_)?tokens$/.test(key), fromZero: true },
];

/** One run's records. Where a step was written again after a restart, the later record counts. */
export class Metrics {
  #records = new Map(SPLITS.map((split) => [split, new Map()]));
  #inOrder = new Map();
  keys = new Set();

  add(records) {
    for (const record of records) {
      const split = String(record.split ?? "train");
      if (!Number.isFinite(record.step)) continue;
      if (!this.#records.has(split)) this.#records.set(split, new Map());
      this.#records.get(split).set(record.step, record);
      for (const [key, value] of Object.entries(record)) {
        if (typeof value === "number" && !NOT_CURVES.has(key)) this.keys.add(key);
      }
    }
    this.#inOrder.clear();
  }

  get splits() {
    return [...this.#records.keys()];
  }

  #sorted(split) {
    if (!this.#inOrder.has(split)) {
      const records = [...(this.#records.get(split)?.values() ?? [])];
      this.#inOrder.set(
        split,
        records.sort((one, other) => one.step - other.step),
      );
    }
    return this.#inOrder.get(split);
  }

  /** {x: steps, y: values}; null for a value that was not a number, which is a gap in the curve. */
  curve(split, key, divide = 1) {
    const records = this.#sorted(split).filter((record) => Object.hasOwn(record, key));
    const y = records.map((record) => (typeof record[key] === "number" ? record[key] / divide : null));
    return y.some((value) => value !== null) ? { x: records.map((record) => record.step), y } : null;
  }
}

/** [{title, unit, fromZero, divide, keys}] for these keys, the ones everybody looks at first. */
export function groupKeys(keys) {
  const groups = new Map(GROUPS.map((group) => [group.title, { ...group, keys: [] }]));
  for (const key of [...keys].sort()) {
    const known = GROUPS.find((group) => group.knows(key));
    const title = known ? known.title : key.split("/")[0];
    if (!groups.has(title)) groups.set(title, { title, single: title === key, keys: [] });
    groups.get(title).keys.push(key);
  }
  return [...groups.values()].filter((group) => group.keys.length).slice(0, MAX_CHARTS);
}

/** What one run's charts show: a curve for each key and split. */
export function chartsOfRun(metrics) {
  return groupKeys(metrics.keys).map((group) => {
    const single = group.single && group.keys.length === 1;
    const series = group.keys.flatMap((key, place) =>
      metrics.splits.flatMap((split, number) => {
        const curve = metrics.curve(split, key, group.divide);
        if (!curve) return [];
        if (single) return [{ ...curve, label: split, colour: number, dashed: false }];
        const isTrain = split === "train";
        return [
          { ...curve, label: isTrain ? shorten(key) : `${shorten(key)}, ${split}`, colour: place, dashed: !isTrain },
        ];
      }),
    );
    return {
      ...group,
      id: group.title,
      series: series.slice(0, MAX_SERIES),
      left: Math.max(series.length - MAX_SERIES, 0),
    };
  });
}

/** What charts of several runs show: one for each metric, a curve for each run; validation is dashed. */
export function chartsOfRuns(runs) {
  const keys = new Set(runs.flatMap((run) => [...run.metrics.keys]));
  const order = groupKeys(keys).flatMap((group) => group.keys.map((key) => ({ ...group, key })));
  return order.slice(0, MAX_CHARTS).map((group) => {
    const series = runs.flatMap((run) =>
      run.metrics.splits.flatMap((split) => {
        const curve = run.metrics.curve(split, group.key, group.divide);
        const isTrain = split === "train";
        const label = isTrain ? run.label : `${run.label}, ${split}`;
        return curve ? [{ ...curve, label, colour: run.colour, dashed: !isTrain, terse: true }] : [];
      }),
    );
    const title = group.single ? group.title : withoutUnit(group.key);
    return { ...group, id: group.key, title, series, left: 0 };
  });
}

const withoutUnit = (key) => key.replace(/_(gib|s)(?=_|$)/, "");

/** Without what the chart's title says already. */
const shorten = (key) => withoutUnit(key.replace(/^traffic(_least)?\//, ""));
