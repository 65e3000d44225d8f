"""Weights of 8 bits: half the bytes of bfloat16, so nearly half the time of a step that reads each weight once.

Only weights are rounded, symmetrically and per output row; activations and sums are float32. One compiled kernel
takes 4 rows for about the price of one, with the same bits for every row count: PyTorch's packed one does too, but
takes twice as long at 4 rows and ten times at 64.
"""

import torch
import torch.nn.functional as F

from worker import cpu_kernels
from worker.linear import Linear
from worker.vectors import LANES

ROW_UNIT = 4
LARGEST = 127


class Int8Linear(Linear):
    """`x @ weight.T + bias` with an int8 weight, on the CPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: [out_features, in_features] of any floating type; ValueError where the kernel cannot take it."""
        self.out_features, self.in_features = weight.shape
        if weight.device.type != "cpu":
            raise ValueError(f"quantization int8 runs on the CPU only, not on {weight.device}")
        if self.out_features % ROW_UNIT or self.in_features % LANES:
            raise ValueError(
                f"quantization int8: a product of {self.in_features} inputs and {self.out_features} outputs; "
                f"they must be multiples of {LANES} and {ROW_UNIT}"
            )
        self.tile = None
        self._int8, self._scale = quantize(weight)
        self._bias = None if bias is None else bias.float().contiguous()
        self._dtype = weight.dtype

    @property
    def is_exact(self) -> bool:
        """Whether a row's bits are the same in any company: they are."""
        return True

    @property
    def num_bytes(self) -> int:
        """Of the weight: what a product reads at least."""
        return self._int8.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, in_features], any count; [num_rows, out_features]."""
        num_rows = x.shape[0]
        padding = -num_rows % ROW_UNIT
        x = F.pad(x.float(), (0, 0, 0, padding)) if padding else x.float().contiguous()
        out = torch.empty((num_rows + padding, self.out_features), dtype=self._dtype)
        cpu_kernels.int8_linear(
            cpu_kernels.KINDS[self._dtype], x.data_ptr(), self._int8.data_ptr(), self._scale.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(), out.data_ptr(), len(x), self.in_features,
            self.out_features, torch.get_num_threads(),
        )  # fmt: skip
        return out[:num_rows]


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [out, in] as int8 [out, in] and scales [out] float32: weight is about int8 * scale."""
    scale = weight.float().abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny) / LARGEST
    return (weight.float() / scale[:, None]).round_().to(torch.int8).contiguous(), scale
