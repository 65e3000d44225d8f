"""What a draft head learns from: the target's own text and its hidden states, in shards on disk.

A shard is written whole or not at all, so that an interrupted run goes on with the next one. Knows nothing
about how the text was sampled or what is learned from it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from worker.fingerprint import make_batch
from worker.model import Model

SHARD = "shard-{:05d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Text:
    """One prompt and the target's answer."""

    token_ids: Sequence[int]
    num_prompt_tokens: int
    is_held_out: bool  # never trained on; sampled greedily


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lesson:
    """One text with the target's states at each of its positions."""

    token_ids: torch.Tensor  # [num_tokens] int64
    states: torch.Tensor  # [num_tokens, num_states * hidden_size] what enters the head's layers
    hidden: torch.Tensor  # [num_tokens, hidden_size] after the final norm: position i decides token i + 1
    num_prompt_tokens: int
    is_held_out: bool

    def __len__(self) -> int:
        return len(self.token_ids)


def shard_path(directory: Path, index: int) -> Path:
    """Where a shard is, or will be."""
    return directory / SHARD.format(index)


def write_shard(path: Path, texts: Sequence[Text], model: Model, state_layers: Sequence[int]) -> None:
    """Compute the states of these texts, in the first blocks of the model's pool, and store all of it."""
    states, hidden = [], []
    size = model.kv_cache.block_size
    for text in texts:
        batch = make_batch([(text.token_ids, 0, range(-(-len(text.token_ids) // size)))], size, model.device)
        out, entered = model.forward_with_states(batch, state_layers)
        states.append(entered.cpu())
        hidden.append(out.cpu())
    columns = {
        "token_ids": torch.tensor([token_id for text in texts for token_id in text.token_ids], dtype=torch.int32),
        "num_tokens": torch.tensor([len(text.token_ids) for text in texts], dtype=torch.int32),
        "num_prompt_tokens": torch.tensor([text.num_prompt_tokens for text in texts], dtype=torch.int32),
        "is_held_out": torch.tensor([text.is_held_out for text in texts]),
        "states": torch.cat(states),
        "hidden": torch.cat(hidden),
    }
    part = path.with_suffix(".part")
    save_file(columns, part)
    os.replace(part, path)


def read_lessons(directory: Path) -> list[Lesson]:
    """Every text of every shard; its tensors are views of the files' pages."""
    lessons: list[Lesson] = []
    for path in sorted(directory.glob("shard-*.safetensors")):
        columns = load_file(path)
        lengths = columns["num_tokens"].tolist()
        parts = (columns[name].split(lengths) for name in ("token_ids", "states", "hidden"))
        numbers = (columns[name].tolist() for name in ("num_prompt_tokens", "is_held_out"))
        for token_ids, states, hidden, num_prompt_tokens, is_held_out in zip(*parts, *numbers, strict=True):
            lessons.append(
                Lesson(
                    token_ids=token_ids.long(),
                    states=states,
                    hidden=hidden,
                    num_prompt_tokens=num_prompt_tokens,
                    is_held_out=is_held_out,
                )
            )
    return lessons


def frequent_tokens(lessons: Sequence[Lesson], vocab_size: int, count: int) -> torch.Tensor:
    """The `count` tokens that stand most often in these texts, ascending; ties to the lowest."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for lesson in lessons:
        counts += torch.bincount(lesson.token_ids, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values
