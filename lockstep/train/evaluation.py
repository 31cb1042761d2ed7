"""What held-out rows say of the model in training: their loss, and how good its own answers to them are.

Every rank runs this alike. Must not know models, nor how answers are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lockstep.sampling.sampler import Prompt, SamplingParams, TextCompletion
from lockstep.types import Datum, Metrics, TrainingBackend

# Rows handed to the backend at once: enough to level ranks, few enough to hold.
_ROWS_AT_ONCE = 256


def mean_loss(backend: TrainingBackend, data: Sequence[Datum]) -> float:
    """Per supervised token, weighted. All ranks."""
    total = weight = 0.0
    for batch in _pieces(data):
        for datum, logprobs in zip(batch, backend.forward(batch), strict=True):
            for completion, row in zip(datum.completions, logprobs, strict=True):
                total -= sum(float(w) * lp for w, lp in zip(completion.weights, row, strict=True))
            weight += datum.total_weight
    if weight == 0:
        raise ValueError(f"nothing to measure in {len(data)} validation rows: their weights add up to zero")
    return total / weight


def _pieces(data: Sequence[Datum]) -> Iterator[Sequence[Datum]]:
    for start in range(0, len(data), _ROWS_AT_ONCE):
        yield data[start : start + _ROWS_AT_ONCE]


@dataclass(frozen=True)
class AnswerScores:
    """Questions from held-out rows, who answers them, and how the answers are scored."""

    prompts: Sequence[Prompt]
    references: Sequence[str]
    sample: Callable[[Sequence[Prompt], SamplingParams], list[list[TextCompletion]]]
    score: Callable[[Sequence[str], Sequence[str]], Metrics]
    max_tokens: int
    keep: Callable[[int, Sequence[str]], None] = lambda step, answers: None
    """Called with the step and all answers, for people to read."""

    def measure(self, step: int) -> Metrics:
        """All ranks."""
        answers = self.sample(self.prompts, SamplingParams(max_tokens=self.max_tokens, temperature=0.0))
        cut = sum(answer.finish_reason == "length" for (answer,) in answers)
        texts = [answer.text for (answer,) in answers]
        self.keep(step, texts)
        return {**self.score(texts, self.references), "answers_cut": cut / len(answers)}


def last_answer(datum: Datum) -> tuple[list[int], list[int]]:
    """(everything before the last answer of a row, that answer), as tokens."""
    completion = datum.completions[0]
    learned = [weight != 0 for weight in completion.weights]
    stop = len(learned) - learned[::-1].index(True)
    start = stop
    while start > 0 and learned[start - 1]:
        start -= 1
    tokens = [int(token) for token in completion.tokens]
    return [*map(int, datum.prompt), *tokens[:start]], tokens[start:stop]
