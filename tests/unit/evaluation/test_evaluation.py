"""`lockstep eval` on tiny models: the loss against plain transformers, answers, files, comparing, going on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from scripted_server import scripted_server
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.config import load_config
from lockstep.evaluation import evaluate
from lockstep.inference.engine import LocalEngine
from lockstep.model.checkpoint_storage import write_tensors
from lockstep.rundir import RunDir

MARK = "<|im_start|>"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a run from `one` whose checkpoint holds the weights of `two`, and rows to ask."""
    folder = tmp_path_factory.mktemp("evaluation")
    tiny.write_model(folder / "one")
    tiny.write_model(folder / "two", seed=1)
    tiny.write_rows(folder / "test.jsonl", 10, seed=5)
    held_out = {"train": "train.jsonl", "max_length": 128, "validation_fraction": 0.25, "test": "test.jsonl"}
    config = load_config(tiny.write_config(folder, folder / "one", data=held_out))
    run = RunDir.create(folder / "run", config)
    weights = {f"model.{name}": p.detach() for name, p in tiny.build_model(seed=1).named_parameters()}
    write_tensors(run.begin_checkpoint(3), weights)
    run.commit_checkpoint(3, {})
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def plain_losses(model: Path, data: Path) -> list[tuple[float, int]]:
    """(sum of -log p, tokens) of each answer and its end of turn, in float64 by transformers alone."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    tokenizer = tiny.build_tokenizer()
    found = []
    for row in rows_of(data):
        question, answer = (message["content"] for message in row["messages"])
        before = tokenizer(f"{MARK}user\n{question}<|im_end|>\n{MARK}assistant\n", add_special_tokens=False)[
            "input_ids"
        ]
        learned = tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([[*before, *learned]])
        with torch.no_grad():
            logprobs = torch.log_softmax(network(tokens).logits[0], -1)
        picked = logprobs[len(before) - 1 : -1].gather(1, tokens[0, len(before) :, None])
        found.append((-float(picked.sum()), len(learned)))
    return found


def test_the_loss_is_that_of_plain_transformers(place: Path):
    results = evaluate(place / "one", place / "test.jsonl")
    plain = plain_losses(place / "one", place / "test.jsonl")
    (model,) = results["models"]
    loss = sum(total for total, _ in plain) / sum(count for _, count in plain)
    assert model["metrics"]["loss"] == pytest.approx(loss, abs=1e-5)
    assert model["metrics"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert model["supervised_tokens"] == sum(count for _, count in plain)
    assert model["rows_measured"] == results["num_rows"] == 10
    for row, (total, count) in zip(results["rows"], plain, strict=True):
        assert row["models"]["one"]["loss"] == pytest.approx(total / count, abs=1e-5)


def test_answers_are_those_of_the_engine(place: Path):
    results = evaluate(place / "one", place / "test.jsonl", ["exact_match"], max_tokens=9, batch_size=4)
    from lockstep.types import SamplingParams

    engine = LocalEngine.load(place / "one", device="cpu")
    rows = rows_of(place / "test.jsonl")
    prompts = [engine.encode(row["messages"][:1]) for row in rows]
    expected = [answer.text for (answer,) in engine.sample(prompts, SamplingParams(max_tokens=9))]
    assert [row["models"]["one"]["text"] for row in results["rows"]] == expected
    assert [row["reference"] for row in results["rows"]] == [row["messages"][1]["content"] for row in rows]
    assert [row["question"] for row in results["rows"]] == [row["messages"][:1] for row in rows]


def test_the_command_writes_everything_and_prints_json(place: Path, tmp_path: Path):
    out = tmp_path / "out"
    command = ["eval", str(place / "one"), str(place / "two"), "--data", str(place / "test.jsonl"), "--out", str(out)]
    command += ["--metrics", "loss, rouge", "--max-tokens", "4", "--limit", "3", "--json"]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    summary = json.loads(printed.stdout)
    results = json.loads((out / "results.json").read_text())
    assert summary == {key: value for key, value in results.items() if key != "rows"} | {"out": str(out)}
    assert [model["name"] for model in results["models"]] == ["one", "two"]
    assert results["models"][0]["metrics"].keys() == {"loss", "perplexity", "rouge1", "rouge2", "rougeL"}
    assert results["models"][0]["metrics"]["loss"] != results["models"][1]["metrics"]["loss"]
    assert len(rows_of(out / "answers.jsonl")) == 2 * 3
    page = (out / "report.html").read_text()
    assert page.count('class="row"') == 3
    assert results["rows"][2]["reference"] in page


def test_a_run_beside_the_model_it_started_from(place: Path):
    results = evaluate(place / "run", place / "test.jsonl", base=True)
    base, tuned = results["models"]
    assert (base["name"], base["kind"], tuned["name"], tuned["kind"]) == ("one (base)", "model", "run", "run")
    for model, folder in ((base, "one"), (tuned, "two")):
        plain = plain_losses(place / folder, place / "test.jsonl")
        loss = sum(total for total, _ in plain) / sum(count for _, count in plain)
        assert model["metrics"]["loss"] == pytest.approx(loss, abs=1e-5)
    with pytest.raises(ValueError, match="--base compares a run"):
        evaluate(place / "one", place / "test.jsonl", base=True)


def test_the_held_out_rows_of_a_run(place: Path):
    validation = evaluate(place / "run", split="validation")
    assert validation["num_rows"] == 12
    assert len({row["origin"] for row in validation["rows"]}) == 12
    assert all("train.jsonl:" in row["origin"] for row in validation["rows"])
    test = evaluate(place / "run", split="test")
    assert [row["origin"] for row in test["rows"]] == [f"{place / 'test.jsonl'}:{i}" for i in range(1, 11)]
    with pytest.raises(ValueError, match="either a data file, or a split"):
        evaluate(place / "run")
    with pytest.raises(ValueError, match="unknown split 'train'"):
        evaluate(place / "run", split="train")
    with pytest.raises(ValueError, match="name a run, or a data file"):
        evaluate(place / "one", split="test")


def test_a_stopped_evaluation_goes_on(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = {"max_tokens": 5, "batch_size": 2, "temperature": 1.0, "seed": 3}
    whole = evaluate(place / "one", place / "test.jsonl", ["exact_match"], out=tmp_path / "whole", **settings)
    sample, calls = LocalEngine.sample, []

    def stop_after_two(self: LocalEngine, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return sample(self, *arguments)

    monkeypatch.setattr(LocalEngine, "sample", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        evaluate(place / "one", place / "test.jsonl", ["exact_match"], out=tmp_path / "out", **settings)
    kept = (tmp_path / "out" / "answers.jsonl").read_text().splitlines(keepends=True)
    assert len(kept) == 4
    (tmp_path / "out" / "answers.jsonl").write_text("".join(kept[:3]) + kept[3][:20])  # killed while writing
    again = evaluate(place / "one", place / "test.jsonl", ["exact_match"], out=tmp_path / "out", **settings)
    assert len(calls) == 3 + 4  # of five batches, one was there and half of another
    assert again["rows"] == whole["rows"]
    assert len(rows_of(tmp_path / "out" / "answers.jsonl")) == 10
    evaluate(place / "one", place / "test.jsonl", ["rouge"], out=tmp_path / "out", **settings)
    assert len(calls) == 7  # another metric on the same answers


def test_answers_of_another_evaluation_are_not_taken(place: Path, tmp_path: Path):
    def ask(model: str = "one", **changes: Any) -> None:
        settings = {"max_tokens": 3, "limit": 2, **changes}
        evaluate(place / model, place / "test.jsonl", ["exact_match"], out=tmp_path / "out", **settings)

    ask()
    with pytest.raises(ValueError, match=r"other settings \(max_tokens\): name another --out"):
        ask(max_tokens=4)
    with pytest.raises(ValueError, match=r"other settings \(questions\)"):
        ask(limit=3)
    with pytest.raises(ValueError, match=r"other settings \(models\)"):
        ask("two")


def test_cut_answers_and_cut_rows_are_warned_of(place: Path):
    results = evaluate(place / "one", place / "test.jsonl", ["loss", "exact_match"], max_tokens=1, max_length=40)
    (model,) = results["models"]
    assert model["answers_cut"] > 0
    assert any(f"{model['answers_cut']} of 10 answers were cut at 1 tokens" in w for w in results["warnings"])
    assert model["rows_cut"] > 0
    assert any("to fit 40 tokens: raise --max-length" in warning for warning in results["warnings"])


def test_a_prompt_that_does_not_fit_shows_before_the_first_answer(place: Path, tmp_path: Path):
    long = {"prompt": "x" * 600, "completion": "y"}
    (tmp_path / "long.jsonl").write_text(
        json.dumps({"prompt": "a", "completion": "b"}) + "\n" + json.dumps(long) + "\n"
    )
    with pytest.raises(ValueError, match=r"long\.jsonl:2: a prompt of 6\d\d tokens: one takes 512"):
        evaluate(place / "one", tmp_path / "long.jsonl", ["exact_match"], out=tmp_path / "out")
    assert (tmp_path / "out" / "answers.jsonl").read_text() == ""


def test_plain_text_has_a_loss_and_no_answers(place: Path, tmp_path: Path):
    (tmp_path / "text.jsonl").write_text('{"text": "once upon a time"}\n')
    results = evaluate(place / "one", tmp_path / "text.jsonl")
    assert results["models"][0]["metrics"]["loss"] > 0
    with pytest.raises(ValueError, match=r"text\.jsonl:1: .*use the metric loss"):
        evaluate(place / "one", tmp_path / "text.jsonl", ["rouge"])


def test_a_reference_without_a_number_shows_before_a_model_is_loaded(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lockstep.evaluation.measurement.load_model", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=r"test\.jsonl:1: the reference has no number"):
        evaluate(place / "one", place / "test.jsonl", ["numeric"])


def test_a_served_model_beside_one_of_ours(place: Path, tmp_path: Path):
    with scripted_server() as server:
        settings = {"endpoint": server.url, "max_tokens": 3, "limit": 4, "system": "Shout."}
        server.finish_reason = "length"
        results = evaluate(place / "one", place / "test.jsonl", ["loss", "exact_match"], **settings)
        asked = [body["messages"] for _, body in server.requests]
    ours, served = results["models"]
    assert (served["name"], served["kind"], served["answers_cut"]) == ("scripted", "endpoint", 4)
    assert "loss" in ours["metrics"]
    assert served["metrics"] == {"exact_match": 0.0}
    for row in results["rows"]:
        system, question = row["question"]
        assert system == {"role": "system", "content": "Shout."}
        assert row["question"] in asked
        assert row["models"]["scripted"]["text"] == question["content"].upper()


def test_a_served_model_alone(place: Path, tmp_path: Path):
    (tmp_path / "echo.jsonl").write_text(
        '{"prompt": "go", "completion": "GO"}\n{"prompt": "no", "completion": "yes"}\n'
    )
    with scripted_server() as server:
        server.script = [(400, {}, b'{"error": {"message": "broken"}}')]
        with pytest.raises(ValueError, match=r"refused .*echo\.jsonl:1: HTTP 400: broken"):
            evaluate((), tmp_path / "echo.jsonl", ["exact_match"], endpoint=server.url, batch_size=1, raw=True)
        results = evaluate((), tmp_path / "echo.jsonl", ["exact_match"], endpoint=server.url, raw=True)
        assert server.requests[-1][0] == "/v1/completions"
        with pytest.raises(ValueError, match="an endpoint gives answers and no loss"):
            evaluate((), tmp_path / "echo.jsonl", endpoint=server.url)
    assert results["models"][0]["metrics"] == {"exact_match": 0.5}


def test_the_command_says_what_is_missing_in_one_sentence(place: Path):
    for arguments, message in (
        (["--data", "x.jsonl"], "nothing to evaluate"),
        ([str(place / "none"), "--data", "x.jsonl"], "there is no run or model"),
        ([str(place / "one"), "--data", str(place / "test.jsonl"), "--metrics", "bleu"], "unknown metric 'bleu'"),
        ([str(place / "one"), "--data", str(place / "none.jsonl")], "no such file"),
    ):
        result = CliRunner().invoke(app, ["eval", *arguments])
        assert isinstance(result.exception, ValueError)
        assert message in str(result.exception)
