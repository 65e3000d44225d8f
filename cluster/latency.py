"""What clients of one front end experience: how long until tokens come, and how requests end.

Times are seconds on the event loop's clock. Knows nothing about how they are shown.
"""

from collections import Counter

from cluster.call import Call
from cluster.choice import Choice
from scheduler.request import FinishReason
from scheduler.stats import DurationCounter

SUCCESSES = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
ABANDONED = FinishReason.ABORT.value  # the client left


class Latency:
    """Counts by the run of tokens, never token by token."""

    def __init__(self) -> None:
        self.first_token = DurationCounter()  # from the request's arrival
        self.inter_token = DurationCounter()  # a run of n tokens after a gap counts n times gap / n
        self.whole = DurationCounter()  # from the request's arrival to its end, of those that were not refused
        self.num_finished: Counter[str] = Counter({reason.value: 0 for reason in SUCCESSES})  # choices by reason
        self.num_failed: Counter[str] = Counter()  # requests by gRPC status name

    def took(self, call: Call, choice: Choice, num_tokens: int, now_s: float) -> None:
        """New tokens of a choice arrived."""
        if choice.last_token_s is None:
            choice.first_token_s = now_s
            self.first_token.add(now_s - call.opened_s)
        else:
            self.inter_token.add((now_s - choice.last_token_s) / num_tokens, num_tokens)
        choice.last_token_s = now_s

    def closed(self, call: Call, now_s: float) -> None:
        """A request is over, for its reader too."""
        if call.error is not None:
            self.num_failed[call.error.code] += 1
            return
        self.whole.add(now_s - call.opened_s)
        for choice in call.choices:
            self.num_finished[choice.finish.reason.value if choice.finish else ABANDONED] += 1
