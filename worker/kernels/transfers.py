"""Between host and device without waiting: every copy goes through a pinned buffer of its own.

A buffer that is used again would have to wait for the copy that may still read it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from scheduler.step import Int32Array

Write = tuple[int, int, Int32Array]  # row, first column, values


def to_device(values: NDArray[np.integer], device: torch.device) -> torch.Tensor:
    """The values on the device, in stream order."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class OnItsWay:
    """A copy to the host of what the stream computes up to here."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = values
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # who waits sleeps
            self._event.record()

    def wait(self) -> torch.Tensor:
        """The copy, once it is there. From any thread."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def scatter(target: torch.Tensor, writes: Sequence[Write]) -> None:
    """Put values into rows of `target` [num_rows, width] int32, contiguous; no place twice."""
    if not writes:
        return
    width = target.shape[1]
    places = [np.arange(row * width + first, row * width + first + len(values)) for row, first, values in writes]
    values = [values for _, _, values in writes]
    sent = to_device(np.stack((np.concatenate(places), np.concatenate(values, dtype=np.int64))), target.device)
    target.view(-1).index_copy_(0, sent[0], sent[1].int())
