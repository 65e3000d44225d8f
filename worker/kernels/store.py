"""Write one layer's new keys and values into their slots of the paged pool."""

import torch
import triton
import triton.language as tl

from worker.kernels.tuning import COMPILE_OPTIONS


@triton.jit
def store_kv_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,  # num_kv_heads * head_dim, contiguous in source and pool
    BLOCK: tl.constexpr,
):
    """One program copies BLOCK elements of one token. A negative slot is a padded token: nothing is written."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    new_key = tl.load(key + token * key_stride + column, mask=inside)
    new_value = tl.load(value + token * value_stride + column, mask=inside)
    tl.store(key_cache + slot * WIDTH + column, new_key, mask=inside)
    tl.store(value_cache + slot * WIDTH + column, new_value, mask=inside)


def store_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], any stride between tokens
    value: torch.Tensor,  # same shape
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    value_cache: torch.Tensor,  # same shape
    slot_mapping: torch.Tensor,  # [num_tokens] int64, token -> block_id * block_size + offset; negative: skip
) -> None:
    """Copy each token's key and value into its slot."""
    num_tokens, num_kv_heads, head_dim = key.shape
    width = num_kv_heads * head_dim
    if num_tokens == 0:
        return
    block = min(triton.next_power_of_2(width), 1024)
    key, value = _rows_of(key), _rows_of(value)
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    grid = (num_tokens, triton.cdiv(width, block))
    store_kv_kernel[grid](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        WIDTH=width,
        BLOCK=block,
        **COMPILE_OPTIONS,
    )


def _rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if each token's heads are contiguous, else a contiguous copy."""
    dense = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    return tensor if dense else tensor.contiguous()


def store_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`store_kv` in plain torch."""
    kept = slot_mapping >= 0
    key_cache.flatten(0, 1)[slot_mapping[kept]] = key[kept]
    value_cache.flatten(0, 1)[slot_mapping[kept]] = value[kept]
