"""Killing a deployment's processes: which one, whether it counts, and when what was killed is back.

A kill counts only if it hit a process with at least one half-delivered stream. Works on processes of this
machine, by id, below the process that serves.
"""

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from cluster.client import Client
from cluster.errors import ConfigError
from cluster.processes import command_line, descendants, variable
from cluster.stress_load import Stream
from worker.actor import WORKER_VARIABLE

KINDS = ("worker", "scheduler", "frontend")
SEATED = re.compile(r"seated: worker (\S+) session")
GONE = re.compile(r"preempted|session \d+: |frames in flight|finished")
BACK_TIMEOUT_S = 60.0
POLL_S = 0.1
JUST_BEFORE_S = 0.1  # messages on their way still came


class Killer:
    """Kills one process after the other, each kind in its turn."""

    def __init__(
        self,
        *,
        root: int,
        clients: Sequence[Client],
        num_workers: int,
        kinds: Sequence[str],
        rng: random.Random,
        streams: Callable[[], Sequence[Stream]],
    ) -> None:
        """`root`: the process that serves; `streams`: those that are open."""
        self._root = root
        self._clients = clients
        self._num_workers = num_workers
        self._kinds = kinds
        self._rng = rng
        self._streams = streams
        self._turn = 0
        self.counted = dict.fromkeys(kinds, 0)
        self.kills: list[tuple[float, str]] = []  # when, on the monotonic clock, and what kind
        self.num_missed = 0  # hit nobody's stream
        self.longest_return_s = dict.fromkeys(kinds, 0.0)  # until all of it answered again

    async def kill_next(self) -> str | None:
        """What was killed; None where nothing worth it was found."""
        kind = self._kinds[self._turn % len(self._kinds)]
        victim = await self._victim(kind)
        if victim is None:
            return None
        pid, name, hit = victim
        sessions = await self._sessions()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        killed_s = time.monotonic()
        self.kills.append((killed_s, kind))
        if any(stream.is_half_delivered for stream in hit):
            self.counted[kind] += 1
        else:
            self.num_missed += 1
        for stream in hit:
            stream.log.append(f"[{killed_s:.3f}s] {name}, process {pid}, was killed; {len(stream.token_ids)} tokens")
        self._turn += 1
        ended = {session for worker, session in sessions.items() if kind == "scheduler" or worker == name}
        await self._wait_until_back(ended)
        self.longest_return_s[kind] = max(self.longest_return_s[kind], round(time.monotonic() - killed_s, 2))
        return name

    def longest_pauses_s(self, streams: Sequence[Stream]) -> dict[str, float]:
        """By kind: of a stream that was waiting when something of this kind was killed."""
        longest = dict.fromkeys(self._kinds, 0.0)
        for began_s, ended_s in (pause for stream in streams for pause in stream.pauses):
            for killed_s, kind in self.kills:
                if began_s - JUST_BEFORE_S <= killed_s <= ended_s:
                    longest[kind] = max(longest[kind], round(ended_s - began_s, 2))
        return longest

    async def _victim(self, kind: str) -> tuple[int, str, list[Stream]] | None:
        """A process, its name, and a half-delivered stream or more that it carries."""
        half = [stream for stream in self._streams() if stream.is_half_delivered]
        if not half:
            return None
        stream = self._rng.choice(half)
        match kind:
            case "worker":
                name = seat_in(await self._story(stream))
                return None if name is None else self._found(name, "ray::WorkerActor", [stream], worker=name)
            case "scheduler":
                return self._found("the scheduler", "ray::SchedulerActor", half)
            case _:
                return await self._front_end(stream.address, half)

    async def _front_end(self, address: str, half: Sequence[Stream]) -> tuple[int, str, list[Stream]] | None:
        [client] = [client for client in self._clients if client.address == address]
        try:
            stats = (await client.astats())["front_end"]
        except grpc.aio.AioRpcError:
            return None
        hit = [stream for stream in half if stream.address == address]
        return int(stats["process_id"]), f"front end {stats['name']}", hit

    async def _story(self, stream: Stream) -> str:
        [client] = [client for client in self._clients if client.address == stream.address]
        try:
            return await client.astory(stream.request_id)
        except grpc.aio.AioRpcError:
            return ""

    def _found(
        self, name: str, title: str, hit: list[Stream], worker: str | None = None
    ) -> tuple[int, str, list[Stream]] | None:
        for pid in descendants(self._root):
            if command_line(pid).startswith(title) and worker in (None, variable(pid, WORKER_VARIABLE)):
                return pid, name, hit
        return None

    async def _wait_until_back(self, ended: set[str]) -> None:
        """Every front end answers, and every worker is there in a session that has not ended."""
        deadline_s = time.monotonic() + BACK_TIMEOUT_S
        await asyncio.sleep(POLL_S)
        while time.monotonic() < deadline_s:
            sessions = await self._sessions()
            if len(sessions) == self._num_workers and not ended.intersection(sessions.values()):
                return
            await asyncio.sleep(POLL_S)

    async def _sessions(self) -> dict[str, str]:
        """By worker; empty unless every front end answers."""
        try:
            answers: list[dict[str, Any]] = [await client.astats() for client in self._clients]
        except grpc.aio.AioRpcError:
            return {}
        return {worker["worker_id"]: str(worker["session"]) for worker in answers[-1]["scheduler"]["workers"]}


def seat_in(story: str) -> str | None:
    """The worker that holds the request now, by its story."""
    worker = None
    for line in story.splitlines():
        if (seated := SEATED.search(line)) is not None:
            worker = seated[1]
        elif GONE.search(line):
            worker = None
    return worker


def check_kinds(kinds: Sequence[str]) -> None:
    """ConfigError for one that is not known."""
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"--kill must be any of {','.join(KINDS)}, got {kind!r}")
