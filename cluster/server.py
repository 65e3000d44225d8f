"""The gRPC server of one front end: one port with every protocol, administration, health and reflection."""

import asyncio
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import vllm_engine_pb2_grpc

from cluster import admin_service, inference_service, kserve_service, vllm_service
from cluster.admin_service import AdminServicer
from cluster.errors import ConfigError
from cluster.guard import Guard, in_services
from cluster.inference_service import InferenceServicer
from cluster.kserve_service import KServeServicer
from cluster.loopback import host_port, is_loopback
from cluster.serving import Serving, State
from cluster.tls import TlsFiles, server_credentials
from cluster.tokens import TokenFile
from cluster.vllm_service import VllmServicer
from protos import kserve_pb2_grpc, slipstream_pb2_grpc

AUTH_FLAG, ADMIN_FLAG = "--auth-token-file", "--admin-token-file"
# Health in the other protocols.
HEALTH_METHODS = (
    f"/{vllm_service.SERVICE_NAME}/HealthCheck",
    *(f"/{kserve_service.SERVICE_NAME}/{name}" for name in ("ServerLive", "ServerReady")),
)
# Of operators too, in the other protocol: KV events tell the tokens of everybody's prompts.
VLLM_ADMIN_METHODS = tuple(
    f"/{vllm_service.SERVICE_NAME}/{name}"
    for name in ("FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents")
)
SERVICE_NAMES = tuple(
    service.SERVICE_NAME for service in (vllm_service, kserve_service, inference_service, admin_service)
)

_in_admin, _in_health = in_services([admin_service.SERVICE_NAME]), in_services([health.SERVICE_NAME])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where to listen, and limits."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    tls: TlsFiles | None = None
    insecure: bool = False  # may listen beyond loopback without TLS
    auth_token_file: Path | None = None  # None: no tokens are asked for
    admin_token_file: Path | None = None  # None: what is for operators needs what all other calls need
    max_receive_bytes: int = 16 << 20  # of one request; larger ones are RESOURCE_EXHAUSTED before they are read
    max_pending_calls: int = 1 << 14  # new at the same moment; gRPC's default cancels some of a burst of 1,100
    max_calls: int = 1 << 14  # at once; more are RESOURCE_EXHAUSTED
    max_calls_per_connection: int = 1 << 13  # at once; a client waits with more
    max_connections: int = 1 << 12  # at once; more are closed
    handshake_timeout_s: float = 10.0  # for TCP, TLS and HTTP/2 settings
    message_timeout_s: float = 10.0  # from a call's beginning to its message
    grace_s: float = 5.0  # for open streams when stopping

    def check(self) -> None:
        """ValueError when it would listen in the open, or cannot read its files. Listens nowhere."""
        if self.tls is None and not self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} listens beyond loopback without TLS: give --tls-cert and --tls-key, or --insecure"
            )
        if self.tls is not None:
            self.tls.read()
        for flag, path in ((AUTH_FLAG, self.auth_token_file), (ADMIN_FLAG, self.admin_token_file)):
            if path is not None:
                TokenFile(path, flag=flag)


class Server:
    """Start it, mark it ready, stop it."""

    def __init__(self, serving: Serving, config: ServerConfig | None = None) -> None:
        self._serving = serving
        self._config = config or ServerConfig()
        self._health = health.aio.HealthServicer()
        self._server: Any = None
        self.port = 0

    @property
    def address(self) -> str:
        """host:port, once started."""
        return host_port(self._config.host, self.port)

    async def start(self, *, ready: bool = True) -> int:
        """Listens; the port. Requests are refused until ready. Raises ValueError when the port is taken."""
        self._config.check()
        await self._report(serving=False)
        self.guard = self._guard()
        self._server = grpc.aio.server(
            options=self._options(), interceptors=[self.guard], maximum_concurrent_rpcs=self._config.max_calls
        )
        slipstream_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(self._serving), self._server)  # type: ignore[no-untyped-call]
        slipstream_pb2_grpc.add_AdminServicer_to_server(AdminServicer(self._serving), self._server)  # type: ignore[no-untyped-call]
        kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(KServeServicer(self._serving), self._server)  # type: ignore[no-untyped-call]
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmServicer(self._serving), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflected = (*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, self._server)
        address = host_port(self._config.host, self._config.port)
        try:
            self.port = self._listen(address)
        except RuntimeError as error:
            raise ValueError(f"cannot listen on {address}: the port is in use or the host is not ours") from error
        await self._server.start()
        if ready:
            await self.ready()
        return self.port

    async def ready(self) -> None:
        """From now on requests are taken."""
        self._serving.state = State.SERVING
        await self._report(serving=True)

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuses new requests, lets open streams end within the grace, then closes them with UNAVAILABLE."""
        grace_s = self._config.grace_s if grace_s is None else grace_s
        self._serving.state = State.DRAINING
        await self._report(serving=False)
        await self._drained(grace_s)
        await self._serving.front_end.close()
        if self._server is not None:
            await self._server.stop(grace=min(grace_s, 1.0))

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self._server.wait_for_termination()

    def _listen(self, address: str) -> int:
        tls = self._config.tls
        if tls is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, server_credentials(tls)))

    def _guard(self) -> Guard:
        auth, admin = self._config.auth_token_file, self._config.admin_token_file
        return Guard(
            tokens=None if auth is None else TokenFile(auth, flag=AUTH_FLAG),
            admin_tokens=None if admin is None else TokenFile(admin, flag=ADMIN_FLAG),
            admin=lambda method: _in_admin(method) or method in VLLM_ADMIN_METHODS,
            exempt=lambda method: _in_health(method) or method in HEALTH_METHODS,
            message_timeout_s=self._config.message_timeout_s,
        )

    async def _drained(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                await self._serving.front_end.drained()
        except TimeoutError:
            pass

    async def _report(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in ("", *SERVICE_NAMES):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    def _options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.so_reuseport", 0),  # or a second server would share the port in silence
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", self._config.max_receive_bytes),
            # Routers ping idle connections every 30 s.
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.max_concurrent_streams", self._config.max_calls_per_connection),
            ("grpc.max_allowed_incoming_connections", min(self._config.max_connections, _most_connections())),
            ("grpc.server_handshake_timeout_ms", round(1000 * self._config.handshake_timeout_s)),
            ("grpc.http2.settings_timeout", round(1000 * self._config.handshake_timeout_s)),
            ("grpc.server.max_pending_requests", self._config.max_pending_calls),
            ("grpc.server.max_pending_requests_hard_limit", 2 * self._config.max_pending_calls),
        ]


def _most_connections() -> int:
    """Half of the files this process may open: at their end nobody could connect, nor could we read a token file."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft // 2
