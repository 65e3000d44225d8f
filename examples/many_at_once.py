"""Prompts side by side on one connection; one is left early, which cancels it. First: `slipstream serve`."""

import asyncio
import sys

from cluster.client import Client

PROMPTS = ("The capital of France is", "Water boils at", "A haiku about the sea:", "1, 2, 3, 4,")


async def answer(client: Client, prompt: str) -> str:
    text = ""
    async for output in client.generate(prompt, max_tokens=48, temperature=0, timeout_s=60):
        text += output.text
    return f"{prompt} ->{text!r}"


async def left_early(client: Client) -> str:
    """Leaving the loop ends the request: its blocks are free for others."""
    async for output in client.generate("It goes on and on", max_tokens=200, ignore_eos=True):
        return f"left after {len(output.token_ids)} tokens"
    raise AssertionError("a stream has tokens")


async def main(address: str) -> None:
    async with Client(address) as client:
        for line in await asyncio.gather(left_early(client), *(answer(client, prompt) for prompt in PROMPTS)):
            print(line)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
