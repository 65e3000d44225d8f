"""What the front end knows about the model it serves: names, limits and special tokens."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model behind one front end."""

    name: str  # what requests call it
    path: str  # directory of weights and tokenizer; empty for a model made up in memory
    vocab_size: int
    max_model_len: int  # prompt and output together
    block_size: int = 16
    max_num_seqs: int = 0  # running at once on all workers; 0: unknown
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    dtype: str = ""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int = 0
    pad_token_id: int = 0
    sampling_defaults: dict[str, float] = field(default_factory=dict)  # of the model's generation_config

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        *,
        name: str,
        max_model_len: int | None = None,
        block_size: int = 16,
        max_num_seqs: int = 0,
        dtype: str = "",
    ) -> "ServedModel":
        """Reads config.json and generation_config.json. Raises ValueError when config.json is no use."""
        config = _read_json(directory / "config.json")
        generation = _read_json(directory / "generation_config.json", optional=True)
        if not isinstance(config.get("vocab_size"), int):
            raise ValueError(f"{directory / 'config.json'}: vocab_size is missing")
        eos = dict.fromkeys([*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))])
        return cls(
            name=name,
            path=str(directory),
            vocab_size=config["vocab_size"],
            max_model_len=max_model_len or int(config.get("max_position_embeddings", 2048)),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            model_type=str(config.get("model_type", "")),
            architectures=tuple(config.get("architectures") or ()),
            dtype=dtype or str(config.get("dtype") or config.get("torch_dtype") or ""),
            eos_token_ids=tuple(eos),
            bos_token_id=next(iter(_ids(config.get("bos_token_id"))), 0),
            pad_token_id=next(iter(_ids(config.get("pad_token_id"))), 0),
            sampling_defaults={k: generation[k] for k in SAMPLING_DEFAULTS if generation.get(k) is not None},
        )


def _ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        parsed = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} is not a JSON object")
    return parsed
