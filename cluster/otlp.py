"""Where spans of requests are exported to: what the flag or OpenTelemetry's own variables say."""

import importlib
from collections.abc import Mapping

from cluster.errors import ConfigError

FLAG = "--otlp-traces-endpoint"
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"


def traces_endpoint(flag: str | None, environment: Mapping[str, str]) -> str | None:
    """Where spans go, from the flag or OpenTelemetry's own variables; None: nowhere. Raises ConfigError."""
    wanted = {FLAG: flag, **{name: environment.get(name) for name in ENDPOINT_VARIABLES}}
    name, endpoint = next(((name, value) for name, value in wanted.items() if value), ("", None))
    if endpoint is None:
        return None
    protocol = next((environment[name] for name in PROTOCOL_VARIABLES if environment.get(name)), "grpc")
    if protocol != "grpc":
        asked = " or ".join(PROTOCOL_VARIABLES)
        raise ConfigError(f"{name} {endpoint}: spans are exported by grpc, {asked} says {protocol!r}")
    try:
        importlib.import_module(EXPORTER)
    except ImportError as error:
        raise ConfigError(f"{name} {endpoint}: spans need the extra `otel`: pip install 'slipstream[otel]'") from error
    return endpoint
