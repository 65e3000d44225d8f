"""Brings a deployment up, in the order workers, scheduler, front ends, and takes it down again in reverse.

Whatever fails on the way up, everything started before it is stopped. Blocking; runs in the
process of the command line or of a test.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.config import MAX_STEPS_IN_FLIGHT, ServeConfig
from cluster.errors import BringUpError, ConfigError
from cluster.faults import FaultyWorkerPort
from cluster.front_actor import FrontEndActor, FrontEndSpec
from cluster.grpc_link import GrpcTransport, GrpcWorkerPort
from cluster.joined_ray import RESOURCE, JoinedRay
from cluster.link import RayWorkerPort, one_line
from cluster.listening import check_port_is_free, metrics_config, server_config
from cluster.local_ray import LocalRay
from cluster.loopback import host_port
from cluster.otlp import traces_endpoint
from cluster.ray_watch import RayWatch
from cluster.sizing import num_cpus, size
from scheduler.actor import Liveness, SchedulerActor, WorkerPort
from worker.actor import HEALTH_GROUP, LOAD_GROUP, STEP_GROUP, WorkerActor, WorkerSpec, WorkerTraits

PLACEMENT_TIMEOUT_S = 60.0
STOP_GRACE_S = 5.0
# Ray gives an actor some thirty threads; each with an arena of its own, a process that lives for weeks keeps growing.
FEW_ARENAS = {"env_vars": {"MALLOC_ARENA_MAX": "2"}}
POLL_S = 0.2
MAX_DEATHS, MAX_DEATHS_WITHIN_S = 5, 20.0  # of front ends, before it is given up
REVIVAL_TIMEOUT_S = 60.0
LOST_ADVICE = (
    "Everything started here is ended: start it again; clients that resume go on where they were. Where a head must be "
    "able to restart, make its control store fault tolerant (GCS fault tolerance, see deploy/README.md)"
)
QUEUE_POOLS = 8  # tokens that may wait, in pools of all workers

# Told what begins, and left when it has ended: `with phase("Loading 2 workers"): ...`
Phase = Callable[[str], AbstractContextManager[object]]


@contextlib.contextmanager
def silently(_what: str) -> Iterator[None]:
    """A Phase that shows nothing."""
    yield


class Deployment:
    """A scheduler, its workers and its front ends on a local Ray cluster, or on one that is joined."""

    def __init__(self, config: ServeConfig, directory: Path, phase: Phase = silently) -> None:
        """Returns once requests are answered. Raises ConfigError before anything is started, else BringUpError."""
        self.config = config
        if config.address is None:
            self.sizes = size(config, directory)
        self._traces_endpoint = traces_endpoint(config.otlp_traces_endpoint, os.environ)
        server_config(config).check()
        check_port_is_free(config.host, config.port)
        if config.metrics_port:
            check_port_is_free(
                config.metrics_host, config.metrics_port, port_flag="--metrics-port", host_flag="--metrics-host"
            )
        self.endpoints: list[str] = []  # HOST:PORT of each front end
        self.metrics_endpoints: list[str] = []  # of each front end's metrics, if they are on
        self.warnings = [str(config.faults)] if config.faults.any else []  # and what does not keep the promise here
        self._actors: list[ActorHandle[Any]] = []
        self._front_ends: list[ActorHandle[FrontEndActor]] = []
        self._ends: dict[int, Any] = {}  # index of a front end -> the answer why it closed, once there is one
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)  # of front ends, on the monotonic clock
        self._watch = RayWatch(())
        self.ray: LocalRay | JoinedRay
        if config.address is None:
            self._start_ray(phase)
        else:
            self._join_ray(config.address, directory, phase)
        try:
            self._watch = RayWatch(self.ray.parts())
            self._start(phase)
        except RayError as error:
            self.stop()
            if isinstance(error, RayTaskError) and isinstance(error.cause, ValueError):
                raise ConfigError(one_line(error)) from error
            raise BringUpError(one_line(error)) from error
        except BaseException:
            self.stop()
            raise

    def wait(self, timeout_s: float) -> str | None:
        """Why no more can be served, if that happened within the timeout. A front end that died is started again."""
        if (lost := self._watch.lost()) is not None:
            return f"{lost}. {LOST_ADVICE}"
        for index, front_end in enumerate(self._front_ends):
            # One call to each: it takes a place among those that the actor answers at once.
            if index not in self._ends:
                self._ends[index] = front_end.wait_until_closed.remote()
        ended, _ = ray.wait(list(self._ends.values()), num_returns=1, timeout=timeout_s)
        if not ended:
            return None
        [index] = [index for index, end in self._ends.items() if end == ended[0]]
        del self._ends[index]
        try:
            why = ray.get(ended[0])
        except RayActorError as error:
            return self._revive(index, one_line(error))
        except RayError as error:
            return f"a front end ended: {one_line(error)}"
        return self._revive(index, "it was started again") if why is None else f"{why}. {LOST_ADVICE}"

    def _revive(self, index: int, died: str) -> str | None:
        """Ray has begun its process again: load and listen where it did. Why not, if that fails."""
        self._deaths.append(time.monotonic())
        if len(self._deaths) == MAX_DEATHS and self._deaths[-1] - self._deaths[0] < MAX_DEATHS_WITHIN_S:
            return f"front ends died {MAX_DEATHS} times within {MAX_DEATHS_WITHIN_S:g} s: {died}"
        front_end = self._front_ends[index]
        port = int(self.endpoints[index].rpartition(":")[2])
        deadline_s = time.monotonic() + REVIVAL_TIMEOUT_S
        while True:
            try:
                ray.get(front_end.load.remote())
                ray.get(front_end.start.remote(self._scheduler, port))
                return None
            except RayError as error:
                if isinstance(error, ActorDiedError) or time.monotonic() > deadline_s:
                    return f"a front end ended: {one_line(error)}"
                time.sleep(POLL_S)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Streams get the grace to end; then every process is ended."""
        is_whole = self._watch.is_whole()
        if ray.is_initialized():
            with contextlib.suppress(RayError, GetTimeoutError):
                ray.get([front_end.stop.remote(grace_s) for front_end in self._front_ends], timeout=grace_s + 2.0)
            for actor in reversed(self._actors if is_whole else []):  # without its control store this hangs
                with contextlib.suppress(RayError):
                    ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._front_ends.clear()
        self.ray.stop(is_whole=is_whole)

    # ---- on the way up ----

    def _start_ray(self, phase: Phase) -> None:
        with phase("Starting Ray on this machine"):
            num_workers = len(self.sizes.workers)
            self.ray = LocalRay(
                num_cpus=max(num_cpus(), num_workers), num_gpus=num_workers if self.sizes.device == "cuda" else 0
            )

    def _join_ray(self, address: str, directory: Path, phase: Phase) -> None:
        with phase("Joining the Ray cluster"):
            self.ray = JoinedRay(address)
        try:
            with phase("Waiting for machines that run workers"):
                self.config = self.ray.fitted(self.config)
            self.sizes = size(self.config, directory)
        except BaseException:
            self.ray.stop()
            raise

    def _start(self, phase: Phase) -> None:
        with phase("Placing the workers"):
            placement = self._place()
        workers = {
            spec.worker_id: self._start_worker(spec, PlacementGroupSchedulingStrategy(placement, index))
            for index, spec in enumerate(self.sizes.workers)
        }
        front_ends = [self._start_front_end(index) for index in range(self.config.num_front_ends)]
        with phase(f"Loading {self.sizes.model_name} into {len(workers)} worker{'s' * (len(workers) > 1)}"):
            loads = [front_end.load.remote() for front_end in front_ends]
            traits: list[WorkerTraits] = ray.get([worker.load.remote() for worker in workers.values()])
            ray.get(loads)
        self.warnings += [f"{worker.worker_id}: {complaint}" for worker in traits for complaint in worker.complaints]
        with phase("Starting the scheduler and the gRPC front end"):
            self._scheduler = self._start_scheduler(workers, traits)
            ports: list[int] = ray.get([front_end.start.remote(self._scheduler) for front_end in front_ends])
            metrics: list[str | None] = ray.get([front_end.metrics_address.remote() for front_end in front_ends])
        self.endpoints = [host_port(self.config.host, port) for port in ports]
        self.metrics_endpoints = [address for address in metrics if address is not None]

    def _place(self) -> PlacementGroup:
        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if self.sizes.device == "cuda" else {})
        strategy = "PACK"
        if isinstance(self.ray, JoinedRay):
            bundle, strategy = bundle | {RESOURCE: 1.0}, "SPREAD"
        bundles = [bundle] * len(self.sizes.workers)
        group: PlacementGroup = placement_group(bundles, strategy=strategy, name="workers", lifetime=self._lifetime())
        try:
            ray.get(group.ready(), timeout=PLACEMENT_TIMEOUT_S)
        except GetTimeoutError as error:
            resources = ray.cluster_resources()
            raise BringUpError(
                f"no room for {len(bundles)} workers of {bundle} each; the cluster has {resources}"
            ) from error
        return group

    def _start_worker(
        self, spec: WorkerSpec, placement: PlacementGroupSchedulingStrategy
    ) -> "ActorHandle[WorkerActor]":
        return self._create(
            WorkerActor,
            spec,
            GrpcTransport() if self.config.transport == "grpc" else None,
            self.config.logs,
            name=spec.worker_id,
            num_cpus=1,
            num_gpus=1 if spec.device == "cuda" else 0,
            max_restarts=-1,
            concurrency_groups={HEALTH_GROUP: 1, LOAD_GROUP: 1, STEP_GROUP: MAX_STEPS_IN_FLIGHT},
            scheduling_strategy=placement,
            runtime_env={"env_vars": spec.environment()},
        )

    def _start_scheduler(
        self, workers: "dict[str, ActorHandle[WorkerActor]]", traits: list[WorkerTraits]
    ) -> "ActorHandle[SchedulerActor]":
        config = replace(self.sizes.scheduler, largest_pool_blocks=max(worker.num_blocks for worker in traits))
        pool_tokens = self.config.block_size * sum(worker.num_blocks for worker in traits)
        # Plain values only: what else a constructor is given could not be had again once this process has gone.
        ports = {worker_id: self._port(worker_id) for worker_id in workers}
        liveness = Liveness(
            heartbeat_s=self.config.heartbeat_s,
            worker_down_after_s=self.config.worker_down_after_s,
            worker_hung_after_s=self.config.worker_hung_after_s,
        )
        scheduler = self._create(
            SchedulerActor,
            config,
            ports,
            liveness,
            self.config.record_events,
            [str(self.config.faults)] if self.config.faults.any else [],
            self.config.max_waiting_tokens or QUEUE_POOLS * pool_tokens,
            self.config.logs,
            name="scheduler",
            num_cpus=0,
            max_restarts=-1,
            runtime_env=FEW_ARENAS,
            **self._here(),
        )
        ray.get(scheduler.start.remote())
        return scheduler

    def _port(self, worker_id: str) -> WorkerPort:
        port: WorkerPort = GrpcWorkerPort(worker_id) if self.config.transport == "grpc" else RayWorkerPort(worker_id)
        return FaultyWorkerPort(port, self.config.faults, worker_id) if self.config.faults.any else port

    def _start_front_end(self, index: int) -> "ActorHandle[FrontEndActor]":
        spec = FrontEndSpec(
            name=f"front-{index}",
            server=server_config(self.config, index),
            metrics=metrics_config(self.config, index),
            directory=str(self.sizes.directory),
            model_name=self.sizes.model_name,
            max_model_len=self.sizes.max_model_len,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs * len(self.sizes.workers),
            dtype=self.sizes.dtype,
            seed=self.config.seed,
            logs=self.config.logs,
            traces_endpoint=self._traces_endpoint,
            ray_parts=self.ray.parts(),
        )
        actor = self._create(
            FrontEndActor, spec, name=spec.name, num_cpus=0, max_restarts=-1, runtime_env=FEW_ARENAS, **self._here()
        )
        self._front_ends.append(actor)
        return actor

    def _lifetime(self) -> str | None:
        """On a cluster of our own everything ends with it; on another one, with this process."""
        return None if isinstance(self.ray, JoinedRay) else "detached"

    def _here(self) -> dict[str, object]:
        """Where the endpoints' host is ours."""
        if not isinstance(self.ray, JoinedRay):
            return {}
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(self.ray.node_id(), soft=False)}

    def _create(self, actor_class: type, *arguments: object, **options: object) -> ActorHandle[Any]:
        """An actor. A failed call means "unknown", so Ray must never repeat one."""
        decorate: Any = ray.remote
        actor: ActorHandle[Any] = decorate(lifetime=self._lifetime(), max_task_retries=0, **options)(
            actor_class
        ).remote(*arguments)
        self._actors.append(actor)
        return actor
