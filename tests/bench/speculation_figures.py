"""What a benchmark of speculation concludes from what it measured: medians, ratios, theory, costs. Pure functions."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from scheduler.step import StepPlan, StepResult

CONFIDENCE = 0.95
NONE, AUTO = "none", "auto"


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to draft."""

    drafter: str
    k: int | None = None  # None: without drafts, or as many as pay

    @property
    def name(self) -> str:
        """As on the command line."""
        return self.drafter if self.k is None else f"{self.drafter}:{self.k}"

    @property
    def is_fixed(self) -> bool:
        """Whether K is the same in every step, 0 included."""
        return self.drafter != AUTO


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked at once."""

    workload: str
    concurrency: int


@dataclass(slots=True, kw_only=True, eq=False)
class Decode:
    """Sums over the steps in which every request of the load decoded: no prompts, nobody gone yet."""

    num_steps: int = 0
    num_frames: int = 0
    num_drafted: int = 0  # frames with drafts
    num_tried: int = 0  # drafts whose predecessors were all accepted
    num_accepted: int = 0
    num_tokens: int = 0
    verify_ns: int = 0
    draft_ns: int = 0

    def add(self, plan: StepPlan, result: StepResult, concurrency: int) -> None:
        """Count a step if it is one of those."""
        if len(plan.rows) != concurrency or not np.array_equal(plan.num_scheduled, plan.reserved) or plan.arrivals:
            return
        if not result.num_tokens.all():
            return  # a row had reached its end
        accepted = result.num_tokens - 1
        self.num_steps += 1
        self.num_frames += concurrency
        self.num_drafted += int(np.count_nonzero(result.num_verified))
        self.num_tried += int(np.minimum(accepted + 1, result.num_verified).sum())
        self.num_accepted += int(accepted.sum())
        self.num_tokens += int(result.num_tokens.sum())
        self.verify_ns += result.verify_ns
        self.draft_ns += result.draft_ns

    def __add__(self, other: "Decode") -> "Decode":
        return Decode(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def step_ns(self) -> float:
        """Of one step."""
        return (self.verify_ns + self.draft_ns) / self.num_steps

    @property
    def tokens_per_ns(self) -> float:
        """While everybody decoded."""
        return self.num_tokens / (self.verify_ns + self.draft_ns)


@dataclass(slots=True, kw_only=True, eq=False)
class Costs:
    """What speculation cost the KV cache in one run: the three costs, in tokens."""

    reserved: int = 0  # by placeholders, ever
    rolled_back: int = 0  # of them
    placeholders: list[int] = field(default_factory=list)  # at each step
    garbage: list[int] = field(default_factory=list)  # KV of rejected drafts resident, at each step
    stale: dict[str, int] = field(default_factory=dict)  # dropped, by reason


@dataclass(slots=True, kw_only=True, eq=False)
class Measured:
    """One run of one setting."""

    streams: list[list[int]]
    num_tokens: int  # until elapsed_s: while as many ran as should
    elapsed_s: float
    acceptance_length: float  # tokens of a verification with drafts
    decode: Decode
    costs: Costs

    @property
    def tokens_per_s(self) -> float:
        """Outputs of the whole run, its prompts' time included."""
        return self.num_tokens / self.elapsed_s


Rounds = Mapping[Setting, Sequence[Measured]]  # of one load: the same number of runs of each setting, in turn


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Order statistics around the median of whatever distribution these came from, at least this confident.

    With too few values for that, their extremes.
    """
    ordered, count, outside = sorted(values), len(values), 0.0
    rank = 0  # how many values may lie beyond each end
    while rank < (count - 1) // 2:
        outside += 2 * math.comb(count, rank) / 2**count
        if 1 - outside - 2 * math.comb(count, rank + 1) / 2**count < confidence:
            break
        rank += 1
    return ordered[rank], ordered[count - 1 - rank]


def ratio(above: Sequence[Measured], below: Sequence[Measured]) -> float:
    """The median over the rounds of one setting's speed over another's in the same round."""
    return statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in zip(above, below, strict=True))


def best_fixed(rounds: Rounds) -> Setting | None:
    """The fixed setting with the highest median, none included."""
    fixed = [setting for setting in rounds if setting.is_fixed]
    return max(fixed, key=lambda setting: _median(rounds[setting]), default=None)


def _median(runs: Sequence[Measured]) -> float:
    return statistics.median(run.tokens_per_s for run in runs)


def theoretical_speedup(
    acceptance: float, k: int, *, draft_cost: float, verify_cost: float = 1.0, drafted: float = 1.0
) -> float:
    """(1 - a^(K+1)) / ((1 - a) (v + K c)): Leviathan et al. 2023, with the measured cost of verifying for the 1.

    Costs are in steps without drafts. drafted: share of the steps for which there were drafts at all.
    """
    tokens = k + 1.0 if acceptance >= 1.0 else (1.0 - acceptance ** (k + 1)) / (1.0 - acceptance)
    return (1.0 + drafted * (tokens - 1.0)) / (verify_cost + k * draft_cost)


def theory(setting: Setting, decode: Decode, plain: Decode) -> dict[str, float] | None:
    """Measured and theoretical speed-up while everybody decodes, and what the theory was told. None: too little."""
    if setting.k is None or not plain.num_steps or not decode.num_tried:
        return None
    told = {
        "acceptance": decode.num_accepted / decode.num_tried,
        "drafted": decode.num_drafted / decode.num_frames,
        "verify_cost": decode.verify_ns / decode.num_steps / plain.step_ns,
        "draft_cost": decode.draft_ns / decode.num_steps / plain.step_ns / setting.k,
    }
    return {
        "speedup": decode.tokens_per_ns / plain.tokens_per_ns,
        "theoretical": theoretical_speedup(k=setting.k, **told),
        **told,
    }


def row(load: Load, setting: Setting, rounds: Rounds) -> dict[str, object]:
    """One line of the result."""
    runs = rounds[setting]
    low, high = interval([run.tokens_per_s for run in runs])
    decode = sum((run.decode for run in runs), Decode())
    plain = sum((run.decode for run in rounds.get(Setting(NONE), ())), Decode())
    told = theory(setting, decode, plain)
    reference = rounds.get(Setting(NONE))
    return {
        "workload": load.workload,
        "concurrency": load.concurrency,
        "setting": setting.name,
        "tokens_per_s": round(_median(runs), 1),
        "low": round(low, 1),
        "high": round(high, 1),
        "vs_none": None if reference is None else round(ratio(runs, reference), 3),
        "acceptance_length": round(statistics.mean(run.acceptance_length for run in runs), 2),
        "theory": None if told is None else {name: round(value, 3) for name, value in told.items()},
        "costs": costs([run.costs for run in runs]),
    }


def costs(runs: Sequence[Costs]) -> dict[str, object]:
    """The three costs: sums over all runs, and what was there at a step, on average and at most."""
    placeholders = [count for run in runs for count in run.placeholders] or [0]
    garbage = [count for run in runs for count in run.garbage] or [0]
    stale: dict[str, int] = {}
    for run in runs:
        for reason, count in run.stale.items():
            stale[reason] = stale.get(reason, 0) + count
    return {
        "reserved": sum(run.reserved for run in runs),
        "rolled_back": sum(run.rolled_back for run in runs),
        "placeholders_mean": round(statistics.mean(placeholders), 1),
        "placeholders_peak": max(placeholders),
        "garbage_mean": round(statistics.mean(garbage), 1),
        "garbage_peak": max(garbage),
        "stale": stale,
    }


def summary(measured: Mapping[Load, Rounds]) -> dict[str, object]:
    """Every row, auto beside none and beside the best fixed setting at each load, and the worst of each."""
    loads = [_verdict(load, rounds) for load, rounds in measured.items()]
    return {
        "rows": [row(load, setting, rounds) for load, rounds in measured.items() for setting in rounds],
        "loads": loads,
        "auto_vs_none_min": _least(loads, "auto_vs_none"),
        "auto_vs_best_min": _least(loads, "auto_vs_best"),
    }


def _verdict(load: Load, rounds: Rounds) -> dict[str, object]:
    verdict: dict[str, object] = {"workload": load.workload, "concurrency": load.concurrency}
    auto, none, best = rounds.get(Setting(AUTO)), rounds.get(Setting(NONE)), best_fixed(rounds)
    if auto is not None and none is not None:
        verdict["auto_vs_none"] = round(ratio(auto, none), 3)
    if auto is not None and best is not None:
        verdict |= {"best": best.name, "auto_vs_best": round(ratio(auto, rounds[best]), 3)}
    return verdict


def _least(verdicts: Sequence[Mapping[str, object]], name: str) -> float | None:
    return min((value for verdict in verdicts if isinstance(value := verdict.get(name), float)), default=None)
