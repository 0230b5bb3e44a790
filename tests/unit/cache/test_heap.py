"""What is loaded before serving is left alone by the garbage collector."""

from __future__ import annotations

import gc

from cache import heap


def test_what_was_loaded_before_serving_is_not_walked_by_full_collections() -> None:
    """Else every one of them would stop the event loop for longer than most answers take."""
    loaded = [{"like": ["a", "tokenizer"]}]
    assert any(one is loaded for one in gc.get_objects())
    heap.settle()
    try:
        assert not any(one is loaded for one in gc.get_objects())
        assert gc.isenabled()
    finally:
        gc.unfreeze()
