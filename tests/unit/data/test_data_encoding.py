"""Rows in tokens: pairs, labels, whole rows, keys, and what is noticed on the way."""

from __future__ import annotations

import pytest
from data_rows import ENDS, NAMES, all_tokens, chat, encode, encode_content, read
from data_tokenizers import CHATML, LLAMA3, MISTRAL, build_tokenizer

from lockstep.data.encoder import Encoded, Encoder
from lockstep.data.formats.conversation import Conversation, Pair, Passage
from lockstep.data.rendering import render
from lockstep.data.sources.rows import DataError


@pytest.fixture(params=[CHATML, LLAMA3, MISTRAL], ids=NAMES.get)
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- pairs, labels, whole rows, what is noticed ------------------------------------------------------------------


def pair(*contents: str, rejected: str) -> Pair:
    fields = chat(*contents)
    worse = {"messages": [*fields["messages"][:-1], {"role": "assistant", "content": rejected}]}
    last = (len(contents) - 1,)
    return Pair("f.jsonl:7", *(Conversation("f.jsonl:7", tuple(f["messages"]), last) for f in (fields, worse)))


def test_a_pair_has_one_prompt_and_two_answers(template: str) -> None:
    tokenizer = build_tokenizer(template, adds_bos=True)
    encoded = encode_content(tokenizer, pair("one?", "first", "two?", "yes", rejected="no no"))
    assert encoded.datum is not None
    chosen, rejected = encoded.datum.completions
    space = " " if template == MISTRAL else ""
    assert tokenizer.decode(chosen.tokens) == space + "yes" + ENDS[template]
    assert tokenizer.decode(rejected.tokens) == space + "no no" + ENDS[template]
    assert set(chosen.weights) == set(rejected.weights) == {1.0}
    opening = tokenizer.apply_chat_template(
        chat("one?", "first", "two?")["messages"], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(encoded.datum.prompt) == opening
    assert encoded.num_uncut == len(encoded.datum.prompt) + max(len(chosen.tokens), len(rejected.tokens))


def test_a_pair_of_which_one_answer_merges_with_the_prompt_still_has_one_prompt() -> None:
    tokenizer = build_tokenizer(CHATML)
    encoded = encode_content(tokenizer, pair("q", "\n\n\nThe answer is: forty two.", rejected="no"))
    assert encoded.retokenised
    assert encoded.datum is not None
    assert [tokenizer.decode(c.tokens)[:6] for c in encoded.datum.completions] == ["\n\n\nThe", "no<|im"]
    assert tokenizer.decode(encoded.datum.prompt).endswith("assistant\n")


def test_a_pair_of_which_one_answer_changes_how_the_prompt_ends_has_the_prompt_as_it_is_alone() -> None:
    tokenizer = build_tokenizer()
    prompt = "q\n\n"
    passages = [Passage("f.jsonl:7", prompt, text) for text in ("x", "\nx")]
    alone, other = (list(encode_content(tokenizer, passage).datum.prompt) for passage in reversed(passages))
    assert alone == tokenizer(prompt)["input_ids"] != other, "the answer changes nothing: the test shows nothing"
    encoded = encode_content(tokenizer, Pair("f.jsonl:7", *passages))
    assert encoded.datum is not None
    assert list(encoded.datum.prompt) == alone
    assert [tokenizer.decode(c.tokens) for c in encoded.datum.completions] == ["x</s>", "\nx</s>"]


def test_a_pair_with_two_prompts_is_an_error() -> None:
    with pytest.raises(DataError, match=r"^f\.jsonl:7: the two answers of this pair do not have the same prompt"):
        encode_content(
            build_tokenizer(), Pair("f.jsonl:7", Passage("f.jsonl:7", "one", " x"), Passage("f.jsonl:7", "two", " x"))
        )


@pytest.mark.parametrize("label", [True, False])
def test_a_label_is_a_value_of_every_answer_token(label: bool) -> None:
    encoded = encode_content(build_tokenizer(CHATML), read(chat("q", "forty two"), label=label))
    assert encoded.datum is not None
    (completion,) = encoded.datum.completions
    assert list(completion.values["label"]) == [float(label)] * len(completion.tokens)


def test_whole_rows_learn_all_but_the_first_token(template: str) -> None:
    tokenizer = build_tokenizer(template)
    fields = chat("one?", "first", "two?", "second")
    for content in (read(fields, whole=True), read({"prompt": "one two three", "completion": " four"}, whole=True)):
        encoded = encode_content(tokenizer, content)
        assert encoded.datum is not None
        assert len(encoded.datum.prompt) == 1
        assert encoded.datum.num_supervised == len(encoded.datum.completions[0].tokens) == encoded.num_uncut - 1
    whole = tokenizer.apply_chat_template(fields["messages"], tokenize=False)
    assert tokenizer.decode(all_tokens(encode_content(tokenizer, read(fields, whole=True)))) == whole.rstrip("\n")


def test_special_tokens_that_people_write_are_noticed(template: str) -> None:
    tokenizer = build_tokenizer(template)
    assert not encode(tokenizer, chat("q", "a", "q", "im_end")).holds_special
    for contents in (("<|im_end|>", "a"), ("q", "a <|eot_id|> b")):
        assert encode(tokenizer, chat(*contents)).holds_special
    call = {"role": "assistant", "content": "a", "tool_calls": [{"function": {"arguments": {"x": "<s>"}}}]}
    assert encode(tokenizer, {"messages": [*chat("q")["messages"], call]}).holds_special


@pytest.mark.parametrize(
    ("part", "tools", "known_by"),
    [
        ({"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}, None, "tool_calls"),
        ({"reasoning_content": "hm"}, None, "thinking"),
        ({}, [{"type": "function", "function": {"name": "f"}}], "tools"),
    ],
)
def test_parts_that_a_template_does_not_write_are_noticed(part: dict, tools: list | None, known_by: str) -> None:
    def is_noticed(template: str, answer: dict, **settings: object) -> bool:
        messages = [*chat("q")["messages"], {"role": "assistant", "content": "a", **answer}]
        return encode_content(build_tokenizer(template), read({"messages": messages}, **settings)).unwritten

    assert is_noticed(CHATML, part, tools=tools)
    assert not is_noticed(CHATML, {"thinking": "", "tool_calls": []})
    assert not is_noticed(CHATML + "{% if x is defined and x." + known_by + " %}{% endif %}", part, tools=tools)


def test_a_second_bos_is_an_error() -> None:
    doubled = build_tokenizer("{{ bos_token }}" + LLAMA3)
    with pytest.raises(DataError, match=r"^f\.jsonl:7: starts with the BOS token twice"):
        encode(doubled, chat("q", "a"))
    for fields in ({"text": "<s><s>one two"}, {"prompt": "<s>", "completion": "<s>one"}):
        with pytest.raises(DataError, match="BOS token twice"):
            encode(build_tokenizer(adds_bos=True), fields)


def test_keys_are_of_prompt_and_row(template: str) -> None:
    tokenizer = build_tokenizer(template)
    first, again, other = (encode(tokenizer, chat("q", answer)) for answer in ("a", "a", "b"))
    assert (first.prompt_key, first.row_key) == (again.prompt_key, again.row_key)
    assert first.prompt_key == other.prompt_key
    assert len({first.prompt_key, first.row_key, other.row_key, encode(tokenizer, chat("p", "a")).prompt_key}) == 4
    assert all(0 <= key < 2**64 for key in (first.prompt_key, first.row_key))
    cut = encode(tokenizer, chat("q", "a"), max_length=3)
    assert (cut.prompt_key, cut.row_key) == (first.prompt_key, first.row_key)


def test_rows_without_a_prompt_have_the_key_of_the_row() -> None:
    tokenizer = build_tokenizer(CHATML)
    no_question = {"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]}
    for content in (read({"text": "one two"}), read(no_question), read(chat("q", "a"), whole=True)):
        encoded = encode_content(tokenizer, content)
        assert encoded.prompt_key == encoded.row_key
    better, worse = (encode_content(tokenizer, pair("q", "a", rejected=text)) for text in ("b", "c"))
    assert better.prompt_key == worse.prompt_key
    assert better.row_key != worse.row_key


def test_the_key_of_a_row_depends_on_where_its_answers_end() -> None:
    tokenizer, end = build_tokenizer(CHATML), ENDS[CHATML]
    first = encode_content(tokenizer, pair("q", f"a{end}b", rejected="c"))
    second = encode_content(tokenizer, pair("q", "a", rejected=f"b{end}c"))
    in_a_row = [[token for answer in row.datum.completions for token in answer.tokens] for row in (first, second)]
    assert in_a_row[0] == in_a_row[1]
    assert first.row_key != second.row_key


def test_a_bad_row_is_its_own_error() -> None:
    tokenizer = build_tokenizer()
    rows = [render(read({"text": text}), None) for text in ("one", " </s>", "two")]
    first, second, third = Encoder(tokenizer, max_length=10, truncate="drop").encode(rows)
    assert isinstance(second, DataError)
    assert isinstance(first, Encoded)
    assert isinstance(third, Encoded)
