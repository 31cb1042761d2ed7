"""An evaluation for a person to read, made from results.json alone: the table of scores, and the page with answers
beside their references. A short script filters the rows; the page is complete without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.reports.page import escape, page
from lockstep.rundir import write_atomically

MOST_ROWS = 200  # all rows up to here; of more, the first so many and the worst
WORST_ROWS = 50
LOWER_IS_BETTER = frozenset({"loss", "perplexity"})
_PERCENTAGES = frozenset({"exact_match", "numeric", "pair_accuracy", "reward_accuracy"})
Row = Mapping[str, Any]

_STYLE = """
.scores td, .scores th { padding-right: 2.2rem }
.scores .best { font-weight: 700; color: var(--good) }
.scores small { color: var(--quiet); font-weight: 400; margin-left: .35rem; white-space: nowrap }
.scores th.number { max-width: 22rem; overflow-wrap: anywhere }
.filter { display: flex; flex-wrap: wrap; gap: .6rem 1.2rem; align-items: center; margin: 2rem 0 0 }
.filter input[type=search] { font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--line);
  border-radius: 6px; padding: .4rem .7rem; width: min(100%, 22rem) }
.filter[hidden] { display: none }
.filter label { display: inline-flex; gap: .4rem; align-items: center }
.row { border: 1px solid var(--line); border-radius: 10px; margin: 0 0 1.1rem; overflow: hidden }
.row > header { display: flex; flex-wrap: wrap; gap: .1rem .8rem; padding: .45rem .9rem; background: var(--shade);
  border-bottom: 1px solid var(--line); font-size: .87em; color: var(--quiet) }
.row > header span { overflow-wrap: anywhere }
.question { padding: .7rem .9rem; border-bottom: 1px solid var(--line) }
.turn + .turn { margin-top: .5rem }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 290px), 1fr)); gap: 1px;
  background: var(--line) }
.answers > div { padding: .7rem .9rem .8rem; background: var(--paper); min-width: 0 }
.name { font-size: .8em; font-weight: 600; color: var(--quiet); overflow-wrap: anywhere }
.text { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 24rem; overflow-y: auto }
.text:empty::before { content: "(empty)"; color: var(--quiet); font-style: italic }
.reference .name { color: var(--accent) }
.marks { display: flex; flex-wrap: wrap; gap: .3rem; margin-top: .55rem }
.mark { font-size: .78em; padding: .08rem .5rem; border-radius: 99px; background: var(--shade); color: var(--quiet);
  white-space: nowrap; font-variant-numeric: tabular-nums }
.mark.right { background: var(--good-shade); color: var(--good) }
.mark.wrong { background: var(--bad-shade); color: var(--bad) }
.mark.cut { background: var(--warn-shade); color: var(--warn) }
@media (max-width: 640px) { .scores td, .scores th { padding-right: 1.1rem } .text { max-height: none } }
"""
_SCRIPT = """
const box = document.getElementById("filter"), rows = [...document.querySelectorAll(".row")];
box.hidden = false;
const [words, differ] = [box.querySelector("[type=search]"), box.querySelector("[type=checkbox]")];
const show = () => {
  const wanted = words.value.toLowerCase();
  let count = 0;
  for (const row of rows) {
    const same = Boolean(differ && differ.checked) && !row.dataset.differ;
    row.hidden = same || !row.textContent.toLowerCase().includes(wanted);
    count += !row.hidden;
  }
  box.querySelector("output").textContent = `${count} of ${rows.length} rows`;
};
box.addEventListener("input", show);
show();
"""


@dataclass(frozen=True, slots=True)
class ScoreCell:
    """`error` is the standard error of the mean, empty where none is known."""

    text: str
    error: str = ""
    best: bool = False


@dataclass(frozen=True, slots=True)
class ScoreRow:
    metric: str
    cells: tuple[ScoreCell, ...]


def score_rows(results: Mapping[str, Any]) -> list[ScoreRow]:
    """One per metric, in the order requested, with a cell per model; a dash where a model has no value."""
    models = results["models"]
    names = dict.fromkeys(name for model in models for name in model["metrics"])
    rows = []
    for name in names:
        values = [model["metrics"].get(name) for model in models]
        shown = [format_score(name, value) for value in values]
        known = [value for value in values if value is not None]
        best = (min if name in LOWER_IS_BETTER else max)(known)
        # Nothing is marked with a single model, nor where all cells read the same.
        marks = len(known) > 1 and len(set(shown)) > 1
        cells = [
            ScoreCell(text, _error_text(name, model), marks and value is not None and text == format_score(name, best))
            for text, value, model in zip(shown, values, models, strict=True)
        ]
        rows.append(ScoreRow(name, tuple(cells)))
    return rows


def format_score(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name in _PERCENTAGES:
        return f"{100 * value:.1f} %"
    if name == "perplexity":
        return f"{value:.2f}" if value < 1e6 else f"{value:.2e}"
    return f"{value:.4f}" if name == "loss" else f"{value:.3f}"


def _error_text(name: str, model: Mapping[str, Any]) -> str:
    error = model["standard_errors"].get(name)
    return "" if not error else "± " + format_score(name, error)


# --- page -----------------------------------------------------------------------------------------------------------


def write_report(results: Mapping[str, object], path: Path) -> None:
    # Half a surrogate pair, which JSON can hold and UTF-8 cannot, must not cost the page.
    write_atomically(path, report_page(results).encode("utf-8", "replace").decode())


def report_page(results: Mapping[str, Any]) -> str:
    names = [model["name"] for model in results["models"]]
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in results["warnings"])
    parts = [
        f'<ul class="warnings">{warnings}</ul>' if warnings else "",
        _scores(results),
        _facts(results),
        _filter(len(names) > 1),
    ]
    for title, numbers in _choose(results):
        parts.append(f"<h2>{escape(title)}</h2>")
        parts += [_row(number, results["rows"][number], names) for number in numbers]
    parts.append(f"<script>{_SCRIPT}</script>")
    return page(
        f"Evaluation: {' and '.join(names) if len(names) < 3 else f'{len(names)} models'}", "\n".join(parts), _STYLE
    )


def _scores(results: Mapping[str, Any]) -> str:
    head = "".join(f'<th class="number">{escape(model["name"])}</th>' for model in results["models"])
    rows = []
    for row in score_rows(results):
        cells = "".join(
            f'<td class="number{" best" if cell.best else ""}">{cell.text}'
            f"{f'<small>{cell.error}</small>' if cell.error else ''}</td>"
            for cell in row.cells
        )
        rows.append(f"<tr><td>{escape(_title(row.metric))}</td>{cells}</tr>")
    return (
        f'<div class="scroll"><table class="scores"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _title(metric: str) -> str:
    return metric.replace("_", " ")


def _facts(results: Mapping[str, Any]) -> str:
    options = results["options"]
    chosen = next((f" ({key} {options[key]:,})" for key in ("limit", "sample") if key in options), "")
    facts = {"data": results["data"], "rows": f"{results['num_rows']:,}{chosen}"}
    facts |= {f"{model['kind']} {model['name']}": model["source"] for model in results["models"]}
    if any(model.get("answers_cut") is not None for model in results["models"]):
        facts["answers"] = f"at most {options['max_tokens']:,} tokens, temperature {options['temperature']:g}"
    tokens = {model["supervised_tokens"] for model in results["models"] if "supervised_tokens" in model}
    if tokens:
        facts["loss over"] = " and ".join(f"{count:,} tokens" for count in sorted(tokens))
    if "system" in options:
        facts["system message"] = options["system"]
    facts["made"] = results["created_at"]
    rows = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in facts.items())
    return f'<h2>What was evaluated</h2><table class="facts">{rows}</table>'


def _filter(several: bool) -> str:
    differ = '<label><input type="checkbox"> only rows where scores differ</label>' if several else ""
    return (
        '<div class="filter" id="filter" hidden>'
        f'<input type="search" placeholder="Show rows with these words" aria-label="Words in the rows">{differ}'
        '<output class="quiet"></output></div>'
    )


def _choose(results: Mapping[str, Any]) -> list[tuple[str, Sequence[int]]]:
    """(heading, row numbers): all rows, or the first ones and those that the last model did worst."""
    rows, model = results["rows"], results["models"][-1]["name"]
    if len(rows) <= MOST_ROWS:
        return [(f"All {len(rows)} rows" if len(rows) > 1 else "One row", range(len(rows)))]
    first = (f"The first {MOST_ROWS} of {len(rows):,} rows", range(MOST_ROWS))
    key = next(iter(results["models"][-1]["metrics"]), "loss").replace("perplexity", "loss")
    values = [(_value(rows[number]["models"][model], key), number) for number in range(MOST_ROWS, len(rows))]
    known = [(value, number) for value, number in values if value is not None]
    known.sort(key=lambda entry: (-entry[0] if key in LOWER_IS_BETTER else entry[0], entry[1]))
    worst = [number for _, number in known[:WORST_ROWS]]
    return [first, (f"Of the others, the {len(worst)} with the worst {_title(key)} of {model}", worst)]


def _value(entry: Row, key: str) -> float | None:
    return entry.get("loss") if key == "loss" else entry.get("scores", {}).get(key)


def _row(number: int, row: Row, names: Sequence[str]) -> str:
    entries = [row["models"][name] for name in names]
    differs = len({tuple(entry.get("scores", {}).values()) for entry in entries}) > 1
    boxes = [] if row["reference"] is None else [_box("Reference", row["reference"], "", "reference")]
    boxes += [_answer(name, entry) for name, entry in zip(names, entries, strict=True)]
    return (
        f'<article class="row"{" data-differ=1" if differs else ""}><header><span>{number + 1}</span>'
        f"<span>{escape(row['origin'])}</span></header>{_question(row['question'])}"
        f'<div class="answers">{"".join(boxes)}</div></article>'
    )


def _question(question: str | Sequence[Mapping[str, object]]) -> str:
    if isinstance(question, str):
        turns = [("Prompt", question)] if question.strip() else []
    else:
        turns = [(str(message.get("role", "")).capitalize(), _message_text(message)) for message in question]
    shown = "".join(f'<div class="turn">{_named_text(name, text)}</div>' for name, text in turns)
    return f'<div class="question">{shown}</div>' if shown else ""


def _message_text(message: Mapping[str, Any]) -> str:
    content, calls = message.get("content"), message.get("tool_calls")
    parts = [content if isinstance(content, str) else "" if content is None else str(content)]
    parts += [f"calls {call.get('function', call)}" for call in calls or ()]
    return "\n".join(part for part in parts if part)


def _answer(name: str, entry: Row) -> str:
    marks = [_mark(key, value) for key, value in entry.get("scores", {}).items()]
    if entry.get("loss") is not None:
        marks.append(f'<span class="mark">loss {format_score("loss", entry["loss"])}</span>')
    if entry.get("finish_reason") == "length":
        marks.append('<span class="mark cut">cut</span>')
    return _box(name, entry.get("text"), "".join(marks), "answer")


def _mark(name: str, value: float) -> str:
    if name in ("exact_match", "numeric"):
        kind, word = ("right", "right") if value == 1 else ("wrong", "wrong")
        return f'<span class="mark {kind}">{_title(name)}: {word}</span>'
    return f'<span class="mark">{_title(name)} {format_score(name, value)}</span>'


def _box(name: str, text: str | None, marks: str, kind: str) -> str:
    shown = f'<div class="marks">{marks}</div>' if marks else ""
    return f'<div class="{kind}">{_named_text(name, text)}{shown}</div>'


def _named_text(name: str, text: str | None) -> str:
    shown = "" if text is None else f'<div class="text" dir="auto">{escape(text)}</div>'
    return f'<div class="name">{escape(name)}</div>{shown}'
