"""The table and the page of an evaluation, and the shell of every page."""

from __future__ import annotations

import re
from typing import Any

from lockstep.reports.evaluation import MOST_ROWS, WORST_ROWS, format_score, report_page, score_rows
from lockstep.reports.page import page


def results(num_rows: int = 2, **metrics: tuple[float, ...]) -> dict[str, Any]:
    """Of as many models as there are values of each metric; row 1 is cut, and its answer is markup."""
    metrics = metrics or {"loss": (2.0, 1.0), "exact_match": (0.25, 0.5)}
    names = [f"model-{i}" for i in range(len(next(iter(metrics.values()))))]
    models = [
        {"name": name, "source": f"folder/{name}", "kind": "model", "answers_cut": 1, "standard_errors": {}}
        | {"metrics": {metric: values[i] for metric, values in metrics.items()}}
        for i, name in enumerate(names)
    ]
    rows = []
    for number in range(num_rows):
        answer = {
            "text": f"answer {number}",
            "finish_reason": "stop",
            "scores": {"exact_match": 1.0},
            "loss": number / 7,
        }
        if number == 1:
            answer |= {"text": "<script>alert(1)</script>", "finish_reason": "length", "scores": {"exact_match": 0.0}}
        found = dict.fromkeys(names, answer)
        question = [{"role": "user", "content": f"question {number} & more"}]
        rows.append({"origin": f"f:{number + 1}", "question": question, "reference": f"ref {number}", "models": found})
    shown = {"data": "test.jsonl", "num_rows": num_rows, "metrics": list(metrics), "models": models, "rows": rows}
    options = {"max_tokens": 16, "temperature": 0.0}
    return {**shown, "options": options, "warnings": ["1 < 2"], "created_at": "now"}


def best_of(line: Any) -> list[bool]:
    return [cell.best for cell in line.cells]


def test_the_best_of_each_line_is_marked():
    lines = {line.metric: line for line in score_rows(results(loss=(2.0, 1.0, 1.0), rouge1=(0.2, 0.1, 0.3)))}
    assert best_of(lines["loss"]) == [False, True, True]
    assert best_of(lines["rouge1"]) == [False, False, True]


def test_nothing_is_best_of_one_or_of_equals():
    assert best_of(score_rows(results(loss=(2.0,)))[0]) == [False]
    assert best_of(score_rows(results(loss=(2.00001, 2.00002)))[0]) == [False, False]


def test_a_model_without_a_metric_has_a_dash():
    given = results()
    del given["models"][1]["metrics"]["loss"]
    given["models"][0]["standard_errors"] = {"exact_match": 0.125}
    lines = {line.metric: line for line in score_rows(given)}
    assert [cell.text for cell in lines["loss"].cells] == ["2.0000", "-"]
    assert best_of(lines["loss"]) == [False, False]
    assert [cell.error for cell in lines["exact_match"].cells] == ["± 12.5 %", ""]


def test_scores_as_people_read_them():
    assert format_score("numeric", 0.375) == "37.5 %"
    assert format_score("perplexity", 2.25) == "2.25"
    assert format_score("perplexity", 3e9) == "3.00e+09"
    assert format_score("bertscore_f1", 0.87654) == "0.877"


def test_the_page_shows_rows_and_escapes_what_models_write():
    html = report_page(results())
    assert html.count('<article class="row"') == 2
    assert "<script>alert(1)</script>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "question 0 &amp; more" in html
    assert "1 &lt; 2" in html
    assert html.count('class="mark cut"') == 2
    assert html.count("exact match: wrong") == 2
    assert html.count("exact match: right") == 2


def test_the_page_needs_nothing_from_outside():
    html = report_page(results())
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://", html)


def test_of_many_rows_the_first_and_the_worst_are_shown():
    total = MOST_ROWS + WORST_ROWS + 100
    html = report_page(results(total))
    shown = [int(n) for n in re.findall(r"<span>f:(\d+)</span>", html)]
    assert shown[:MOST_ROWS] == list(range(1, MOST_ROWS + 1))
    assert shown[MOST_ROWS:] == list(range(total, total - WORST_ROWS, -1))  # the loss grows with the number
    assert len(re.findall("<article", report_page(results(MOST_ROWS)))) == MOST_ROWS


def test_rows_with_a_loss_and_no_answers():
    given = results()
    for row in given["rows"]:
        row["models"] = {name: {"loss": 1.5} for name in row["models"]}
        row |= {"question": "", "reference": None}
    html = report_page(given)
    assert "loss 1.5000" in html
    assert 'class="asked"' not in html


def test_the_shell_of_a_page():
    html = page("A <title>", "<p>body {braces}</p>", ".own { color: red }")
    assert html.startswith("<!doctype html>")
    assert "<h1>A &lt;title&gt;</h1>" in html
    assert "<p>body {braces}</p>" in html
    assert ".own { color: red }" in html
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html
