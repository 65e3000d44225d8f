"""The live page: one file of HTML, a stream of server-sent events that it draws, and a request's story.

It shows request ids, so it asks for an operator's token where the deployment has tokens (as the password that a
browser asks for), and answers only to addresses, not to names that somebody else's DNS may point here.
"""

import asyncio
import base64
import hashlib
import ipaddress
import json
from collections.abc import Callable
from http import HTTPStatus
from importlib import resources

from cluster.frontend import FrontEnd
from cluster.http_messages import Request, Response, begin, send, send_part

PATH, EVENTS_PATH, STORY_PATH = "/", "/events", "/story"
EVERY_S = 0.5
MAX_WATCHERS = 8
VIEW_TIMEOUT_S = 5.0


class Page:
    """Of one front end."""

    def __init__(self, front_end: FrontEnd, model: str, admits: Callable[[str | None], bool] = lambda _token: True):
        """`admits` tells whether who shows this token may see it."""
        self._front_end, self._model, self._admits = front_end, model, admits
        self._html = resources.files("cluster").joinpath("page.html").read_bytes()
        self._num_watchers = 0

    def serves(self, request: Request) -> bool:
        """Whether this path is the page's."""
        return request.path in (PATH, EVENTS_PATH, STORY_PATH)

    async def answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        """All of it. An event stream ends with its reader, by ConnectionError or TimeoutError."""
        refusal = self._refusal(request)
        if refusal is not None:
            await send(writer, refusal, with_body=request.method != "HEAD")
        elif request.path == PATH:
            headers = {"Content-Security-Policy": _policy(self._html), "X-Content-Type-Options": "nosniff"}
            html = Response(HTTPStatus.OK, self._html, "text/html; charset=utf-8", headers)
            await send(writer, html, with_body=request.method != "HEAD")
        elif request.path == STORY_PATH:
            await send(writer, await self._story(request.query.get("id", "")), with_body=request.method != "HEAD")
        else:
            await self._watch(request, writer)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return Response(HTTPStatus.METHOD_NOT_ALLOWED, b"GET it\n")
        if not _is_address(request.fields.get("host", "")):
            return Response(HTTPStatus.FORBIDDEN, b"ask for it by address or as localhost\n")
        if not self._admits(request.password()):
            ask = {"WWW-Authenticate": 'Basic realm="an operator\'s token as password", charset="UTF-8"'}
            return Response(HTTPStatus.UNAUTHORIZED, b"give an operator's token as the password\n", fields=ask)
        return None

    async def _story(self, request_id: str) -> Response:
        try:
            async with asyncio.timeout(VIEW_TIMEOUT_S):
                story = await self._front_end.story(request_id)
        except (ConnectionError, TimeoutError):
            return Response(HTTPStatus.SERVICE_UNAVAILABLE, b"the scheduler does not answer\n")
        return Response(HTTPStatus.OK, story.encode())

    async def _watch(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if self._num_watchers >= MAX_WATCHERS:
            await send(writer, Response(HTTPStatus.SERVICE_UNAVAILABLE, b"too many are watching\n"))
            return
        self._num_watchers += 1
        try:
            await begin(writer, HTTPStatus.OK, "text/event-stream", {})
            life, _, after = request.fields.get("last-event-id", "").partition("/")
            number = int(after) if after.isdecimal() else 0
            while True:
                life, number = await self._tell(writer, life, number)
                await asyncio.sleep(EVERY_S)
        finally:
            self._num_watchers -= 1

    async def _tell(self, writer: asyncio.StreamWriter, life: str, number: int) -> tuple[str, int]:
        """One event; what the next one goes on from."""
        try:
            async with asyncio.timeout(VIEW_TIMEOUT_S):
                view = await self._front_end.view(number)
                if view["life"] != life and number:
                    view = await self._front_end.view(0)
        except (ConnectionError, TimeoutError):
            await send_part(writer, b'event: away\ndata: "the scheduler does not answer"\n\n')
            return life, number
        life, number = view["life"], view["trail"]["number"]
        data = json.dumps(view | {"model": self._model}, separators=(",", ":"))
        await send_part(writer, f"id: {life}/{number}\ndata: {data}\n\n".encode())
        return life, number


def _policy(html: bytes) -> str:
    """Nothing but this file's own script, and nothing from elsewhere."""
    script = html[html.index(b"<script>") + len(b"<script>") : html.rindex(b"</script>")]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _is_address(host: str) -> bool:
    """Whether a Host field names no name but localhost."""
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
