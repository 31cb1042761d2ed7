"""Scripted servers that really sample: our own engine behind them, loaded from the folders they are sent."""

from __future__ import annotations

import threading
from typing import Any

from scripted_rollout_servers import ScriptedSglang, ScriptedVllm

from lockstep.inference.engine import LocalEngine
from lockstep.types import SamplingParams, TextCompletion


class _Models:
    """Engines by the folder that they were loaded from."""

    def __init__(self) -> None:
        self._engines: dict[str, LocalEngine] = {}
        self._lock = threading.Lock()

    def sample(self, folder: str, prompt: list[int], seed: int, **shape: Any) -> TextCompletion:
        with self._lock:
            if folder not in self._engines:
                self._engines = {folder: LocalEngine.load(folder, device="cpu")}
            params = SamplingParams(seed=seed, logprobs=True, **shape)
            ((answer,),) = self._engines[folder].sample([prompt], params)
        return answer


def _shape(said: dict[str, Any]) -> dict[str, Any]:
    top_k = max(said["top_k"], 0)
    return {
        "temperature": said["temperature"],
        "top_p": said["top_p"],
        "top_k": top_k,
        "stop": tuple(said.get("stop", ())),
    }


class ModelSglang(ScriptedSglang):
    """Whole models."""

    def __init__(self) -> None:
        super().__init__()
        self.engines = _Models()

    def on_update_weights_from_disk(self, body: Any) -> tuple[int, Any]:
        self.label, self.folder = body["weight_version"], body["model_path"]
        return 200, {"success": True, "message": "Succeeded to update model weights."}

    def on_generate(self, body: Any) -> tuple[int, Any]:
        parts = []
        for prompt, said in zip(body["input_ids"], body["sampling_params"], strict=True):
            shape = {"max_tokens": said["max_new_tokens"], **_shape(said)}
            answer = self.engines.sample(self.folder, prompt, said["sampling_seed"], **shape)
            pairs = zip(answer.logprobs or (), answer.tokens, strict=True)
            about = {
                "finish_reason": {"type": answer.finish_reason},
                "prompt_tokens": len(prompt),
                "completion_tokens": len(answer.tokens),
                "weight_version": self.label,
                "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            }
            parts.append({"text": answer.text, "meta_info": about})
        return 200, parts


class ModelVllm(ScriptedVllm):
    """Adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.engines = _Models()

    def on_completions(self, body: Any) -> tuple[int, Any]:
        folder, choices = self.adapters[body["model"]], []
        for index in range(body["n"]):
            shape = {"max_tokens": body["max_tokens"], **_shape(body)}
            answer = self.engines.sample(folder, body["prompt"], body["seed"] + index, **shape)
            logprobs = {
                "tokens": [f"token_id:{t}" for t in answer.tokens],
                "token_logprobs": list(answer.logprobs or ()),
            }
            choices.append(
                {"index": index, "text": answer.text, "logprobs": logprobs, "finish_reason": answer.finish_reason}
            )
        total = sum(len(choice["logprobs"]["tokens"]) for choice in choices)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": total}
        return 200, {"model": body["model"], "choices": choices, "usage": usage}
