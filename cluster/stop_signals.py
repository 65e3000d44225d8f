"""Ctrl-C and SIGTERM: the first one interrupts and lets everything stop in order, the second one forces."""

import os
import signal
from collections.abc import Callable
from types import FrameType

from cluster.processes import descendants

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], object] | int | None


class StopSignals:
    """While entered, the first stop signal raises KeyboardInterrupt once; a later one kills every process below us."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Handler] = {}
        self._num_received = 0

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._num_received += 1
        if self._num_received == 1:
            raise KeyboardInterrupt
        for pid in descendants(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        os._exit(128 + number)
