"""Import this before anything imports Triton: its kernels then run in its interpreter, on the CPU.

For test modules only. Triton reads the setting once, when it is imported, for the whole process; whoever
wants its kernels compiled (`tests/gpu`) runs in a process of their own: `make test-gpu`.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (it is in the extra `dev` on Linux x86_64)",
)
