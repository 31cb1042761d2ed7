"""Servers that take weights and sample tokens as vLLM and SGLang document it, and misbehave as their script says.

What they sample follows from the bytes of the weights they were given, the prompt and the seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from scripted_server import ScriptedServer

BASE = b"the weights it was started with"


def draw(weights: bytes, prompt: list[int], seed: int, max_tokens: int) -> list[tuple[int, float]]:
    """Tokens and their log-probs."""
    bits = hashlib.sha256(weights + repr((prompt, seed)).encode()).digest()
    return [(byte, -(byte + 1) / 64) for byte in bits[1 : 2 + bits[0] % max_tokens]]


def read_weights(folder: str) -> bytes:
    return (Path(folder) / "weights.bin").read_bytes()


class ScriptedRolloutServer(ScriptedServer):
    """`spoil` gets every reply before it is sent, with the path; `visited` has all paths, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.spoil: Callable[[str, Any], Any] = lambda path, reply: reply
        self.visited: list[str] = []
        self.restart()

    def restart(self) -> None:
        self.weights, self.label, self.folder = BASE, "default", "base"
        self.adapters: dict[str, str] = {}
        self.is_paused = False

    def get(self, path: str) -> tuple[int, Any]:
        return self._visit(path, None)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return self._visit(path, body)

    def _visit(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        self.visited.append(path)
        if path == "/health":
            return 200, b""
        route = getattr(self, "on" + urlsplit(path).path.replace("/v1", "").replace("/", "_"), None)
        if route is None:
            return 404, {"detail": "Not Found"}
        status, reply = route(body)
        return status, self.spoil(path, reply)


class ScriptedVllm(ScriptedRolloutServer):
    def on_models(self, _: Any) -> tuple[int, Any]:
        cards = [{"id": "base", "root": "base", "parent": None}]
        return 200, {"data": cards + [{"id": n, "root": f, "parent": "base"} for n, f in self.adapters.items()]}

    def on_load_lora_adapter(self, body: Any) -> tuple[int, Any]:
        name = body["lora_name"]
        if name in self.adapters:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        if not Path(body["lora_path"]).exists():
            return 404, {"error": {"message": "no adapter found"}}
        self.adapters[name] = body["lora_path"]
        return 200, b"Success: LoRA adapter added successfully."

    def on_unload_lora_adapter(self, body: Any) -> tuple[int, Any]:
        found = self.adapters.pop(body["lora_name"], None)
        return (200, b"Success") if found else (404, {"error": {"message": "cannot be found"}})

    def on_pause(self, _: Any) -> tuple[int, Any]:
        self.is_paused = True
        return 200, {"status": "paused"}

    def on_resume(self, _: Any) -> tuple[int, Any]:
        self.is_paused = False
        return 200, {"status": "resumed"}

    def on_collective_rpc(self, body: Any) -> tuple[int, Any]:
        assert self.is_paused
        assert body["method"] == "reload_weights"
        self.weights = read_weights(body["kwargs"]["weights_path"])
        return 200, {"results": [None]}

    def on_reset_prefix_cache(self, _: Any) -> tuple[int, Any]:
        return 200, b""

    def on_update_weight_version(self, body: Any) -> tuple[int, Any]:
        self.label = body["new_version"]
        return 200, {"success": True, "new_version": self.label}

    def on_weight_info(self, _: Any) -> tuple[int, Any]:
        return 200, {"weight_version": self.label}

    def on_completions(self, body: Any) -> tuple[int, Any]:
        assert not self.is_paused
        if body["model"] not in ("base", *self.adapters):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        weights = read_weights(self.adapters[body["model"]]) if body["model"] in self.adapters else self.weights
        choices = []
        for index in range(body["n"]):
            pairs = draw(weights, body["prompt"], body["seed"] + index, body["max_tokens"])
            logprobs = {"tokens": [f"token_id:{t}" for t, _ in pairs], "token_logprobs": [lp for _, lp in pairs]}
            reason = "length" if len(pairs) == body["max_tokens"] else "stop"
            text = " ".join(str(t) for t, _ in pairs)
            choices.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason})
        total = sum(len(choice["logprobs"]["tokens"]) for choice in choices)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": total}
        return 200, {"model": body["model"], "choices": choices[::-1], "usage": usage}


class ScriptedSglang(ScriptedRolloutServer):
    has_new_names = True

    def on_update_weights_from_disk(self, body: Any) -> tuple[int, Any]:
        folder = body["model_path"]
        if not Path(folder).exists():
            return 400, {"success": False, "message": f"Failed to get weights iterator: {folder}"}
        self.weights, self.label, self.folder = read_weights(folder), body["weight_version"], folder
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def on_model_info(self, _: Any) -> tuple[int, Any]:
        if not self.has_new_names:
            return 404, {"detail": "Not Found"}
        return self.on_get_model_info(None)

    def on_get_model_info(self, _: Any) -> tuple[int, Any]:
        return 200, {"model_path": self.folder, "weight_version": self.label}

    def on_load_lora_adapter(self, body: Any) -> tuple[int, Any]:
        name = body["lora_name"]
        if name in self.adapters:
            return 400, {"success": False, "error_message": f"LoRA adapter {name} is already loaded."}
        self.adapters[name] = body["lora_path"]
        return 200, {"success": True, "error_message": None, "loaded_adapters": self.adapters}

    def on_unload_lora_adapter(self, body: Any) -> tuple[int, Any]:
        found = self.adapters.pop(body["lora_name"], None)
        return (200 if found else 400), {"success": bool(found)}

    def on_generate(self, body: Any) -> tuple[int, Any]:
        parts = []
        for place, (prompt, params) in enumerate(zip(body["input_ids"], body["sampling_params"], strict=True)):
            weights = self.weights
            if "lora_path" in body:
                if body["lora_path"][place] not in self.adapters:
                    return 400, {"error": {"message": "LoRA adapter is not loaded"}}
                weights = read_weights(self.adapters[body["lora_path"][place]])
            pairs = draw(weights, prompt, params["sampling_seed"], params["max_new_tokens"])
            reason = "length" if len(pairs) == params["max_new_tokens"] else "stop"
            about = {
                "finish_reason": {"type": reason},
                "prompt_tokens": len(prompt),
                "completion_tokens": len(pairs),
                "weight_version": self.label,
                "output_token_logprobs": [[logprob, token, None] for token, logprob in pairs],
            }
            parts.append({"text": " ".join(str(t) for t, _ in pairs), "meta_info": about})
        return 200, parts
