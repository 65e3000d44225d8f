"""`slipstream serve` as a user runs it: ready, asked, stopped, and what is left when it is killed."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.client import Client
from tests.serve_process import ServeProcess, serve_process

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServeProcess]:
    with serve_process(tmp_path, "--data-parallel-size", "2") as served:
        yield served


def test_serve_answers_tells_its_status_and_goes_down_without_a_trace(served: ServeProcess) -> None:
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


def test_down_ends_what_a_killed_server_left(served: ServeProcess) -> None:
    left_behind = served.left_behind()
    served.process.send_signal(signal.SIGKILL)
    served.process.wait(10)
    assert served.run("status").returncode == 2
    assert served.run("down").returncode == 0
    assert left_behind() == []
