"""What is compiled is there where it can be, and is told where it is not."""

from __future__ import annotations

import shutil

import pytest

from cache import block_hash


def test_an_installation_beside_a_compiler_has_it() -> None:
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler: Python makes the same hashes")
    assert block_hash.IS_COMPILED, (
        "not compiled here: pip install -e . does, and its -v says why it could not"
    )
