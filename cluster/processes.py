"""Which processes descend from which, read from /proc, and how to end them. Linux only.

Everything here works by process id, never by name.
"""

import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05


def adopt_orphans() -> None:
    """Make processes whose parent ended below us our children, so that they stay in sight."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def executable(name: str) -> str | None:
    """A command beside this Python, or else one of the path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def descendants(pid: int) -> Iterator[int]:
    """Every living process below this one, parents first."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:
            continue  # the thread ended while we looked
        for child in children:
            if command_line(child):
                yield child
            yield from descendants(child)


def command_line(pid: int) -> str:
    """Empty for a process that has ended, zombies included."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def variable(pid: int, name: str) -> str | None:
    """Of the environment a process was started with; None without it, or without the process."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return None
    prefix = f"{name}="
    return next((entry.removeprefix(prefix) for entry in content.split("\0") if entry.startswith(prefix)), None)


def started_at(pid: int) -> int | None:
    """Clock ticks since boot at which the process started: with its id, its identity. None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def wait_until_gone(identities: Iterable[tuple[int, int]], timeout_s: float) -> list[int]:
    """Wait for processes, each a (pid, started_at), to end; the ids of those that did not."""
    deadline = time.monotonic() + timeout_s
    left = [(pid, start) for pid, start in identities if started_at(pid) == start]
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = [(pid, start) for pid, start in left if started_at(pid) == start]
    return [pid for pid, _ in left]


def end(identities: Iterable[tuple[int, int]], grace_s: float) -> None:
    """Wait, then kill what is left. A process id that was given to another process is left alone."""
    identities = list(identities)
    for pid in wait_until_gone(identities, grace_s):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    wait_until_gone(identities, grace_s)


def identify(pids: Iterable[int]) -> list[tuple[int, int]]:
    """(pid, started_at) of those that live."""
    return [(pid, start) for pid in pids if (start := started_at(pid)) is not None]
