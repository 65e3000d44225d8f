"""Rules that hold for every test: sanitizer on, no Ray outside tests marked `ray`, no process left behind."""

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator

# Before torch, Ray or any child process reads them.
os.environ["SLIPSTREAM_SANITIZE_KV"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # on a busy machine spinning threads wait for each other
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from cluster.processes import adopt_orphans, command_line, descendants
from cluster.ray_environment import prepare

prepare()  # before any test imports ray

RESOURCE_TRACKER = "multiprocessing.resource_tracker"
LINGER_S = 10.0  # Ray's own processes take a moment to notice that their parent left


@pytest.fixture(autouse=True)
def _no_ray_in_unit_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("ray") or importlib.util.find_spec("ray") is None:
        return
    import ray

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("a unit test started Ray: mark it `ray` or drive the core directly")

    monkeypatch.setattr(ray, "init", refuse)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two OpenMP threads on a busy machine wait for each other most of the time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    adopt_orphans()  # so that the check at the end sees them too


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
        living = ((pid, command_line(pid)) for pid in descendants(os.getpid()))
        # multiprocessing's resource tracker lives as long as its interpreter.
        left = [(pid, command) for pid, command in living if command and RESOURCE_TRACKER not in command]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
