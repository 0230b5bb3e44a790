"""The live page in a real browser: what it shows, light, dark and on a phone, and what it does then.

One browser for the tests of a file, and a Router that has been busy. `WARMPATH_SCREENSHOTS=folder` keeps what
was seen, to be looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chromium import Browser, Page, running_chromium
from tests.http.dashboard.bench import Bench, bench
from tests.http.dashboard.looking import CHROMIUM


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with running_chromium(CHROMIUM) as running:
        yield running


@pytest.fixture(scope="module")
def busy() -> Iterator[Bench]:
    """Two replicas that have answered a few dozen requests."""
    with bench() as made:
        made.load(0, num_running=5, num_waiting=2, queued_uncached_tokens=900)
        made.load(1, num_running=1)
        made.decide(40)
        yield made


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browser.page() as opened:
        yield opened
