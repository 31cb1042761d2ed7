"""What vLLM and SGLang document of their routes: tokens in and out with log-probs, and newer weights from a folder.

What a reply should have and has not is an error that says so: nothing is guessed. Must not know when weights change.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lockstep.inference.openai.http import Connection, EndpointError, EndpointRefusal, shorten
from lockstep.types import Prompt, SamplingParams, TextCompletion

_TOKEN_ID = "token_id:"


@dataclass(frozen=True)
class Published:
    """Weights in a folder that the server can read. `name` says which: it holds their digest, so no two share one."""

    version: int
    name: str
    folder: Path


class Server(Protocol):
    """One kind of server. `adapters`: what is published are LoRA adapters of the model that it serves."""

    connection: Connection
    adapters: bool

    def load(self, published: Published) -> None:
        """Returns once the server says that it has these weights, and says so again when it is asked."""
        ...

    def unload(self, published: Published) -> None: ...

    def answer(
        self, prompt: Prompt, params: SamplingParams, seeds: Sequence[int], published: Published, origin: str
    ) -> list[TextCompletion]:
        """A completion for each seed."""
        ...

    def confirm(self, published: Published) -> None:
        """That all answers since `load` were of these weights, where answers themselves do not say so."""
        ...


class VllmServer:
    """`/v1/completions` with token ids. Adapters by `/v1/load_lora_adapter`, and answers of a version by its name.

    Whole models by the development routes (VLLM_SERVER_DEV_MODE=1): paused, reloaded from the folder, named, resumed.
    """

    def __init__(self, connection: Connection, *, adapters: bool, model: str | None = None) -> None:
        self.connection, self.adapters = connection, adapters
        self._model = model
        if model is None and not adapters:
            self._model = self._find_model()

    def load(self, published: Published) -> None:
        try:
            (self._load_adapter if self.adapters else self._load_model)(published)
        except EndpointRefusal as refusal:
            if refusal.status != 404:
                raise
            needs = (
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora" if self.adapters else "VLLM_SERVER_DEV_MODE=1"
            )
            words = f"{refusal}. Does the server see this folder, and was it started with {needs}?"
            raise EndpointRefusal(words, refusal.status) from refusal

    def _load_adapter(self, published: Published) -> None:
        self.unload(published)  # one that it has already it would refuse
        body = {"lora_name": published.name, "lora_path": str(published.folder)}
        self.connection.tell("/v1/load_lora_adapter", body, origin=f"the adapter {published.folder}")
        found = self._folder_of(published.name)
        if found != str(published.folder):
            raise EndpointError(
                f"{self.connection.root} took the adapter {published.name}, and lists it with the folder {found}"
            )

    def _load_model(self, published: Published) -> None:
        origin = f"the weights {published.folder}"

        def tell(path: str, **body: Any) -> None:
            self.connection.tell(path, body, origin=origin)

        tell("/pause?mode=wait")
        # A reload that breaks off must not leave the name of what was there before.
        tell("/update_weight_version", new_version=f"loading {published.name}")
        tell("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(published.folder)})
        tell("/reset_prefix_cache")
        tell("/update_weight_version", new_version=published.name)
        tell("/resume")
        self.confirm(published)

    def unload(self, published: Published) -> None:
        if self.adapters:
            with contextlib.suppress(EndpointRefusal):
                self.connection.tell("/v1/unload_lora_adapter", {"lora_name": published.name}, origin="an old adapter")

    def answer(
        self, prompt: Prompt, params: SamplingParams, seeds: Sequence[int], published: Published, origin: str
    ) -> list[TextCompletion]:
        if params.temperature not in (0, 1):
            raise ValueError(
                f"vLLM gives log-probs at temperature 1, and algorithm.temperature is {params.temperature:g}: set it "
                "to 1, or take engines of another kind"
            )
        model = published.name if self.adapters else self._model
        body = {
            "model": model,
            "prompt": list(prompt),
            "n": len(seeds),
            "seed": seeds[0],  # its samples take the numbers from here on
            "max_tokens": params.max_tokens,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            "top_k": params.top_k,
            **_shape(params),
        }
        reply = self.connection.ask_object("/v1/completions", body, origin=origin)
        if reply.get("model") != model:
            raise EndpointError(f"{self.connection.root} answered {origin} with {reply.get('model')} and not {model}")
        with _reading(self.connection.root, origin, reply):
            choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
            found = [_read_choice(choice, published.version) for choice in choices]
            counted = (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"])
        _check(found, counted, prompt, params, len(seeds), f"{self.connection.root} answered {origin}")
        return found

    def confirm(self, published: Published) -> None:
        if self.adapters:
            return
        found = self.connection.ask_object("/weight_info", origin="which weights it has").get("weight_version")
        _refuse_other_weights(found, published, self.connection.root)

    def _find_model(self) -> str:
        names = [card["id"] for card in self._cards() if not card.get("parent")]
        if len(names) != 1:
            raise ValueError(f"{self.connection.root} serves {', '.join(names) or 'no model'}: name the one to train")
        return names[0]

    def _folder_of(self, adapter: str) -> str | None:
        return next((str(card.get("root")) for card in self._cards() if card["id"] == adapter), None)

    def _cards(self) -> list[dict[str, Any]]:
        reply = self.connection.ask_object("/v1/models", origin="its list of models")
        with _reading(self.connection.root, "its list of models", reply):
            return [{**card, "id": str(card["id"])} for card in reply["data"]]


class SglangServer:
    """`/generate` with token ids. Whole models by `/update_weights_from_disk`, with a name that every answer repeats.

    Adapters by `/load_lora_adapter`, and answers of a version by its name.
    """

    def __init__(self, connection: Connection, *, adapters: bool) -> None:
        self.connection, self.adapters = connection, adapters

    def load(self, published: Published) -> None:
        ask, name, folder = self.connection, published.name, str(published.folder)
        if self.adapters:
            self.unload(published)  # one that it has already it would refuse
            reply = ask.ask_object(
                "/load_lora_adapter", {"lora_name": name, "lora_path": folder}, origin=f"the adapter {name}"
            )
            if reply.get("success") is not True or name not in (reply.get("loaded_adapters") or ()):
                raise EndpointError(f"{ask.root} did not take the adapter {name}: {shorten(json.dumps(reply))}")
            return
        body = {"model_path": folder, "weight_version": name, "flush_cache": True}
        reply = ask.ask_object("/update_weights_from_disk", body, origin=f"the weights {name}")
        if reply.get("success") is not True:
            raise EndpointError(f"{ask.root} did not take the weights {name}: {shorten(json.dumps(reply))}")
        info = self._model_info()
        _refuse_other_weights(info.get("weight_version"), published, ask.root)
        if info.get("model_path") != folder:
            raise EndpointError(f"{ask.root} was told of {folder}, and says that it has {info.get('model_path')}")

    def unload(self, published: Published) -> None:
        if self.adapters:
            with contextlib.suppress(EndpointRefusal):
                self.connection.tell("/unload_lora_adapter", {"lora_name": published.name}, origin="an old adapter")

    def answer(
        self, prompt: Prompt, params: SamplingParams, seeds: Sequence[int], published: Published, origin: str
    ) -> list[TextCompletion]:
        shape = {"max_new_tokens": params.max_tokens, "top_k": params.top_k or -1, **_shape(params)}
        body: dict[str, Any] = {
            "input_ids": [list(prompt)] * len(seeds),
            # One seed for several samples would give the same sample several times.
            "sampling_params": [{**shape, "sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
        }
        if self.adapters:
            body["lora_path"] = [published.name] * len(seeds)
        reply = self.connection.ask("/generate", body, origin=origin)
        with _reading(self.connection.root, origin, reply):
            if not self.adapters:
                for part in reply:
                    _refuse_other_weights(part["meta_info"].get("weight_version"), published, self.connection.root)
            found = [_read_part(part, published.version) for part in reply]
            lengths = {part["meta_info"]["prompt_tokens"] for part in reply}
            counted = (max(lengths, default=0), sum(part["meta_info"]["completion_tokens"] for part in reply))
        _check(found, counted, prompt, params, len(seeds), f"{self.connection.root} answered {origin}")
        return found

    def confirm(self, published: Published) -> None:
        """Every answer has said so, or was asked of this adapter by name."""

    def _model_info(self) -> dict[str, Any]:
        try:
            return self.connection.ask_object("/model_info", origin="which weights it has")
        except EndpointRefusal as refusal:
            if refusal.status != 404:
                raise
            return self.connection.ask_object("/get_model_info", origin="which weights it has")  # its older name


SERVERS: dict[str, type[VllmServer] | type[SglangServer]] = {"vllm": VllmServer, "sglang": SglangServer}


def _shape(params: SamplingParams) -> dict[str, Any]:
    """All of it is said, because servers fill in what they find beside a model."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        **({"stop": list(params.stop)} if params.stop else {}),
        **({"stop_token_ids": list(params.stop_tokens)} if params.stop_tokens else {}),
    }


def _read_choice(choice: dict[str, Any], version: int) -> TextCompletion:
    """Of vLLM: names of tokens are their numbers."""
    logprobs = choice["logprobs"]
    tokens = tuple(int(name.removeprefix(_TOKEN_ID)) for name in logprobs["tokens"])
    return _complete(tokens, logprobs["token_logprobs"], choice["text"], choice["finish_reason"], version)


def _read_part(part: dict[str, Any], version: int) -> TextCompletion:
    """Of SGLang: (log-prob, token, text) of every token."""
    about = part["meta_info"]
    pairs = about["output_token_logprobs"]
    tokens = tuple(int(pair[1]) for pair in pairs)
    return _complete(tokens, [pair[0] for pair in pairs], part["text"], about["finish_reason"]["type"], version)


def _complete(tokens: tuple[int, ...], logprobs: Sequence[Any], text: str, reason: str, version: int) -> TextCompletion:
    if reason not in ("stop", "length"):
        raise ValueError(f"an answer ended with {reason}")
    if not tokens or len(tokens) != len(logprobs):
        raise ValueError(f"an answer has {len(tokens)} tokens and {len(logprobs)} log-probs")
    values = tuple(float(value) for value in logprobs)
    if not all(math.isfinite(value) and value < 1e-3 for value in values):
        raise ValueError("a log-prob is not a number below 0")
    return TextCompletion(tokens, str(text), "length" if reason == "length" else "stop", values, version)


def _check(
    found: Sequence[TextCompletion],
    counted: tuple[int, int],
    prompt: Prompt,
    params: SamplingParams,
    num_samples: int,
    what: str,
) -> None:
    if len(found) != num_samples:
        raise EndpointError(f"{what} with {len(found)} answers where {num_samples} were asked for")
    if counted[0] != len(prompt):
        raise EndpointError(f"{what} after {counted[0]} tokens of a prompt that has {len(prompt)}")
    num_tokens = sum(len(answer.tokens) for answer in found)
    if counted[1] != num_tokens:
        raise EndpointError(f"{what} with {counted[1]} tokens, and gave {num_tokens} of them")
    longest = max(len(answer.tokens) for answer in found)
    if longest > params.max_tokens:
        raise EndpointError(f"{what} with {longest} tokens where at most {params.max_tokens} were asked for")


def _refuse_other_weights(found: Any, published: Published, where: str) -> None:
    if found != published.name:
        raise EndpointError(
            f"{where} has the weights {found!r}, and {published.name!r} were published: was it restarted, or does "
            "somebody else change it too?"
        )


@contextlib.contextmanager
def _reading(where: str, origin: str, reply: Any) -> Any:
    """What is not there, or is something else, is the server's fault and not ours."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        problem = f"no {error.args[0]!r} in it" if isinstance(error, KeyError) else str(error)
        raise EndpointError(
            f"{where} answered {origin} in an unknown shape ({problem}): {shorten(json.dumps(reply))}"
        ) from error
