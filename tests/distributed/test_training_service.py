"""TrainingService on real processes: the numbers of the backend itself, checkpoints, faults, and nothing left behind.

Those that take `place` are run on Ray too, by test_ray_workers.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from equivalence.plain import STEP, make_batch, scale_of
from safetensors.torch import load_file

from lockstep import LossSpec, OptimStep, TorchBackend, TrainingService
from lockstep.backend.remote.ranks import RemoteRanks
from lockstep.backend.remote.service import ServiceOptions, TrainingFailed
from lockstep.processes.worker import Reply, WorkerDied, WorkerFailed, WorkerTimedOut

SOON = 60.0  # a generous deadline against hanging: nothing here measures time
FIRST, SECOND = make_batch(0), make_batch(1)
LOSS = LossSpec(scale=scale_of(FIRST))


@pytest.fixture
def place() -> str:
    return "local"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float64. Its norms compute in the model's own dtype, so that every layout gives the same to 1e-10."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **no_dropout, bos_token_id=1, eos_token_id=2, initializer_range=0.2)
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    transformers.GPT2LMHeadModel(config).double().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the backend gives inside this process: two steps."""
    folder = tmp_path_factory.mktemp("expected") / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(gpt2, dtype=torch.float64)
    backend = TorchBackend(model, precision="fp64", device="cpu")
    found: dict[str, Any] = {"logprobs": backend.forward(FIRST), "losses": [], "norms": []}
    for batch in (FIRST, SECOND):
        found["losses"].append(backend.forward_backward(batch, LOSS).loss)
        found["norms"].append(backend.optim_step(STEP).grad_norm)
    backend.export_weights(folder)
    return {**found, "weights": load_file(folder / "model.safetensors")}


Start = Callable[..., TrainingService]


@pytest.fixture
def start(place: str, gpt2: Path, tmp_path: Path) -> Iterator[Start]:
    """Services whose processes must be gone in the end."""
    started: list[TrainingService] = []

    def one(procs: int = 1, layout: str = "", **options: Any) -> TrainingService:
        words = "+".join(filter(None, [place, layout]))
        settings = {"precision": "fp64", "device": "cpu", "timeout_s": SOON, **options}
        service = TrainingService.options(procs, words, **settings)
        started.append(service.start(gpt2, STEP, tmp_path / "checkpoints"))
        return started[-1]

    yield one
    for service in started:
        service.kill()
        assert not any(is_running(pid) for pid in service.pids if pid is not None)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def weights_of(service: TrainingService, folder: Path) -> dict[str, torch.Tensor]:
    service.export_weights(folder).wait()
    return load_file(folder / "model.safetensors")


def are_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-10) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.allclose(found[name], expected[name], rtol=0, atol=tolerance) for name in expected)


@pytest.mark.parametrize(
    ("procs", "layout"),
    [(2, "fsdp"), pytest.param(1, "", marks=pytest.mark.slow), pytest.param(2, "ddp", marks=pytest.mark.slow)],
)
def test_steps_through_the_service_are_those_of_the_backend(
    start: Start, procs: int, layout: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    service = start(procs, layout)
    assert service.about["precision"] == "fp64"
    # A mistake, which all ranks agree is one, changes nothing.
    with pytest.raises(ValueError, match="unknown loss 'nonsense'"):
        service.forward_backward(FIRST, LossSpec("nonsense")).wait()
    with pytest.raises(ValueError, match="row 0 of the batch is a int"):
        service.forward_backward([1], LOSS)  # type: ignore[list-item]
    logprobs = service.forward(FIRST)
    # Queued without waiting, as one does where a call takes a while to arrive.
    handles = [(service.forward_backward(batch, LOSS), service.optim_step()) for batch in (FIRST, SECOND)]
    weights = weights_of(service, tmp_path / "export" / "model")
    flat = [number for row in logprobs.wait() for numbers in row for number in numbers]
    assert flat == pytest.approx([n for row in expected["logprobs"] for numbers in row for n in numbers], abs=1e-10)
    assert [loss.wait().loss for loss, _ in handles] == pytest.approx(expected["losses"], abs=1e-10)
    assert [step.wait().grad_norm for _, step in handles] == pytest.approx(expected["norms"], abs=1e-10)
    assert are_close(weights, expected["weights"])
    result = handles[0][0].wait()
    assert result.num_supervised == sum(datum.num_supervised for datum in FIRST)
    assert handles[0][1].wait().applied
    service.close()
    assert not any(is_running(pid) for pid in service.pids if pid is not None)


def test_the_promised_lines_work_as_they_are_written(place: str, gpt2: Path, expected: Any, tmp_path: Path) -> None:
    async def train() -> list[float]:
        options = TrainingService.options(procs=1, backend=place, precision="fp64", device="cpu")
        training = await options.as_service(
            model={"path": str(gpt2)}, optimizer={"learning_rate": 1e-4}, checkpoint_dir=tmp_path
        )
        metrics = await training.forward_backward(FIRST, LOSS).result()
        done = await training.optim_step(STEP).result()
        await training.shutdown()
        assert not any(is_running(pid) for pid in training.pids if pid is not None)
        return [metrics.loss, done.grad_norm]

    assert asyncio.run(train()) == pytest.approx([expected["losses"][0], expected["norms"][0]], abs=1e-10)


def test_a_checkpoint_brings_weights_and_optimizer_back_and_survives_the_service(start: Start, tmp_path: Path) -> None:
    service = start(2, "fsdp")
    service.forward_backward(FIRST, LOSS)
    service.optim_step()
    saved = service.save("best")
    # Later steps must not get into what is being written.
    service.forward_backward(SECOND, LOSS)
    service.optim_step()
    straight = weights_of(service, tmp_path / "straight")
    assert saved.wait() == tmp_path / "checkpoints" / "best" / "checkpoints" / "step-1"
    service.close()

    other = start(1)  # also in another layout
    other.load("best")
    other.forward_backward(SECOND, LOSS)
    other.optim_step()
    assert are_close(weights_of(other, tmp_path / "resumed"), straight)
    other.load("best", with_optimizer=False)
    other.forward_backward(SECOND, LOSS)
    other.optim_step()
    assert not are_close(weights_of(other, tmp_path / "forgetful"), straight, 1e-6)
    other.close()


@pytest.mark.slow
def test_saving_again_replaces_and_what_is_damaged_or_missing_is_refused(start: Start, tmp_path: Path) -> None:
    service = start(1)
    first = service.save("a").wait()
    service.forward_backward(FIRST, LOSS)
    service.optim_step()
    second = service.save("a").wait()
    assert not first.exists()
    with pytest.raises(ValueError, match=r"there is no checkpoint 'b' in .*: known are a$"):
        service.load("b").wait()
    with pytest.raises(ValueError, match=r"'\.\./a' is no name"):
        service.save("../a")
    service.save_state(tmp_path / "state").wait()
    service.load_state(tmp_path / "state").wait()
    with pytest.raises(ValueError, match="holds no saved state"):
        service.load_state(tmp_path / "nothing").wait()
    damaged = next(path for path in second.iterdir() if path.suffix == ".safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    before = weights_of(service, tmp_path / "before")
    with pytest.raises(ValueError, match=f"the checkpoint 'a' is damaged: {damaged.name}"):
        service.load("a").wait()
    assert are_close(weights_of(service, tmp_path / "after"), before, 0.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_rank_that_dies_or_is_stopped_fails_everything_and_is_named(start: Start, number: signal.Signals) -> None:
    service = start(2, "fsdp", health_timeout_s=4.0)
    service.forward(FIRST).wait()
    pid = service.pids[1]
    assert pid is not None
    os.kill(pid, number)
    handles = [service.forward_backward(FIRST, LOSS), service.optim_step(), service.save("never")]
    for handle in handles:
        with pytest.raises(TrainingFailed, match=r"^rank 1 "):
            handle.wait(SOON)
    with pytest.raises(TrainingFailed, match=r"^rank 1 "):
        service.optim_step().wait(SOON)
    service.close()
    assert not any(is_running(pid) for pid in service.pids if pid is not None)


@pytest.mark.slow
def test_a_start_that_nobody_waits_for_any_more_leaves_no_process(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[TrainingService] = []
    real = ServiceOptions.start
    monkeypatch.setattr(ServiceOptions, "start", lambda *given: started.append(real(*given)) or started[-1])

    async def give_up() -> None:
        starting = asyncio.create_task(TrainingService.options(precision="fp64", device="cpu").as_service(gpt2))
        await asyncio.sleep(0.1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(give_up())
    deadline = time.monotonic() + 4 * SOON
    while not started or any(is_running(pid) for pid in started[0].pids if pid is not None):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_an_error_in_the_middle_leaves_no_process(start: Start) -> None:
    service = start(1)

    def train() -> None:
        with service:
            service.forward_backward(FIRST, LOSS)
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        train()
    assert not any(is_running(pid) for pid in service.pids if pid is not None)


def test_closing_does_what_was_asked_for_and_raises_what_nobody_looked_at(start: Start, tmp_path: Path) -> None:
    service = start(1)
    service.export_weights(tmp_path / "late")
    service.forward_backward(FIRST, LossSpec("nonsense"))
    with pytest.raises(ValueError, match="nonsense"):
        service.close()
    assert (tmp_path / "late" / "model.safetensors").exists()
    with pytest.raises(TrainingFailed, match="shut down"):
        service.forward(FIRST).wait()
    service.close()


def test_a_model_that_is_not_there_is_told_and_leaves_no_process(place: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"model.path {tmp_path}/none does not exist"):
        TrainingService.options(2, place, device="cpu").start(tmp_path / "none")


@pytest.mark.slow
def test_lora_and_a_reference_come_by_options(start: Start, tmp_path: Path) -> None:
    service = start(1, lora={"rank": 2}, reference="adapter_off")
    plain = service.forward(FIRST, reference=True).wait()
    service.forward_backward(FIRST, LOSS)
    service.optim_step(OptimStep(1e-2))
    assert service.forward(FIRST, reference=True).wait() == plain
    assert service.forward(FIRST).wait() != plain
    service.export_weights(tmp_path / "adapter").wait()
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


# --- without processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "place", "shard"),
    [
        ("local", "local", 1),
        ("ray", "ray", 1),
        ("fsdp", "local", "auto"),
        ("ray+fsdp", "ray", "auto"),
        ("ddp+local", "local", 1),
    ],
)
def test_a_backend_is_one_word_or_two(backend: str, place: str, shard: object) -> None:
    options = TrainingService.options(procs=2, backend=backend)
    assert (options.place, options.layout().shard) == (place, shard)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backend": "slurm"}, "'slurm' is unknown; a backend is one of local, ray, one of ddp, fsdp"),
        ({"backend": "ray+local"}, "names more than one of local, ray"),
        ({"backend": "fsdp", "parallel": {"shard": 2}}, "give one"),
        ({"parallel": {"backend": "deepspeed"}}, "deepspeed is not for a service"),
        ({"procs": 0}, "at least one"),
        ({"procs": 2, "parallel": {"tensor": 3}}, "the run has 2"),
    ],
)
def test_options_that_contradict_each_other_are_refused_at_once(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainingService.options(**given)


class StillWorker:
    """Answers when the test says so."""

    pid = None

    def __init__(self, rank: int) -> None:
        self.name, self.asked, self.alive = f"rank {rank}", dict[str, Future[Reply]](), True

    def call(self, method: str, body: Any = None, tensors: Any = None, *, timeout_s: float) -> Future[Reply]:
        self.asked[method] = Future()
        if method == "ping":
            self.asked[method].set_result(Reply())
        return self.asked[method]

    def is_alive(self) -> bool:
        return self.alive

    def kill(self) -> None:
        self.alive = False

    def close(self, grace_s: float = 5.0) -> None:
        self.alive = False


REFUSED, FINE = Reply({"mistake": "the batch is empty"}), Reply({"loss": 1})
LOST = WorkerFailed("rank 0", "learn", "RuntimeError", "Connection closed by peer", "")
DIED, LATE = WorkerDied("rank 1", "rank 1 was ended by signal 9"), WorkerTimedOut("rank 1", "rank 1 gave no answer")
Outcome = Reply | Exception | None


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ((FINE, FINE), None),
        ((REFUSED, REFUSED), "^the batch is empty$"),
        ((REFUSED, FINE), "^rank 0 refused learn: the batch is empty; the others did not$"),
        ((FINE, REFUSED), "^rank 1 refused learn: the batch is empty; the others did not$"),
        ((REFUSED, None), "^rank 0 refused learn: the batch is empty; rank 1 gave no answer to learn$"),
        ((LOST, None), "^rank 0: learn failed: Connection closed by peer; rank 1 gave no answer to learn$"),
        ((LOST, DIED), "^rank 1 was ended by signal 9$"),
        ((None, DIED), "^rank 1 was ended by signal 9$"),
        ((FINE, LATE), "^rank 1 gave no answer to learn in time$"),
        ((LATE, LATE), "^ranks 0, 1 gave no answer to learn in time$"),
    ],
)
def test_ranks_that_do_not_agree_are_ended_and_the_one_at_fault_is_named(
    outcomes: tuple[Outcome, Outcome], expected: str | None
) -> None:
    workers = [StillWorker(0), StillWorker(1)]
    ranks = RemoteRanks(workers, health_timeout_s=SOON)
    answer, later = ranks.call("learn", timeout_s=SOON), ranks.call("step", timeout_s=SOON)
    for worker, outcome in zip(workers, outcomes, strict=True):
        if isinstance(outcome, Reply):
            worker.asked["learn"].set_result(outcome)
        elif outcome is not None:
            worker.asked["learn"].set_exception(outcome)
    if expected is None:
        assert answer.result(SOON) is FINE
    elif outcomes == (REFUSED, REFUSED):
        with pytest.raises(ValueError, match=expected):
            answer.result(SOON)
    else:
        for future in (answer, later):
            with pytest.raises(TrainingFailed, match=expected):
                future.result(SOON)
    ranks.shut()
    assert not any(worker.alive for worker in workers)
    with pytest.raises(TrainingFailed):
        ranks.call("learn", timeout_s=SOON).result(SOON)


def test_a_service_without_a_step_or_a_place_says_so() -> None:
    ranks = RemoteRanks([StillWorker(0)], health_timeout_s=SOON)
    service = TrainingService(ranks, None, False, SOON)
    with pytest.raises(ValueError, match="optim_step needs a step"):
        service.optim_step()
    with pytest.raises(ValueError, match="give as_service a checkpoint_dir"):
        service.save("a")
    service.kill()
