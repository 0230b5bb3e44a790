"""What the benchmarks' command lines take."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """For `type=`. Raises ArgumentTypeError below 1, which argparse prints with the option's name."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value
