"""What the benchmarks' command lines take."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from collections.abc import Callable
from pathlib import Path


def positive(text: str) -> int:
    """For `type=`. Raises ArgumentTypeError below 1, which argparse prints with the option's name."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def between(low: float, high: float = math.inf) -> Callable[[str], float]:
    """For `type=`: a number from `low` to `high`. It raises ArgumentTypeError for others."""
    wanted = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:  # nor nan
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {wanted}")
        return value

    return read


def to_write(text: str) -> Path:
    """For `type=`: a file for the end of a long run. Raises ArgumentTypeError where it cannot be written."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def to_draw(text: str) -> Path:
    """The same for a picture. Raises ArgumentTypeError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("plots need matplotlib, which is not installed here")
    return to_write(text)
