"""From prompts to scored rollouts: sampled in groups, over one turn or several, with the reward of each.

A rollout in progress can be written to a checkpoint at any time and continued later.
"""

from __future__ import annotations

import base64
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep.data.prompts import PromptRow
from lockstep.rollouts.rewards import Attempt, Outcome, Scorer
from lockstep.types import Prompt, SamplingParams, TextCompletion

SampleFn = Callable[[Sequence[Prompt], SamplingParams, Sequence[int]], list[list[TextCompletion]]]
EncodeReply = Callable[[str, int], list[int]]
"""(environment's message, last token before it) -> tokens up to where the next turn starts."""
EpisodeGroups = Sequence[Sequence["Episode"]]
# Keys of later turns are far from the key of any prompt, so that their random streams never meet.
_LATER_TURNS_KEY = 1 << 40
# Names in checkpoints of earlier releases.
_OLD_KEYS = {"own": "sampled", "is_cut": "truncated"}


@dataclass(frozen=True, slots=True)
class Rollout:
    """One scored completion. `tokens` follow the prompt; `sampled` marks the model's, the others are an environment's.

    `logprobs`: the sampler's, 0 where a token was not sampled. `versions`: of the weights that sampled each token; an
    environment's tokens have that of the token before. `turns`: the model's text.
    """

    tokens: tuple[int, ...]
    sampled: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    turns: tuple[str, ...]
    truncated: bool
    outcome: Outcome
    routing: bytes = b""
    """As in TextCompletion: of the prompt and all tokens but the last."""

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled)

    @property
    def sampled_versions(self) -> list[int]:
        return [version for version, sampled in zip(self.versions, self.sampled, strict=True) if sampled]

    def to_json(self) -> dict[str, object]:
        # JSON has no nan: an unknown reward is null.
        outcome = asdict(self.outcome) | ({"reward": None} if self.outcome.reward_failed else {})
        return {name: getattr(self, name) for name in self.__slots__} | {
            "outcome": outcome,
            "routing": as_text(self.routing),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Rollout:
        columns: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in _with_new_keys(values).items()
        }
        outcome, problem = values["outcome"], values["outcome"]["problem"]
        columns["outcome"] = Outcome(**outcome) if problem is None else Outcome.failed(problem)
        columns["routing"] = as_bytes(values.get("routing", ""))
        return cls(**columns)


def as_text(content: bytes) -> str:
    """For JSON, with `as_bytes` as its inverse. Neighbouring tokens choose alike: compressed."""
    return base64.b64encode(zlib.compress(content, 1)).decode() if content else ""


def as_bytes(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text)) if text else b""


def _with_new_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    return {_OLD_KEYS.get(name, name): value for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one prompt. `key` is the prompt's place in the order of training."""

    prompt: PromptRow
    key: int
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> list[float]:
        """nan where a reward failed."""
        return [rollout.outcome.reward for rollout in self.rollouts]

    @property
    def oldest_version(self) -> int:
        """Of the weights behind any of its tokens. A group without tokens is never too old."""
        return min((version for rollout in self.rollouts for version in rollout.versions), default=sys.maxsize)

    def to_json(self) -> dict[str, object]:
        """Without the prompt, which `prompt_at(key)` gives."""
        return {"key": self.key, "rollouts": [rollout.to_json() for rollout in self.rollouts]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], prompt_at: Callable[[int], PromptRow]) -> Group:
        key, rollouts = int(values["key"]), values.get("rollouts") or values["answers"]
        return cls(prompt_at(key), key, tuple(map(Rollout.from_json, rollouts)))


@dataclass
class Episode:
    """A rollout in progress: the model's turn, then the environment's reply, and so on until it is over."""

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    truncated: bool = False
    is_over: bool = False
    awaits_reply: bool = False
    problem: str | None = None
    routing: bytes = b""

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"routing": as_text(self.routing)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Episode:
        return cls(**_with_new_keys(values) | {"routing": as_bytes(values.get("routing", ""))})

    @property
    def awaits_completion(self) -> bool:
        return not self.is_over and not self.awaits_reply

    def add_completion(self, completion: TextCompletion, max_turns: int) -> None:
        assert completion.logprobs is not None, "sampled with log-probs"
        self.tokens += completion.tokens
        self.sampled += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.versions += completion.versions or [completion.version] * len(completion.tokens)
        # A later turn's has the whole text: what earlier turns were sampled with stays.
        self.routing += completion.routing[len(self.routing) :]
        self.turns.append(completion.text)
        self.truncated = completion.finish_reason == "length"
        self.is_over = self.truncated or len(self.turns) == max_turns
        self.awaits_reply = not self.is_over

    def add_reply(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.sampled += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [self.versions[-1]] * len(tokens)
        self.awaits_reply = False

    def end(self, *, truncated: bool = False, problem: str | None = None) -> None:
        self.is_over, self.awaits_reply = True, False
        self.truncated, self.problem = self.truncated or truncated, problem

    def with_outcome(self, outcome: Outcome) -> Rollout:
        return Rollout(
            tuple(self.tokens),
            tuple(self.sampled),
            tuple(self.logprobs),
            tuple(self.versions),
            tuple(self.turns),
            self.truncated,
            outcome,
            self.routing,
        )


@dataclass(frozen=True)
class EpisodeRunner:
    """`max_turns` 1: no environment replies. `max_length`: tokens of a prompt and everything that follows it."""

    scorer: Scorer
    encode_reply: EncodeReply
    max_turns: int
    max_length: int
    # Tokenizers must not be called by several threads at once.
    _tokenizing: threading.Lock = field(default_factory=threading.Lock)

    def run(
        self,
        sample: SampleFn,
        prompts: Sequence[PromptRow],
        keys: Sequence[int],
        params: SamplingParams,
        partial: EpisodeGroups | None = None,
        on_turn: Callable[[EpisodeGroups], None] = lambda episodes: None,
    ) -> list[Group]:
        """A group for each prompt. Samples depend on the seed of `params` and the keys alone, not on the batch.

        `partial`: episodes to continue. `on_turn` gets all episodes after every turn and every reply.
        """
        params = replace(params, logprobs=True)
        episodes = partial or [[Episode() for _ in range(params.num_samples)] for _ in prompts]
        slots = [
            _Slot(episode, prompt, (key * params.num_samples + number) * self.max_turns + _LATER_TURNS_KEY)
            for prompt, key, group in zip(prompts, keys, episodes, strict=True)
            for number, episode in enumerate(group)
        ]
        if not any(slot.episode.turns for slot in slots):
            # The first turn of all samples of a prompt at once: they share its computation.
            first = sample([prompt.tokens for prompt in prompts], params, keys)
            for group, completions in zip(episodes, first, strict=True):
                for episode, completion in zip(group, completions, strict=True):
                    episode.add_completion(completion, self.max_turns)
            on_turn(episodes)
        while True:
            if waiting := [slot for slot in slots if slot.episode.awaits_reply]:
                self._add_replies(waiting, params.max_tokens)
                on_turn(episodes)
            speaking = [slot for slot in slots if slot.episode.awaits_completion]
            if not speaking:
                break
            self._add_completions(sample, speaking, params)
            on_turn(episodes)
        outcomes = iter(self._score(slots))
        return [
            Group(prompt, key, tuple(episode.with_outcome(next(outcomes)) for episode in group))
            for prompt, key, group in zip(prompts, keys, episodes, strict=True)
        ]

    def _add_completions(self, sample: SampleFn, slots: Sequence[_Slot], params: SamplingParams) -> None:
        completions = sample(
            [(*slot.prompt.tokens, *slot.episode.tokens) for slot in slots],
            replace(params, num_samples=1),
            [slot.key + len(slot.episode.turns) for slot in slots],
        )
        for slot, (completion,) in zip(slots, completions, strict=True):
            slot.episode.add_completion(completion, self.max_turns)

    def _add_replies(self, slots: Sequence[_Slot], max_tokens: int) -> None:
        """An episode is over when the environment has no message, or when no room is left for another turn."""
        replies = self.scorer.play([slot.attempt for slot in slots])
        for slot, reply in zip(slots, replies, strict=True):
            episode = slot.episode
            if reply.problem is not None or reply.message is None:
                episode.end(problem=reply.problem)
                continue
            with self._tokenizing:
                tokens = self.encode_reply(reply.message, episode.tokens[-1])
            if len(slot.prompt.tokens) + len(episode.tokens) + len(tokens) + max_tokens > self.max_length:
                episode.end(truncated=True)
            else:
                episode.add_reply(tokens)

    def _score(self, slots: Sequence[_Slot]) -> list[Outcome]:
        outcomes = iter(self.scorer.score([slot.attempt for slot in slots if slot.episode.problem is None]))
        problems = [slot.episode.problem for slot in slots]
        return [next(outcomes) if problem is None else Outcome.failed(problem) for problem in problems]


@dataclass(frozen=True)
class _Slot:
    """An episode, its prompt, and the key that its later turns count from."""

    episode: Episode
    prompt: PromptRow
    key: int

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.prompt.fields, tuple(self.episode.turns), self.prompt.origin)
