"""What a process that runs a model must find in its environment before it starts."""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress

# A decode reads every weight once. With small pages its page walks cost as much as the reads: large ones
# halve a step on a virtual machine. glibc >= 2.35 asks the kernel for them, but not for the arenas of other
# threads than the first, and an actor loads its model on another: one arena for all. Elsewhere nothing changes.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"}
# How often an idle thread of OpenMP looks for work before it sleeps: through the gaps within a step, about half a
# millisecond, and not between steps, where the scheduler and the front end need the cores (libgomp's own is 300,000).
SPINS = "10000"


def environment(threads: int) -> dict[str, str]:
    """Variables of a process whose model computes on so many threads."""
    count = str(threads)
    pools = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), count)
    return pools | {"TOKENIZERS_PARALLELISM": "false", "GOMP_SPINCOUNT": SPINS, **LARGE_PAGES}


def restart_with(variables: dict[str, str]) -> None:
    """Start this program again unless it was started with these variables: some are read by the loader only."""
    if any(os.environ.get(name) != value for name, value in variables.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | variables)


def bind(cores: Iterable[int]) -> None:
    """Run every thread of this process, and those it starts from now on, on these cores only."""
    wanted = set(cores)
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), wanted)
