"""Made-up answers for runs that sample: a few to each prompt, with what a sampler and a judge would have said of them.

What an answer is follows from the run's seed and the prompt, so every process makes the same. Must not know models.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from lockstep.config import GrpoConfig, RunConfig
from lockstep.data.prompts import PromptRow, Prompts
from lockstep.rollouts.episode import Answer, Group
from lockstep.rollouts.rewards.reward import Outcome
from lockstep.types import Completion, Datum

MAX_ANSWERS = 4  # to a prompt
_MAX_TOKENS = 20  # of an answer
# Every so many answers are cut at max_tokens, and every so many could not be scored.
_CUT, _TAINTED = 5, 7


class MadeGroups(Sequence[Any]):
    """Each prompt as a datum whose completions have, besides their tokens, a sampler's log-probs and a reward."""

    def __init__(self, prompts: Prompts, config: RunConfig) -> None:
        assert isinstance(config.algorithm, GrpoConfig)
        self._prompts, self._algorithm, self._seed = prompts, config.algorithm, config.seed
        self.lengths = prompts.lengths

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, place: Any) -> Any:
        prompt = self._prompts[int(place)]
        assert isinstance(prompt, PromptRow)
        count = min(self._algorithm.group_size, MAX_ANSWERS)
        draw = random.Random(f"{self._seed} {prompt.origin}")
        return Datum(prompt.tokens, [self._answer(draw, prompt, number) for number in range(count)], prompt.origin)

    def _answer(self, draw: random.Random, prompt: PromptRow, number: int) -> Completion:
        length = draw.randint(1, min(self._algorithm.max_tokens, _MAX_TOKENS))
        tokens = draw.choices(prompt.tokens, k=length)
        # With an environment, some of the words are not the model's own.
        own = [
            not self._algorithm.environment or place in (0, length - 1) or draw.random() < 0.7
            for place in range(length)
        ]
        mark = draw.randrange(_CUT * _TAINTED) + number  # so that not all answers of a group are alike in this
        return Completion(
            tokens,
            [float(is_own) for is_own in own],
            {
                "behaviour_logprobs": [-draw.uniform(1.0, 4.0) if is_own else 0.0 for is_own in own],
                "reward": [draw.choice((0.0, 0.25, 1.0)) + 0.1 * number] * length,
                "cut": [float(mark % _CUT == 0)] * length,
                "tainted": [float(mark % _TAINTED == 0)] * length,
            },
        )


def as_groups(rows: Sequence[Datum]) -> list[Group]:
    """What a loop would have been given."""
    return [
        Group(PromptRow(datum.origin, tuple(datum.prompt), {}), key, tuple(map(_as_answer, datum.completions)))
        for key, datum in enumerate(rows)
    ]


def _as_answer(completion: Completion) -> Answer:
    values = completion.values
    is_tainted = bool(values["tainted"][0])
    return Answer(
        tokens=tuple(completion.tokens),
        own=tuple(bool(weight) for weight in completion.weights),
        logprobs=tuple(values["behaviour_logprobs"]),
        versions=(0,) * len(completion.tokens),
        turns=("",),
        is_cut=bool(values["cut"][0]),
        outcome=Outcome.tainted("made so") if is_tainted else Outcome(values["reward"][0]),
    )
