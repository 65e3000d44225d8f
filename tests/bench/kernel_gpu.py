"""Check and time the kernels on one GPU: correctness first, then attention, steps and a model end to end.

No Ray, under 8 minutes. The dry run takes the same path on the CPU under Triton's interpreter with tiny sizes:
it shows that the script works, and says nothing about speed.
"""

import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from cluster.engine import Engine
from scheduler.events import SchedulerConfig
from tests.bench.device_streams import DeviceStreams, host_stream, tiny_config, tiny_requests
from tests.kernel_batches import PagedBatch, paged_batch
from worker.device_runner import DeviceRunner
from worker.drafter import NgramDrafter
from worker.kernels.attention import (
    AttentionLaunch,
    AttentionShape,
    is_interpreting,
    paged_attention,
    paged_attention_reference,
    plan_launch,
)
from worker.kernels.rows import DeviceRows
from worker.kernels.sampling import SamplingColumns, sample, sample_reference
from worker.kernels.step import DeviceStep, HostPlan
from worker.kernels.store import store_kv, store_kv_reference
from worker.kernels.tuning import SPLIT_SIZE, AttentionTiles, attention_tiles
from worker.model import Model, ModelConfig, random_model

BUDGET_S = 450.0  # sections that have not begun by then are skipped
SWEPT_TILES = ((32, 4, 2), (32, 4, 4), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3), (128, 8, 2))
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large everything is."""

    device: str
    dtype: torch.dtype
    batch: int
    context: int
    contexts: tuple[int, ...]  # of the cost-against-context table
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dims: tuple[int, ...]  # checked
    prefill: int
    num_drafts: int
    copy_bytes: int
    repeats: int
    sweep: bool
    step_batches: tuple[int, ...]
    step_context: int
    step_model: ModelConfig
    num_requests: int


GPU_SIZES = Sizes(
    device="cuda",
    dtype=torch.bfloat16,
    batch=64,
    context=4096,
    contexts=(256, 1024, 4096, 8192),
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    head_dims=(64, 80, 96, 128, 256),
    prefill=4096,
    num_drafts=4,
    copy_bytes=1 << 30,
    repeats=20,
    sweep=True,
    step_batches=(1, 8, 64),
    step_context=1024,
    step_model=ModelConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=8,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=4096,
    ),
    num_requests=6,
)

DRY_SIZES = Sizes(
    device="cpu",
    dtype=torch.float16,
    batch=2,
    context=70,
    contexts=(20, 70),
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    head_dims=(32, 80),
    prefill=20,
    num_drafts=2,
    copy_bytes=1 << 16,
    repeats=1,
    sweep=False,
    step_batches=(1, 2),
    step_context=20,
    step_model=tiny_config(),
    num_requests=1,
)


@dataclass(slots=True)
class Report:
    """What was checked and measured."""

    rows: list[dict[str, object]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    quiet: bool = False

    def add(self, name: str, value: float | str, unit: str = "", note: str = "") -> None:
        """One line of the table."""
        self.rows.append({"name": name, "value": value, "unit": unit, "note": note})
        if not self.quiet:
            shown = f"{value:.4g}" if isinstance(value, float) else value
            print(f"{name:58} {shown:>12} {unit:6} {note}", flush=True)

    def check(self, name: str, held: bool, detail: str) -> None:
        """One thing that must hold."""
        self.add(name, "ok" if held else "FAILED", note=detail)
        if not held:
            self.failures.append(f"{name}: {detail}")


def run(*, dry: bool, as_json: bool = False) -> int:
    """The whole script. Exit code 0 if every check held."""
    if not dry and not torch.cuda.is_available():
        sys.stderr.write("--gpu: no CUDA or ROCm device is available\n")
        return 2
    if dry and not is_interpreting():
        sys.stderr.write("--dry-run: set TRITON_INTERPRET=1\n")
        return 2
    sizes = DRY_SIZES if dry else GPU_SIZES
    report = Report(quiet=as_json)
    name = "CPU, interpreted: times mean nothing" if dry else torch.cuda.get_device_name()
    report.add("device", name, note=f"torch {torch.__version__}")
    started = time.monotonic()
    for section in (
        check_attention,
        check_rows_alone,
        check_store,
        check_samples,
        check_streams,
        check_runner,
        time_attention,
        time_contexts,
        time_against_sdpa,
        time_steps,
        time_samples,
        time_tiles,
    ):
        if time.monotonic() - started > BUDGET_S:
            report.add(section.__name__, "skipped", note=f"{BUDGET_S:.0f} s are over")
            continue
        with _surviving(report, section.__name__):
            section(sizes, report)
        if not dry:
            torch.cuda.empty_cache()
    report.add("script", time.monotonic() - started, "s")
    if as_json:
        print(json.dumps({"rows": report.rows, "failures": report.failures}, indent=1))
    for failure in report.failures:
        sys.stderr.write(f"FAILED {failure}\n")
    return 1 if report.failures else 0


@contextmanager
def _surviving(report: Report, name: str) -> Iterator[None]:
    """One section's error does not cost the others: it is reported as a failure."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        report.failures.append(f"{name}: {error!r}")


# ---- correctness ----


def check_attention(sizes: Sizes, report: Report) -> None:
    """Every head size and dtype, ragged, against float64; NaN in every slot that is nobody's."""
    cases = [(dtype, head_dim) for dtype in TOLERANCE for head_dim in sizes.head_dims]
    for index, (dtype, head_dim) in enumerate(cases):
        for window, softcap in ((None, None), (37, 20.0)):
            shape = _shape(
                sizes, head_dim=head_dim, dtype=dtype, window=window, softcap=softcap, split=64 * (1 + index % 2)
            )
            batch = _ragged(sizes, shape, seed=index, block_size=(16, 32, 64)[index % 3])
            shape = replace(shape, block_size=batch.key_cache.shape[1])
            out, launch = _poisoned(batch, shape)
            _attend(batch, shape, launch, out)
            error = float((out.double() - _reference(batch, shape)).abs().nan_to_num(math.inf).max())
            name = f"attention d{head_dim} {str(dtype)[6:]}{' window softcap' if window else ''}"
            report.check(name, error <= TOLERANCE[dtype], f"largest error {error:.2g}")


def check_rows_alone(sizes: Sizes, report: Report) -> None:
    """With the same tiles a row keeps its bits alone, in a batch, and with its splits in one program."""
    shape = _shape(sizes, split=64)
    batch = _ragged(sizes, shape, seed=99)
    out, launch = _poisoned(batch, shape)
    _attend(batch, shape, launch, out)
    bounds = batch.cu_seqlens_q.tolist()
    equal = True
    for req in range(len(bounds) - 1):
        alone = batch.alone(req)
        single, single_launch = _poisoned(alone, shape)
        _attend(alone, shape, single_launch, single)
        equal &= torch.equal(single, out[bounds[req] : bounds[req + 1]])
    report.check("rows alone and in company, bits", equal, "fixed tiles")
    folded, folded_launch = _poisoned(batch, shape, workspace=0)
    _attend(batch, shape, folded_launch, folded)
    report.check("splits in parallel and in one program, bits", torch.equal(folded, out), "fixed tiles")


def check_store(sizes: Sizes, report: Report) -> None:
    """Strided sources, padded tokens."""
    fused = torch.randn(33, 3 * 256, device=sizes.device).to(sizes.dtype)
    key, value = fused[:, :256].view(33, 2, 128), fused[:, 256:512].view(33, 2, 128)
    slots = torch.randperm(80)[:33].to(sizes.device)
    slots[5] = -1
    stored, expected = (
        [torch.ones((5, 16, 2, 128), dtype=sizes.dtype, device=sizes.device) for _ in range(2)] for _ in range(2)
    )
    store_kv(key, value, stored[0], stored[1], slots)
    store_kv_reference(key, value, expected[0], expected[1], slots)
    report.check("store", torch.equal(torch.stack(stored), torch.stack(expected)), "33 tokens, one of them padding")


def check_samples(sizes: Sizes, report: Report) -> None:
    """Temperature, filters and noise against the host's sampler."""
    columns, logits, rows, positions = _sampling_case(sizes, num_rows=6 if sizes.device == "cpu" else 64)
    sampled = torch.empty_like(rows)
    sample(logits, rows, positions, columns, sampled)
    expected = sample_reference(logits.cpu(), rows.cpu(), positions.cpu(), columns)
    equal = int((sampled.cpu() == expected).sum())
    # The last bit of a logarithm may differ between libraries: one near tie is no fault.
    report.check("samples equal the host's", equal >= len(rows) - len(rows) // 32, f"{equal} of {len(rows)}")


def check_streams(sizes: Sizes, report: Report) -> None:
    """A small random float32 model end to end: device rows, chunks, spoiled drafts, against the CPU."""
    generator = np.random.default_rng(5)
    requests = tiny_requests(sizes.num_requests, generator, max_tokens=4 if sizes.device == "cpu" else 24)
    host, device = _tiny_models(sizes)
    expected = [host_stream(host, request) for request in requests]
    for use_graphs in (False, True) if sizes.device == "cuda" else (False,):
        streams = DeviceStreams(
            device, requests, max_drafts=sizes.num_drafts, device=sizes.device, use_graphs=use_graphs
        )
        for _ in range(500):
            if streams.done:
                break
            streams.draft(expected, generator, spoil=0.3)
            streams.step(generator)
        equal = sum(got == want for got, want in zip(streams.outputs, expected, strict=True))
        name = f"streams of a random model, device against CPU{', graphs' if use_graphs else ''}"
        detail = f"{equal} of {len(requests)} equal, {streams.num_accepted} of {streams.num_verified} drafts accepted"
        # float32 sums differ in their last bits between devices: a near tie may fall the other way.
        report.check(name, equal >= len(requests) - len(requests) // 4, f"{detail}, {streams.num_graphs} graphs")


def check_runner(sizes: Sizes, report: Report) -> None:
    """What a worker runs, under the product's scheduler: drafts looked up on the device, a row sampled by the host."""
    max_tokens = 4 if sizes.device == "cpu" else 24
    requests = tiny_requests(sizes.num_requests, np.random.default_rng(6), max_tokens=max_tokens)
    requests[0] = replace(requests[0], sampling=replace(requests[0].sampling, repetition_penalty=1.2))
    host, device = _tiny_models(sizes)
    runner = DeviceRunner(
        worker_id="device",
        model=device,
        drafter=NgramDrafter(max_drafts=sizes.num_drafts, prompt_lookup_min=1),
        max_num_seqs=4,
        sanitizer=None,
    )
    engine = Engine([runner], SchedulerConfig(max_model_len=device.max_model_len, max_drafts=sizes.num_drafts))
    ids = [engine.submit(request.prompt, request.sampling, request.max_tokens) for request in requests]
    outputs = engine.run()
    equal = sum(
        outputs[request_id].token_ids == host_stream(host, request)
        for request_id, request in zip(ids, requests, strict=True)
    )
    detail = f"{equal} of {len(requests)} equal, {runner.num_host_sampled} frames sampled by the host"
    name = "streams of a worker's runner, device against CPU"
    report.check(name, equal >= len(requests) - len(requests) // 4, f"{detail}, {runner.num_graphs} graphs")


def _tiny_models(sizes: Sizes) -> tuple[Model, Model]:
    """The same random weights on the CPU and on the device, float32."""
    host, device = (
        random_model(
            tiny_config(), seed=3, dtype=torch.float32, device=place, attention=attention, num_blocks=64, block_size=16
        )
        for place, attention in (("cpu", "cpu"), (sizes.device, "triton"))
    )
    return host, device


# ---- times ----


def time_attention(sizes: Sizes, report: Report) -> None:
    """Decode and verify at the goal's shape, beside the bytes they must read."""
    bandwidth = copy_bandwidth(sizes)
    report.add("copy bandwidth", bandwidth / 1e9, "GB/s", "bytes read and written")
    shape = _shape(sizes)
    times: dict[int, float] = {}
    for num_new in (1, 1 + sizes.num_drafts):
        batch = _uniform(sizes, num_new, sizes.context)
        times[num_new] = _attention_time(sizes, batch, shape)
        speed = _bytes_of(batch, shape) / times[num_new]
        name = f"attention batch {sizes.batch} context {sizes.context} new tokens {num_new}"
        report.add(name, times[num_new] * 1e6, "us", f"{speed / 1e9:.0f} GB/s")
        report.add(f"{name}: of copy bandwidth", speed / bandwidth, "", "goal for one new token: >= 0.85")
    ratio = times[1 + sizes.num_drafts] / times[1]
    report.add(f"K = {sizes.num_drafts} verify over one decode", ratio, "x", "goal: <= 1.15")


def time_contexts(sizes: Sizes, report: Report) -> None:
    """Cost against context."""
    shape = _shape(sizes)
    for context in sizes.contexts:
        for num_reqs in (1, sizes.batch):
            batch = _uniform(replace(sizes, batch=num_reqs), 1, context)
            seconds = _attention_time(sizes, batch, shape)
            note = f"{_bytes_of(batch, shape) / seconds / 1e9:.0f} GB/s"
            report.add(f"decode batch {num_reqs} context {context}", seconds * 1e6, "us", note)


def time_against_sdpa(sizes: Sizes, report: Report) -> None:
    """torch's SDPA on the same work with dense, contiguous KV: decode, verify, prefill."""
    shape = _shape(sizes)
    jobs = [
        ("decode", sizes.batch, 1, sizes.context),
        (f"verify K={sizes.num_drafts}", sizes.batch, 1 + sizes.num_drafts, sizes.context),
        ("prefill", 1, sizes.prefill, 0),
    ]
    for name, num_reqs, num_new, context in jobs:
        batch = _uniform(replace(sizes, batch=num_reqs), num_new, context)
        ours = _attention_time(sizes, batch, shape)
        theirs = _sdpa_time(sizes, num_reqs, num_new, context)
        note = f"ours {ours * 1e6:.0f} us, SDPA {theirs * 1e6:.0f} us"
        report.add(f"SDPA time over ours, {name}", theirs / ours, "x", note)


def time_steps(sizes: Sizes, report: Report) -> None:
    """A whole decode step of a random model, with and without graphs."""
    config, block_size = sizes.step_model, 16
    capacity = sizes.step_context + 8 * sizes.repeats * (1 + sizes.num_drafts)
    blocks_per_row = -(-capacity // block_size)
    model = random_model(
        config,
        seed=0,
        dtype=sizes.dtype if sizes.device == "cuda" else torch.float32,
        device=sizes.device,
        attention="triton",
        num_blocks=max(sizes.step_batches) * blocks_per_row,
        block_size=block_size,
    )
    for num_reqs in sizes.step_batches:
        for use_graphs in (False, True) if sizes.device == "cuda" else (False,):
            state = DeviceRows.empty(
                max_num_seqs=num_reqs, max_model_len=capacity, block_size=block_size, device=sizes.device
            )
            num_blocks = num_reqs * blocks_per_row
            state.block_table.copy_(torch.arange(num_blocks, dtype=torch.int32).view(num_reqs, -1))
            state.num_tokens.fill_(sizes.step_context)
            state.num_computed.fill_(sizes.step_context - 1)
            state.end.fill_(capacity)
            step = DeviceStep(model, state, max_drafts=sizes.num_drafts, use_graphs=use_graphs)
            columns = (np.arange(num_reqs), np.full(num_reqs, 1), np.zeros(num_reqs), np.ones(num_reqs))
            rows, num_scheduled, num_drafts, reserved = (column.astype(np.int32) for column in columns)
            plan = HostPlan(
                rows=rows,
                num_scheduled=num_scheduled,
                num_drafts=num_drafts,
                reserved=reserved,
                max_seq_len=capacity,
            )
            seconds = _wall_time(sizes, partial(step.execute, plan))
            graphs = "with graphs" if use_graphs else "without graphs"
            note = f"{config.num_layers} layers, hidden {config.hidden_size}, context {sizes.step_context}"
            report.add(f"step of {num_reqs} decodes {graphs}", seconds * 1e6, "us", f"{note}, {step.num_graphs} graphs")


def time_samples(sizes: Sizes, report: Report) -> None:
    """Sampling a large vocabulary: greedy, plain temperature, all filters."""
    num_rows = 2 if sizes.device == "cpu" else 64
    _, logits, rows, positions = _sampling_case(sizes, num_rows=num_rows)
    sampled = torch.empty_like(rows)
    for name, temperature, top_k, top_p in (
        ("greedy", 0.0, 0, 1.0),
        ("temperature", 0.8, 0, 1.0),
        ("temperature, top_k, top_p", 0.8, 50, 0.9),
    ):
        columns = SamplingColumns.empty(num_rows, sizes.device)
        columns.temperature.fill_(temperature)
        columns.top_k.fill_(top_k)
        columns.top_p.fill_(top_p)
        seconds = _device_time(sizes, partial(sample, logits, rows, positions, columns, sampled))
        report.add(f"sample {num_rows} rows of {logits.shape[1]}, {name}", seconds * 1e6, "us")


def time_tiles(sizes: Sizes, report: Report) -> None:
    """What other tiles, warps, stages and splits would take for the decode at the goal's shape."""
    if not sizes.sweep:
        return
    batch = _uniform(sizes, 1, sizes.context)
    for split in (256, 512, 1024, 4096):
        shape = _shape(sizes, split=split)
        seconds = _attention_time(sizes, batch, shape)
        report.add(f"decode, split {split}", seconds * 1e6, "us", "chosen" if split == SPLIT_SIZE else "")
    shape = _shape(sizes)
    chosen = _tiles(shape, 1)
    for tile, num_warps, num_stages in SWEPT_TILES:
        tiles = AttentionTiles(block_m=chosen.block_m, tile=tile, num_warps=num_warps, num_stages=num_stages)
        seconds = _attention_time(sizes, batch, shape, tiles=tiles)
        name = f"decode, tile {tile} warps {num_warps} stages {num_stages}"
        report.add(name, seconds * 1e6, "us", "chosen" if tiles == chosen else "")


def copy_bandwidth(sizes: Sizes) -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=sizes.device)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / _device_time(sizes, lambda: target.copy_(source))


# ---- pieces ----


def _shape(
    sizes: Sizes,
    *,
    head_dim: int | None = None,
    dtype: torch.dtype | None = None,
    window: int | None = None,
    softcap: float | None = None,
    split: int = SPLIT_SIZE,
) -> AttentionShape:
    head_dim = head_dim or sizes.head_dim
    return AttentionShape(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=head_dim,
        block_size=16,
        dtype=dtype or sizes.dtype,
        scale=head_dim**-0.5,
        sliding_window=window,
        softcap=softcap,
        split_size=split,
    )


def _tiles(shape: AttentionShape, query_len: int) -> AttentionTiles:
    return attention_tiles(
        head_dim=shape.head_dim,
        group=shape.group,
        query_len=query_len,
        dtype=shape.dtype,
        is_hip=torch.version.hip is not None,
    )


def _ragged(sizes: Sizes, shape: AttentionShape, *, seed: int, block_size: int = 16) -> PagedBatch:
    """A chunk, decodes and verifies beside each other."""
    return paged_batch(
        query_lens=(1, 5, 40, 1) if sizes.device == "cuda" else (1, 3, 6),
        context_lens=(300, 129, 30, 0) if sizes.device == "cuda" else (70, 15, 0),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=block_size,
        dtype=shape.dtype,
        seed=seed,
        window=shape.sliding_window,
        device=sizes.device,
    )


def _uniform(sizes: Sizes, num_new: int, context: int) -> PagedBatch:
    """`sizes.batch` requests of equal length over shuffled blocks, made on the device."""
    block_size, device = 16, sizes.device
    seq_len = context + num_new
    per_req = -(-seq_len // block_size)
    pool = (sizes.batch * per_req, block_size, sizes.num_kv_heads, sizes.head_dim)
    key_cache, value_cache = (torch.randn(pool, device=device, dtype=sizes.dtype) for _ in range(2))
    num_tokens = sizes.batch * num_new
    return PagedBatch(
        query=torch.randn(num_tokens, sizes.num_heads, sizes.head_dim, device=device, dtype=sizes.dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        cu_seqlens_q=torch.arange(0, num_tokens + 1, num_new, dtype=torch.int32, device=device),
        seq_lens=torch.full((sizes.batch,), seq_len, dtype=torch.int32, device=device),
        block_table=torch.randperm(pool[0], device=device).int().view(sizes.batch, per_req),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device),
    )


def _launch(
    batch: PagedBatch, shape: AttentionShape, *, tiles: AttentionTiles | None = None, workspace: int = 1 << 29
) -> AttentionLaunch:
    num_tokens, num_reqs = batch.query.shape[0], batch.seq_lens.shape[0]
    return plan_launch(
        shape,
        tiles=tiles or _tiles(shape, -(-num_tokens // num_reqs)),
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        max_seq_len=batch.block_table.shape[1] * shape.block_size,
        device=batch.query.device,
        max_workspace_bytes=workspace,
    )


def _poisoned(
    batch: PagedBatch, shape: AttentionShape, *, workspace: int = 1 << 29
) -> tuple[torch.Tensor, AttentionLaunch]:
    """A NaN output and a launch whose workspace is NaN, with the tiles of a short verify."""
    launch = _launch(batch, shape, tiles=_tiles(shape, 4), workspace=workspace)
    for workspace_part in (launch.partial_out, launch.partial_max, launch.partial_sum):
        workspace_part.fill_(math.nan)
    return torch.full_like(batch.query, math.nan).contiguous(), launch


def _attend(batch: PagedBatch, shape: AttentionShape, launch: AttentionLaunch, out: torch.Tensor) -> None:
    paged_attention(
        batch.query, batch.key_cache, batch.value_cache, out,
        batch.cu_seqlens_q, batch.seq_lens, batch.block_table, shape, launch,
    )  # fmt: skip


def _reference(batch: PagedBatch, shape: AttentionShape) -> torch.Tensor:
    return paged_attention_reference(
        batch.query, batch.key_cache, batch.value_cache,
        batch.cu_seqlens_q, batch.seq_lens, batch.block_table, shape,
    )  # fmt: skip


def _bytes_of(batch: PagedBatch, shape: AttentionShape) -> int:
    """What must be moved at least: every key and value once, queries and outputs."""
    element = batch.query.element_size()
    kv = 2 * int(batch.seq_lens.sum()) * shape.num_kv_heads * shape.head_dim * element
    return kv + 2 * batch.query.numel() * element


def _attention_time(
    sizes: Sizes, batch: PagedBatch, shape: AttentionShape, *, tiles: AttentionTiles | None = None
) -> float:
    out = torch.empty_like(batch.query)
    launch = _launch(batch, shape, tiles=tiles)
    return _device_time(sizes, lambda: _attend(batch, shape, launch, out))


def _sdpa_time(sizes: Sizes, num_reqs: int, num_new: int, context: int) -> float:
    """Seconds of torch's SDPA with grouped heads."""

    def tensor(heads: int, length: int) -> torch.Tensor:
        return torch.randn(num_reqs, heads, length, sizes.head_dim, device=sizes.device, dtype=sizes.dtype)

    query = tensor(sizes.num_heads, num_new)
    key, value = (tensor(sizes.num_kv_heads, context + num_new) for _ in range(2))
    mask = None
    if context and num_new > 1:  # causal to the lower right
        positions = torch.arange(context, context + num_new, device=sizes.device)
        mask = torch.arange(context + num_new, device=sizes.device)[None] <= positions[:, None]

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=context == 0, enable_gqa=True
        )

    return _device_time(sizes, attend)


def _sampling_case(sizes: Sizes, *, num_rows: int) -> tuple[SamplingColumns, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Columns of mixed parameters, logits, rows and positions."""
    generator = torch.Generator().manual_seed(11)
    vocab_size = 300 if sizes.device == "cpu" else 128_256
    columns = SamplingColumns.empty(num_rows, sizes.device)
    columns.temperature[::2] = 0.8
    columns.top_k[::3] = 40
    columns.top_p[::4] = 0.9
    columns.min_p[::5] = 0.02
    columns.seed.copy_(torch.randint(-(1 << 62), 1 << 62, (num_rows,), generator=generator))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    rows = torch.arange(num_rows, dtype=torch.int32)
    positions = torch.randint(0, 1 << 17, (num_rows,), generator=generator)
    return columns, logits.to(sizes.device), rows.to(sizes.device), positions.to(sizes.device)


def _device_time(sizes: Sizes, launch: Callable[[], object]) -> float:
    """Median seconds of one launch, on the device's own clock."""
    if sizes.device != "cuda":
        return _wall_time(sizes, launch)
    for _ in range(3):
        launch()
    times: list[float] = []
    for _ in range(sizes.repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Queued behind a spin, so that the launch's own host time is hidden.
        torch.cuda._sleep(200_000)
        start.record()
        launch()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def _wall_time(sizes: Sizes, launch: Callable[[], object]) -> float:
    """Mean seconds of one call among many in a row, the device drained at the end."""
    if sizes.device == "cuda":
        for _ in range(3):
            launch()
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(sizes.repeats):
        launch()
    if sizes.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / sizes.repeats
