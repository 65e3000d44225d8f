"""`slipstream up FILE` and `down FILE`: a `ray up` file to a served model and back, one step after the other.

Everything is done by `ray up`, `ray exec` and ssh, as deploy/README.md has it by hand.
"""

import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from cluster.errors import BringUpError, ConfigError
from cluster.processes import executable

BIN = "~/slipstream-venv/bin"  # where the files of deploy/ install us
UP_TIMEOUT_S = 1800.0  # images, drivers and packages are fetched
WORKERS_TIMEOUT_S = 1800.0
READY_TIMEOUT_S = 1800.0  # weights are fetched
EXEC_TIMEOUT_S = 120.0
POLL_S = 3.0
WORKERS = re.compile(r"[\d.]+/([\d.]+) slipstream\b")
SAID = re.compile(r"^(ready|error:) (.+?)\s*$", re.MULTILINE)

Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class RayUp:
    """One `ray up` file that Ray's own schema accepts."""

    file: Path
    config: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path) -> "RayUp":
        """ConfigError says what is wrong with it. Needs no network."""
        from jsonschema import ValidationError  # type: ignore[import-untyped]
        from ray.autoscaler._private.util import prepare_config, validate_config

        try:
            config = yaml.safe_load(file.read_text())
            if not isinstance(config, dict):
                raise ConfigError(f"{file} is no `ray up` file")
            validate_config(prepare_config(dict(config)))
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
        except ValidationError as error:
            place = ".".join(map(str, error.absolute_path)) or "the file"
            raise ConfigError(f"{file}: {place}: {error.message}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file}: Ray cannot prepare it: {type(error).__name__}: {error}") from error
        return cls(file, config)

    @property
    def num_workers(self) -> int:
        """That Ray is to keep up."""
        types = self.config.get("available_node_types")
        if types is None:
            return int(self.config.get("min_workers", 0))
        head = self.config.get("head_node_type")
        return sum(int(kind.get("min_workers", 0)) for name, kind in types.items() if name != head)

    def up(self, flags: Sequence[str], phase: Phase) -> str:
        """The endpoint HOST:PORT, as the head sees it, once a model is served. Raises BringUpError."""
        if self.num_workers < 1:
            raise ConfigError(f"{self.file}: min_workers is 0, and nothing would serve")
        with phase("Bringing up the head"):
            self._ray("up", "--yes", "--no-config-cache", str(self.file), timeout_s=UP_TIMEOUT_S)
        with phase(f"Waiting for {self.num_workers} worker{'s' * (self.num_workers > 1)}"):
            self._wait(lambda: self._has_joined() or None, WORKERS_TIMEOUT_S, "the workers do not join")
        with phase("Starting the server"):
            self._exec(_serve_command(self.num_workers, flags))
            answer: tuple[str, str] = self._wait(self._serve_said, READY_TIMEOUT_S, "`serve` does not become ready")
        said, rest = answer
        if said != "ready":
            raise BringUpError(f"`slipstream serve` on the head: {rest}")
        return rest

    def down(self, phase: Phase) -> None:
        """Ends the server, the head and, where nobody else does, the workers. Raises BringUpError."""
        with phase("Stopping the server"):
            self._exec(f"{BIN}/slipstream down || true", check=False)
        with phase("Taking down the cluster"):
            if self._is_local():  # `ray down` does not wait for it, and may not find `ray` there
                self._exec(f"{BIN}/ray stop", check=False)
            self._ray("down", "--yes", str(self.file), timeout_s=UP_TIMEOUT_S)
        if self.config["provider"]["type"] != "local":
            return
        failures: list[BringUpError] = []
        for address in self.config["provider"].get("worker_ips", ()):
            with phase(f"Stopping {address}"):
                try:
                    self._stop_worker(address)
                except BringUpError as error:  # a machine that is gone must not keep the others up
                    failures.append(error)
        if failures:
            raise failures[0]

    def tunnel(self, endpoint: str) -> str | None:
        """The command by which an endpoint on the head's loopback is reached from here; None where Ray knows how."""
        head = self.config["provider"].get("head_ip")
        port = endpoint.rpartition(":")[2]
        if not endpoint.startswith("127."):
            return None
        if head is None:
            return f"ray attach --port-forward {port} {self.file}"
        return f"ssh -f -N -L {port}:{endpoint} {self.config['auth']['ssh_user']}@{head}"

    def _has_joined(self) -> bool:
        found = WORKERS.search(self._exec(f"RAY_AUTH_MODE=token {BIN}/ray status", check=False))
        return found is not None and float(found[1]) >= self.num_workers

    def _serve_said(self) -> tuple[str, str] | None:
        said = SAID.search(self._exec("cat ~/serve.log", check=False))
        return None if said is None else (said[1], said[2])

    def _wait(self, ask: Callable[[], Any], timeout_s: float, what: str) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while (answer := ask()) is None:
            if time.monotonic() > deadline_s:
                raise BringUpError(f"{what} within {timeout_s:g} s")
            time.sleep(POLL_S)
        return answer

    def _exec(self, command: str, *, check: bool = True) -> str:
        return self._ray("exec", "--no-config-cache", str(self.file), command, timeout_s=EXEC_TIMEOUT_S, check=check)

    def _ray(self, *arguments: str, timeout_s: float, check: bool = True) -> str:
        return _run([_ray_executable(), *arguments], timeout_s, check=check, local=self._is_local())

    def _is_local(self) -> bool:
        return bool(self.config["provider"]["type"] == "local")

    def _stop_worker(self, address: str) -> None:
        """From here, where the machine may never have been seen; a key that has changed is refused."""
        key = self.config["auth"].get("ssh_private_key")
        identity = [] if key is None else ["-i", str(Path(key).expanduser())]
        options = ("BatchMode=yes", "ConnectTimeout=10", "StrictHostKeyChecking=accept-new")
        ssh = ["ssh", *(part for option in options for part in ("-o", option)), *identity]
        _run([*ssh, f"{self.config['auth']['ssh_user']}@{address}", f"{BIN}/ray stop"], EXEC_TIMEOUT_S)


def _serve_command(num_workers: int, flags: Sequence[str]) -> str:
    """Started unless it runs; the log begins anew, so that an old `ready` is not taken for a new one."""
    own = [] if "--data-parallel-size" in flags else ["--data-parallel-size", str(num_workers)]
    serve = f"{BIN}/slipstream serve --address auto {shlex.join([*own, *flags])}"
    return f"{BIN}/slipstream status > /dev/null 2>&1 || nohup {serve} > ~/serve.log 2>&1 < /dev/null &"


def _run(command: Sequence[str], timeout_s: float, *, check: bool = True, local: bool = False) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    if local:  # the new one leaves workers behind on own machines
        environment["RAY_UP_enable_autoscaler_v2"] = "0"
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BringUpError(f"`{_short(command)}` did not end within {timeout_s:g} s") from error
    if check and done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        raise BringUpError(f"`{_short(command)}` ended with {done.returncode}: {lines[-1] if lines else 'no output'}")
    return done.stdout


def _short(command: Sequence[str]) -> str:
    return shlex.join([Path(command[0]).name, *command[1:]])[:120]


def _ray_executable() -> str:
    found = executable("ray")
    if found is None:
        raise ConfigError("there is no `ray` command beside this Python")
    return found
