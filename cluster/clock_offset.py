"""How far another process's clock is from ours, from calls that were timed on both sides."""

from dataclasses import dataclass

MAX_AGE_NS = 60_000_000_000  # clocks drift: an older answer, however quick, tells less


@dataclass(slots=True)
class ClockOffset:
    """What must be added to our time to get theirs, as the quickest answer of the last minute had it."""

    life: str = ""  # of theirs: another one may be on another machine
    offset_ns: int = 0
    error_ns: int = 0  # at most so far from the truth
    measured_ns: int = 0

    def heard(self, life: str, asked_ns: int, theirs_ns: int, answered_ns: int) -> None:
        """They answered with their time between these two of ours."""
        error_ns = (answered_ns - asked_ns) // 2
        old = life != self.life or answered_ns - self.measured_ns > MAX_AGE_NS
        if old or error_ns <= self.error_ns:
            self.life, self.measured_ns = life, answered_ns
            self.offset_ns, self.error_ns = theirs_ns - (asked_ns + answered_ns) // 2, error_ns
