"""The page of `slipstream status`: one deployment's counters as plain values and as a table."""

from typing import Any

from rich.markup import escape
from rich.table import Table

from cluster.running import Running


def status_of(running: Running, stats: dict[str, Any]) -> dict[str, Any]:
    """What `--json` prints: the endpoints, workers, requests, blocks, speculation and stale tokens."""
    scheduler = stats["scheduler"]
    return {
        "model": running.model,
        "endpoints": list(running.endpoints),
        "pid": running.pid,
        "workers": scheduler["workers"],
        "requests": {
            "running": scheduler["num_running"],
            "waiting": scheduler["num_waiting"],
            "finished": scheduler["num_finished"],
            "rejected": scheduler["num_rejected"],
            "preemptions": scheduler["num_preemptions"],
        },
        "blocks": {
            "total": sum(worker["num_blocks"] for worker in scheduler["workers"]),
            "free": sum(worker["num_free_blocks"] for worker in scheduler["workers"]),
            "cached": sum(worker["num_cached_blocks"] for worker in scheduler["workers"]),
        },
        "prefix_cache": {"queries": scheduler["prefix_cache_queries"], "hits": scheduler["prefix_cache_hits"]},
        "acceptance": {
            "mean_length": scheduler["mean_acceptance_length"],
            "drafts": scheduler["num_drafts"],
            "draft_tokens": scheduler["num_draft_tokens"],
            "accepted_tokens": scheduler["num_accepted_tokens"],
            "accepted_per_position": scheduler["num_accepted_tokens_per_pos"],
        },
        "tokens": {
            "prompt": scheduler["num_prompt_tokens"],
            "generated": scheduler["num_generation_tokens"],
            "reserved": scheduler["tokens_reserved"],
            "rolled_back": scheduler["tokens_rolled_back"],
            "stale_dropped": scheduler["stale_tokens_dropped"],
            "salvaged": scheduler["tokens_salvaged"],
        },
        "front_end": stats["front_end"],
        "notices": scheduler["notices"],
    }


def status_table(page: dict[str, Any]) -> Table:
    """The same for a person."""
    table = Table(title=f"{page['model']} on {', '.join(page['endpoints'])}", show_header=False, title_justify="left")
    requests, blocks, acceptance, tokens = page["requests"], page["blocks"], page["acceptance"], page["tokens"]
    for notice in page["notices"]:
        table.add_row("[bold red]notice[/bold red]", f"[bold red]{escape(notice)}[/bold red]")
    for worker in page["workers"]:
        table.add_row(
            worker["worker_id"],
            f"{worker['num_running']} running, {worker['num_steps_in_flight']} steps in flight, "
            f"{worker['num_free_blocks']} of {worker['num_blocks']} blocks free"
            + (", draining" if worker["draining"] else ""),
        )
    if not page["workers"]:
        table.add_row("workers", "none is up")
    finished = ", ".join(f"{count} {reason}" for reason, count in requests["finished"].items()) or "none"
    table.add_row("requests", f"{requests['running']} running, {requests['waiting']} waiting; finished: {finished}")
    table.add_row("blocks", f"{blocks['free']} of {blocks['total']} free, {blocks['cached']} cached")
    table.add_row("prefix cache", f"{page['prefix_cache']['hits']} of {page['prefix_cache']['queries']} tokens hit")
    table.add_row(
        "acceptance",
        f"{acceptance['mean_length']:.2f} tokens a frame; {acceptance['accepted_tokens']} of "
        f"{acceptance['draft_tokens']} drafts",
    )
    table.add_row(
        "tokens",
        f"{tokens['generated']} generated, {tokens['reserved']} reserved, {tokens['rolled_back']} rolled back, "
        f"{sum(tokens['stale_dropped'].values())} dropped stale, {tokens['salvaged']} salvaged",
    )
    return table
