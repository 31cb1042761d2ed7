"""A step that runs out of memory is computed again in smaller micro-batches: the numbers are those of a run that had
them from the start. Here no device is that full: the error is raised at a chosen pass."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.mixtures import build_mixture
from equivalence.plain import make_batch, make_model, scale_of
from tiny import digest_weights, write_config, write_model
from unit.backend.test_dropout import make_adapted

from lockstep.backend import loss_step
from lockstep.backend.out_of_memory import Shrunk
from lockstep.backend.router_balance import NO_LOSSES, RouterLosses
from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import ConfigError, load_config
from lockstep.launch.launcher import Resources
from lockstep.launch.local import LocalLauncher
from lockstep.launch.start import RestartingRun
from lockstep.parallel.group import ProcessGroup
from lockstep.rundir import RunDir
from lockstep.train import worker
from lockstep.train.run import run as train
from lockstep.types import Datum, LossSpec, OptimStep

ONE = ProcessGroup(0, 1, torch.device("cpu"))
BATCH = make_batch(rows=11)
SFT = LossSpec(scale=scale_of(BATCH))
STEP = OptimStep(learning_rate=0.01)
_honest = loss_step.compute_losses


def fail_at(*passes: int) -> Callable[..., Any]:
    """What computes a loss, and runs out of memory in these passes, counted from 1."""
    done: list[int] = []

    def compute(*given: Any) -> Any:
        done.append(1)
        result = _honest(*given)  # the memory of the forward pass is taken by then
        if len(done) in passes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore of it")
        return result

    return compute


def make_backend(model: Any, tokens: int, losses: RouterLosses = NO_LOSSES, **settings: Any) -> TorchBackend:
    return TorchBackend(
        model, micro_batch_tokens=tokens, on_out_of_memory="shrink", precision="fp64", router_losses=losses, group=ONE,
        **settings,
    )  # fmt: skip


def learn(backend: TorchBackend, batches: Sequence[Sequence[Datum]], loss: LossSpec = SFT) -> list[torch.Tensor]:
    for batch in batches:
        backend.forward_backward(batch, loss)
        backend.optim_step(STEP)
    return [p.detach().clone() for p in backend.parameters().values()]


MODELS: dict[str, Callable[[], Any]] = {
    "plain": lambda: make_model("llama", lora=False),
    "dropout": lambda: make_adapted(0.3),
    "mixture": lambda: build_mixture("mixtral"),
}


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("dropout", (2,)),
        *(pytest.param(name, passes, marks=pytest.mark.slow) for name in MODELS for passes in [(1,), (2,), (2, 5)]),
    ],
)
def test_the_numbers_are_those_of_smaller_micro_batches(
    name: str, passes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = RouterLosses(aux_loss=0.1, z_loss=0.01) if name == "mixture" else NO_LOSSES
    backend, said = make_backend(MODELS[name](), 200, losses), list[Shrunk]()
    backend.on_shrunk = said.append
    monkeypatch.setattr(loss_step, "compute_losses", fail_at(*passes))
    found = learn(backend, [BATCH, BATCH[:7]])
    assert len(said) == len(passes)
    assert all(shrunk.after < shrunk.before for shrunk in said)
    assert said[0].reason == "CUDA out of memory. Tried to allocate 2.00 GiB"
    monkeypatch.setattr(loss_step, "compute_losses", _honest)
    expected = learn(make_backend(MODELS[name](), said[-1].after, losses), [BATCH, BATCH[:7]])
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)  # bit for bit, dropout's draws and routers' counts included


@pytest.mark.slow
def test_preferences_with_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the passes without gradient before, of the reference and of a loss of the whole batch."""
    pairs = [Datum(d.prompt, [d.completions[0], e.completions[0]]) for d, e in itertools.pairwise(BATCH)]
    loss = LossSpec("preference", options={"beta": 0.1}, scale=0.1)

    def make(tokens: int) -> TorchBackend:
        return make_backend(make_model("llama", lora=False), tokens, reference="copy")

    backend, said = make(400), list[Shrunk]()
    backend.on_shrunk = said.append
    monkeypatch.setattr(loss_step, "compute_losses", fail_at(1))
    found = learn(backend, [pairs], loss)
    (shrunk,) = said
    monkeypatch.setattr(loss_step, "compute_losses", _honest)
    for ours, theirs in zip(found, learn(make(shrunk.after), [pairs], loss), strict=True):
        assert torch.equal(ours, theirs)
    expected = backend.forward(pairs)
    monkeypatch.setattr(loss_step, "as_token_logprobs", fail_once(loss_step.as_token_logprobs))
    for ours, theirs in zip(backend.forward(pairs), expected, strict=True):
        assert all(a == pytest.approx(b, abs=1e-12) for a, b in zip(ours, theirs, strict=True))
    assert len(said) == 2


def fail_once(honest: Callable[..., Any]) -> Callable[..., Any]:
    left = [1]

    def call(*given: Any) -> Any:
        if left:
            left.pop()
            raise torch.OutOfMemoryError("full")
        return honest(*given)

    return call


def test_where_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """One text cannot be made smaller, and gradients from before must not be lost."""
    backend = make_backend(make_model("llama", lora=False), 200)
    monkeypatch.setattr(loss_step, "compute_losses", fail_at(1))
    with pytest.raises(torch.OutOfMemoryError):
        backend.forward_backward([BATCH[0]], SFT)
    monkeypatch.setattr(loss_step, "compute_losses", fail_at(12))
    backend.forward_backward(BATCH[:2], SFT)
    before = {name: p.grad.clone() for name, p in backend.parameters().items() if p.grad is not None}
    monkeypatch.setattr(loss_step, "compute_losses", fail_at(1))
    with pytest.raises(torch.OutOfMemoryError):
        backend.forward_backward(BATCH, SFT)
    assert before
    assert all(torch.equal(p.grad, before[n]) for n, p in backend.parameters().items() if p.grad is not None)
    plain = TorchBackend(make_model("llama", lora=False), micro_batch_tokens=200, precision="fp64", group=ONE)
    monkeypatch.setattr(loss_step, "compute_losses", fail_at(1))
    with pytest.raises(torch.OutOfMemoryError):  # it was not asked for
        plain.forward_backward(BATCH, SFT)


def test_a_run_says_so_and_keeps_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"samples": 8, "on_out_of_memory": "shrink", "micro_batch_tokens": 256}
    file = write_config(tmp_path, write_model(tmp_path / "model"), batch=batch, optim={"max_steps": 2})
    monkeypatch.setattr(loss_step, "compute_losses", fail_at(1))
    run = RunDir.create(tmp_path / "run", load_config(file))
    train(run.path)
    (said,) = [e for e in run.events() if e.get("kind") == "shrunk"]
    after = run.status()["micro_batch_tokens"]
    assert f"{after:,} from now on" in said["message"]
    assert run.config().batch.micro_batch_tokens == max(after, 128)  # what a resume begins with
    assert worker.is_of(run.config(), load_config(file))
    small = RunDir.create(tmp_path / "small", load_config(file, [f"batch.micro_batch_tokens={max(after, 128)}"]))
    monkeypatch.setattr(loss_step, "compute_losses", _honest)
    if after >= 128:
        train(small.path)
        assert digest_weights(run.export / "model") == digest_weights(small.export / "model")
    with pytest.raises(ConfigError, match=r"not for parallel\.backend deepspeed"):
        load_config(file, ["parallel.backend=deepspeed"])


@pytest.mark.slow
def test_several_ranks_start_again_with_smaller_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two runs out of memory after the first checkpoint: it says so, all end, and go on from there."""
    batch = {"samples": 8, "on_out_of_memory": "shrink", "micro_batch_tokens": 512}
    changes: dict[str, Any] = {"batch": batch, "launch": {"procs": 2}, "checkpoint": {"every_steps": 2}}
    file = write_config(tmp_path, write_model(tmp_path / "model"), **changes)
    run = RunDir.create(tmp_path / "run", load_config(file))
    tests = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]))
    launcher, resources = LocalLauncher(worker_module="unit.backend.test_out_of_memory"), Resources(2, "cpu")
    lasting = RestartingRun(launcher, launcher.start(run.path, resources), run, resources, max_restarts=2)
    deadline = time.monotonic() + 300
    while (outcome := lasting.poll()).state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert outcome.state == "completed", outcome.reason
    (restarted,) = [e for e in run.events() if e["event"] == "restarted"]
    assert "was too large: from the last checkpoint on, half of that is tried" in restarted["reason"]
    (said,) = [e for e in run.events() if e.get("kind") == "shrunk"]
    assert run.config().batch.micro_batch_tokens < 512, said
    assert run.status()["step"] == 6


if __name__ == "__main__":  # the worker of the test above: rank 1 runs out of memory once, in the third step
    mark = Path(sys.argv[1]) / "was-started"
    if os.environ["RANK"] == "1" and not mark.exists():
        mark.touch()
        loss_step.compute_losses = fail_at(3)
    sys.exit(worker.main())
