"""Large bodies wait for room, in turns of tenants; small ones do not; and all of it is given back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.errors import BodiesBusy
from router.limits import Limits
from router.openai_api.body_room import SMALL_BYTES, BodyRoom
from tests.fakes.guarded import key, settings
from tests.fakes.http import MODEL, RouterUnderTest, error_of

MIB = 1 << 20


class Requests:
    """Bodies that are read, and worked on until they are told to end."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.working: list[str] = []  # in the order in which they began

    async def begin(self, name: str, num_bytes: int) -> None:
        """name: the tenant's letter first."""
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(name, num_bytes))
        await settled()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]
        await settled()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        await settled()

    async def outcome(self, name: str) -> BaseException | None:
        (found,) = await asyncio.gather(self._tasks[name], return_exceptions=True)
        return found

    async def _run(self, name: str, num_bytes: int) -> None:
        with self._room.place(name[0]) as place:
            place.grow(num_bytes)
            await place.turn()
            self.working.append(name)
            await self._ends[name].wait()
            self.working.remove(name)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_as_many_are_worked_on_as_there_is_room_for_and_tenants_take_turns() -> None:
    room = BodyRoom(100 * MIB, 2 * MIB, None)
    requests = Requests(room)
    for name in ("a1", "a2", "a3", "a4", "b1"):
        await requests.begin(name, MIB)
    assert requests.working == ["a1", "a2"]
    await requests.end("a1")
    assert requests.working == ["a2", "a3"]
    await requests.end("a2")
    assert requests.working == ["a3", "b1"]
    await requests.end("b1")
    assert requests.working == ["a3", "a4"]
    for name in ("a3", "a4"):
        await requests.end(name)
    assert room.held_bytes == 0


async def test_one_that_is_larger_than_the_room_is_worked_on_alone() -> None:
    requests = Requests(BodyRoom(100 * MIB, 2 * MIB, None))
    await requests.begin("a1", MIB)
    await requests.begin("a2", 3 * MIB)
    await requests.begin("b1", MIB)
    assert requests.working == ["a1"]
    await requests.end("a1")
    assert requests.working == ["a2"]
    await requests.end("a2")
    assert requests.working == ["b1"]


async def test_small_ones_pass() -> None:
    requests = Requests(BodyRoom(3 * MIB, 2 * MIB, None))
    await requests.begin("a1", 2 * MIB)
    await requests.begin("a2", MIB)
    for number in range(40):
        await requests.begin(f"b{number}", SMALL_BYTES)
    assert len(requests.working) == 41
    await requests.begin("c", SMALL_BYTES + 1)
    assert isinstance(await requests.outcome("c"), BodiesBusy)


async def test_one_tenant_leaves_others_as_much_as_it_has() -> None:
    """One that stops in the middle of its bodies kept everybody's large ones out."""
    room = BodyRoom(8 * MIB, MIB, None, is_divided=True)
    with contextlib.ExitStack() as held:

        def comes(tenant: str, num_bytes: int) -> bool:
            place = held.enter_context(room.place(tenant))
            try:
                place.grow(num_bytes)
            except BodiesBusy:
                place.leave()
                return False
            return True

        assert [comes("a", MIB) for _ in range(6)] == [True] * 4 + [False] * 2
        assert [comes("b", MIB) for _ in range(3)] == [True] * 2 + [False]
        assert comes("c", 2 * MIB)  # its only one
        assert comes("a", SMALL_BYTES)
        assert not comes("d", MIB)
    assert room.held_bytes == 0
    assert not room._held_by


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(SMALL_BYTES + 1, MIB)), max_size=60))
@example([(tenant, MIB) for tenant in "abc" for _ in range(10)])
def test_whatever_others_send_a_newcomer_finds_its_part(bodies: list[tuple[str, int]]) -> None:
    """Of three tenants each leaves half of what it found: an eighth."""
    room = BodyRoom(16 * MIB, MIB, None, is_divided=True)
    with contextlib.ExitStack() as held:
        for tenant, num_bytes in bodies:
            place = held.enter_context(room.place(tenant))
            try:
                place.grow(num_bytes)
            except BodiesBusy:
                place.leave()
        with room.place("d") as newcomer:
            newcomer.grow(2 * MIB)


@pytest.mark.parametrize("is_divided", [False, True])
async def test_a_body_of_the_largest_size_has_room_whoever_sends_it(is_divided: bool) -> None:
    """Without keys everybody is one tenant, and the room is its own."""
    room = BodyRoom(4 * MIB, MIB, None, is_divided=is_divided)
    with room.place("a") as place:
        place.grow(4 * MIB)
    with room.place("a") as first, room.place("a") as second:
        first.grow(2 * MIB)
        if is_divided:
            with pytest.raises(BodiesBusy):
                second.grow(2 * MIB)
        else:
            second.grow(2 * MIB)


async def test_who_gives_up_leaves_its_place_to_the_next() -> None:
    room = BodyRoom(100 * MIB, MIB, None)
    requests = Requests(room)
    for name in ("a1", "a2", "a3"):
        await requests.begin(name, MIB)
    await requests.cancel("a2")
    await requests.cancel("a1")
    assert requests.working[-1] == "a3"
    await requests.end("a3")
    assert room.held_bytes == 0


async def test_who_gives_up_as_its_turn_comes_is_not_worked_on() -> None:
    """It was, under Python 3.11: for a client that had gone."""
    room = BodyRoom(100 * MIB, MIB, 60.0)
    requests = Requests(room)
    with room.place("a") as first:
        first.grow(MIB)
        await first.turn()
        await requests.begin("b1", MIB)
    requests._tasks["b1"].cancel()  # in the very turn of the loop
    await settled()
    assert requests.working == []
    assert room.held_bytes == 0


async def test_who_waits_too_long_is_told_to_come_again() -> None:
    room = BodyRoom(100 * MIB, MIB, 0.01)
    requests = Requests(room)
    await requests.begin("a1", MIB)
    await requests.begin("b1", MIB)
    assert isinstance(await requests.outcome("b1"), BodiesBusy)
    await requests.end("a1")
    await requests.begin("b2", MIB)
    assert requests.working == ["b2"]


Step = tuple[str, int, int]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("begin", "end", "cancel")), st.integers(0, 7), st.integers(1, 4 * SMALL_BYTES)
        ),
        max_size=40,
    )
)
def test_room_is_never_exceeded_nobody_waits_beside_room_and_all_of_it_comes_back(steps: list[Step]) -> None:
    """Of whatever comes, ends and gives up."""
    most = 5 * SMALL_BYTES

    async def run() -> None:
        room, sizes = BodyRoom(1 << 40, most, None), dict[str, int]()
        requests = Requests(room)
        for number, (what, tenant, num_bytes) in enumerate(steps):
            if what == "begin":
                name = f"{'abcdefgh'[tenant]}{number}"
                sizes[name] = num_bytes
                await requests.begin(name, num_bytes)
            elif sizes:
                name = list(sizes)[tenant % len(sizes)]
                if what == "end" and name in requests.working:
                    await requests.end(name)
                    del sizes[name]
                elif what == "cancel":
                    await requests.cancel(name)
                    with contextlib.suppress(ValueError):
                        requests.working.remove(name)
                    del sizes[name]
            assert room.held_bytes == sum(sizes.values())
            large = [sizes[name] for name in requests.working if sizes[name] > SMALL_BYTES]
            assert sum(large) <= most
            waiting = [size for name, size in sizes.items() if name not in requests.working]
            assert all(size > SMALL_BYTES for size in waiting)
            assert large or not waiting
        for name in list(sizes):
            await requests.cancel(name)
        assert room.held_bytes == 0

    asyncio.run(run())


async def test_a_body_that_finds_no_room_is_a_429_and_the_next_is_served() -> None:
    large = {"model": MODEL, "prompt": "a", "user": "x" * (2 * SMALL_BYTES)}
    limits = Limits(max_body_bytes=2 * SMALL_BYTES + 1024, max_bodies_bytes=2 * SMALL_BYTES + 2048)
    async with RouterUnderTest(limits=limits) as router:
        started, ended = asyncio.Event(), asyncio.Event()

        async def trickling() -> AsyncIterator[bytes]:
            yield json.dumps(large).encode()[: 2 * SMALL_BYTES]
            started.set()
            await ended.wait()
            yield json.dumps(large).encode()[2 * SMALL_BYTES :]

        first = asyncio.create_task(router.client.post("/v1/completions", content=trickling()))
        await started.wait()
        refused = await router.client.post("/v1/completions", json=large)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "server_busy")
        assert router.metric("warmpath_bodies_held_bytes") == 2 * SMALL_BYTES
        assert (await router.client.post("/v1/completions", json={**large, "user": "x"})).status_code == 200
        ended.set()
        assert (await first).status_code == 200
        assert (await router.client.post("/v1/completions", json=large)).status_code == 200
        assert router.metric("warmpath_bodies_held_bytes") == 0


async def test_with_keys_a_tenant_that_stops_leaves_others_room(tmp_path: Path) -> None:
    """Two keys of one tenant have its room together."""
    content = json.dumps({"model": MODEL, "prompt": "a", "user": "x" * 2 * SMALL_BYTES}).encode()
    limits = Limits(max_body_bytes=3 * SMALL_BYTES, max_bodies_bytes=5 * SMALL_BYTES)
    async with RouterUnderTest(limits=limits, tenants=settings(tmp_path)) as router:
        started = asyncio.Event()

        async def stops() -> AsyncIterator[bytes]:
            yield content[:-1]
            started.set()
            await asyncio.Event().wait()

        async def ask(name: str, sent: Any) -> int:
            answer = await router.client.post("/v1/completions", content=sent, headers=key(name))
            return answer.status_code

        first = asyncio.create_task(ask("alice", stops()))
        await started.wait()
        assert [await ask(name, content) for name in ("alice", "anna", "bob")] == [429, 429, 200]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert await ask("alice", content) == 200


LARGE = {"model": MODEL, "prompt": "a", "user": "x" * SMALL_BYTES}
TWO_OF_THEM = Limits(max_body_bytes=SMALL_BYTES + 1024)


async def test_two_of_the_largest_size_are_worked_on_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    num_begun, may_end = 0, asyncio.Event()
    async with RouterUnderTest(limits=TWO_OF_THEM) as router:
        plain = router.encoder.encode_text

        async def slowly(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_begun
            num_begun += 1
            await may_end.wait()
            return await plain(*args, **kwargs)

        monkeypatch.setattr(router.encoder, "encode_text", slowly)
        asked = [asyncio.create_task(router.client.post("/v1/completions", json=LARGE)) for _ in range(3)]
        await until(lambda: router.metric("warmpath_bodies_held_bytes") > 3 * SMALL_BYTES)
        await asyncio.sleep(0.05)
        assert num_begun == 2
        may_end.set()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 3


async def test_what_is_placed_keeps_no_room() -> None:
    """Its answer may take minutes."""
    async with RouterUnderTest(limits=TWO_OF_THEM) as router:
        router.answer_with(then_hang=True)
        asked = [asyncio.create_task(router.client.post("/v1/completions", json=LARGE)) for _ in range(3)]
        await until(lambda: len(router.calls.requests) == 3)
        assert router.metric("warmpath_bodies_held_bytes") == 0
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - requests have no event to wait for
            await asyncio.sleep(0.001)
