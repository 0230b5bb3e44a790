"""Whether a card still computes what it is given.

A kernel that reads or writes where it may not costs its process the card: every later call there fails with
the same error, whatever it asks for. Knows torch's words; knows no steps.
"""

from __future__ import annotations

import torch

from replica.device_errors import is_out_of_memory


def is_lost(device: torch.device) -> bool:
    """Asked after an error: waits for what the card has been given. False for a CPU."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return not is_out_of_memory(error)
    return False
