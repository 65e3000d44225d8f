"""Virtual time: a heap of what happens next. Same instant, same order as asked for."""

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[..., object]


class Clock:
    """Nanoseconds that pass only by `step()`."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Action, tuple[object, ...]]] = []
        self._num_pushed = 0

    def after(self, delay_ns: int, action: Action, *arguments: object) -> None:
        """Call `action(*arguments)` then."""
        self._num_pushed += 1
        heappush(self._heap, (self.now_ns + delay_ns, self._num_pushed, action, arguments))

    def step(self) -> None:
        """Move on to the next action and do it."""
        self.now_ns, _, action, arguments = heappop(self._heap)
        action(*arguments)
