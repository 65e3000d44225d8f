"""From flags and a model's directory to sizes: pool, lengths, threads, one WorkerSpec per worker.

Reads config.json and file sizes only; imports no torch, so the command line answers at once.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

import worker
from cluster.config import ServeConfig, parse_weights
from cluster.errors import ConfigError
from scheduler.events import SchedulerConfig
from worker.actor import WorkerSpec
from worker.drafting import DraftSpec

CPU_POOL_BYTES = 1 << 30  # of one worker, by default
CPU_POOL_SHARE = 0.25  # of the memory that is free, all workers together
DRAFT_POOL_BYTES = 1 << 28  # of one worker's draft model
SHIPPED_HEADS = Path(worker.__file__).parent / "heads"  # a directory for each model that has one
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
RESEND_AFTER_NS = 30_000_000_000  # transports deliver or say that they did not; a step on a CPU may take seconds
RESEND_AFTER_FAULTS_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What sizes depend on, from a checkpoint's config.json."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str
    weight_bytes: int

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelShape":
        """ConfigError names the file or key that is missing or wrong."""
        path = directory / "config.json"
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"--model: cannot read {path}: {error}") from error
        try:
            num_heads = int(config["num_attention_heads"])
            return cls(
                num_layers=int(config["num_hidden_layers"]),
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
                vocab_size=int(config["vocab_size"]),
                max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
                weight_bytes=sum(file.stat().st_size for file in directory.glob("*.safetensors")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"--model: {path} has no usable {error}") from error

    def bytes_per_block(self, block_size: int, dtype: str) -> int:
        """Key and value of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * block_size * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A deployment in numbers: nothing is left to be decided but what a GPU's memory holds."""

    directory: Path
    model_name: str
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    scheduler: SchedulerConfig
    workers: tuple[WorkerSpec, ...]


def size(config: ServeConfig, directory: Path) -> Sizes:
    """ConfigError for a flag that this model or this machine cannot satisfy."""
    shape = ModelShape.from_directory(directory)
    check_weight_files(directory)
    device = _device(config)
    dtype = _dtype(config, shape)
    max_model_len = _max_model_len(config, shape)
    num_blocks = _num_blocks(config, shape, device, dtype, max_model_len)
    attention = config.attention if config.attention != "auto" else {"cpu": "cpu", "cuda": "triton"}[device]
    if (device, attention) == ("cuda", "cpu"):
        raise ConfigError("--attention cpu needs --device cpu")
    if (device, config.quantization) == ("cuda", "int8"):
        raise ConfigError("--quantization int8 needs --device cpu")
    drafts = _draft_spec(config, dtype, max_model_len)
    threads = config.threads or default_threads(config.data_parallel_size)
    cores = _cores(config, device, threads)
    workers = tuple(
        WorkerSpec(
            worker_id=f"worker-{index}",
            directory=str(directory),
            fetched=_fetched(config),
            dtype=dtype,
            quantization=config.quantization,
            device=device,
            attention=attention,
            num_blocks=num_blocks,
            gpu_memory_utilization=config.gpu_memory_utilization,
            block_size=config.block_size,
            bytes_per_block=shape.bytes_per_block(config.block_size, dtype)
            + _head_bytes_per_block(config, drafts, dtype),
            weight_bytes=shape.weight_bytes + _draft_bytes(config, drafts, dtype),
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            drafts=drafts,
            threads=threads,
            cores=cores[index],
        )
        for index in range(config.data_parallel_size)
    )
    return Sizes(
        directory=directory,
        model_name=config.served_model_name or config.model,
        vocab_size=shape.vocab_size,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
        scheduler=_scheduler_config(config, device, max_model_len, num_blocks),
        workers=workers,
    )


def _cores(config: ServeConfig, device: str, threads: int) -> Sequence[tuple[int, ...] | None]:
    """Of each worker: cores of its own where several share this machine and there are enough; they wait for each
    other's threads otherwise."""
    count = config.data_parallel_size
    cores = sorted(os.sched_getaffinity(0))
    if device != "cpu" or config.address is not None or count == 1 or count * threads > len(cores):
        return [None] * count
    return [tuple(cores[index * threads : (index + 1) * threads]) for index in range(count)]


def _draft_spec(config: ServeConfig, dtype: str, max_model_len: int) -> DraftSpec:
    """The method that is asked for; without one, the head that ships for the model if there is one."""
    asked = config.speculative
    method, model = asked.method or "ngram", asked.model
    shipped = SHIPPED_HEADS / config.model
    if asked.method is None and asked.max_drafts > 0 and config.model.isidentifier() and shipped.is_dir():
        method, model = "eagle3", str(shipped)
    num_blocks = 0
    directory = None if model is None else Path(model).expanduser().absolute()
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"--speculative-config: model {model} is not a directory (`slipstream fetch` makes one)")
    if method == "draft_model" and directory is not None:
        num_blocks = asked.num_draft_blocks or _num_draft_blocks(config, directory, dtype, max_model_len)
    return DraftSpec(
        method=method,
        max_drafts=asked.max_drafts,
        is_adaptive=asked.is_adaptive,
        directory=None if directory is None else str(directory),
        prompt_lookup_min=asked.prompt_lookup_min,
        prompt_lookup_max=asked.prompt_lookup_max,
        max_model_len=asked.max_model_len,
        num_blocks=num_blocks,
        kv_retention=asked.draft_kv_retention,
        window=asked.draft_window,
    )


def _num_draft_blocks(config: ServeConfig, directory: Path, dtype: str, max_model_len: int) -> int:
    """Enough for every row, or what DRAFT_POOL_BYTES hold; draft KV is evicted when it is short."""
    shape = ModelShape.from_directory(directory)
    longest = min(max_model_len, shape.max_position_embeddings)
    if config.speculative.draft_kv_retention == "step":
        longest = min(longest, config.speculative.draft_window + config.speculative.max_drafts)
    needed = -(-longest // config.block_size)
    held = DRAFT_POOL_BYTES // shape.bytes_per_block(config.block_size, dtype)
    return max(min(held, needed * config.max_num_seqs), needed)


def _draft_bytes(config: ServeConfig, drafts: DraftSpec, dtype: str) -> int:
    """Of the weights and the pool of what drafts."""
    if drafts.directory is None:
        return 0
    directory = Path(drafts.directory)
    weights = sum(file.stat().st_size for file in directory.iterdir() if file.suffix in (".safetensors", ".bin"))
    if drafts.method != "draft_model":
        return weights
    shape = ModelShape.from_directory(directory)
    return weights + drafts.num_blocks * shape.bytes_per_block(config.block_size, dtype)


def _head_bytes_per_block(config: ServeConfig, drafts: DraftSpec, dtype: str) -> int:
    """Key and value of a head's layer, which has a slot for each of the target's."""
    if drafts.method != "eagle3" or drafts.directory is None:
        return 0
    path = Path(drafts.directory) / "config.json"
    try:
        settings = json.loads(path.read_text())
        layer = settings.get("transformer_layer_config", settings)
        num_heads = int(layer["num_attention_heads"])
        size = int(layer.get("head_dim") or layer["hidden_size"] // num_heads)
        return 2 * int(layer.get("num_key_value_heads") or num_heads) * size * config.block_size * DTYPE_BYTES[dtype]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--speculative-config: {path} is no head's: {error}") from error


def _fetched(config: ServeConfig) -> str | None:
    """The model's name where workers are on other machines and can fetch it there themselves."""
    if config.address is None or Path(config.model).expanduser().is_dir():
        return None
    return config.model


def check_weight_files(directory: Path) -> None:
    """ConfigError for a directory without weights, or a file that is cut short or has a broken header."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"--model: {directory} has no *.safetensors")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"--model: {file} is damaged: {error}") from error


def num_cpus() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def default_threads(num_workers: int) -> int:
    """Of each worker: its share of all cores but one, which the scheduler and the front end run on.

    Where they interrupt one thread of a step, the others wait for it a hundred times a step.
    """
    return max(1, (num_cpus() - 1) // num_workers)


def _scheduler_config(config: ServeConfig, device: str, max_model_len: int, num_blocks: int | None) -> SchedulerConfig:
    default_budget = 2048 if device == "cuda" else 512  # a CPU's long steps would hold up everyone's tokens
    return SchedulerConfig(
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens or default_budget,
        max_steps_in_flight=config.max_steps_in_flight,
        max_drafts=config.speculative.max_drafts,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        max_waiting=config.max_waiting,
        tenant_weights=parse_weights(config.tenant_weights),
        largest_pool_blocks=num_blocks if num_blocks is not None else 1 << 30,
        resend_after_ns=RESEND_AFTER_FAULTS_NS if config.faults.any else RESEND_AFTER_NS,
    )


def _device(config: ServeConfig) -> str:
    has_cuda = Path("/dev/nvidiactl").exists()
    if config.device == "cuda" and not has_cuda and config.address is None:  # the workers' machines have it
        raise ConfigError("--device cuda: this machine has no CUDA device")
    if config.device == "auto":
        return "cuda" if has_cuda else "cpu"
    return config.device


def _dtype(config: ServeConfig, shape: ModelShape) -> str:
    dtype = config.dtype if config.dtype != "auto" else shape.dtype.removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype auto: the model's own dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    return dtype


def _max_model_len(config: ServeConfig, shape: ModelShape) -> int:
    asked = config.max_model_len or shape.max_position_embeddings
    if asked > shape.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {asked} is beyond the model's max_position_embeddings {shape.max_position_embeddings}"
        )
    return asked


def _num_blocks(config: ServeConfig, shape: ModelShape, device: str, dtype: str, max_model_len: int) -> int | None:
    """Blocks of one worker's pool; None on a GPU, which knows its free memory only once it has the weights."""
    needed = -(-max_model_len // config.block_size)
    if config.num_gpu_blocks_override is not None:
        return _holding_one_sequence(config.num_gpu_blocks_override, needed, config, max_model_len)
    if device == "cuda":
        return None
    room = min(CPU_POOL_BYTES, int(CPU_POOL_SHARE * _available_bytes()) // config.data_parallel_size)
    num_blocks = min(room // shape.bytes_per_block(config.block_size, dtype), needed * config.max_num_seqs)
    return _holding_one_sequence(num_blocks, needed, config, max_model_len)


def _holding_one_sequence(num_blocks: int, needed: int, config: ServeConfig, max_model_len: int) -> int:
    if num_blocks < needed:
        raise ConfigError(
            f"--num-gpu-blocks-override: {num_blocks} blocks of {config.block_size} tokens hold less than one sequence "
            f"of --max-model-len {max_model_len}, which needs {needed}"
        )
    return num_blocks


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
