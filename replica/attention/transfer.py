"""Small arrays on their way to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def to_device(array: np.ndarray[Any, np.dtype[Any]], device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`; on a CPU, the same memory.

    To a card from page-locked memory, which it reads while the program goes on; from ordinary memory a copy
    that is asked not to block does so all the same. Torch keeps the locked memory until the card has read it.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
