"""HTTP as far as the port for scrapers and the live page needs it: heads of requests in, whole answers out."""

import asyncio
import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qs

SEND_TIMEOUT_S = 10.0


class Response(NamedTuple):
    """One answer."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    fields: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request. Names of fields are in lower case, repeated ones joined by commas."""

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parsed(cls, head: bytes) -> "Request":
        """Of whatever bytes: what makes no sense is not found later."""
        request_line, *lines = head.decode("latin-1").split("\r\n")
        method, _, rest = request_line.partition(" ")
        path, _, query = rest.partition(" ")[0].partition("?")
        fields: dict[str, str] = {}
        for name, _, value in (line.partition(":") for line in lines if line):
            name, value = name.lower(), value.strip()
            fields[name] = f"{fields[name]},{value}" if name in fields else value
        return cls(method, path, {name: values[-1] for name, values in parse_qs(query).items()}, fields)

    def password(self) -> str | None:
        """Of HTTP's basic authentication, or a bearer token; None without either."""
        scheme, _, value = self.fields.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return value.strip() or None
        if scheme.lower() != "basic":
            return None
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2] or None
        except (binascii.Error, UnicodeDecodeError):
            return None


async def send(writer: asyncio.StreamWriter, response: Response, *, with_body: bool = True) -> None:
    """The whole answer; each connection carries one."""
    fields = {"Content-Length": str(len(response.body))} | dict(response.fields)
    await begin(writer, response.status, response.content_type, fields)
    await send_part(writer, response.body if with_body else b"")


async def begin(writer: asyncio.StreamWriter, status: HTTPStatus, content_type: str, fields: Mapping[str, str]) -> None:
    """The head of an answer."""
    all_fields = {"Content-Type": content_type, "Cache-Control": "no-store", "Connection": "close", **fields}
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in all_fields.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode())


async def send_part(writer: asyncio.StreamWriter, part: bytes) -> None:
    """More of its body. Raises TimeoutError for a reader that is too slow."""
    writer.write(part)
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await writer.drain()
