"""Front ends, between the scheduler and their clients' streams.

A front end takes only tokens of the attempt it subscribed to, drops what was delivered already, submits again
(attempt + 1, with all delivered tokens) when something is missing, and repeats a cancel that may be lost. Knows
nothing about workers.
"""

from typing import TYPE_CHECKING

from scheduler.events import (
    Cancelled,
    Command,
    EmitTokens,
    FinishRequest,
    FrontEndLost,
    RejectRequest,
    Submitted,
)
from scheduler.request import FinishReason, RejectCode
from tests.simulate.clients import Authors, Client, Prompt
from tests.simulate.records import Attempt
from tests.simulate.toy import Violation
from tests.simulate.weather import MS

if TYPE_CHECKING:
    from tests.simulate.world import World

PATIENCE_NS = 250 * MS  # on a bad link; doubled with every resubmission


class FrontEnds:
    """All of them, and all clients there ever were."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.authors = Authors(world.weather, world.rng)
        self.clients: list[Client] = []
        self.open: list[Client] = []
        self.attempts: dict[int, Attempt] = {}  # stream -> what the scheduler was told
        self._client_of: dict[int, Client] = {}
        self._num_streams = 0
        self._names = [f"f{index}" for index in range(world.weather.num_front_ends)]
        self._lost: set[str] = set()
        self._is_reliable = world.weather.front_link.ordered

    def any(self) -> str:
        """One by chance."""
        return self.world.rng.choice(self._names)

    # ---- to and from the scheduler ----

    def hear(self, command: EmitTokens | FinishRequest | RejectRequest) -> None:
        """The scheduler's word to a front end, as the network pleases."""
        fate = self.world.links.send(self.world.weather.front_link, ("answer", command.front_end))
        for delay in fate.delays:
            self.world.clock.after(delay, self._heard, command)

    def _heard(self, command: Command) -> None:
        match command:
            case EmitTokens() if command.front_end not in self._lost:
                self._on_tokens(command)
            case FinishRequest() if command.front_end not in self._lost:
                self._on_finished(command)
            case RejectRequest() if command.front_end not in self._lost:
                self._on_rejected(command)

    def _call(self, client: Client, event: Submitted | Cancelled) -> None:
        fate = self.world.links.send(self.world.weather.front_link, ("call", client.front_end))
        for delay in fate.delays:
            self.world.clock.after(delay, self._called, event)

    def _called(self, event: Submitted | Cancelled) -> None:
        if isinstance(event, Submitted) and event.request.front_end in self._lost:
            return
        self.world.handle(event)

    # ---- a stream ----

    def begin(self, prompt: Prompt, front_end: str) -> None:
        """A client opens a stream."""
        if self.world.is_clearing:
            return
        if front_end in self._lost:
            front_end = self.any()
        client = Client(prompt, front_end, PATIENCE_NS)
        hosts = self.world.hosts
        hosts.salts[prompt.request_id] = prompt.salt
        if prompt.is_poison:
            hosts.poisoned.add(prompt.request_id)
        else:
            hosts.poisoned.discard(prompt.request_id)
        self.clients.append(client)
        self.open.append(client)
        self._submit(client)

    def _submit(self, client: Client) -> None:
        self._num_streams += 1
        client.stream = self._num_streams
        client.last_heard_ns = self.world.clock.now_ns
        request = client.request(client.stream)
        self._client_of[client.stream] = client
        self.attempts[client.stream] = Attempt(request, client.versions)
        self._call(client, Submitted(request=request))

    def resubmit(self, client: Client, why: str) -> None:
        """Ask again for what is missing, under a higher attempt."""
        if client.outcome is not None:
            return
        self.world.met[f"resubmitted: {why}"] += 1
        client.attempt += 1
        client.num_resubmissions += 1
        client.patience_ns = PATIENCE_NS << min(client.num_resubmissions, 8)
        self._submit(client)

    def _close(self, client: Client, outcome: str) -> None:
        client.outcome = outcome
        self.open.remove(client)
        if outcome in (FinishReason.STOP.value, FinishReason.LENGTH.value):
            self.authors.remember(client.prompt, client.token_ids)

    def _subscribed(self, stream: int, attempt: int) -> Client | None:
        """The gate: the client, if this is the attempt that its front end listens to."""
        client = self._client_of[stream]
        if client.outcome is None and client.stream == stream and client.attempt == attempt:
            client.last_heard_ns = self.world.clock.now_ns
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
                self.cancel(client)

    def _unwanted(self, stream: int, attempt: int) -> None:
        """Tokens nobody reads: tell the scheduler (again) that the client left, unless a newer attempt lives."""
        client = self._client_of[stream]
        if client.outcome is not None and self.world.rng.random() < 0.5:
            self.world.met["unwanted tokens"] += 1
            self._call(client, Cancelled(request_id=client.prompt.request_id, attempt=attempt))

    def _missing(self, client: Client, why: str) -> None:
        if self._is_reliable and client.attempt == 0:
            raise Violation(f"{why} on a reliable link", client.prompt.request_id)
        self.resubmit(client, why)

    def _on_finished(self, command: FinishRequest) -> None:
        client = self._subscribed(command.stream, command.attempt)
        if client is None:
            return
        if len(client.token_ids) < command.num_output_tokens:
            self._missing(client, "end before its tokens")
        elif command.reason is FinishReason.ABORT:
            self.resubmit(client, "aborted by a stranger")
        else:
            self._close(client, command.reason.value)
            if command.reason is FinishReason.ERROR and self.world.rng.random() < 0.7:
                self.world.met["tried again after an error"] += 1
                self.world.clock.after(MS, self.begin, self.authors.repeat(client.prompt), client.front_end)

    def _on_rejected(self, command: RejectRequest) -> None:
        client = self._subscribed(command.stream, command.attempt)
        if client is None:
            return
        if command.code is RejectCode.INVALID_ARGUMENT:
            self._close(client, "rejected")
            return
        self.world.met[f"rejected: {command.code.value}"] += 1
        client.num_rejections += 1
        delay_ns = self.world.rng.randint(10, 30) * MS << min(client.num_rejections, 5)
        self.world.clock.after(delay_ns, self._retry, client, command.stream)

    def _retry(self, client: Client, stream: int) -> None:
        if client.outcome is None and client.stream == stream:
            self._submit(client)

    def cancel(self, client: Client) -> None:
        """The client leaves. Sometimes its id is used again at once."""
        rng, clock = self.world.rng, self.world.clock
        self.world.met["cancelled"] += 1
        self._close(client, "cancelled")
        event = Cancelled(request_id=client.prompt.request_id, attempt=client.attempt)
        self._call(client, event)
        if not self._is_reliable:
            clock.after(40 * MS, self._call, client, event)
        if rng.random() < 0.4:
            self.world.met["id used again"] += 1
            prompt = self.authors.write(clock.now_ns, client.prompt.request_id, client.prompt.salt)
            clock.after(rng.choice((0, 1, 10)) * MS, self.begin, prompt, client.front_end)

    # ---- all streams ----

    def lose_patience(self) -> None:
        """On a bad link: ask again where nothing was heard for long."""
        if self.world.is_clearing:
            return
        if not self._is_reliable:
            now_ns = self.world.clock.now_ns
            for client in list(self.open):
                if now_ns - client.last_heard_ns > client.patience_ns:
                    self.resubmit(client, "silence")
        self.world.clock.after(40 * MS, self.lose_patience)

    def resubmit_all(self, why: str, within_ns: int) -> None:
        """Every open stream is asked for again, by and by."""
        for client in list(self.open):
            self.world.clock.after(self.world.rng.randint(1, within_ns // MS) * MS, self.resubmit, client, why)

    def lose_one(self) -> None:
        """A front end dies; its clients come back through another one with what they hold."""
        rng, clock = self.world.rng, self.world.clock
        index = rng.randrange(len(self._names))
        gone = self._names[index]
        self._lost.add(gone)
        self._names[index] = f"{gone}'"
        for client in self.open:
            if client.front_end == gone:
                client.front_end = self.any()
                clock.after(rng.randint(1, 30) * MS, self.resubmit, client, "front end lost")
        clock.after(rng.randint(1, 60) * MS, self.world.handle, FrontEndLost(front_end=gone))

    def ask_again_when_clear(self) -> None:
        """What a bad link may have swallowed is asked for once more, when nothing old is on its way."""
        if not self._is_reliable:
            self.world.clock.after(400 * MS, self._ask_again)

    def _ask_again(self) -> None:
        for client in list(self.open):
            self.resubmit(client, "weather cleared")
