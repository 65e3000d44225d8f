"""`slipstream serve` in a process of its own, on a tiny random model, as a user runs it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cluster.processes import wait_until_gone
from tests import tiny_tokenizer
from tests.tiny_model import save_tiny_model

FLAGS = ("--port", "0", "--max-num-seqs", "4", "--threads", "1")


@dataclass(slots=True)
class ServeProcess:
    """One `slipstream serve` and its own home, so that other deployments are out of sight."""

    home: Path
    process: subprocess.Popen[str]
    address: str = ""
    metrics: str = ""  # URL; empty when they are off
    http: str = ""  # URL of the gateway; empty without one

    @property
    def errors(self) -> str:
        """What it has written to stderr."""
        return _stderr(self.home).read_text()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command of the same user."""
        command = [sys.executable, "-m", "cluster.cli", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=_environment(self.home), check=False
        )

    def started(self) -> tuple[list[tuple[int, int]], Path]:
        """(pid, started_at) of what it wrote down that it started, and the directory of Ray's files."""
        [record] = (self.home / "slipstream").glob("*.json")
        written = json.loads(record.read_text())
        processes = [(pid, start) for pid, start in written["processes"]]
        assert len(processes) > 4
        return processes, Path(written["directory"])

    def left_behind(self) -> Callable[[], list[object]]:
        """What is still there, when called, of all that it started and made."""
        [record] = (self.home / "slipstream").glob("*.json")
        processes, directory = self.started()
        return lambda: [*wait_until_gone(processes, 0.0), *(path for path in (record, directory) if path.exists())]


@contextmanager
def serve_process(path: Path, *flags: str, environment: dict[str, str] | None = None) -> Iterator[ServeProcess]:
    """Ready when entered; ended at the end. Everything it leaves is below `path`."""
    save_tiny_model(path / "model")
    tiny_tokenizer.save(path / "model")
    home = path / "home"
    home.mkdir()
    command = [sys.executable, "-m", "cluster.cli", "serve", "--model", str(path / "model"), *FLAGS, *flags]
    with _stderr(home).open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment(home) | (environment or {})
        )
    assert process.stdout is not None
    with process, process.stdout:
        served = ServeProcess(home, process)
        try:
            told = _told(process.stdout, ("metrics", "ready"))
            served.metrics, served.address = told.get("metrics", ""), told["ready"]
            served.http = told.get("http", "")
            yield served
        finally:
            process.terminate()
            process.wait(60)


def _stderr(home: Path) -> Path:
    return home / "stderr"


def _environment(home: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(home)}


def _told(out: IO[str], names: Sequence[str]) -> dict[str, str]:
    """What its lines say of these, up to the last of them."""
    told: dict[str, str] = {}
    for line in out:
        name, _, value = line.strip().partition(" ")
        told[name] = value
        if name == names[-1]:
            return told
    raise AssertionError("serve ended without being ready")
