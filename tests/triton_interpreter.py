"""For test modules that run Triton's kernels: in its interpreter, on the CPU (`conftest.py`).

Whoever wants them compiled (`tests/gpu`) runs in a process of their own: `make test-gpu`.
"""

from __future__ import annotations

import importlib.util

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (it is in the extra `dev` on Linux x86_64)",
)
