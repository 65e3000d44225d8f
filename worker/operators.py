"""What a layer does between its matrix products: norms, rotation and the gated activation.

On the CPU these are compiled kernels whose rows do not depend on their company (worker.cpu_kernels);
elsewhere PyTorch's operators.
"""

import torch
import torch.nn.functional as F

from worker import cpu_kernels
from worker.rope import rotate as rotated


class RMSNorm:
    """Root-mean-square norm with float32 sums and a float32 weight."""

    def __init__(self, weight: torch.Tensor, *, eps: float, dtype: torch.dtype) -> None:
        """weight: [size]; dtype: of the output."""
        self._weight = weight.float().contiguous()
        self._size = weight.shape[0]
        self._eps = eps
        self._dtype = dtype

    @property
    def address(self) -> int:
        """Of its weight, [size] float32."""
        return self._weight.data_ptr()

    def __call__(self, x: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x [..., size], in the norm's own type.

        addend [..., size], in that type too, is added to x in place before; x is float32 then.
        """
        if x.is_cpu:
            x = x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()
            out = torch.empty(x.shape, dtype=self._dtype)
            cpu_kernels.add_norm(
                cpu_kernels.KINDS[self._dtype], x.data_ptr(), 0 if addend is None else addend.data_ptr(),
                self._weight.data_ptr(), out.data_ptr(), x.numel() // self._size, self._size, self._eps,
            )  # fmt: skip
            return out
        if addend is not None:
            x.add_(addend)
        scale = x.float().square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        return (x * scale).mul_(self._weight).to(self._dtype)

    def on_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """The norm of each head of [rows, heads, size]; in place on the CPU."""
        if not heads.is_cpu:
            return self(heads)
        cpu_kernels.norm_heads(
            cpu_kernels.KINDS[self._dtype], heads.data_ptr(), heads.stride(0), *heads.shape, self._weight.data_ptr(),
            self._eps,
        )  # fmt: skip
        return heads


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`worker.rope.rotate` of [rows, heads, head_dim]; in place on the CPU."""
    if not heads.is_cpu:
        return rotated(heads, cos, sin)
    cpu_kernels.rotate(
        cpu_kernels.KINDS[heads.dtype], heads.data_ptr(), heads.stride(0), *heads.shape, cos.data_ptr(), sin.data_ptr()
    )
    return heads


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [rows, 2 * size]: [rows, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if not gate_up.is_cpu:
        gate, up = gate_up.split(size, -1)
        return F.silu(gate).mul_(up)
    out = torch.empty((rows, size), dtype=gate_up.dtype)
    cpu_kernels.silu_mul(cpu_kernels.KINDS[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), rows, size)
    return out
