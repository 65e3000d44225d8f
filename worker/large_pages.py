"""Memory for what is read once in every step, in large pages.

A weight smaller than a large page would lie in small ones, whose page walks (twice as deep on a virtual machine)
cost as much as the reads. Tensors are cut from mappings of 32 MB that ask for large pages; a mapping ends with the
last of its tensors.
"""

import math
import mmap

import torch

MAPPING_BYTES = 1 << 25
ALIGNMENT = 64


class LargePages:
    """Cuts tensors from mappings, each of which it fills before it makes another."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, contiguous, in large pages."""
        num_bytes = tensor.numel() * tensor.element_size()
        if len(self._rest) < num_bytes:
            self._rest = mapping(max(num_bytes, MAPPING_BYTES))
        taken = self._rest[:num_bytes].view(tensor.dtype).view(tensor.shape)
        self._rest = self._rest[math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT :]
        return taken.copy_(tensor)


def mapping(num_bytes: int) -> torch.Tensor:
    """Zeroed memory [num_bytes] uint8, in large pages where the kernel has them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


weights = LargePages()
