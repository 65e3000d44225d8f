"""From a DraftSpec to a drafter: which method, over which model, with how many drafts.

The one place that knows every drafter. torch is imported with the first of them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.drafter import Drafter, NgramDrafter
    from worker.eagle3 import Eagle3Head
    from worker.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """How a worker drafts: plain values, so that they travel."""

    method: str = "ngram"
    max_drafts: int = 4  # for one row; 0: no drafter
    is_adaptive: bool = False  # fewer where they do not pay
    directory: str | None = None  # of the head or the draft model
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    max_model_len: int | None = None  # no drafts at or past this position
    num_blocks: int = 0  # of a draft model's pool
    kv_retention: str = "request"  # of a draft model
    window: int = 128  # last tokens a draft model sees under retention "step"


def draft_blocks(drafter: "Drafter | None") -> tuple[int, int] | None:
    """Blocks of a draft model's own pool, and how many of them are free; None without one. From any thread."""
    from worker.draft_model import DraftModelDrafter
    from worker.mixture import MixedDrafter

    for one in drafter.drafters if isinstance(drafter, MixedDrafter) else (drafter,):
        if isinstance(one, DraftModelDrafter):
            return one.model.kv_cache.num_blocks, one.num_free_blocks
    return None


def build_drafter(
    spec: DraftSpec, target: "Model", target_directory: Path, *, max_num_seqs: int, sanitize: bool
) -> "Drafter | None":
    """Prompt lookup, beside a head or a draft model if there is one. ValueError names what is wrong with that."""
    if spec.max_drafts == 0:
        return None
    weights = load_draft_weights(spec, target, target_directory)
    return mixed_drafter(spec, target, weights, max_num_seqs=max_num_seqs, sanitize=sanitize)


def load_draft_weights(spec: DraftSpec, target: "Model", target_directory: Path) -> "Eagle3Head | Model | None":
    """The head or the draft model of a spec; None without one. Any number of drafters may use it in turn."""
    if spec.method == "ngram":
        return None
    assert spec.directory is not None
    directory = Path(spec.directory)
    if not directory.is_dir():
        raise ValueError(f"--speculative-config: there is no directory {directory}")
    if spec.method == "eagle3":
        from worker.eagle3 import load_head

        return load_head(directory, target, target_directory)
    from worker.hf_model import load_any_model

    check_same_tokenizer(directory, target_directory)
    return load_any_model(
        directory,
        dtype=target.dtype,
        device=str(target.device),
        attention="cpu" if target.device.type == "cpu" else "triton",
        num_blocks=spec.num_blocks,
        block_size=target.kv_cache.block_size,
        max_model_len=_context(directory, target),
    )


def mixed_drafter(
    spec: DraftSpec, target: "Model", weights: "Eagle3Head | Model | None", *, max_num_seqs: int, sanitize: bool
) -> "Drafter":
    """Prompt lookup beside what these weights draft; as many drafts as pay if the spec is adaptive."""
    from worker.mixture import MixedDrafter, PreferLookup

    lookup = lookup_drafter(spec, target)
    model = None
    if weights is not None:
        model = model_drafter(spec, target, weights, max_num_seqs=max_num_seqs, sanitize=sanitize)
    if not spec.is_adaptive:
        return lookup if model is None else MixedDrafter(lookup, model, PreferLookup())
    from worker.adaptive import AdaptiveDrafts
    from worker.step_costs import StepCosts, measure_costs

    costs = StepCosts(measure_costs(target, max_num_seqs * (1 + spec.max_drafts)))
    return MixedDrafter(lookup, model, AdaptiveDrafts(costs, spec.max_drafts))


def lookup_drafter(spec: DraftSpec, target: "Model") -> "NgramDrafter":
    """Prompt lookup alone."""
    from worker.drafter import NgramDrafter

    return NgramDrafter(
        max_drafts=spec.max_drafts,
        prompt_lookup_min=spec.prompt_lookup_min,
        prompt_lookup_max=spec.prompt_lookup_max,
        max_model_len=target.max_model_len,
    )


def model_drafter(
    spec: DraftSpec, target: "Model", weights: "Eagle3Head | Model", *, max_num_seqs: int, sanitize: bool
) -> "Drafter":
    """A head or a draft model alone."""
    from worker.eagle3 import Eagle3Drafter, Eagle3Head

    if isinstance(weights, Eagle3Head):
        return Eagle3Drafter(weights, max_drafts=spec.max_drafts, max_model_len=spec.max_model_len)
    from worker.draft_model import DraftModelDrafter
    from worker.sanitizer import KVSanitizer

    return DraftModelDrafter(
        weights,
        max_drafts=spec.max_drafts,
        max_num_seqs=max_num_seqs,
        vocab_size=target.config.vocab_size,
        retention=spec.kv_retention,
        window=spec.window,
        max_model_len=spec.max_model_len,
        sanitizer=KVSanitizer(spec.num_blocks, target.kv_cache.block_size) if sanitize else None,
    )


def _context(directory: Path, target: "Model") -> int:
    """The draft model's context, or the target's if that is shorter."""
    from worker.hf_model import read_any_config

    return min(read_any_config(directory).max_position_embeddings, target.max_model_len)


def check_same_tokenizer(directory: Path, target_directory: Path) -> None:
    """ValueError if both have a tokenizer and a token means something else in one than in the other."""
    vocabularies = [_vocabulary(path / "tokenizer.json") for path in (directory, target_directory)]
    mine, targets = vocabularies
    if mine is None or targets is None:
        return
    for token, token_id in targets.items():
        if mine.get(token) != token_id:
            raise ValueError(f"{directory}: another tokenizer than the target's: token {token!r} is {mine.get(token)}")


def _vocabulary(path: Path) -> dict[str, int] | None:
    try:
        vocabulary = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return vocabulary if isinstance(vocabulary, dict) else None
