"""Compiled decoding steps, as far as a CPU shows them: a stand-in for the kernel, and steps that are not captured."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lockstep.config import LoraConfig
from lockstep.inference import kv_cache
from lockstep.inference.decoder import Decoder
from lockstep.inference.joined_linear import JoinedLinears
from lockstep.inference.kv_cache import LayerShape
from lockstep.inference.token_sampling import Truncation
from lockstep.model.lora import add_lora
from lockstep.model.policy import decoder_layers

SHAPE: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "gemma2": lambda: transformers.Gemma2Config(**SHAPE, attn_logit_softcapping=2.0, sliding_window=5),
    "gpt_oss": lambda: transformers.GptOssConfig(**SHAPE, sliding_window=5, num_local_experts=4, num_experts_per_tok=2),
}


def make_model(family: str = "qwen3", *, lora: bool = False) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[family]()
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if lora:
        model = add_lora(model, LoraConfig(rank=4, alpha=8)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
    return model


class UncapturedSteps:
    """In the place of StepGraphs."""

    problem = None
    is_suspended = False
    keys: tuple[Hashable, ...] = ()

    def run(self, key: Hashable, step: Callable[[], tuple[Tensor, ...]], state: Sequence[Tensor]) -> Any:
        return step()

    def check(self) -> None: ...

    def clear(self) -> None: ...


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    sources: Tensor,
    shared: Tensor,
    covered: Tensor,
    tiles: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    rows, tokens = torch.arange(len(positions)), torch.arange(keys.shape[2])
    keys[rows, :, positions], values[rows, :, positions] = key, value
    slots = torch.where(tokens < shared[:, None], sources[:, None], rows[:, None])  # [rows, tokens]
    k, v = (cached[slots, :, tokens].transpose(1, 2) for cached in (keys, values))
    distance = positions[:, None] - tokens
    seen = (distance >= 0) & (distance < (window or keys.shape[2]))
    scores = query.unflatten(1, (keys.shape[1], -1)) @ k.transpose(2, 3) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf).flatten(1, 2)
    beside = (
        scores.new_full((*scores.shape[:2], 1), -torch.inf) if sinks is None else sinks[:, None].expand(len(k), -1, 1)
    )
    weights = torch.cat([scores, beside.to(scores.dtype)], dim=-1).softmax(-1)[..., :-1]
    return (weights.unflatten(1, (keys.shape[1], -1)) @ v).reshape(query.shape)


def compile_decoder(
    model: Any, monkeypatch: pytest.MonkeyPatch, report: Callable[[str], None] = warnings.warn
) -> Decoder:
    """As on a GPU, but for the kernel, the compiler's backend and the graphs."""
    import lockstep.inference

    stand_in = SimpleNamespace(attend=attend)
    monkeypatch.setitem(sys.modules, "lockstep.inference.decode_kernel", stand_in)
    monkeypatch.setattr(lockstep.inference, "decode_kernel", stand_in, raising=False)
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_with(f, backend="eager", **options))
    decoder = Decoder(model, fuses=False, report=report)
    decoder.graphs, decoder.by_kernel = UncapturedSteps(), True  # type: ignore[assignment]
    decoder.compile_steps()
    return decoder


def decode(decoder: Decoder, num_rows: int, length: int) -> tuple[list[list[int]], list[list[float]]]:
    with decoder.in_use():
        decoder.prepare(num_rows, length)
        prompts = [list(range(3 + row, 9 + 2 * row)) for row in range(num_rows)]
        decoder.prefill([(row, prompt[:-1]) for row, prompt in enumerate(prompts)])
        ends = [prompt[-1] for prompt in prompts]
        positions = [len(prompt) - 1 for prompt in prompts]
        decoder.slots.place(range(num_rows), ends, positions, torch.arange(num_rows))
        return decoder.launch(6, num_rows, length, Truncation(1.0)).read()


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True], ids=["full", "lora"])
def test_compiled_steps_draw_what_plain_steps_draw_and_are_compiled_once(
    monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = make_model(lora=lora)
    attention = decoder_layers(model)[0].self_attn
    before = {name: dict(module.__dict__, **module._modules) for name, module in attention.named_modules()}
    fast, plain = compile_decoder(model, monkeypatch), Decoder(model, fuses=False)
    for num_rows, length in ((3, 40), (5, 40), (7, 100)):
        tokens, logprobs = decode(fast, num_rows, length)
        expected_tokens, expected = decode(plain, num_rows, length)
        assert tokens == expected_tokens
        for ours, theirs in zip(logprobs, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
    # One for all layers, one for sampling, whatever the number of rows and the length of the cache.
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    after = {name: dict(module.__dict__, **module._modules) for name, module in attention.named_modules()}
    assert after == before, "the model is not as it was"


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_caps_sinks_and_windows_reach_the_kernel(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Without the compiler, whose part the test above shows."""
    model = make_model(family)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=1.0 if "sinks" in name else 0.3)
    fast, plain = compile_decoder(model, monkeypatch), Decoder(model, fuses=False)
    fast.compiled = fast.joined = None
    seen = []

    def record(*given: Any) -> Tensor:
        seen.append((given[-3] > 0, given[-2] > 0, given[-1] is not None))  # window, cap, sinks
        return attend(*given)

    monkeypatch.setattr(sys.modules["lockstep.inference.decode_kernel"], "attend", record)
    tokens, logprobs = decode(fast, 5, 40)
    expected_tokens, expected = decode(plain, 5, 40)
    assert tokens == expected_tokens
    assert torch.tensor(logprobs).allclose(torch.tensor(expected), atol=1e-5)
    assert set(seen) == {(window, family == "gemma2", family == "gpt_oss") for window in (True, False)}


def test_joined_layers_follow_weights_and_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(lora=True)
    fast, plain = compile_decoder(model, monkeypatch), Decoder(model, fuses=False)
    seen = []

    def compare() -> None:
        tokens, logprobs = decode(fast, 3, 40)
        assert torch.tensor(logprobs).allclose(torch.tensor(decode(plain, 3, 40)[1]), atol=1e-5)
        seen.append(str(tokens))

    compare()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data = parameter.data * 3
    compare()
    with model.disable_adapter():
        compare()
    compare()
    model.add_weighted_adapter(["default"], [2.0], "other", combination_type="linear")
    model.base_model.set_adapter(["default", "other"])  # two of one layer at once
    compare()
    assert len(set(seen)) == 4
    assert seen[1] == seen[3]


class Broken:
    """A compiler that fails."""

    def __enter__(self) -> None:
        raise RuntimeError("no such instruction\nand more")

    def __exit__(self, *_: object) -> None: ...


def test_a_model_that_does_not_compile_is_decoded_without_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    model = make_model()
    fast = compile_decoder(model, monkeypatch, said.append)
    monkeypatch.setattr(fast.compiled, "installed", Broken)
    with warnings.catch_warnings(action="error"):
        found = decode(fast, 3, 40)
        decode(fast, 3, 40)
    assert found[0] == decode(Decoder(model, fuses=False), 3, 40)[0]
    (message,) = said
    assert message.startswith("decoding steps could not be compiled (no such instruction): one of 3 rows takes ")


def test_steps_under_autocast_say_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    fast = compile_decoder(make_model(), monkeypatch, said.append)
    fast.compiled = fast.joined = None
    monkeypatch.setattr(UncapturedSteps, "is_suspended", True)
    decode(fast, 3, 40)
    (message,) = said
    assert message.startswith("decoding steps are not captured in CUDA graphs (autocast is on): one of 3 rows takes ")


GOOD = LayerShape(2, 64, 64, torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        (GOOD, None),
        (replace(GOOD, dtype=torch.float64), "it does not compute in torch.float64"),
        (replace(GOOD, value_dim=32), "keys of 64 and values of 32 in one head"),
        (replace(GOOD, key_dim=512, value_dim=512), "heads of 512 are larger than 256"),
        (replace(GOOD, sinks=True), "scores have sinks"),
    ],
)
def test_a_kernel_that_cannot_be_used_says_so(
    monkeypatch: pytest.MonkeyPatch, shape: LayerShape, problem: str | None
) -> None:
    monkeypatch.setattr(kv_cache, "find_spec", lambda name: object())
    said: list[str] = []
    decoder = Decoder(make_model(), fuses=False, report=said.append)
    decoder.graphs, decoder.shapes, decoder.by_kernel = UncapturedSteps(), {nn.Identity(): shape}, problem is None  # type: ignore[assignment]
    monkeypatch.setattr(decoder, "compile_steps", lambda: said.append("compiled"))
    decoder.choose_fast_ways(graphs=True, sharded=False, compiles=True)
    unused = f"the kernel for one new token is not used, nor are steps compiled: {problem}"
    assert said == ["compiled" if problem is None else unused]
    monkeypatch.setattr(kv_cache, "find_spec", lambda name: None)
    assert shape.kernel_problem == "Triton is not installed"


def test_a_model_that_several_processes_hold_says_that_its_steps_are_no_graphs() -> None:
    said: list[str] = []
    decoder = Decoder(make_model(), fuses=False, report=said.append)
    decoder.shapes = {}
    decoder.choose_fast_ways(graphs=True, sharded=True, compiles=True)
    assert said == ["decoding steps are no CUDA graphs: several processes hold the model together"]
    decoder.choose_fast_ways(graphs=False, sharded=True, compiles=True)
    assert len(said) == 1  # nobody asked for them


def test_layers_too_large_to_be_joined_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(kv_cache, "total_bytes", lambda device: 8 * 1000)
    fast = compile_decoder(make_model(), monkeypatch, said.append)
    assert fast.joined is None
    assert said == ["linear layers are not joined for decoding: 0.0 GiB are over an eighth of the memory"]


def test_joined_biases() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.first, model.second = nn.Linear(4, 3, bias=True), nn.Linear(4, 5, bias=False)
    joined, x = JoinedLinears(model, [[model.first, model.second]]), torch.randn(2, 4)
    expected = [model.first(x), model.second(x)]
    joined.lay_out()
    with torch.inference_mode(), joined.installed():
        assert type(model.first) is not nn.Linear
        other = model.second(x * 2)  # alone, and with another tensor
        found = [model.first(x), model.second(x)]
    assert type(model.first) is nn.Linear
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(other, model.second(x * 2))
