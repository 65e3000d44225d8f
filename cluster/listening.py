"""Where the front ends of a deployment listen and what they ask of callers, from its configuration."""

import socket
from pathlib import Path

from cluster.config import DEFAULT_METRICS_PORT, ServeConfig
from cluster.errors import ConfigError
from cluster.metrics_server import MetricsConfig
from cluster.server import ServerConfig
from cluster.tls import TlsFiles


def server_config(config: ServeConfig, index: int = 0) -> ServerConfig:
    """Of the `index`-th front end."""
    cert, key = _absolute(config.tls_cert), _absolute(config.tls_key)
    tls = None
    if cert is not None and key is not None:
        tls = TlsFiles(cert=cert, key=key, client_ca=_absolute(config.tls_client_ca))
    return ServerConfig(
        host=config.host,
        port=config.port + index if config.port else 0,
        tls=tls,
        insecure=config.insecure,
        auth_token_file=_absolute(config.auth_token_file),
        admin_token_file=_absolute(config.admin_token_file),
    )


def metrics_config(config: ServeConfig, index: int) -> MetricsConfig | None:
    """Of the `index`-th front end. The scheduler's are shown by the first only, so that sums are right."""
    if config.metrics_port == 0:
        return None
    port = DEFAULT_METRICS_PORT if config.metrics_port is None else config.metrics_port
    return MetricsConfig(
        host=config.metrics_host, port=port + index, any_port=config.metrics_port is None, with_scheduler=index == 0
    )


def _absolute(path: str | None) -> Path | None:
    """A front end's process has another working directory."""
    return None if path is None else Path(path).absolute()


def check_port_is_free(host: str, port: int, *, port_flag: str = "--port", host_flag: str = "--host") -> None:
    """ConfigError if nobody can listen there now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"{host_flag} {host}: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server linger
        try:
            probe.bind(address)
            probe.listen()
        except OSError as error:
            where = f"{port_flag} {port} on {host_flag} {host}"
            raise ConfigError(f"{where} cannot be listened on: {error.strerror}") from error
