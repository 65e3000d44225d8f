"""One step's tokens as the model sees them: prefill chunks, decodes and verifies in one ragged batch.

Knows nothing about requests, epochs or plans; rows of this step and slots of the KV pool only.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One variable-length batch. Row i of the step is tokens `cu_seqlens_q[i]:cu_seqlens_q[i + 1]`.

    A row's tokens have consecutive positions ending at `seq_lens[i] - 1`.
    """

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64, true positions
    slot_mapping: torch.Tensor  # [num_tokens] int64, token -> block_id * block_size + offset
    cu_seqlens_q: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32, KV length including this step's tokens
    block_table: torch.Tensor  # [num_reqs, max_blocks_in_batch] int32, tail padded with 0
    logits_indices: torch.Tensor  # [num_samples] int64, rows of the hidden states that need logits
