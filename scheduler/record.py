"""Keeping what a scheduler was told, and telling it again.

A recording is a snapshot of the core and the events since, each with a digest of the commands it made. It is
length-bounded: when it is full, it starts over from a new snapshot. The core is pure, so replaying the events on
the snapshot must make the same commands; if it does not, either the code has changed or something impure crept in.
Recordings are read with an allow-list of types: a file from a stranger can be replayed, it cannot run code.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from scheduler.core import Scheduler
from scheduler.events import Command, Event

FORMAT = 1
DEFAULT_MAX_EVENTS = 20_000
ALLOWED_NAMES = {
    ("collections", "OrderedDict"),
    ("collections", "deque"),
    ("builtins", "set"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One event and the digest of the commands it made."""

    event: Event
    digest: bytes


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first event whose replay made other commands than were recorded."""

    index: int
    event: Event
    commands: Sequence[Command]


class Recorder:
    """A scheduler that remembers its latest events. `handle` and `check` as the core's."""

    def __init__(self, scheduler: Scheduler, max_events: int = DEFAULT_MAX_EVENTS) -> None:
        if max_events < 1:
            raise ValueError(f"max_events must be at least 1, got {max_events}")
        self.scheduler = scheduler
        self.max_events = max_events
        self._begin()

    def handle(self, event: Event) -> list[Command]:
        """As `Scheduler.handle`, and remembered."""
        if len(self._entries) >= self.max_events:
            self._begin()
        try:
            commands = self.scheduler.handle(event)
        except BaseException:
            self._entries.append(Entry(event, b"raised"))
            raise
        self._entries.append(Entry(event, digest_of(commands)))
        return commands

    def check(self, save_to: Path) -> None:
        """Assert every invariant; a failed one leaves its recording at `save_to`."""
        try:
            self.scheduler.check()
        except AssertionError:
            self.save(save_to)
            raise

    def save(self, path: Path) -> None:
        """Write the recording."""
        path.write_bytes(pickle.dumps({"format": FORMAT, "snapshot": self._snapshot, "entries": self._entries}))

    def _begin(self) -> None:
        self._snapshot = pickle.dumps(self.scheduler)
        self._entries: list[Entry] = []


def replay(path: Path) -> tuple[int, Divergence | None, Scheduler]:
    """Tell a recording's events to its snapshot again: (events replayed, first divergence, the scheduler then).

    Raises ValueError if the file is no recording of this version.
    """
    recorded = _load(path.read_bytes())
    if not isinstance(recorded, dict) or recorded.get("format") != FORMAT:
        raise ValueError(f"{path} is not a recording of format {FORMAT}")
    scheduler = _load(recorded["snapshot"])
    assert isinstance(scheduler, Scheduler)
    for index, entry in enumerate(recorded["entries"]):
        try:
            commands = scheduler.handle(entry.event)
        except Exception:
            if entry.digest == b"raised":
                return index + 1, None, scheduler
            raise
        if digest_of(commands) != entry.digest:
            return index + 1, Divergence(index, entry.event, commands), scheduler
    return len(recorded["entries"]), None, scheduler


def digest_of(commands: Sequence[Command]) -> bytes:
    """sha256 of every field of every command, arrays by dtype, shape and bytes."""
    digest = sha256()
    for command in commands:
        _feed(digest, command)
    return digest.digest()


def _feed(digest: Any, value: object) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif is_dataclass(value):
        for field in fields(value):
            _feed(digest, getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        digest.update(str(len(value)).encode())
        for item in value:
            _feed(digest, item)
    else:
        digest.update(repr(value.value if isinstance(value, Enum) else value).encode())


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED_NAMES:
            return super().find_class(module, name)
        # Classes of the core only, not what its modules import, nor attributes of them.
        if module.startswith("scheduler.") and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise ValueError(f"a recording may not hold {module}.{name}")


def _load(content: bytes) -> Any:
    try:
        return _Reader(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError) as error:
        raise ValueError(f"not a recording: {error}") from error
