"""What a live page draws of the core: the blocks of each pool, and the requests. Plain values, made when asked for."""

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.core import Scheduler
from scheduler.rows import each_of
from scheduler.state import RequestState, WorkerState
from scheduler.stats import worker_snapshot

MAX_CELLS = 1024
MAX_REQUESTS = 200

# From the steadiest to the most passing: a cell of several blocks shows the last of theirs.
BLOCK_KINDS = ("free", "cached", "shared", "confirmed", "lookahead", "placeholder", "garbage")
FREE, CACHED, SHARED, CONFIRMED, LOOKAHEAD, PLACEHOLDER, GARBAGE = range(len(BLOCK_KINDS))


def view_of(scheduler: Scheduler) -> dict[str, Any]:
    """The workers and their requests, now."""
    block_size = scheduler.config.block_size
    return {
        "block_size": block_size,
        "workers": [_worker(worker, block_size) for worker in scheduler.workers.values()],
        "requests": _requests(scheduler),
    }


def block_kinds(worker: WorkerState, block_size: int) -> NDArray[np.int8]:
    """What each block of a pool holds: [num_blocks] indices into BLOCK_KINDS.

    Free: nothing. Cached: nobody's, but a prefix could hit it. Shared: in use, and a prefix could hit it.
    Confirmed: KV of confirmed tokens. Lookahead: taken, reserved by nobody yet. Placeholder: reserved by steps in
    flight for tokens that do not exist yet. Garbage: KV of rejected drafts, until a step overwrites it.
    """
    table, pool = worker.rows, worker.pool
    kinds = np.zeros(pool.num_blocks, np.int8)
    kinds[np.fromiter(pool.cached_blocks, np.intp, pool.num_cached)] = CACHED
    rows = table.order()
    counts = table.num_blocks[rows]
    owners, places = rows.repeat(counts), each_of(np.zeros_like(counts), counts)
    blocks = table.block_table[owners, places]
    start = places * block_size
    end = start + block_size
    confirmed = table.num_tokens[owners]
    reserved = confirmed + table.num_placeholders[owners]
    written, kv_end = table.num_computed[owners] - table.num_in_flight[owners], table.kv_end[owners]
    held = np.full(len(blocks), LOOKAHEAD, np.int8)
    held[start < confirmed] = CONFIRMED
    held[(start < reserved) & (end > confirmed)] = PLACEHOLDER
    held[(start < kv_end) & (end > written) & (written < kv_end)] = GARBAGE
    held[(held == CONFIRMED) & (kinds[blocks] == CACHED)] = SHARED
    kinds[blocks] = held
    return kinds


def _worker(worker: WorkerState, block_size: int) -> dict[str, Any]:
    kinds, rows = block_kinds(worker, block_size), worker.rows
    running = rows.order()
    per_cell = -(-len(kinds) // MAX_CELLS)
    padded = np.zeros(-(-len(kinds) // per_cell) * per_cell, np.int8)
    padded[: len(kinds)] = kinds
    cells = padded.reshape(-1, per_cell).max(axis=1)
    counts = np.bincount(kinds, minlength=len(BLOCK_KINDS)).tolist()
    stats = asdict(worker_snapshot(worker))
    return stats | {
        "session": str(worker.session),
        "block_counts": dict(zip(BLOCK_KINDS, counts, strict=True)),
        "blocks_per_cell": per_cell,
        "block_map": "".join(map(str, cells.tolist())),  # one digit a cell: an index into BLOCK_KINDS
        "num_tokens": int(rows.num_tokens[running].sum()),
        "placeholders": int(rows.num_placeholders[running].sum()),
        "garbage_kv_tokens": rows.num_garbage_tokens(),
    }


def _requests(scheduler: Scheduler) -> list[dict[str, Any]]:
    running = [state for state in scheduler.requests.values() if state.worker is not None]
    waiting = scheduler.waiting[: max(MAX_REQUESTS - len(running), 0)]
    return [_request(state) for state in [*running[:MAX_REQUESTS], *waiting]]


def _request(state: RequestState) -> dict[str, Any]:
    values: dict[str, Any] = {
        "request_id": state.request.request_id,
        "attempt": state.request.attempt,
        "state": "draining" if state.num_deliver_frames else "waiting",
        "worker_id": None,
        "num_prompt_tokens": state.num_prompt,
        "num_output_tokens": state.num_outputs,
        "max_tokens": state.request.max_tokens,
        "num_draft_tokens": state.num_draft_tokens,
        "num_accepted_tokens": state.num_accepted_tokens,
        "num_preemptions": state.num_preemptions,
    }
    if state.worker is None:
        return values
    table, row = state.worker.rows, state.row
    return values | {
        "state": "prefilling" if table.prefilling[row] else "running",
        "worker_id": state.worker.worker_id,
        "num_output_tokens": int(table.num_tokens[row]) - state.num_prompt,
        "num_draft_tokens": state.num_draft_tokens + int(table.num_draft_tokens[row]),
        "num_accepted_tokens": state.num_accepted_tokens + int(table.num_accepted[row]),
        "num_computed": int(table.num_computed[row]),
        "num_placeholders": int(table.num_placeholders[row]),
        "num_in_flight": int(table.num_in_flight[row]),
    }
