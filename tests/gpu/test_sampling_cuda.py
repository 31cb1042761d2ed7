"""The local engine on a GPU: graphs give what eager steps give and never go stale; the gap to the trainer is bf16's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from lockstep.config import LoraConfig
from lockstep.inference.continuous_engine import ContinuousEngine
from lockstep.inference.engine import LocalEngine
from lockstep.inference.token_sampling import random_streams, uniforms
from lockstep.model.experts import compute_experts_exactly
from lockstep.model.lora import add_lora
from lockstep.model.policy import PackedTokens, Policy, decoder_layers
from lockstep.types import SamplingParams, TextCompletion

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SHAPE: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
PARAMS = SamplingParams(max_tokens=60, temperature=1.0, seed=1, num_samples=3, logprobs=True)


class NoText:
    """A tokenizer for answers that nobody reads."""

    eos_token_id = pad_token_id = bos_token_id = chat_template = None

    def decode(self, tokens: list[int], **options: Any) -> str:
        return ""


def make_model(family: str = "qwen3", dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Any:
    torch.manual_seed(0)
    config: Any = {
        "qwen3": lambda: transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True),
        "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=48),
        "gemma2": lambda: transformers.Gemma2Config(**SHAPE, sliding_window=48, attn_logit_softcapping=5.0),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **SHAPE, sliding_window=48, num_local_experts=4, num_experts_per_tok=2
        ),
    }[family]()
    # Drawn in float32, so that every precision begins with the same numbers.
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # distributions with a shape
    model.generation_config.eos_token_id = None
    compute_experts_exactly(model, dtype)
    return model.to(device, dtype)


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 1000, (n,), generator=generator).tolist() for n in (100, 5, 64, 1, 200, 129, 17)]


def trainer_logprobs(model: Any, prompt: list[int], answer: TextCompletion) -> torch.Tensor:
    policy = Policy(model)
    if model.config.model_type not in ("gemma2", "gpt_oss"):  # whose scores no fused kernel knows
        policy.use_variable_length(model.device, model.dtype)
    text = torch.tensor([*prompt, *answer.tokens], device=model.device)
    places = torch.arange(len(text), device=model.device)
    at = places[len(prompt) - 1 : -1]
    with torch.no_grad():
        logprobs = policy(PackedTokens(text, places, (len(text),), at, text[at + 1]))
    policy.stop_packing()
    return logprobs.double().cpu()


def captured(engine: LocalEngine) -> set[Any]:
    decoder = engine.find_decoder()
    assert decoder is not None
    assert decoder.graphs is not None
    return decoder.graphs.keys


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2", "gpt_oss"])
def test_the_gap_to_the_trainer_is_that_of_bf16(family: str) -> None:
    model, exact = make_model(family), make_model(family, torch.float64)
    prompts = make_prompts()
    found = LocalEngine(model, NoText(), batch_size=8).sample(prompts, PARAMS)
    gaps, errors, trainer_errors = [], [], []
    for prompt, answers in zip(prompts, found, strict=True):
        for answer in answers:
            ours = torch.tensor(answer.logprobs, dtype=torch.float64)
            theirs, truth = trainer_logprobs(model, prompt, answer), trainer_logprobs(exact, prompt, answer)
            gaps.append((ours - theirs).abs())
            errors.append((ours - truth).abs())
            trainer_errors.append((theirs - truth).abs())
    gap, error, trainer_error = (torch.cat(found).mean().item() for found in (gaps, errors, trainer_errors))
    print(f"{family}: gap {gap:.2e}, error of the sampler {error:.2e}, of the trainer {trainer_error:.2e}")
    assert error < 1.5 * trainer_error + 1e-3
    assert gap < 3 * trainer_error + 1e-3


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_float64_is_the_trainers_here_too(family: str) -> None:
    model, prompts = make_model(family, torch.float64), make_prompts()
    found = LocalEngine(model, NoText(), batch_size=4).sample(prompts, PARAMS)
    for prompt, answers in zip(prompts, found, strict=True):
        for answer in answers:
            expected = trainer_logprobs(model, prompt, answer)
            # Norms compute in float32 whatever the model is in, and their sums depend on the shape of a pass.
            assert answer.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("family", "params"),
    [
        ("qwen3", PARAMS),
        ("qwen3", SamplingParams(60, 0.7, 0.9, 1, num_samples=2, top_k=50, min_p=0.01)),
        ("gemma2", PARAMS),  # caps and windows
    ],
)
def test_graphs_give_what_eager_steps_give(family: str, params: SamplingParams) -> None:
    model, prompts = make_model(family, dtype=torch.float32), make_prompts()
    graphed = LocalEngine(model, NoText(), batch_size=8)
    eager = LocalEngine(model, NoText(), batch_size=8, graphs=False)
    expected = eager.sample(prompts, params)
    for _ in range(2):  # captured, then replayed
        found = graphed.sample(prompts, params)
        assert [[a.tokens for a in answers] for answers in found] == [
            [a.tokens for a in answers] for answers in expected
        ]
    assert captured(graphed), "nothing was captured"


@pytest.mark.parametrize("graphs", [True, False])
def test_batch_and_slots_do_not_change_a_sample(graphs: bool) -> None:
    model, prompts = make_model(dtype=torch.float64), make_prompts()
    ways = [(2, 1), (5, 8), (64, 3)]
    found = [
        LocalEngine(model, NoText(), slots, steps_per_read=steps, graphs=graphs).sample(prompts, PARAMS)
        for slots, steps in ways
    ]
    tokens = [[[a.tokens for a in answers] for answers in way] for way in found]
    assert tokens[0] == tokens[1] == tokens[2]


def test_the_cpu_draws_the_same() -> None:
    streams, positions = random_streams(5, [1, -2, 2**65], [0, 1, 2]), torch.tensor([0, 7, 1000])
    assert torch.equal(uniforms(streams, positions), uniforms(streams.cuda(), positions.cuda()).cpu())
    prompts = make_prompts()[:3]
    here, there = (
        LocalEngine(make_model(dtype=torch.float64, device=device), NoText()).sample(prompts, PARAMS)
        for device in ("cuda", "cpu")
    )
    assert [[a.tokens for a in answers] for answers in here] == [[a.tokens for a in answers] for answers in there]


def test_graphs_follow_the_weights() -> None:
    """Changed in place, put elsewhere, adapters switched off: each time what an eager engine says."""
    model = add_lora(make_model(dtype=torch.float32), LoraConfig(rank=4, alpha=8))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    prompts = make_prompts()
    engine = LocalEngine(model, NoText(), batch_size=8)
    eager = LocalEngine(model, NoText(), batch_size=8, graphs=False)
    seen = []

    def compare() -> None:
        found = [[a.tokens for a in answers] for answers in engine.sample(prompts, PARAMS)]
        assert found == [[a.tokens for a in answers] for answers in eager.sample(prompts, PARAMS)]
        seen.append(str(found))

    compare()
    weights = {name: tensor * 1.5 for name, tensor in model.state_dict().items() if "lora_" in name}
    engine.load_weights(weights, 1)
    compare()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.1
    compare()
    with model.disable_adapter():
        compare()
    compare()
    assert len(set(seen)) == 4
    assert seen[-1] == seen[-3]


def test_the_cache_is_bounded_and_given_back() -> None:
    engine = LocalEngine(make_model(), NoText(), batch_size=8, max_cache_bytes=2**20 * 3)
    engine.sample(make_prompts(), PARAMS)
    assert 0 < engine.cache_bytes <= 2**20 * 3
    engine.release_cache()
    assert engine.cache_bytes == 0
    narrow = LocalEngine(make_model(), NoText(), batch_size=8, max_cache_bytes=2**20)
    with pytest.raises(ValueError, match="lower max_tokens"):
        narrow.sample(make_prompts(), SamplingParams(max_tokens=1800))


def add_adapters(model: Any) -> Any:
    """The same for every precision: what bf16 holds."""
    generator = torch.Generator().manual_seed(0)
    adapted, dtype = add_lora(model, LoraConfig(rank=4, alpha=8)).eval(), model.dtype
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            drawn = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.data = drawn.bfloat16().to(model.device, dtype)
    return adapted


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_compiled_steps_are_as_near_to_the_truth_as_others(lora: bool) -> None:
    model, exact, prompts = make_model(), make_model(dtype=torch.float64), make_prompts()
    if lora:
        model, exact = add_adapters(model), add_adapters(exact)
    errors, before = {}, {type(module) for module in model.modules()}
    for compiles in (False, True):
        engine = LocalEngine(model, NoText(), batch_size=8, compiles=compiles)
        found = engine.sample(prompts, PARAMS)
        decoder = engine.find_decoder()
        assert decoder is not None
        assert (decoder.compiled is not None) == (decoder.joined is not None) == compiles
        errors[compiles] = torch.cat(
            [
                (torch.tensor(answer.logprobs, dtype=torch.float64) - trainer_logprobs(exact, prompt, answer)).abs()
                for prompt, answers in zip(prompts, found, strict=True)
                for answer in answers
            ]
        ).mean()
    print(f"lora {lora}: errors of plain and compiled steps {errors}")
    assert 0 < errors[True] < 1.5 * errors[False], errors
    assert "forward" not in decoder_layers(model)[0].__dict__  # the model is as it was
    assert {type(module) for module in model.modules()} == before


@pytest.mark.filterwarnings("error:decoding steps")
def test_graphs_are_captured_again_whenever_the_cache_has_grown() -> None:
    model, prompts = make_model(dtype=torch.float32), make_prompts()
    local = LocalEngine(model, NoText(), batch_size=8)
    engine, calls = ContinuousEngine(local), []
    engine.slice_s = 0.0
    sizes = (60, 300, 1200)  # each needs longer slots than the one before, while that is still decoded
    for key, max_tokens in enumerate(sizes):
        params = SamplingParams(max_tokens, temperature=1.0, seed=1)
        calls.append((params, key, engine.submit(prompts[key : key + 1], params, [key])))
        before = local.cache_bytes
        engine.advance()
        assert local.cache_bytes > before
        assert captured(local), "nothing was captured for this size"
    while engine.has_work:
        engine.advance()
    eager = LocalEngine(model, NoText(), batch_size=8, graphs=False)
    for params, key, call in calls:
        expected = eager.sample(prompts[key : key + 1], params, [key])
        assert [a.tokens for a in call.completions()[0]] == [a.tokens for a in expected[0]]


def test_weights_of_a_model_in_training_stay_where_they_are_so_that_graphs_serve_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of bf16 training the model that is sampled from is a narrow copy, refreshed in place."""
    from lockstep.backend.torch_backend import TorchBackend
    from lockstep.rollouts.source import ColocatedEngine
    from lockstep.types import Completion, Datum, LossSpec, OptimStep

    backend = TorchBackend(make_model(dtype=torch.float32), precision="bf16", micro_batch_tokens=4096)
    engine = ColocatedEngine(
        lambda: backend.lend_model(stable=True), NoText(), lambda mine: [mine], max_kept_bytes=1 << 30, compiles=True
    )
    prompts = make_prompts()
    captures, capture = [0], torch.cuda.CUDAGraph.capture_begin

    def count(*arguments: Any, **options: Any) -> Any:
        captures[0] += 1
        return capture(*arguments, **options)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", count)
    engine.sample(prompts, PARAMS)
    first = engine.sample(prompts, PARAMS)  # prompts of a size are captured when they come again
    num_captures = captures[0]
    assert num_captures == 2
    datum = Datum(prompts[0], [Completion(prompts[2], [1.0] * len(prompts[2]))])
    backend.forward_backward([datum], LossSpec(scale=0.1))
    backend.optim_step(OptimStep(1e-2))
    second = engine.sample(prompts, PARAMS)
    assert captures[0] == num_captures, "graphs were captured again"
    assert [a.tokens for own in first for a in own] != [a.tokens for own in second for a in own]
    fresh = ColocatedEngine(backend.lend_model, NoText(), lambda mine: [mine], compiles=True).sample(prompts, PARAMS)
    assert [a.tokens for own in fresh for a in own] == [a.tokens for own in second for a in own]


def test_a_capture_that_always_fails_is_reported_once_with_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    model, prompts = make_model(dtype=torch.float32), make_prompts()
    engine = LocalEngine(model, NoText(), batch_size=8, report=said.append)
    expected = engine.sample(prompts, PARAMS)
    assert not said
    engine.release_cache()

    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("captures are out of order")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", fail)
    for _ in range(2):
        found = engine.sample(prompts, PARAMS)
        assert [[a.tokens for a in own] for own in found] == [[a.tokens for a in own] for own in expected]
    (message,) = said
    assert message.startswith(
        "decoding steps are not captured in CUDA graphs (captures are out of order): one of 8 rows"
    )
    assert " ms instead of " in message
