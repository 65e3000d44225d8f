"""Workers and their way to the scheduler: sessions, plans, results, crashes, partitions, drains.

The queue around each fake worker is the real one. Knows nothing about clients.
"""

from collections import deque
from typing import TYPE_CHECKING

from scheduler.events import DrainRequested, StepFailed, StepFinished, WorkerDown, WorkerUp
from scheduler.step import StepPlan, StepResult
from tests.simulate.weather import MS
from tests.simulate.worker import ShadowWorker, StepCrash, WorkerCrash
from worker.session import SessionQueue, StaleSession, StepError

if TYPE_CHECKING:
    from tests.simulate.world import World

NOTICED_AFTER_NS = 60 * MS  # a partition that lasts longer is a lost worker


class Host:
    """Where one worker runs."""

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


class Hosts:
    """All of them."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.salts: dict[str, int] = {}  # request_id -> cache salt
        self.poisoned: set[str] = set()  # request ids that kill their worker
        self._num_sessions = 0
        self.all = [Host(index, self._worker(index)) for index in range(len(world.weather.pools))]

    def named(self, worker_id: str) -> Host:
        """By its worker's id."""
        return self.all[int(worker_id[1:])]

    def any(self) -> Host:
        """One by chance."""
        return self.world.rng.choice(self.all)

    def _worker(self, index: int) -> ShadowWorker:
        weather = self.world.weather
        return ShadowWorker(
            worker_id=f"w{index}",
            num_blocks=weather.pools[index],
            block_size=weather.config.block_size,
            max_num_seqs=weather.max_num_seqs,
            max_drafts=weather.worker_drafts[index],
            drop_last_hit_block=weather.drop_last_hit_block[index],
            max_num_batched_tokens=weather.config.max_num_batched_tokens,
            faults=weather.faults,
            rng=self.world.rng,
            salts=self.salts,
            poisoned=self.poisoned,
        )

    # ---- plans and results ----

    def send_plan(self, worker_id: str, plan: StepPlan) -> None:
        """From the scheduler to a worker, as the network pleases."""
        host = self.named(worker_id)
        fate = self.world.links.send(self.world.weather.worker_link, ("plan", worker_id))
        for how in fate.names:
            self._meet(how, plan.session, plan.step_seq)
        for delay in fate.delays:
            self.world.clock.after(delay, self._plan_arrived, host, plan)
        self._replay_old_result(host, plan)

    def _meet(self, how: str, session: int, step_seq: int) -> None:
        """Count what kinds of frames a message of a step carried when something happened to it."""
        for known in self.world.ledger.sessions.values():
            if known.up.session == session:
                for kind in known.in_flight.get(step_seq, {}).values():
                    self.world.coverage[how, kind] += 1

    def _replay_old_result(self, host: Host, plan: StepPlan) -> None:
        """A result of an older session turns up just when its number is in flight again."""
        world = self.world
        if world.is_clearing or not host.old_results or world.rng.random() >= world.weather.replays:
            return
        for result in host.old_results:
            if result.step_seq == plan.step_seq and result.session != plan.session:
                world.met["old session's result"] += 1
                self._meet("old session's result", plan.session, plan.step_seq)
                world.clock.after(world.rng.randint(0, world.weather.step_ns), self._result_arrived, host, result)
                return

    def _plan_arrived(self, host: Host, plan: StepPlan) -> None:
        if host.down or host.partitioned:
            return
        try:
            results = host.queue.offer(plan)
        except StaleSession:
            self.world.met["plan refused"] += 1
            return
        except StepError as failure:
            self._step_failed(host, failure)
            return
        for result in results:
            self._send_result(host, result)

    def _step_failed(self, host: Host, failure: StepError) -> None:
        world, cause = self.world, failure.__cause__
        if isinstance(cause, WorkerCrash):
            world.met["poison"] += 1
            self.crash(host)
            return
        if not isinstance(cause, StepCrash):
            raise cause or failure
        world.met["step failed"] += 1
        event = StepFailed(
            worker_id=host.worker_id, session=failure.session, step_seq=failure.step_seq, message="step failed"
        )
        for delay in world.links.send(world.weather.worker_link, ("result", host.worker_id)).delays:
            world.clock.after(delay, self._failure_arrived, host, event)
        self._register_soon(host, world.rng.randint(5, 40) * MS)

    def _failure_arrived(self, host: Host, event: StepFailed) -> None:
        if not host.partitioned:
            self.world.handle(event)

    def _send_result(self, host: Host, result: StepResult) -> None:
        world = self.world
        now_ns = world.clock.now_ns
        host.busy_until_ns = max(host.busy_until_ns, now_ns)
        if host.last_run < (result.session, result.step_seq):  # else a plan was repeated, and is only answered again
            host.last_run = result.session, result.step_seq
            host.busy_until_ns += int(world.weather.step_ns * host.slowness * world.rng.uniform(0.5, 1.5))
        if host.slowness > 1:
            self._meet("slow worker", result.session, result.step_seq)
        fate = world.links.send(world.weather.worker_link, ("result", host.worker_id))
        for how in fate.names:
            self._meet(how, result.session, result.step_seq)
        for delay in fate.delays:
            world.clock.after(host.busy_until_ns - now_ns + delay, self._result_arrived, host, result)
        host.old_results.append(result)

    def _result_arrived(self, host: Host, result: StepResult) -> None:
        """Old results may arrive whatever has become of the worker; a partition swallows those of now."""
        if host.partitioned and result.session == host.worker.session:
            return
        self.world.handle(StepFinished(result=result))

    # ---- sessions ----

    def register_all(self) -> None:
        """A new scheduler: every worker finds it by and by."""
        for host in self.all:
            host.registering = False
            self._register_soon(host, 3 * MS)

    def reconnect(self, host: Host) -> None:
        """It registers anew, for whatever reason."""
        self._register_soon(host, 1)

    def _register_soon(self, host: Host, delay_ns: int) -> None:
        if not host.registering:
            host.registering = True
            self.world.clock.after(delay_ns, self._register, host, self.world.life)

    def _register(self, host: Host, life: int) -> None:
        """A new session through the worker's own queue, then the scheduler hears of it."""
        if life != self.world.life:
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
            fingerprint=self.world.weather.fingerprints[host.index],
            drop_last_hit_block=worker.drop_last_hit_block,
        )
        self.world.clock.after(self.world.rng.randint(0, 3 * MS), self._registered, host, event, life)

    def _registered(self, host: Host, event: WorkerUp, life: int) -> None:
        if life == self.world.life and host.worker.session == event.session:
            self.world.handle(event)

    def session_closed(self, worker_id: str, session: int) -> None:
        """The scheduler wants nothing of this session any more."""
        host = self.named(worker_id)
        if host.worker.session == session and not host.down:
            self.world.met["session closed"] += 1
            self._register_soon(host, 2 * MS)

    # ---- what may happen to one ----

    def crash(self, host: Host) -> None:
        """It dies with its rows and weights, and comes back; the failure detector may be late, or say nothing."""
        if host.down:
            return
        rng, clock = self.world.rng, self.world.clock
        host.down = True
        host.worker.version = 0
        host.queue = SessionQueue(host.worker)
        back_ns = rng.randint(3, 80) * MS
        if rng.random() < 0.7:
            clock.after(rng.randint(1, 100) * MS, self._lost, host, host.worker.session, self.world.life)
        clock.after(back_ns, self._come_back, host)

    def _lost(self, host: Host, session: int, life: int) -> None:
        if life == self.world.life:
            self.world.handle(WorkerDown(worker_id=host.worker_id, session=session, message="lost"))

    def _come_back(self, host: Host) -> None:
        host.down = False
        self._register_soon(host, 1)

    def cut_off(self, host: Host) -> None:
        """A partition; a short one heals unnoticed."""
        host.partitioned = True
        lasts_ns = self.world.rng.randint(5, 120) * MS
        is_noticed = lasts_ns > NOTICED_AFTER_NS
        if is_noticed:
            self.world.clock.after(NOTICED_AFTER_NS, self._lost, host, host.worker.session, self.world.life)
        self.world.clock.after(lasts_ns, self._heal, host, is_noticed)

    def _heal(self, host: Host, is_noticed: bool) -> None:
        if not host.partitioned:
            return
        host.partitioned = False
        if is_noticed or host.unregistered:
            self._register_soon(host, 1)

    def drain(self, host: Host) -> None:
        """It takes no new requests; after its deadline it comes back as if new."""
        host.draining = True
        wait_ns = self.world.rng.randint(0, 60) * MS
        deadline_ns = self.world.clock.now_ns + wait_ns
        self.world.handle(DrainRequested(worker_id=host.worker_id, deadline_ns=deadline_ns))
        self.world.clock.after(wait_ns + self.world.rng.randint(20, 80) * MS, self._end_drain, host)

    def _end_drain(self, host: Host) -> None:
        if host.draining and not host.down:
            self._register_soon(host, 1)

    def heal_all(self) -> None:
        """Good weather: nobody is slow, cut off or draining any more."""
        for host in self.all:
            host.slowness = 1
            host.busy_until_ns = min(host.busy_until_ns, self.world.clock.now_ns + 100 * MS)
            self._heal(host, is_noticed=True)
            self._end_drain(host)
