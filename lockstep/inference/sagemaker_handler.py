"""Serves an exported model in SageMaker's PyTorch containers. `lockstep sagemaker` copies this file into the model as
code/inference.py. Lockstep is not installed there, so that it imports nothing of it.

Requests are {"inputs": text or list of texts} or {"messages": [...]}, both with "parameters" if need be.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PARAMETERS = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "return_full_text")
MAX_NEW_TOKENS = 256


def model_fn(model_dir: str, context: object = None) -> tuple[object, object]:
    """(model, tokenizer). An adapter is put on the model it was trained on, or on $BASE_MODEL."""
    folder, device = Path(model_dir), "cuda" if torch.cuda.is_available() else "cpu"
    adapter = folder / "adapter_config.json"
    source: str | Path = folder
    if adapter.exists():
        source = os.environ.get("BASE_MODEL") or json.loads(adapter.read_text())["base_model_name_or_path"]
        if str(source).startswith("/") and not Path(source).is_dir():
            raise ValueError(f"the adapter was trained on {source}, which is not here: set BASE_MODEL to where it is")
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    if adapter.exists():
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)


def input_fn(body: str | bytes, content_type: str = "application/json", context: object = None) -> dict[str, object]:
    if content_type.split(";")[0].strip() != "application/json":
        raise ValueError(f"content type {content_type} is not known: send application/json")
    try:
        request = json.loads(body)
    except ValueError as error:
        raise ValueError(f"the request is not JSON: {error}") from error
    if not isinstance(request, dict) or ("inputs" in request) == ("messages" in request):
        raise ValueError('the request must be an object with either "inputs" or "messages"')
    unknown = set(request.get("parameters") or {}) - set(PARAMETERS)
    if unknown:
        raise ValueError(f"unknown parameters {', '.join(sorted(unknown))}: known are {', '.join(PARAMETERS)}")
    return request


@torch.inference_mode()
def predict_fn(request: dict[str, Any], loaded: tuple[Any, Any], context: object = None) -> list[dict[str, str]]:
    model, tokenizer = loaded
    parameters = dict(request.get("parameters") or {})
    if parameters.get("seed") is not None:
        torch.manual_seed(int(parameters["seed"]))
    return [_complete(model, tokenizer, tokens, parameters) for tokens in _prompts(request, tokenizer)]


def output_fn(answers: list[dict[str, str]], accept: str = "application/json", context: object = None) -> str:
    if accept.split(";")[0].strip() not in ("application/json", "*/*", ""):
        raise ValueError(f"{accept} cannot be answered: accept application/json")
    return json.dumps(answers)


def _prompts(request: Mapping[str, object], tokenizer: Any) -> list[torch.Tensor]:
    """Token ids of shape [1, length], one for each answer."""
    if "messages" in request:
        tokens = tokenizer.apply_chat_template(
            request["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        return [tokens]
    inputs = request["inputs"]
    texts = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError('"inputs" must be a text or a list of texts, none of them empty')
    return [tokenizer(text, return_tensors="pt").input_ids for text in texts]


def _complete(model: Any, tokenizer: Any, tokens: torch.Tensor, parameters: dict[str, Any]) -> dict[str, str]:
    temperature = float(parameters.get("temperature", 0.0))
    choice: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        choice |= {"temperature": temperature, "top_p": float(parameters.get("top_p", 1.0))}
        choice |= {"top_k": int(parameters.get("top_k", 0))}
    tokens = tokens.to(model.device)
    made = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=int(parameters.get("max_new_tokens", MAX_NEW_TOKENS)),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        **choice,
    )
    start = 0 if parameters.get("return_full_text") else tokens.shape[1]
    return {"generated_text": tokenizer.decode(made[0, start:], skip_special_tokens=True)}
