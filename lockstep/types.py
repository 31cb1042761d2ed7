"""What every layer shares: data, losses and steps, results, and the protocols of backends and samplers. No torch.

Token sequences are any `Sequence` of numbers (lists, tuples, numpy arrays); a backend turns them into tensors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens that follow a prompt. `weights[i]` weighs the log-prob of `tokens[i]`; zero means "context only".

    `values` holds one side value per token under a name (`reference_logprobs`, `advantages`, ...).
    """

    tokens: Sequence[int]
    weights: Sequence[float]
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    routing: bytes = b""
    """Experts to use, in equally many bytes for each token of prompt and completion but the last. Empty: any."""
    targets: Sequence[int] | Sequence[Sequence[int]] | None = None
    """What is to be predicted in the place of each token, where that is not the token itself: one id, or equally many.
    Where there are more than tokens, the first are in the places of the prompt's last tokens. Weights and values are
    those of the targets then, and the log-probs of all are computed, also where a weight is zero."""

    def __post_init__(self) -> None:
        what, count = ("tokens", len(self.tokens)) if self.targets is None else ("targets", len(self.targets))
        if count < len(self.tokens):
            raise ValueError(f"a completion of {len(self.tokens)} tokens has targets for {count}")
        if len(self.weights) != count:
            raise ValueError(f"a completion of {count} {what} has {len(self.weights)} weights")
        for name, values in self.values.items():
            if len(values) != count:
                raise ValueError(f"a completion of {count} {what} has {len(values)} values of {name!r}")


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image of a text: a file, or the bytes of one. Its tokens are in the text already, in the order of the images.

    `digest` is of the file's bytes when the row was compiled; `num_tokens` counts the placeholders that the image's
    features take the place of, which are never supervised.
    """

    content: str | bytes  # a path, or a whole file
    digest: int
    num_tokens: int
    name: str = ""  # as the row writes it
    modified_ns: int = 0  # of a file, when its row was compiled


@dataclass(frozen=True, slots=True)
class Datum:
    """One prompt with one or more completions. The prompt is never supervised and never empty.

    `origin` says where the row came from ("train.jsonl:17"), so that errors can name it. `images`, in the order of
    their tokens, belong to a datum with one completion.
    """

    prompt: Sequence[int]
    completions: Sequence[Completion]
    origin: str = ""
    images: Sequence[ImageRef] = ()

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise ValueError(f"{self.origin or 'a datum'} has an empty prompt: nothing predicts its first token")
        if not self.completions:
            raise ValueError(f"{self.origin or 'a datum'} has no completion")

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed when the prompt is repeated for each completion."""
        return sum(len(self.prompt) + len(c.tokens) for c in self.completions)

    @property
    def total_weight(self) -> float:
        return float(sum(sum(c.weights) for c in self.completions))

    @property
    def num_supervised(self) -> int:
        return sum(sum(1 for w in c.weights if w != 0) for c in self.completions)


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Which loss, and the one number that normalises it.

    Losses are sums over tokens; every weight is multiplied by `scale`, which the loop decides once per
    global batch (for SFT: one over the supervised tokens). Micro-batches and ranks can then not change it.
    `options` are plain JSON. Where the loss compares with a reference, its log-probs come with the completions' values
    ("reference_logprobs"); otherwise the backend computes them.
    """

    kind: str = "cross_entropy"
    scale: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.scale, float) and not math.isfinite(self.scale):
            raise ValueError(f"the scale of a loss is {self.scale}: it must be a finite number")


T = TypeVar("T")


class Pending(Generic[T]):
    """A result that a device may still be computing: `result()` waits for it.

    `deferred` says whether it pays to read it later. The same on every rank, because reading may be collective.
    """

    def __init__(self, read: Callable[[], T], *, deferred: bool = False) -> None:
        self._read: Callable[[], T] | None = read
        self._value: T | None = None
        self.deferred = deferred

    def result(self) -> T:
        if self._read is not None:
            self._value, self._read = self._read(), None
        return self._value  # type: ignore[return-value]

    def __repr__(self) -> str:
        """Of what has been read: to print it must not make one rank wait for the others."""
        return f"{type(self).__name__}({'not read yet' if self._read is not None else self._value})"


@dataclass(frozen=True, slots=True)
class LossValues:
    loss: float
    metrics: Metrics = field(default_factory=dict)
    nonfinite_origins: tuple[str, ...] = ()
    asked_to_stop: bool = False


class LossResult(Pending[LossValues]):
    """What one `forward_backward` computed, summed over the global batch: the same on every rank.

    Token counts are known at once; reading the loss waits for the device.
    """

    def __init__(
        self,
        read: Callable[[], LossValues],
        *,
        num_tokens: int,
        num_supervised: int,
        deferred: bool = False,
        read_logprobs: Callable[[], list[Logprobs]] | None = None,
    ) -> None:
        super().__init__(read, deferred=deferred)
        self.num_tokens = num_tokens
        self.num_supervised = num_supervised
        self._read_logprobs = read_logprobs

    @property
    def loss(self) -> float:
        return self.result().loss

    @property
    def metrics(self) -> Metrics:
        return self.result().metrics

    def logprobs(self) -> list[Logprobs]:
        """Of the pass whose gradient was taken, as `forward` returns them. All ranks."""
        if self._read_logprobs is None:
            raise ValueError("this backend keeps no log-probs of its passes: call forward")
        return self._read_logprobs()

    @property
    def nonfinite_origins(self) -> tuple[str, ...]:
        """Rows whose own log-probs are not finite."""
        return self.result().nonfinite_origins

    @property
    def asked_to_stop(self) -> bool:
        """Whether any rank had been asked to stop when it computed this."""
        return self.result().asked_to_stop


@dataclass(frozen=True, slots=True)
class OptimStep:
    """One optimizer step. The learning rate arrives here: there is no scheduler object to save."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        """A number that is none would go into every weight."""
        for name in ("learning_rate", "eps", "weight_decay"):
            self._check(name, math.inf)
        for name in ("beta1", "beta2"):
            self._check(name, 1.0)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"step.max_grad_norm is {self.max_grad_norm}: it must be above 0, or None")

    def _check(self, name: str, limit: float) -> None:
        value = getattr(self, name)
        if not isinstance(value, Real):
            raise ValueError(f"step.{name} is not a number: {value!r}")
        if not 0 <= float(value) < limit:
            raise ValueError(f"step.{name} is {value}: it must be from 0 to below {limit}")


class OptimResult(Pending[float]):
    """`grad_norm` is of the whole gradient before clipping; a step whose norm is not finite is not applied.

    `peak_memory_gib` is this rank's, since the backend was built: device memory on CUDA, otherwise the process's.
    """

    def __init__(
        self,
        read: Callable[[], float],
        *,
        peak_memory_gib: float = 0.0,
        loss_scale: float | None = None,
        deferred: bool = False,
        ended_at: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`loss_scale`: of fp16, for the next step. It has been lowered where this one overflowed. `ended_at`: when the
        step was done, in seconds of time.perf_counter(), where that may be before it is read."""
        super().__init__(read, deferred=deferred)
        self.peak_memory_gib = peak_memory_gib
        self.loss_scale = loss_scale
        self.ended_at = ended_at

    @property
    def grad_norm(self) -> float:
        return self.result()

    @property
    def applied(self) -> bool:
        return math.isfinite(self.result())

    @property
    def overflowed(self) -> bool:
        """Left out because fp16 could not hold the gradient: the next step tries with a smaller scale."""
        return not self.applied and self.loss_scale is not None and self.loss_scale >= 1


class Tokenizer(Protocol):
    """The part of a Hugging Face fast tokenizer that is used."""

    chat_template: str | dict[str, str] | None
    name_or_path: str
    is_fast: bool
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    all_special_ids: Sequence[int]
    all_special_tokens: Sequence[str]
    special_tokens_map: Mapping[str, object]
    added_tokens_decoder: Mapping[int, Any]

    def get_vocab(self) -> dict[str, int]: ...
    def get_added_vocab(self) -> dict[str, int]: ...
    def __call__(self, text: str | list[str], **options: object) -> Mapping[str, Any]: ...
    def apply_chat_template(self, conversation: Sequence[Mapping[str, object]], **options: object) -> Any: ...
    def decode(self, token_ids: Sequence[int], **options: object) -> str: ...
    def save_pretrained(self, save_directory: str | Path) -> object: ...


class PreparedImage(NamedTuple):
    """`inputs`: arrays as the model takes them. `text` takes the place of the placeholder in a text, and has
    `num_tokens` tokens that features take the place of.

    `size` is (width, height) of the image itself.
    """

    inputs: Mapping[str, Any]
    text: str
    num_tokens: int
    size: tuple[int, int]


class ImageProcessor(Protocol):
    """What a vision-language model's own processor makes of an image. Picklable."""

    placeholder: str
    """What a chat template writes for an image."""
    token_id: int
    """Of the tokens that an image's features take the place of."""
    digest: str
    """Of everything that decides inputs and text."""

    def prepare(self, image: object) -> PreparedImage:
        """`image` is Pillow's. Raises ValueError where the processor does not take it."""
        ...


# One float per completion token, per completion; 0.0 where the token's weight is zero (not computed). Of a completion
# with targets: one for each of them, the first token's first.
Logprobs = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class SavedState:
    """What `save_state` has written. `digests`: sha256 of those files whose writer computed it, by name.

    `copy_s`: how long training stood still for it. `staging_bytes`: host memory that is kept for the next one.
    `slow`: why it stood still for longer than it need have.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    copy_s: float = 0.0
    staging_bytes: int = 0
    slow: str = ""


class TrainingBackend(Protocol):
    """The seam between loops and machines. Every rank calls every method, with the global batch."""

    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> list[Logprobs]:
        """Of the policy, or of the reference that the backend was built with."""
        ...

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec) -> LossResult: ...

    def optim_step(self, step: OptimStep) -> OptimResult: ...

    def mix_reference(self, share: float) -> None:
        """Move the reference towards the policy: reference = share * policy + (1 - share) * reference."""
        ...

    def save_state(self, path: Path) -> Future[SavedState]:
        """Snapshot now, write in the background. On rank 0 the future ends when every rank's part is on disk."""
        ...

    def load_state(self, path: Path, *, with_optimizer: bool) -> None: ...

    def export_weights(self, path: Path) -> None: ...

    def read_weights(self, *, on_device: bool = False) -> NamedTensors:
        """What an engine needs to sample as this model would, by the model's own names: whole tensors in the dtype that
        is sampled with, copied to rank 0's CPU; only the adapters where there are some. Nothing on other ranks.
        `on_device`: the copies stay on rank 0's device, but for those that it has no room for."""
        ...

    def close(self) -> None: ...


Prompt = Sequence[int]
NamedTensors: TypeAlias = "Mapping[str, Tensor]"
Weights: TypeAlias = "str | Path | NamedTensors"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 takes the likeliest token. Otherwise only the `top_k` likeliest tokens are drawn from (0: all),
    of these the fewest that hold `top_p` of the probability, of these those not below `min_p` times the likeliest.

    `stop` texts end a completion and are not part of its text; `stop_tokens` end it like the model's own end of turn.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    num_samples: int = 1
    logprobs: bool = False
    top_k: int = 0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1 (given: {self.max_tokens})")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative (given: {self.temperature})")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1 (given: {self.top_p})")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative; 0 keeps every token (given: {self.top_k})")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 and 1 (given: {self.min_p})")
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which every answer begins with: leave it out")
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1 (given: {self.num_samples})")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError("several samples of one prompt need a temperature above 0: they would all be the same")


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """`tokens` is what was sampled, up to and with the token that ended the turn or completed a stop text; `text` has
    neither. `finish_reason` length: the answer was cut.

    `logprobs`, where requested: the model's log-prob of each token at the temperature it was sampled with (at 1 for
    temperature 0), before top_k, top_p and min_p. `version` is that of the weights, the newest of them; `versions`
    has one for each token, and is empty where all are the same.
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: tuple[float, ...] | None = None
    version: int = 0
    versions: tuple[int, ...] = ()
    routing: bytes = b""
    """Of an engine that records it: which experts each token of prompt and answer chose, but for the last one, which
    was not computed. See lockstep/model/replay.py."""

    @property
    def oldest_version(self) -> int:
        return min(self.versions, default=self.version)


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """What an answer has so far: of each token its log-prob, and the version of the weights that it came from.

    `routing`: as that of a TextCompletion, of the prompt's tokens too.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    routing: bytes = b""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"a partial completion has {len(self.tokens)} tokens, {len(self.logprobs)} log-probs and "
                f"{len(self.versions)} versions: each token needs one of both"
            )


# For each prompt and each of its samples what there is of it already; None: nothing.
PartialCompletions = Sequence[Sequence[PartialCompletion | None]]


class Sampler(Protocol):
    def load_weights(self, source: Weights, version: int) -> None:
        """Answer with other weights from now on; `version` says which. From disk, or tensors by their names."""
        ...

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int] | None = None,
        partial: PartialCompletions | None = None,
    ) -> list[list[TextCompletion]]:
        """`num_samples` completions of each prompt, in the order of the prompts.

        With a seed, a sample is decided by the seed, the prompt, its key and its number among the samples of the
        prompt, never by what else is in its batch. `keys`: one integer per prompt, its index by default.
        A `partial` completion is continued; what is returned has it from its beginning.
        """
        ...
