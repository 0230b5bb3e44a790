"""What the benchmarks' command lines take."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path


def positive(text: str) -> int:
    """For `type=`. Raises ArgumentTypeError below 1, which argparse prints with the option's name."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


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
