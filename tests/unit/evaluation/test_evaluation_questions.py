"""Which rows are asked, and what of them: formats, limits, samples, references."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import DataConfig
from lockstep.data.formats.conversation import Conversation, Passage
from lockstep.data.sources.rows import DataError
from lockstep.evaluation.questions import (
    ChosenRow,
    RowChoice,
    check_answerable,
    choose_rows,
    make_question,
    read_contents,
    with_system,
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def choose(path: Path, **choice: Any) -> list[ChosenRow]:
    return choose_rows(DataConfig(train=str(path)).sources("train"), RowChoice(**choice))


def contents(path: Path, has_template: bool = True, train_on: str = "last") -> list[Any]:
    return read_contents(choose(path), train_on=train_on, has_template=has_template).contents


def numbers(chosen: list[ChosenRow]) -> list[int]:
    return [int(entry.row.origin.rpartition(":")[2]) for entry in chosen]


@pytest.fixture
def many(tmp_path: Path) -> Path:
    return write(tmp_path / "many.jsonl", *({"prompt": f"p{i}", "completion": f"c{i}"} for i in range(40)))


def test_all_rows_the_first_ones_or_a_sample(many: Path):
    assert numbers(choose(many)) == list(range(1, 41))
    assert numbers(choose(many, limit=3)) == [1, 2, 3]
    sample = numbers(choose(many, sample=10, seed=1))
    assert len(sample) == 10
    assert sample == sorted(set(sample))
    assert sample == numbers(choose(many, sample=10, seed=1))
    assert sample != numbers(choose(many, sample=10, seed=2))
    assert numbers(choose(many, sample=99)) == list(range(1, 41))
    with pytest.raises(ValueError, match="either a limit or a sample"):
        choose(many, limit=1, sample=1)


def test_a_sample_favours_no_row(many: Path):
    counts = [0] * 41
    for seed in range(400):
        for number in numbers(choose(many, sample=4, seed=seed)):
            counts[number] += 1
    assert sum(counts) == 1600
    assert min(counts[1:]) > 15  # 40 expected, with a standard deviation of 6
    assert max(counts[1:]) < 70


def test_only_rows_that_are_named(many: Path):
    assert numbers(choose(many, origins={f"{many}:7", f"{many}:9"})) == [7, 9]
    with pytest.raises(DataError, match="no row to evaluate"):
        choose(many, origins={"other:1"})


def test_the_last_answer_of_a_conversation_is_the_reference(tmp_path: Path):
    turns = [user("one?"), assistant("1"), user("two?"), assistant("2")]
    tools = [{"type": "function", "function": {"name": "count"}}]
    (content,) = contents(write(tmp_path / "a.jsonl", {"messages": turns, "tools": tools}))
    question = make_question(content)
    assert (question.content, question.reference, question.tools) == (turns[:3], "2", tools)


def test_prompt_and_completion_with_and_without_a_template(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", {"prompt": "p", "completion": "c"})
    assert make_question(contents(path)[0]).content == [user("p")]
    assert make_question(contents(path, has_template=False)[0]).content == "p"


def test_of_a_pair_the_preferred_answer_counts(tmp_path: Path):
    (content,) = contents(write(tmp_path / "a.jsonl", {"prompt": "p", "chosen": "good", "rejected": "bad"}))
    assert make_question(content).reference == "good"


def test_answers_that_people_disliked_are_left_out_and_counted(tmp_path: Path):
    rows = [{"prompt": "p", "completion": c, "label": c == "good"} for c in ("good", "bad", "bad")]
    reading = read_contents(choose(write(tmp_path / "a.jsonl", *rows)), train_on="last", has_template=True)
    assert [content is None for content in reading.contents] == [False, True, True]
    assert reading.num_disliked == 2


def test_rows_without_a_question_or_a_text_are_refused_by_name():
    calls = ({"role": "assistant", "content": None, "tool_calls": [{}]},)
    for content in (
        Passage("f:1", "", "only text"),
        Conversation("f:1", (assistant("hi"),), (0,)),
        Conversation("f:1", (user("add"), *calls), (1,)),
    ):
        with pytest.raises(DataError, match=r"^f:1: there is no prompt with a text as its answer, so rouge"):
            check_answerable([make_question(content)], ["rouge"])


def test_a_system_message_of_ones_own_goes_first_and_moves_what_is_learned():
    plain = with_system(Conversation("f:1", (user("q"), assistant("a")), (1,)), "Be brief.")
    assert isinstance(plain, Conversation)
    assert plain.messages[0] == {"role": "system", "content": "Be brief."}
    assert plain.messages[plain.learned[0]] == assistant("a")
    old = Conversation("f:1", ({"role": "system", "content": "old"}, user("q"), assistant("a")), (2,))
    replaced = with_system(old, "Be brief.")
    assert isinstance(replaced, Conversation)
    assert [m["content"] for m in replaced.messages] == ["Be brief.", "q", "a"]
    assert replaced.learned == (2,)
    with pytest.raises(ValueError, match="needs a chat template"):
        with_system(Passage("f:1", "p", "a"), "Be brief.")
