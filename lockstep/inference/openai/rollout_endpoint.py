"""A vLLM or SGLang server as the engine of a run: weights go there through a folder, completions come back as tokens
with log-probs.

Only the servers' documented routes are used; a reply that lacks something is an error, nothing is guessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lockstep.inference.openai.endpoint import (
    Connection,
    EndpointError,
    EndpointRefusal,
    error_in,
    map_concurrently,
    normalise_url,
    shorten,
)
from lockstep.types import NamedTensors, PartialCompletions, Prompt, SamplingParams, TextCompletion

Write = Callable[[NamedTensors, Path], None]


@dataclass(frozen=True)
class Published:
    """Weights in a folder that the server can read. `name` holds their digest, so it is unique."""

    version: int
    name: str
    folder: Path


class RolloutServer(Protocol):
    """One kind of server. `adapters`: LoRA adapters of its model are published, not whole models."""

    connection: Connection
    adapters: bool

    def load(self, published: Published) -> None:
        """Returns once the server has acknowledged these weights and, asked again, names them."""
        ...

    def unload(self, published: Published) -> None: ...

    def complete(
        self, prompt: Prompt, params: SamplingParams, seeds: Sequence[int], published: Published, origin: str
    ) -> list[TextCompletion]:
        """A completion for each seed."""
        ...

    def confirm(self, published: Published) -> None:
        """Checks that all completions since `load` used these weights, where replies do not name them."""
        ...


class VllmServer:
    """`/v1/completions` with token ids. Adapters by `/v1/load_lora_adapter`; a request names the adapter it wants.

    Whole models by the development routes (VLLM_SERVER_DEV_MODE=1): pause, reload from the folder, name, resume.
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
            raise EndpointRefusal(
                f"{refusal}. Does the server see this folder, and was it started with {needs}?", refusal.status
            ) from refusal

    def _load_adapter(self, published: Published) -> None:
        self.unload(published)  # a second load of one name is refused
        body = {"lora_name": published.name, "lora_path": str(published.folder)}
        self.connection.request("/v1/load_lora_adapter", body, origin=f"the adapter {published.folder}")
        folder = next((str(card.get("root")) for card in self._model_cards() if card["id"] == published.name), None)
        if folder != str(published.folder):
            raise EndpointError(
                f"{self.connection.root} took the adapter {published.name}, and lists it with the folder {folder}"
            )

    def _load_model(self, published: Published) -> None:
        origin = f"the weights {published.folder}"

        def post(path: str, **body: object) -> None:
            self.connection.request(path, body, origin=origin)

        post("/pause?mode=wait")
        # A reload that fails midway must not leave the name of the previous weights.
        post("/update_weight_version", new_version=f"loading {published.name}")
        post("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(published.folder)})
        post("/reset_prefix_cache")
        post("/update_weight_version", new_version=published.name)
        post("/resume")
        self.confirm(published)

    def unload(self, published: Published) -> None:
        if self.adapters:
            with contextlib.suppress(EndpointRefusal):
                self.connection.request(
                    "/v1/unload_lora_adapter", {"lora_name": published.name}, origin="an old adapter"
                )

    def complete(
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
            "seed": seeds[0],  # sample i takes seed + i
            "max_tokens": params.max_tokens,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            "top_k": params.top_k,
            **_sampling_fields(params),
        }
        reply = self.connection.request_object("/v1/completions", body, origin=origin)
        if reply.get("model") != model:
            raise EndpointError(f"{self.connection.root} answered {origin} with {reply.get('model')} and not {model}")
        with _reading(self.connection.root, origin):
            choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
            completions = [_read_vllm(choice, published.version) for choice in choices]
            counted = (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"])
        _check(completions, counted, prompt, params, len(seeds), f"{self.connection.root} answered {origin}")
        return completions

    def confirm(self, published: Published) -> None:
        if self.adapters:
            return
        info = self.connection.request_object("/weight_info", origin="which weights it has")
        _refuse_other_weights(info.get("weight_version"), published, self.connection.root)

    def _find_model(self) -> str:
        names = [card["id"] for card in self._model_cards() if not card.get("parent")]
        if len(names) != 1:
            raise ValueError(f"{self.connection.root} serves {', '.join(names) or 'no model'}: name the one to train")
        return names[0]

    def _model_cards(self) -> list[dict[str, Any]]:
        reply = self.connection.request_object("/v1/models", origin="its list of models")
        with _reading(self.connection.root, "its list of models"):
            return [{**card, "id": str(card["id"])} for card in reply["data"]]


class SglangServer:
    """`/generate` with token ids. Whole models by `/update_weights_from_disk`, with a name that every reply repeats.

    Adapters by `/load_lora_adapter`; a request names the adapter it wants.
    """

    def __init__(self, connection: Connection, *, adapters: bool) -> None:
        self.connection, self.adapters = connection, adapters

    def load(self, published: Published) -> None:
        server, name, folder = self.connection, published.name, str(published.folder)
        if self.adapters:
            self.unload(published)  # a second load of one name is refused
            reply = server.request_object(
                "/load_lora_adapter", {"lora_name": name, "lora_path": folder}, origin=f"the adapter {name}"
            )
            if reply.get("success") is not True or name not in (reply.get("loaded_adapters") or ()):
                raise EndpointError(f"{server.root} did not take the adapter {name}: {_said(reply)}")
            return
        body = {"model_path": folder, "weight_version": name, "flush_cache": True}
        reply = server.request_object("/update_weights_from_disk", body, origin=f"the weights {name}")
        if reply.get("success") is not True:
            raise EndpointError(f"{server.root} did not take the weights {name}: {_said(reply)}")
        info = self._model_info()
        _refuse_other_weights(info.get("weight_version"), published, server.root)
        if info.get("model_path") != folder:
            raise EndpointError(f"{server.root} was sent {folder}, and says that it has {info.get('model_path')}")

    def unload(self, published: Published) -> None:
        if self.adapters:
            with contextlib.suppress(EndpointRefusal):
                self.connection.request("/unload_lora_adapter", {"lora_name": published.name}, origin="an old adapter")

    def complete(
        self, prompt: Prompt, params: SamplingParams, seeds: Sequence[int], published: Published, origin: str
    ) -> list[TextCompletion]:
        fields = {"max_new_tokens": params.max_tokens, "top_k": params.top_k or -1, **_sampling_fields(params)}
        body: dict[str, Any] = {
            "input_ids": [list(prompt)] * len(seeds),
            # One seed for all samples would give the same sample each time.
            "sampling_params": [{**fields, "sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
        }
        if self.adapters:
            body["lora_path"] = [published.name] * len(seeds)
        reply = self.connection.request_json("/generate", body, origin=origin)
        with _reading(self.connection.root, origin):
            if not self.adapters:
                for entry in reply:
                    _refuse_other_weights(entry["meta_info"].get("weight_version"), published, self.connection.root)
            completions = [_read_sglang(entry, published.version) for entry in reply]
            lengths = {entry["meta_info"]["prompt_tokens"] for entry in reply}
            counted = (max(lengths, default=0), sum(entry["meta_info"]["completion_tokens"] for entry in reply))
        _check(completions, counted, prompt, params, len(seeds), f"{self.connection.root} answered {origin}")
        return completions

    def confirm(self, published: Published) -> None:
        """Nothing to do: every reply names its weights, or was requested of this adapter by name."""

    def _model_info(self) -> dict[str, object]:
        try:
            return self.connection.request_object("/model_info", origin="which weights it has")
        except EndpointRefusal as refusal:
            if refusal.status != 404:
                raise
            return self.connection.request_object("/get_model_info", origin="which weights it has")  # its older name


SERVERS: dict[str, type[VllmServer] | type[SglangServer]] = {"vllm": VllmServer, "sglang": SglangServer}


def _sampling_fields(params: SamplingParams) -> dict[str, object]:
    """Complete: servers fill what is missing from the model's generation config."""
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


def _read_vllm(choice: dict[str, Any], version: int) -> TextCompletion:
    """Tokens are spelled `token_id:<id>`."""
    logprobs = choice["logprobs"]
    tokens = tuple(int(name.removeprefix("token_id:")) for name in logprobs["tokens"])
    return _make_completion(tokens, logprobs["token_logprobs"], choice["text"], choice["finish_reason"], version)


def _read_sglang(entry: dict[str, Any], version: int) -> TextCompletion:
    """Each token is (log-prob, token id, text)."""
    info = entry["meta_info"]
    triples = info["output_token_logprobs"]
    tokens = tuple(int(triple[1]) for triple in triples)
    return _make_completion(tokens, [t[0] for t in triples], entry["text"], info["finish_reason"]["type"], version)


def _make_completion(
    tokens: tuple[int, ...], logprobs: Sequence[Any], text: str, reason: str, version: int
) -> TextCompletion:
    if reason not in ("stop", "length"):
        raise ValueError(f"an answer ended with {reason}")
    if not tokens or len(tokens) != len(logprobs):
        raise ValueError(f"an answer has {len(tokens)} tokens and {len(logprobs)} log-probs")
    values = tuple(float(value) for value in logprobs)
    if not all(math.isfinite(value) and value < 1e-3 for value in values):
        raise ValueError("a log-prob is not a number below 0")
    return TextCompletion(tokens, str(text), "length" if reason == "length" else "stop", values, version)


def _check(
    completions: Sequence[TextCompletion],
    counted: tuple[int, int],
    prompt: Prompt,
    params: SamplingParams,
    num_samples: int,
    what: str,
) -> None:
    if len(completions) != num_samples:
        raise EndpointError(f"{what} with {len(completions)} answers where {num_samples} were asked for")
    if counted[0] != len(prompt):
        raise EndpointError(f"{what} after {counted[0]} tokens of a prompt that has {len(prompt)}")
    num_tokens = sum(len(completion.tokens) for completion in completions)
    if counted[1] != num_tokens:
        raise EndpointError(f"{what} with {counted[1]} tokens, and gave {num_tokens} of them")
    longest = max(len(completion.tokens) for completion in completions)
    if longest > params.max_tokens:
        raise EndpointError(f"{what} with {longest} tokens where at most {params.max_tokens} were asked for")


def _refuse_other_weights(name: object, published: Published, root: str) -> None:
    if name != published.name:
        raise EndpointError(
            f"{root} has the weights {name!r}, and {published.name!r} were published: was it restarted, or does "
            "another run publish to it?"
        )


def _said(reply: Mapping[str, object]) -> str:
    return error_in({"message": reply.get("error_message"), **reply}) or "it gave no reason"


@contextlib.contextmanager
def _reading(root: str, origin: str) -> Iterator[None]:
    """What a reply lacks becomes an EndpointError."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        problem = f"no {error.args[0]!r} in it" if isinstance(error, KeyError) else str(error)
        raise EndpointError(f"{root} answered {origin} in an unknown shape ({shorten(problem)})") from error


class RolloutEndpoint:
    """`write` writes named tensors as a model folder; `folder`, on a disk that both see, is where it goes.

    Sampling and weight updates exclude each other, so a completion has one version from first to last token, and it is
    only taken from weights that the server has acknowledged. The same calls as a pool of engines.
    """

    def __init__(
        self,
        server: RolloutServer,
        write: Write,
        folder: Path,
        *,
        num_at_once: int = 64,
        drain_timeout_s: float = 600.0,
    ) -> None:
        self._server, self._write, self._folder = server, write, folder
        self._num_at_once = num_at_once
        self._updates = _UpdateLock(drain_timeout_s)
        self._serving: Published | None = None
        self.check()

    @property
    def version(self) -> int | None:
        """The version of the weights that the server has acknowledged."""
        return None if self._serving is None else self._serving.version

    @property
    def num_serving(self) -> int:
        return int(self._serving is not None)

    def check(self) -> None:
        """Raises if the server does not answer or is not healthy."""
        self._server.connection.request("/health", origin="its health check")

    def publish(self, version: int, tensors: NamedTensors) -> None:
        """Returns once the server serves these weights. A failure is retried once; then it raises, and nothing can be
        sampled until a publication succeeds."""
        published = self._write_version(version, tensors)
        with self._updates.updating():
            previous, self._serving = self._serving, None
            if previous is None or previous.name != published.name:
                self._load(published)
            self._serving = published
        if previous is not None and previous.name != published.name:
            self._server.unload(previous)
        for outdated in set(self._folder.glob("lockstep-*")) - {self._folder / published.name}:
            shutil.rmtree(outdated, ignore_errors=True)

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int],
        *,
        versions: tuple[int, int],
        partial: PartialCompletions | None = None,
        on_progress: Callable[[PartialCompletions], None] | None = None,
    ) -> list[list[TextCompletion]]:
        """From any thread. Servers neither report progress nor continue a `partial` completion: it is sampled anew."""
        del partial, on_progress
        assert len(keys) == len(prompts), "each prompt needs a key"
        with self._updates.sampling():
            published = self._serving
            if published is None or not versions[0] <= published.version <= versions[1]:
                raise EndpointError(
                    f"{self._server.connection.root} serves version {self.version}, and {versions[0]} to {versions[1]} "
                    "are requested"
                )

            def complete(index: int) -> list[TextCompletion]:
                seeds, origin = draw_seeds(params, keys[index]), f"the prompt of key {keys[index]}"
                return self._server.complete(prompts[index], params, seeds, published, origin)

            completions = dict(map_concurrently(complete, range(len(prompts)), self._num_at_once))
            self._server.confirm(published)
        return [completions[index] for index in range(len(prompts))]

    def close(self) -> None:
        """The server keeps running with what was published last, which stays on disk."""

    def _load(self, published: Published) -> None:
        try:
            self._server.load(published)
        except (EndpointError, EndpointRefusal):
            self._server.load(published)

    def _write_version(self, version: int, tensors: NamedTensors) -> Published:
        writing = self._folder / f"writing-{version}"
        shutil.rmtree(writing, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write(tensors, writing)
        name = f"lockstep-{version}-{_digest(writing)[:16]}"
        # Absolute, and never written to again: the server may read it at any time.
        folder = (self._folder / name).absolute()
        if folder.exists():
            shutil.rmtree(writing)
        else:
            writing.rename(folder)
        return Published(version, name, folder)


def connect(
    url: str,
    kind: str,
    write: Write,
    folder: Path,
    *,
    adapters: bool,
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    num_tries: int = 3,
    num_at_once: int = 64,
    sleep: Callable[[float], None] = time.sleep,
) -> RolloutEndpoint:
    """The server at `url`, of `kind` vllm or sglang."""
    root = normalise_url(url).removesuffix("/v1")
    connection = Connection(root, api_key=api_key, timeout_s=timeout_s, num_tries=num_tries, sleep=sleep)
    options = {"model": model} if kind == "vllm" else {}
    server: RolloutServer = SERVERS[kind](connection, adapters=adapters, **options)
    return RolloutEndpoint(server, write, folder, num_at_once=num_at_once, drain_timeout_s=timeout_s)


def draw_seeds(params: SamplingParams, key: int) -> list[int]:
    """Consecutive positive int64; the first follows from the run's seed and the prompt's key."""
    text = f"{params.seed or 0} {key}".encode()
    first = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2
    return [first + number for number in range(params.num_samples)]


class _UpdateLock:
    """Many calls sample together; an update waits for them, and later calls wait for the update."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._num_sampling, self._is_updating = 0, False

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        with self._condition:
            self._wait(lambda: not self._is_updating, "weights to be published")
            self._num_sampling += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_sampling -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        with self._condition:
            self._wait(lambda: not self._is_updating, "weights to be published")
            self._is_updating = True
        try:
            with self._condition:
                self._wait(lambda: not self._num_sampling, "the calls in flight to end")
            yield
        finally:
            with self._condition:
                self._is_updating = False
                self._condition.notify_all()

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        if not self._condition.wait_for(until, self._timeout_s):
            raise EndpointError(f"waited {self._timeout_s:g} s for {what}")


def _digest(folder: Path) -> str:
    """SHA-256 over all files and their names."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(folder)).encode() + b"\0")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
