"""A port for scrapers and the live page: plain HTTP on the event loop of its front end.

Written out rather than taken from prometheus_client, whose server has a thread for each connection
and waits for it without end.
"""

import asyncio
import logging
from dataclasses import dataclass
from http import HTTPStatus

from cluster.http_messages import Request, Response, send
from cluster.loopback import host_port
from cluster.metrics import Metrics
from cluster.page import Page

log = logging.getLogger(__name__)

PATH = "/metrics"
MAX_HEAD_BYTES = 8192
MAX_CONNECTIONS = 32
HEAD_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Where to listen, and what to show."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    any_port: bool = False  # when `port` is taken
    with_scheduler: bool = True


class MetricsServer:
    """Start it, stop it."""

    def __init__(self, metrics: Metrics, config: MetricsConfig, page: Page | None = None) -> None:
        self._metrics, self._config, self._page = metrics, config, page
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, asyncio.Event] = {}  # each set when its connection is over
        self.port = 0

    @property
    def address(self) -> str:
        """host:port, once started."""
        return host_port(self._config.host, self.port)

    async def start(self) -> int:
        """Listens; the port. Raises ValueError when it is taken."""
        try:
            self._server = await self._listen(self._config.port)
        except OSError as error:
            if not self._config.any_port:
                where = f"--metrics-port {self._config.port} on --metrics-host {self._config.host}"
                raise ValueError(f"{where} cannot be listened on: {error.strerror}") from error
            self._server = await self._listen(0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    async def stop(self) -> None:
        """Closes the port; an answer under way is cut off."""
        if self._server is not None:
            self._server.close()
        for writer, over in list(self._open.items()):
            writer.transport.abort()
            await over.wait()

    async def _listen(self, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._serve, self._config.host, port, limit=MAX_HEAD_BYTES)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        over = self._open[writer] = asyncio.Event()
        try:
            if len(self._open) <= MAX_CONNECTIONS:
                await self._answer(reader, writer)
        except (ConnectionError, TimeoutError):
            pass  # the scraper's loss
        finally:
            del self._open[writer]
            writer.close()
            over.set()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError:
            await send(writer, Response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b""))
            return
        request = Request.parsed(head)
        if self._page is not None and self._page.serves(request):
            await self._page.answer(request, writer)
        else:
            await send(writer, await self._response(request), with_body=request.method != "HEAD")

    async def _response(self, request: Request) -> Response:
        if request.path != PATH:
            return Response(HTTPStatus.NOT_FOUND, f"there is no such page; metrics are at {PATH}\n".encode())
        if request.method not in ("GET", "HEAD"):
            return Response(HTTPStatus.METHOD_NOT_ALLOWED, b"GET it\n")
        accept, with_scheduler = request.fields.get("accept", ""), self._config.with_scheduler
        try:
            page, content_type = await self._metrics.page(accept, with_scheduler=with_scheduler)
        except Exception:
            log.exception("the metrics could not be made")
            return Response(HTTPStatus.INTERNAL_SERVER_ERROR, b"the metrics could not be made; see the log\n")
        return Response(HTTPStatus.OK, page, content_type)
