"""What a deployment is asked to be: the command line's flags as one frozen, checked value.

Names are those of vLLM's flags. Knows nothing about the model's files or the machine's memory:
`cluster.deployment` turns a ServeConfig into sizes.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from cluster.errors import ConfigError
from cluster.faults import Faults
from cluster.logs import FORMATS, LEVELS, LogConfig
from cluster.loopback import is_loopback

DTYPES = ("auto", "bfloat16", "float16", "float32")
QUANTIZATIONS = (None, "int8")
MAX_WEIGHT = 1000  # of a tenant
DEVICES = ("auto", "cpu", "cuda")
ATTENTIONS = ("auto", "cpu", "triton")
POLICIES = ("fcfs", "priority")
TRANSPORTS = ("ray", "grpc")
BLOCK_SIZES = (8, 16, 32, 64, 128)
MAX_STEPS_IN_FLIGHT = 4
METHODS = ("ngram", "eagle3", "draft_model")
RETENTIONS = ("request", "step")
AUTO = "auto"
AUTO_DRAFTS = 8  # the most that auto tries
MAX_DRAFTS = 64
DEFAULT_METRICS_PORT = 9464


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """`--speculative-config`, a JSON object with vLLM's keys and some of our own."""

    method: str | None = None  # None: the head that ships for the model, if there is one; prompt lookup in any case
    model: str | None = None  # directory of an EAGLE-3 head or of a draft model
    num_speculative_tokens: int | str = AUTO  # K: a number for every step, 0 for no drafts; auto: what pays
    prompt_lookup_min: int = 2  # shortest n-gram that is looked up
    prompt_lookup_max: int = 4  # longest, tried first
    max_model_len: int | None = None  # no drafts by the head or draft model at or past this position
    draft_tensor_parallel_size: int = 1
    draft_kv_retention: str = "request"  # of a draft model: its KV is kept with the request, or for one step
    draft_window: int = 128  # last tokens that a draft model sees under retention "step"
    num_draft_blocks: int | None = None  # of a draft model's pool

    @classmethod
    def from_json(cls, text: str) -> "SpeculativeConfig":
        """`{"method": "eagle3", "model": DIRECTORY, ...}`; ConfigError names a wrong key or value."""
        try:
            keys = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--speculative-config is not JSON: {error}") from error
        if keys is None:
            return cls(num_speculative_tokens=0)
        if not isinstance(keys, dict):
            raise ConfigError(f"--speculative-config must be a JSON object, got {type(keys).__name__}")
        unknown = sorted(set(keys) - set(cls.__dataclass_fields__))
        if unknown:
            raise ConfigError(
                f"--speculative-config: unknown key {unknown[0]!r}; known: {', '.join(cls.__dataclass_fields__)}"
            )
        speculative = cls(**keys)
        speculative.check()
        return speculative

    @property
    def is_adaptive(self) -> bool:
        """Whether the worker chooses K in each step."""
        return self.num_speculative_tokens == AUTO

    @property
    def max_drafts(self) -> int:
        """K, at most."""
        return AUTO_DRAFTS if isinstance(self.num_speculative_tokens, str) else self.num_speculative_tokens

    def check(self) -> None:
        """ConfigError for the first value out of range."""
        name = "--speculative-config"
        if self.method is not None and self.method not in METHODS:
            raise ConfigError(f"{name}: method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if not self.is_adaptive and type(self.num_speculative_tokens) is not int:
            raise ConfigError(
                f"{name}: num_speculative_tokens must be an integer or {AUTO!r}, got {self.num_speculative_tokens!r}"
            )
        for key in ("prompt_lookup_min", "prompt_lookup_max", "draft_window"):
            if type(getattr(self, key)) is not int:
                raise ConfigError(f"{name}: {key} must be an integer, got {getattr(self, key)!r}")
        for key in ("max_model_len", "num_draft_blocks"):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}: {key} must be an integer of at least 1, got {value!r}")
        _check_range(f"{name}: num_speculative_tokens", self.max_drafts, 0, MAX_DRAFTS)
        _check_range(f"{name}: prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        _check_range(f"{name}: draft_window", self.draft_window, 1, None)
        if self.draft_tensor_parallel_size != 1:
            raise ConfigError(f"{name}: draft_tensor_parallel_size must be 1, got {self.draft_tensor_parallel_size!r}")
        if self.draft_kv_retention not in RETENTIONS:
            known = ", ".join(RETENTIONS)
            raise ConfigError(f"{name}: draft_kv_retention must be one of {known}, got {self.draft_kv_retention!r}")
        self._check_model(name)

    def _check_model(self, name: str) -> None:
        if self.model is not None and not isinstance(self.model, str):
            raise ConfigError(f"{name}: model must be a directory, got {self.model!r}")
        if self.method in ("eagle3", "draft_model") and self.model is None:
            raise ConfigError(f"{name}: method {self.method} needs model, a directory")
        if self.model is not None and self.method in (None, "ngram"):
            raise ConfigError(f"{name}: model {self.model!r} needs method eagle3 or draft_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything `slipstream serve` can be told. None leaves a value to the model and the machine."""

    model: str = "smollm2"
    served_model_name: str | None = None
    dtype: str = "auto"
    quantization: str | None = None  # of the weights
    max_model_len: int | None = None  # tokens
    max_num_seqs: int = 64  # rows of one worker
    max_num_batched_tokens: int | None = None  # token budget of one step
    block_size: int = 16  # tokens
    num_gpu_blocks_override: int | None = None  # blocks of one worker, on any device
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1  # workers
    seed: int | None = None  # of the seeds drawn for requests that bring none
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    host: str = "127.0.0.1"
    port: int = 50051  # 0: any free one
    tls_cert: str | None = None  # PEM files; read again when they change
    tls_key: str | None = None
    tls_client_ca: str | None = None  # with it, clients need a certificate of this authority
    insecure: bool = False  # may listen beyond loopback without TLS
    auth_token_file: str | None = None  # lines of `TOKEN [TENANT] [limit=N]`; read again when it changes
    admin_token_file: str | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None  # Prometheus'; 0: off; None: DEFAULT_METRICS_PORT, or any free one if it is taken
    device: str = "auto"
    attention: str = "auto"
    max_steps_in_flight: int = 2  # per worker
    threads: int | None = None  # of one worker
    max_waiting: int = 4096  # requests
    max_waiting_tokens: int | None = None  # prompts and outputs at most; None: eight times what the pools hold
    tenant_weights: str | None = None  # a JSON object: a tenant's share of the service where several wait, 1 for others
    record_events: int = 0  # length of the scheduler's log; 0: none
    address: str | None = None  # of a running Ray cluster to join; None: one of this machine alone
    num_front_ends: int = 1
    transport: str = "ray"  # of steps between the scheduler and its workers
    faults: Faults = field(default_factory=Faults)  # between the scheduler and its workers
    log_format: str = "text"
    log_level: str = "info"
    log_file: str | None = None  # of every process; None: each one's stderr, which Ray keeps for actors
    log_prompts: bool = False
    otlp_traces_endpoint: str | None = None  # http://HOST:PORT of a receiver over gRPC; None: OpenTelemetry's variables
    heartbeat_s: float = 0.5
    worker_down_after_s: float = 3.0  # silent for so long
    worker_hung_after_s: float = 20.0  # silent for so long more: its process is ended

    def __post_init__(self) -> None:
        """ConfigError for the first flag out of range."""
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"--tensor-parallel-size {self.tensor_parallel_size} is not implemented; a worker is one device (1)"
            )
        for flag, allowed in CHOICES.items():
            _check_choice(flag, getattr(self, flag), allowed)
        for flag, (low, high) in RANGES.items():
            value = getattr(self, flag)
            if value is not None:
                _check_range(_dashed(flag), value, low, high)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        self.speculative.check()
        self.faults.check()
        parse_weights(self.tenant_weights)
        self._check_security()

    @property
    def logs(self) -> LogConfig:
        """For every process of the deployment."""
        file = None if self.log_file is None else str(Path(self.log_file).absolute())
        return LogConfig(format=self.log_format, level=self.log_level, file=file, prompts=self.log_prompts)

    def _check_security(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key are needed together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key")
        if self.insecure:
            return
        if self.tls_cert is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} listens beyond loopback without TLS: give --tls-cert and --tls-key, or --insecure"
            )
        if self.metrics_port != 0 and not is_loopback(self.metrics_host):
            raise ConfigError(
                f"--metrics-host {self.metrics_host} listens beyond loopback, and metrics have no TLS: give --insecure"
            )


CHOICES: dict[str, tuple[object, ...]] = {
    "dtype": DTYPES,
    "quantization": QUANTIZATIONS,
    "device": DEVICES,
    "attention": ATTENTIONS,
    "scheduling_policy": POLICIES,
    "block_size": BLOCK_SIZES,
    "transport": TRANSPORTS,
    "log_format": FORMATS,
    "log_level": LEVELS,
}
RANGES: dict[str, tuple[float, float | None]] = {
    "max_model_len": (2, None),
    "max_num_seqs": (1, 1 << 16),
    "max_num_batched_tokens": (1, 1 << 20),
    "num_gpu_blocks_override": (1, None),
    "data_parallel_size": (1, 1024),
    "seed": (0, (1 << 64) - 1),
    "port": (0, 65535),
    "metrics_port": (0, 65535),
    "max_steps_in_flight": (1, MAX_STEPS_IN_FLIGHT),
    "threads": (1, 1024),
    "max_waiting": (1, None),
    "max_waiting_tokens": (1, None),
    "record_events": (0, None),
    "num_front_ends": (1, 64),
    "heartbeat_s": (0.01, None),
    "worker_down_after_s": (0.05, None),
    "worker_hung_after_s": (0.05, None),
}


def parse_weights(text: str | None) -> tuple[tuple[str, int], ...]:
    """Tenants and their shares; ConfigError unless it is an object of whole numbers from 1 to MAX_WEIGHT."""
    try:
        weights = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(f"--tenant-weights is not JSON: {error}") from error
    if not isinstance(weights, dict):
        raise ConfigError(f"--tenant-weights must be a JSON object, got {type(weights).__name__}")
    for tenant, weight in weights.items():
        if type(weight) is not int or not 1 <= weight <= MAX_WEIGHT:
            limit = f"a whole number in [1, {MAX_WEIGHT}]"
            raise ConfigError(f"--tenant-weights: {tenant!r} must be {limit}, got {weight!r}")
    return tuple(weights.items())


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        names = ", ".join(str(choice) for choice in allowed if choice is not None)
        raise ConfigError(f"{_dashed(name)} must be one of {names}, got {value!r}")


def _check_range(name: str, value: float, low: float, high: float | None) -> None:
    if high is None and value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")
    if high is not None and not low <= value <= high:
        raise ConfigError(f"{name} must be in [{low}, {high}], got {value}")
