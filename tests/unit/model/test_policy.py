"""A causal language model seen as one function: packed documents give what each gives alone, in every family."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from equivalence.plain import FAMILIES, TINY, logprobs_of, make_model
from torch import nn

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig
from lockstep.model.attention import PACKED, AttentionSwitch, variable_length_problem
from lockstep.model.head import LogitTransform
from lockstep.model.lora import add_lora
from lockstep.model.policy import (
    PackedTokens,
    Policy,
    causal_lm,
    decoder_layers,
    every_module,
    head_dim,
    logit_transform,
    max_positions,
)
from lockstep.types import Completion, Datum

PACKING = [family for family in FAMILIES if family != "bloom"]
LENGTHS = (9, 2, 17, 5)  # shorter and longer than the sliding window of 6

every_family = pytest.mark.parametrize("family", FAMILIES)


def draw_documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 97, (n,), generator=generator).tolist() for n in LENGTHS]


def pack(documents: list[list[int]]) -> PackedTokens:
    """Every next token is a target."""
    tokens, positions, predictors = [], [], []
    for document in documents:
        predictors += [len(tokens) + i for i in range(len(document) - 1)]
        positions += range(len(document))
        tokens += document
    places = torch.tensor(predictors)
    row = torch.tensor(tokens)
    return PackedTokens(row, torch.tensor(positions), tuple(map(len, documents)), places, row[places + 1])


def plain(model: nn.Module, document: list[int]) -> torch.Tensor:
    """The model's own forward pass and full logits."""
    answer = Completion(document[1:], [1.0] * (len(document) - 1))
    with torch.no_grad():
        return logprobs_of(model, Datum(document[:1], [answer]), answer)


def assert_close(found: torch.Tensor, expected: torch.Tensor, family: str = "") -> None:
    # Gemma's norms compute in float32 whatever the model is in.
    torch.testing.assert_close(found, expected, rtol=1e-7 if "gemma" in family else 1e-11, atol=1e-11)


# --- layers ---------------------------------------------------------------------------------------------------------


class Counting(nn.Dropout):
    """Does more than others when it is switched."""

    num_switched = 0

    def train(self, mode: bool = True) -> Counting:
        self.num_switched += 1
        return super().train(mode)


def test_every_part_is_switched_between_training_and_evaluation():
    model = add_lora(make_model("llama", lora=False), LoraConfig(rank=2, dropout=0.1))
    causal_lm(model).extra = nn.Sequential(Counting(), nn.ModuleList([nn.Linear(2, 2)]))
    policy = Policy(model)
    for mode in (False, True, False):
        before = causal_lm(model).extra[0].num_switched
        policy.train(mode)
        assert {module.training for module in policy.modules()} == {mode}
        assert causal_lm(model).extra[0].num_switched == before + 1


@every_family
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_decoder_layers_are_found_from_the_model_itself(family, lora):
    model = make_model(family, lora=lora)
    layers = decoder_layers(model)
    (repeated,) = [
        m for m in causal_lm(model).modules() if isinstance(m, nn.ModuleList) and isinstance(m[0], type(layers[0]))
    ]
    assert layers == list(repeated)
    assert len(layers) == 2


def test_a_layer_inside_a_layer_is_not_one_of_its_own():
    model = make_model("llama", lora=False)
    model._no_split_modules = ["LlamaDecoderLayer", "LlamaMLP"]
    assert decoder_layers(model) == list(model.model.layers)


@pytest.mark.parametrize("names", [None, [], ["SomethingElse"]])
def test_layers_that_a_model_does_not_name_are_its_list_of_blocks(names):
    model = make_model("llama", lora=False)
    model._no_split_modules = names
    assert decoder_layers(model) == list(model.model.layers)


def test_a_model_whose_layers_are_spread_over_several_lists_is_refused():
    model = make_model("llama", lora=False)
    model._no_split_modules = None
    model.model.norms = torch.nn.ModuleList(torch.nn.LayerNorm(4) for _ in model.model.layers)
    with pytest.raises(ValueError, match="LlamaForCausalLM does not say which of its modules are layers"):
        decoder_layers(model)


# --- packed documents -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PACKING)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_packed_documents_give_what_the_model_gives_each_alone(family, lora):
    documents = draw_documents()
    expected = torch.cat([plain(make_model(family, lora=lora), d) for d in documents])
    policy = Policy(make_model(family, lora=lora), chunk_tokens=8)
    with torch.no_grad():
        packed = policy(pack(documents))
        separate = torch.cat([policy(pack([d])) for d in documents])
        own_logits = torch.cat([policy(pack([d]), plain=True) for d in documents])
    assert_close(packed, expected, family)
    assert_close(separate, expected, family)
    assert_close(own_logits, expected, family)


@pytest.mark.parametrize("family", PACKING)
def test_a_document_does_not_see_its_neighbours(family):
    first, second, *rest = draw_documents()
    policy = Policy(make_model(family, lora=False))
    others = [(t + 40) % 97 for t in first]
    with torch.no_grad():
        found = policy(pack([first, second, *rest]))
        changed = policy(pack([others, second, *rest]))
    assert not torch.equal(found[:8], changed[:8])
    assert torch.equal(found[8:], changed[8:])


@pytest.mark.parametrize("family", PACKING)
def test_the_gradient_of_packed_documents_is_the_sum_of_theirs(family):
    documents = draw_documents()
    found = {}
    for together in (True, False):
        policy = Policy(make_model(family, lora=False))
        for part in [documents] if together else [[d] for d in documents]:
            packed = pack(part)
            grad_logprobs = torch.cos(packed.targets.double())
            total, _ = policy(packed, grad_logprobs)
            total.backward()
        found[together] = {name: p.grad for name, p in policy.named_parameters()}
    tolerance = 1e-5 if family == "gemma" else 1e-10
    for name, gradient in found[True].items():
        torch.testing.assert_close(gradient, found[False][name], rtol=tolerance, atol=tolerance, msg=name)


def test_known_gradients_give_the_weighted_sum_and_log_probs_without_gradient():
    policy, packed = Policy(make_model("llama", lora=False)), pack(draw_documents())
    grad_logprobs = torch.linspace(-1, 1, len(packed.targets), dtype=torch.float64)
    total, logprobs = policy(packed, grad_logprobs)
    direct = policy(packed)
    assert direct.requires_grad
    assert not logprobs.requires_grad
    assert_close(logprobs, direct.detach())
    assert_close(total, (grad_logprobs * direct).sum())


def test_only_targets_are_computed():
    policy, packed = Policy(make_model("llama", lora=False)), pack(draw_documents())
    some = torch.tensor([2, 8, 20])
    few = PackedTokens(packed.tokens, packed.positions, packed.lengths, packed.predictors[some], packed.targets[some])
    with torch.no_grad():
        assert_close(policy(few), policy(packed)[some])


def test_capped_scores_are_capped_in_packed_documents():
    def make(cap: float | None) -> Any:
        torch.manual_seed(0)
        config = transformers.Gemma2Config(**TINY, head_dim=8, initializer_range=0.3, attn_logit_softcapping=cap)
        model = transformers.Gemma2ForCausalLM(config).double().eval()
        model.set_attn_implementation("eager")  # in transformers 5.17 `sdpa`, its default, does not cap
        return model

    documents = draw_documents()
    expected = torch.cat([plain(make(0.3), d) for d in documents])
    with torch.no_grad():
        assert_close(Policy(make(0.3))(pack(documents)), expected, "gemma2")
        assert (Policy(make(None))(pack(documents)) - expected).abs().max() > 0.01


def test_a_model_that_does_not_pack_takes_one_document_at_a_time():
    documents = draw_documents()
    policy = Policy(make_model("bloom", lora=False))
    policy.stop_packing()
    with torch.no_grad():
        found = policy(pack(documents[2:3]))
    assert_close(found, plain(make_model("bloom", lora=False), documents[2]))
    with pytest.raises(AssertionError, match="one document at a time"):
        policy(pack(documents))


# --- giving the model back ------------------------------------------------------------------------------------------


def generate(model: Any) -> list[int]:
    prompt = torch.tensor([[5, 17, 30, 8]])
    mask = torch.ones_like(prompt)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.eval().generate(prompt, attention_mask=mask, **options)[0].tolist()


@every_family
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_after_packing_the_model_has_its_own_attention_and_generates_as_before(family, lora):
    expected = generate(make_model(family, lora=lora))
    model = make_model(family, lora=lora)
    own = causal_lm(model).config._attn_implementation
    policy = Policy(model)
    if policy.attends_packed:
        assert causal_lm(model).config._attn_implementation == PACKED
    policy.stop_packing()
    assert causal_lm(model).config._attn_implementation == own
    assert not policy.packs
    assert generate(model) == expected
    document = draw_documents()[2]
    with torch.no_grad():
        assert_close(policy(pack([document])), plain(make_model(family, lora=lora), document), family)


def test_a_model_whose_attention_still_packs_says_so_instead_of_generating():
    policy = Policy(make_model("llama", lora=False))
    with pytest.raises(ValueError, match="LlamaAttention did not pass the document lengths"):
        generate(policy.model)


# --- the head -------------------------------------------------------------------------------------------------------


def test_what_the_model_does_to_its_logits_is_read_from_its_configuration():
    found = {family: logit_transform(make_model(family, lora=False)) for family in FAMILIES}
    assert found.pop("granite") == LogitTransform(scale=1 / 3)
    assert found.pop("gemma2") == LogitTransform(softcap=30.0)
    assert set(found.values()) == {LogitTransform()}


def test_a_head_that_is_not_a_linear_layer_is_refused():
    model = add_lora(make_model("llama", lora=False), LoraConfig(targets=("lm_head",), dropout=0.1))
    with pytest.raises(ValueError, match=r"the output head of LlamaForCausalLM is a peft\..*lora\.dropout to 0"):
        Policy(model)
    model = make_model("llama", lora=False)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match=r"Sequential, not a plain linear layer"):
        Policy(model)


def test_parameter_names_are_those_of_the_model():
    model = make_model("qwen3", lora=False)
    names = list(model.state_dict())
    assert list(Policy(model).model.state_dict()) == names


@every_family
def test_the_size_of_a_head_is_read_from_the_model(family):
    assert head_dim(make_model(family, lora=False)) == 8


@pytest.mark.parametrize(
    ("device", "dtype", "size", "why"),
    [
        ("cpu", torch.bfloat16, 64, "CUDA"),
        ("cuda", torch.float32, 64, "bf16 or fp16"),
        ("cuda", torch.bfloat16, 12, "multiple of 8"),
        ("cuda", torch.bfloat16, 512, "at most 256"),
        ("cuda", torch.bfloat16, 128, None),
    ],
)
def test_the_fused_kernel_says_why_it_cannot_be_used(device, dtype, size, why):
    problem = variable_length_problem(torch.device(device), dtype, size)
    assert problem is None if why is None else why in str(problem)


@pytest.mark.parametrize(
    ("family", "limit"), [("gpt2", 128), ("llama", None), ("bloom", None), ("opt", 128), ("phi3", None)]
)
def test_a_table_of_learned_positions_is_the_longest_text(family: str, limit: int | None) -> None:
    if family == "opt":
        settings = {**TINY, "ffn_dim": 48, "word_embed_proj_dim": 32}
        del settings["intermediate_size"], settings["num_key_value_heads"]
        model: Any = transformers.OPTForCausalLM(transformers.OPTConfig(**settings))
    else:
        model = make_model(family, lora=False)
    assert max_positions(model) == limit


def test_a_text_beyond_the_learned_positions_is_a_sentence_that_names_it() -> None:
    backend = TorchBackend(make_model("gpt2", lora=False), precision="fp64", device="cpu")
    exact = Datum([5] * 100, [Completion([6] * 28, [1.0] * 28)], "a row that just fits")
    backend.forward([exact])
    long = Datum([5] * 100, [Completion([6] * 3, [1.0] * 3), Completion([6] * 29, [1.0] * 29)], "train.jsonl:7")
    with pytest.raises(ValueError, match=r"train.jsonl:7 has 129 tokens, and the model learned positions for 128"):
        backend.forward([exact, long])


def test_switching_attention_again_does_what_transformers_does():
    config = transformers.Qwen3Config(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, head_dim=4
    )
    inner = transformers.AutoModelForCausalLM.from_config(config)
    outer = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    outer.inside = inner  # a model in a model, with a configuration of its own
    alone, reached = copy.deepcopy(outer), []
    for name in ("eager", "sdpa"):
        alone.set_attn_implementation(name)
        reached.append(alone.inside.config._attn_implementation)
    if reached != ["eager", "sdpa"]:
        pytest.skip("this transformers switches only models inside that a configuration declares")
    assert set(every_module(outer)) == set(outer.modules())
    switch = AttentionSwitch(outer)
    for name in ("eager", "sdpa", "eager", "sdpa"):
        switch.set(name)
        assert outer.config._attn_implementation == inner.config._attn_implementation == name
    inner.set_attn_implementation("eager")  # by somebody else
    switch.set("sdpa")
    assert inner.config._attn_implementation == "sdpa"
    outer.config = copy.deepcopy(config)
    switch.set("eager")
    assert outer.config._attn_implementation == "eager"
