"""Chat templates: which text is an answer is certain, or an error."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from data_rows import ENDS, NAMES, all_tokens, chat, encode, encode_content, learned, read
from data_tokenizers import CHATML, LLAMA3, MISTRAL, build_tokenizer

from lockstep.data.chat_template import load_template
from lockstep.data.rendering import render
from lockstep.data.sources.rows import DataError


@pytest.fixture(params=[CHATML, LLAMA3, MISTRAL], ids=NAMES.get)
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


LAST_ONLY = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_GENERATION_PROMPT = CHATML.split("{% if add_generation_prompt")[0]
OTHER_PROMPT = CHATML.replace("assistant\n'", "answer\n'")


def by_number(source: str) -> str:
    """The same template with a loop over numbers, which says nothing about messages."""
    return source.replace("for m in messages %}", "for i in range(messages | length) %}{% set m = messages[i] %}")


@pytest.mark.parametrize(
    ("source", "fields", "words"),
    [
        (by_number(LAST_ONLY), chat("q", "a", "q", "b"), "message 2: the .* does not keep .* end of that answer"),
        (by_number(OTHER_PROMPT), chat("q", "a"), "message 2: the chat template of .* does not keep .* start that"),
        (OTHER_PROMPT, chat("q", "a"), "message 2: the chat template of .* where generation would start with"),
        (NO_GENERATION_PROMPT, chat("q", "a"), "ignores add_generation_prompt, so the header"),
        (by_number(NO_GENERATION_PROMPT), chat("q", "a"), "ignores add_generation_prompt, so the header"),
        (MISTRAL, {"messages": chat("q", "a")["messages"][1:]}, "cannot render .* roles must alternate"),
        (CHATML.replace("m['content']", "''"), chat("q", "a"), "nothing to learn"),
        ("{% for", chat("q", "a"), "cannot render this conversation"),
        (
            "{% for m in messages %}{% generation %}{% endgeneration %}{{ m.content }}{% endfor %}",
            chat("q", "a"),
            "tags",
        ),
        (
            by_number(CHATML.replace("{{", "{% generation %}{{", 1).replace("}}", "}}{% endgeneration %}", 1)),
            chat("q", "a"),
            "not certainly in which message",
        ),
    ],
)
def test_uncertain_templates_are_errors(source: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=rf"^f\.jsonl:7: .*{words}"):
        encode(build_tokenizer(source), fields)


def test_a_template_that_cannot_be_traced_is_rendered_up_to_each_answer(template: str) -> None:
    fields = chat("one?", "first answer", "two?", "second")
    tokenizer, other = build_tokenizer(template), build_tokenizer(by_number(template).replace("loop.index0", "i"))
    traced, rendered = encode(tokenizer, fields), encode(other, fields)
    assert all_tokens(traced) == all_tokens(rendered)
    assert learned(tokenizer, traced) == learned(other, rendered)
    # Text with the characters that mark messages is not traced either.
    odd = chat("\uf8d00:0\uf8d1", "first \uf8d0 answer")
    assert learned(tokenizer, encode(tokenizer, odd))[0].strip() == "first \uf8d0 answer" + ENDS[template]


def test_a_turn_that_holds_the_words_of_another_message_is_not_learned_with_them() -> None:
    """The template writes tool results inside the turn of the call, as some do."""
    tokenizer = build_tokenizer(
        "{% for m in messages %}{% if m.role != 'tool' %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if loop.nextitem and loop.nextitem.role == 'tool' %}{{ loop.nextitem.content }}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    messages = [*chat("q", "call")["messages"], {"role": "tool", "content": "result"}, *chat("q", "a")["messages"]]
    assert learned(tokenizer, encode(tokenizer, chat("q", "a", "q", "b"))) == ["a<|im_end|>", "b<|im_end|>"]
    with pytest.raises(DataError, match=r"message 2: .* not certain"):
        encode(tokenizer, {"messages": messages})


def test_history_that_is_written_otherwise_is_learned_as_it_is_written() -> None:
    tokenizer = build_tokenizer(LAST_ONLY)
    assert learned(tokenizer, encode(tokenizer, chat("q", "a"))) == ["<think></think>a<|im_end|>"]
    encoded = encode(tokenizer, chat("q", "a", "q", "b"))
    assert learned(tokenizer, encoded) == ["a<|im_end|>", "<think></think>b<|im_end|>"]


def test_answers_without_the_generation_prompt_are_counted() -> None:
    tokenizer = build_tokenizer(CHATML.replace("assistant\n'", "assistant\n<think>\n'"))
    encoded = encode(tokenizer, chat("q", "a", "q", "<think>\nb"))
    assert learned(tokenizer, encoded) == ["a<|im_end|>", "b<|im_end|>"]
    assert encoded.num_unprompted == 1


def test_a_template_that_changes_what_its_loop_wrote_is_not_traced() -> None:
    """Marks would keep the line break in front of the first message, which the template takes away."""
    turn = "{{ '\\n<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}"
    body = "{% set body %}{% for m in messages %}" + turn + "{% endfor %}"
    prompt = "{% endset %}{{ body | trim }}{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
    tokenizer = build_tokenizer(body + prompt)
    assert learned(tokenizer, encode(tokenizer, chat("q", "a", "q", "b"))) == ["a<|im_end|>", "b<|im_end|>"]


def test_a_message_that_is_written_twice_is_not_certain() -> None:
    tokenizer = build_tokenizer("{% for m in messages %}{{ m.content }} {% endfor %}" + CHATML)
    with pytest.raises(DataError, match=r"message 2: .* does not keep .* start that answer"):
        encode(tokenizer, chat("q", "a"))


# What is written first changes with every message, so no part of a conversation is written as in the whole.
COUNT = "{{ messages | length }}"
IN_LOOP = (
    CHATML.split("{% endfor %}")[0]
    + "{% if loop.last and add_generation_prompt %}{{ 'PROMPT' }}{% endif %}{% endfor %}"
)
TAIL = "{% if add_generation_prompt %}{{ 'PROMPT' }}{% else %}{{ eos_token }}{% endif %}"


@pytest.mark.parametrize(
    ("source", "num_unprompted"),
    [
        (IN_LOOP.replace("PROMPT", "<|im_start|>assistant\\n"), 0),
        (IN_LOOP.replace("PROMPT", "<|im_start|>assistant\\n<think>"), 2),
        (NO_GENERATION_PROMPT + TAIL.replace("PROMPT", "<|im_start|>assistant\\n"), 0),
        (NO_GENERATION_PROMPT + TAIL.replace("PROMPT", "<|im_start|>assistant\\n<think>"), 2),
    ],
)
def test_the_generation_prompt_is_found_wherever_it_is_written(source: str, num_unprompted: int) -> None:
    tokenizer = build_tokenizer(COUNT + source)
    encoded = encode(tokenizer, chat("q", "a", "q", "b"))
    assert learned(tokenizer, encoded) == ["a<|im_end|>", "b<|im_end|>"]
    assert encoded.num_unprompted == num_unprompted


def test_a_fixed_date_changes_nothing_else() -> None:
    source = "  {% if true %}\n  x{% endif %}{% set year = strftime_now('%Y') %}" + CHATML
    tokenizer = build_tokenizer(source)
    expected = tokenizer.apply_chat_template(chat("q", "a")["messages"], tokenize=False)
    assert render(read(chat("q", "a")), load_template(tokenizer, "auto", {})).variants[0].text == expected


def test_what_an_answer_says_can_be_in_any_of_its_tags() -> None:
    tag, end = "{% generation %}", "{% endgeneration %}"
    tokenizer = build_tokenizer(
        "{% for m in messages %}"
        + tag
        + "<|im_start|>"
        + end
        + ": "
        + tag
        + "{{ m.content }}<|im_end|>"
        + end
        + "{% endfor %}"
    )
    encoded = encode(tokenizer, chat("q", "a"))
    assert learned(tokenizer, encoded) == ["<|im_start|>", "a<|im_end|>"]
    with pytest.raises(DataError, match="nothing to learn"):
        encode(tokenizer, chat("q", " "))


def test_tools_have_a_template_of_their_own() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": LLAMA3}
    for tools, end in ((None, "<|im_end|>"), ([{"type": "function"}], "<|eot_id|>")):
        assert learned(tokenizer, encode_content(tokenizer, read(chat("q", "a"), tools=tools))) == ["a" + end]
    tokenizer.chat_template = {"rag": CHATML}
    with pytest.raises(DataError, match="no default"):
        load_template(tokenizer, "auto", {})


def test_template_options_reach_the_template_and_cannot_change_what_is_asked() -> None:
    tokenizer = build_tokenizer(CHATML.replace("m['content']", "m['content'] + mood"))
    rendered = render(read(chat("q", "a")), load_template(tokenizer, "auto", {"mood": "!"}))
    assert rendered.variants[0].text.endswith("a!<|im_end|>\n")
    with pytest.raises(DataError, match=r"data\.template_options: tokenize cannot be set"):
        load_template(tokenizer, "auto", {"tokenize": True})


def test_a_template_is_the_same_after_a_pickle() -> None:
    template = load_template(build_tokenizer(CHATML), "auto", {})
    before = render(read(chat("q", "a")), template)
    assert render(read(chat("q", "a")), pickle.loads(pickle.dumps(template))) == before
