"""Runs coroutines with the same key one after the other, and those of different keys at once.

Knows nothing about what they do.
"""

import asyncio
from collections.abc import Callable, Coroutine


class InTurn:
    """What is started here runs to its end, whoever stops waiting for it."""

    def __init__(self) -> None:
        self._last: dict[str, asyncio.Task[None]] = {}  # by key
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, key: str, turn: Callable[[], Coroutine[object, object, None]]) -> asyncio.Task[None]:
        """Starts `turn` once everything taken before under this key has ended, however it ended."""
        before = self._last.get(key)

        async def run() -> None:
            if before is not None:
                await asyncio.wait({before})
            await turn()

        task = asyncio.get_running_loop().create_task(run())
        self._last[key] = task
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(key, done))
        return task

    async def done(self) -> None:
        """Returns when nothing is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, key: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._last.get(key) is task:
            del self._last[key]
        if not task.cancelled():
            task.exception()  # each turn deals with its own errors
