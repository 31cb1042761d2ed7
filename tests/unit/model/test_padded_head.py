"""A head that is padded with rows that are no tokens: the model drops their logits, and so must all that computes with
the head."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
import transformers
from equivalence.plain import TINY, keep_float64, make_batch, plain_loss, scale_of

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig
from lockstep.inference.engine import LocalEngine
from lockstep.model.lora import add_lora
from lockstep.model.policy import UnknownHeadError, tensor_plan
from lockstep.parallel.group import ProcessGroup
from lockstep.types import Completion, Datum, LossSpec, SamplingParams

ONE = ProcessGroup(0, 1, torch.device("cpu"))
NUM_TOKENS, NUM_ROWS = 97, 104


class PaddedLlama(transformers.LlamaForCausalLM):
    def forward(self, *arguments: Any, **options: Any) -> Any:
        output = super().forward(*arguments, **options)
        output.logits = output.logits[..., :NUM_TOKENS]
        return output


def build(**settings: int) -> Any:
    torch.manual_seed(0)
    model = PaddedLlama(transformers.LlamaConfig(**{**TINY, "vocab_size": NUM_ROWS, **settings})).double()
    with torch.no_grad():
        model.lm_head.weight[NUM_TOKENS:] = 3 * model.lm_head.weight[:7]  # likelier than any token
    return keep_float64(model.eval())


def start(model: Any) -> TorchBackend:
    return TorchBackend(model, micro_batch_tokens=96, precision="fp64", group=ONE)


@pytest.mark.parametrize("lora", [False, True])
def test_rows_that_are_no_tokens_take_no_part_in_the_step(lora: bool) -> None:
    def build_adapted() -> Any:
        model = build(unpadded_vocab_size=NUM_TOKENS)
        return add_lora(model, LoraConfig(rank=2)).double() if lora else model

    model, batch = build_adapted(), make_batch(rows=5)
    loss = plain_loss(model, batch, scale_of(batch))
    loss.backward()
    backend = start(build_adapted())
    assert backend.forward_backward(batch, LossSpec(scale=scale_of(batch))).loss == pytest.approx(
        loss.item(), rel=1e-10
    )
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, parameter in backend.parameters().items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-10)
    if not lora:
        assert not backend.parameters()["lm_head.weight"].grad[NUM_TOKENS:].any()


def test_they_are_not_sampled() -> None:
    model = build(unpadded_vocab_size=NUM_TOKENS)
    engine = LocalEngine(model, tiny.build_tokenizer(), batch_size=2)
    (answer,) = engine.sample([[5, 17, 30, 8]], SamplingParams(max_tokens=8))[0]
    assert engine.decodes
    tokens = torch.tensor([5, 17, 30, 8, *answer.tokens])
    with torch.no_grad():
        likeliest = model(input_ids=tokens[None]).logits[0, 3:-1].argmax(-1)
    assert list(answer.tokens) == likeliest.tolist()


def test_one_of_them_in_a_text_is_a_sentence_that_names_it() -> None:
    backend = start(build(unpadded_vocab_size=NUM_TOKENS))
    datum = Datum([3, 4], [Completion([NUM_TOKENS], [1.0])])
    with pytest.raises(ValueError, match=r"row 0 of the batch has token 97, and the model knows 0 to 96"):
        backend.forward_backward([datum], LossSpec(scale=1.0))


def test_a_model_that_drops_logits_without_saying_so_is_refused() -> None:
    """In a narrow precision a few rows more could be taken for rounding."""
    with pytest.raises(UnknownHeadError, match=r"PaddedLlama gives 97 logits, and its head has 104 rows of tokens"):
        start(build())


def test_the_rows_of_a_head_are_split_whatever_its_plan_says() -> None:
    """Log-probs are computed from some rows on each rank: columns would be taken for rows."""
    model = build()
    model._tp_plan = {"model.layers.*.mlp.up_proj": "colwise", "lm_head": "rowwise_split_input"}
    assert tensor_plan(model)["lm_head"] == (model.lm_head, "colwise_gather_output")
