"""From prompts to scored answers: sampled in groups, over one turn or several, and what each of them earned.

An answer that is begun can be written down at any time and gone on with. Must not know models, processes or losses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep.data.prompts import PromptRow
from lockstep.rollouts.rewards.reward import Attempt, Judge, Outcome
from lockstep.types import Prompt, SamplingParams, TextCompletion

Sample = Callable[[Sequence[Prompt], SamplingParams, Sequence[int]], list[list[TextCompletion]]]
FollowUp = Callable[[str, int], list[int]]
# Later turns draw from streams of their own, far from those of any prompt.
_LATER_TURNS = 1 << 40


@dataclass(frozen=True, slots=True)
class Answer:
    """`tokens` follow the prompt; those that are `own` the model sampled, the others an environment said.

    `logprobs`: the sampler's, 0 where a token is not its own. `versions`: of the weights that sampled each token; what
    an environment said has that of the token before. `turns`: the model's words.
    """

    tokens: tuple[int, ...]
    own: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    turns: tuple[str, ...]
    is_cut: bool
    outcome: Outcome

    @property
    def num_own(self) -> int:
        return sum(self.own)

    @property
    def own_versions(self) -> list[int]:
        return [version for version, own in zip(self.versions, self.own, strict=True) if own]

    def to_json(self) -> dict[str, Any]:
        # What nobody knows is written as such: nan is no JSON.
        outcome = asdict(self.outcome) | ({} if self.outcome.problem is None else {"reward": None})
        return {name: getattr(self, name) for name in self.__slots__} | {"outcome": outcome}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Answer:
        given = found["outcome"]
        problem = given["problem"]
        outcome = Outcome(**given) if problem is None else Outcome.tainted(problem)
        columns: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
        return cls(**{**columns, "outcome": outcome})


@dataclass(frozen=True, slots=True)
class Group:
    """All answers to one prompt. `key` is the prompt's place in the order of training."""

    prompt: PromptRow
    key: int
    answers: tuple[Answer, ...]

    @property
    def rewards(self) -> list[float]:
        """nan where nobody knows."""
        return [answer.outcome.reward for answer in self.answers]

    @property
    def oldest_version(self) -> int:
        """Of the weights behind any of its tokens. A group without any is never too old: it teaches nothing."""
        return min((version for answer in self.answers for version in answer.versions), default=sys.maxsize)

    def to_json(self) -> dict[str, Any]:
        """Without the prompt, which the key stands for."""
        return {"key": self.key, "answers": [answer.to_json() for answer in self.answers]}

    @classmethod
    def from_json(cls, found: Mapping[str, Any], prompt_at: Callable[[int], PromptRow]) -> Group:
        key = int(found["key"])
        return cls(prompt_at(key), key, tuple(Answer.from_json(answer) for answer in found["answers"]))


@dataclass
class Episode:
    """An answer while it grows. It waits for the model, then for the environment, and so on until it is over."""

    tokens: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    is_cut: bool = False
    is_over: bool = False
    awaits_reply: bool = False
    problem: str | None = None

    @property
    def awaits_words(self) -> bool:
        return not self.is_over and not self.awaits_reply

    def say(self, completion: TextCompletion, max_turns: int) -> None:
        assert completion.logprobs is not None, "sampled with log-probs"
        self.tokens += completion.tokens
        self.own += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.versions += completion.versions or [completion.version] * len(completion.tokens)
        self.turns.append(completion.text)
        self.is_cut = completion.finish_reason == "length"
        self.is_over = self.is_cut or len(self.turns) == max_turns
        self.awaits_reply = not self.is_over

    def hear(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.own += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [self.versions[-1]] * len(tokens)
        self.awaits_reply = False

    def end(self, *, is_cut: bool = False, problem: str | None = None) -> None:
        self.is_over, self.awaits_reply = True, False
        self.is_cut, self.problem = self.is_cut or is_cut, problem

    def close(self, outcome: Outcome) -> Answer:
        return Answer(
            tuple(self.tokens),
            tuple(self.own),
            tuple(self.logprobs),
            tuple(self.versions),
            tuple(self.turns),
            self.is_cut,
            outcome,
        )


@dataclass(frozen=True)
class Rollouts:
    """`max_turns` 1: nobody answers back. `max_length`: tokens of a prompt with everything that follows it."""

    sample: Sample
    judge: Judge
    follow_up: FollowUp
    max_turns: int
    max_length: int

    def collect(
        self,
        prompts: Sequence[PromptRow],
        keys: Sequence[int],
        params: SamplingParams,
        begun: Sequence[Sequence[Episode]] | None = None,
        on_turn: Callable[[Sequence[Sequence[Episode]]], None] = lambda episodes: None,
    ) -> list[Group]:
        """The samples are decided by the seed of `params` and the keys, whatever else is sampled.

        `begun`: go on with these. `on_turn`: told where all episodes stand, whenever somebody has spoken.
        """
        params = replace(params, logprobs=True)
        episodes = begun or [[Episode() for _ in range(params.num_samples)] for _ in prompts]
        places = [
            _Place(episode, prompt, (key * params.num_samples + number) * self.max_turns + _LATER_TURNS)
            for prompt, key, group in zip(prompts, keys, episodes, strict=True)
            for number, episode in enumerate(group)
        ]
        if all(place.is_new for place in places):
            self._begin(prompts, keys, params, episodes)
            on_turn(episodes)
        while True:
            if listening := [place for place in places if place.episode.awaits_reply]:
                self._answer_back(listening, params.max_tokens)
                on_turn(episodes)
            speaking = [place for place in places if place.episode.awaits_words]
            if not speaking:
                break
            self._go_on(speaking, params)
            on_turn(episodes)
        outcomes = iter(self._score(places))
        return [
            Group(prompt, key, tuple(episode.close(next(outcomes)) for episode in group))
            for prompt, key, group in zip(prompts, keys, episodes, strict=True)
        ]

    def _begin(
        self,
        prompts: Sequence[PromptRow],
        keys: Sequence[int],
        params: SamplingParams,
        episodes: Sequence[Sequence[Episode]],
    ) -> None:
        """The first turn of all answers to a prompt at once: they share its computation."""
        said = self.sample([prompt.tokens for prompt in prompts], params, keys)
        for group, completions in zip(episodes, said, strict=True):
            for episode, completion in zip(group, completions, strict=True):
                episode.say(completion, self.max_turns)

    def _go_on(self, places: Sequence[_Place], params: SamplingParams) -> None:
        said = self.sample(
            [(*place.prompt.tokens, *place.episode.tokens) for place in places],
            replace(params, num_samples=1),
            [place.stream + len(place.episode.turns) for place in places],
        )
        for place, (completion,) in zip(places, said, strict=True):
            place.episode.say(completion, self.max_turns)

    def _answer_back(self, places: Sequence[_Place], max_tokens: int) -> None:
        """What the environment says; an episode is over when it says nothing, or when there is no room for more."""
        replies = self.judge.play([place.attempt for place in places])
        for place, reply in zip(places, replies, strict=True):
            episode = place.episode
            if reply.problem is not None or reply.message is None:
                episode.end(problem=reply.problem)
                continue
            tokens = self.follow_up(reply.message, episode.tokens[-1])
            if len(place.prompt.tokens) + len(episode.tokens) + len(tokens) + max_tokens > self.max_length:
                episode.end(is_cut=True)
            else:
                episode.hear(tokens)

    def _score(self, places: Sequence[_Place]) -> list[Outcome]:
        outcomes = iter(self.judge.score([place.attempt for place in places if place.episode.problem is None]))
        problems = [place.episode.problem for place in places]
        return [next(outcomes) if problem is None else Outcome.tainted(problem) for problem in problems]


@dataclass(frozen=True)
class _Place:
    """An episode, what it answers, and where its later turns draw from."""

    episode: Episode
    prompt: PromptRow
    stream: int

    @property
    def is_new(self) -> bool:
        return not self.episode.turns

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.prompt.fields, tuple(self.episode.turns))
