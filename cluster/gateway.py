"""The router `smg` in front of a deployment: OpenAI's HTTP interface, as a process that we start, watch and end.

A process of its own, because two copies of the vLLM engine protocol's messages cannot live in one.
"""

import json
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from urllib.request import urlopen

from cluster.errors import BringUpError, ConfigError
from cluster.listening import check_port_is_free
from cluster.loopback import host_port
from cluster.processes import executable

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 2.0
CHECK_EVERY_S = 5.0
HUNG_AFTER_S = 30.0  # without an answer for so long
STOP_TIMEOUT_S = 5.0
MAX_DEATHS, MAX_DEATHS_WITHIN_S = 3, 60.0
POLL_S = 0.2
# Ended by the kernel when the process that started it ends, however that happens.
WITH_ITS_PARENT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); os.execv(sys.argv[1], sys.argv[1:])"
)


class Gateway:
    """One router. Its log is in a file, since what it says is not ours to print."""

    def __init__(self, endpoints: Sequence[str], *, directory: Path, host: str, port: int, own: Path) -> None:
        """Of front ends HOST:PORT; `directory` has the tokenizer, `own` its log. ConfigError without an `smg`."""
        self.address = host_port(host, port)
        self._log = own / "smg.log"
        urls = [f"grpc://{endpoint}" for endpoint in endpoints]
        self._command = [_executable(), "launch", "--host", host, "--port", str(port), "--worker-urls", *urls]
        self._command += ["--model-path", str(directory), "--log-dir", str(own / "smg")]
        self._process: subprocess.Popen[bytes] | None = None
        self._last_heard_s = self._next_check_s = 0.0
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)

    def start(self) -> None:
        """Returns once it serves a model. Raises BringUpError."""
        self._launch()
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._serves():
            if self._ended() or time.monotonic() > deadline_s:
                self.stop()
                raise BringUpError(f"smg serves no model: {self._last_line()}")
            time.sleep(POLL_S)

    def check(self) -> str | None:
        """Now and then: starts it again when it has ended or hangs. Why it is given up, if it dies again and again."""
        now_s = time.monotonic()
        if not self._ended():
            if now_s < self._next_check_s:
                return None
            self._next_check_s = now_s + CHECK_EVERY_S
            if self._answers("/health"):
                self._last_heard_s = now_s
            if now_s - self._last_heard_s < HUNG_AFTER_S:
                return None
        self._deaths.append(now_s)
        if len(self._deaths) == MAX_DEATHS and now_s - self._deaths[0] < MAX_DEATHS_WITHIN_S:
            return f"smg ended {MAX_DEATHS} times within {MAX_DEATHS_WITHIN_S:g} s: {self._last_line()}"
        self.stop()
        self._launch()
        return None

    def stop(self) -> None:
        """Returns when it has ended."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _launch(self) -> None:
        metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(_free_port())]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", WITH_ITS_PARENT, *self._command, *metrics],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._last_heard_s = time.monotonic()

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _serves(self) -> bool:
        try:
            return bool(json.loads(self._get("/v1/models"))["data"])
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _answers(self, path: str) -> bool:
        try:
            self._get(path)
        except OSError:
            return False
        return True

    def _get(self, path: str) -> bytes:
        """OSError unless it answers, and with success."""
        with urlopen(f"http://{self.address}{path}", timeout=ANSWER_TIMEOUT_S) as answer:
            if answer.status != HTTPStatus.OK:
                raise OSError(f"HTTP {answer.status}")
            content: bytes = answer.read()
        return content

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def check_http(host: str, port: int) -> None:
    """ConfigError without an `smg`, or when nobody can listen there now. Starts nothing."""
    _executable()
    check_port_is_free(host, port, port_flag="--http")


def _executable() -> str:
    found = executable("smg")
    if found is None:
        raise ConfigError("--http needs the smg router: pip install 'smg>=1.13,<2'")
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
