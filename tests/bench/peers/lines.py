"""How a peer's process is asked: a line of JSON in, a line of JSON out. Imports nothing but the standard library,
since it runs in every peer's environment.

Asked: {"prompts": [[token id]], "max_tokens": n}. Answered: {"seconds": s, "token_ids": [[token id]]}.
"""

import json
import os
import sys
import time
from collections.abc import Callable

Prompts = list[list[int]]


def answer_lines(make: Callable[[], Callable[[Prompts, int], Prompts]]) -> None:
    """Build the engine, say so, then answer until standard input ends. Its own prints go to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    generate = make()
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started_s = time.perf_counter()
        token_ids = generate(asked["prompts"], asked["max_tokens"])
        seconds = time.perf_counter() - started_s
        print(json.dumps({"seconds": seconds, "token_ids": token_ids}), file=out, flush=True)
