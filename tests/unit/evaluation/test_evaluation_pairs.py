"""`lockstep eval` on preference pairs: accuracy by a model's own log-probs, and rewards beside the reference."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from lockstep.config import load_config
from lockstep.evaluation import evaluate
from lockstep.evaluation.likelihood import PairLogprobs, reward_margins
from lockstep.model.checkpoint_storage import write_tensors
from lockstep.reports.evaluation import score_rows
from lockstep.rundir import RunDir

MARK = "<|im_start|>"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a run by dpo from it whose checkpoint holds other weights, one by sft, and pairs to judge."""
    folder = tmp_path_factory.mktemp("judged")
    tiny.write_model(folder / "one")
    tiny.write_model(folder / "two", seed=1)
    draw = random.Random(3)
    rows = []
    for _ in range(12):
        prompt, chosen, rejected = (" ".join(draw.choices(tiny.WORDS, k=draw.randint(1, 6))) for _ in range(3))
        rows.append({"prompt": prompt, "chosen": f"{chosen} yes", "rejected": f"{rejected} no"})
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_run(folder, "judged", {"kind": "dpo", "beta": 0.3})
    make_run(folder, "other-reference", {"kind": "dpo", "reference_model": str(folder / "two")})
    make_run(folder, "answered", {"kind": "sft"})
    return folder


def make_run(folder: Path, name: str, algorithm: dict[str, Any]) -> None:
    config = load_config(tiny.write_config(folder, folder / "one", algorithm=algorithm))
    run = RunDir.create(folder / name, config)
    weights = {f"model.{name}": p.detach() for name, p in tiny.build_model(seed=2).named_parameters()}
    write_tensors(run.begin_checkpoint(3), weights)
    run.commit_checkpoint(3, {})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return


def plain_pairs(seed: int, data: Path) -> list[PairLogprobs]:
    """Log-probs of both answers with their end of turn, one text at a time, by transformers alone."""
    network, tokenizer = tiny.build_model(seed=seed).double(), tiny.build_tokenizer()
    found = []
    for row in map(json.loads, data.read_text().splitlines()):
        before = tokenizer(f"{MARK}user\n{row['prompt']}<|im_end|>\n{MARK}assistant\n")["input_ids"]
        sums = []
        for side in ("chosen", "rejected"):
            learned = tokenizer(f"{row[side]}<|im_end|>")["input_ids"]
            tokens = torch.tensor([[*before, *learned]])
            with torch.no_grad():
                logprobs = torch.log_softmax(network(tokens).logits[0], -1)
            sums.append(float(logprobs[len(before) - 1 : -1].gather(1, tokens[0, len(before) :, None]).sum()))
        found.append(PairLogprobs(*sums))
    return found


def test_a_model_is_asked_which_answer_it_finds_likelier(place: Path):
    results = evaluate(place / "one", place / "test.jsonl")
    (model,) = results["models"]
    plain = plain_pairs(0, place / "test.jsonl")
    assert model["metrics"]["pair_accuracy"] == sum(p.chosen > p.rejected for p in plain) / 12
    assert 0 < model["metrics"]["pair_accuracy"] < 1
    # The loss is that of the preferred answers, as for any other file.
    assert results["rows"][0]["models"]["one"]["loss"] is not None
    assert model["metrics"].keys() == {"loss", "perplexity", "pair_accuracy"}
    assert model["supervised_tokens"] == sum(len(r["chosen"]) + 1 for r in read(place / "test.jsonl"))


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("with_base", [False, True])
def test_a_run_by_dpo_has_rewards_beside_the_model_it_started_from(with_base: bool, place: Path):
    results = evaluate(place / "judged", place / "test.jsonl", base=with_base)
    run = results["models"][-1]
    margins = reward_margins(plain_pairs(2, place / "test.jsonl"), plain_pairs(0, place / "test.jsonl"), 0.3)
    known = [margin for margin in margins if margin is not None]
    assert run["metrics"]["reward_margin"] == pytest.approx(sum(known) / 12, abs=1e-4)
    assert run["metrics"]["reward_accuracy"] == sum(m > 0 for m in known) / 12
    assert run["beta"] == 0.3
    for row, margin in zip(results["rows"], known, strict=True):
        assert row["models"]["judged"]["scores"]["reward_margin"] == pytest.approx(margin, abs=1e-4)
    if with_base:
        base = results["models"][0]
        assert base["metrics"]["reward_margin"] == 0
        lines = {line.metric: line for line in score_rows(results)}
        assert lines["pair_accuracy"].cells[0].text.endswith("%")
        assert lines["reward_accuracy"].cells[0].text == "-"


def test_another_reference_is_the_one_that_counts(place: Path):
    results = evaluate(place / "other-reference", place / "test.jsonl")
    margins = reward_margins(plain_pairs(2, place / "test.jsonl"), plain_pairs(1, place / "test.jsonl"), 0.1)
    expected = sum(margin for margin in margins if margin is not None) / 12
    assert results["models"][0]["metrics"]["reward_margin"] == pytest.approx(expected, abs=1e-4)
    assert results["models"][0]["reference"] == str(place / "two")


def test_a_run_that_learned_no_preferences_has_no_rewards(place: Path):
    (model,) = evaluate(place / "answered", place / "test.jsonl")["models"]
    assert "pair_accuracy" in model["metrics"]
    assert "reward_margin" not in model["metrics"]


def test_a_system_message_goes_in_front_of_both_answers(place: Path):
    with_system, without = (
        evaluate(place / "one", place / "test.jsonl", **options) for options in ({"system": "be brief"}, {})
    )
    assert with_system["models"][0]["metrics"]["loss"] != without["models"][0]["metrics"]["loss"]
    assert "pair_accuracy" in with_system["models"][0]["metrics"]


def test_the_page_shows_margins(place: Path, tmp_path: Path):
    evaluate(place / "judged", place / "test.jsonl", base=True, out=tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "reward margin" in page
    assert "pair accuracy" in page


def test_a_row_that_one_side_did_not_measure_has_no_margin():
    pairs = [PairLogprobs(-1.0, -2.0), None]
    assert reward_margins(pairs, [PairLogprobs(-2.0, -2.5), PairLogprobs(0, 0)], 0.5) == [0.5 * (1.0 - 0.5), None]
