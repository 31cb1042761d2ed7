"""Load per expert, experts that nobody chooses, biases that balance them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.mixtures import build_mixture
from equivalence.plain import make_batch, make_model, scale_of

from lockstep.backend.router_balance import NO_LOSSES, RouterBalance, RouterLosses
from lockstep.backend.torch_backend import TorchBackend
from lockstep.model.routing import BIAS
from lockstep.parallel.group import ProcessGroup
from lockstep.rundir import RunDir
from lockstep.train.steps import take_dead_experts, tell_dead_experts
from lockstep.types import LossSpec, OptimStep

ONE = ProcessGroup(0, 1, torch.device("cpu"))


def make_backend(family: str, losses: RouterLosses = NO_LOSSES, **settings: Any) -> TorchBackend:
    model = settings.pop("model", None) or build_mixture(family)
    return TorchBackend(model, micro_batch_tokens=96, precision="fp64", router_losses=losses, group=ONE, **settings)


def learn(backend: TorchBackend, seed: int = 0, rows: int = 11) -> dict[str, float]:
    batch = make_batch(seed, rows)
    return backend.forward_backward(batch, LossSpec(scale=scale_of(batch))).metrics


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_loads_are_those_of_the_models_own_router(checkpointing: str) -> None:
    model = build_mixture("mixtral")
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _module, _given, output: chosen.append(output[2].flatten()))
    batch = make_batch()
    with torch.no_grad():
        for datum in batch:
            for completion in datum.completions:
                model(torch.tensor([[*datum.prompt, *completion.tokens]]))
    loads = torch.stack([torch.cat(chosen[i::2]).bincount(minlength=4) for i in (0, 1)]).double()
    backend = make_backend("mixtral", activation_checkpointing=checkpointing)
    metrics = learn(backend)
    torch.testing.assert_close(backend.balance.load, loads)
    shares = loads / loads.sum(1, keepdim=True)
    assert metrics["expert_share_max"] == pytest.approx(shares.max().item())
    assert metrics["expert_share_min"] == pytest.approx(shares.min().item())
    entropy = torch.distributions.Categorical(shares).entropy().mean() / torch.tensor(4.0).log()
    assert metrics["expert_entropy"] == pytest.approx(entropy.item())
    assert "expert_entropy" not in learn(TorchBackend(make_model("llama", lora=False), precision="fp64", group=ONE))


def test_an_expert_that_nobody_chooses_is_named() -> None:
    model = build_mixture("deepseek_v3")
    getattr(model.model.layers[1].mlp.gate, BIAS)[2] = -100.0
    backend = make_backend("deepseek_v3", model=model)
    assert not any(name.startswith("dead_expert/") for name in learn(backend, rows=2))  # too few tokens to tell
    dead = [name for name in learn(backend) if name.startswith("dead_expert/")]
    assert dead == ["dead_expert/1/2"]


def test_the_log_of_a_run_warns_of_a_dead_expert_once(tmp_path: Path) -> None:
    record, dead = take_dead_experts({"loss": 1.0, "expert_entropy": 0.5, "dead_expert/3/17": 120.0})
    assert record == {"loss": 1.0, "expert_entropy": 0.5, "dead_experts": 1}
    assert dead == [(3, 17)]
    assert tell_dead_experts(dead).startswith("no token chooses expert 17 of layer 3, where at least 100 would")
    assert take_dead_experts({"loss": 1.0}) == ({"loss": 1.0}, [])
    import tiny

    from lockstep.config import LoggingConfig, load_config
    from lockstep.train.steps import MetricsLog, Progress

    path = tiny.write_config(tmp_path, tiny.write_model(tmp_path / "model"))
    run = RunDir.create(tmp_path / "run", load_config(path))
    log = MetricsLog(run, LoggingConfig(tensorboard=False), last_step=0)
    for step in (1, 2):
        record = {"loss": 1.0, "expert_entropy": 0.5, "dead_expert/3/17": 120.0}
        log.train(step, Progress(), record, last=True)
    (event,) = [e for e in run.events() if e["event"] == "warning"]
    assert event["kind"] == "dead_experts"
    assert event["experts"] == [[3, 17]]
    assert all("dead_expert/3/17" not in written for written in run.metrics())


def test_biases_move_against_the_load_of_the_whole_batch(tmp_path: Path) -> None:
    backend = make_backend("deepseek_v3", RouterLosses(bias_rate=0.01))
    bias = getattr(backend.policy.model.model.layers[1].mlp.gate, BIAS)
    before = bias.clone()
    learn(backend)
    learn(backend, seed=1)
    load = backend.balance.load
    assert load is not None
    backend.optim_step(OptimStep(0.0))
    expected = before + 0.01 * torch.sign(load[0].mean() - load[0])
    torch.testing.assert_close(bias, expected.to(bias.dtype))
    backend.save_state(tmp_path / "checkpoint").result()
    other = make_backend("deepseek_v3", RouterLosses(bias_rate=0.01))
    other.load_state(tmp_path / "checkpoint")
    torch.testing.assert_close(getattr(other.policy.model.model.layers[1].mlp.gate, BIAS), bias)
    assert not any("gate" in name and BIAS in name for name in other.parameters())


def test_a_skipped_step_leaves_biases() -> None:
    backend = make_backend("deepseek_v3", RouterLosses(bias_rate=0.01))
    bias = getattr(backend.policy.model.model.layers[1].mlp.gate, BIAS)
    before = bias.clone()
    learn(backend)
    next(iter(backend.parameters().values())).grad.fill_(float("nan"))  # type: ignore[union-attr]
    assert not backend.optim_step(OptimStep(0.1)).applied
    assert torch.equal(bias, before)


@pytest.mark.parametrize(
    ("family", "losses", "message"),
    [
        ("deepseek_v3", RouterLosses("auto"), "defines no load-balancing loss"),
        ("mixtral", RouterLosses(bias_rate=0.1), "have no e_score_correction_bias"),
        ("deepseek_v3", RouterLosses(bias_rate=0.1), "would change the reference too"),
        ("llama", RouterLosses(0.1), "no routers"),
        ("llama", RouterLosses(z_loss=0.1), "router_z_loss.*no routers"),
    ],
)
def test_what_a_model_does_not_have_is_refused(family: str, losses: RouterLosses, message: str) -> None:
    model = make_model("llama", lora=False) if family == "llama" else build_mixture(family)
    with pytest.raises(ValueError, match=message):
        make_backend(family, losses, model=model, reference="copy" if "reference" in message else "none")


def test_compiled_layers_are_watched_only_where_a_loss_needs_it() -> None:
    policy = make_backend("qwen3_moe").policy
    for losses, watched in ((NO_LOSSES, False), (RouterLosses(0.1), True)):
        balance = RouterBalance(policy, losses, ONE, compiled=True)
        with balance.training_passes(1.0):
            policy.routers.read(torch.ones(3))
        assert (len(balance.take()) > 0) == watched


def test_biases_are_not_for_adapters() -> None:
    with pytest.raises(ValueError, match="adapter does not hold"):
        make_backend("deepseek_v3", RouterLosses(bias_rate=0.1), model=build_mixture("deepseek_v3", lora=True))


def test_auto_takes_the_models_own_coefficient_and_a_model_that_asks_for_it_is_told() -> None:
    asks = {"router_aux_loss_coef": 0.25, "output_router_logits": True}
    balanced = make_backend("qwen3_moe", RouterLosses("auto"), model=build_mixture("qwen3_moe", changes=asks))
    assert balanced.balance.aux_coefficient == 0.25
    asked = make_backend("qwen3_moe", model=build_mixture("qwen3_moe", changes=asks))
    assert any("set model.router_aux_loss to auto" in warning for warning in asked.warnings)
    without = build_mixture("qwen3_moe", changes={"router_aux_loss_coef": 0.0})
    with pytest.raises(ValueError, match="give a number"):
        make_backend("qwen3_moe", RouterLosses("auto"), model=without)
