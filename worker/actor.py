"""The Ray actor around one worker: a model, its runner and its queue.

Builds itself on the first registration, so that a process Ray restarted comes back by itself.
Plans come by Ray's calls, or by a transport of another kind that listens in this process; one is carried
out at a time. `health` has a thread of its own and answers during a step. Knows no scheduler, only plans.
"""

import logging
import os
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import ray
from ray.util import get_node_ip_address

from scheduler.step import StepPlan, StepResult
from worker.checkpoints import Checkpoints
from worker.drafting import DraftSpec, draft_blocks
from worker.process import bind, environment
from worker.session import SessionQueue, StaleSession, StepError

if TYPE_CHECKING:
    from worker.drafter import Drafter
    from worker.runner import Runner

log = logging.getLogger(__name__)

HEALTH_GROUP = "health"
STEP_GROUP = "steps"  # as many calls at once as steps may be in flight: the next plan is here when a step ends
LOAD_GROUP = "load"
WORKER_VARIABLE = "SLIPSTREAM_WORKER"  # in a worker's environment: which one it is


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything a worker builds itself from: plain values, so that they travel."""

    worker_id: str
    directory: str  # of the model, in Hugging Face layout
    fetched: str | None = None  # its name, by which a worker on another machine gets it; None: the directory is there
    quantization: str | None = None  # "int8": weights only
    dtype: str  # "bfloat16", "float16" or "float32"
    device: str  # "cpu" or "cuda"
    attention: str  # "cpu" or "triton"
    num_blocks: int | None  # None: what is left of the device's memory after the weights
    gpu_memory_utilization: float
    block_size: int
    bytes_per_block: int  # key and value of all layers
    weight_bytes: int
    max_num_seqs: int
    max_model_len: int
    drafts: DraftSpec
    threads: int
    cores: tuple[int, ...] | None = None  # its own among several workers of this machine; None: any

    def environment(self) -> dict[str, str]:
        """What must be set before the worker's process imports torch or triton."""
        variables = environment(self.threads) | {WORKER_VARIABLE: self.worker_id}
        if self.attention == "triton" and self.device == "cpu":
            variables["TRITON_INTERPRET"] = "1"
        if "SLIPSTREAM_SANITIZE_KV" in os.environ:
            variables["SLIPSTREAM_SANITIZE_KV"] = os.environ["SLIPSTREAM_SANITIZE_KV"]
        return variables


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTraits:
    """What a worker says of itself when it has loaded."""

    worker_id: str
    num_blocks: int
    max_num_seqs: int
    max_drafts: int
    drop_last_hit_block: bool  # of a prefix hit: the drafter's KV at its end depends on the token after it
    fingerprint: str
    complaints: tuple[str, ...]  # what makes a row's numbers depend on its company here; empty: nothing does


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a worker's process listens, and what it must be told by whoever calls."""

    address: str  # HOST:PORT
    secret: str


class Registered(NamedTuple):
    """The answer to a registration."""

    traits: WorkerTraits
    endpoint: Endpoint | None  # of this process's transport; None: Ray's calls


class PlanTaker(Protocol):
    """What a transport reaches: a worker, from any thread."""

    def offer(self, plan: StepPlan) -> list[StepResult]:
        """The results this plan released. Raises worker.session.StaleSession or StepError."""
        ...

    def current_session(self) -> int | None:
        """The session the worker is in, answered even during a step."""
        ...


class Transport(Protocol):
    """Another way to a worker than Ray's calls. A value that travels; it listens where the worker is."""

    def listen(self, worker: PlanTaker, host: str) -> Endpoint:
        """Answer calls from now on, until the process ends."""
        ...


class StepRefused(RuntimeError):
    """A whole step failed, now or earlier in its session. One message only, so that it travels."""


class WorkerActor:
    """One worker. `worker.session.SessionQueue` keeps the order, `worker.runner.Runner` does the work."""

    def __init__(
        self, spec: WorkerSpec, transport: Transport | None = None, logs: Callable[[str], None] | None = None
    ) -> None:
        """`logs` is called first, with the process's name: it configures what is logged here."""
        if logs is not None:
            logs(spec.worker_id)
        self._spec = spec
        self._transport = transport
        self._endpoint: Endpoint | None = None
        # One thread for all that touches the model: the next step begins there as soon as this one ends.
        self._line = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self._session: int | None = None
        self._traits: WorkerTraits | None = None
        self._queue: SessionQueue | None = None
        self._checkpoints = Checkpoints()
        self._drafter: Drafter | None = None

    def load(self) -> WorkerTraits:
        """Load the model unless that was done. `ValueError` says what is wrong with it."""
        return self._line.submit(self._load).result()

    def _load(self) -> WorkerTraits:
        if self._traits is None:
            began_s = time.monotonic()
            runner, self._traits = build(self._spec, self._checkpoints)
            log.info("loaded", extra={"num_blocks": self._traits.num_blocks, "took_s": time.monotonic() - began_s})
            self._drafter = runner.drafter
            self._queue = SessionQueue(runner)
        return self._traits

    @ray.method(concurrency_group=LOAD_GROUP)
    def prepare(self, weights: str) -> None:
        """Load weights that a plan will swap to, while steps go on. `ValueError` says what is wrong with them."""
        self._checkpoints.prepare(weights)

    @ray.method(concurrency_group=HEALTH_GROUP)
    def weights(self) -> str | None:
        """What it was last swapped to."""
        return self._checkpoints.current

    @ray.method(concurrency_group=HEALTH_GROUP)
    def draft_blocks(self) -> tuple[int, int] | None:
        """Blocks of the draft model's own pool, and how many of them are free; None without one."""
        return draft_blocks(self._drafter)

    def register(self, session: int) -> Registered:
        """Begin a session with an empty pool; whatever was queued for an older one is forgotten."""
        traits = self._line.submit(self._begin, session).result()
        if self._transport is not None and self._endpoint is None:
            self._endpoint = self._transport.listen(self, get_node_ip_address())
        return Registered(traits, self._endpoint)

    def _begin(self, session: int) -> WorkerTraits:
        traits = self._load()
        assert self._queue is not None
        self._queue.begin(session)
        log.info("registered", extra={"session": session})
        self._session = session
        return traits

    @ray.method(concurrency_group=STEP_GROUP)
    def step(self, packed: bytes) -> bytes:
        """A packed StepPlan; the packed list of StepResults it released.

        Raises worker.session.StaleSession or StepRefused.
        """
        try:
            return pack(self.offer(unpack(packed)))
        except StepError as error:
            raise StepRefused(str(error)) from error

    def offer(self, plan: StepPlan) -> list[StepResult]:
        """The results this plan released. Raises worker.session.StaleSession or StepError."""
        if self._queue is None:
            raise StaleSession(f"worker {self._spec.worker_id} was restarted and has not registered")
        launched = self._line.submit(self._queue.launch, plan).result()
        if not launched.pending:
            return launched.results
        # Not on the line: while the device carries these out, the next plan is launched there.
        for step in launched.pending:
            step.wait()
        return self._line.submit(self._queue.collect, launched).result()

    def current_session(self) -> int | None:
        """The session this process is in."""
        return self._session

    @ray.method(concurrency_group=HEALTH_GROUP)
    def health(self) -> int | None:
        """The session this process is in."""
        return self._session


def pack(message: object) -> bytes:
    """One message as one value: Ray would send a plan's dozen small arrays one by one, at three times the cost."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes) -> Any:
    """What `pack` was given. Ray's own calls are pickles too: this trusts nobody new."""
    return pickle.loads(packed)


def build(spec: WorkerSpec, checkpoints: Checkpoints | None = None) -> "tuple[Runner, WorkerTraits]":
    """A runner over a freshly loaded model. torch is first imported here, in the worker's own process."""
    import torch

    from worker.drafting import build_drafter
    from worker.fingerprint import fingerprint, self_test
    from worker.hf_model import load_any_model
    from worker.sanitizer import KVSanitizer, is_wanted

    if spec.cores is not None:
        bind(spec.cores)
    torch.set_num_threads(spec.threads)
    num_blocks = spec.num_blocks if spec.num_blocks is not None else _blocks_that_fit(spec)
    directory = model_directory(spec)
    model = load_any_model(
        directory,
        dtype=getattr(torch, spec.dtype),
        device=spec.device,
        attention=spec.attention,
        num_blocks=num_blocks,
        block_size=spec.block_size,
        max_model_len=spec.max_model_len,
        quantization=spec.quantization,
    )
    checkpoints = checkpoints or Checkpoints()
    checkpoints.begin(model)
    runner = _runner_class(spec)(
        worker_id=spec.worker_id,
        model=model,
        drafter=build_drafter(spec.drafts, model, directory, max_num_seqs=spec.max_num_seqs, sanitize=is_wanted()),
        max_num_seqs=spec.max_num_seqs,
        sanitizer=KVSanitizer(num_blocks, spec.block_size) if is_wanted() else None,
        swap=checkpoints.swap,
    )
    complaints = self_test(model)
    traits = WorkerTraits(
        worker_id=spec.worker_id,
        num_blocks=num_blocks,
        max_num_seqs=spec.max_num_seqs,
        max_drafts=runner.max_drafts,
        drop_last_hit_block=runner.drop_last_hit_block,
        # Numbers that depend on their company are like nobody's, not even like this worker's own a step later.
        fingerprint=fingerprint(model) + (f" inexact on {spec.worker_id}" if complaints else ""),
        complaints=tuple(complaints),
    )
    return runner, traits


def _runner_class(spec: WorkerSpec) -> "type[Runner]":
    """Rows on the device where the kernels are that keep them there."""
    if spec.attention == "triton":
        from worker.device_runner import DeviceRunner

        return DeviceRunner
    from worker.runner import Runner

    return Runner


def model_directory(spec: WorkerSpec) -> Path:
    """Where the model is on this machine, fetched if need be. `ValueError` when it cannot be had."""
    directory = Path(spec.directory)
    if directory.is_dir():
        return directory
    if spec.fetched is None:
        raise ValueError(f"--model: there is no {directory} on {os.uname().nodename}, where {spec.worker_id} is placed")
    from worker.fetch import SOURCES, fetch

    if spec.fetched in SOURCES:
        return fetch(spec.fetched)
    from huggingface_hub import snapshot_download

    try:  # the hub's cache names a directory by its revision: all workers get the one that was sized
        patterns = ["*.json", "*.safetensors"]
        return Path(snapshot_download(spec.fetched, revision=directory.name, allow_patterns=patterns))
    except OSError as error:
        raise ValueError(f"{spec.worker_id} cannot fetch {spec.fetched} on {os.uname().nodename}: {error}") from error


def _blocks_that_fit(spec: WorkerSpec) -> int:
    """Blocks of a device's pool: its share of the memory, less the weights and room for one step."""
    import torch

    free, total = torch.cuda.mem_get_info()
    activations = total // 20
    room = int(free - (1.0 - spec.gpu_memory_utilization) * total) - spec.weight_bytes - activations
    num_blocks = room // spec.bytes_per_block
    needed = -(-spec.max_model_len // spec.block_size)
    if num_blocks < needed:
        raise ValueError(
            f"--gpu-memory-utilization {spec.gpu_memory_utilization} leaves {max(num_blocks, 0)} blocks, one sequence "
            f"of --max-model-len {spec.max_model_len} needs {needed}"
        )
    return min(num_blocks, needed * spec.max_num_seqs)
