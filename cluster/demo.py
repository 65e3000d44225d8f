"""The demonstration: eight chats at once through a real gRPC client, side by side, and what they cost.

Knows nothing that a client does not know: it talks to the deployment over its port only.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from cluster.bringup import Deployment
from cluster.client import Client
from cluster.config import ServeConfig
from cluster.errors import ServerError
from cluster.model_source import resolve_model
from cluster.progress import Display
from cluster.status import told

REFRESH_HZ = 8
STAGGER_S = 0.1  # the first chats are under way, and their prefix shared, when the last begin
PANEL_LINES = 9

PASSAGE = (
    "The lighthouse keeper wrote the weather in a book every morning. On Monday the wind came from the north and the "
    "sea was grey. On Tuesday the wind came from the west and the sea was green. On Wednesday there was no wind at "
    "all, and the keeper painted the door of the lighthouse red."
)
# Half of them copy from their prompt, where n-gram drafts are at their best; half do not.
QUESTIONS = (
    f"{PASSAGE}\n\nRepeat this text word for word.",
    "Why is the sky blue?",
    f"{PASSAGE}\n\nWhat did the keeper do on Wednesday? Quote the sentence.",
    "Write a short poem about the sea.",
    f"{PASSAGE}\n\nList what happened on Monday, Tuesday and Wednesday.",
    "Give me three tips for learning to cook.",
    f"{PASSAGE}\n\nRewrite this text in the present tense.",
    "Count from 1 to 20, separated by commas.",
)


@dataclass(slots=True, eq=False)
class Chat:
    """One question and what came back so far."""

    question: str
    text: str = ""
    num_tokens: int = 0
    ended: bool = False


def run_demo(config: ServeConfig, *, max_tokens: int, as_json: bool) -> None:
    """Bring up, chat, sum up, take down."""
    with Display() as display:
        directory = resolve_model(config.model, display)
        deployment = Deployment(config, directory, display.phase)
        display.warn(deployment.warnings)
    try:
        chats = [Chat(question) for question in QUESTIONS]
        wall_s, stats = asyncio.run(_chat(deployment.endpoints[0], chats, max_tokens, show=not as_json))
    except grpc.RpcError as error:
        raise ServerError(told(error)) from error
    finally:
        with Display() as display, display.phase("Stopping every process"):
            deployment.stop()
    if as_json:
        sys.stdout.write(json.dumps(_summary(chats, wall_s, stats)) + "\n")
    else:
        Console().print(_summary_table(chats, wall_s, stats))


async def _chat(address: str, chats: Sequence[Chat], max_tokens: int, *, show: bool) -> tuple[float, dict[str, Any]]:
    """The wall time of all chats in seconds, and the scheduler's counters after them."""
    console = Console()
    async with Client(address) as client:
        started_s = time.perf_counter()
        streams = [
            asyncio.create_task(_stream(client, chat, index * STAGGER_S, max_tokens))
            for index, chat in enumerate(chats)
        ]
        everything = asyncio.gather(*streams)
        if show and console.is_terminal:
            await _show_live(console, chats, everything)
        await everything
        wall_s = time.perf_counter() - started_s
        if show and not console.is_terminal:
            _show_plain(console, chats)
        stats = await client.astats()
    return wall_s, stats["scheduler"]


async def _stream(client: Client, chat: Chat, delay_s: float, max_tokens: int) -> None:
    await asyncio.sleep(delay_s)
    turns = [{"role": "user", "content": chat.question}]
    async for output in client.chat(turns, max_tokens=max_tokens, temperature=0.0):
        chat.text += output.text
        chat.num_tokens += len(output.token_ids)
    chat.ended = True


async def _show_live(console: Console, chats: Sequence[Chat], everything: "asyncio.Future[list[None]]") -> None:
    with Live(_panels(console, chats), console=console, refresh_per_second=REFRESH_HZ, transient=False) as live:
        while not everything.done():
            await asyncio.wait({everything}, timeout=1 / REFRESH_HZ)
            live.update(_panels(console, chats))


def _panels(console: Console, chats: Sequence[Chat]) -> Columns:
    width = max(24, console.width // 4 - 1)
    return Columns([_panel(chat, width) for chat in chats], padding=(0, 0))


def _panel(chat: Chat, width: int) -> Panel:
    """The last lines of one answer, as they would wrap."""
    lines: list[str] = []
    for paragraph in chat.text.splitlines():
        lines.extend(paragraph[at : at + width - 4] for at in range(0, max(len(paragraph), 1), width - 4))
    shown = "\n".join(lines[-PANEL_LINES:])
    title = chat.question.rpartition("\n")[2]
    return Panel(
        shown,
        title=title if len(title) < width - 4 else title[: width - 8] + "...",
        subtitle=f"{chat.num_tokens} tokens",
        width=width,
        height=PANEL_LINES + 2,
        border_style="green" if chat.ended else "yellow",
    )


def _show_plain(console: Console, chats: Sequence[Chat]) -> None:
    for chat in chats:
        console.print(f"> {chat.question.rpartition(chr(10))[2]}", style="bold", markup=False, highlight=False)
        console.print(chat.text.strip() + "\n", markup=False, highlight=False)


def _summary(chats: Sequence[Chat], wall_s: float, stats: dict[str, Any]) -> dict[str, float]:
    output_tokens = sum(chat.num_tokens for chat in chats)
    return {
        "requests": len(chats),
        "output_tokens": output_tokens,
        "tokens_per_s": round(output_tokens / wall_s, 2),
        "mean_acceptance_length": round(stats["mean_acceptance_length"], 4),
        "stale_tokens_dropped": sum(stats["stale_tokens_dropped"].values()),
    }


def _summary_table(chats: Sequence[Chat], wall_s: float, stats: dict[str, Any]) -> Table:
    summary = _summary(chats, wall_s, stats)
    table = Table(title="Eight chats, two workers, one scheduler", show_header=False, title_justify="left")
    table.add_row("tokens", f"{summary['output_tokens']} in {wall_s:.1f} s")
    table.add_row("tokens/s", f"{summary['tokens_per_s']:.1f}")
    table.add_row(
        "mean acceptance length",
        f"{summary['mean_acceptance_length']:.2f} tokens a frame that verified drafts "
        f"({stats['num_accepted_tokens']} of {stats['num_draft_tokens']} drafts accepted)",
    )
    table.add_row("tokens reserved", f"{stats['tokens_reserved']} by placeholders, ahead of their results")
    table.add_row("tokens rolled back", str(stats["tokens_rolled_back"]))
    dropped = ", ".join(f"{count} {reason}" for reason, count in stats["stale_tokens_dropped"].items())
    table.add_row("tokens dropped stale", f"{summary['stale_tokens_dropped']}" + (f" ({dropped})" if dropped else ""))
    table.add_row("prefix hits", f"{stats['prefix_cache_hits']} of {stats['prefix_cache_queries']} prompt tokens")
    return table
