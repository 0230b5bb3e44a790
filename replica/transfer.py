"""Small arrays on their way to a device, and back.

Knows tensors and devices; knows neither steps nor models.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_cuda: Any = torch.cuda  # whose streams and events have no annotations


def to_device(array: np.ndarray[Any, np.dtype[Any]], device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`; on a CPU, the same memory.

    To a card from page-locked memory, which it reads while the program goes on; from ordinary memory a copy
    that is asked not to block does so all the same. Torch keeps the locked memory until the card has read it.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class ToHost:
    """A tensor on its way back: asked for now, waited for later.

    What the card is given in the meantime is not waited for, as it would be by reading the tensor then.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        self._arrived: Any = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = _cuda.Event()
            self._arrived.record(_cuda.current_stream(tensor.device))

    def take(self) -> torch.Tensor:
        """On a CPU. Blocks until it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
