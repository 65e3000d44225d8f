"""Sharing between tenants: whose request is next, where several wait.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996, section 2): a request starts, on a clock of tokens over
weight, where its tenant's last one ended, but not before what is being served now. So tenants that always have
requests waiting are served tokens in proportion to their weights, an idle one saves up nothing, and the requests of
one tenant keep their order. A request's tokens are its prompt's and the outputs it asks for.
"""

from collections.abc import Mapping

TICKS_PER_TOKEN = 1 << 20  # of a tenant of weight 1
MAX_TENANTS = 4096  # remembered beyond what is being served now


class FairShare:
    """The clock, and where every tenant's last request ends on it."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        """weights: of tenants; 1 for the others."""
        self._weights = dict(weights)
        self._now = 0
        self._ends: dict[str, int] = {}

    def start(self, tenant: str, num_tokens: int) -> int:
        """Where a request that is queued now starts."""
        start = self.next_start(tenant)
        self._ends[tenant] = start + num_tokens * TICKS_PER_TOKEN // self._weights.get(tenant, 1)
        if len(self._ends) > MAX_TENANTS:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
        return start

    def next_start(self, tenant: str) -> int:
        """Where a request would start that was queued now."""
        return max(self._now, self._ends.get(tenant, 0))

    def serve(self, start: int) -> None:
        """A request that starts there is served."""
        self._now = max(self._now, start)
