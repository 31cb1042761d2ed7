"""Adapters that are trained side by side: each step is that of plain PEFT and transformers, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tiny import VOCABULARY, write_model

from lockstep.config import ModelConfig
from lockstep.tenants import training
from lockstep.tenants.base_model import AdapterSpec, BaseModel
from lockstep.tenants.shared_prefixes import TrainingRow
from lockstep.tenants.training import TrainedModel
from lockstep.types import OptimStep

STEP = OptimStep(learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-12)
LENGTHS = (7, 1, 12, 5)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    folder = write_model(tmp_path_factory.mktemp("model"))
    return BaseModel(ModelConfig(path=str(folder), precision="fp64"), "cpu")


def make(base: BaseModel, **spec: Any) -> TrainedModel:
    return TrainedModel(base, AdapterSpec(**{"rank": 4, "seed": 1, **spec}), micro_batch_tokens=16, compile=False)


def make_rows(seed: int, *names: str, several: int = 0) -> list[TrainingRow]:
    """Targets are what follows, but for one that is not. Numbers that float32 holds exactly."""
    draw = np.random.default_rng(seed)
    rows = []
    for length in LENGTHS:
        tokens = draw.integers(3, VOCABULARY, length)
        shape = (length, several) if several else (length,)
        targets = draw.integers(3, VOCABULARY, shape)
        if not several:
            targets[:-1] = tokens[1:]
            targets[length // 2] = 5
        inputs = {name: draw.integers(-8, 9, shape) / 8 for name in names}
        if "sequence_ratio_mask" in names:
            inputs["sequence_ratio_mask"] = (draw.random(shape) < 0.6).astype(float)
        if "logprobs" in names:
            inputs["logprobs"] = -5 + draw.integers(-16, 17, shape) / 16
        rows.append(TrainingRow(tokens, {"target_tokens": targets, **inputs}))
    return rows


def plain_logprobs(model: Any, row: TrainingRow) -> torch.Tensor:
    """One text at a time, the whole vocabulary, nothing shared."""
    logits = model(torch.from_numpy(row.tokens)[None]).logits[0].double()
    targets = torch.from_numpy(row.inputs["target_tokens"]).reshape(len(row.tokens), -1)
    return logits.log_softmax(-1).gather(1, targets).reshape(row.inputs["target_tokens"].shape)


def plain_loss(kind: str, now: torch.Tensor, row: TrainingRow, options: Mapping[str, float]) -> torch.Tensor:
    values = {name: torch.from_numpy(np.asarray(value, dtype=np.float64)) for name, value in row.inputs.items()}
    if kind == "cross_entropy":
        return -(values.get("weights", torch.ones(())) * now).sum()
    gains, advantages = now - values["logprobs"], values["advantages"]
    defaults = (0.0, 4.0) if kind == "cispo" else (0.8, 1.2)
    low, high = (
        values.get(name, torch.tensor(options.get(name, default), dtype=torch.float64))
        for name, default in zip(("clip_low_threshold", "clip_high_threshold"), defaults, strict=True)
    )
    if kind == "importance_sampling":
        return -(gains.exp() * advantages).sum()
    if kind == "cispo":
        return -(gains.exp().clamp(low, high).detach() * now * advantages).sum()
    if kind == "dro":
        return -(now * advantages - options.get("beta", 0.05) / 2 * gains**2).sum()
    ratio = gains.exp()
    if kind == "gspo":
        marked = values["sequence_ratio_mask"] != 0
        mean = gains.detach()[marked].mean() if marked.any() else torch.zeros(())
        ratio = (mean + now - now.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


POLICY = ("logprobs", "advantages")
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, float], int]] = {
    "cross entropy": ("cross_entropy", ("weights",), {}, 0),
    "without weights": ("cross_entropy", (), {}, 0),
    "several targets": ("cross_entropy", ("weights",), {}, 3),
    "importance sampling": ("importance_sampling", POLICY, {}, 0),
    "ppo": ("ppo", POLICY, {}, 0),
    "ppo with limits": ("ppo", POLICY, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}, 0),
    "ppo with limits of tokens": ("ppo", (*POLICY, "clip_low_threshold", "clip_high_threshold"), {}, 0),
    "cispo": ("cispo", POLICY, {}, 0),
    "dro": ("dro", POLICY, {"beta": 0.3}, 0),
    "gspo": ("gspo", (*POLICY, "sequence_ratio_mask"), {}, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_plain_peft(case: str, base: BaseModel) -> None:
    kind, names, options, several = CASES[case]
    rows, model = make_rows(3, *names, several=several), make(base)
    plain = base.with_adapter(AdapterSpec(4, seed=1))
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    for _ in range(3):  # the first has no gradient in half of the matrices
        now = [plain_logprobs(plain, row) for row in rows]
        loss = sum(plain_loss(kind, found, row, options) for found, row in zip(now, rows, strict=True))
        loss.backward()
        looked = model.forward_backward(rows, kind, options, forward_only=True)
        result = model.forward_backward(rows, kind, options, forward_only=False)
        for found in (looked, result):
            assert found.loss == pytest.approx(loss.item(), rel=1e-10, abs=1e-10)
            for got, expected in zip(found.logprobs, now, strict=True):
                np.testing.assert_allclose(got, expected.detach().numpy().ravel(), atol=1e-10)
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        assert model.optim_step(STEP) == pytest.approx(norm.item(), rel=1e-10)
        optimizer.step()
        optimizer.zero_grad()


def test_a_batch_in_several_requests_is_the_batch(base: BaseModel) -> None:
    rows = make_rows(4, "weights")
    whole, parts = make(base), make(base)
    for _ in range(2):
        found = whole.forward_backward(rows, "cross_entropy", {}, forward_only=False)
        several = [parts.forward_backward([row], "cross_entropy", {}, forward_only=False) for row in rows]
        assert math.fsum(result.loss for result in several) == pytest.approx(found.loss, rel=1e-12)
        assert parts.optim_step(STEP) == pytest.approx(whole.optim_step(STEP), rel=1e-12)


def test_users_share_the_base_and_nothing_else(base: BaseModel) -> None:
    rows = make_rows(5)
    alone = make(base, seed=2)
    expected = [alone.forward_backward(rows, "cross_entropy", {}, forward_only=False).loss, alone.optim_step(STEP)]
    expected.append(alone.forward_backward(rows, "cross_entropy", {}, forward_only=True).loss)
    one, other = make(base, seed=2), make(base, seed=3, rank=7, train_unembed=False)
    found = [one.forward_backward(rows, "cross_entropy", {}, forward_only=False).loss]
    other.forward_backward(make_rows(6), "cross_entropy", {}, forward_only=False)
    other.optim_step(STEP)
    found.append(one.optim_step(STEP))
    other.forward_backward(make_rows(6), "cross_entropy", {}, forward_only=False)
    found.append(one.forward_backward(rows, "cross_entropy", {}, forward_only=True).loss)
    assert found == expected
    ids = [{p.data_ptr() for p in m.backend.policy.model.parameters() if not p.requires_grad} for m in (one, other)]
    assert ids[0] == ids[1], "frozen weights are held once"


@pytest.mark.parametrize(
    ("off", "parts"),
    [
        ({"train_attn": False}, {"gate_proj", "up_proj", "down_proj", "lm_head"}),
        ({"train_mlp": False}, {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}),
        ({"train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_parts_that_are_not_wanted_get_no_adapter(off: dict[str, bool], parts: set[str], base: BaseModel) -> None:
    names = [name for name in make(base, **off).backend.parameters() if "lora_A" in name]
    assert {name.split(".lora_A")[0].rsplit(".", 1)[-1] for name in names} == parts


def test_an_adapter_of_nothing_is_refused(base: BaseModel) -> None:
    with pytest.raises(ValueError, match="at least one of attention, MLP and head"):
        make(base, train_attn=False, train_mlp=False, train_unembed=False)


def test_saved_and_loaded_training_goes_on_as_if_nothing_had_happened(base: BaseModel, tmp_path: Path) -> None:
    rows = make_rows(7, "weights")

    def step(model: TrainedModel) -> tuple[float, float]:
        return model.forward_backward(rows, "cross_entropy", {}, forward_only=False).loss, model.optim_step(STEP)

    model = make(base)
    step(model)
    size = model.save(tmp_path / "one", with_optimizer=True)
    assert size == sum(f.stat().st_size for f in (tmp_path / "one").rglob("*") if f.is_file())
    expected = [step(model) for _ in range(2)]
    again = make(base, seed=99)
    again.forward_backward(make_rows(8), "cross_entropy", {}, forward_only=False)  # dropped by what follows
    again.load(tmp_path / "one", with_optimizer=True)
    assert [step(again) for _ in range(2)] == expected
    weights_alone = make(base, seed=98)
    weights_alone.load(tmp_path / "one", with_optimizer=False)
    found = [step(weights_alone) for _ in range(2)]
    assert found[0] == expected[0]
    assert found[1] != expected[1]
    plain = PeftModel.from_pretrained(base.copy(), str(tmp_path / "one"))
    loss = sum(plain_loss("cross_entropy", plain_logprobs(plain, row), row, {}) for row in rows)
    assert float(loss) == pytest.approx(expected[0][0], rel=1e-6), "PEFT reads the folder"


def test_weights_that_were_saved_for_sampling_can_be_trained_on(base: BaseModel, tmp_path: Path) -> None:
    rows, model = make_rows(7), make(base)
    for _ in range(2):
        model.forward_backward(rows, "cross_entropy", {}, forward_only=False)
        model.optim_step(STEP)
    model.save(tmp_path / "one", with_optimizer=False)
    other = make(base, seed=5)
    other.load(tmp_path / "one", with_optimizer=False)
    looked = [m.forward_backward(rows, "cross_entropy", {}, forward_only=True).loss for m in (model, other)]
    assert looked[0] == pytest.approx(looked[1], rel=1e-12)
    learned = [m.forward_backward(rows, "cross_entropy", {}, forward_only=False).loss for m in (model, other)]
    assert learned[0] == pytest.approx(learned[1], rel=1e-12)


def test_weights_that_could_not_be_saved_leave_nothing_and_cost_nothing(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = make(base), make_rows(7)
    before = model.forward_backward(rows, "cross_entropy", {}, forward_only=True).loss

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(training, "commit_folder", fail)
        with pytest.raises(OSError, match="No space left"):
            model.save(tmp_path / "one", with_optimizer=True)
    assert not list(tmp_path.iterdir())
    model.save(tmp_path / "one", with_optimizer=True)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert model.forward_backward(rows, "cross_entropy", {}, forward_only=True).loss == before


def test_what_cannot_be_loaded_is_told(base: BaseModel, tmp_path: Path) -> None:
    model = make(base)
    model.save(tmp_path / "sampler", with_optimizer=False)
    with pytest.raises(ValueError, match="saved for sampling, without an optimizer"):
        model.load(tmp_path / "sampler", with_optimizer=True)
    model.save(tmp_path / "state", with_optimizer=True)
    with pytest.raises(ValueError, match="an adapter with rank 4, and this one has 8"):
        make(base, rank=8).load(tmp_path / "state", with_optimizer=True)
    (tmp_path / "state" / "adapter_model.safetensors").write_bytes(b"spoiled")
    with pytest.raises(ValueError, match="damaged"):
        model.load(tmp_path / "state", with_optimizer=True)


def test_a_failed_part_of_a_batch_is_never_half_applied(base: BaseModel) -> None:
    rows, model = make_rows(9, "weights"), make(base)
    before = copy.deepcopy(model.forward_backward(rows, "cross_entropy", {}, forward_only=True).logprobs)
    model.forward_backward(rows[:2], "cross_entropy", {}, forward_only=False)
    with pytest.raises(ValueError, match="datum 0 has token 5000"):
        model.forward_backward(
            [TrainingRow(np.array([5000]), {"target_tokens": np.array([5])})], "cross_entropy", {}, forward_only=False
        )
    model.forward_backward(rows[2:], "cross_entropy", {}, forward_only=False)
    with pytest.raises(ValueError, match=r"failed \(datum 0 has token 5000.*send the batch again"):
        model.optim_step(STEP)
    with pytest.raises(ValueError, match="no gradient"):
        model.optim_step(STEP)
    after = model.forward_backward(rows, "cross_entropy", {}, forward_only=True).logprobs
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    model.forward_backward(rows, "cross_entropy", {}, forward_only=False)
    assert math.isfinite(model.optim_step(STEP))


def row(length: int = 3, **inputs: Any) -> TrainingRow:
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    return TrainingRow(np.arange(5, 5 + length), {"target_tokens": np.arange(6, 6 + length), **arrays})


@pytest.mark.parametrize(
    ("rows", "kind", "options", "message"),
    [
        ([row()], "stable_reinforce", {}, "there is no loss 'stable_reinforce' here: there is cross_entropy"),
        ([], "cross_entropy", {}, "no data"),
        ([row()], "ppo", {}, "datum 0 has no logprobs, which ppo needs"),
        (
            [row(), row(advantages=[1, 2, 3])],
            "cross_entropy",
            {},
            "datum 1 has advantages, which cross_entropy does not",
        ),
        ([row(weights=[1.0, 2.0])], "cross_entropy", {}, r"target_tokens of the shape \[3\] and weights of \[2\]"),
        ([row(weights=[1.0, math.nan, 0.0])], "cross_entropy", {}, "weights that are not finite"),
        ([row(target_tokens=[1, 2])], "cross_entropy", {}, r"3 tokens and target_tokens of the shape \[2\]"),
        ([row(0, target_tokens=[])], "cross_entropy", {}, "datum 0 has no tokens"),
        ([row(target_tokens=[1, 2, 288])], "cross_entropy", {}, "token 288, and the model knows 0 to 287"),
        ([row(target_tokens=[1, -100, 2])], "cross_entropy", {}, "token -100"),
        ([row()], "cross_entropy", {"beta": 1.0}, "cross_entropy has no option 'beta': it has none"),
        ([row(logprobs=[0, 0, 0], advantages=[0, 0, 0])], "dro", {"beta": "x"}, "beta of dro must be a finite number"),
        (
            [row(target_tokens=[[1], [2], [3]], logprobs=[[0]] * 3, advantages=[[0]] * 3)],
            "ppo",
            {},
            r"ppo takes \[tokens\], one target",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    rows: list[TrainingRow], kind: str, options: dict[str, Any], message: str, base: BaseModel
) -> None:
    model = make(base)
    for forward_only in (True, False):
        with pytest.raises(ValueError, match=message):
            model.forward_backward(rows, kind, options, forward_only=forward_only)
