"""The requests of one model, in the order of their numbers, whatever order they arrive in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from lockstep.service.errors import ServiceError
from lockstep.service.tinker.results import Promise, StoredResult

MAX_AHEAD = 10_000  # numbers that may wait for one that is missing
Operation = Callable[[], Awaitable[StoredResult]]


class Turns:
    """`perform` ends a promise, whatever happens; `refuse` fails the request of a number. For the thread of the event
    loop alone."""

    def __init__(
        self,
        name: str,
        timeout_s: float,
        perform: Callable[[Promise, Operation], Awaitable[None]],
        refuse: Callable[[int, ServiceError], None],
    ) -> None:
        self._name, self._timeout_s, self._perform, self._refuse = name, timeout_s, perform, refuse
        self.next = 0
        self._waiting: dict[int, tuple[Promise, Operation]] = {}
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, number: int, promise: Promise, operation: Operation) -> None:
        self._waiting[number] = (promise, operation)
        self._arrived.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def fail_all(self, error: ServiceError) -> None:
        """Those that wait. The one that runs ends by itself."""
        for number in list(self._waiting):
            del self._waiting[number]
            self._refuse(number, error)
        self._arrived.set()

    async def _run(self) -> None:
        while self._waiting:
            if not await self._arrives():
                self._give_up()
                continue
            promise, operation = self._waiting.pop(self.next)
            self.next += 1
            await self._perform(promise, operation)

    async def _arrives(self) -> bool:
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while self.next not in self._waiting:
            if not self._waiting:
                return False
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._arrived.wait()
            except TimeoutError:
                return False
        return True

    def _give_up(self) -> None:
        if not self._waiting:
            return
        last = max(self._waiting)
        error = ServiceError(
            f"request {self.next} of {self._name} did not arrive within {self._timeout_s:g} s, so none of those after "
            f"it was done, up to {last}: load the newest checkpoint, or start again"
        )
        missing = [number for number in range(self.next, last + 1) if number not in self._waiting]
        self.next = last + 1
        for number in missing:
            self._refuse(number, error)
        self.fail_all(error)
