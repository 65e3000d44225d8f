"""The process in front of a deployment, with a stand-in for smg: started, watched, started again, ended."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from cluster import gateway
from cluster.errors import BringUpError, ConfigError
from cluster.gateway import Gateway, check_http
from cluster.processes import command_line, descendants, started_at, wait_until_gone

STAND_IN = f"""#!{sys.executable}
import http.server, json, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({{"data": [{{"id": "tiny", "pid": os.getpid()}}]}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

if os.environ.get("STAND_IN_FAILS"):
    sys.exit("no worker can be reached")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "smg"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    monkeypatch.setattr(gateway, "_executable", lambda: str(path))
    return path


@pytest.fixture
def up(stand_in: Path, tmp_path: Path) -> Iterator[Gateway]:
    one = Gateway(["127.0.0.1:1"], directory=tmp_path, host="127.0.0.1", port=gateway._free_port(), own=tmp_path)
    yield one
    one.stop()


def routers(own: Path) -> list[int]:
    return [pid for pid in descendants(os.getpid()) if str(own / "smg") in command_line(pid)]


STARTER = """
import sys, time
from pathlib import Path
from cluster import gateway
gateway._executable = lambda: sys.argv[1]
one = gateway.Gateway([], directory=Path("."), host="127.0.0.1", port=gateway._free_port(), own=Path(sys.argv[2]))
one.start()
print(one._process.pid, flush=True)
time.sleep(60)
"""


def test_it_ends_with_whoever_started_it(stand_in: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(stand_in), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        start = started_at(pid)
        assert start is not None
        starter.kill()
    assert wait_until_gone([(pid, start)], 10) == []


def answers(one: Gateway) -> bool:
    with urlopen(f"http://{one.address}/v1/models", timeout=5) as answer:
        return bool(answer.read())


def test_it_is_started_found_and_ended(up: Gateway, tmp_path: Path) -> None:
    up.start()
    assert answers(up)
    assert up.check() is None
    assert len(routers(tmp_path)) == 1
    up.stop()
    assert routers(tmp_path) == []


def test_one_that_dies_is_started_again_but_not_for_ever(up: Gateway) -> None:
    up.start()
    for _ in range(gateway.MAX_DEATHS - 1):
        kill(up)
        assert up.check() is None
        deadline_s = time.monotonic() + 20
        while not up._answers("/health") and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert answers(up)
    kill(up)
    assert "smg ended 3 times" in str(up.check())


def kill(up: Gateway) -> None:
    assert up._process is not None
    up._process.kill()
    up._process.wait()


def test_one_that_hangs_is_replaced(up: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "CHECK_EVERY_S", 0.0)
    monkeypatch.setattr(gateway, "HUNG_AFTER_S", 0.2)
    monkeypatch.setattr(gateway, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(gateway, "STOP_TIMEOUT_S", 0.2)
    up.start()
    hanging = up._process
    assert hanging is not None
    hanging.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    assert up.check() is None
    assert hanging.poll() is not None
    assert up._process is not hanging


def test_one_that_serves_nothing_fails_with_its_last_line(up: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    with pytest.raises(BringUpError, match="smg serves no model: no worker can be reached"):
        up.start()


def test_what_cannot_be_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch, stand_in: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--http {port} on --host 127.0.0.1 cannot be listened on"):
            check_http("127.0.0.1", port)
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="pip install"):
        check_http("127.0.0.1", 1)
