"""A backend that reads a checkpoint goes on as the one that wrote it: weights, moments, generator, reference."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from equivalence.plain import make_batch, make_model, scale_of
from torch import Tensor
from unit.backend.test_dropout import make_backend as with_dropout

from lockstep.backend.torch_backend import TorchBackend
from lockstep.parallel.group import ProcessGroup
from lockstep.types import Datum, LossSpec, OptimStep

STEP = OptimStep(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)
BATCHES = [make_batch(seed) for seed in range(3)]


def learn(backend: TorchBackend, batches: Sequence[Sequence[Datum]]) -> None:
    for batch in batches:
        backend.forward_backward(batch, LossSpec(scale=scale_of(list(batch))))
        backend.optim_step(STEP)


def weights_of(backend: TorchBackend) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in backend.parameters().items()}


def save(backend: TorchBackend, path: Path) -> Path:
    backend.save_state(path).result(timeout=60)
    return path


def with_reference() -> TorchBackend:
    group = ProcessGroup(0, 1, torch.device("cpu"))
    return TorchBackend(make_model("qwen3", lora=False), precision="fp64", reference="copy", group=group)


def test_it_goes_on_bit_for_bit_with_its_moments_and_its_dropout(tmp_path: Path) -> None:
    backend = with_dropout(seed=1)
    learn(backend, BATCHES[:2])
    save(backend, tmp_path / "state")
    learn(backend, BATCHES[2:])
    resumed = with_dropout(seed=2)  # what it draws is what the checkpoint says
    resumed.load_state(tmp_path / "state")
    learn(resumed, BATCHES[2:])
    expected = weights_of(backend)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(resumed).items())


def test_a_checkpoint_is_of_the_moment_at_which_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = with_dropout()
    learn(backend, BATCHES[:1])
    before, waiting = weights_of(backend), list[threading.Thread]()
    start = threading.Thread.start
    with monkeypatch.context() as patch:  # the writer begins when the next step is made
        patch.setattr(threading.Thread, "start", lambda thread: waiting.append(thread))
        written = backend.save_state(tmp_path / "state")
    learn(backend, BATCHES[1:])
    assert waiting, "checkpoints are written by a thread"
    for thread in waiting:
        start(thread)
    written.result(timeout=60)
    resumed = with_dropout()
    resumed.load_state(tmp_path / "state")
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(resumed).items())
    learn(resumed, BATCHES[1:])
    expected = weights_of(backend)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(resumed).items())


def test_a_reference_stays_what_the_run_began_with(tmp_path: Path) -> None:
    backend = with_reference()
    began_with = backend.forward(BATCHES[0])
    learn(backend, BATCHES[:2])
    assert backend.forward(BATCHES[0], reference=True) == began_with
    resumed = with_reference()
    resumed.load_state(save(backend, tmp_path / "state"))
    assert resumed.forward(BATCHES[0], reference=True) == began_with
    assert resumed.forward(BATCHES[0]) == backend.forward(BATCHES[0]) != began_with


def test_a_reference_that_has_followed_survives_two_resumes(tmp_path: Path) -> None:
    backend = with_reference()
    learn(backend, BATCHES[:1])
    backend.mix_reference(0.3)
    followed = backend.forward(BATCHES[0], reference=True)
    for number in range(2):
        state = save(backend, tmp_path / f"state-{number}")
        backend = with_reference()
        backend.load_state(state)
        assert backend.forward(BATCHES[0], reference=True) == followed
