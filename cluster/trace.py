"""`slipstream trace`: steps, frames and messages of all processes as a trace for Perfetto or Chrome.

Everything lies on the scheduler's clock: front ends know how far theirs is from it, and workers' steps are
placed between what was sent to them and what they answered. Times of a trace are microseconds.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cluster.errors import ServerError

EVERY_S = 0.25
SCHEDULER_PID, FIRST_FRONT_END_PID, FIRST_WORKER_PID = 1, 100, 1000
STEPS_TID, FIRST_ROW_TID = 1, 10
MESSAGES_TID = 1

View = Mapping[str, Any]
TraceEvent = dict[str, Any]


class Trace:
    """Collects views of every front end; each sees the same scheduler, and its own deliveries."""

    def __init__(self) -> None:
        self._life: str | None = None
        self._began_ns = 0
        self._steps: dict[tuple[str, str, int], View] = {}
        self._messages: dict[tuple[str, str, str], list[Any]] = {}  # (kind, front end, name)
        self._deliveries: dict[tuple[str, str], int] = {}  # (front end, name) -> when, on the scheduler's clock
        self._errors: dict[str, int] = {}  # front end -> of its clock, at most
        self._workers: dict[str, int] = {}  # process numbers
        self._started: dict[tuple[str, str, int], int] = {}  # of the steps that were answered

    def take(self, view: View) -> None:
        """What was seen until now. Raises ServerError if the scheduler was restarted meanwhile."""
        if self._life is None:
            self._life, self._began_ns = view["life"], view["now_ns"]
        if view["life"] != self._life:
            raise ServerError("the scheduler was restarted: its clock began anew")
        for step in view["trail"]["steps"]:
            self._steps[step["worker_id"], step["session"], step["seq"]] = step
        for message in view["trail"]["messages"]:
            kind, _, front_end, name, _ = message
            self._messages[kind, front_end, name] = message
        name, offset_ns = view["front_end"]["name"], view["clock"]["offset_ns"]
        self._errors[name] = view["clock"]["error_ns"]
        for at_ns, delivery in view["deliveries"]:
            self._deliveries[name, delivery] = at_ns + offset_ns

    def events(self) -> list[TraceEvent]:
        """All of it, in Chrome's JSON format: names first, then by time."""
        fronts = sorted({*self._errors, *(front_end for _, front_end, _ in self._messages)})
        pids = {name: FIRST_FRONT_END_PID + index for index, name in enumerate(fronts)}
        named = list(self._named(pids))
        self._place()
        told = [*self._of_steps(), *self._of_messages(pids)]
        return named + sorted(told, key=lambda event: float(event["ts"]))

    def document(self) -> dict[str, Any]:
        """What is written to the file."""
        clocks = {name: f"within {error_ns / 1000:.0f} us" for name, error_ns in sorted(self._errors.items())}
        workers = "placed between their plans and their answers"
        return {
            "traceEvents": self.events(),
            "displayTimeUnit": "ms",
            "otherData": {"clock": "the scheduler's", "workers": workers, "front_ends": clocks},
        }

    def _place(self) -> None:
        """Puts each session's steps on the scheduler's clock, all by the same offset: now all its bounds are known."""
        self._started = {}
        answered = sorted(key for key, step in self._steps.items() if step["received_ns"] is not None)
        chain: list[tuple[str, str, int]] = []
        for key in answered:
            if chain and key != (*chain[-1][:2], chain[-1][2] + 1):  # one is missing, or another session
                self._place_chain(chain)
                chain = []
            chain.append(key)
        if chain:
            self._place_chain(chain)

    def _place_chain(self, chain: Sequence[tuple[str, str, int]]) -> None:
        ended_ns, bounds = 0, []
        for key in chain:
            step = self._steps[key]
            self._started[key] = ended_ns + step["idle_ns"]
            ended_ns = self._started[key] + step["verify_ns"] + step["draft_ns"]
            bounds.append((step["sent_ns"] - self._started[key], step["received_ns"] - ended_ns))
        offset_ns = (max(low for low, _ in bounds) + min(high for _, high in bounds)) // 2
        for key in chain:
            self._started[key] += offset_ns

    def _named(self, fronts: Mapping[str, int]) -> Iterator[TraceEvent]:
        yield from _process(SCHEDULER_PID, "scheduler", 0)
        yield _thread(SCHEDULER_PID, MESSAGES_TID, "messages")
        for name, pid in fronts.items():
            yield from _process(pid, f"front end {name}", 1)
            yield _thread(pid, MESSAGES_TID, "messages")
        rows: dict[str, set[int]] = {}
        for (worker_id, _, _), step in sorted(self._steps.items()):
            rows.setdefault(worker_id, set()).update(frame["row"] for frame in step["frames"])
        for index, (worker_id, numbers) in enumerate(rows.items()):
            pid = self._workers[worker_id] = FIRST_WORKER_PID + index
            yield from _process(pid, f"worker {worker_id}", 2)
            yield _thread(pid, STEPS_TID, "steps")
            for row in sorted(numbers):
                yield _thread(pid, FIRST_ROW_TID + row, f"row {row}")

    def _of_steps(self) -> Iterator[TraceEvent]:
        for (worker_id, session, seq), step in self._steps.items():
            pid, name = self._workers[worker_id], f"{worker_id} step {seq}"
            flight = {"cat": "step", "id": f"{session}/{seq}", "pid": SCHEDULER_PID, "tid": MESSAGES_TID, "name": name}
            yield flight | {"ph": "b", "ts": self._us(step["sent_ns"]), "args": _args(step)}
            if step["received_ns"] is None:
                continue
            yield flight | {"ph": "e", "ts": self._us(step["received_ns"])}
            started_ns = self._started[worker_id, session, seq]
            yield from self._carried_out(pid, step, started_ns)
            ended_ns = started_ns + step["verify_ns"] + step["draft_ns"]
            plan = "plan", (SCHEDULER_PID, MESSAGES_TID, step["sent_ns"]), (pid, STEPS_TID, started_ns)
            result = "result", (pid, STEPS_TID, ended_ns), (SCHEDULER_PID, MESSAGES_TID, step["received_ns"])
            for what, start, end in (plan, result):
                yield from self._message(f"{what} {seq}", f"{what}/{session}/{seq}", start, end)

    def _carried_out(self, pid: int, step: View, started_ns: int) -> Iterator[TraceEvent]:
        verify_ns, draft_ns = step["verify_ns"], step["draft_ns"]
        row: TraceEvent = {"ph": "X", "pid": pid, "tid": STEPS_TID, "ts": self._us(started_ns)}
        yield row | {"name": f"step {step['seq']}", "dur": (verify_ns + draft_ns) / 1e3, "args": _args(step)}
        yield row | {"name": "verify", "dur": verify_ns / 1e3}
        if draft_ns:
            yield row | {"name": "draft", "ts": self._us(started_ns + verify_ns), "dur": draft_ns / 1e3}
        for frame in step["frames"]:
            yield row | {
                "tid": FIRST_ROW_TID + frame["row"],
                "name": frame["request_id"] or f"epoch {frame['epoch']}",
                "cat": f"frame,{frame['kind']}",
                "dur": verify_ns / 1e3,
                "args": dict(frame),
            }

    def _of_messages(self, fronts: Mapping[str, int]) -> Iterator[TraceEvent]:
        for (kind, front_end, name), (_, at_ns, _, _, num_tokens) in self._messages.items():
            scheduler = SCHEDULER_PID, MESSAGES_TID, at_ns
            if kind == "submit":
                yield self._moment(f"submitted {name}", scheduler, {"front_end": front_end})
                continue
            arrived_ns = self._deliveries.get((front_end, name))
            if arrived_ns is None:
                yield self._moment("deliver", scheduler, {"to": front_end, "tokens": num_tokens})
                continue
            end = fronts[front_end], MESSAGES_TID, max(arrived_ns, at_ns)
            yield from self._message("deliver", f"deliver/{front_end}/{name}", scheduler, end, {"tokens": num_tokens})

    def _message(
        self,
        name: str,
        identity: str,
        start: tuple[int, int, int],
        end: tuple[int, int, int],
        args: Mapping[str, Any] | None = None,
    ) -> Iterator[TraceEvent]:
        """An arrow from one process to another, each end tied to a moment there."""
        for phase, place in (("s", start), ("f", end)):
            yield self._moment(name, place, args or {})
            arrow: TraceEvent = {"ph": phase, "cat": "message", "id": identity, "name": name}
            pid, tid, at_ns = place
            arrow |= {"pid": pid, "tid": tid, "ts": self._us(at_ns)}
            yield arrow | ({"bp": "e"} if phase == "f" else {})

    def _moment(self, name: str, place: tuple[int, int, int], args: Mapping[str, Any]) -> TraceEvent:
        """So short that it has no length to speak of; an arrow needs a slice to begin and end at."""
        pid, tid, at_ns = place
        return {"ph": "X", "pid": pid, "tid": tid, "ts": self._us(at_ns), "dur": 1.0, "name": name, "args": dict(args)}

    def _us(self, at_ns: int) -> float:
        """Since the trace began; what began before is negative."""
        return (at_ns - self._began_ns) / 1e3


def collect(asks: Sequence[Callable[[int], View]], seconds: float) -> Trace:
    """Asks every front end for what changed since a number, until so many seconds are over."""
    trace = Trace()
    after = [0] * len(asks)
    for index, ask in enumerate(asks):  # what was before is not traced
        view = ask(0)
        after[index] = view["trail"]["number"]
    until_s = time.monotonic() + seconds
    while True:
        left_s = until_s - time.monotonic()
        time.sleep(max(min(EVERY_S, left_s), 0.0))
        for index, ask in enumerate(asks):
            view = ask(after[index])
            after[index] = view["trail"]["number"]
            trace.take(view)
        if left_s <= EVERY_S:
            return trace


def _process(pid: int, name: str, place: int) -> Iterator[TraceEvent]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": place}}


def _thread(pid: int, tid: int, name: str) -> TraceEvent:
    return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _args(step: View) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name != "frames"}
