"""A Ray cluster that somebody else started, joined by this process: it is left running when we leave.

This process must be on one of its nodes. Nodes that may run workers say so with a resource, one unit for
each worker: `ray start --resources='{"slipstream": 1}'`.
"""

import logging
import secrets
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.config import ServeConfig
from cluster.errors import BringUpError
from cluster.ray_environment import state_directory
from cluster.ray_watch import STORE_LOST_AFTER_S, RayPart, parts_of_ray
from cluster.stop_signals import SIGNALS

RESOURCE = "slipstream"
WORKERS_TIMEOUT_S = 300.0  # machines of a cloud take minutes to come
POLL_S = 1.0


class JoinedRay:
    """The connection to it. In place of a cluster.local_ray.LocalRay."""

    def __init__(self, address: str) -> None:
        """`auto`, or the HOST:PORT of its head. Raises BringUpError when there is none, or the token is wrong."""
        import ray

        # Of its own, so that several deployments on one cluster do not meet.
        name = f"slipstream-{secrets.token_hex(4)}"
        self._directory = state_directory() / name
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ray's own, about its own files
                ray.init(address=address, namespace=name, log_to_driver=False, logging_level=logging.ERROR)
        except SystemExit as error:
            raise KeyboardInterrupt from error  # Ray's own way to take SIGTERM
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise BringUpError(f"--address {address}: no Ray cluster could be joined: {reason}") from error
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray takes SIGTERM for itself

    @property
    def directory(self) -> Path:
        """Nothing of it lies on this machine: a path that does not exist."""
        return self._directory

    def processes(self) -> list[tuple[int, int]]:
        """None of its processes are ours: what we start in it ends with this one."""
        return []

    def node_id(self) -> str:
        """Of the node this process is on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def fitted(self, config: ServeConfig) -> ServeConfig:
        """With the device and the threads of the nodes that may run workers, waiting for enough of them.

        Raises BringUpError when they do not come.
        """
        resources = self._offers(config.data_parallel_size)
        device = config.device
        if device == "auto":
            device = "cuda" if all(offer.get("GPU", 0) >= 1 for offer in resources) else "cpu"
        workers_per_node = -(-config.data_parallel_size // len(resources))
        cores = int(min(offer.get("CPU", 0) for offer in resources))
        return replace(config, device=device, threads=config.threads or max(1, cores // workers_per_node))

    def parts(self) -> tuple[RayPart, ...]:
        """What is to be watched of it."""
        return parts_of_ray(store_lost_after_s=STORE_LOST_AFTER_S)

    def stop(self, *, is_whole: bool = True) -> None:
        """Leave. The actors and the placement group of this process go with it; if not `is_whole`, once Ray notices."""
        import ray

        ray.shutdown()

    def _offers(self, num_workers: int) -> list[dict[str, Any]]:
        """The resources of each node that may run workers."""
        import ray

        deadline = time.monotonic() + WORKERS_TIMEOUT_S
        while True:
            offers = [node["Resources"] for node in ray.nodes() if node["Alive"] and RESOURCE in node["Resources"]]
            num_offered = int(sum(offer[RESOURCE] for offer in offers))
            if num_offered >= num_workers:
                return offers
            if time.monotonic() > deadline:
                raise BringUpError(
                    f"--data-parallel-size {num_workers}: the cluster's nodes offer {num_offered} of the resource "
                    f"`{RESOURCE}`, one for each worker they may run (ray start --resources='{{\"{RESOURCE}\": 1}}')"
                )
            time.sleep(POLL_S)
