"""Core time per request and step: `python -m tests.bench.scheduler [--json]`.

Times `Scheduler.handle` alone (plan + commit, commands made) with two steps in flight, prefix cache on.
At K = 4 rows accept unevenly: 1, 3, 5, 2, 4 tokens per step in turn. The answers of the workers are made
outside the timed part. Time is this thread's CPU time, the median over the steps; and since a machine with neighbours
is slower at times (caches, clock), the steps are timed in some repetitions, of which the best is told.
"""

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scheduler.core import Scheduler
from scheduler.events import Command, FinishRequest, SchedulerConfig, StartStep, StepFinished, Submitted, WorkerUp
from scheduler.request import Request
from scheduler.step import StepPlan, StepResult

TOKENS_PER_STEP = np.array([1, 3, 5, 2, 4], np.int32)
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
VOCAB = 49152
REPETITIONS = 5


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    workers: int
    running: int  # over all workers
    num_drafts: int
    churn: bool = False


CASES = [Case(1, running, k) for k in (0, 4) for running in (64, 256, 1024, 4096)]
CASES += [Case(16, 16 * 256, k) for k in (0, 4)]


def answer(worker_id: str, plan: StepPlan, rng: np.random.Generator) -> StepResult:
    """What a worker would return, drafts accepted unevenly."""
    turn = TOKENS_PER_STEP[(plan.rows + plan.step_seq) % len(TOKENS_PER_STEP)]
    num_tokens = np.minimum(turn, plan.reserved).astype(np.int32)
    return StepResult(
        worker_id=worker_id,
        session=plan.session,
        step_seq=plan.step_seq,
        rows=plan.rows,
        epochs=plan.epochs,
        num_tokens=num_tokens,
        num_verified=plan.num_drafts,
        token_ids=rng.integers(3, VOCAB, int(num_tokens.sum()), dtype=np.int32),
    )


class Load:
    """A scheduler, its workers' unanswered plans, and a supply of requests."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = np.random.default_rng(0)
        per_worker = case.running // case.workers
        self.core = Scheduler(
            SchedulerConfig(
                block_size=BLOCK_SIZE,
                max_model_len=MAX_MODEL_LEN,
                max_num_batched_tokens=max(8192, 8 * per_worker),
                max_drafts=case.num_drafts,
                max_waiting=1 << 30,
            )
        )
        self.unanswered: deque[tuple[str, StepPlan]] = deque()
        self.num_submitted = 0
        for index in range(case.workers):
            self.take(
                self.core.handle(
                    WorkerUp(
                        worker_id=f"w{index}",
                        session=index + 1,
                        num_blocks=per_worker * MAX_MODEL_LEN // BLOCK_SIZE // (8 if case.churn else 1),
                        max_num_seqs=per_worker,
                        max_drafts=case.num_drafts,
                    )
                )
            )

    def take(self, commands: list[Command]) -> int:
        """Queue the plans; count the finished."""
        self.unanswered.extend((c.worker_id, c.plan) for c in commands if isinstance(c, StartStep))
        return sum(isinstance(c, FinishRequest) for c in commands)

    def submitted(self) -> Submitted:
        """One more request: 200 prompt tokens; 128 outputs under churn, else without end."""
        self.num_submitted += 1
        name = f"r{self.num_submitted}"
        prompt = self.rng.integers(3, VOCAB, 200, dtype=np.int32)
        max_tokens = 128 if self.case.churn else MAX_MODEL_LEN - 200
        return Submitted(
            request=Request(
                request_id=name,
                front_end="fe",
                stream=self.num_submitted,
                prompt_token_ids=prompt,
                max_tokens=max_tokens,
            )
        )

    def steps(self) -> Iterator[tuple[int, int]]:
        """Answer the oldest plan, for ever: (core ns, rows of that step)."""
        num_finished = 0
        while True:
            worker_id, plan = self.unanswered.popleft()
            events = [StepFinished(result=answer(worker_id, plan, self.rng))]
            events += [self.submitted() for _ in range(num_finished)]  # type: ignore[misc]
            start = time.thread_time_ns()
            made = [self.core.handle(event) for event in events]
            spent = time.thread_time_ns() - start
            num_finished = sum(self.take(commands) for commands in made)
            yield spent, len(plan.rows)


def measure(case: Case, num_steps: int) -> dict[str, float | int | bool]:
    """Microseconds per request and step over `num_steps` full steps per worker."""
    load = Load(case)
    for _ in range(case.running):
        load.take(load.core.handle(load.submitted()))
    steps = load.steps()
    while sum(worker.rows.num_running for worker in load.core.workers.values()) < case.running or any(
        worker.rows.prefilling[worker.rows.order()].any() for worker in load.core.workers.values()
    ):
        next(steps)
    for _ in range(200 if case.churn else 4 * case.workers):
        next(steps)
    num_timed = num_steps * (4 if case.churn else case.workers) // REPETITIONS
    cost = min(cost_of([next(steps) for _ in range(num_timed)], case) for _ in range(REPETITIONS))
    return {
        "workers": case.workers,
        "running": case.running,
        "num_drafts": case.num_drafts,
        "churn": case.churn,
        "us_per_request_step": round(cost, 4),
    }


def cost_of(steps: list[tuple[int, int]], case: Case) -> float:
    """Of (core ns, rows) of some steps: the median; under churn, where some admit and some only decode, the mean."""
    if case.churn:
        return sum(ns for ns, _ in steps) / sum(rows for _, rows in steps) / 1e3
    return statistics.median(ns / rows for ns, rows in steps) / 1e3


def main() -> None:
    """Print the table, or a JSON list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="a list of objects on standard output")
    parser.add_argument("--steps", type=int, default=300, help="timed steps per worker")
    arguments = parser.parse_args()
    cases = CASES + [Case(1, 256, k, churn=True) for k in (0, 4)]
    rows = []
    for case in cases:
        rows.append(measure(case, arguments.steps))
        print(json.dumps(rows[-1]), file=sys.stderr)
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
