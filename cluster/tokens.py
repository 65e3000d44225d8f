"""Bearer tokens from a file: who may call, as which tenant, and how much of it at once.

    # one token a line; a tenant of several tokens rotates them one by one
    f1c9...  acme  limit=8
    77ab...  acme
    03de...

A limit is of the tenant: choices that are open at once, on one front end. Tokens are kept as
digests, and no message of this file holds one.
"""

import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from cluster.errors import ConfigError
from cluster.watched import Watched

DEFAULT_TENANT = "default"
MAX_TENANT_CHARACTERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls. Without a tenant everyone is trusted: no tokens are asked for, or it is an operator's."""

    tenant: str | None = None
    max_concurrent: int | None = None  # choices

    def scoped(self, request_id: str) -> str:
        """The name of this caller's request among those of all tenants: nobody reaches another's by guessing."""
        return request_id if self.tenant is None else f"{self.tenant}/{request_id}"

    def unscoped(self, request_id: str) -> str:
        """The name as the caller knows it."""
        return request_id if self.tenant is None else request_id.removeprefix(f"{self.tenant}/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One line of the file."""

    digest: bytes  # sha256
    tenant: str
    limit: int | None


class TokenFile:
    """The tokens of a file, read again when it changes."""

    def __init__(self, path: Path, *, flag: str) -> None:
        """Raises ConfigError, naming the flag, for a file without tokens or with a line that is none."""
        self._path, self._flag = path, flag
        self._tokens: Watched[tuple[Token, ...]] = Watched([path], self._read)
        if not self._tokens.get():
            raise ConfigError(f"{flag} {path} has no tokens")

    @property
    def num_tenants(self) -> int:
        """Of the newest tokens."""
        return len({token.tenant for token in self._tokens.get()})

    def caller(self, token: str) -> Caller | None:
        """Whose token it is; None if nobody's. Takes as long for every token of the same length."""
        presented, found = sha256(token.encode(errors="surrogateescape")).digest(), None
        for known in self._tokens.get():
            if hmac.compare_digest(known.digest, presented):
                found = known
        return None if found is None else Caller(tenant=found.tenant, max_concurrent=found.limit)

    def _read(self) -> tuple[Token, ...]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._flag} {self._path} is not UTF-8") from error
        except OSError as error:
            raise ConfigError(f"{self._flag} {self._path} cannot be read: {error.strerror}") from error
        try:
            return _with_limits_of_tenants(list(_parsed(text)))
        except ValueError as error:
            raise ConfigError(f"{self._flag} {self._path}: {error}") from error


def _parsed(text: str) -> Iterator[Token]:
    seen: set[bytes] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        if fields and not fields[0].startswith("#"):
            token = _token(number, *fields)
            if token.digest in seen:
                raise ValueError(f"line {number}: this token is in an earlier line too")
            seen.add(token.digest)
            yield token


def _token(number: int, token: str, *fields: str) -> Token:
    if not (token.isascii() and token.isprintable()):
        raise ValueError(f"line {number}: a token must be printable ASCII")
    tenant, limit = "", None
    for field in fields:
        name, equals, value = field.partition("=")
        if equals and name == "limit" and limit is None and value.isdecimal() and int(value) >= 1:
            limit = int(value)
        elif not equals and not tenant and "/" not in field and len(field) <= MAX_TENANT_CHARACTERS:
            tenant = field
        else:  # which may be half of a token
            raise ValueError(f"line {number} is not `TOKEN [TENANT] [limit=N]`")
    return Token(digest=sha256(token.encode()).digest(), tenant=tenant or DEFAULT_TENANT, limit=limit)


def _with_limits_of_tenants(tokens: list[Token]) -> tuple[Token, ...]:
    limits: dict[str, int] = {}
    for token in tokens:
        if token.limit is not None and limits.setdefault(token.tenant, token.limit) != token.limit:
            raise ValueError(f"one tenant has two limits, {limits[token.tenant]} and {token.limit}")
    return tuple(Token(digest=t.digest, tenant=t.tenant, limit=limits.get(t.tenant)) for t in tokens)
