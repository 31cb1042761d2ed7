"""Router replay: training chooses the experts that the sampler chose, from the engine's passes to the gradient."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence.mixtures import Float64, build_mixture, widen_softmax
from equivalence.plain import make_model, plain_loss, scale_of
from tiny import build_tokenizer, write_config
from torch import Tensor

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import ConfigError, load_config
from lockstep.inference.continuous_engine import ContinuousEngine
from lockstep.inference.engine import LocalEngine
from lockstep.model.policy import causal_lm
from lockstep.model.replay import RoutingRows
from lockstep.model.routing import find_routers
from lockstep.parallel.group import ProcessGroup
from lockstep.rollouts.batch import measure_logprob_diff
from lockstep.rollouts.episode import Episode, Rollout
from lockstep.rollouts.orchestrator import PartialGroup
from lockstep.rollouts.rewards import Outcome
from lockstep.types import Completion, Datum, LossSpec, PartialCompletion, SamplingParams, TextCompletion

ONE = ProcessGroup(0, 1, torch.device("cpu"))
PROMPTS = [[10, 20, 30, 40, 50], [11], [12, 13], [9, 8, 7, 6, 5, 4, 3]]
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, num_samples=3, seed=3, logprobs=True)
FAMILIES = ("qwen3_moe", "deepseek_v3", "mixtral")


def make_engine(model: Any, **options: Any) -> LocalEngine:
    return LocalEngine(model, build_tokenizer(), records_routing=True, **options)


def make_backend(model: Any, *, replay: bool = True, **options: Any) -> TorchBackend:
    return TorchBackend(
        model, micro_batch_tokens=256, precision="fp64", group=ONE, compile=False, router_replay=replay, **options
    )


def perturb_routers(model: Any, size: float = 0.1) -> Any:
    """The sampler's routers see things a little differently, as in another precision, and some choose other experts."""
    generator = torch.Generator().manual_seed(5)
    for _, router, _ in find_routers(model):
        noise = torch.randn(router.weight.shape, generator=generator, dtype=torch.float64)
        router.weight.data += size * router.weight.std() * noise.to(router.weight.dtype)
    return model


def as_batch(groups: list[list[TextCompletion]], routing: Callable[[bytes], bytes] = lambda rows: rows) -> list[Datum]:
    batch = []
    for number, (prompt, group) in enumerate(zip(PROMPTS, groups, strict=True)):
        completions = [
            Completion(c.tokens, [1.0] * len(c.tokens), {"behaviour_logprobs": c.logprobs or ()}, routing(c.routing))
            for c in group
        ]
        batch.append(Datum(prompt, completions, f"row {number}"))
    return batch


def diff_of(batch: list[Datum], model: Any, *, replay: bool = True) -> float:
    with Float64():
        backend = make_backend(model, replay=replay)
        found = measure_logprob_diff(batch, backend.forward(batch))
        backend.policy.stop_packing()
    assert found is not None
    return found.mean


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_brings_sampler_and_trainer_together(family: str) -> None:
    """The whole difference is in the weights of experts then, no longer in which of them are used."""
    with Float64():
        groups = make_engine(perturb_routers(build_mixture(family))).sample(PROMPTS, PARAMS)
        model = build_mixture(family)
    with_replay = diff_of(as_batch(groups), model)
    without = diff_of(as_batch(groups), model, replay=False)
    assert 0 < with_replay < 0.6 * without


def test_a_sampler_in_bf16_flips_choices_that_replay_keeps() -> None:
    with Float64():
        model = build_mixture("qwen3_moe")
    rounded = build_mixture("qwen3_moe").to(torch.bfloat16)
    groups = make_engine(rounded).sample(PROMPTS, replace(PARAMS, num_samples=8, max_tokens=40))
    assert diff_of(as_batch(groups), model) < diff_of(as_batch(groups), model, replay=False)


def test_of_one_model_the_choice_is_the_trainers_own() -> None:
    with Float64():
        groups = make_engine(build_mixture("qwen3_moe")).sample(PROMPTS, PARAMS)
        model = build_mixture("qwen3_moe")
    assert diff_of(as_batch(groups), model) < 1e-10


def test_replay_off_by_one_token_shows() -> None:
    with Float64():
        groups = make_engine(build_mixture("qwen3_moe")).sample(PROMPTS, PARAMS)
        model = build_mixture("qwen3_moe")
    size = RoutingRows(model).num_bytes
    late = as_batch(groups, lambda rows: rows[:size] + rows[:-size])
    assert diff_of(late, model) > 0.01
    with pytest.raises(ValueError, match=r"row 0 has the routing of 15 tokens, and 16 are computed"):
        diff_of(as_batch(groups, lambda rows: rows[size:]), model)


def test_every_token_but_the_last_has_a_row_whoever_computed_it() -> None:
    """Few slots, prompts of one token, prompts that are copied, and answers that another engine began."""
    with Float64():
        model = build_mixture("qwen3_moe")
        size = RoutingRows(model).num_bytes
        expected = make_engine(model, batch_size=16).sample(PROMPTS, PARAMS)
        assert tokens_of(make_engine(model, batch_size=2).sample(PROMPTS, PARAMS)) == tokens_of(expected)
        for prompt, group in zip(PROMPTS, expected, strict=True):
            assert [len(c.routing) for c in group] == [(len(prompt) + len(c.tokens) - 1) * size for c in group]
        begun = [[_cut(c, 1 + i, len(prompt), size) for i, c in enumerate(g)] for prompt, g in zip(PROMPTS, expected)]
        assert tokens_of(make_engine(model).sample(PROMPTS, PARAMS, partial=begun)) == tokens_of(expected)


def tokens_of(groups: list[list[TextCompletion]]) -> list[list[tuple[Any, bytes]]]:
    return [[(c.tokens, c.routing) for c in group] for group in groups]


def _cut(completion: TextCompletion, count: int, prompt_length: int, size: int) -> PartialCompletion:
    assert completion.logprobs is not None
    rows = completion.routing[: (prompt_length + count - 1) * size]
    return PartialCompletion(completion.tokens[:count], completion.logprobs[:count], (0,) * count, rows)


def test_progress_adds_up_to_the_completion() -> None:
    with Float64():
        engine = ContinuousEngine(make_engine(build_mixture("qwen3_moe")))
        engine.slice_s = 0.0
        call = engine.submit(PROMPTS, PARAMS, list(range(len(PROMPTS))), None, name="call")
        found: dict[tuple[int, int], bytes] = {}
        while not call.finished:
            engine.advance()
            for prompt, sample, new in call.take_progress():
                found[prompt, sample] = found.get((prompt, sample), b"") + new.routing
    expected = {(p, s): c.routing for p, group in enumerate(call.completions()) for s, c in enumerate(group)}
    assert found == expected


# --- the gradient ---------------------------------------------------------------------------------------------------


def _qwen(router: Any, hidden: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
    weights = torch.softmax(logits, dim=-1).gather(1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights, chosen


def _deepseek(router: Any, hidden: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
    weights = torch.sigmoid(logits).gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, weights * router.routed_scaling_factor, chosen


PLAIN_ROUTERS = {"qwen3_moe": _qwen, "mixtral": _qwen, "deepseek_v3": _deepseek}


def plain_gradients(family: str, batch: list[Datum], lora: bool) -> tuple[float, dict[str, Tensor]]:
    """Document by document, with routers that are told what to choose, written out."""
    model = build_mixture(family, lora=lora)
    rows, loss = RoutingRows(model), torch.zeros((), dtype=torch.float64)
    given: list[Tensor] = [torch.zeros(0)]
    for place, (_, router, _) in enumerate(find_routers(model)):
        router.norm_topk_prob = getattr(router, "norm_topk_prob", True)
        router.forward = lambda hidden, router=router, place=place: PLAIN_ROUTERS[family](
            router, hidden, given[0][:, place].long()
        )
    for datum in batch:
        for completion in datum.completions:
            read = rows.read(
                torch.frombuffer(bytearray(completion.routing), dtype=torch.uint8).view(-1, rows.num_bytes)
            )
            given[0] = torch.cat([read, torch.zeros_like(read[:1]) + torch.arange(rows.top_k)])  # the last: any
            loss = loss + plain_loss(model, [replace(datum, completions=[completion])], scale_of(batch))
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "lora", "options"),
    [
        ("qwen3_moe", False, {}),
        ("qwen3_moe", True, {"activation_checkpointing": "full"}),
        ("deepseek_v3", False, {}),
        pytest.param("mixtral", False, {}, marks=pytest.mark.slow),
    ],
)
def test_the_gradient_is_that_of_the_given_choice(
    family: str, lora: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    widen_softmax(monkeypatch)
    with Float64():
        groups = make_engine(perturb_routers(build_mixture(family), 1.0)).sample(PROMPTS, PARAMS)
        batch = as_batch(groups)
        loss, expected = plain_gradients(family, batch, lora)
        backend = make_backend(build_mixture(family, lora=lora), **options)
        result = backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
        assert result.loss == pytest.approx(loss, rel=1e-10)
        for name, parameter in backend.parameters().items():
            difference = float((parameter.grad - expected[name]).abs().max())
            assert difference <= 1e-10 * max(1.0, float(expected[name].abs().max())), name


def test_the_reference_chooses_by_itself() -> None:
    with Float64():
        groups = make_engine(perturb_routers(build_mixture("qwen3_moe"), 1.0)).sample(PROMPTS, PARAMS)
        batch = as_batch(groups)
        backend = make_backend(build_mixture("qwen3_moe", lora=True), reference="adapter_off")
        free = make_backend(build_mixture("qwen3_moe", lora=True), replay=False, reference="adapter_off")
        assert backend.forward(batch, reference=True) == free.forward(batch, reference=True)
        assert backend.forward(batch) != free.forward(batch)


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no routers .* set algorithm.router_replay to false"):
        make_backend(make_model("llama", lora=False))


def test_a_router_that_chooses_in_another_way_is_refused() -> None:
    model = build_mixture("qwen3_moe")
    for _, router, _ in find_routers(causal_lm(model)):
        router.forward = lambda hidden, router=router: _by_sorting(router, hidden)
    groups = make_engine(model).sample(PROMPTS, PARAMS)
    with pytest.raises(ValueError, match=r"gate \(Qwen3MoeTopKRouter\) does not choose .* with torch.topk"):
        make_backend(model).forward(as_batch(groups))


def _by_sorting(router: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
    return _qwen(router, hidden, logits.argsort(dim=-1, descending=True)[:, : router.top_k])


# --- from the sampler to the batch ----------------------------------------------------------------------------------


def test_routing_survives_turns_and_checkpoints() -> None:
    """A later turn is computed from the start; what earlier tokens were sampled with stays."""
    episode = Episode()
    first = TextCompletion((5, 6), "a", "stop", (-1.0, -1.0), routing=b"ppq")  # of a prompt of two tokens
    episode.add_completion(first, max_turns=2)
    episode.add_reply([7])
    episode.add_completion(TextCompletion((8,), "b", "stop", (-1.0,), routing=b"XXXrs"), max_turns=2)
    assert episode.routing == b"ppqrs"
    kept = Episode.from_json(json.loads(json.dumps(episode.to_json())))
    assert kept == episode
    rollout = kept.with_outcome(Outcome(1.0))
    assert Rollout.from_json(json.loads(json.dumps(rollout.to_json()))) == rollout
    partial = PartialGroup([[episode]], [[PartialCompletion((5,), (-1.0,), (0,), b"\x00\xff"), None]])
    assert PartialGroup.from_json(json.loads(json.dumps(partial.to_json()))) == partial


def test_rollouts_of_earlier_releases_have_none() -> None:
    rollout = Episode([5], [True], [-1.0], [0], ["a"]).with_outcome(Outcome(1.0))
    values = {name: value for name, value in rollout.to_json().items() if name != "routing"}
    assert Rollout.from_json(json.loads(json.dumps(values))) == rollout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollouts": {"endpoint": "http://127.0.0.1:1"}}, "router_replay needs a sampler that tells"),
        ({"parallel": {"backend": "deepspeed"}}, "router_replay is not for parallel.backend deepspeed"),
    ],
)
def test_samplers_and_backends_that_cannot_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    algorithm = {"kind": "grpo", "reward": "exact", "router_replay": True}
    with pytest.raises(ConfigError, match=message):
        load_config(write_config(tmp_path, tmp_path, algorithm=algorithm, **changes))
