"""A lean forward for the Llama family over a paged KV pool.

Knows nothing about requests, sampling or steps: a Batch in, hidden states and logits out.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from worker.attention import AttentionBackend, KVCache
from worker.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers of one architecture. Names follow the checkpoint's config.json, shortened."""

    architecture: str = "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True
    attention_bias: bool = False  # q, k and v
    qk_norm: bool = False  # RMSNorm over each head of q and k (Qwen3)
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()


class Model:
    """One loaded model and its KV pool."""

    config: ModelConfig
    kv_cache: KVCache
    attention: AttentionBackend
    dtype: torch.dtype
    device: torch.device

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] after the final norm; writes this step's KV."""
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] float32 of hidden states [n, hidden_size]."""
        raise NotImplementedError


def load_model(
    directory: Path, *, dtype: torch.dtype, device: str, attention: str, num_blocks: int, block_size: int
) -> Model:
    """A model from a Hugging Face directory. `ValueError` names the file, tensor or setting that is wrong."""
    raise NotImplementedError


def random_model(
    config: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    device: str = "cpu",
    attention: str = "cpu",
    num_blocks: int,
    block_size: int,
) -> Model:
    """A model of random weights whose next token depends on the whole context. For tests."""
    raise NotImplementedError
