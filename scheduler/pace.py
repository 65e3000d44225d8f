"""How quickly requests were served lately, and when another one would end: what cannot end in time is better refused.

Two measures, both per token that was asked for (prompt and most outputs), so that answers that end early count as
what they are on average: how fast the queue moves while there is one, and how long a request runs. Told the time.
"""

HALF_LIFE_S = 5.0  # of what the queue's movement is remembered
KEPT_PER_REQUEST = 0.98  # of what running times are remembered


class Pace:
    """Tell it of every plan and every end."""

    def __init__(self) -> None:
        self._queued_since_ns: int | None = None  # the queue has not been empty since the last plan
        self._moving_s = 0.0
        self._moved_tokens = 0.0
        self._running_s = 0.0
        self._run_tokens = 0.0

    def planned(self, num_tokens: int, now_ns: int, *, is_queue_left: bool) -> None:
        """Requests of so many tokens left the queue for a worker, others perhaps did not."""
        if self._queued_since_ns is not None:
            elapsed_s = (now_ns - self._queued_since_ns) / 1e9
            kept = 0.5 ** (elapsed_s / HALF_LIFE_S)
            self._moving_s = kept * self._moving_s + elapsed_s
            self._moved_tokens = kept * self._moved_tokens + num_tokens
        self._queued_since_ns = now_ns if is_queue_left else None

    def ended(self, num_tokens: int, ran_s: float) -> None:
        """A request of so many tokens ran so long."""
        self._running_s = KEPT_PER_REQUEST * self._running_s + ran_s
        self._run_tokens = KEPT_PER_REQUEST * self._run_tokens + num_tokens

    def expected_s(self, num_tokens_ahead: int, num_tokens: int) -> float | None:
        """From now to the end of a request of `num_tokens` behind so many others; None: not enough is known."""
        if not self._moved_tokens or not self._run_tokens:
            return None
        waits_s = num_tokens_ahead * self._moving_s / self._moved_tokens
        return waits_s + num_tokens * self._running_s / self._run_tokens
