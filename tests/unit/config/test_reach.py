"""Everything that a configuration can name is classified, and what is not is refused."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from lockstep.config import ConfigError, RunConfig, resolve_config
from lockstep.config import reach as reaches
from lockstep.config.reach import REACHES, open_keys, reach_of, texts_of
from lockstep.config.schema import Section


def config(**sections: Any) -> RunConfig:
    return resolve_config({"model": "some/model", "data": {"train": "some/rows"}, **sections})


def found(**sections: Any) -> dict[str, tuple[str, str]]:
    return {text.key: (text.reach, text.value) for text in texts_of(config(**sections))}


def test_every_key_that_takes_text_is_classified() -> None:
    assert open_keys() - REACHES.keys() == set(), "say in lockstep/config/reach.py what these lead to"
    switches = {"model.trust_remote_code", "data.image_urls"}
    assert REACHES.keys() - open_keys() == switches, "these keys are gone, or take no text"


def test_text_is_found_however_deep_the_schema_holds_it() -> None:
    class Inner(Section):
        word: str | None = None
        choice: Literal["a", "b"] = "a"
        number: int = 0

    class Outer(Section):
        plain: str
        either: Literal["auto"] | tuple[str, ...] = "auto"
        anything: dict[str, Any]
        named: dict[str, float]
        chosen: dict[Literal["x"], float]
        inner: Inner | None = None
        entries: tuple[Inner, ...] = ()

    names = {"plain", "either", "anything", "named", "inner.word", "entries.word"}
    assert open_keys(Outer) == names


def test_a_text_that_nobody_classified_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    list(texts_of(config(evaluation={"encoder": "some/encoder"})))
    monkeypatch.delitem(reaches.REACHES, "evaluation.encoder")
    with pytest.raises(ConfigError, match=r"^evaluation\.encoder: it is not known what this text leads to"):
        list(texts_of(config(evaluation={"encoder": "some/encoder"})))


def test_texts_are_found_with_what_they_lead_to() -> None:
    assert found()["model.path"] == ("model", "some/model")
    assert found()["data.train.path"] == ("rows", "some/rows")
    source = {"path": "some/rows", "converter": "mine:convert", "columns": {"prompt": "question"}}
    texts = list(texts_of(config(data={"train": [source], "chat_template": "none"})))
    assert ("data.train.converter", "code", "mine:convert") in texts
    assert {text.value for text in texts if text.key == "data.train.columns"} == {"prompt", "question"}
    assert "data.chat_template" not in {text.key for text in texts}  # a choice of ours, not a file
    assert "model.trust_remote_code" not in found()
    assert found(model={"path": "m", "trust_remote_code": True})["model.trust_remote_code"] == ("code", "true")


@pytest.mark.parametrize(
    "reward", ["mine:score", ["numeric", "mine:score"], {"mine:score": 1.0}, {"name": "mine:score"}]
)
def test_rewards_and_environments_of_others_are_code(reward: Any) -> None:
    names = found(algorithm={"kind": "grpo", "reward": reward, "environment": "mine:World"})
    assert names["algorithm.reward.name"] == ("code", "mine:score")
    assert names["algorithm.environment"] == ("code", "mine:World")
    built_in = found(algorithm={"kind": "grpo", "reward": ["exact", "environment"], "environment": "calculator"})
    assert not [key for key, (reach, _) in built_in.items() if reach == "code"]


def test_what_is_scored_by_evaluating_it_is_code() -> None:
    task = found(data={"train": "reasoning_gym:n_queens"}, algorithm={"kind": "grpo", "reward": "reasoning_gym"})
    assert task["algorithm.reward.name"] == ("code", "reasoning_gym")
    assert task["data.train.path"] == ("code", "reasoning_gym:n_queens")


def test_short_forms_have_the_reach_of_what_they_stand_for() -> None:
    assert (reach_of("model"), reach_of("data.train"), reach_of("data.test.path")) == ("model", "rows", "rows")
    assert reach_of("optim") is None


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"algorithm": {"kind": "grpo", "reward": "builtins:exec"}}, "builtins is a module of Python itself"),
        ({"algorithm": {"kind": "grpo", "reward": [{"name": "os.path:exists"}]}}, "os is a module of Python itself"),
        ({"algorithm": {"kind": "grpo", "reward": "nice"}}, "'nice' is unknown: use exact, numeric"),
        ({"algorithm": {"kind": "grpo", "reward": "a:b:c"}}, "write module:name"),
        ({"algorithm": {"kind": "grpo", "reward": "a/b:c"}}, "write module:name"),
        ({"algorithm": {"kind": "grpo", "reward": "exact", "environment": "pty:spawn"}}, "pty is a module of Python"),
        ({"algorithm": {"kind": "grpo", "reward": "exact", "environment": "chess"}}, "'chess' is unknown: use calc"),
        ({"data": {"train": "some/rows", "converter": "os:system"}}, "os is a module of Python itself"),
        ({"data": {"train": [{"path": "a/b", "converter": "code:interact"}]}}, "code is a module of Python itself"),
        ({"data": {"train": "some/rows", "converter": "convert"}}, "write module:function"),
    ],
)
def test_code_is_named_as_module_and_function_of_the_users_own(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    assert words in str(caught.value)
    assert ", or: " not in str(caught.value), "one mistake, one sentence"
