"""The worker's Triton kernels on the bench: what they need when compiled, and what they take on a GPU.

`python -m tests.bench.kernels --compile-only --json`: compile for sm_80, sm_90, sm_100 and gfx942 without a GPU
and print a list of objects; exit code 1 if a kernel spills up to head size 128 or exceeds shared memory.
`python -m tests.bench.kernels --gpu`: correctness first, then times, on one GPU, no Ray (tests.bench.kernel_gpu).
`TRITON_INTERPRET=1 python -m tests.bench.kernels --dry-run`: the same script on the CPU with tiny sizes; its
times mean nothing.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 if everything held."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.kernels", description="The worker's Triton kernels on the bench."
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--compile-only", action="store_true", help="compile ahead of time; needs no GPU")
    mode.add_argument("--gpu", action="store_true", help="check and time the kernels on one GPU")
    mode.add_argument("--dry-run", action="store_true", help="the GPU script on the CPU, under the interpreter")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--sample", action="store_true", help="a few kernels only")
    parser.add_argument("--target", action="append", help="sm_80, sm_90, sm_100 or gfx942; repeatable; default: all")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    options = parser.parse_args(arguments)
    if options.compile_only:
        return _compile_only(options)
    # Needs torch's GPU parts only here.
    from tests.bench.kernel_gpu import run

    return run(dry=options.dry_run, as_json=options.json)


def _compile_only(options: argparse.Namespace) -> int:
    from tests.bench.kernel_compile import TARGETS, all_cases, as_json, compile_cases, sample_cases

    targets = options.target or list(TARGETS)
    unknown = sorted(set(targets) - set(TARGETS))
    if unknown:
        sys.stderr.write(f"--target {', '.join(unknown)}: unknown; known: {', '.join(TARGETS)}\n")
        return 2
    cases = sample_cases() if options.sample else all_cases()
    compiled = []
    for kernel in compile_cases(cases, targets, num_processes=options.processes):
        compiled.append(kernel)
        if not options.json:
            print(
                f"{kernel.kernel:40} {kernel.target:7} registers {kernel.registers:3} spills {kernel.spill_bytes:5} "
                f"shared {kernel.shared_bytes:6}/{kernel.shared_limit} {kernel.fault or ''}",
                flush=True,
            )
    faults = [kernel for kernel in compiled if kernel.fault]
    if options.json:
        print(json.dumps([as_json(kernel) for kernel in compiled], indent=1))
    for kernel in faults:
        sys.stderr.write(f"{kernel.kernel} on {kernel.target}: {kernel.fault}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
