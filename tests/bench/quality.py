"""What 8-bit weights cost in quality: perplexity and top-1 agreement beside bfloat16 and float32.

    python -m tests.bench.quality [--model smollm2] [--tokens 8192] [--threads 2] [--json]

The text is Python's own documentation (pydoc's topics), which every machine has; windows of 512 tokens.
"""

import argparse
import json
import math
import pydoc_data.topics

import torch
from rich.console import Console
from rich.table import Table

from cluster.model_source import resolve_model
from cluster.progress import Display
from cluster.text import load_tokenizer
from worker.fingerprint import make_batch
from worker.model import Model, load_model

WINDOW = 512  # tokens
BLOCK_SIZE = 16
KINDS = {"float32": (torch.float32, None), "bfloat16": (torch.bfloat16, None), "int8": (torch.bfloat16, "int8")}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with Display() as display:
        directory = resolve_model(options.model, display)
        models = {
            name: load_model(
                directory, dtype=dtype, device="cpu", attention="cpu", num_blocks=WINDOW // BLOCK_SIZE,
                block_size=BLOCK_SIZE, quantization=quantization,
            )
            for name, (dtype, quantization) in KINDS.items()
        }  # fmt: skip
        windows = _windows(load_tokenizer(directory).encode(_text(options.tokens)).tolist(), options.tokens)
        with display.bar("Reading", len(windows)) as progress:
            results = _compare(models, windows, progress)
    if options.json:
        print(json.dumps(results))
        return
    table = Table("weights", "perplexity", "top-1 as float32", "top-1 as bfloat16")
    for row in results:
        figures = (f"{row[name]:.4f}" for name in ("perplexity", "as_float32", "as_bfloat16"))
        table.add_row(str(row["weights"]), *figures)
    Console().print(table)


def _text(num_tokens: int) -> str:
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))[: 8 * num_tokens]


def _windows(token_ids: list[int], num_tokens: int) -> list[list[int]]:
    return [token_ids[i : i + WINDOW] for i in range(0, min(num_tokens, len(token_ids)) - WINDOW + 1, WINDOW)]


def _compare(models: dict[str, Model], windows: list[list[int]], progress: object) -> list[dict[str, object]]:
    losses, tops = {name: 0.0 for name in models}, {name: list[torch.Tensor]() for name in models}
    for done, window in enumerate(windows, 1):
        targets = torch.tensor(window[1:])
        for name, model in models.items():
            batch = make_batch([(window, 0, list(range(WINDOW // BLOCK_SIZE)))], BLOCK_SIZE)
            logits = model.logits(model.forward(batch))[:-1]
            losses[name] += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            tops[name].append(logits.argmax(-1))
        progress(done)  # type: ignore[operator]
    num_targets = len(windows) * (WINDOW - 1)
    chosen = {name: torch.cat(parts) for name, parts in tops.items()}

    def agreement(name: str, other: str) -> float:
        return round(float((chosen[name] == chosen[other]).float().mean()), 4)

    return [
        {
            "weights": name,
            "tokens": num_targets,
            "perplexity": round(math.exp(losses[name] / num_targets), 4),
            "as_float32": agreement(name, "float32"),
            "as_bfloat16": agreement(name, "bfloat16"),
        }
        for name in models
    ]


if __name__ == "__main__":
    main()
