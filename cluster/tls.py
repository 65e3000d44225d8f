"""TLS for the gRPC port: certificates from files, read again when they change, clients' certificates if asked for."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cluster.errors import ConfigError
from cluster.watched import Watched


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of a server."""

    cert: Path  # the chain, ours first
    key: Path  # not encrypted
    client_ca: Path | None = None  # with it, only clients with a certificate of this authority are heard

    @property
    def paths(self) -> tuple[Path, ...]:
        """All of them."""
        return (self.cert, self.key) if self.client_ca is None else (self.cert, self.key, self.client_ca)

    def read(self) -> Any:
        """A grpc.ServerCertificateConfiguration. ConfigError for what is missing or does not belong together."""
        cert, key = _bytes_of("--tls-cert", self.cert), _bytes_of("--tls-key", self.key)
        client_ca = None if self.client_ca is None else _bytes_of("--tls-client-ca", self.client_ca)
        self._check()
        if (cert, key) != (_bytes_of("--tls-cert", self.cert), _bytes_of("--tls-key", self.key)):
            raise ConfigError(f"--tls-cert {self.cert} or --tls-key {self.key} changed while they were read")
        return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)

    def _check(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"--tls-cert {self.cert} and --tls-key {self.key} are no PEM certificate and its key: {_reason(error)}"
            ) from error
        if self.client_ca is None:
            return
        try:
            context.load_verify_locations(self.client_ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"--tls-client-ca {self.client_ca} holds no PEM certificate: {_reason(error)}") from error


def server_credentials(files: TlsFiles) -> Any:
    """grpc.ServerCredentials that present the newest certificate to each new connection. Raises ConfigError."""
    watched: Watched[Any] = Watched(files.paths, files.read)
    return grpc.dynamic_ssl_server_credentials(
        watched.get(), watched.get, require_client_authentication=files.client_ca is not None
    )


def channel_credentials(*, ca: Path | None = None, cert: Path | None = None, key: Path | None = None) -> Any:
    """A client's grpc.ChannelCredentials: whom it trusts (None: what gRPC trusts), and its own certificate.

    Raises ValueError for a certificate without its key, and for files that cannot be read.
    """
    if (cert is None) != (key is None):
        raise ValueError("a client's certificate needs cert and key, both of them")
    files = {"ca": ca, "key": key, "cert": cert}
    return grpc.ssl_channel_credentials(*(path and _bytes_of(name, path) for name, path in files.items()))


def _bytes_of(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from error


def _no_password() -> str:
    raise ssl.SSLError("the key is encrypted")


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return str(reason).replace("_", " ").lower()
