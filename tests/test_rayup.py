"""`ray up` of deploy/onprem.yaml for real: three ssh hosts made of namespaces on this machine, as tests/hosts.sh says.

A client on the operator's seat, outside the cluster, streams while a cable is pulled and while a host dies.
Its streams are compared with undisturbed runs of the same model in this process.
"""

import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]

from tests import tiny_model, tiny_tokenizer
from tests.ray_streams import Asked, expected, random_requests
from worker.model import load_model

ROOT = Path(__file__).resolve().parent.parent
HOSTS_SCRIPT = ROOT / "tests" / "hosts.sh"
HEAD, WORKERS = "h0", ("h1", "h2")
ADDRESS = "10.77.0.10:50051"
CONFIG_FILE = "cluster.yaml"  # in the directory of the hosts
MAX_LEN = 4096
MAX_TOKENS = 500
NUM_BLOCKS = 2048
RAY_UP_S = 300.0
READY_S = 240.0
STREAM_S = 240.0
NOTICED_S = 30.0  # after a host or a cable is gone: 3 s when nothing else runs
BACK_S = 240.0  # if Ray gave the machine up, its autoscaler has to start it anew
BEGUN = 30  # tokens of every stream before something is broken

NEEDED = ("sshd", "ssh", "rsync", "ip", "unshare", "nsenter", "ps")


def _why_not() -> str | None:
    """Why hosts cannot be made here."""
    search = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in NEEDED if shutil.which(name, path=search) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: openssh-server rsync iproute2 util-linux procps)"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    name = f"slip-probe-{os.getpid()}"
    command = f"ip netns add {name} && ip netns exec {name} unshare --pid --fork --mount-proc --mount --uts true"
    tried = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None if tried.returncode == 0 else f"namespaces cannot be made: {tried.stderr.strip()}"


WHY_NOT = _why_not()
pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The three hosts and the operator's seat."""

    directory: Path
    venv: Path

    def run(self, *arguments: str, timeout_s: float = 60.0) -> str:
        """What `tests/hosts.sh ARGUMENTS` says; AssertionError with its output when it fails."""
        done = subprocess.run(
            [str(HOSTS_SCRIPT), *arguments],
            cwd=ROOT,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-4000:]}"
        return done.stdout

    def on(self, host: str, command: str, timeout_s: float = 60.0) -> str:
        """What a command on a host says."""
        return self.run("on", host, command, timeout_s=timeout_s)

    def ray(self, command: str, timeout_s: float) -> str:
        """A `ray` command of the operator, as deploy/README.md has it."""
        return self.on(
            "ops", f"cd {ROOT} && RAY_USAGE_STATS_ENABLED=0 RAY_UP_enable_autoscaler_v2=0 ray {command}", timeout_s
        )

    def left(self) -> dict[str, str]:
        """What still runs on each living host besides its sshd."""
        alive = [host for host in (HEAD, *WORKERS) if (self.directory / host / "pid").exists()]
        return {host: left for host in alive if (left := self.run("left", host).strip())}

    def environment(self) -> dict[str, str]:
        """For tests/hosts.sh."""
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        return {**os.environ, "PATH": path, "HOSTS_DIR": str(self.directory), "VENV": str(self.venv)}


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="rayup-", dir="/tmp"))  # hosts share /tmp, and not /root
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def hosts(scratch: Path) -> Iterator[Hosts]:
    """Running, with an environment of this interpreter's packages and of what `ray up` copies to ~/slipstream."""
    hosts = Hosts(directory=scratch / f"{os.getpid()}", venv=scratch / "venv")
    _make_environment(hosts.venv)
    try:
        hosts.run("up")
        yield hosts
    finally:
        hosts.run("down")


def _make_environment(directory: Path) -> None:
    """As on a machine where `pip install ~/slipstream` has run: no network here to do that again."""
    venv.create(directory, symlinks=True, with_pip=False)
    packages = next((directory / "lib").glob("python*/site-packages"))
    (packages / "slipstream.pth").write_text("\n".join([*site.getsitepackages(), "/root/slipstream", ""]))
    for name, module in (("slipstream", "cluster.cli"), ("ray", "ray.scripts.scripts")):
        script = directory / "bin" / name
        script.write_text(f"#!{directory}/bin/python\nfrom {module} import main\nmain()\n")
        script.chmod(0o755)


@pytest.fixture(scope="module")
def model(scratch: Path) -> Path:
    directory = scratch / "model"
    tiny_model.save_tiny_model(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_LEN}))
    tiny_tokenizer.save(directory)
    return directory


@pytest.fixture(scope="module")
def cluster(hosts: Hosts) -> Hosts:
    """After `ray up` of the file that is shipped, its block filled in."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "onprem.yaml").read_text())
    config["provider"] |= {"head_ip": "10.77.0.10", "worker_ips": ["10.77.0.11", "10.77.0.12"]}
    config["auth"] |= {"ssh_user": "root"}
    (hosts.directory / CONFIG_FILE).write_text(yaml.safe_dump(config))
    hosts.on("ops", "ray get-auth-token --generate > /dev/null")
    hosts.ray(f"up --yes --no-config-cache {hosts.directory / CONFIG_FILE}", RAY_UP_S)
    return hosts


@pytest.fixture(scope="module")
def served(cluster: Hosts, model: Path) -> Hosts:
    """With a server on the head and a worker on each of the others."""
    flags = f"--model {model} --data-parallel-size 2 --host 10.77.0.10 --port 50051 --insecure"
    flags += f" --max-num-seqs 8 --num-gpu-blocks-override {NUM_BLOCKS} --threads 1 --metrics-port 0"
    serve = f"nohup ~/slipstream-venv/bin/slipstream serve --address auto {flags} > ~/serve.log 2>&1 < /dev/null &"
    cluster.ray(f"exec --no-config-cache {cluster.directory / CONFIG_FILE} '{serve}'", 120.0)
    log = cluster.directory / HEAD / "root" / "serve.log"
    _wait_until(lambda: "ready " in _text(log) or "error: " in _text(log), READY_S, "`serve` says nothing")
    assert f"ready {ADDRESS}" in log.read_text(), log.read_text()
    return cluster


class Seat:
    """A client on the operator's seat, and what it sees."""

    def __init__(self, hosts: Hosts, requests: list[Asked]) -> None:
        path = hosts.directory / "requests.json"
        path.write_text(json.dumps([asked.arguments for asked in requests]))
        command = f"cd {ROOT} && exec {sys.executable} -m tests.rayup_seat {ADDRESS} {path}"
        self._log = (hosts.directory / "seat.log").open("w+")
        self._process = subprocess.Popen(
            [str(HOSTS_SCRIPT), "on", "ops", command],
            cwd=ROOT,
            env=hosts.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._process.stdout is not None
        self._out: IO[str] = self._process.stdout
        self._num_tokens = [0] * len(requests)
        self._streams: list[list[int]] | None = None

    def __enter__(self) -> "Seat":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._out.close()
        self._log.close()

    def wait_until(self, holds: Callable[[set[str]], bool], timeout_s: float) -> None:
        """Until something holds, told the workers there are. AssertionError when it does not, or the client ends."""
        deadline = time.monotonic() + timeout_s
        for line in self._out:
            seen: dict[str, Any] = json.loads(line)
            if "streams" in seen:
                self._streams = seen["streams"]
                continue
            self._num_tokens = seen["num_tokens"]
            if holds(set(seen["workers"])):
                return
            assert time.monotonic() < deadline, f"not seen in {timeout_s:g} s; at last: {line}"
        self._log.seek(0)
        raise AssertionError(f"the client ended: {self._log.read()[-2000:]}")

    def wait_until_begun(self) -> None:
        """Every stream has some tokens, and none has ended."""
        self.wait_until(lambda _: min(self._num_tokens) >= BEGUN, STREAM_S)
        assert max(self._num_tokens) < MAX_TOKENS, "the streams ended before something could be broken"

    def wait_until_going_on(self) -> None:
        """Every stream has more tokens than now, or all."""
        before = self._num_tokens
        self.wait_until(
            lambda _: all(
                now >= min(then + BEGUN, MAX_TOKENS) for then, now in zip(before, self._num_tokens, strict=True)
            ),
            STREAM_S,
        )

    def streams(self) -> list[list[int]]:
        """All of them, once they ended."""
        self.wait_until(lambda _: self._streams is not None, STREAM_S)
        assert self._streams is not None
        return self._streams

    def wait_for_workers(self, num_workers: int, timeout_s: float) -> None:
        """The scheduler counts so many."""
        self.wait_until(lambda workers: len(workers) == num_workers, timeout_s)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _wait_until(holds: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.5)


def _requests(seed: int) -> list[Asked]:
    """Sampled, for drafts to be refused: long enough for something to be broken on the way."""
    requests = random_requests(4, 40, seed=seed)
    return [replace(one, max_tokens=MAX_TOKENS, temperature=0.9) for one in requests]


def _undisturbed(directory: Path, requests: list[Asked]) -> list[list[int]]:
    model = load_model(directory, dtype=torch.float32, device="cpu", attention="cpu", num_blocks=256, block_size=16)
    return expected(model, requests)


def test_ray_up_brings_up_a_head_and_two_workers_that_offer_to_serve(cluster: Hosts) -> None:
    def offered() -> bool:
        return "0.0/2.0 slipstream" in cluster.on(HEAD, "RAY_AUTH_MODE=token ray status")

    _wait_until(offered, 120.0, "the workers did not join")
    listening = cluster.on(HEAD, "cat /proc/net/tcp").split()
    assert f"0100007F:{8265:04X}" in listening, "the dashboard listens on loopback"
    assert f"00000000:{8265:04X}" not in listening


def test_a_client_outside_streams_through_a_pulled_cable(served: Hosts, model: Path) -> None:
    requests = _requests(seed=1)
    with Seat(served, requests) as seat:
        seat.wait_for_workers(2, READY_S)
        seat.wait_until_begun()
        served.run("cable", "h2", "down")
        try:
            seat.wait_for_workers(1, NOTICED_S)
            seat.wait_until_going_on()
        finally:
            served.run("cable", "h2", "up")
        got = seat.streams()
        seat.wait_for_workers(2, BACK_S)
    assert got == _undisturbed(model, requests)


def test_a_client_outside_streams_through_the_death_of_a_host(served: Hosts, model: Path) -> None:
    requests = _requests(seed=2)
    with Seat(served, requests) as seat:
        seat.wait_until_begun()
        served.run("kill", "h1")
        seat.wait_for_workers(1, NOTICED_S)
        got = seat.streams()
    assert got == _undisturbed(model, requests)


def test_tear_down_as_the_readme_has_it_leaves_no_process_on_any_host(served: Hosts) -> None:
    assert set(served.left()) == {HEAD, "h2"}
    served.on("ops", f"cd {ROOT} && {_readmes_tear_down(served.directory / CONFIG_FILE)}", 240.0)
    _wait_until(lambda: not served.left(), 30.0, "something still runs")


def _readmes_tear_down(file: Path) -> str:
    """What deploy/README.md has people type, with these hosts' names."""
    text = (ROOT / "deploy" / "README.md").read_text()
    [typed] = re.findall(r"^Tear down, .*?```bash\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    for theirs, ours in (("deploy/onprem.yaml", str(file)), ("slipstream@", "root@"), ("10.0.0.", "10.77.0.")):
        assert theirs in typed
        typed = typed.replace(theirs, ours)
    return f"export RAY_USAGE_STATS_ENABLED=0\n{typed}"
