"""What a replica computes on, named so that two that share it have one name. Knows no model and no engine."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_of(device: str) -> str:
    """device: as torch names it, "cpu" or "cuda:0"; "simulated" computes nothing and shares nothing: "".

    Replicas on a CPU share all cores that they can see: those of a host, or of a container, which has a host
    name of its own. Replicas on a card share that card, if each has a part of it.
    """
    if device.startswith("cuda"):
        import torch

        return f"card {torch.cuda.get_device_properties(device).uuid}"
    return f"{socket.gethostname()} {_boot_id()}" if device == "cpu" else ""


def _boot_id() -> str:
    """Of two hosts of one name, as fresh images often are, the one and the other. Linux alone has it."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""
