"""Deep stacks are for these threads alone; how deep they are, compilers show."""

from __future__ import annotations

import threading

from cache.deep_threads import DeepThreads


def test_other_threads_stay_as_they_were() -> None:
    before = threading.stack_size()
    with DeepThreads(1) as threads:
        assert threads.submit(sum, [1, 2]).result(10) == 3
    assert threading.stack_size() == before
