"""Admitting waiting requests: who goes first, where, and how much of the prefix is already there.

Order is (priority, start of the tenant's fair share, arrival). A head that must wait closes every worker it could
run on to those behind it, so nobody is starved; a request that no live worker can hold closes nothing. Knows nothing
about results; placement weights are documented at `placement_cost`.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.blocks import extend_digests
from scheduler.events import SchedulerConfig
from scheduler.plan import PlanBuilder, lookahead
from scheduler.state import RequestState, WorkerState
from scheduler.step import Arrival

# One running request more on a worker weighs as much as this many prompt tokens to compute there: about what its
# rows cost the others over a short answer. A shared prefix of a few blocks therefore wins over a small imbalance only.
LOAD_TOKENS_PER_REQUEST = 32
# Numbers that differ from those a stream began with cost it its exactness: never chosen over a full recomputation.
INEXACT_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker for a waiting request, and the blocks of its prefix that are cached there."""

    worker: WorkerState
    hit_blocks: list[int]


def placement_cost(state: RequestState, worker: WorkerState, num_hit_tokens: int) -> int:
    """Tokens to compute, plus the worker's load in tokens. The least is chosen, then the first worker."""
    inexact = state.num_outputs > 0 and state.fingerprint not in (None, worker.fingerprint)
    load = LOAD_TOKENS_PER_REQUEST * worker.rows.num_running
    return state.num_tokens - num_hit_tokens + load + INEXACT_TOKENS * inexact


def hit_blocks_of(state: RequestState, worker: WorkerState, config: SchedulerConfig) -> list[int]:
    """The usable prefix hit of a request on a worker: never the last confirmed token."""
    if not config.enable_prefix_caching:
        return []
    usable = (state.num_tokens - 1) // config.block_size
    extend_digests(state.digests, state.root, state.token_ids, usable, config.block_size)
    hit = worker.pool.match(state.digests[:usable])
    if worker.up.drop_last_hit_block and hit:
        hit.pop()  # the drafter's KV at its end was computed with another next token
    return hit


def could_hold(worker: WorkerState, state: RequestState, config: SchedulerConfig) -> bool:
    """Whether the whole pool of a worker suffices to the request's end."""
    return worker.accepts and worker.pool.num_blocks >= -(-state.end // config.block_size)


def blocks_to_admit(state: RequestState, worker: WorkerState, config: SchedulerConfig) -> int:
    """Blocks for all confirmed tokens plus one frame."""
    upper = min(state.num_tokens + 1 + min(state.max_drafts, worker.up.max_drafts), state.end)
    return -(-upper // config.block_size)


def fits_now(state: RequestState, worker: WorkerState, hit: list[int], config: SchedulerConfig) -> bool:
    """A free row, and free blocks for all confirmed tokens plus one frame; idle hit blocks count as used."""
    missing = blocks_to_admit(state, worker, config) - len(hit)
    return worker.rows.num_free_rows > 0 and missing + worker.pool.num_idle(hit) <= worker.pool.num_free


def fits_without(
    state: RequestState, worker: WorkerState, victims: list[RequestState], config: SchedulerConfig
) -> bool:
    """Whether a request would fit if these left the worker: what they share with others stays in use."""
    table, pool = worker.rows, worker.pool
    tables = (table.block_table[victim.row, : table.num_blocks[victim.row]].tolist() for victim in victims)
    held = Counter(block for blocks in tables for block in blocks)
    freed = {block for block, count in held.items() if count == pool.reference_count(block)}
    hit = hit_blocks_of(state, worker, config)
    idle = pool.num_idle(hit) + len(freed.intersection(hit))
    return blocks_to_admit(state, worker, config) - len(hit) + idle <= pool.num_free + len(freed)


def place(state: RequestState, workers: Iterable[WorkerState], config: SchedulerConfig) -> Placement | None:
    """The cheapest worker that has room for the request now."""
    best: tuple[int, Placement] | None = None
    for worker in workers:
        hit = hit_blocks_of(state, worker, config)
        if not fits_now(state, worker, hit, config):
            continue
        cost = placement_cost(state, worker, len(hit) * config.block_size)
        if best is None or cost < best[0]:
            best = cost, Placement(worker, hit)
    return best[1] if best else None


def seat(
    state: RequestState, hit: list[int], builder: PlanBuilder, *, epoch: int, front_end: int, config: SchedulerConfig
) -> None:
    """Begin an epoch: take the row, the hit and the blocks of the first chunk, and plan it."""
    worker = builder.worker
    num_hit_tokens = len(hit) * config.block_size
    state.row = worker.rows.seat(
        state, epoch=epoch, num_hit_tokens=num_hit_tokens, namespace=worker.pool.namespace, front_end=front_end
    )
    state.worker, state.epoch = worker, epoch
    if state.num_cached_tokens is None:
        state.num_cached_tokens = num_hit_tokens
    worker.pool.acquire(hit)
    worker.rows.num_published[state.row] = len(hit)
    arrival = Arrival(
        row=state.row,
        epoch=epoch,
        request_id=state.request.request_id,
        prompt_token_ids=state.token_ids[: state.num_prompt],
        output_token_ids=state.token_ids[state.num_prompt : state.num_tokens],
        num_computed_tokens=num_hit_tokens,
        end=state.end,
        namespace=worker.pool.namespace,
        sampling=state.request.sampling,
    )
    _plan_first_chunk(state, arrival, builder, hit, config)


def _plan_first_chunk(
    state: RequestState, arrival: Arrival, builder: PlanBuilder, hit: list[int], config: SchedulerConfig
) -> None:
    """The first frame of an epoch: no drafts to verify, K to propose if it reaches the last token.

    The hit comes with the plan's block columns, before the blocks of this step.
    """
    worker, start = builder.worker, arrival.num_computed_tokens
    num_scheduled = min(state.num_tokens - start, builder.budget)
    samples = start + num_scheduled == state.num_tokens
    wanted = min(state.max_drafts, worker.up.max_drafts)
    propose = max(min(wanted, state.end - state.num_tokens - 2), 0) if samples else 0
    slots = min(start + num_scheduled + lookahead(propose), state.end)
    blocks = hit + worker.pool.allocate(-(-slots // config.block_size) - len(hit))
    worker.rows.append_blocks(state.row, blocks)
    builder.admit(arrival, num_scheduled=num_scheduled, samples=samples, num_propose=propose, block_ids=blocks)
