"""The parts of `lockstep verify` that need no second process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers

from lockstep.config import ConfigError, Degrees, RunConfig, load_config
from lockstep.model.load import load_hf_config
from lockstep.model.policy import setting_by_layer
from lockstep.types import Completion, Datum, OptimStep
from lockstep.verification import checking as compare
from lockstep.verification.checking import tensor_errors
from lockstep.verification.job import agreed_refusal, record_failure
from lockstep.verification.layouts import ONE, ModelLimits, default_layouts, own_layout, parse_layouts, problem
from lockstep.verification.plain_loop import StepValues, plain_batches, plain_cross_entropy, run_plain_loop
from lockstep.verification.plain_optimizers import PlainOptimizer, step_number
from lockstep.verification.reduced import (
    Reduction,
    build_reduced,
    choose_layer_types,
    choose_limit,
    choose_reduction,
    find_length_limits,
    find_limits,
)
from lockstep.verification.sample import (
    SampleBatch,
    choose_budgets,
    compile_rows,
    distinct_tokens,
    renumber,
    shorten,
    take_batches,
)
from lockstep.verification.worker import is_refusal

LIMITS = ModelLimits(num_layers=6, num_heads=8, num_key_value_heads=4)


def configure(folder: Path, model: Path, **changes: Any) -> RunConfig:
    return load_config(tiny.write_config(folder, model, **changes))


# --- layouts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> RunConfig:
    return configure(tmp_path, tiny_model)


def test_layouts_are_written_and_named(config: RunConfig) -> None:
    layouts = parse_layouts("shard=2, tensor=2; pipeline=2,schedule=interleaved;shard=4,keep_parameters=true;", config)
    names = ["shard 2 x tensor 2", "pipeline 2 (interleaved)", "shard 4 (keep_parameters)"]
    assert [layout.name for layout in layouts] == names
    assert layouts[0].degrees == Degrees(shard=2, tensor=2)
    assert [layout.num_stages for layout in layouts] == [1, 4, 1]
    assert ONE.name == "one rank"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shard", "'shard' is not understood"),
        ("colour=2", "'colour=2' is not understood"),
        ("compression=bf16", "is not understood"),
        ("shard=0", "shard is 0"),
        ("shard=auto", "shard is 'auto'"),
        ("pipeline=2,schedule=fast", "schedule"),
        (" ; ", "names none"),
    ],
)
def test_a_layout_that_is_not_understood_is_an_error(config: RunConfig, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="--layouts") as error:
        parse_layouts(text, config)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tensor=4", ""),
        ("tensor=8", "4 key-value heads"),
        ("tensor=3", "8 attention heads"),
        ("pipeline=4,schedule=interleaved", "8 stages"),
        ("pipeline=6", ""),
        ("context=8", ""),
        ("tensor=2,context=8", "parallel.context 8"),
    ],
)
def test_what_the_model_cannot_do_is_known_before(config: RunConfig, text: str, said: str) -> None:
    (layout,) = parse_layouts(text, config)
    found = problem(layout, LIMITS)
    assert (said in found) if said else not found


def test_the_default_set_is_what_fits_with_the_own_layout_first(tmp_path: Path, tiny_model: Path) -> None:
    config = configure(tmp_path, tiny_model, parallel={"shard": 2, "tensor": 2}, launch={"procs": 4})
    layouts, notes = default_layouts(config, LIMITS, 2)
    assert [layout.name for layout in layouts] == [
        "shard 2 x tensor 2",
        "replicate 2",
        "shard 2",
        "tensor 2",
        "context 2",
        "pipeline 2 (1f1b)",
        "pipeline 2 (interleaved)",
    ]
    assert not notes
    more, _ = default_layouts(config, LIMITS, 4)
    assert len(more) == 12
    assert len(set(more)) == 12


def test_layouts_that_do_not_fit_the_model_are_left_out_and_named(config: RunConfig) -> None:
    limits = ModelLimits(2, 9, 3, not_pipeline="no plan")
    layouts, notes = default_layouts(config, limits, 2)
    assert [layout.name for layout in layouts] == ["replicate 2", "shard 2"]
    assert len(notes) == 4
    assert "tensor 2" in notes[0]
    assert "9 attention heads" in notes[0]
    assert "no plan" in notes[2]


def test_an_own_layout_for_many_machines_is_made_small(tmp_path: Path, tiny_model: Path) -> None:
    config = configure(tmp_path, tiny_model, parallel={"shard": 16, "tensor": 4}, launch={"procs": 64})
    assert own_layout(config).name == "shard 16 x tensor 4"
    layouts, notes = default_layouts(config, LIMITS, 2)
    assert layouts[0].name == "shard 2 x tensor 2"
    assert "64 processes" in notes[0]


# --- the sample -----------------------------------------------------------------------------------------------------


def test_a_long_row_keeps_what_is_learned() -> None:
    weights = [0.0] * 50 + [1.0] * 50
    short = shorten(Datum(list(range(100)), [Completion(list(range(100, 200)), weights)], "a:1"), max_tokens=20)
    assert list(short.prompt) == list(range(90, 100))
    assert list(short.completions[0].tokens) == list(range(148, 158))
    assert list(short.completions[0].weights) == [0.0] * 2 + [1.0] * 8
    assert short.origin == "a:1"


def test_different_tokens_stay_different() -> None:
    batch = [Datum([900, 5], [Completion([70_000, 5], [0.0, 1.0])])]
    tokens = distinct_tokens([batch])
    assert tokens == [5, 900, 70_000]
    (renumbered,) = renumber(batch, tokens)
    assert renumbered.prompt == [1, 0]
    assert renumbered.completions[0].tokens == [2, 0]


def test_a_micro_batch_has_room_for_two_documents() -> None:
    batch = [Datum([1] * n, [Completion([1], [1.0])]) for n in (3, 9, 5)]
    assert choose_budgets([batch, batch[:1]]) == [10 + 6, 10 + 6]


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": {"samples": 5}},
        {"batch": {"samples": 48}},  # the second batch is of the next epoch
        {"batch": {"samples": 30}},  # the second batch is what is left
        {"batch": {"samples": None, "tokens": 300}},
        {"batch": {"samples": None, "tokens": 300}, "data": {"shuffle": False}},
    ],
    ids=str,
)
def test_batches_counted_by_hand_are_those_of_training(
    tmp_path: Path, tiny_model: Path, changes: dict[str, Any]
) -> None:
    config = configure(tmp_path, tiny_model, **changes)
    rows = compile_rows(config)
    ours, plain = take_batches(rows, config), plain_batches(rows, config)
    assert [(t.names, t.cursor) for t in ours] == [(t.names, t.cursor) for t in plain]
    assert len(ours) == 2
    assert ours[0].names != ours[1].names


# --- the reduced model ----------------------------------------------------------------------------------------------


def test_a_reduced_model_keeps_heads_and_remainders(tmp_path: Path) -> None:
    model = tiny.write_model(
        tmp_path / "model",
        hidden_size=288,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=903,
        num_hidden_layers=6,
        vocab_size=291,
        tie_word_embeddings=True,
    )
    config = configure(tmp_path, model, lora={"rank": 4, "dropout": 0.5})
    reduction = choose_reduction(config, list(range(100)), num_layers=4)
    assert reduction == Reduction(num_layers=4, num_tokens=107, padding=0, narrow=True)
    found = build_reduced(config, reduction)
    settings = found.config
    assert (settings.num_attention_heads, settings.num_key_value_heads) == (9, 3)
    assert settings.hidden_size == 72
    assert settings.intermediate_size % 16 == 903 % 16
    assert settings.tie_word_embeddings
    assert {p.dtype for p in found.parameters()} == {torch.float64}
    assert all(float(p.detach().abs().max()) > 0 for name, p in found.named_parameters() if "lora_B" in name)
    assert not any(isinstance(m, torch.nn.Dropout) and m.p for m in found.modules())
    again = dict(build_reduced(config, reduction).named_parameters())
    assert all(torch.equal(p, again[name]) for name, p in found.named_parameters())
    limits = find_limits(config, reduction)
    assert limits == ModelLimits(6, 9, 3)


def test_layers_keep_settings_of_their_own_in_a_reduced_model(tmp_path: Path) -> None:
    """As in Gemma 4: its configuration does not say the size of a head, which differs from layer to layer."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    settings = {"num_hidden_layers": 8, "hidden_size": 256, "vocab_size": 291, "head_dim": 64, "layer_types": kinds * 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size_per_layer_input": 291}
    own = {3: {"head_dim": 128, "num_key_value_heads": 1}, 7: {"head_dim": 128, "num_key_value_heads": 1}}
    small = {"hidden_size_per_layer_input": 8, "intermediate_size": 512}
    architecture = transformers.Gemma4TextConfig(**settings, **heads, **small, per_layer_config=own)
    model = tiny.write_model(tmp_path / "model")
    architecture.save_pretrained(model)
    config = configure(tmp_path, model)
    reduction = choose_reduction(config, list(range(100)), num_layers=2)
    assert reduction.narrow
    found = build_reduced(config, reduction).config
    assert found.layer_types == ["sliding_attention", "full_attention"]
    assert setting_by_layer(found, "head_dim") == [8, 16]
    assert setting_by_layer(found, "num_key_value_heads") == [2, 1]
    limits = find_limits(config, reduction)
    assert (limits.num_layers, limits.num_heads, limits.num_key_value_heads) == (8, 4, 1)


def test_a_model_that_cannot_be_narrowed_is_only_made_shallow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.verification import reduced

    model = tiny.write_model(tmp_path / "model", hidden_size=256, num_hidden_layers=6)
    config = configure(tmp_path, model)
    monkeypatch.setattr(reduced, "_HEAD_DIM", 7)  # rotary embeddings need an even one
    reduction = choose_reduction(config, list(range(100)), num_layers=4)
    assert not reduction.narrow
    assert build_reduced(config, reduction).config.hidden_size == 256


def test_limits_by_length_lie_between_the_sampled_texts(tmp_path: Path) -> None:
    assert choose_limit([40, 50, 60, 60]) == 50
    assert choose_limit([64] * 5) == 63
    assert choose_limit([30, *[64] * 9]) == 30
    assert choose_limit([3, 4]) == 4
    factors = {"short_factor": [float(i) for i in range(16)], "long_factor": [2.0 * i for i in range(16)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    shape = {**tiny.build_model().config.to_dict(), "hidden_size": 128, "max_position_embeddings": 131072}
    shape |= {"rope_parameters": rope, "original_max_position_embeddings": 4096, "sliding_window": 2047}
    del shape["head_dim"], shape["model_type"]
    folder = tmp_path / "model"
    transformers.Phi3ForCausalLM(transformers.Phi3Config(**shape)).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    config = configure(tmp_path, folder)
    reduction = choose_reduction(config, list(range(100)), num_layers=2, limit=40)
    assert reduction.narrow
    text = build_reduced(config, reduction).config
    assert (text.sliding_window, text.rope_parameters["original_max_position_embeddings"]) == (40, 40)
    assert text.max_position_embeddings == 40 * 32  # the ratio decides how attention is scaled
    assert text.rope_parameters["short_factor"] == [0.0, 4.0, 8.0, 12.0]
    found = find_length_limits(load_hf_config(config.model), at_least=40)
    assert found == {"sliding_window": 2047, "longrope": 4096}


def test_every_kind_of_layer_is_kept() -> None:
    types = ["sliding"] * 5 + ["full"] + ["sliding"] * 5 + ["full"]
    assert choose_layer_types(types, 4) == ["sliding", "sliding", "sliding", "full"]
    assert choose_layer_types(["a", "b"] * 6, 4) == ["a", "b", "a", "b"]


# --- the plain loop -------------------------------------------------------------------------------------------------


def test_the_plain_loop_steps_like_torch(tmp_path: Path, tiny_model: Path) -> None:
    config = configure(tmp_path, tiny_model)
    taken = plain_batches(compile_rows(config), config)
    tokens = distinct_tokens([part.data for part in taken])
    taken = [SampleBatch(part.names, part.cursor, renumber(part.data, tokens)) for part in taken]
    reduction = choose_reduction(config, tokens, num_layers=2)
    step = OptimStep(1e-2, beta2=0.99, weight_decay=0.1)
    plain = build_reduced(config, reduction)
    by_hand = PlainOptimizer(plain, step, clip_at_half=True)
    found, made = run_plain_loop(plain, taken, by_hand), by_hand.step
    assert made.max_grad_norm == pytest.approx(found[0].norm / 2)
    assert made.eps > step.eps

    model = build_reduced(config, reduction)
    named = dict(model.named_parameters())
    groups = [{"params": [p for p in named.values() if (p.ndim >= 2) == wide]} for wide in (True, False)]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99), eps=made.eps, weight_decay=0.1)
    for number, (values, part) in enumerate(zip(found, taken, strict=True), start=1):
        plain_cross_entropy(model, part.data)
        max_norm = step_number(made, number).max_grad_norm
        assert max_norm is not None
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), max_norm)
        assert float(norm) == pytest.approx(values.norm, rel=1e-12)
        assert (float(norm) > max_norm) == (number == 1), "the first gradient is clipped, and no other"
        optimizer.step()
        optimizer.zero_grad()
        assert max(tensor_errors({n: p.detach() for n, p in named.items()}, values.weights).values()) < 1e-12


# --- the comparison -------------------------------------------------------------------------------------------------


def values(**changes: Any) -> StepValues:
    settings: dict[str, Any] = {
        "names": ("a:1", "a:2"),
        "cursor": 2,
        "loss": 2.0,
        "norm": 4.0,
        "logprobs": [-1.0, -2.0],
        "gradients": {"first": torch.tensor([1.0, -2.0]), "second": torch.tensor([3.0])},
        "weights": {"first": torch.tensor([0.5, 0.5]), "second": torch.tensor([0.1])},
        "reference_logprobs": [-1.5, -2.5],
        "metrics": {"margin": 0.5, "chosen_logprob": -100.0},
    }
    return StepValues(**{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"loss": 2.0 + 1e-11}, ""),
        ({"loss": 2.0 + 1e-8}, "loss (batch 2): off by 5e-09"),
        ({"loss": math.nan}, "loss (batch 2): off by inf"),
        ({"norm": 5.0}, "gradient norm (batch 2): off by 0.25"),
        ({"logprobs": [-1.0, -2.5]}, "log-probs (batch 2): off by 0.25"),
        ({"logprobs": [-1.0]}, "log-probs (batch 2): off by inf"),
        ({"reference_logprobs": [-1.5, -5.0]}, "log-probs of the reference (batch 2): off by 1"),
        ({"reference_logprobs": []}, "log-probs of the reference (batch 2): off by inf"),
        ({"metrics": {"margin": 1.0, "chosen_logprob": -100.0}, "loss": 3.0}, "margin (batch 2): off by 1"),
        ({"metrics": {"margin": 0.5}}, "chosen_logprob (batch 2): off by inf"),
        ({"names": ("a:2", "a:1")}, "rows of batch 2: place 1 has a:2 instead of a:1"),
        ({"names": ("a:1",)}, "rows of batch 2: 1 instead of 2"),
        ({"cursor": 3}, "cursor after batch 2: 3 instead of 2"),
        ({"gradients": {"first": torch.tensor([1.0, -2.0])}}, "gradient of second (batch 2): off by inf"),
        (
            {"gradients": {"first": torch.tensor([1.0, -1.0]), "second": torch.tensor([4.0])}, "norm": 5.0},
            "gradient of first (batch 2): off by 0.5",
        ),
        (
            {"weights": {"first": torch.tensor([0.5, 0.5]), "second": torch.tensor([math.nan])}},
            "weights of second after the step (batch 2): off by inf",
        ),
    ],
)
def test_the_first_difference_is_named(changes: dict[str, Any], said: str) -> None:
    errors = compare.compare([values(), values(**changes)], [values(), values()], 1e-10)
    assert errors.first == said
    assert (errors.largest > 1e-10) == (bool(said) and "rows" not in said and "cursor" not in said)


def test_the_worst_parameter_is_named() -> None:
    found = values(gradients={"first": torch.tensor([1.0, -2.2]), "second": torch.tensor([6.0])})
    errors = compare.compare([found], [values()], 1e-10)
    assert errors.worst_parameter == "second"
    assert errors.by_parameter == pytest.approx({"first": 0.1, "second": 1.0})


def test_rounding_of_a_gradient_that_is_zero_does_not_count() -> None:
    plain = {"key.bias": torch.tensor([1e-17]), "weight": torch.tensor([1.0])}
    found = {"key.bias": torch.tensor([-1e-17]), "weight": torch.tensor([1.0])}
    assert tensor_errors(found, plain)["key.bias"] < 1e-10


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_refusal_is_one_only_if_all_ranks_agree(tmp_path: Path) -> None:
    record_failure(tmp_path, 0, "cannot", refused=True)
    assert agreed_refusal(tmp_path, 2) == ""
    record_failure(tmp_path, 1, "something else", refused=True)
    assert agreed_refusal(tmp_path, 2) == ""
    record_failure(tmp_path, 1, "cannot", refused=True)
    assert agreed_refusal(tmp_path, 2) == "cannot"


def test_only_where_parallelism_is_applied_a_layout_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    from lockstep.backend.build import check_heads
    from lockstep.model.policy import Policy

    model = Policy(tiny.build_model())
    with pytest.raises(ValueError) as refused:
        check_heads(model, 3)
    assert is_refusal(refused.value)
    assert not is_refusal(RuntimeError("a fault"))
    with pytest.raises(ConfigError) as other:
        parse_layouts("", configure(tmp_path, tiny_model))
    assert not is_refusal(other.value)
