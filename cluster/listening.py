"""Where the front ends of a deployment listen and what they ask of callers, from its configuration."""

from pathlib import Path

from cluster.config import DEFAULT_METRICS_PORT, ServeConfig
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
