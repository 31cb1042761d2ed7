"""From prompts to scored answers: sampled in groups, over one turn or several, and what each of them earned.

Every rank runs this alike. Must not know models, processes or losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lockstep.data.prompts import PromptRow
from lockstep.rewards.reward import Attempt, Judge, Outcome
from lockstep.sampling.sampler import Prompt, SamplingParams, TextCompletion

Sample = Callable[[Sequence[Prompt], SamplingParams, Sequence[int]], list[list[TextCompletion]]]
FollowUp = Callable[[str, int], list[int]]
# Later turns draw from streams of their own, far from those of any prompt.
_LATER_TURNS = 1 << 40


@dataclass(frozen=True, slots=True)
class Answer:
    """`tokens` follow the prompt; those that are `own` the model sampled, the others an environment said.

    `logprobs`: the sampler's, 0 where a token is not its own. `turns`: the model's words. `version`: of the weights.
    """

    tokens: tuple[int, ...]
    own: tuple[bool, ...]
    logprobs: tuple[float, ...]
    turns: tuple[str, ...]
    is_cut: bool
    version: int
    outcome: Outcome

    @property
    def num_own(self) -> int:
        return sum(self.own)


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


@dataclass
class _Episode:
    """An answer while it grows."""

    prompt: PromptRow
    tokens: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    version: int = 0
    is_cut: bool = False
    is_over: bool = False
    problem: str | None = None

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.prompt.fields, tuple(self.turns))

    def say(self, completion: TextCompletion) -> None:
        assert completion.logprobs is not None, "sampled with log-probs"
        self.tokens += completion.tokens
        self.own += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.turns.append(completion.text)
        self.version = completion.version
        self.is_cut = completion.finish_reason == "length"
        self.is_over = self.is_over or self.is_cut

    def hear(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.own += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)


@dataclass(frozen=True)
class Rollouts:
    """`max_turns` 1: nobody answers back. `max_length`: tokens of a prompt with everything that follows it."""

    sample: Sample
    judge: Judge
    follow_up: FollowUp
    max_turns: int
    max_length: int

    def collect(self, prompts: Sequence[PromptRow], keys: Sequence[int], params: SamplingParams) -> list[Group]:
        """All ranks. The samples are decided by the seed of `params` and the keys, whatever else is sampled."""
        params = replace(params, logprobs=True)
        first = self.sample([prompt.tokens for prompt in prompts], params, keys)
        episodes = [[_Episode(prompt) for _ in own] for prompt, own in zip(prompts, first, strict=True)]
        for group, completions in zip(episodes, first, strict=True):
            for episode, completion in zip(group, completions, strict=True):
                episode.say(completion)
        if self.max_turns > 1:
            self._play(episodes, keys, params)
        outcomes = iter(self._score([episode for group in episodes for episode in group]))
        return [
            Group(prompt, key, tuple(_close(episode, next(outcomes)) for episode in group))
            for prompt, key, group in zip(prompts, keys, episodes, strict=True)
        ]

    def _play(self, episodes: Sequence[Sequence[_Episode]], keys: Sequence[int], params: SamplingParams) -> None:
        streams = {
            id(episode): (key * params.num_samples + number) * self.max_turns + _LATER_TURNS
            for key, group in zip(keys, episodes, strict=True)
            for number, episode in enumerate(group)
        }
        every = [episode for group in episodes for episode in group]
        for turn in range(1, self.max_turns):
            self._answer_back([episode for episode in every if not episode.is_over], params.max_tokens)
            going_on = [episode for episode in every if not episode.is_over]
            if not going_on:
                return
            said = self.sample(
                [(*episode.prompt.tokens, *episode.tokens) for episode in going_on],
                replace(params, num_samples=1),
                [streams[id(episode)] + turn for episode in going_on],
            )
            for episode, (completion,) in zip(going_on, said, strict=True):
                episode.say(completion)

    def _answer_back(self, episodes: Sequence[_Episode], max_tokens: int) -> None:
        """What the environment says; an episode is over when it says nothing, or when there is no room for more."""
        replies = self.judge.play([episode.attempt for episode in episodes]) if episodes else []
        for episode, reply in zip(episodes, replies, strict=True):
            episode.problem = reply.problem
            episode.is_over = reply.problem is not None or reply.message is None
            if episode.is_over or reply.message is None:
                continue
            tokens = self.follow_up(reply.message, episode.tokens[-1])
            if len(episode.prompt.tokens) + len(episode.tokens) + len(tokens) + max_tokens > self.max_length:
                episode.is_over = episode.is_cut = True
            else:
                episode.hear(tokens)

    def _score(self, episodes: Sequence[_Episode]) -> list[Outcome]:
        sound = [episode for episode in episodes if episode.problem is None]
        outcomes = iter(self.judge.score([episode.attempt for episode in sound]))
        return [next(outcomes) if episode.problem is None else Outcome.tainted(episode.problem) for episode in episodes]


def _close(episode: _Episode, outcome: Outcome) -> Answer:
    return Answer(
        tuple(episode.tokens),
        tuple(episode.own),
        tuple(episode.logprobs),
        tuple(episode.turns),
        episode.is_cut,
        episode.version,
        outcome,
    )
