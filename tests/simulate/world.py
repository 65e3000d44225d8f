"""One seeded world around the real scheduler core: a virtual clock, and bad luck.

Single-threaded and a function of its seed alone. After every event the core's invariants and the ledger are
checked; when the weather has cleared, everything must come to rest with every client served.
"""

import random
from collections import Counter, deque

import numpy as np

from scheduler.core import Scheduler
from scheduler.events import (
    CloseSession,
    Command,
    EmitTokens,
    Event,
    FinishRequest,
    RejectRequest,
    StartStep,
    SwapRequested,
    Tick,
)
from scheduler.step import Int32Array
from tests.simulate.clock import Clock
from tests.simulate.fates import FATES
from tests.simulate.front_ends import FrontEnds
from tests.simulate.hosts import Hosts
from tests.simulate.ledger import Ledger
from tests.simulate.links import Links
from tests.simulate.toy import Violation
from tests.simulate.weather import MS, Weather, draw_weather

NUM_RECENT = 30  # events told about a failing seed
MAX_CALM_EVENTS = 6000  # to come to rest


class World:
    """Run one seed with `run()`; a broken promise raises."""

    def __init__(self, seed: int, *, num_workers: int | None = None, horizon: int = 300) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.weather: Weather = draw_weather(self.rng, num_workers=num_workers, horizon=horizon)
        self.config = self.weather.config
        self.coverage: Counter[tuple[str, str]] = Counter()  # (what happened, kind of frame in flight)
        self.met: Counter[str] = Counter()
        self.recent: deque[tuple[int, Event, list[Command]]] = deque(maxlen=NUM_RECENT)
        self.num_handled = 0
        self.is_clearing = False
        self.version = 0  # of the weights the operator wants
        self.life = -1  # of the scheduler
        self.num_hit_tokens = 0  # of its earlier lives
        self.num_cut_runs = 0
        self.clock = Clock()
        self.links = Links(self.clock, self.rng, self.met)
        self.fronts = FrontEnds(self)
        self.hosts = Hosts(self)
        self.begin_life()

    # ---- time ----

    def run(self) -> None:
        """Live through the weather, then come to rest."""
        self.clock.after(0, self._tick)
        self.clock.after(0, self._act)
        self.clock.after(self.weather.tick_ns, self.fronts.lose_patience)
        while self.num_handled < self.weather.horizon:
            self.clock.step()
        self._clear()
        limit = self.num_handled + MAX_CALM_EVENTS
        while self.fronts.open or not self._is_at_rest():
            if self.num_handled > limit:
                waiting = self.fronts.open[0].prompt.request_id if self.fronts.open else None
                raise Violation(f"no rest in {MAX_CALM_EVENTS} events, {len(self.fronts.open)} clients wait", waiting)
            self.clock.step()
        self._check_end()

    def _tick(self) -> None:
        self.handle(Tick(now_ns=self.clock.now_ns))
        self.clock.after(self.weather.tick_ns, self._tick)

    def _act(self) -> None:
        if self.is_clearing:
            return
        [name] = self.rng.choices(list(self.weather.actions), list(self.weather.actions.values()))
        if FATES[name](self):
            self.met[name] += 1
        self.clock.after(int(self.rng.expovariate(1.0) * self.weather.action_ns) + 1, self._act)

    def _clear(self) -> None:
        """Good weather from now on: links are reliable, everything heals, what was lost is asked for again."""
        self.is_clearing = self.links.is_clear = True
        self.hosts.heal_all()
        self.fronts.ask_again_when_clear()

    # ---- the scheduler ----

    def begin_life(self) -> None:
        """A new scheduler, which knows nothing but the weights it was started with; every worker registers."""
        self.life += 1
        if self.life:
            self.num_hit_tokens += self.ledger.num_hit_tokens
            self.num_cut_runs += self.ledger.num_cut_runs
        chooses = self.weather.num_drafts_mode != "policy"
        self.scheduler = Scheduler(self.config, self._choose_drafts if chooses else None)
        self.ledger: Ledger = Ledger(self.config, self.coverage, self.fronts.attempts)
        for attempt in self.fronts.attempts.values():
            attempt.closed = attempt.closed or "scheduler lost"
        self.handle(Tick(now_ns=self.clock.now_ns))
        if self.version:
            self.handle(SwapRequested(weights=str(self.version)))
        self.hosts.register_all()

    def _choose_drafts(self, worker_id: str, rows: Int32Array) -> Int32Array:
        """K of every row, another one each step."""
        most = self.config.max_drafts
        if self.weather.num_drafts_mode == "step":
            return np.full(len(rows), self.rng.randint(0, most), np.int32)
        return np.array([self.rng.randint(0, most) for _ in rows], np.int32)

    def handle(self, event: Event) -> None:
        """Tell the scheduler, check everything, carry out what it says."""
        self.num_handled += 1
        self.ledger.before(event)
        self.recent.append((self.clock.now_ns, event, []))
        commands = self.scheduler.handle(event)
        self.recent[-1] = (self.clock.now_ns, event, commands)
        self.scheduler.check()
        self.ledger.after(event, commands)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartStep():
                self.hosts.send_plan(command.worker_id, command.plan)
            case EmitTokens() | FinishRequest() | RejectRequest():
                self.fronts.hear(command)
            case CloseSession():
                self.clock.after(2 * MS, self.hosts.session_closed, command.worker_id, command.session)

    # ---- the end ----

    def _is_at_rest(self) -> bool:
        """Whether nothing lives in the scheduler and nothing is in flight."""
        return not self.ledger.live and not any(session.in_flight for session in self.ledger.sessions.values())

    def _check_end(self) -> None:
        for client in self.fronts.clients:
            client.check_stream(self.config.max_model_len)
        stats = self.scheduler.stats()
        if stats.num_running or stats.num_waiting or stats.async_tokens_to_discard or stats.placeholders:
            raise Violation(f"not empty at the end: {stats}")
        for worker in stats.workers:
            if worker.num_free_blocks != worker.num_blocks or worker.num_steps_in_flight:
                raise Violation(f"{worker.num_blocks - worker.num_free_blocks} blocks leaked on {worker.worker_id}")

    def summary(self) -> Counter[str]:
        """What this world met, besides frames in flight."""
        met = self.met.copy()
        workers = [host.worker for host in self.hosts.all]
        met["drafts accepted"] = sum(worker.num_accepted for worker in workers)
        met["drafts rejected"] = sum(worker.num_rejected for worker in workers)
        met["drafts fewer than asked"] = sum(worker.num_drafter_failures for worker in workers)
        met["draft slots of hits stale"] = sum(worker.num_stale_draft_slots for worker in workers)
        met["prefix hit tokens"] = self.num_hit_tokens + self.ledger.num_hit_tokens
        met["stops inside accepted runs"] = self.num_cut_runs + self.ledger.num_cut_runs
        met["submitted although complete"] = self.coverage["submitted complete", "any"]
        met["submission repeated after its end"] = self.coverage["submission repeated after its end", "any"]
        met["times overtaken"] = self.coverage["overtaken", "any"]
        for client in self.fronts.clients:
            met[f"client: {client.outcome}"] += 1
        met["clients"] = len(self.fronts.clients)
        met[f"K by {self.weather.num_drafts_mode}"] += 1
        met["pools unequal"] += len(set(self.weather.pools)) > 1
        met["several workers"] += len(workers) > 1
        met["tenants with shares"] += bool(self.config.tenant_weights)
        met["policy priority"] += self.config.scheduling_policy == "priority"
        return met
