"""One rank of a training service, inside its worker: joins the others, builds the backend, and runs its calls.

Every rank gets the same calls in the same order. A user's mistake is an answer; anything else is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.backend.optimizers import OptimizerSettings
from lockstep.backend.remote import wire
from lockstep.backend.router_balance import RouterLosses
from lockstep.backend.torch_backend import TorchBackend, agree_on_precision, join_group
from lockstep.config import LoraConfig, ModelConfig, ParallelConfig
from lockstep.model.checkpoint_storage import INDEX, PICKLED_INDEX
from lockstep.model.load import build_model, keep_freed_memory
from lockstep.processes.child import Method, telling_mistakes
from lockstep.processes.worker import Body, Reply
from lockstep.rundir import RunDir, damage


def start(settings: Body) -> TrainingRank:
    """The entry of every rank. Where the ranks meet comes later, with `build`."""
    return TrainingRank(settings)


class TrainingRank:
    def __init__(self, settings: Body) -> None:
        self._settings = settings
        self._backend: TorchBackend | None = None
        self._store: dist.TCPStore | None = None
        self._saving: Future[Reply] | None = None
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-commit")
        calls: list[Method] = [self.meet, self.build, self.forward, self.forward_backward, self.optim_step]
        calls += [self.mix_reference, self.save_state, self.load_state, self.export_weights]
        calls += [self.save, self.load, self.leave]
        self.methods = {method.__name__: telling_mistakes(method) for method in calls}
        self.immediate: dict[str, Method] = {"ping": lambda body, tensors: {}}

    def has_work(self) -> bool:
        return False

    def work(self) -> None:
        raise AssertionError("there is no other work")

    def close(self) -> None:
        self._wait_for_save()

    @property
    def backend(self) -> TorchBackend:
        assert self._backend is not None, "build comes first"
        return self._backend

    # --- beginning and end ------------------------------------------------------------------------------------------

    def meet(self, body: Body, tensors: dict[str, Tensor]) -> dict[str, object]:
        """The host of this rank; rank 0 also opens the store that all join, on a port that the system chooses."""
        host = "127.0.0.1"
        if self._settings["place"] == "ray":
            import ray

            host = ray.util.get_node_ip_address()
        if body["rank"] == 0 and body["num_ranks"] > 1:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return {"host": host, "port": self._store.port if self._store else 0}

    def build(self, body: Body, tensors: dict[str, Tensor]) -> dict[str, object]:
        settings = self._settings
        os.environ |= body["environment"] | {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store is there already
        parallel = ParallelConfig.model_validate(settings["parallel"])
        config = ModelConfig.model_validate(settings["model"])
        lora = LoraConfig.model_validate(settings["lora"]) if settings["lora"] is not None else None
        group = join_group(settings["device"], parallel, settings["timeout_s"])
        keep_freed_memory()
        precision = agree_on_precision(config.precision, group)
        torch.manual_seed(settings["seed"])  # new adapters begin alike in every layout
        model = build_model(config, lora, precision, with_weights=group.rank == 0)
        self._backend = TorchBackend(
            model,
            parallel=parallel,
            precision=precision,
            activation_checkpointing=config.activation_checkpointing,
            activation_offload=config.activation_offload,
            compile=config.compile,
            logits_gib=config.logits_gib,
            micro_batch_tokens=settings["micro_batch_tokens"],
            reference=settings["reference"],
            router_losses=RouterLosses.of(config),
            optimizer=OptimizerSettings(lora_b_ratio=1.0 if lora is None else lora.b_learning_rate_ratio),
            seed=settings["seed"],
            group=group,
        )
        return {
            "precision": precision,
            "device": str(group.device),
            "warnings": [*self._backend.warnings, *self._backend.slow],
        }

    def leave(self, body: Body, tensors: dict[str, Tensor]) -> None:
        """The last method. All ranks."""
        self._wait_for_save()
        self.backend.close()

    # --- the backend's own ------------------------------------------------------------------------------------------

    def forward(self, body: Body, tensors: dict[str, Tensor]) -> Reply:
        logprobs = self.backend.forward(wire.decode_batch(body["batch"], tensors), reference=body["reference"])
        return Reply(*wire.encode_logprobs(logprobs if self.backend.group.rank == 0 else []))

    def forward_backward(self, body: Body, tensors: dict[str, Tensor]) -> dict[str, object]:
        batch = wire.decode_batch(body["batch"], tensors)
        return wire.encode_loss_result(self.backend.forward_backward(batch, wire.decode_loss(body["loss"])))

    def optim_step(self, body: Body, tensors: dict[str, Tensor]) -> dict[str, object]:
        return wire.encode_optim_result(self.backend.optim_step(wire.read_step(body)))

    def mix_reference(self, body: Body, tensors: dict[str, Tensor]) -> None:
        self.backend.mix_reference(body["share"])

    def save_state(self, body: Body, tensors: dict[str, Tensor]) -> Future[Reply]:
        self._wait_for_save()
        return self._write(Path(body["path"]), lambda: Reply())

    def load_state(self, body: Body, tensors: dict[str, Tensor]) -> None:
        self._wait_for_save()
        path = Path(body["path"])
        if not any((path / name).is_file() for name in (INDEX, PICKLED_INDEX)):
            raise ValueError(f"{path} holds no saved state")
        self.backend.load_state(path, with_optimizer=body["with_optimizer"])

    def export_weights(self, body: Body, tensors: dict[str, Tensor]) -> None:
        path = Path(body["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        self.backend.export_weights(path)

    # --- checkpoints under a name -----------------------------------------------------------------------------------

    def save(self, body: Body, tensors: dict[str, Tensor]) -> Future[Reply]:
        """Committed by rank 0 when every rank's part is on disk; the previous one is deleted afterwards."""
        self._wait_for_save()
        run, group = self._named(body["name"]), self.backend.group
        run.sweep()
        kept = [checkpoint.step for checkpoint in run.list_checkpoints()] if group.rank == 0 else []
        number = group.broadcast_object(max(kept, default=0) + 1)

        def commit() -> Reply:
            if group.rank != 0:
                return Reply()
            path = run.commit_checkpoint(number, {"name": body["name"]})
            run.prune_checkpoints(keep_last=1, keep_best=0)
            return Reply({"path": str(path)})

        return self._write(run.begin_checkpoint(number), commit)

    def load(self, body: Body, tensors: dict[str, Tensor]) -> None:
        self._wait_for_save()
        group, name = self.backend.group, body["name"]
        path, problem = group.broadcast_object(self._find(name) if group.rank == 0 else None)
        if problem:
            raise ValueError(problem)
        self.backend.load_state(Path(path), with_optimizer=body["with_optimizer"])

    def _find(self, name: str) -> tuple[str, str]:
        """(folder, what is wrong with it): digests are checked before anything is read."""
        kept = self._named(name).list_checkpoints()
        if not kept:
            root = Path(self._settings["checkpoint_dir"])
            known = ", ".join(sorted(p.parent.name for p in root.glob("*/checkpoints"))) or "none"
            return "", f"there is no checkpoint {name!r} in {root}: known are {known}"
        problem = damage(kept[-1].path)
        return str(kept[-1].path), f"the checkpoint {name!r} is damaged: {problem}" if problem else ""

    def _named(self, name: str) -> RunDir:
        return RunDir(Path(self._settings["checkpoint_dir"]) / name, owner=int(os.environ.get("RANK", "0")) == 0)

    def _write(self, path: Path, commit: Callable[[], Reply]) -> Future[Reply]:
        """In the background: the next method begins meanwhile."""
        path.mkdir(parents=True, exist_ok=True)
        written = self.backend.save_state(path)

        def finish() -> Reply:
            try:
                written.result()
                return commit()
            except Exception as error:  # a full disk, say: the ranks still hold what was trained
                return Reply({"unwritten": _first_cause(error)})

        self._saving = self._committer.submit(finish)
        return self._saving

    def _wait_for_save(self) -> None:
        """Two saves at once would mix their collectives. If it failed, its own call says so."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.exception(self._settings["timeout_s"])


def _first_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    failures = getattr(error, "failures", None)  # torch's CheckpointException: {rank: (exception, stack)}
    if failures:
        error = next(iter(failures.values()))[0]
    return str(error).strip().split("\n")[0] or type(error).__name__
