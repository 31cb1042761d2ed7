"""Configurations of other tools: the error says what their keys are called here."""

from __future__ import annotations

import pytest

from lockstep.config import ConfigError, parse_config
from lockstep.config.loading import known_keys
from lockstep.config.other_tools import OTHER_TOOLS_KEYS

AXOLOTL = """
plugins: [something]
base_model: org/model
adapter: lora
lora_r: 32
datasets: [{path: rows.jsonl, type: chat_template}]
sequence_len: 4096
num_epochs: 3
"""


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, source="axolotl.yaml", overrides=overrides)
    return str(caught.value)


def test_a_whole_file_of_another_tool_is_answered_at_once():
    said = refusal(AXOLOTL)
    assert said.startswith("axolotl.yaml:2: unknown key 'plugins'; the top level knows name, ")
    for pair in ("base_model is model.path", "lora_r is lora.rank", "num_epochs is optim.epochs"):
        assert f"{pair};" in f"{said};"


def test_one_key_of_another_tool_also_inside_a_section():
    ours = "model: org/model\ndata: {train: rows.jsonl}"
    assert "unknown key 'max_seq_length'; keys of other tools" in refusal(ours, "max_seq_length=3")
    assert "unknown key 'optim.lr'; it is optim.learning_rate here" in refusal(ours, "optim.lr=3")
    assert "unknown key 'model.flash_attn'; it is not needed here" in refusal(ours, "model.flash_attn=true")


def test_every_answer_names_a_key_that_exists_and_none_hides_one_of_ours():
    known = set(known_keys())
    leaves = {key.rsplit(".", 1)[-1] for key in known}
    for theirs, ours in OTHER_TOOLS_KEYS.items():
        assert theirs not in leaves
        named = [word.strip(",:()") for word in ours.split() if "." in word]
        assert set(named) <= known, theirs
        assert named or ours.startswith(("a lora section", "not needed", "lockstep train --run-dir")), theirs
