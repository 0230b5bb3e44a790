"""One tenant's queue is another's empty one, within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from replica.config import SimConfig
from replica.errors import QueueFull, WaitTooLong
from tests.fakes.engine import make_request, sim_core


def test_a_full_queue_has_room_for_a_tenants_part() -> None:
    """Of four places two would be its own: so many it may have beside the four that another took."""
    core = sim_core(max_waiting=4)
    for i in range(4):
        core.submit(replace(make_request(f"busy{i}", [i]), tenant="busy"))
    with pytest.raises(QueueFull):
        core.submit(replace(make_request("busy4", [9]), tenant="busy"))
    for i in range(2):
        core.submit(replace(make_request(f"calm{i}", [i]), tenant="calm"))
    with pytest.raises(QueueFull) as caught:
        core.submit(replace(make_request("calm2", [9]), tenant="calm"))
    assert (caught.value.waiting, caught.value.limit) == (6, 4)


def test_a_tenant_waits_behind_as_much_of_the_others_as_of_its_own() -> None:
    """256 full steps of 4 tokens are a second: 1,500 tokens of another are not before it."""
    core = sim_core(2000, sim=SimConfig(num_blocks=2000), max_wait_s=1.0, max_batched_tokens=4)
    core.submit(replace(make_request("busy", [1] * 1500), tenant="busy"))
    with pytest.raises(WaitTooLong):
        core.submit(replace(make_request("busy too", range(4)), tenant="busy"))
    core.submit(replace(make_request("calm", range(600), salt="x"), tenant="calm"))
    with pytest.raises(WaitTooLong) as caught:  # its own 600, and as much of the other's
        core.submit(replace(make_request("calm too", range(4)), tenant="calm"))
    assert caught.value.wait_s == pytest.approx(1200 / 1024)
