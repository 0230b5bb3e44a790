"""A replica that holds prefixes is as good as one without: what they take is nobody's work."""

from __future__ import annotations

import msgspec

from cache.events import Load
from cache.types import RequestId
from tests.fakes.engine import make_request, pinned, sim_core
from tests.fakes.router import STEP_TIME, chain, query, replica_id
from tests.fakes.routing import RoutingBench

A, B = replica_id(0), replica_id(1)


def told_by_an_engine(*, num_held: int) -> Load:
    """Of 640 blocks; two answers are running, with more of them to come than have been seen."""
    core = pinned(sim_core(640, max_model_len=100), num_held)
    for name in ("a", "b"):
        core.submit(make_request(name, [200 + ord(name)], max_tokens=20))
    for _ in range(3):
        core.step()
    load = core.load()
    assert load.num_running == 2
    return msgspec.structs.replace(load, step_time=STEP_TIME)


def test_who_begins_with_the_prefix_goes_where_it_is_held() -> None:
    """Although it is short: computing it takes less than what its memory would be charged."""
    bench = RoutingBench()
    bench.routing._loads.residence.observe(30.0)
    bench.say(A, stored=chain("held", 4))
    for replica, num_held in ((A, 300), (B, 0)):
        bench.routing.on_load(replica, told_by_an_engine(num_held=num_held))
    for number in range(4):
        asked = query("held", 5, request_id=RequestId(str(number)))
        assert bench.routing.choose(asked).replica_id == A
