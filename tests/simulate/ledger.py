"""What the scheduler said, checked at its mouth: every command against what it was told before.

Knows each attempt's true continuation, each session's frames in flight and who waits behind whom. Also
counts what met which kind of frame in flight. One ledger belongs to one life of the scheduler.
"""

from collections import Counter
from typing import assert_never

from scheduler.events import (
    CacheReset,
    CacheWatched,
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
    SchedulerConfig,
    StartStep,
    StepFailed,
    StepFinished,
    Submitted,
    SwapRequested,
    TellCacheChanges,
    Tick,
    WorkerDown,
    WorkerUp,
)
from scheduler.request import FinishReason, RejectCode, Request
from scheduler.step import StepPlan, StepResult
from tests.simulate.records import Attempt, Session
from tests.simulate.toy import Violation, ending, extend, next_token

# Requests that came later and were admitted first, elsewhere, while an older one waited for the worker chosen for
# it: at most this many and a full batch, per other worker that could hold it. With one such worker nobody is ever
# overtaken; those admitted where it could never run take nothing from it.
MAX_OVERTAKEN_PER_WORKER = 12


class Ledger:
    """`before` and `after` surround every Scheduler.handle."""

    def __init__(
        self, config: SchedulerConfig, coverage: Counter[tuple[str, str]], attempts: dict[int, Attempt]
    ) -> None:
        self.config = config
        self.coverage = coverage
        self.attempts = attempts  # stream -> attempt, of every life
        self.live: dict[str, Attempt] = {}
        self.ended: set[int] = set()  # streams that ended in this life: a copy of their submission is nothing new
        self.sessions: dict[str, Session] = {}  # worker_id -> current session
        self.version = 0  # of the weights last asked for
        self.swapped = False
        self.version_before = 0  # of the session whose result is handled now, before it
        self.now_ns = 0
        self.explained: dict[int, str] = {}  # epoch -> why it had to leave its worker
        self.attempt_of: dict[int, Attempt] = {}  # every epoch so far
        self.leaving: set[int] = set()  # epochs released by the commands at hand
        self.num_arrivals = 0
        self.must_finish: dict[int, Attempt] = {}  # streams whose tokens are complete
        self.num_output_tokens = 0
        self.num_hit_tokens = 0
        self.num_applied = 0  # results by the event at hand
        self.num_cut_runs = 0  # runs of tokens that a stop ended before their last

    # ---- before an event: what does it meet in flight? ----

    def before(self, event: Event) -> None:
        """Count the frames in flight that this event turns into something else."""
        match event:
            case CacheReset():
                self._meet_all("reset_running" if event.reset_running else "reset", explains=event.reset_running)
            case PreemptRequested():
                self._meet_request(event.request_id, "preempt")
            case Cancelled():
                attempt = self.live.get(event.request_id)
                if attempt is not None and attempt.request.attempt == event.attempt:
                    self._meet_request(event.request_id, "cancelled")
            case WorkerDown() | StepFailed() | WorkerUp():
                self._before_loss(event)
            case StepFinished():
                self._before_result(event)
            case Tick():
                self._before_tick(event)
            case Submitted() | FrontEndLost() | DrainRequested() | SwapRequested() | CacheWatched():
                pass
            case _:
                assert_never(event)

    def _before_loss(self, event: WorkerDown | StepFailed | WorkerUp) -> None:
        session = self.sessions.get(event.worker_id)
        if session is None:
            return
        if isinstance(event, WorkerUp):
            self._lose(session, "worker back in a new session")
        elif session.up.session == event.session:
            self._lose(session, "worker lost" if isinstance(event, WorkerDown) else "step failed")

    def _before_result(self, event: StepFinished) -> None:
        result = event.result
        session = self.sessions.get(result.worker_id)
        if session is None or session.up.session != result.session or result.step_seq not in session.in_flight:
            self.coverage["stale result", "any"] += 1
            return
        self.version_before = session.version or 0
        self._before_application(session, result)
        if result.step_seq in session.received:
            self.coverage["result repeated", "any"] += 1

    def _before_application(self, session: Session, result: StepResult) -> None:
        """Count the drafts and the failed rows of the results that are applied now, in step_seq order."""
        session.results.setdefault(result.step_seq, result)
        step_seq = min(session.in_flight)
        self.num_applied = 0
        while step_seq in session.results:
            self.num_applied += 1
            applied = session.results.pop(step_seq)
            for failure in applied.failures:
                attempt = self.attempt_of[failure.epoch]  # perhaps preempted since: its frames deliver
                if failure.epoch not in self.explained and attempt.closed is None:
                    attempt.row_failed = True
                    self._meet(session, failure.epoch, "row failed")
                    self.explained[failure.epoch] = "row failed"
            failed = {failure.epoch for failure in applied.failures}
            columns = (applied.epochs.tolist(), applied.num_tokens.tolist(), applied.num_verified.tolist())
            for epoch, num_tokens, num_verified in zip(*columns, strict=True):
                attempt = self.attempt_of[epoch]
                if attempt.closed is None and epoch not in failed and epoch not in self.explained:
                    attempt.num_drafts += num_verified
                    attempt.num_accepted += max(num_tokens - 1, 0)
            step_seq += 1

    def _before_tick(self, event: Tick) -> None:
        self.now_ns = event.now_ns
        for session in self.sessions.values():
            if session.drain_deadline_ns is not None and session.drain_deadline_ns <= event.now_ns:
                self._drop_all(session, "drain")
        for attempt in self.live.values():
            deadline = attempt.request.deadline_ns
            if deadline is not None and deadline <= event.now_ns:
                self._meet_request(attempt.request.request_id, "deadline")

    def _lose(self, session: Session, how: str) -> None:
        for epoch, attempt in session.epochs.items():
            if attempt.epoch != epoch or attempt.closed is not None:
                continue
            self._meet(session, epoch, how)
            attempt.epoch = None
            attempt.num_lost += epoch not in self.explained
        del self.sessions[session.up.worker_id]

    def _meet_all(self, how: str, *, explains: bool) -> None:
        for session in self.sessions.values():
            if explains:
                self._drop_all(session, how)
            else:
                for epoch in session.epochs:
                    self._meet(session, epoch, how)

    def _drop_all(self, session: Session, how: str) -> None:
        """Every epoch seated or still delivering has to go, unless it had to before."""
        flying = {epoch for frames in session.in_flight.values() for epoch in frames}
        for epoch in sorted(flying | session.epochs.keys()):
            if epoch not in self.explained:
                self._meet(session, epoch, how)
                self.explained[epoch] = how

    def _meet_request(self, request_id: str, how: str) -> None:
        attempt = self.live.get(request_id)
        if attempt is None or attempt.last_epoch is None or attempt.last_epoch in self.explained:
            return
        for session in self.sessions.values():
            self._meet(session, attempt.last_epoch, how)
        self.explained[attempt.last_epoch] = how

    def _meet(self, session: Session, epoch: int, how: str) -> None:
        for frames in session.in_flight.values():
            kind = frames.get(epoch)
            if kind is not None:
                self.coverage[how, kind] += 1

    # ---- after an event: was the answer right? ----

    def after(self, event: Event, commands: list[Command]) -> None:
        """Check every command in order, then what must have happened by now."""
        match event:
            case Submitted():
                self._submitted(event.request, commands)
            case WorkerUp():
                self.sessions[event.worker_id] = Session(event)
            case SwapRequested():
                self.version, self.swapped = int(event.weights), True
            case FrontEndLost():
                for attempt in list(self.live.values()):
                    if attempt.request.front_end == event.front_end:
                        self._close(attempt, "reader lost")
            case DrainRequested() if event.worker_id in self.sessions:
                self.sessions[event.worker_id].drain_deadline_ns = event.deadline_ns
        # A request may leave one worker and arrive on another in one go, told in any order.
        plans = [command.plan for command in commands if isinstance(command, StartStep)]
        self.leaving = {epoch for plan in plans for epoch in plan.released_epochs.tolist()}
        for command in commands:
            match command:
                case EmitTokens():
                    self._emitted(event, command)
                case FinishRequest():
                    self._finished(event, command)
                case StartStep():
                    self._started(command)
                case RejectRequest() | CloseSession() | TellCacheChanges():
                    pass
                case _:
                    assert_never(command)
        self._settle(event)
        self._must_have_happened(event)
        self._must_not_idle()

    def _settle(self, event: Event) -> None:
        """Results are applied in step_seq order: forget the frames of those applied now."""
        if not isinstance(event, StepFinished):
            return
        session = self.sessions.get(event.result.worker_id)
        if session is None or session.up.session != event.result.session:
            return
        if event.result.step_seq in session.in_flight:
            session.received.add(event.result.step_seq)
        for step_seq in sorted(session.in_flight):
            if step_seq not in session.received:
                break
            session.received.discard(step_seq)
            del session.in_flight[step_seq]

    def _must_have_happened(self, event: Event) -> None:
        if self.must_finish:
            stream, attempt = next(iter(self.must_finish.items()))
            raise Violation(f"stream {stream} is complete and was not finished", attempt.request.request_id)
        match event:
            case Tick():
                for attempt in self.live.values():
                    deadline = attempt.request.deadline_ns
                    if deadline is not None and deadline <= event.now_ns:
                        raise Violation("alive past its deadline", attempt.request.request_id)
            case Cancelled():
                alive = self.live.get(event.request_id)
                if alive is not None and alive.request.attempt == event.attempt:
                    raise Violation("alive after its cancel", event.request_id)

    def _must_not_idle(self) -> None:
        """In a pipeline with room everybody seated has a frame; nobody waits for a worker that idles."""
        for session in self.sessions.values():
            if len(session.in_flight) >= self.config.max_steps_in_flight:
                continue
            flying = {epoch for frames in session.in_flight.values() for epoch in frames}
            for epoch, attempt in session.epochs.items():
                if epoch not in flying and attempt.epoch == epoch and attempt.closed is None:
                    raise Violation(f"idles on {session.up.worker_id}", attempt.request.request_id)
        if len(self.sessions) == 1 and not session.epochs and not session.in_flight:
            for attempt in self.live.values():
                if self._could_run(attempt):
                    raise Violation("waits although the worker is idle", attempt.request.request_id)

    def _submitted(self, request: Request, commands: list[Command]) -> None:
        """Decide whether the submission was taken, and follow it."""
        if request.stream in self.ended:
            self.coverage["submission repeated after its end", "any"] += 1
            if commands:
                raise Violation("a copy of a submission was answered after its end", request.request_id)
            return
        alive = self.live.get(request.request_id)
        rejection = next(
            (one for one in commands if isinstance(one, RejectRequest) and one.stream == request.stream), None
        )
        if rejection is not None:
            self._check_rejection(request, rejection, alive)
            return
        if alive is not None:
            if alive.request.attempt >= request.attempt:
                if alive.request.stream != request.stream:
                    raise Violation(f"attempt {request.attempt} waits in vain for a later one", request.request_id)
                return
            self._meet_request(request.request_id, "replaced")
            self._close(alive, "replaced")
        attempt = self.attempts[request.stream]
        if request.attempt and ending(request, attempt.token_ids, self.config.max_model_len) is not None:
            self.coverage["submitted complete", "any"] += 1
        if attempt.closed is not None:  # a copy of a submission to an earlier life, where it ended: it lives once more
            attempt = Attempt(request, attempt.versions[: len(request.resume_token_ids)])
            self.attempts[request.stream] = attempt
        self.num_arrivals += 1
        attempt.arrival = self.num_arrivals
        self.live[request.request_id] = attempt
        if ending(request, attempt.token_ids, self.config.max_model_len) is not None:
            self.must_finish[request.stream] = attempt

    def _check_rejection(self, request: Request, rejection: RejectRequest, alive: Attempt | None) -> None:
        total = len(request.prompt_token_ids) + request.max_tokens
        match rejection.code:
            case RejectCode.ALREADY_EXISTS:
                right = (
                    alive is not None
                    and request.attempt <= alive.request.attempt
                    and request.stream != alive.request.stream
                )
            case RejectCode.RESOURCE_EXHAUSTED:
                num_waiting = sum(
                    attempt.epoch is None or attempt.epoch in self.explained for attempt in self.live.values()
                )
                right = num_waiting >= self.config.max_waiting
            case RejectCode.INVALID_ARGUMENT:
                blocks = -(-min(total, self.config.max_model_len) // self.config.block_size)
                right = total > self.config.max_model_len or blocks > self.config.largest_pool_blocks
            case RejectCode.UNAVAILABLE:
                right = all(session.drain_deadline_ns is not None for session in self.sessions.values())
        if not right:
            raise Violation(f"wrongly rejected: {rejection.code} {rejection.message}", request.request_id)

    def _emitted(self, event: Event, command: EmitTokens) -> None:
        version = self._version_of(event)
        start = 0
        columns = (command.streams, command.attempts, command.offsets, command.num_tokens)
        token_ids: list[int] = command.token_ids.tolist()
        for stream, number, offset, count in zip(*(column.tolist() for column in columns), strict=True):
            attempt = self.attempts.get(stream)
            if attempt is None:
                raise Violation(f"tokens for a stream {stream} that never was")
            who = attempt.request.request_id
            if attempt.closed is not None:
                raise Violation(f"tokens for stream {stream} after its end ({attempt.closed})", who)
            if attempt.request.attempt != number or attempt.request.front_end != command.front_end:
                raise Violation(f"tokens for stream {stream} under the wrong name", who)
            if offset != len(attempt.token_ids):
                raise Violation(f"tokens at offset {offset}, {len(attempt.token_ids)} came before", who)
            if count < 1:
                raise Violation(f"no tokens for stream {stream}", who)
            self._append(stream, attempt, token_ids[start : start + count], version)
            start += count
        if start != len(token_ids):
            raise Violation("token_ids and num_tokens disagree")

    def _version_of(self, event: Event) -> int:
        """The weights that tokens emitted for this event were sampled under."""
        if not isinstance(event, StepFinished):
            raise Violation(f"tokens emitted on {type(event).__name__}")
        session = self.sessions.get(event.result.worker_id)
        if session is None or session.up.session != event.result.session:
            raise Violation("tokens emitted for a result of another session")
        return self.version_before

    def _append(self, stream: int, attempt: Attempt, token_ids: list[int], version: int) -> None:
        request = attempt.request
        who = request.request_id
        if attempt.versions and attempt.versions[-1] > version:
            raise Violation(f"sampled under older weights {version} than before {attempt.versions[-1]}", who)
        prefix = attempt.last_hash
        for token in token_ids:
            if stream in self.must_finish:
                raise Violation("tokens past the end", who)
            masked = len(attempt.token_ids) < request.sampling.min_tokens
            expected = next_token(prefix, version, request.sampling.seed, attempt.ends, masked)
            if token != expected:
                raise Violation(
                    f"stream {stream} offset {len(attempt.token_ids)}: token {token}, the model says {expected} "
                    f"(weights {version})",
                    who,
                )
            prefix = extend(prefix, token)
            attempt.token_ids.append(token)
            attempt.versions.append(version)
            if ending(request, attempt.token_ids, self.config.max_model_len) is not None:
                self.must_finish[stream] = attempt
        attempt.last_hash = prefix
        attempt.last_run = len(token_ids)
        self.num_output_tokens += len(token_ids)

    def _finished(self, event: Event, command: FinishRequest) -> None:
        attempt = self.attempts.get(command.stream)
        if attempt is None:
            raise Violation(f"the end of a stream {command.stream} that never was", command.request_id)
        who = attempt.request.request_id
        if attempt.closed is not None:
            raise Violation(f"ended ({command.reason}) after its end ({attempt.closed})", who)
        request = attempt.request
        if (command.request_id, command.attempt, command.front_end) != (who, request.attempt, request.front_end):
            raise Violation(f"ended under the wrong name {command}", who)
        if command.num_output_tokens != len(attempt.token_ids):
            raise Violation(f"ended with {command.num_output_tokens} outputs of {len(attempt.token_ids)}", who)
        if command.num_prompt_tokens != len(request.prompt_token_ids):
            raise Violation(f"ended with a prompt of {command.num_prompt_tokens}", who)
        if command.inexact != (len(attempt.fingerprints) > 1):
            raise Violation(f"inexact={command.inexact} on workers with numbers {attempt.fingerprints}", who)
        if command.num_cached_tokens != (attempt.num_first_hit or 0):
            raise Violation(f"{command.num_cached_tokens} cached tokens, {attempt.num_first_hit} at first", who)
        self._check_acceptance(event, command, attempt)
        self._check_reason(event, command, attempt)
        self._count_cut(event, attempt)
        if attempt.epoch is not None:
            for session in self.sessions.values():
                self._meet(session, attempt.epoch, f"finished ({command.reason.value})")
            self.explained.setdefault(attempt.epoch, "finished")
        self.must_finish.pop(command.stream, None)
        self._close(attempt, command.reason.value)

    def _count_cut(self, event: Event, attempt: Attempt) -> None:
        """Was the run of tokens that ended this request longer than what was kept of it?"""
        if isinstance(event, StepFinished) and attempt.epoch in event.result.epochs:
            [index] = (event.result.epochs == attempt.epoch).nonzero()[0].tolist()
            self.num_cut_runs += int(event.result.num_tokens[index]) > attempt.last_run

    def _check_acceptance(self, event: Event, command: FinishRequest, attempt: Attempt) -> None:
        """Drafts verified and accepted are those of applied frames that were live or delivered, of no other."""
        counted = command.num_draft_tokens, command.num_accepted_tokens
        truly = attempt.num_drafts, attempt.num_accepted
        # Of several results applied at once, those after its end were dropped, which is not seen from here.
        certain = not isinstance(event, StepFinished) or self.num_applied == 1
        if certain and counted != truly:
            raise Violation(f"{counted} drafts verified and accepted, truly {truly}", command.request_id)

    def _check_reason(self, event: Event, command: FinishRequest, attempt: Attempt) -> None:
        request, reason = attempt.request, command.reason
        truly = ending(request, attempt.token_ids, self.config.max_model_len)
        match reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                right = reason is truly
            case FinishReason.ABORT:
                right = isinstance(event, Cancelled) and event.request_id == request.request_id
            case FinishReason.DEADLINE:
                right = request.deadline_ns is not None and request.deadline_ns <= self.now_ns
            case FinishReason.ERROR:
                right = attempt.row_failed or attempt.num_lost > self.config.max_attempts
        if not right:
            raise Violation(f"ended with {reason}, truly {truly}: {command.message}", request.request_id)
        stop_token_id = None
        if reason is FinishReason.STOP and attempt.token_ids[-1] in request.sampling.stop_token_ids:
            stop_token_id = attempt.token_ids[-1]
        if command.stop_token_id != stop_token_id:
            raise Violation(f"stop id {command.stop_token_id}, truly {stop_token_id}", request.request_id)

    def _close(self, attempt: Attempt, how: str) -> None:
        attempt.closed = how
        self.ended.add(attempt.request.stream)
        self.must_finish.pop(attempt.request.stream, None)
        if self.live.get(attempt.request.request_id) is attempt:
            del self.live[attempt.request.request_id]

    # ---- plans ----

    def _started(self, command: StartStep) -> None:
        plan = command.plan
        session = self.sessions.get(command.worker_id)
        if session is None or session.up.session != plan.session:
            raise Violation(f"a plan for session {plan.session} of {command.worker_id}, which is not current")
        if plan.step_seq < session.next_step_seq:
            self._sent_again(session, plan)
            return
        if plan.step_seq != session.next_step_seq:
            raise Violation(f"{command.worker_id}: step {plan.step_seq} after {session.next_step_seq - 1}")
        if plan.step_seq - plan.acknowledged > self.config.max_steps_in_flight:
            raise Violation(f"{command.worker_id}: step {plan.step_seq} with {plan.acknowledged} acknowledged")
        session.next_step_seq += 1
        for step_seq in [number for number in session.plans if number <= plan.acknowledged]:
            del session.plans[step_seq]
        session.plans[plan.step_seq] = plan
        if plan.weights is not None:
            session.version = int(plan.weights)
            self._drop_all(session, "swap")
        if self.swapped and session.version != self.version:
            raise Violation(f"{command.worker_id}: planned under weights {session.version}, not {self.version}")
        self._released(session, plan)
        self._arrived(session, plan)
        self._frames(session, plan)

    def _sent_again(self, session: Session, plan: StepPlan) -> None:
        first = session.plans.get(plan.step_seq)
        if first is None:
            raise Violation(f"step {plan.step_seq} sent again after it was acknowledged")
        same = first.rows is plan.rows or (
            first.rows.tolist() == plan.rows.tolist()
            and first.epochs.tolist() == plan.epochs.tolist()
            and first.reserved.tolist() == plan.reserved.tolist()
            and first.block_ids.tolist() == plan.block_ids.tolist()
        )
        if not same:
            raise Violation(f"step {plan.step_seq} sent again as another one")
        for kind in session.in_flight.get(plan.step_seq, {}).values():
            self.coverage["plan sent again", kind] += 1

    def _released(self, session: Session, plan: StepPlan) -> None:
        for epoch in plan.released_epochs.tolist():
            attempt = session.epochs.get(epoch)
            if attempt is None:
                raise Violation(f"epoch {epoch} released, which is not on {session.up.worker_id}")
            if attempt.closed is None and attempt.epoch == epoch:
                attempt.epoch = None
                if epoch not in self.explained:
                    self._meet(session, epoch, "out of blocks")
            del session.epochs[epoch]

    def _arrived(self, session: Session, plan: StepPlan) -> None:
        for arrival in plan.arrivals:
            attempt = self.live.get(arrival.request_id)
            who = arrival.request_id
            if attempt is None:
                raise Violation("arrives on a worker after its end", who)
            if session.drain_deadline_ns is not None:
                raise Violation(f"arrives on {session.up.worker_id}, which drains", who)
            if arrival.epoch in self.attempt_of:
                raise Violation(f"epoch {arrival.epoch} used again", who)
            if attempt.epoch is not None and attempt.epoch not in self.explained and attempt.epoch not in self.leaving:
                raise Violation(f"arrives while it runs in epoch {attempt.epoch}", who)
            if attempt.num_lost > self.config.max_attempts:
                raise Violation(f"tried again after it lost {attempt.num_lost} workers", who)
            if len(session.epochs) >= session.up.max_num_seqs:
                raise Violation(f"more than {session.up.max_num_seqs} rows taken", who)
            self.attempt_of[arrival.epoch] = attempt
            self._check_arrival(session, plan, attempt, arrival.epoch)
            if arrival.output_token_ids.tolist() != attempt.token_ids:
                raise Violation(f"arrives with {arrival.output_token_ids}, not {attempt.token_ids}", who)
            if arrival.prompt_token_ids.tolist() != attempt.request.prompt_token_ids.tolist():
                raise Violation("arrives with another prompt", who)
            total = len(attempt.request.prompt_token_ids) + attempt.request.max_tokens
            if arrival.end != min(total, self.config.max_model_len):
                raise Violation(f"arrives with end {arrival.end}", who)
            length = len(attempt.request.prompt_token_ids) + len(attempt.token_ids)
            if not 0 <= arrival.num_computed_tokens < length:
                raise Violation(f"arrives with {arrival.num_computed_tokens} of {length} computed", who)
            self.num_hit_tokens += arrival.num_computed_tokens
            if attempt.num_first_hit is None:
                attempt.num_first_hit = arrival.num_computed_tokens

    def _check_arrival(self, session: Session, plan: StepPlan, attempt: Attempt, epoch: int) -> None:
        """Seat the attempt; nobody who came before and could run here is left standing too often."""
        attempt.epoch = attempt.last_epoch = epoch
        attempt.overtaken = attempt.num_holders = 0
        if not attempt.token_ids:  # nothing depends on the numbers of an earlier worker
            attempt.fingerprints.clear()
        attempt.fingerprints.add(f"{session.up.fingerprint} {session.version}")
        session.epochs[epoch] = attempt
        for other in self.live.values():
            if other.epoch is None and other.arrival < attempt.arrival and self._goes_first(other, attempt, session):
                self._overtake(other, attempt, session)

    def _goes_first(self, other: Attempt, attempt: Attempt, session: Session) -> bool:
        """Whether `other`, who came before, had a right to be admitted here before `attempt`."""
        by_priority = self.config.scheduling_policy == "priority"
        if by_priority and other.request.priority > attempt.request.priority:
            return False
        if other.request.tenant != attempt.request.tenant:
            return False  # by their shares
        return self._could_hold(session, other)

    def _overtake(self, other: Attempt, attempt: Attempt, session: Session) -> None:
        holders = sum(self._could_hold(holder, other) for holder in self.sessions.values())
        other.num_holders = max(other.num_holders, holders)
        other.overtaken += 1
        self.coverage["overtaken", "any"] += 1
        if other.overtaken > (MAX_OVERTAKEN_PER_WORKER + session.up.max_num_seqs) * (other.num_holders - 1):
            raise Violation(
                f"{attempt.request.request_id} was admitted first, the {other.overtaken}th to do so",
                other.request.request_id,
            )

    def _could_run(self, attempt: Attempt) -> bool:
        """Whether some worker could."""
        return any(self._could_hold(session, attempt) for session in self.sessions.values())

    def _could_hold(self, session: Session, attempt: Attempt) -> bool:
        """Whether a worker takes requests and has a pool for all of this one."""
        total = len(attempt.request.prompt_token_ids) + attempt.request.max_tokens
        blocks = -(-min(total, self.config.max_model_len) // self.config.block_size)
        return session.up.num_blocks >= blocks and session.drain_deadline_ns is None

    def _frames(self, session: Session, plan: StepPlan) -> None:
        kinds = {}
        rows = zip(plan.epochs.tolist(), plan.num_drafts.tolist(), plan.reserved.tolist(), strict=True)
        for epoch, num_drafts, reserved in rows:
            attempt = session.epochs.get(epoch)
            if attempt is None:
                raise Violation(f"epoch {epoch} planned, which is not on {session.up.worker_id}")
            if attempt.closed is not None or attempt.epoch != epoch:
                raise Violation(f"epoch {epoch} planned after it was left", attempt.request.request_id)
            limit = attempt.request.max_drafts
            if num_drafts > (self.config.max_drafts if limit is None else min(limit, self.config.max_drafts)):
                raise Violation(f"{num_drafts} drafts planned, {limit} allowed", attempt.request.request_id)
            kinds[epoch] = "prefill chunk" if not reserved else "verify" if num_drafts else "decode"
        if session.drain_deadline_ns is not None and kinds and session.drain_deadline_ns <= self.now_ns:
            raise Violation(f"{session.up.worker_id} is planned after its drain deadline")
        session.in_flight[plan.step_seq] = kinds
