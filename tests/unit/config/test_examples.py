import ast
import json
import re
from pathlib import Path

import pytest

from lockstep.config import load_config

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
CONFIGS = sorted(path for folder in (".", "sagemaker", "slurm") for path in (EXAMPLES / folder).glob("*.yaml"))
TRAIN, VALIDATION = (EXAMPLES / "data" / f"short_answers_{part}.jsonl" for part in ("train", "validation"))


def read_rows(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


def read_questions(path: Path) -> list[str]:
    return [re.sub(r"\W+", " ", row[0]["content"].lower()).strip() for row in read_rows(path)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_loads_and_finds_its_data(path):
    config = load_config(path)
    for file in (source.path for source in (*config.data.train, *config.data.validation)):
        assert Path(file).is_file(), file
    config.parallel.degrees(config.launch.procs)


def test_every_example_is_in_the_readme():
    text = (EXAMPLES / "README.md").read_text()
    for path in (*CONFIGS, *EXAMPLES.glob("*.py"), *EXAMPLES.glob("data/*.txt")):
        assert path.name in text, f"examples/README.md does not mention {path.name}"


@pytest.mark.parametrize("path", [TRAIN, VALIDATION], ids=lambda path: path.name)
def test_every_row_shows_the_one_habit(path):
    for question, answer in read_rows(path):
        assert (question["role"], answer["role"]) == ("user", "assistant")
        first, second = answer["content"].split("\n")
        assert first.endswith("."), first
        assert second.startswith("Try it: "), second
        assert len(answer["content"].split()) <= 50, answer["content"]


def test_every_pair_prefers_one_short_sentence_to_a_long_answer():
    pairs = {}
    for part in ("train", "validation"):
        text = (EXAMPLES / "data" / f"one_sentence_{part}.jsonl").read_text(encoding="utf-8")
        pairs[part] = [json.loads(line) for line in text.splitlines()]
        for pair in pairs[part]:
            assert pair.keys() == {"prompt", "chosen", "rejected"}
            assert "\n" not in pair["chosen"]
            assert len(pair["chosen"].split()) <= 25
            assert len(pair["rejected"].split()) >= 30
    assert (len(pairs["train"]), len(pairs["validation"])) == (80, 18)
    prompts = [pair["prompt"] for part in pairs.values() for pair in part]
    assert len(set(prompts)) == len(prompts)


def test_every_sum_is_right_and_none_is_in_two_files():
    seen = []
    for part in ("train", "validation"):
        text = (EXAMPLES / "data" / f"sums_{part}.jsonl").read_text(encoding="utf-8")
        for row in map(json.loads, text.splitlines()):
            terms = [int(number) for number in re.findall(r"\d+", row["prompt"])]
            assert sum(terms) == int(row["answer"])
            seen.append(tuple(terms))
    assert len(set(seen)) == len(seen) == 81


def test_no_question_occurs_twice_or_in_two_files():
    prompts = (EXAMPLES / "data" / "short_answers_prompts.txt").read_text().lower().splitlines()
    heldout = [re.sub(r"\W+", " ", line).strip() for line in prompts]
    questions = [*read_questions(TRAIN), *read_questions(VALIDATION), *heldout]
    assert len(set(questions)) == len(questions)
    assert (len(read_rows(TRAIN)), len(read_rows(VALIDATION))) == (320, 40)


def test_the_custom_loop_uses_only_public_names():
    import lockstep

    tree = ast.parse((EXAMPLES / "custom_loop.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep"):
            assert node.module == "lockstep"
            assert {alias.name for alias in node.names} <= set(lockstep.__all__)
