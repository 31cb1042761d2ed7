"""The loss scale of fp16: halved when a gradient overflows (that step is skipped), doubled after many that did not."""

from __future__ import annotations

_FIRST = 2.0**16
_LARGEST = 2.0**24
_STEPS_BEFORE_GROWTH = 1000


class LossScale:
    def __init__(self) -> None:
        self.value = _FIRST
        self._good_steps = 0

    def update(self, *, finite: bool) -> None:
        """After every step, the same on every rank."""
        if not finite:
            self.value, self._good_steps = self.value / 2, 0
            return
        self._good_steps += 1
        if self._good_steps == _STEPS_BEFORE_GROWTH:
            self.value, self._good_steps = min(self.value * 2, _LARGEST), 0

    def state(self) -> list[float]:
        return [self.value, float(self._good_steps)]

    def restore(self, state: list[float]) -> None:
        self.value, self._good_steps = state[0], int(state[1])
