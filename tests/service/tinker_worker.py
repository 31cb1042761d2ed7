"""The process of a base model without a model: same methods, made-up numbers, and a journal of what it was asked.

The model's path is a folder: `journal.jsonl` is written there, and files in it say how to behave: `delay` (seconds that
a forward pass takes), `sample_delay` (the same of a sample), `slow` (what it says about itself when asked).
"""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.processes.worker import Reply

LOSSES = ("cross_entropy", "importance_sampling", "ppo")


def start(settings: dict[str, Any]) -> FakeModel:
    return FakeModel(settings)


class FakeModel:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.folder = Path(settings["model"]["path"])
        if not self.folder.is_dir():
            raise ValueError(f"there is no model in {self.folder}")
        self.models: dict[str, dict[str, Any]] = {}
        self.samples: dict[str, Future[Reply]] = {}
        self.methods = {
            name: self.journaled(name, getattr(self, name))
            for name in (
                *("describe", "create_model", "forward_backward", "optim_step", "save_weights", "load_weights"),
                *("unload_model", "sample", "close_adapter"),
            )
        }
        self.immediate = {"cancel": self.journaled("cancel", self.cancel), "ping": self.ping}

    def journaled(self, name: str, method: Any) -> Any:
        def call(body: dict[str, Any], tensors: object) -> Any:
            seen = {key: value for key, value in body.items() if not isinstance(value, memoryview)}
            with (self.folder / "journal.jsonl").open("a") as file:
                file.write(json.dumps({"method": name, "pid": os.getpid(), **seen}) + "\n")
            if "model_id" in body and name != "create_model" and body["model_id"] not in self.models:
                raise LookupError(f"there is no model {body['model_id']}")
            return method(body)

        return call

    def ping(self, body: dict[str, Any], tensors: object) -> dict[str, Any]:
        file = self.folder / "slow"
        return {"busy": False, "slow": file.read_text().splitlines() if file.exists() else []}

    def setting(self, name: str) -> float:
        file = self.folder / name
        return float(file.read_text()) if file.exists() else 0.0

    def describe(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"max_context_length": 64, "device": "cpu", "precision": "fp32", "slow": []}

    def create_model(self, body: dict[str, Any]) -> dict[str, Any]:
        self.models[body["model_id"]] = {"rank": body["rank"], "step": 0, "passes": 0}
        return {"num_trained": body["rank"]}

    def forward_backward(self, body: dict[str, Any]) -> dict[str, Any]:
        threading.Event().wait(self.setting("delay"))
        if body["loss_fn"] == "explode":
            raise RuntimeError("out of memory")
        if body["loss_fn"] == "die":
            os._exit(3)
        if body["loss_fn"] not in LOSSES:
            return {"mistake": f"there is no loss {body['loss_fn']!r}: choose one of {', '.join(LOSSES)}"}
        targets = np.frombuffer(body["input.target_tokens"], dtype="<i8")
        assert len(targets) == sum(int(np.prod(shape)) for shape in body["shapes"])
        assert len(np.frombuffer(body["tokens"], dtype="<i4")) == sum(body["lengths"])
        logprobs = (-(targets % 7) - 0.5).astype("<f4")
        weights = np.frombuffer(body["input.weights"], dtype="<f4") if "weights" in body["inputs"] else 1.0
        if not body["forward_only"]:
            self.models[body["model_id"]]["passes"] += 1
        return {"logprobs": logprobs.tobytes(), "metrics": {"loss:sum": float(-(weights * logprobs).sum())}}

    def optim_step(self, body: dict[str, Any]) -> dict[str, Any]:
        model = self.models[body["model_id"]]
        passes, model["passes"] = model["passes"], 0
        model["step"] += 1
        return {"metrics": {"grad_norm": float("nan") if not passes else float(passes), "step": model["step"]}}

    def save_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        folder = Path(body["folder"])
        assert folder.parent.is_dir()
        assert not folder.exists()
        unfinished = folder.with_name(f"{folder.name}.writing")
        unfinished.mkdir()
        text = json.dumps(self.models[body["model_id"]])
        (unfinished / "adapter_model.safetensors").write_text(text)
        if body["with_optimizer"]:
            (unfinished / "optimizer.json").write_text(text)
        unfinished.rename(folder)
        return {"size_bytes": len(text)}

    def load_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        saved = json.loads((Path(body["folder"]) / "adapter_model.safetensors").read_text())
        if body["with_optimizer"]:
            assert (Path(body["folder"]) / "optimizer.json").exists()
        self.models[body["model_id"]] |= saved
        return {}

    def unload_model(self, body: dict[str, Any]) -> dict[str, Any]:
        del self.models[body["model_id"]]
        return {}

    def sample(self, body: dict[str, Any]) -> Future[Reply]:
        """The first token is the step of the weights it samples from."""
        step = 0
        if body["adapter"]:
            step = json.loads((Path(body["adapter"]) / "adapter_model.safetensors").read_text())["step"]
        prompt = np.frombuffer(body["prompt"], dtype="<i4")
        length = body["max_tokens"] or 3
        sequence: dict[str, Any] = {
            "stop_reason": "length" if body["max_tokens"] else "stop",
            "tokens": [step, *range(1, length)],
            "logprobs": [-0.5] * length,
        }
        if body["topk_sample_logprobs"]:
            sequence["topk"] = [[[7, -0.1]]] * length
        reply: dict[str, Any] = {"sequences": [sequence] * body["num_samples"]}
        if body["prompt_logprobs"]:
            scored = -prompt.astype("<f4")
            scored[0] = np.nan
            reply["prompt_logprobs"] = scored.tobytes()
        if body["topk_prompt_logprobs"]:
            reply["topk_prompt"] = [[], *([[int(token), -1.0], [3, -2.0]] for token in prompt[1:])]
        if 13 in prompt:
            os._exit(5)
        future: Future[Reply] = Future()
        self.samples[body["call"]] = future
        threading.Timer(self.setting("sample_delay"), self.answer, (body["call"], Reply(reply))).start()
        return future

    def answer(self, call: str, reply: Reply) -> None:
        future = self.samples.pop(call, None)
        if future is not None:
            future.set_result(reply)

    def cancel(self, body: dict[str, Any]) -> dict[str, Any]:
        self.answer(body["call"], Reply({"mistake": "cancelled"}))
        return {}

    def close_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        return {}

    def has_work(self) -> bool:
        return False

    def work(self) -> None:
        raise AssertionError

    def close(self) -> None:
        pass
