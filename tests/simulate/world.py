"""One seeded world around the real scheduler core: a virtual clock, a heap of what happens next, and bad luck.

Single-threaded and a function of its seed alone. After every event the core's invariants and the ledger are
checked; when the weather has cleared, everything must come to rest with every client served.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import ClassVar

import numpy as np

from scheduler.core import Scheduler
from scheduler.events import (
    CacheReset,
    Cancelled,
    CloseSession,
    Command,
    DrainRequested,
    EmitTokens,
    Event,
    FinishRequest,
    FrontEndLost,
    PreemptRequested,
    RejectRequest,
    StartStep,
    StepFailed,
    StepFinished,
    Submitted,
    SwapRequested,
    Tick,
    WorkerDown,
    WorkerUp,
)
from scheduler.request import FinishReason, RejectCode
from scheduler.step import Int32Array, StepPlan, StepResult
from tests.simulate.clients import Authors, Client, Prompt
from tests.simulate.ledger import Attempt, Ledger
from tests.simulate.toy import Violation
from tests.simulate.weather import MS, Link, Weather, draw_weather
from tests.simulate.worker import ShadowWorker, StepCrash, WorkerCrash
from worker.session import SessionQueue, StaleSession, StepError

NUM_RECENT = 30  # events told about a failing seed
MAX_CALM_EVENTS = 6000  # to come to rest
PATIENCE_NS = 250 * MS


class Host:
    """Where one worker runs, and what the network does to it."""

    __slots__ = (
        "busy_until_ns", "down", "draining", "index", "last_run", "old_results", "partitioned", "queue", "registering",
        "slowness", "unregistered", "worker", "worker_id",
    )  # fmt: skip

    def __init__(self, index: int, worker: ShadowWorker) -> None:
        self.index = index
        self.worker = worker
        self.worker_id = worker.worker_id
        self.queue = SessionQueue(worker)
        self.down = False
        self.partitioned = False
        self.draining = False
        self.registering = False
        self.unregistered = False  # a partition kept it from registering
        self.slowness = 1
        self.busy_until_ns = 0
        self.last_run = (-1, -1)  # session, step_seq
        self.old_results: deque[StepResult] = deque(maxlen=40)


class World:
    """Run one seed with `run()`; a broken promise raises."""

    def __init__(self, seed: int, *, num_workers: int | None = None, horizon: int = 300) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.weather: Weather = draw_weather(self.rng, num_workers=num_workers, horizon=horizon)
        self.config = self.weather.config
        self.coverage: Counter[tuple[str, str]] = Counter()
        self.met: Counter[str] = Counter()
        self.recent: deque[tuple[int, Event, list[Command]]] = deque(maxlen=NUM_RECENT)
        self.num_handled = 0
        self.now_ns = 0
        self.clearing = False
        self._heap: list[tuple[int, int, Callable[..., None], tuple[object, ...]]] = []
        self._num_pushed = 0
        self._num_sessions = 0
        self._num_streams = 0
        self._last_delivery: dict[tuple[str, str], int] = {}
        self.clients: list[Client] = []
        self.open: list[Client] = []
        self.client_of: dict[int, Client] = {}
        self.attempts: dict[int, Attempt] = {}
        self.salts: dict[str, int] = {}
        self.poisoned: set[str] = set()
        self.authors = Authors(self.weather, self.rng)
        self.front_ends = [f"f{index}" for index in range(self.weather.num_front_ends)]
        self.lost_front_ends: set[str] = set()
        self.version = 0
        self.life = -1
        self.num_hit_tokens = 0  # of earlier lives of the scheduler
        self.num_cut_runs = 0
        self.hosts = [self._host(index) for index in range(len(self.weather.pools))]
        self._names = list(self.weather.actions)
        self._weights = list(self.weather.actions.values())
        self.ledger = Ledger(self.config, self.coverage)
        self._begin_life()

    def _host(self, index: int) -> Host:
        weather = self.weather
        return Host(
            index,
            ShadowWorker(
                worker_id=f"w{index}",
                num_blocks=weather.pools[index],
                block_size=self.config.block_size,
                max_num_seqs=weather.max_num_seqs,
                max_drafts=weather.worker_drafts[index],
                drop_last_hit_block=weather.drop_last_hit_block[index],
                max_num_batched_tokens=self.config.max_num_batched_tokens,
                faults=weather.faults,
                rng=self.rng,
                salts=self.salts,
                poisoned=self.poisoned,
            ),
        )

    # ---- time ----

    def run(self) -> None:
        """Live through the weather, then come to rest."""
        self._after(0, self._tick)
        self._after(0, self._act)
        self._after(self.weather.tick_ns, self._lose_patience)
        while self.num_handled < self.weather.horizon:
            self._step()
        self._clear()
        limit = self.num_handled + MAX_CALM_EVENTS
        while self.open or not self._is_at_rest():
            if self.num_handled > limit:
                waiting = self.open[0].prompt.request_id if self.open else None
                raise Violation(f"no rest within {MAX_CALM_EVENTS} events, {len(self.open)} clients wait", waiting)
            self._step()
        self._check_end()

    def _step(self) -> None:
        self.now_ns, _, action, arguments = heappop(self._heap)
        action(*arguments)

    def _after(self, delay_ns: int, action: Callable[..., None], *arguments: object) -> None:
        self._num_pushed += 1
        heappush(self._heap, (self.now_ns + delay_ns, self._num_pushed, action, arguments))

    def _tick(self) -> None:
        self._handle(Tick(now_ns=self.now_ns))
        self._after(self.weather.tick_ns, self._tick)

    def _is_at_rest(self) -> bool:
        """Whether nothing lives in the scheduler and nothing is in flight."""
        return not self.ledger.live and not any(session.in_flight for session in self.ledger.sessions.values())

    # ---- the scheduler ----

    def _begin_life(self) -> None:
        """A new scheduler, which knows nothing; every worker registers with it."""
        self.life += 1
        if self.life:
            self.num_hit_tokens += self.ledger.num_hit_tokens
            self.num_cut_runs += self.ledger.num_cut_runs
        self.scheduler = Scheduler(self.config, None if self.weather.num_drafts_mode == "policy" else self._choose)
        self.ledger = Ledger(self.config, self.coverage)
        self.ledger.attempts = self.attempts
        for attempt in self.attempts.values():
            attempt.closed = attempt.closed or "scheduler lost"
        self._handle(Tick(now_ns=self.now_ns))
        if self.version:
            self._handle(SwapRequested(weights=str(self.version)))
        for host in self.hosts:
            host.registering = False
            self._register_soon(host, 3 * MS)

    def _choose(self, worker_id: str, rows: Int32Array) -> Int32Array:
        """K of every row, another one each step."""
        most = self.config.max_drafts
        if self.weather.num_drafts_mode == "step":
            return np.full(len(rows), self.rng.randint(0, most), np.int32)
        return np.array([self.rng.randint(0, most) for _ in rows], np.int32)

    def _handle(self, event: Event) -> None:
        self.num_handled += 1
        self.ledger.before(event)
        self.recent.append((self.now_ns, event, []))
        commands = self.scheduler.handle(event)
        self.recent[-1] = (self.now_ns, event, commands)
        self.scheduler.check()
        self.ledger.after(event, commands)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartStep():
                self._send_plan(self.hosts[int(command.worker_id[1:])], command.plan)
            case EmitTokens():
                self._to_front_end(command.front_end, self._on_tokens, command)
            case FinishRequest():
                self._to_front_end(command.front_end, self._on_finished, command)
            case RejectRequest():
                self._to_front_end(command.front_end, self._on_rejected, command)
            case CloseSession():
                host = self.hosts[int(command.worker_id[1:])]
                self._after(2 * MS, self._on_session_closed, host, command.session)

    # ---- links ----

    def _deliveries(self, link: Link, name: tuple[str, str]) -> list[int]:
        """Delays of the copies of one message that arrive."""
        rng = self.rng
        if self.clearing:
            link = Link(mean_ns=link.mean_ns)
        if link.lost and rng.random() < link.lost:
            self.met[f"{name[0]} lost"] += 1
            return []
        delays = [int(rng.expovariate(1.0) * link.mean_ns) + 1]
        if link.straggles and rng.random() < link.straggles:
            self.met[f"{name[0]} late"] += 1
            delays[0] += rng.randint(20, 150) * MS
        if link.repeated and rng.random() < link.repeated:
            self.met[f"{name[0]} repeated"] += 1
            delays.append(delays[0] + rng.randint(0, 60) * MS)
        arrival = self.now_ns + delays[0]
        last = self._last_delivery.get(name, 0)
        if link.ordered and arrival <= last:
            delays[0] = last + 1 - self.now_ns
        elif arrival < last:
            self.met[f"{name[0]} reordered"] += 1
        self._last_delivery[name] = max(last, self.now_ns + delays[0])
        return delays

    def _met_in_flight(self, how: str, session: int, step_seq: int) -> None:
        """Count what kinds of frames a message of a step carried when something happened to it."""
        for known in self.ledger.sessions.values():
            if known.up.session == session:
                for kind in known.in_flight.get(step_seq, {}).values():
                    self.coverage[how, kind] += 1

    def _send_plan(self, host: Host, plan: StepPlan) -> None:
        before = self.met["plan reordered"], self.met["plan late"]
        delays = self._deliveries(self.weather.worker_link, ("plan", host.worker_id))
        fates = (
            ("plan lost", not delays),
            ("plan repeated", len(delays) > 1),
            ("plan reordered", self.met["plan reordered"] > before[0]),
            ("plan late", self.met["plan late"] > before[1]),
        )
        for how, happened in fates:
            if happened:
                self._met_in_flight(how, plan.session, plan.step_seq)
        for delay in delays:
            self._after(delay, self._plan_arrived, host, plan)
        self._replay_old_result(host, plan)

    def _replay_old_result(self, host: Host, plan: StepPlan) -> None:
        """A result of an older session turns up just when its number is in flight again."""
        if self.clearing or not host.old_results or self.rng.random() >= self.weather.replays:
            return
        for result in host.old_results:
            if result.step_seq == plan.step_seq and result.session != plan.session:
                self.met["old session's result"] += 1
                self._met_in_flight("old session's result", plan.session, plan.step_seq)
                self._after(self.rng.randint(0, self.weather.step_ns), self._result_arrived, host, result)
                return

    def _plan_arrived(self, host: Host, plan: StepPlan) -> None:
        if host.down or host.partitioned:
            return
        try:
            results = host.queue.offer(plan)
        except StaleSession:
            self.met["plan refused"] += 1
            return
        except StepError as failure:
            self._step_failed(host, failure)
            return
        for result in results:
            self._send_result(host, result)

    def _step_failed(self, host: Host, failure: StepError) -> None:
        cause = failure.__cause__
        if isinstance(cause, WorkerCrash):
            self.met["poison"] += 1
            self._crash(host)
            return
        if not isinstance(cause, StepCrash):
            raise cause or failure
        self.met["step failed"] += 1
        event = StepFailed(
            worker_id=host.worker_id, session=failure.session, step_seq=failure.step_seq, message="step failed"
        )
        for delay in self._deliveries(self.weather.worker_link, ("result", host.worker_id)):
            self._after(delay, self._failure_arrived, host, event)
        self._register_soon(host, self.rng.randint(5, 40) * MS)

    def _failure_arrived(self, host: Host, event: StepFailed) -> None:
        if not host.partitioned:
            self._handle(event)

    def _send_result(self, host: Host, result: StepResult) -> None:
        host.busy_until_ns = max(host.busy_until_ns, self.now_ns)
        if host.last_run < (result.session, result.step_seq):  # else a plan was repeated, and is only answered again
            host.last_run = result.session, result.step_seq
            took = self.weather.step_ns * host.slowness * self.rng.uniform(0.5, 1.5)
            host.busy_until_ns += int(took)
        if host.slowness > 1:
            self._met_in_flight("slow worker", result.session, result.step_seq)
        before = self.met["result reordered"], self.met["result late"]
        delays = self._deliveries(self.weather.worker_link, ("result", host.worker_id))
        fates = (
            ("result lost", not delays),
            ("result repeated", len(delays) > 1),
            ("result reordered", self.met["result reordered"] > before[0]),
            ("result late", self.met["result late"] > before[1]),
        )
        for how, happened in fates:
            if happened:
                self._met_in_flight(how, result.session, result.step_seq)
        for delay in delays:
            self._after(host.busy_until_ns - self.now_ns + delay, self._result_arrived, host, result)
        host.old_results.append(result)

    def _result_arrived(self, host: Host, result: StepResult) -> None:
        """Old results may arrive whatever has become of the worker; a partition swallows them."""
        if host.partitioned and result.session == host.worker.session:
            return
        self._handle(StepFinished(result=result))

    # ---- workers ----

    def _register_soon(self, host: Host, delay_ns: int) -> None:
        if not host.registering:
            host.registering = True
            self._after(delay_ns, self._register, host, self.life)

    def _register(self, host: Host, life: int) -> None:
        """A new session through the worker's own queue, then the scheduler hears of it."""
        if life != self.life:
            return
        host.registering = False
        host.unregistered = host.partitioned
        if host.down or host.partitioned:
            return
        self._num_sessions += 1
        host.queue.begin(self._num_sessions)
        host.draining = False
        worker = host.worker
        event = WorkerUp(
            worker_id=host.worker_id,
            session=self._num_sessions,
            num_blocks=worker.num_blocks,
            max_num_seqs=worker.max_num_seqs,
            max_drafts=worker.max_drafts,
            fingerprint=self.weather.fingerprints[host.index],
            drop_last_hit_block=worker.drop_last_hit_block,
        )
        self._after(self.rng.randint(0, 3 * MS), self._registered, host, event, life)

    def _registered(self, host: Host, event: WorkerUp, life: int) -> None:
        if life == self.life and host.worker.session == event.session:
            self._handle(event)

    def _on_session_closed(self, host: Host, session: int) -> None:
        if host.worker.session == session and not host.down:
            self.met["session closed"] += 1
            self._register_soon(host, 2 * MS)

    def _lost(self, host: Host, session: int, life: int) -> None:
        """The failure detector speaks; perhaps long after the worker has come back."""
        if life == self.life:
            self._handle(WorkerDown(worker_id=host.worker_id, session=session, message="lost"))

    def _crash(self, host: Host) -> None:
        if host.down:
            return
        host.down = True
        host.worker.version = 0
        host.queue = SessionQueue(host.worker)
        back_ns = self.rng.randint(3, 80) * MS
        if self.rng.random() < 0.7:
            self._after(self.rng.randint(1, 100) * MS, self._lost, host, host.worker.session, self.life)
        self._after(back_ns, self._come_back, host)

    def _come_back(self, host: Host) -> None:
        host.down = False
        self._register_soon(host, 1)

    def _heal(self, host: Host, noticed: bool) -> None:
        if not host.partitioned:
            return
        host.partitioned = False
        if noticed or host.unregistered:
            self._register_soon(host, 1)

    # ---- front ends ----

    def _to_front_end(self, front_end: str, action: Callable[..., None], command: Command) -> None:
        for delay in self._deliveries(self.weather.front_link, ("answer", front_end)):
            self._after(delay, self._front_end_heard, front_end, action, command)

    def _front_end_heard(self, front_end: str, action: Callable[..., None], command: Command) -> None:
        if front_end not in self.lost_front_ends:
            action(command)

    def _to_scheduler(self, client: Client, event: Submitted | Cancelled) -> None:
        delays = self._deliveries(self.weather.front_link, ("call", client.front_end))
        for copy, delay in enumerate(delays):
            self._after(delay, self._front_end_called, client, event, copy)

    def _front_end_called(self, client: Client, event: Submitted | Cancelled, copy: int) -> None:
        if isinstance(event, Submitted):
            if event.request.front_end in self.lost_front_ends:
                return
            # Front ends never send a submission twice; a copy by the network after its end would live again.
            if copy and self.attempts[event.request.stream].closed is not None:
                return
        self._handle(event)

    def _submit(self, client: Client) -> None:
        self._num_streams += 1
        client.stream = self._num_streams
        client.last_heard_ns = self.now_ns
        request = client.request(client.stream)
        self.client_of[client.stream] = client
        self.attempts[client.stream] = Attempt(request, client.versions)
        self._to_scheduler(client, Submitted(request=request))

    def _resubmit(self, client: Client, why: str) -> None:
        self.met[f"resubmitted: {why}"] += 1
        client.attempt += 1
        client.resubmissions += 1
        client.patience_ns = PATIENCE_NS << min(client.resubmissions, 8)
        self._submit(client)

    def _close(self, client: Client, outcome: str) -> None:
        client.outcome = outcome
        self.open.remove(client)
        if outcome in (FinishReason.STOP.value, FinishReason.LENGTH.value):
            self.authors.remember(client.prompt, client.token_ids)

    def _subscribed(self, stream: int, attempt: int) -> Client | None:
        """The gate: the client, if this is the attempt that its front end listens to."""
        client = self.client_of[stream]
        if client.outcome is None and client.stream == stream and client.attempt == attempt:
            client.last_heard_ns = self.now_ns
            return client
        return None

    def _on_tokens(self, command: EmitTokens) -> None:
        start = 0
        columns = (command.streams, command.attempts, command.offsets, command.num_tokens)
        token_ids: list[int] = command.token_ids.tolist()
        for stream, attempt, offset, count in zip(*(column.tolist() for column in columns), strict=True):
            run = token_ids[start : start + count]
            start += count
            client = self._subscribed(stream, attempt)
            if client is None:
                self._unwanted(stream, attempt)
                continue
            versions = self.attempts[stream].versions[offset : offset + count]
            if not client.take(offset, run, versions):
                self._missing(client, "gap")
            after = client.prompt.cancel_after
            if after is not None and len(client.token_ids) >= after:
                self._cancel(client)

    def _unwanted(self, stream: int, attempt: int) -> None:
        """Tokens nobody reads: tell the scheduler (again) that the client left, unless a newer attempt lives."""
        client = self.client_of[stream]
        if client.outcome is not None and self.rng.random() < 0.5:
            self.met["unwanted tokens"] += 1
            self._to_scheduler(client, Cancelled(request_id=client.prompt.request_id, attempt=attempt))

    def _missing(self, client: Client, why: str) -> None:
        if self.weather.front_link.ordered and not self._was_disturbed(client):
            raise Violation(f"{why} on a reliable link", client.prompt.request_id)
        self._resubmit(client, why)

    def _was_disturbed(self, client: Client) -> bool:
        return client.attempt > 0

    def _on_finished(self, command: FinishRequest) -> None:
        client = self._subscribed(command.stream, command.attempt)
        if client is None:
            return
        if len(client.token_ids) < command.num_output_tokens:
            self._missing(client, "end before its tokens")
        elif command.reason is FinishReason.ABORT:
            self._resubmit(client, "aborted by a stranger")
        else:
            self._close(client, command.reason.value)
            if command.reason is FinishReason.ERROR and self.rng.random() < 0.7:
                self.met["tried again after an error"] += 1
                self._after(MS, self._open, self.authors.repeat(client.prompt), client.front_end)

    def _on_rejected(self, command: RejectRequest) -> None:
        client = self._subscribed(command.stream, command.attempt)
        if client is None:
            return
        if command.code is RejectCode.INVALID_ARGUMENT:
            self._close(client, "rejected")
            return
        self.met[f"rejected: {command.code.value}"] += 1
        client.num_rejections += 1
        delay_ns = self.rng.randint(10, 30) * MS << min(client.num_rejections, 5)
        self._after(delay_ns, self._retry, client, command.stream)

    def _retry(self, client: Client, stream: int) -> None:
        if client.outcome is None and client.stream == stream:
            self._submit(client)

    def _cancel(self, client: Client) -> None:
        """The client leaves. Sometimes its id is used again at once."""
        self.met["cancelled"] += 1
        self._close(client, "cancelled")
        event = Cancelled(request_id=client.prompt.request_id, attempt=client.attempt)
        self._to_scheduler(client, event)
        if not self.weather.front_link.ordered:
            self._after(40 * MS, self._to_scheduler, client, event)
        if self.rng.random() < 0.4:
            self.met["id used again"] += 1
            prompt = self.authors.write(self.now_ns, client.prompt.request_id, client.prompt.salt)
            self._after(self.rng.choice((0, 1, 10)) * MS, self._open, prompt, client.front_end)

    def _open(self, prompt: Prompt, front_end: str) -> None:
        if self.clearing:
            return
        if front_end in self.lost_front_ends:
            front_end = self.rng.choice(self.front_ends)
        client = Client(prompt, front_end, PATIENCE_NS)
        self.salts[prompt.request_id] = prompt.salt
        if prompt.is_poison:
            self.poisoned.add(prompt.request_id)
        else:
            self.poisoned.discard(prompt.request_id)
        self.clients.append(client)
        self.open.append(client)
        self._submit(client)

    def _lose_patience(self) -> None:
        """Front ends on a bad link ask again when nothing was heard for long."""
        if self.clearing:
            return
        if not self.weather.front_link.ordered:
            for client in list(self.open):
                if self.now_ns - client.last_heard_ns > client.patience_ns:
                    self._resubmit(client, "silence")
        self._after(40 * MS, self._lose_patience)

    # ---- what may happen ----

    def _act(self) -> None:
        if self.clearing:
            return
        [name] = self.rng.choices(self._names, self._weights)
        if self._ACTIONS[name](self):
            self.met[name] += 1
        self._after(int(self.rng.expovariate(1.0) * self.weather.action_ns) + 1, self._act)

    def _act_burst(self) -> bool:
        room = self.weather.max_open - len(self.open)
        if room <= 0:
            return False
        for _ in range(min(room, self.rng.choice((1, 1, 2, 4, 8)))):
            self._open(self.authors.write(self.now_ns), self.rng.choice(self.front_ends))
        return True

    def _act_cancel(self) -> bool:
        if not self.open:
            return False
        self._cancel(self.rng.choice(self.open))
        return True

    def _act_reset(self) -> bool:
        self._handle(CacheReset(reset_running=False))
        return True

    def _act_reset_running(self) -> bool:
        for _ in range(self.rng.choice((1, 1, 2, 2, 3))):
            self._handle(CacheReset(reset_running=True))
        return True

    def _act_preempt(self) -> bool:
        if not self.open:
            return False
        for _ in range(self.rng.choice((1, 1, 2))):
            self._handle(PreemptRequested(request_id=self.rng.choice(self.open).prompt.request_id))
        return True

    def _act_swap(self) -> bool:
        self.version += 1
        self._handle(SwapRequested(weights=str(self.version)))
        return True

    def _act_drain(self) -> bool:
        host = self.rng.choice(self.hosts)
        if host.draining or host.down:
            return False
        host.draining = True
        wait_ns = self.rng.randint(0, 60) * MS
        self._handle(DrainRequested(worker_id=host.worker_id, deadline_ns=self.now_ns + wait_ns))
        self._after(wait_ns + self.rng.randint(20, 80) * MS, self._end_drain, host)
        return True

    def _end_drain(self, host: Host) -> None:
        if host.draining and not host.down:
            self._register_soon(host, 1)

    def _act_crash(self) -> bool:
        host = self.rng.choice(self.hosts)
        if host.down:
            return False
        self._crash(host)
        return True

    def _act_partition(self) -> bool:
        host = self.rng.choice(self.hosts)
        if host.down or host.partitioned:
            return False
        host.partitioned = True
        lasts_ns = self.rng.randint(5, 120) * MS
        noticed = lasts_ns > 60 * MS
        if noticed:
            self._after(60 * MS, self._lost, host, host.worker.session, self.life)
        self._after(lasts_ns, self._heal, host, noticed)
        return True

    def _act_slow(self) -> bool:
        host = self.rng.choice(self.hosts)
        host.slowness = self.rng.choice((1, 4, 12))
        return host.slowness > 1

    def _act_reconnect(self) -> bool:
        """A worker registers anew although nothing was wrong."""
        self._register_soon(self.rng.choice(self.hosts), 1)
        return True

    def _act_resubmit(self) -> bool:
        if not self.open:
            return False
        self._resubmit(self.rng.choice(self.open), "a higher attempt")
        return True

    def _act_restart_scheduler(self) -> bool:
        self._begin_life()
        for client in list(self.open):
            self._after(self.rng.randint(1, 12) * MS, self._resubmit_if_open, client, "scheduler restarted")
        return True

    def _resubmit_if_open(self, client: Client, why: str) -> None:
        if client.outcome is None:
            self._resubmit(client, why)

    def _act_lose_front_end(self) -> bool:
        """A front end dies; its clients come back through another one with what they hold."""
        index = self.rng.randrange(len(self.front_ends))
        gone = self.front_ends[index]
        self.lost_front_ends.add(gone)
        self.front_ends[index] = f"{gone}'"
        for client in self.open:
            if client.front_end == gone:
                client.front_end = self.rng.choice(self.front_ends)
                self._after(self.rng.randint(1, 30) * MS, self._resubmit_if_open, client, "front end lost")
        self._after(self.rng.randint(1, 60) * MS, self._handle, FrontEndLost(front_end=gone))
        return True

    _ACTIONS: ClassVar[dict[str, Callable[["World"], bool]]] = {
        "burst": _act_burst,
        "cancel": _act_cancel,
        "reset": _act_reset,
        "reset_running": _act_reset_running,
        "preempt": _act_preempt,
        "swap": _act_swap,
        "drain": _act_drain,
        "crash": _act_crash,
        "partition": _act_partition,
        "slow": _act_slow,
        "reconnect": _act_reconnect,
        "resubmit": _act_resubmit,
        "restart_scheduler": _act_restart_scheduler,
        "lose_front_end": _act_lose_front_end,
    }

    # ---- the end ----

    def _clear(self) -> None:
        """Good weather from now on: links are reliable, everything heals, what was lost is asked for again."""
        self.clearing = True
        for host in self.hosts:
            host.slowness = 1
            host.busy_until_ns = min(host.busy_until_ns, self.now_ns + 100 * MS)
            self._heal(host, noticed=True)
            self._end_drain(host)
        if not self.weather.front_link.ordered:
            self._after(400 * MS, self._ask_again)

    def _ask_again(self) -> None:
        for client in list(self.open):
            self._resubmit(client, "weather cleared")

    def summary(self) -> Counter[str]:
        """What this world met, besides frames in flight."""
        met = self.met.copy()
        workers = [host.worker for host in self.hosts]
        met["drafts accepted"] = sum(worker.num_accepted for worker in workers)
        met["drafts rejected"] = sum(worker.num_rejected for worker in workers)
        met["drafts fewer than asked"] = sum(worker.num_drafter_failures for worker in workers)
        met["draft slots of hits stale"] = sum(worker.num_stale_draft_slots for worker in workers)
        met["prefix hit tokens"] = self.num_hit_tokens + self.ledger.num_hit_tokens
        met["stops inside accepted runs"] = self.num_cut_runs + self.ledger.num_cut_runs
        met["submitted although complete"] = self.coverage["submitted complete", "any"]
        met["times overtaken"] = self.coverage["overtaken", "any"]
        for client in self.clients:
            met[f"client: {client.outcome}"] += 1
        met["clients"] = len(self.clients)
        met[f"K by {self.weather.num_drafts_mode}"] += 1
        met["pools unequal"] += len(set(self.weather.pools)) > 1
        met["several workers"] += len(self.hosts) > 1
        met["policy priority"] += self.config.scheduling_policy == "priority"
        return met

    def _check_end(self) -> None:
        for client in self.clients:
            client.check_stream(self.config.max_model_len)
        stats = self.scheduler.stats()
        if stats.num_running or stats.num_waiting or stats.async_tokens_to_discard or stats.placeholders:
            raise Violation(f"not empty at the end: {stats}")
        for worker in stats.workers:
            if worker.num_free_blocks != worker.num_blocks or worker.num_steps_in_flight:
                raise Violation(f"{worker.num_blocks - worker.num_free_blocks} blocks leaked on {worker.worker_id}")
