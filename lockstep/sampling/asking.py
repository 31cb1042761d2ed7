"""One call for answers while several engines work on it: who has which part, what there is, what must be asked again.

Not thread-safe: whoever owns it has the lock. Must not know processes, health or time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from lockstep.sampling.sampler import Begun, BegunAnswers, Prompt, SamplingParams, TextCompletion
from lockstep.sampling.wire import pack_request, unpack_answers, unpack_begun
from lockstep.workers.worker import Reply

ANY_LATER = 2**62
_NUMBERS = itertools.count()

Drafts = list[list[Begun | None]]


class Part:
    """Some prompts of a call that one engine is asked for: `generation` is of the engine, `engine` its name."""

    def __init__(self, asking: Asking, places: list[int], engine: str, generation: int) -> None:
        self.name = f"call-{next(_NUMBERS)}"
        self.asking, self.places, self.engine, self.generation = asking, places, engine, generation
        self.reply: Reply | None = None
        self.error: BaseException | None = None

    @property
    def num_answers(self) -> int:
        return len(self.places) * self.asking.params.num_samples

    @property
    def ended(self) -> bool:
        return self.reply is not None or self.error is not None

    def add_news(self, news: Sequence[tuple[int, int, Sequence[Any]]]) -> None:
        """(prompt in this part, sample, tokens since the last news)."""
        if not self.ended:
            for place, sample, begun in news:
                self.asking.extend(self.places[place], sample, unpack_begun(begun))


class Asking:
    """`versions`: the lowest and the highest of weights to begin with. `waiting`: prompts that nobody is asked for."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int],
        versions: tuple[int, int],
        begun: BegunAnswers | None,
    ) -> None:
        if len(keys) != len(prompts):
            raise ValueError(f"{len(keys)} keys for {len(prompts)} prompts: each needs one")
        self.prompts, self.params, self.keys, self.versions = prompts, params, keys, versions
        nothing: Drafts = [[None] * params.num_samples for _ in prompts]
        self._given: Drafts = nothing if begun is None else [list(group) for group in begun]
        if [len(group) for group in self._given] != [params.num_samples] * len(prompts):
            raise ValueError(f"begun must have {params.num_samples} entries for each of the {len(prompts)} prompts")
        self._drafts: Drafts = [list(group) for group in self._given]
        self._has_news = False
        self._found: dict[int, list[TextCompletion]] = {}
        self.waiting = list(range(len(prompts)))
        self.parts: list[Part] = []
        self.num_refused = 0

    @property
    def is_answered(self) -> bool:
        return len(self._found) == len(self.prompts)

    @property
    def has_changed(self) -> bool:
        return self._has_news or any(part.ended for part in self.parts)

    def split_off(self, places: list[int], engine: str, generation: int) -> Part:
        part = Part(self, places, engine, generation)
        self.waiting = [place for place in self.waiting if place not in places]
        self.parts.append(part)
        return part

    def request(self, part: Part) -> dict[str, Any]:
        prompts, keys = [self.prompts[place] for place in part.places], [self.keys[place] for place in part.places]
        begun = [self._drafts[place] for place in part.places]
        has_begun = any(draft is not None for group in begun for draft in group)
        body = pack_request(prompts, self.params, keys, begun if has_begun else None)
        return {**body, "call": part.name, "versions": list(self.versions)}

    def take_ended(self) -> list[Part]:
        ended = [part for part in self.parts if part.ended]
        self.parts = [part for part in self.parts if not part.ended]
        return ended

    def take_answers(self, part: Part) -> None:
        assert part.reply is not None
        groups = unpack_answers(part.reply.body, part.reply.tensors)
        for place, answers in zip(part.places, groups, strict=True):
            assert len(answers) == self.params.num_samples, f"{part.engine} gave {len(answers)} answers"
            self._found[place] = answers
            self._drafts[place] = [_as_begun(answer) for answer in answers]
        self._has_news = True

    def ask_again(self, part: Part) -> None:
        self.waiting += part.places

    def note_loss(self, part: Part, *, keeps_partials: bool) -> None:
        """Its engine is gone. Answers go on from the last that was heard of them, also with newer weights; or they
        begin anew, as if nobody had been asked."""
        if keeps_partials:
            self.versions = (self.versions[0], ANY_LATER)
        else:
            for place in part.places:
                self._drafts[place] = list(self._given[place])

    def extend(self, place: int, sample: int, new: Begun) -> None:
        old = self._drafts[place][sample] or Begun((), (), ())
        joined = (old.tokens + new.tokens, old.logprobs + new.logprobs, old.versions + new.versions)
        self._drafts[place][sample] = Begun(*joined)
        self._has_news = True

    def take_drafts(self) -> Drafts | None:
        """What there is of every answer, if that is more than the last time."""
        if not self._has_news:
            return None
        self._has_news = False
        return [list(group) for group in self._drafts]

    def answers(self) -> list[list[TextCompletion]]:
        return [self._found[place] for place in range(len(self.prompts))]


def _as_begun(answer: TextCompletion) -> Begun:
    count = len(answer.tokens)
    return Begun(answer.tokens, answer.logprobs or (0.0,) * count, answer.versions or (answer.version,) * count)
