"""`slipstream serve` as a user runs it: ready, asked, stopped, and what is left when it is killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from cluster.client import Client
from cluster.processes import wait_until_gone
from tests import tiny_tokenizer
from tests.tiny_model import save_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

FLAGS = ["--port", "0", "--max-num-seqs", "4", "--threads", "1", "--data-parallel-size", "2"]


@dataclass(slots=True)
class Served:
    """One `slipstream serve` and its own home, so that other deployments are out of sight."""

    home: Path
    process: subprocess.Popen[str]
    address: str = ""

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cluster.cli", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=_environment(self.home), check=False
        )

    def left_behind(self) -> Callable[[], list[object]]:
        """What is still there, when called, of all that it wrote down that it started and made."""
        [record] = (self.home / "slipstream").glob("*.json")
        written = json.loads(record.read_text())
        processes = [(pid, start) for pid, start in written["processes"]]
        assert len(processes) > 4
        paths = [record, Path(written["directory"])]
        return lambda: [*wait_until_gone(processes, 0.0), *(path for path in paths if path.exists())]


def _environment(home: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(home)}


def _ready_line(out: IO[str]) -> str:
    for line in out:
        if line.startswith("ready "):
            return line.removeprefix("ready ").strip()
    raise AssertionError("serve ended without being ready")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    save_tiny_model(tmp_path / "model")
    tiny_tokenizer.save(tmp_path / "model")
    command = [sys.executable, "-m", "cluster.cli", "serve", "--model", str(tmp_path / "model"), *FLAGS]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=_environment(tmp_path / "home")
    )
    assert process.stdout is not None
    with process, process.stdout:
        served = Served(tmp_path / "home", process)
        try:
            served.address = _ready_line(process.stdout)
            yield served
        finally:
            process.terminate()
            process.wait(60)


def test_serve_answers_tells_its_status_and_goes_down_without_a_trace(served: Served) -> None:
    with Client(served.address) as client:
        answer = client.generate([5, 6, 7], max_tokens=24, temperature=0.0, ignore_eos=True).result()
    assert len(answer.token_ids) == 24

    options = ["--max-tokens", "8", "--temperature", "0.7", "--seed", "1"]
    texts = [served.run("generate", "hello world", *flags, *options).stdout for flags in ([], ["--raw"], ["--raw"])]
    assert texts[1] == texts[2] != texts[0]
    assert served.run("generate", "hello", "--top-p", "2").stderr.startswith("error: INVALID_ARGUMENT: top_p")

    status = served.run("status", "--json")
    page = json.loads(status.stdout.splitlines()[-1])
    assert {worker["worker_id"] for worker in page["workers"]} == {"worker-0", "worker-1"}
    assert page["requests"]["finished"] == {"length": 4}
    assert page["blocks"]["free"] == page["blocks"]["total"] > 0
    assert page["acceptance"]["mean_length"] >= 1.0

    left_behind = served.left_behind()
    down = served.run("down")
    assert (down.returncode, down.stdout) == (0, f"stopped {served.address}\n"), down.stderr
    assert served.process.wait(10) == 0
    assert left_behind() == []
    assert served.run("down").returncode == 2


def test_down_ends_what_a_killed_server_left(served: Served) -> None:
    left_behind = served.left_behind()
    served.process.send_signal(signal.SIGKILL)
    served.process.wait(10)
    assert served.run("status").returncode == 2
    assert served.run("down").returncode == 0
    assert left_behind() == []
