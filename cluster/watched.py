"""A value made of files that an operator replaces while we run: certificates and tokens are rotated like that."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Value = TypeVar("Value")
Stamp = tuple[tuple[int, int, int] | None, ...]


class Watched(Generic[Value]):
    """Reads anew when a file has changed. What cannot be read then leaves the old value, and a line in the log.

    `get` may be called from any thread.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Value]) -> None:
        """Reads at once; what `read` raises (a ValueError) is raised here."""
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._stamp = stamp_of(self._paths)
        self._value = read()
        self._refused: Stamp | None = None  # was logged

    def get(self) -> Value:
        """The newest value that could be read."""
        stamp = stamp_of(self._paths)
        if stamp == self._stamp:
            return self._value
        with self._lock:
            if stamp != self._stamp:
                self._take(stamp)
            return self._value

    def _take(self, stamp: Stamp) -> None:
        try:
            self._value = self._read()
        except ValueError as error:
            # Files that belong together are replaced one after the other: the next call looks again.
            if stamp != self._refused:
                log.warning("keeping what was read before: %s", error)
            self._refused = stamp
        else:
            self._stamp = stamp
            log.info("read %s again", ", ".join(map(str, self._paths)))


def stamp_of(paths: Sequence[Path]) -> Stamp:
    """Changes when a file is written or replaced, links to it included; None for one that is not there."""
    return tuple(map(_stamp_of_one, paths))


def _stamp_of_one(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
