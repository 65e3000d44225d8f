"""Rules that hold for every test: sanitizer on, no Ray outside tests marked `ray`, no process left behind."""

import ctypes
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Before torch, Ray or any child process reads them.
os.environ["SLIPSTREAM_SANITIZE_KV"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # on a busy machine spinning threads wait for each other
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from cluster.ray_environment import prepare

prepare()  # before any test imports ray

PR_SET_CHILD_SUBREAPER = 36
LINGER_S = 10.0  # Ray's own processes take a moment to notice that their parent left


@pytest.fixture(autouse=True)
def _no_ray_in_unit_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("ray") or importlib.util.find_spec("ray") is None:
        return
    import ray

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("a unit test started Ray: mark it `ray` or drive the core directly")

    monkeypatch.setattr(ray, "init", refuse)


_ray_ran = False
_exit_status = 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    global _ray_ran
    _ray_ran = _ray_ran or item.get_closest_marker("ray") is not None


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Where Ray ran in this process, leave without tearing the interpreter down.

    Its C++ threads outlive Python's state: in CI a session crashed there once, after its last test had passed.
    What the product does at its end is tested in processes of their own.
    """
    if not _ray_ran:
        return
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_exit_status)


def pytest_sessionstart() -> None:
    # Orphans of our children become our children, so that the check at the end sees them too.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    global _exit_status
    left = _wait_for_children(time.monotonic() + LINGER_S)
    for pid, command in left:
        sys.stderr.write(f"\nprocess left behind by a test: {pid} {command}\n")
        os.kill(pid, signal.SIGKILL)
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    _exit_status = int(session.exitstatus)


def _wait_for_children(deadline: float) -> list[tuple[int, str]]:
    """The (pid, command line) of every descendant that is still alive at the deadline."""
    while True:
        left = list(_living_descendants(os.getpid()))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _living_descendants(pid: int) -> Iterator[tuple[int, str]]:
    for child, command in _children(pid):
        if "multiprocessing.resource_tracker" not in command:  # lives as long as its interpreter
            yield child, command
        yield from _living_descendants(child)


def _children(pid: int) -> Iterator[tuple[int, str]]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:
            continue  # the thread ended while we looked
        for child in children:
            if command := _command_line(child):
                yield child, command


def _command_line(pid: int) -> str:
    """Empty for a process that has ended, zombies included."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
