"""Whichever Router is scraped, in whatever order, while others hang, die and start: no counter goes back.

The law holds for what a Router can know: whoever hangs answers nobody, and everybody else answers everybody.
"""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.types import ReplicaId
from router.fleet.engine_series import EngineView
from tests.fakes.reports import a_distribution, an_engine_report
from tests.fakes.router import info
from tests.fakes.routers import OneRouter, SomeRouters, Values, counted

R = ReplicaId("r1")


class FleetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.fleet = SomeRouters()
        self.num_started = 0
        self.engine_number = 0
        self.seen: Values = {}  # the largest value that any scrape has shown

    @initialize()
    def begin(self) -> None:
        for _ in range(3):
            self.start()

    @rule()
    def start(self) -> None:
        if len(self.fleet.routers) < 5:
            self.num_started += 1
            self.hear(self.fleet.start(f"router-{self.num_started}"))

    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        if len(self.fleet.routers) > 1:
            self.fleet.stop(data.draw(st.sampled_from(sorted(self.fleet.routers))))

    @rule(data=st.data())
    def hang_or_wake(self, data: st.DataObject) -> None:
        router = self.pick(data)
        router.is_hung = not router.is_hung
        if not router.is_hung:
            self.hear(router)  # its socket has kept what came

    @rule(data=st.data(), count=st.integers(1, 5))
    def work(self, data: st.DataObject, count: int) -> None:
        router = self.pick(data)
        if not router.is_hung:
            router.work(count)
            router.in_flight.set(count)

    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        """The engine reports; some Router hears it at once, the others later."""
        self.engine_number += 1
        self.hear(self.pick(data))

    @rule()
    def catch_up(self) -> None:
        for router in self.fleet.routers.values():
            self.hear(router)

    @rule(seconds=st.sampled_from([0.1, 5.0, 70.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.catch_up()
        self.fleet.clock.advance(seconds)

    @precondition(lambda self: len(self.awake) > 2)
    @rule(data=st.data())
    def hang_after_telling_each_something_else(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.awake))
        others = [name for name in self.awake if name != victim]
        for name in data.draw(st.permutations(others)):
            self.fleet.routers[victim].work()
            self.scrape_of(name)
        self.fleet.routers[victim].is_hung = True
        for name in data.draw(st.permutations(others)):
            self.scrape_of(name)

    @precondition(lambda self: self.awake)
    @rule(data=st.data())
    def scrape(self, data: st.DataObject) -> None:
        self.scrape_of(data.draw(st.sampled_from(self.awake)))

    @property
    def awake(self) -> list[str]:
        return sorted(name for name, router in self.fleet.routers.items() if not router.is_hung)

    def scrape_of(self, name: str) -> None:
        router, awake = self.fleet.routers[name], self.awake
        if len(awake) < len(self.fleet.routers):
            self.catch_up()  # it waits for the others longer than reports take
        values = self.loop.run_until_complete(router.scrape())
        up = {
            dict(labels)["router"] for (key, labels), v in values.items() if key == "warmpath_router_up" and v
        }
        assert up == set(awake)
        for key, value in counted(values).items():
            assert value >= self.seen.get(key, 0.0), key
            self.seen[key] = value
        for key, labels in values:
            assert key != "warmpath_in_flight" or dict(labels)["router"] in up

    @invariant()
    def nothing_is_left_behind(self) -> None:
        for router in self.fleet.routers.values():
            assert router.metrics._silent <= router.metrics._heard.keys()

    def teardown(self) -> None:
        for router in self.fleet.routers.values():
            self.loop.run_until_complete(router.metrics.aclose())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def pick(self, data: st.DataObject) -> OneRouter:
        return self.fleet.routers[data.draw(st.sampled_from(sorted(self.fleet.routers)))]

    def hear(self, router: OneRouter) -> None:
        """The latest report of the engine reaches this Router, unless it hangs."""
        if not router.is_hung and self.engine_number:
            number = self.engine_number
            report = an_engine_report(
                number=number,
                generated_tokens=10 * number,
                first_token_s=a_distribution("first_token_s", *[0.1] * number),
            )
            router.engines = {R: EngineView(info(), report)}


TestFleetMetrics = FleetMachine.TestCase
TestFleetMetrics.settings = settings(max_examples=25, stateful_step_count=25)
