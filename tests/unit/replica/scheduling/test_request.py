"""What no router sends, and would harm others in the batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from replica.errors import InvalidRequest
from replica.scheduling.request import check_request
from tests.fakes.engine import make_request


@pytest.mark.parametrize("waited_s", [math.nan, math.inf, -math.inf, -0.5])
def test_a_wait_that_is_none_is_refused(waited_s: float) -> None:
    """The waiting are kept in an order that counts it: one NaN among them, and nobody's place is found."""
    with pytest.raises(InvalidRequest, match="waited_s"):
        check_request(replace(make_request("r", [1]), waited_s=waited_s), vocab_size=10)


@pytest.mark.parametrize("waited_s", [0.0, 3600.0])
def test_however_long_it_waited_it_is_taken(waited_s: float) -> None:
    check_request(replace(make_request("r", [1]), waited_s=waited_s), vocab_size=10)
