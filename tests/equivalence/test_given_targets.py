"""Targets that callers give, several for a token too, and losses of their tokens: on several ranks as on one.

And as the whole vocabulary says.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equivalence.layouts import everywhere, spawn, whole
from equivalence.plain import make_model
from equivalence.test_layouts import LAYOUTS

from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import ParallelConfig
from lockstep.parallel.group import ProcessGroup
from lockstep.types import Completion, Datum, LossSpec

TOLERANCE = 1e-10
LEARNED_ON = ("ddp-2", "fsdp-2", "tensor-2", "context-2", "pipeline-2")
QUICK = ("fsdp-2",)
LOSSES = {"cross_entropy": {}, "ppo": {"clip_high_threshold": 1.1}, "gspo": {}, "dro": {"beta": 0.2}}


def make_batch(kind: str) -> list[Datum]:
    """Cross entropy with three targets a token, and weights of zero; the others with one."""
    draw = np.random.default_rng(7)
    batch = []
    for number, (prompt, length) in enumerate([(3, 9), (1, 4), (6, 14), (2, 2), (5, 7)]):
        shape = (length, 3) if kind == "cross_entropy" else (length,)
        values = {}
        if kind != "cross_entropy":
            values = {"advantages": draw.normal(size=shape), "behaviour_logprobs": draw.normal(size=shape) - 5}
        if kind == "gspo":
            values["sequence_ratio_mask"] = (draw.random(shape) < 0.7).astype(float)
        weights = draw.integers(0, 3, shape) / 2 if kind == "cross_entropy" else np.ones(shape)
        tokens, targets = draw.integers(5, 97, length), draw.integers(5, 97, shape)
        completion: Any = Completion(tokens, weights, values, targets=targets)
        batch.append(Datum(draw.integers(5, 97, prompt), [completion], origin=f"row {number}"))
    return [*batch, share_prompt(kind)]


def share_prompt(kind: str) -> Datum:
    """Answers behind one prompt, with targets in places of the prompt too, each with its own."""
    draw = np.random.default_rng(8)
    completions: list[Any] = []
    for length, before in [(4, 5), (1, 0), (3, 2)]:
        shape = (length + before, 3) if kind == "cross_entropy" else (length + before,)
        names = () if kind == "cross_entropy" else ("advantages", "behaviour_logprobs", "sequence_ratio_mask")
        values = {name: draw.normal(size=shape) - 5 * (name == "behaviour_logprobs") for name in names}
        if kind != "gspo":
            values.pop("sequence_ratio_mask", None)
        targets = draw.integers(5, 97, shape)
        completions.append(Completion(draw.integers(5, 97, length), draw.random(shape), values, targets=targets))
    return Datum(draw.integers(5, 97, 6), completions, origin="shared")


def compute(group: ProcessGroup, parallel: ParallelConfig | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, options in LOSSES.items():
        backend = TorchBackend(
            make_model("qwen3", lora=False), micro_batch_tokens=24, precision="fp64", parallel=parallel, group=group
        )
        batch = make_batch(kind)
        result = backend.forward_backward(batch, LossSpec(kind, scale=0.5, options=options))
        gradients = everywhere({name: whole(p.grad) for name, p in backend.parameters().items()}, group)
        found[kind] = (result.loss, result.logprobs(), backend.forward(batch), gradients)
    return found


def compute_in_layout(parallel: ParallelConfig, out: Path) -> None:
    torch.set_num_threads(1)
    group = join_group("cpu", parallel, timeout_s=60)
    found = compute(group, parallel)
    if group.rank == 0:
        torch.save(found, out)
    group.leave()


@lru_cache
def on_one_rank() -> dict[str, Any]:
    return compute(join_group("cpu", ParallelConfig(), timeout_s=60), None)


def test_log_probs_are_those_of_the_whole_vocabulary() -> None:
    model = make_model("qwen3", lora=False).double()
    for kind in LOSSES:
        _, in_pass, in_forward, _ = on_one_rank()[kind]
        for row, datum in enumerate(make_batch(kind)):
            for number, completion in enumerate(datum.completions):
                targets = torch.from_numpy(np.asarray(completion.targets))
                text = torch.from_numpy(np.concatenate([datum.prompt, completion.tokens]))
                with torch.no_grad():
                    logits = model(text[None]).logits[0].log_softmax(-1)[-len(targets) - 1 : -1]
                expected = logits.gather(1, targets.reshape(len(targets), -1)).ravel().numpy()
                for found in (in_pass, in_forward):
                    np.testing.assert_allclose(found[row][number], expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in LEARNED_ON]
)
def test_every_layout_computes_the_same(layout: str, tmp_path: Path) -> None:
    num_ranks, parallel = LAYOUTS[layout][:2]
    spawn(num_ranks, compute_in_layout, parallel, tmp_path / "found")
    found = torch.load(tmp_path / "found", weights_only=False)
    for kind, (loss, in_pass, in_forward, gradients) in on_one_rank().items():
        assert found[kind][0] == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE)
        for got, expected in ((found[kind][1], in_pass), (found[kind][2], in_forward)):
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_allclose(np.concatenate(a), np.concatenate(b), atol=TOLERANCE)
        assert found[kind][3].keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[kind][3][name], gradient, rtol=TOLERANCE, atol=TOLERANCE)
