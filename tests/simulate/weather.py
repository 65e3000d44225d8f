"""What a seed's world is like: its sizes, its requests and how often what goes wrong."""

import random
from dataclasses import dataclass

from scheduler.events import SchedulerConfig
from tests.simulate.worker import Faults

MS = 1_000_000  # nanoseconds

# Everything that an operator, a client or fate may do to a running world, with its usual weight.
ACTIONS = {
    "burst": 30,
    "cancel": 14,
    "reset": 3,
    "reset_running": 5,
    "preempt": 7,
    "swap": 3,
    "drain": 3,
    "crash": 4,
    "partition": 3,
    "slow": 2,
    "reconnect": 1,
    "resubmit": 4,
    "restart_scheduler": 2,
    "lose_front_end": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How one direction between two parties behaves."""

    mean_ns: int = 1 * MS
    lost: float = 0.0
    repeated: float = 0.0
    straggles: float = 0.0  # delivered very late
    ordered: bool = True


RELIABLE = Link()


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Drawn once per seed."""

    config: SchedulerConfig
    pools: tuple[int, ...]  # blocks of each worker
    max_num_seqs: int
    worker_drafts: tuple[int, ...]
    drop_last_hit_block: tuple[bool, ...]
    fingerprints: tuple[str, ...]
    num_front_ends: int
    faults: Faults
    worker_link: Link
    front_link: Link
    step_ns: int
    tick_ns: int
    action_ns: int  # mean time between actions
    actions: dict[str, int]  # name -> weight
    replays: float  # per plan: a result of an older session with the same step_seq comes after it
    max_open: int  # requests open at once
    max_burst: int  # submissions at once
    prompt_tokens: int  # at most
    output_tokens: int  # at most
    shared_prefixes: int
    multi_turn: float
    repeated: float  # share of requests that ask the same as an earlier one
    urgent: float  # share of requests with a deadline
    poisonous: float
    num_drafts_mode: str  # "policy", "row", "step": who chooses K
    horizon: int  # events before the weather clears


def draw_weather(rng: random.Random, *, num_workers: int | None = None, horizon: int = 300) -> Weather:
    """One seed's weather."""
    workers = num_workers or rng.choice((1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 8))
    block_size = rng.choice((1, 2, 4, 4, 8))
    prompt_tokens = rng.choice((6, 16, 30, 40))
    output_tokens = rng.choice((4, 10, 16, 24))
    max_model_len = rng.choice((prompt_tokens + output_tokens, 96))
    longest = -(-min(max_model_len, prompt_tokens + output_tokens) // block_size)
    roominess = rng.choice((1.0, 1.2, 1.6, 2.0, 3.0, 6.0))
    pools = [max(1, round(longest * roominess * rng.choice((1.0, 1.0, 0.6, 1.5)))) for _ in range(workers)]
    pools[0] = max(pools[0], longest)
    config = SchedulerConfig(
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=rng.choice((8, 12, 20, 32, 64)),
        max_steps_in_flight=rng.choice((1, 2, 2, 2, 3, 4)),
        max_drafts=rng.choice((0, 1, 2, 3, 4, 4, 5, 5)),
        enable_prefix_caching=rng.random() < 0.9,
        scheduling_policy=rng.choice(("fcfs", "fcfs", "priority")),
        max_waiting=rng.choice((3, 64, 64, 64)),
        largest_pool_blocks=max(pools),
        max_attempts=rng.choice((2, 3, 3, 50)),
        resend_after_ns=30 * MS,
        trace=False,
        tenant_weights=(("t1", 3),) if sum(pools) % 4 == 1 else (),  # drawn with the pools: more draws change all seeds
    )
    two_kinds = rng.random() < 0.15
    lossy_front = rng.random() < 0.4
    faults = Faults(
        row_fails=rng.choice((0.0, 0.003, 0.01, 0.03)),
        step_fails=rng.choice((0.0, 0.0, 0.004, 0.01)),
        drafts_spoiled=rng.choice((0.05, 0.3, 0.3, 0.6)),
        drafter_fails=rng.choice((0.0, 0.1, 0.3)),
    )
    return Weather(
        config=config,
        pools=tuple(pools),
        max_num_seqs=rng.choice((1, 2, 3, 4, 6, 8)),
        worker_drafts=tuple(rng.choice((config.max_drafts, config.max_drafts, 5, 5, 2, 0)) for _ in range(workers)),
        drop_last_hit_block=tuple(rng.random() < 0.25 for _ in range(workers)),
        fingerprints=tuple("b" if two_kinds and rng.random() < 0.5 else "a" for _ in range(workers)),
        num_front_ends=rng.choice((1, 1, 2, 3)),
        faults=faults,
        worker_link=_draw_worker_link(rng),
        front_link=Link(lost=0.04, repeated=0.06, straggles=0.06, ordered=False) if lossy_front else RELIABLE,
        step_ns=rng.choice((3, 6, 10)) * MS,
        tick_ns=rng.choice((11, 19, 29)) * MS,
        action_ns=rng.choice((8, 14, 25)) * MS // max(1, workers // 8),
        actions=_draw_actions(rng),
        replays=rng.choice((0.0, 0.3, 0.8)),
        max_open=rng.choice((4, 8, 12, 16)) * max(1, workers // 8),
        max_burst=8 * max(1, workers // 8),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        shared_prefixes=rng.choice((0, 1, 2, 4)),
        multi_turn=rng.choice((0.0, 0.3, 0.6)),
        repeated=rng.choice((0.0, 0.2)),
        urgent=rng.choice((0.0, 0.1, 0.3)),
        poisonous=rng.choice((0.0, 0.0, 0.0, 0.05)),
        num_drafts_mode=rng.choice(("policy", "row", "row", "step")),
        horizon=horizon,
    )


def _draw_worker_link(rng: random.Random) -> Link:
    kind = rng.choice(("reliable", "unordered", "lossy", "lossy"))
    if kind == "reliable":
        return RELIABLE
    if kind == "unordered":
        return Link(mean_ns=rng.choice((1, 4)) * MS, repeated=0.1, straggles=0.05, ordered=False)
    return Link(mean_ns=2 * MS, lost=0.05, repeated=0.1, straggles=0.05, ordered=False)


def _draw_actions(rng: random.Random) -> dict[str, int]:
    """Most actions at their usual weight; some seeds do without, some overdo one."""
    actions = {name: weight for name, weight in ACTIONS.items() if name == "burst" or rng.random() < 0.75}
    favourite = rng.choice(sorted(actions))
    actions[favourite] *= 4
    return actions
