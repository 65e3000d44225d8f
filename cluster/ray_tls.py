"""Ray's own TLS settings, for what else runs between its nodes: both ends show a certificate of the same authority.

Ray reads RAY_USE_TLS, RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT on every node.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import grpc


class _Files(NamedTuple):
    """PEM contents."""

    cert: bytes
    key: bytes
    ca: bytes


def server_credentials() -> Any:
    """grpc.ServerCredentials that ask callers for a certificate; None when Ray runs without TLS."""
    files = _files()
    return files and grpc.ssl_server_credentials([(files.key, files.cert)], files.ca, require_client_auth=True)


def channel_credentials() -> Any:
    """grpc.ChannelCredentials of a node; None when Ray runs without TLS."""
    files = _files()
    return files and grpc.ssl_channel_credentials(files.ca, files.key, files.cert)


def _files() -> _Files | None:
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    return _Files(*(Path(os.environ[name]).read_bytes() for name in names))
