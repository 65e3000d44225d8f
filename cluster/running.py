"""Which deployments run on this machine: one small file each, so that `status` and `down` find them.

A record names processes by id and start time: one that was killed leaves a record that is seen to
be dead, and its leftovers can still be ended.
"""

import json
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.joined_ray import JoinedRay
from cluster.local_ray import LocalRay
from cluster.processes import end, started_at, wait_until_gone
from cluster.ray_environment import state_directory

STOP_TIMEOUT_S = 30.0
LEFTOVER_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """One deployment, as it was when it became ready."""

    pid: int  # of `slipstream serve`
    pid_started_at: int
    endpoints: tuple[str, ...]  # HOST:PORT of each front end
    model: str
    directory: str  # of Ray's files, removed at the end
    processes: tuple[tuple[int, int], ...]  # (pid, started_at) of everything it started

    @property
    def alive(self) -> bool:
        """Whether the serving process is still the one that wrote the record."""
        return started_at(self.pid) == self.pid_started_at


def record(endpoints: Sequence[str], model: str, local: LocalRay | JoinedRay) -> Path:
    """Write down that this process serves; the file, to be removed at the end."""
    pid = os.getpid()
    start = started_at(pid)
    assert start is not None
    running = Running(
        pid=pid,
        pid_started_at=start,
        endpoints=tuple(endpoints),
        model=model,
        directory=str(local.directory),
        processes=tuple(local.processes()),
    )
    path = state_directory() / f"{pid}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(running)))
    partial.rename(path)
    return path


def find(port: int | None = None) -> tuple[Path, Running] | None:
    """The newest deployment, or the one that listens on this port."""
    found = [(path, running) for path in state_directory().glob("*.json") if (running := _read(path)) is not None]
    found = [(path, one) for path, one in found if port is None or str(port) in _ports(one)]
    return max(found, key=lambda pair: (pair[1].alive, pair[1].pid_started_at), default=None)


def take_down(path: Path, running: Running) -> None:
    """Stop a deployment and whatever of it is left; returns when all its processes ended."""
    if running.alive:
        os.kill(running.pid, signal.SIGTERM)
        if wait_until_gone([(running.pid, running.pid_started_at)], STOP_TIMEOUT_S):
            os.kill(running.pid, signal.SIGTERM)  # the second one forces
    end(running.processes, LEFTOVER_GRACE_S)
    shutil.rmtree(running.directory, ignore_errors=True)
    path.unlink(missing_ok=True)


def _ports(running: Running) -> list[str]:
    return [endpoint.rpartition(":")[2] for endpoint in running.endpoints]


def _read(path: Path) -> Running | None:
    try:
        fields = json.loads(path.read_text())
        fields["endpoints"] = tuple(fields["endpoints"])
        fields["processes"] = tuple((pid, start) for pid, start in fields["processes"])
        return Running(**fields)
    except (OSError, ValueError, TypeError, KeyError):
        return None
