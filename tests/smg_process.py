"""The real smg router in a process of its own, in front of servers that tests started."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import openai

START_S = 300.0


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


@dataclass(slots=True)
class Router:
    """A router that serves a model, and an OpenAI client of it."""

    client: openai.OpenAI
    metrics_url: str

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all labels but these."""
        with urlopen(self.metrics_url, timeout=10) as page:
            lines = page.read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        series = (line for line in lines if line.startswith((f"{name} ", f"{name}{{")))
        return sum(float(line.rpartition(" ")[2]) for line in series if all(one in line for one in wanted))


@contextmanager
def smg_router(addresses: Sequence[str], model_path: Path, home: Path, *flags: str, model: str) -> Iterator[Router]:
    """Serves the model; its log is home/log. Ended at the end."""
    port, metrics_port = free_ports(2)
    command = [str(Path(sys.executable).with_name("smg")), "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics_port), "--model-path", str(model_path), *flags]
    command += ["--worker-urls", *(f"grpc://{address}" for address in addresses)]
    environment = {**os.environ, "XDG_STATE_HOME": str(home)}
    with (
        (home / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as smg,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=240) as client,
    ):
        try:
            _wait_for_model(client, smg, home / "log", model)
            yield Router(client, f"http://127.0.0.1:{metrics_port}/metrics")
        finally:
            smg.terminate()
            smg.wait(60)


def _wait_for_model(client: openai.OpenAI, smg: subprocess.Popen[bytes], log: Path, model: str) -> None:
    deadline = time.monotonic() + START_S
    while smg.poll() is None and time.monotonic() < deadline:
        try:
            if any(one.id == model for one in client.models.list()):
                return
        except openai.APIError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"smg serves no model:\n{log.read_text()[-2000:]}")
