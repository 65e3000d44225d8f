"""What the operator's seat runs: a gRPC client outside the Ray cluster, without Ray and torch.

`python -m tests.rayup_seat HOST:PORT REQUESTS.json`: a few times a second one JSON line with the number of tokens of
each stream and the workers there are; once, when all streams have ended, one with the streams. Until it is ended.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from cluster.client import Client

EVERY_S = 0.3


def _print(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def _stream(client: Client, arguments: dict[str, Any], taken: list[int]) -> None:
    bias = {int(token): value for token, value in arguments["logit_bias"].items()}  # JSON's keys are strings
    async for output in client.generate(**arguments | {"logit_bias": bias}):
        assert output.offset == len(taken), "a token twice, or none in its place"
        taken.extend(output.token_ids)


async def _watch(address: str, requests: list[dict[str, Any]]) -> None:
    streams: list[list[int]] = [[] for _ in requests]
    async with Client(address) as client:
        running = [asyncio.create_task(_stream(client, *pair)) for pair in zip(requests, streams, strict=True)]
        told = False
        while True:
            workers = [worker["worker_id"] for worker in (await client.astats())["scheduler"]["workers"]]
            _print({"num_tokens": [len(taken) for taken in streams], "workers": workers})
            if not told and all(task.done() for task in running):
                await asyncio.gather(*running)  # raises what went wrong
                _print({"streams": streams})
                told = True
            await asyncio.sleep(EVERY_S)


if __name__ == "__main__":
    asyncio.run(_watch(sys.argv[1], json.loads(Path(sys.argv[2]).read_text())))
