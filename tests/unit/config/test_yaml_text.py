"""YAML within bounds: what is refused, with its line; what is read as people mean it; what it costs."""

from __future__ import annotations

import time

import pytest

from lockstep.config import ConfigError, parse_config, resolve_config
from lockstep.config.yaml_text import REQUEST_BOUNDS, Bounds, check_tree, load_value, read_yaml

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name: x\n2020-01-01: y", "unknown key '2020-01-01'"),
        ("1: x", "<config>:1: '1' is no key: keys are words"),
        ("model: m\n? [a, b]\n: c", "<config>:2: a list or a section is no key"),
        ("true: x", "'true' is no key"),
        ("model: m\nmodel: n", "<config>:2: model was already given in line 1"),
        ("seed: " + ":".join(["1"] * 5000), "seed: Input should be a valid integer"),
        ("model: m\nseed: " + "9" * 5000, "<config>:2: not valid YAML: a number of 5,000 digits"),
        ("seed: 0x" + "f" * 5000, "a number of 5,002 digits"),
        ("seed: !!int abc", "a value is not what its tag says"),
        ("seed: !!int ''", "a value is not what its tag says"),
        ("seed: !!bool abc", "a value is not what its tag says"),
        ("name: !!timestamp abc", "the tag !!timestamp is not taken"),
        ("name: !!binary abc", "the tag !!binary is not taken"),
        ("name: !!python/object/apply:os.system [ls]", "is not taken"),
        ("[" * 5000, "nested too deeply: more than 50 levels"),
        ("{" * 5000, "nested too deeply"),
        ("- " * 5000, "nested too deeply"),
        ("? " * 5000, "nested too deeply"),
        ("&a [*a]", "nested too deeply"),
        ("name: \ud800", "half of a character"),
        ("a: b: c", "<config>:1: not valid YAML"),
        ("\0", "not valid YAML"),
        ("? " + "x" * 100_000 + "\n: 1", "no key is as long"),
        (LAUGHS, "more than 100,000 keys and values"),
        ("data: {train: [" + "1, " * 3000 + "]}", "problems more"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 10_000


def test_requests_have_narrower_bounds() -> None:
    for text, sentence in (
        (LAUGHS, "the text:2: YAML aliases"),
        ("".join(f"key-{number}: 1\n" for number in range(3000)), "more than 5,000 keys and values"),
        ("x" * 200_000, "200,000 characters"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            read_yaml(text, "the text", REQUEST_BOUNDS)
    deep: object = "x"
    for _ in range(5000):
        deep = [deep]
    for tree, sentence in (
        (deep, "nested too deeply"),
        ([1] * 10_000, "more than 5,000"),
        ({"a": [{}] * 6000}, "more"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            check_tree(tree, "the tree", REQUEST_BOUNDS)
    check_tree({"a": [1, {"b": None}]}, "the tree", REQUEST_BOUNDS)


def test_plain_values_are_what_people_mean() -> None:
    text = "a: 2020-01-01\nb: 1:30\nc: 12\nd: 0x1f\ne: -1_000\nf: yes\ng: ~\nh: 1.5\ni: '7'\nj: 017"
    assert read_yaml(text, "x")[0] == {
        "a": "2020-01-01",
        "b": "1:30",
        "c": 12,
        "d": 31,
        "e": -1000,
        "f": True,
        "g": None,
        "h": 1.5,
        "i": "7",
        "j": 15,
    }
    assert load_value("[1, {a: b}]") == [1, {"a": "b"}]
    assert read_yaml("", "x") == (None, {})
    assert read_yaml("a: &a {b: 1}\nc: {<<: *a, d: 2}", "x")[0]["c"] == {"b": 1, "d": 2}


def test_lines_of_keys() -> None:
    _, lines = read_yaml("a:\n  b: 1\n  c:\n  - d: 1\n  - d: 2\ne: 3", "x")
    assert lines == {"a": 1, "a.b": 2, "a.c": 3, "e": 6}


def test_the_longest_request_takes_little_time() -> None:
    """119 KB of keys took 7 s: every one was parsed five times by Python, and compared with every key there is."""
    texts = [
        "".join(f"k{i}: 1\n" for i in range(12_000)),
        "algorithm:\n" + "".join(f" k{i}: 1\n" for i in range(12_000)),
    ]
    texts += [f"k{'x' * 119_000}: 1", "data: {train: [" + "1," * 2000 + "]}"]
    for text in texts:
        began = time.process_time()
        with pytest.raises(ConfigError):
            parse_config(text, bounds=REQUEST_BOUNDS)
        assert time.process_time() - began < 0.5, text[:20]


def test_a_key_of_any_length_is_compared_with_none() -> None:
    with pytest.raises(ConfigError, match="no key is as long") as caught:
        resolve_config({"model": "m", "k" * 100_000: 1})
    assert len(str(caught.value)) < 500


def test_bounds_of_files_are_wide() -> None:
    rows = "".join(f"- file-{number}\n" for number in range(20_000))
    assert len(read_yaml(rows, "x")[0]) == 20_000
    with pytest.raises(ConfigError, match="more than 10 keys"):
        read_yaml(rows, "x", Bounds(1 << 20, 10))
