"""Settings in which the layers of a model differ."""

from __future__ import annotations

import transformers

from lockstep.config.layer_values import layer_values


def test_values_are_those_of_the_layers_each_once() -> None:
    gemma = transformers.Gemma4TextConfig(
        num_hidden_layers=6, head_dim=32, global_head_dim=64, num_key_value_heads=4, num_global_key_value_heads=2,
        attention_k_eq_v=True,
    )  # fmt: skip
    assert layer_values(gemma, "head_dim") == [32, 64]
    assert layer_values(gemma, "num_key_value_heads") == [4, 2]
    assert layer_values(gemma, "hidden_size") == [gemma.hidden_size]
    assert layer_values(transformers.LlamaConfig(num_attention_heads=8), "num_attention_heads") == [8]
    assert layer_values(transformers.MambaConfig(), "num_attention_heads") == []
