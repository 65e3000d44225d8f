"""A Ray cluster of this machine alone: on loopback, private, with a token, and gone without a trace."""

import logging
import os
import shutil
import signal
import tempfile
import warnings
from pathlib import Path

from cluster.errors import BringUpError
from cluster.processes import command_line, descendants, end, identify
from cluster.ray_environment import prepare
from cluster.ray_watch import LOST_AFTER_S, RayPart, parts_of_ray
from cluster.stop_signals import SIGNALS

NAMESPACE = "slipstream"
LOOPBACK = "127.0.0.2"  # Ray rewrites 127.0.0.1 to the network card's address
OBJECT_STORE_BYTES = 80 << 20
GRACE_S = 10.0
START_ATTEMPTS = 3


class LocalRay:
    """A running local cluster. One at a time in a process, as Ray has it."""

    def __init__(self, *, num_cpus: int, num_gpus: int = 0) -> None:
        """Starts it and connects this process to it. Takes two to four seconds. Raises BringUpError."""
        prepare()
        for attempt in range(1, START_ATTEMPTS + 1):
            self._directory = Path(tempfile.mkdtemp(prefix="slipstream-", dir="/tmp"))  # short: it holds socket paths
            try:
                self._start(num_cpus, num_gpus)
                return
            except SystemExit as error:
                self.stop()
                raise KeyboardInterrupt from error  # Ray's own way to take SIGTERM
            except BaseException as error:
                self.stop()
                if not isinstance(error, Exception):
                    raise
                # Ray gives its own processes a fixed time to come up, which a busy machine may exceed.
                if attempt == START_ATTEMPTS:
                    raise BringUpError(f"Ray did not start: {str(error).strip().partition(chr(10))[0]}") from error

    def _start(self, num_cpus: int, num_gpus: int) -> None:
        import ray

        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own, about its own files
            ray.init(
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(self._directory),
            )
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray takes SIGTERM for itself

    @property
    def directory(self) -> Path:
        """Ray's session files and logs."""
        return self._directory

    def processes(self) -> list[tuple[int, int]]:
        """(pid, started_at) of every process of this cluster, those included whose raylet was killed."""
        roots = [pid for pid in descendants(os.getpid()) if self._owns(command_line(pid))]
        pids = dict.fromkeys(pid for root in roots for pid in (root, *descendants(root)))
        return identify(pids)

    def parts(self) -> tuple[RayPart, ...]:
        """What is to be watched of it."""
        return parts_of_ray(store_lost_after_s=LOST_AFTER_S)

    def stop(self, *, is_whole: bool = True) -> None:
        """End every process of it and remove its files. Again: nothing.

        Not `is_whole`: Ray's own processes are gone, and the others wait for them in vain.
        """
        import ray

        processes = self.processes()
        if not is_whole:
            end(processes, 0.0)
        ray.shutdown()
        end(processes, GRACE_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _owns(self, command: str) -> bool:
        return str(self._directory) in command or command.startswith("ray::")  # one cluster at a time in a process
