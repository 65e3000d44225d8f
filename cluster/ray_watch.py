"""Whether Ray's own processes are there without which nothing lasts: its control store, and the raylet of this node.

Ray itself gives up a lost control store after a minute, by ending every process without a word, and a lost raylet
later than that. Here both are asked for directly, so that clients and operators are told before.
"""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.loopback import host_port

PROBE_TIMEOUT_S = 1.0
PROBE_EVERY_S = 1.0
LOST_AFTER_S = 5.0  # what does not come back by itself
# One of a joined cluster may come back, where it is fault tolerant; Ray ends our processes after 60 s without it.
STORE_LOST_AFTER_S = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPart:
    """One process of Ray and how long it may be out of reach."""

    name: str
    host: str
    port: int
    lost_after_s: float

    def answers(self) -> bool:
        """Whether it can be connected to; takes PROBE_TIMEOUT_S at most."""
        try:
            socket.create_connection((self.host, self.port), PROBE_TIMEOUT_S).close()
        except OSError:
            return False
        return True


def parts_of_ray(*, store_lost_after_s: float) -> tuple[RayPart, ...]:
    """Of the cluster that this process is connected to."""
    import ray

    context = ray.get_runtime_context()
    host, _, port = context.gcs_address.rpartition(":")
    [node] = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
    return (
        RayPart(name="control store (GCS)", host=host.strip("[]"), port=int(port), lost_after_s=store_lost_after_s),
        RayPart(
            name="raylet", host=node["NodeManagerAddress"], port=node["NodeManagerPort"], lost_after_s=LOST_AFTER_S
        ),
    )


class RayWatch:
    """Ask it every now and then."""

    def __init__(self, parts: Sequence[RayPart]) -> None:
        self._last_heard_s = {part: time.monotonic() for part in parts}

    def lost(self) -> str | None:
        """Which part has been out of reach for too long, in one line. Blocks for PROBE_TIMEOUT_S a part at most."""
        for part, last_heard_s in self._last_heard_s.items():
            if part.answers():
                self._last_heard_s[part] = time.monotonic()
            elif time.monotonic() - last_heard_s > part.lost_after_s:
                where = host_port(part.host, part.port)
                return f"the Ray cluster is lost: its {part.name} at {where} has been gone for {part.lost_after_s:g} s"
        return None

    def is_whole(self) -> bool:
        """Whether every part answers now. Blocks likewise."""
        return all(part.answers() for part in self._last_heard_s)
