"""Pins whose Router has gone: adopted by one other, once, and as well kept as before."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from cache.block_hash import PackedHashes
from cache.fingerprint import Fingerprint
from cache.messages import PinLease
from cache.types import PinId, ReplicaId
from router.prefixes.prefix import NOBODY, Turn
from router.prefixes.succession import GONE_AFTER_S, LOOK_INTERVAL_S
from tests.fakes.prefixes import PaperFleet, PaperRouter, a_prefix, hashes_of
from tests.fakes.router import BLOCK_SIZE, FINGERPRINT, OTHER_FINGERPRINT, OTHER_MODEL, load


@pytest.fixture
async def routers() -> AsyncIterator[list[PaperRouter]]:
    """Three Routers of one fleet of four replicas."""
    fleet = PaperFleet(4)
    made = [PaperRouter(fleet) for _ in range(3)]
    yield made
    for router in made:
        await router.keeper.aclose()
        await router.succession.aclose()


async def end(router: PaperRouter) -> None:
    """Its process dies: it looks after nothing any more, and answers nobody."""
    router.fleet.silent.add(router.name)
    await router.keeper.aclose()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.001)


async def pass_time(routers: list[PaperRouter], seconds: float) -> None:
    """All that happens in so much time, in those of the Routers that live."""
    fleet, passed = routers[0].fleet, 0.0
    while passed < seconds:
        fleet.clock.advance(LOOK_INTERVAL_S)
        passed += LOOK_INTERVAL_S
        fleet.tell()
        living = [router for router in routers if router.name not in fleet.silent]
        for router in living:
            for name in fleet.replicas:
                router.routing.on_load(name, load())
            router.keeper.look()
        await asyncio.gather(*[router.succession.look() for router in living])
        for _ in range(50):
            await asyncio.sleep(0)
        fleet.tell()


def keepers(routers: list[PaperRouter], pin: str) -> list[str]:
    return [router.name for router in routers if router.keeper.keeps(pin)]  # type: ignore[arg-type]


async def test_a_dead_routers_prefix_gets_one_new_router(routers: list[PaperRouter]) -> None:
    pin = await routers[0].hold(copies=2, seconds=600.0)
    await end(routers[0])
    await pass_time(routers, GONE_AFTER_S + 2 * LOOK_INTERVAL_S)
    (heir,) = keepers(routers[1:], pin)
    for told in (router.keeper.pins()[0] for router in routers[1:]):
        assert (told.keeper, told.copies, len(told.replicas)) == (heir, 2, 2)
    assert sum(router.keeper.statistics().num_adopted for router in routers) == 1


async def test_a_router_that_leaves_is_not_missed_first(routers: list[PaperRouter]) -> None:
    """Its holders may leave right after it, as in a rolling update: ten seconds were too long."""
    fleet = routers[0].fleet
    pin = await routers[0].hold(copies=2, seconds=600.0)
    fleet.tell()
    await routers[0].keeper.hand_on()
    assert keepers(routers, pin) == []
    await end(routers[0])
    fleet.tell()
    assert [router.keeper.pins()[0].keeper for router in routers[1:]] == [NOBODY] * 2
    await pass_time(routers, LOOK_INTERVAL_S)
    (heir,) = keepers(routers[1:], pin)
    for told in (router.keeper.pins()[0] for router in routers[1:]):
        assert (told.keeper, told.copies, len(told.replicas)) == (heir, 2, 2)
    assert len(fleet.holders(pin)) == 2


async def test_its_lost_copies_are_made_again(routers: list[PaperRouter]) -> None:
    """With the tokens, under the salt and for the time that it had."""
    fleet = routers[0].fleet
    prefix = a_prefix(4, first=7, salt="alice's")
    held, _ = await routers[0].keeper.establish(
        prefix, owner="alice", copies=2, seconds=600.0, request_id="r"
    )
    await end(routers[0])
    await pass_time(routers, GONE_AFTER_S + 2 * LOOK_INTERVAL_S)
    lost = held.replicas[0]
    fleet.lose(lost)
    await pass_time(routers, 2 * LOOK_INTERVAL_S)
    (told,) = routers[2].keeper.pins("alice")
    assert told.is_whole
    assert (told.created_at, told.expires_at) == (held.created_at, held.expires_at)
    made = fleet.replicas[next(name for name in told.replicas if name not in held.replicas)]
    lease, _ = made.pins[told.pin_id]
    assert made.tokens[told.pin_id] == prefix.token_ids
    assert lease.cache_salt == "alice's"
    assert lease.seconds == pytest.approx(
        held.expires_at - fleet.clock() + LOOK_INTERVAL_S, abs=LOOK_INTERVAL_S
    )


async def test_they_are_made_in_their_owners_turn(routers: list[PaperRouter]) -> None:
    """Those of an adopted prefix too, though nobody told its new Router whose it is; as of now."""
    fleet = routers[0].fleet
    pin = await routers[0].hold(copies=2, owner="alice", seconds=600.0)
    await end(routers[0])
    await pass_time(routers, GONE_AFTER_S + 2 * LOOK_INTERVAL_S)
    fleet.turns["alice"] = Turn("hers", 2.0, 1)
    fleet.lose(fleet.holders(pin)[0])
    await pass_time(routers, 2 * LOOK_INTERVAL_S)
    first, second, again = [(each.tenant, each.share, each.priority) for each in fleet.requests]
    assert first == second == ("alice's", 3.0, 2)
    assert again == ("hers", 2.0, 1)


async def test_the_only_copy_is_enough(routers: list[PaperRouter]) -> None:
    pin = await routers[0].hold(copies=1, seconds=600.0)
    await end(routers[0])
    await pass_time(routers, GONE_AFTER_S + 2 * LOOK_INTERVAL_S)
    (holder,) = routers[0].fleet.holders(pin)
    routers[0].fleet.lose(holder)
    await pass_time(routers, 2 * LOOK_INTERVAL_S)
    assert len(routers[0].fleet.holders(pin)) == 1


async def test_who_is_only_slow_keeps_what_it_has(routers: list[PaperRouter]) -> None:
    pin = await routers[0].hold(copies=2, seconds=600.0)
    fleet = routers[0].fleet
    for _ in range(5):
        fleet.silent.add("router0")
        await pass_time(routers, GONE_AFTER_S - 2 * LOOK_INTERVAL_S)
        fleet.silent.clear()
        await pass_time(routers, LOOK_INTERVAL_S)
    assert keepers(routers, pin) == ["router0"]


async def test_who_was_taken_for_gone_keeps_it_no_more_and_gives_nothing_back(
    routers: list[PaperRouter],
) -> None:
    pin = await routers[0].hold(copies=2, seconds=600.0)
    fleet = routers[0].fleet
    fleet.silent.add("router0")
    await pass_time(routers, GONE_AFTER_S + 2 * LOOK_INTERVAL_S)
    fleet.silent.clear()
    await pass_time(routers, 2 * LOOK_INTERVAL_S)
    assert len(keepers(routers, pin)) == 1
    assert "router0" not in keepers(routers, pin)
    assert len(fleet.holders(pin)) == 2
    assert fleet.released == []


async def test_what_is_given_back_meanwhile_is_nobodys(routers: list[PaperRouter]) -> None:
    pin = await routers[0].hold(copies=2, seconds=600.0)
    await end(routers[0])
    routers[0].fleet.tell()
    found = routers[1].keeper.find(pin, "alice")
    assert found is not None
    await routers[1].keeper.give_back(found)
    await pass_time(routers, GONE_AFTER_S + 4 * LOOK_INTERVAL_S)
    assert keepers(routers[1:], pin) == []
    assert routers[0].fleet.holders(pin) == []


async def test_what_has_no_owner_any_more_is_adopted_to_be_ended(routers: list[PaperRouter]) -> None:
    fleet = routers[0].fleet
    pin = await routers[0].hold(copies=2, seconds=600.0)
    await end(routers[0])
    del fleet.turns["alice"]
    await pass_time(routers, GONE_AFTER_S + 4 * LOOK_INTERVAL_S)
    assert keepers(routers[1:], pin) == []
    assert fleet.holders(pin) == []
    assert len(fleet.requests) == 2


async def test_nor_is_what_another_router_gives_back_while_it_is_adopted(routers: list[PaperRouter]) -> None:
    fleet = routers[0].fleet
    pin = await routers[0].hold(copies=2, seconds=600.0)
    await end(routers[0])
    fleet.tell()
    (told,) = routers[1].keeper.pins()
    (found,) = routers[2].keeper.pins()

    async def hashes_while_it_is_given_back(tokens: array[int], salt: str) -> PackedHashes:
        await routers[2].keeper.give_back(found)
        fleet.tell()
        return await hashes_of(tokens, salt)

    routers[1].succession._hashes = hashes_while_it_is_given_back
    await routers[1].succession._adopt(told)
    await pass_time(routers, 4 * LOOK_INTERVAL_S)
    assert keepers(routers[1:], pin) == []
    assert fleet.holders(pin) == []


async def test_an_adoption_that_was_cut_short_is_done_again(routers: list[PaperRouter]) -> None:
    """The holders name this Router; it knows nothing of it."""
    fleet = routers[0].fleet
    pin = await routers[0].hold(copies=2, seconds=600.0)
    await end(routers[0])
    fleet.tell()
    (told,) = routers[1].keeper.pins()
    assert await routers[1].succession._take_over(told) is not None
    await pass_time(routers, LOOK_INTERVAL_S)
    assert keepers(routers[1:], pin) == ["router1"]


async def test_it_is_looked_for_while_there_are_replicas(
    routers: list[PaperRouter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an event loop does it; a look that fails is not the last one."""
    monkeypatch.setattr("router.prefixes.succession.LOOK_INTERVAL_S", 0.001)
    monkeypatch.setattr("router.prefixes.succession.GONE_AFTER_S", 0.0)
    pin = await routers[0].hold(copies=2, seconds=600.0)
    await end(routers[0])
    routers[0].fleet.tell()
    asked, ask = 0, routers[0].fleet.routers_up

    async def fail_once() -> frozenset[str]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeError("a surprise")
        return await ask()

    monkeypatch.setattr(routers[1].succession, "_routers_up", fail_once)
    routers[1].succession.watch({ReplicaId("r0"): None})
    await until(lambda: bool(keepers(routers[1:], pin)))
    routers[1].succession.watch({})
    await until(lambda: routers[1].succession._watching is None)


async def test_a_router_that_leaves_does_not_adopt_what_it_hands_on(
    routers: list[PaperRouter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica came or left while it told the holders, as in a rolling update: it looked for orphans again,
    and its own prefixes were the first."""
    monkeypatch.setattr("router.prefixes.succession.LOOK_INTERVAL_S", 0.001)
    leaver, fleet = routers[0], routers[0].fleet
    pin = PinId(await leaver.hold(copies=1, seconds=600.0))
    await leaver.succession.aclose()
    await leaver.keeper.hand_on()
    leaver.succession.watch(fleet.replicas)
    fleet.tell()
    await asyncio.sleep(0.02)
    (holder,) = fleet.holders(pin)
    assert fleet.replicas[holder].pins[pin][0].keeper == NOBODY
    assert leaver.succession._watching is None


@pytest.mark.parametrize(
    ("fingerprint", "num_tokens", "blocks"),
    [
        (replace(FINGERPRINT, block_size=BLOCK_SIZE // 2), BLOCK_SIZE * 9 // 2, 4),
        (replace(FINGERPRINT, block_size=2 * BLOCK_SIZE), 4 * BLOCK_SIZE, 4),
        (OTHER_FINGERPRINT, 4 * BLOCK_SIZE, 4),
        (OTHER_MODEL, 4 * BLOCK_SIZE, None),
    ],
)
async def test_what_older_replicas_hash_otherwise_is_held_by_newer_ones(
    fingerprint: Fingerprint, num_tokens: int, blocks: int | None
) -> None:
    """Tokens are handed on, as in a rolling update, and hashed anew. Another model has other words."""
    fleet = PaperFleet(1, fingerprint=fingerprint)
    (old,) = fleet.replicas
    pin = PinId("prefix-1")
    lease = PinLease(pin, "alice", 600.0, 1, fleet.clock(), fleet.clock() + 600.0, NOBODY, "")
    fleet.replicas[old].pins[pin] = lease, num_tokens // fingerprint.block_size
    fleet.replicas[old].tokens[pin] = a_prefix(9).token_ids[:num_tokens]
    router = PaperRouter(fleet)
    fleet.join(ReplicaId("new"))
    await pass_time([router], 2 * LOOK_INTERVAL_S)
    fleet.lose(old)
    await pass_time([router], 2 * LOOK_INTERVAL_S)
    if blocks is None:
        assert fleet.holders(pin) == []
    else:
        assert fleet.replicas[ReplicaId("new")].pins[pin][1] == blocks
        (told,) = router.keeper.pins("alice")
        assert (told.num_blocks, told.is_whole) == (blocks, True)
    await router.succession.aclose()
    await router.keeper.aclose()
