"""Transfer: from host arrays to a device without waiting for it, and waiting where a clock is read."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def staged(array: NDArray[Any], device: torch.device) -> Tensor:
    """``array`` as a host tensor from which a copy to ``device`` need not wait: page-locked where that is CUDA."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """``array`` on ``device``, in the order of its other work; the host goes on at once."""
    return staged(array, device).to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait for all work that was queued on ``device``; a CPU queues none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
