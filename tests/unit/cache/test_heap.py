"""When the garbage collector leaves alone what is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

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


@pytest.fixture
def collections_as_they_were() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.usefixtures("collections_as_they_were")
@pytest.mark.parametrize("are_on", [True, False])
def test_collections_wait_for_what_makes_many_objects_and_are_then_as_before(are_on: bool) -> None:
    (gc.enable if are_on else gc.disable)()
    seen = []

    def load() -> None:
        with heap.without_collections():
            with heap.without_collections():
                seen.append(gc.isenabled())
            seen.append(gc.isenabled())
            raise ImportError

    with pytest.raises(ImportError):
        load()
    assert seen == [False, False]
    assert gc.isenabled() is are_on


@pytest.mark.usefixtures("collections_as_they_were")
@pytest.mark.parametrize("first_out", ["first", "second"])
def test_collections_come_on_again_in_whatever_order_threads_end(first_out: str) -> None:
    """Who came second found them off, and left them so for good where it ended last."""
    gc.enable()
    pauses = {"first": heap.without_collections(), "second": heap.without_collections()}
    for pause in pauses.values():
        pause.__enter__()
    pauses.pop(first_out).__exit__(None, None, None)
    assert not gc.isenabled()  # the other one is at it still
    pauses.popitem()[1].__exit__(None, None, None)
    assert gc.isenabled()
