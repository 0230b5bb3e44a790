"""Peak memory of this process, reset and read."""

from __future__ import annotations

import sys

import pytest

from benchmarks import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's files")


def test_the_peak_remembers_what_was_given_back_until_it_is_reset() -> None:
    size = 64 << 20
    memory.reset_peak()
    before = memory.resident_bytes()
    held = bytearray(size)
    held[::4096] = b"x" * len(held[::4096])
    del held
    assert memory.peak_bytes() - before > 0.9 * size
    memory.reset_peak()
    assert memory.peak_bytes() - before < 0.5 * size
