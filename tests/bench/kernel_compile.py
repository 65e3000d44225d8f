"""Compile the worker's Triton kernels ahead of time, without a GPU, and report what each needs.

Registers, spills and shared memory for sm_80, sm_90, sm_100 and gfx942. Every compilation runs with a
cache of its own, since a cache hit prints no ptxas log.
"""

import contextlib
import io
import itertools
import multiprocessing
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from worker.kernels import attention, lookup, rows, sampling, store
from worker.kernels.tuning import COMPILE_OPTIONS, attention_tiles

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMITS = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
MAX_HEAD_DIM_WITHOUT_SPILLS = 128
HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
LONG_QUERY = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One specialization of one kernel. Plain values only, so that it travels to a compiling process."""

    kernel: str
    dtype: str = "bf16"
    head_dim: int = 128
    group: int = 4
    query_len: int = 1
    window: int | None = None
    softcap: float | None = None
    one_split: bool = False

    @property
    def name(self) -> str:
        """Readable and unique."""
        if self.kernel not in ("paged_attention", "combine_splits"):
            return f"{self.kernel} {self.dtype}" if self.kernel in ("store_kv", "clear_broken") else self.kernel
        words = [self.kernel, f"d{self.head_dim}", self.dtype]
        if self.kernel == "paged_attention":
            words += [f"g{self.group}", f"q{self.query_len}"]
        words += [f"window{self.window}"] if self.window else []
        words += ["softcap"] if self.softcap else []
        words += ["one-split"] if self.one_split else []
        return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """What one kernel needs on one target."""

    kernel: str
    target: str
    registers: int  # per thread; vector registers on gfx942
    spill_bytes: int  # per thread, stores and loads
    shared_bytes: int  # per program
    shared_limit: int
    head_dim: int
    block_m: int | None
    num_warps: int
    num_stages: int

    @property
    def fault(self) -> str | None:
        """What is wrong with it, if anything."""
        if self.shared_bytes > self.shared_limit:
            return f"{self.shared_bytes} bytes of shared memory, limit {self.shared_limit}"
        if self.spill_bytes and self.head_dim <= MAX_HEAD_DIM_WITHOUT_SPILLS:
            return f"spills {self.spill_bytes} bytes"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A kernel, its argument types by name, its constants and launch options."""

    fn: triton.runtime.JITFunction
    types: dict[str, str]
    constants: dict[str, object]
    options: dict[str, int | bool] = field(default_factory=lambda: {"num_warps": 4, "num_stages": 3, **COMPILE_OPTIONS})
    block_m: int | None = None


def all_cases() -> list[KernelCase]:
    """Everything that is compiled in CI."""
    attention_cases = [
        KernelCase(kernel="paged_attention", dtype=dtype, head_dim=head_dim, query_len=query_len)
        for dtype, head_dim, query_len in itertools.product(DTYPES, HEAD_DIMS, (1, 5, LONG_QUERY))
        if dtype != "fp32" or query_len == 1  # its tiles do not depend on the query length
    ]
    variants = [
        KernelCase(kernel="paged_attention", query_len=query_len, window=window, softcap=softcap, one_split=one_split)
        for query_len in (1, LONG_QUERY)
        for window, softcap, one_split in (
            (4096, None, False),
            (None, 30.0, False),
            (4096, 30.0, False),
            (None, None, True),
        )
    ]
    groups = [KernelCase(kernel="paged_attention", group=group, query_len=5) for group in (1, 3, 8, 16)]
    combines = [KernelCase(kernel="combine_splits", head_dim=head_dim) for head_dim in HEAD_DIMS]
    stores = [KernelCase(kernel="store_kv", dtype=dtype) for dtype in DTYPES]
    steps = ("sample", "frame_lengths", "gather_tokens", "gather_samples", "accept", "lookup")
    others = [KernelCase(kernel=name) for name in steps]
    others += [KernelCase(kernel="clear_broken", dtype=dtype) for dtype in DTYPES]
    return [*attention_cases, *variants, *groups, *combines, *stores, *others]


def sample_cases() -> list[KernelCase]:
    """A few of them, for a fast test."""
    return [
        KernelCase(kernel="paged_attention"),
        KernelCase(kernel="paged_attention", dtype="fp16", head_dim=64, query_len=LONG_QUERY),
        KernelCase(kernel="store_kv"),
        KernelCase(kernel="accept"),
    ]


def compile_cases(
    cases: Sequence[KernelCase], targets: Sequence[str], *, num_processes: int
) -> Iterator[CompiledKernel]:
    """Compile each case for each target, in order, in processes of their own."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise ValueError("unset TRITON_INTERPRET: interpreted kernels cannot be compiled")
    jobs = list(itertools.product(cases, targets))
    if num_processes == 1:
        yield from (compile_case(*job) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        yield from pool.map(compile_case, *zip(*jobs, strict=True))


def compile_case(case: KernelCase, target: str) -> CompiledKernel:
    """Compile one kernel for one target."""
    is_hip = TARGETS[target].backend == "hip"
    source = _source(case, is_hip=is_hip)
    log = io.StringIO()
    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir = cache
        knobs.nvidia.dump_ptxas_log = True
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(
                _ast_source(source),
                target=TARGETS[target],
                options=source.options,
            )
    registers, spill_bytes = _hip_needs(compiled.asm["amdgcn"]) if is_hip else _cuda_needs(log.getvalue())
    return CompiledKernel(
        kernel=case.name,
        target=target,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=compiled.metadata.shared,
        shared_limit=SHARED_LIMITS[target],
        head_dim=case.head_dim,
        block_m=source.block_m,
        num_warps=int(source.options["num_warps"]),
        num_stages=int(source.options.get("num_stages", 3)),
    )


def as_json(compiled: CompiledKernel) -> dict[str, object]:
    """The object printed for one kernel."""
    return asdict(compiled)


def _cuda_needs(log: str) -> tuple[int, int]:
    """Registers and spilled bytes from ptxas's log."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise RuntimeError(f"ptxas said nothing of registers or spills: {log!r}")
    return int(registers[1]), int(spills[1]) + int(spills[2])


def _hip_needs(assembly: str) -> tuple[int, int]:
    """Vector registers and spilled bytes from the kernel's metadata."""
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly)
    if registers is None or spills is None:
        raise RuntimeError("the assembly says nothing of registers or spills")
    return int(registers[1]), 4 * int(spills[1])


def _ast_source(source: _Source) -> ASTSource:
    """Signature as at run time: pointers and strides are multiples of 16, other integers are not."""
    names = source.fn.arg_names
    signature = {name: "constexpr" if name in source.constants else source.types[name] for name in names}
    plain = {parameter.name for parameter in source.fn.params if parameter.do_not_specialize}
    aligned = [name for name in names if signature[name].startswith("*") or ("_stride" in name and name not in plain)]
    return ASTSource(
        fn=source.fn,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in source.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )


def _types(pointers: Sequence[tuple[str, str]], integers: str, floats: str = "") -> dict[str, str]:
    """Argument types: (element type, names of pointers to it), then names of int32 and float32 scalars."""
    types = {name: f"*{element}" for element, names in pointers for name in names.split()}
    return types | dict.fromkeys(integers.split(), "i32") | dict.fromkeys(floats.split(), "fp32")


def _source(case: KernelCase, *, is_hip: bool) -> _Source:
    match case.kernel:
        case "paged_attention":
            return _attention_source(case, is_hip=is_hip)
        case "combine_splits":
            return _combine_source(case)
        case "store_kv":
            types = _types(
                [(case.dtype, "key value key_cache value_cache"), ("i64", "slot_mapping")], "key_stride value_stride"
            )
            return _Source(fn=store.store_kv_kernel, types=types, constants={"WIDTH": 1024, "BLOCK": 1024})
        case "sample":
            return _sample_source()
        case "frame_lengths":
            names = "num_tokens num_computed num_drafts end cu_seqlens_q seq_lens cu_samples"
            plan = "plan_rows plan_scheduled plan_drafts plan_reserved"
            types = _types([("i32", f"{plan} {names}")], "num_reqs")
            return _Source(fn=rows.frame_lengths_kernel, types=types, constants={"BLOCK": 256})
        case "gather_tokens":
            int32 = "plan_rows row_token_ids row_blocks cu_seqlens_q seq_lens"
            types = _types(
                [("i32", int32), ("i64", "token_ids positions slot_mapping")],
                "num_reqs num_tokens tokens_stride blocks_stride",
            )
            return _Source(fn=rows.gather_tokens_kernel, types=types, constants={"BLOCK_SIZE": 16, "BLOCK": 128})
        case "gather_samples":
            int32 = "plan_rows num_tokens cu_seqlens_q cu_samples sample_rows"
            types = _types([("i32", int32), ("i64", "logits_indices sample_positions")], "num_reqs num_samples")
            return _Source(fn=rows.gather_samples_kernel, types=types, constants={"BLOCK": 128})
        case "accept":
            state = "row_token_ids num_tokens num_computed num_drafts end"
            out = "out_token_ids out_num_tokens out_num_verified out_failed out_position"
            step = "plan_rows finite sampled cu_seqlens_q cu_samples seq_lens"
            types = _types([("i32", f"{step} {state} {out}")], "tokens_stride out_stride")
            return _Source(
                fn=rows.accept_kernel,
                types=types,
                constants={"BLOCK": 8, "TOKENS": rows.TOKENS_PER_PROGRAM},
                options={"num_warps": 1, **COMPILE_OPTIONS},
            )
        case "lookup":
            state = "row_token_ids num_tokens num_drafts end"
            pointers = f"plan_rows num_propose num_returned {state} out_draft_ids out_num_drafts"
            types = _types([("i32", pointers)], "shortest longest max_drafts tokens_stride")
            return _Source(fn=lookup.lookup_kernel, types=types, constants={"BLOCK": 8, "TILE": lookup.TILE})
        case "clear_broken":
            types = _types(
                [("i32", "failed cu_seqlens_q"), ("i64", "slot_mapping"), (case.dtype, "key_cache value_cache")],
                "layer_stride",
            )
            return _Source(fn=rows.clear_broken_kernel, types=types, constants={"WIDTH": 1024, "BLOCK": 1024})
    raise ValueError(f"unknown kernel {case.kernel!r}")


def _shape(case: KernelCase) -> attention.AttentionShape:
    return attention.AttentionShape(
        num_heads=8 * case.group,
        num_kv_heads=8,
        head_dim=case.head_dim,
        block_size=16,
        dtype=DTYPES[case.dtype],
        scale=case.head_dim**-0.5,
        sliding_window=case.window,
        softcap=case.softcap,
    )


def _attention_source(case: KernelCase, *, is_hip: bool) -> _Source:
    shape = _shape(case)
    tiles = attention_tiles(
        head_dim=case.head_dim, group=case.group, query_len=case.query_len, dtype=shape.dtype, is_hip=is_hip
    )
    types = _types(
        [
            (case.dtype, "query key_cache value_cache out"),
            ("fp32", "partial_out partial_max partial_sum"),
            ("i32", "cu_seqlens_q seq_lens block_table"),
        ],
        "num_reqs max_split_query_len query_stride_token query_stride_head cache_stride_block cache_stride_token "
        "cache_stride_head table_stride",
        "scale softcap",
    )
    return _Source(
        fn=attention.paged_attention_kernel,
        types=types,
        constants=dict(attention.attention_constants(shape, tiles, one_split=case.one_split, interpreting=False)),
        options=tiles.options(is_hip=is_hip),
        block_m=tiles.block_m,
    )


def _combine_source(case: KernelCase) -> _Source:
    types = _types(
        [("fp32", "partial_out partial_max partial_sum"), (case.dtype, "out"), ("i32", "cu_seqlens_q seq_lens")],
        "max_split_query_len num_splits",
    )
    constants: dict[str, object] = dict(attention.combine_constants(_shape(case)))
    return _Source(
        fn=attention.combine_splits_kernel,
        types=types,
        constants=constants,
        options={"num_warps": 1, "num_stages": 2, **COMPILE_OPTIONS},
    )


def _sample_source() -> _Source:
    types = _types(
        [
            ("fp32", "logits"),
            ("i32", "sample_rows top_k sampled"),
            ("i64", "sample_positions seed"),
            ("fp64", "temperature top_p min_p"),
        ],
        "vocab_size logits_stride",
    )
    return _Source(
        fn=sampling.sample_kernel,
        types=types,
        constants={"TILE": sampling.MAX_VOCAB_TILE},
        options={"num_warps": 8, **COMPILE_OPTIONS},
    )
