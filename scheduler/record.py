"""Keeping what a scheduler was told, and telling it again.

A recording is a configuration, the events since and a digest of the commands each of them made. It is length-bounded:
when it is full, it starts over from a snapshot of the core. The core is pure, so telling the events again must make
the same commands; if it does not, either the code has changed or something impure crept in.
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

from scheduler.core import ChooseDrafts, Scheduler
from scheduler.events import Command, Event, SchedulerConfig

FORMAT = 2
RAISED = b"raised"
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


class RecordedScheduler(Scheduler):
    """A scheduler that remembers its latest events."""

    def __init__(
        self,
        config: SchedulerConfig,
        choose_drafts: ChooseDrafts | None = None,
        *,
        max_events: int = DEFAULT_MAX_EVENTS,
    ) -> None:
        """`max_events` bounds the recording; from a full one only a snapshot is kept."""
        if max_events < 1:
            raise ValueError(f"max_events must be at least 1, got {max_events}")
        super().__init__(config, choose_drafts)
        self._max_events = max_events
        self._snapshot: bytes | None = None  # None: the recording begins with an empty scheduler
        self._entries: list[Entry] = []

    def handle(self, event: Event) -> list[Command]:
        """As `Scheduler.handle`, and remembered."""
        if len(self._entries) >= self._max_events:
            self._snapshot = pickle.dumps({k: v for k, v in self.__dict__.items() if k not in RECORDER_FIELDS})
            self._entries = []
        try:
            commands = super().handle(event)
        except BaseException:
            self._entries.append(Entry(event, RAISED))
            raise
        self._entries.append(Entry(event, digest_of(commands)))
        return commands

    def check(self, save_to: Path | None = None) -> None:
        """Assert every invariant; a failed one leaves its recording at `save_to`."""
        try:
            super().check()
        except AssertionError:
            if save_to is not None:
                self.save(save_to)
            raise

    def recording(self) -> bytes:
        """The recording as a file's content."""
        recording = {"format": FORMAT, "config": self.config, "snapshot": self._snapshot, "entries": self._entries}
        return pickle.dumps(recording)

    def save(self, path: Path) -> None:
        """Write the recording."""
        path.write_bytes(self.recording())


RECORDER_FIELDS = frozenset({"_max_events", "_snapshot", "_entries", "_choose_drafts"})


def replay(path: Path) -> tuple[int, Divergence | None, Scheduler]:
    """Tell a recording's events again: (events replayed, first divergence, the scheduler then).

    Raises ValueError if the file is no recording of this format.
    """
    recorded = _load(path.read_bytes())
    if not isinstance(recorded, dict) or recorded.get("format") != FORMAT:
        raise ValueError(f"{path} is not a recording of format {FORMAT}")
    scheduler = Scheduler(recorded["config"])
    if recorded["snapshot"] is not None:
        scheduler.__dict__.update(_load(recorded["snapshot"]))
    for index, entry in enumerate(recorded["entries"]):
        try:
            commands = scheduler.handle(entry.event)
        except Exception:
            if entry.digest != RAISED:
                raise
            return index + 1, None, scheduler
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
