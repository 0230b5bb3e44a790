"""Every uncached token has its reason: one story per reason, told through the real routing core."""

from __future__ import annotations

from array import array

import pytest

from cache.block_hash import BlockHasher, hints
from cache.events import FORMAT_VERSION, EventBatch, digest_of
from cache.types import HashHint, ReplicaId, RequestId
from router.insight import accounting
from router.insight.accounting import Accounting, TokenAccount, UncachedReason, regions
from router.insight.content_sketch import ContentSketch
from router.insight.held_memory import HeldMemory
from router.placement.decision import RouteQuery, RouteReason
from router.placement.routing import Routing
from tests.fakes.router import FINGERPRINT, FakeClock, config, decisions_of, info, load, replica_id

A, B = replica_id(0), replica_id(1)
SIZE = 16


class Story:
    """Two replicas, requests one after the other, and what is accounted."""

    def __init__(self, *, predicted_ttl_s: float = 0.0) -> None:
        self.clock = FakeClock()
        self.routing = Routing(config(predicted_ttl_s=predicted_ttl_s), clock=self.clock)
        self.accounting = Accounting(
            SIZE,
            held=HeldMemory(1 << 12),
            sketch=ContentSketch(SIZE, num_slots=1 << 12, secret=b"sixteen bytes of a test"),
        )
        self.routing.watch(self.accounting)
        self.accounts: list[TokenAccount] = []
        self.accounting.listen(lambda account, _: self.accounts.append(account))
        self.records = decisions_of(self.routing)
        self.hasher = BlockHasher(FINGERPRINT)
        self.held: dict[ReplicaId, dict[HashHint, None]] = {A: {}, B: {}}
        self.seq = {A: 0, B: 0}
        self.number = 0
        self.routing.update_replicas({A: info(), B: info()})
        for each in (A, B):
            self.routing.on_load(each, load())

    def hints(self, tokens: list[int], salt: str = "") -> list[HashHint]:
        return hints(self.hasher.chain(self.hasher.root(salt=salt), array("i", tokens)))

    def says(self, replica: ReplicaId, stored: list[HashHint], removed: list[HashHint] | None = None) -> None:
        """An event batch of the replica."""
        for each in removed or []:
            del self.held[replica][each]
        self.held[replica].update(dict.fromkeys(stored))
        self.seq[replica] += 1
        digest = digest_of(list(self.held[replica]))
        batch = EventBatch(
            FORMAT_VERSION, 1, self.seq[replica], tuple(stored), tuple(removed or []), digest, load()
        )
        self.routing.on_events(replica, batch)

    def asks(
        self, tokens: list[int], delivered: int, *, salt: str = "", at: ReplicaId | None = None
    ) -> TokenAccount:
        """A request whose engine finds `delivered` tokens; `at`: on that replica, whatever is best."""
        self.clock.advance(1.0)  # predictions are over
        for each in (A, B):
            self.routing.on_load(each, load())
        self.number += 1
        name = RequestId(f"q{self.number}")
        packed = array("i", tokens)
        hashes = self.hasher.chain(self.hasher.root(salt=salt), packed)
        excluded = frozenset({A, B} - {at}) if at is not None else frozenset[ReplicaId]()
        query = RouteQuery(name, hashes, len(tokens), excluded=excluded, token_ids=packed, cache_salt=salt)
        where = self.routing.choose(query).replica_id
        self.routing.first_token(name, where, delivered)
        self.routing.finish(name, block_hashes=hashes, answers=(1,))
        return self.accounts[-1]


def prompt(name: int, num_tokens: int) -> list[int]:
    return [1000 * name + index for index in range(num_tokens)]


def test_a_first_prompt_is_cold_up_to_its_partial_block() -> None:
    account = Story().asks(prompt(1, 70), delivered=0)
    assert account.uncached == {UncachedReason.COLD: 64, UncachedReason.PARTIAL: 6}


def test_the_last_block_of_a_prompt_that_ends_with_it_is_capped() -> None:
    story = Story()
    story.says(A, story.hints(prompt(1, 64)))
    account = story.asks(prompt(1, 64), delivered=48, at=A)
    assert account.uncached == {UncachedReason.CAPPED: 16}
    assert (account.available, account.captured, account.delivered) == (48, 48, 48)


def test_what_another_replica_holds_is_elsewhere() -> None:
    story = Story()
    story.says(A, story.hints(prompt(1, 64)))
    account = story.asks([*prompt(1, 96), 7], delivered=0, at=B)
    assert account.uncached == {
        UncachedReason.ELSEWHERE: 64,
        UncachedReason.COLD: 32,
        UncachedReason.PARTIAL: 1,
    }
    assert (account.available, account.captured) == (64, 0)
    assert sum(story.accounting.totals.elsewhere.values()) == 64


def test_what_was_announced_and_is_not_found_is_stale() -> None:
    story = Story()
    story.says(A, story.hints(prompt(1, 64)))
    account = story.asks(prompt(1, 65), delivered=16, at=A)
    assert account.uncached == {UncachedReason.STALE: 48, UncachedReason.PARTIAL: 1}
    assert story.records[-1].exact_tokens == 64


def test_what_was_removed_everywhere_is_evicted() -> None:
    story = Story()
    known = story.hints(prompt(1, 64))
    story.says(A, known)
    story.says(A, [], removed=known[:0:-1])  # all but the first block, children first
    account = story.asks([*prompt(1, 96), 7], delivered=16, at=A)
    assert account.uncached == {
        UncachedReason.EVICTED: 48,
        UncachedReason.COLD: 32,
        UncachedReason.PARTIAL: 1,
    }


def test_what_left_with_its_replica_is_evicted_too() -> None:
    """Nobody announces it: the router remembers that it was computed."""
    story = Story()
    story.asks(prompt(1, 65), delivered=0, at=A)
    story.routing.update_replicas({B: info()})
    account = story.asks(prompt(1, 65), delivered=0, at=B)
    assert account.uncached == {UncachedReason.EVICTED: 64, UncachedReason.PARTIAL: 1}


def test_a_timestamp_at_the_top_makes_the_rest_diverge() -> None:
    story = Story()
    body = prompt(9, 64)
    story.asks([1] * 16 + body + [7], delivered=0)
    account = story.asks([2] * 16 + body + [7], delivered=0)
    assert account.uncached == {
        UncachedReason.COLD: 16,
        UncachedReason.DIVERGED: 64,
        UncachedReason.PARTIAL: 1,
    }
    assert account.parts_at == 0
    assert story.accounting.totals.parting_tokens == {0: 64}


def test_a_difference_further_down_is_named_by_its_block() -> None:
    story = Story()
    head, tail = prompt(8, 48), prompt(9, 32)
    story.says(A, story.hints(head))
    story.asks([*head, *[1] * 16, *tail, 7], delivered=48, at=A)
    account = story.asks([*head, *[2] * 16, *tail, 7], delivered=48, at=A)
    assert account.uncached[UncachedReason.DIVERGED] == 32
    assert account.parts_at == 3
    assert story.accounting.totals.parting_requests == {2: 1}  # 2 and 3 are counted together


def test_the_same_tokens_under_another_salt_are_told_apart() -> None:
    story = Story()
    story.asks(prompt(1, 65), delivered=0, salt="one")
    account = story.asks(prompt(1, 65), delivered=0, salt="two")
    assert account.uncached == {UncachedReason.OTHER_SALT: 64, UncachedReason.PARTIAL: 1}
    again = story.asks(prompt(1, 65), delivered=0, salt="two")
    assert again.uncached == {UncachedReason.EVICTED: 64, UncachedReason.PARTIAL: 1}


def test_without_tokens_and_memory_the_unknown_is_cold() -> None:
    story = Story()
    query = RouteQuery(
        RequestId("ids only"), story.hasher.chain(story.hasher.root(), array("i", prompt(1, 64))), 65
    )
    where = story.routing.choose(query).replica_id
    story.routing.first_token(query.request_id, where, 0)
    assert story.accounts[-1].uncached == {UncachedReason.COLD: 64, UncachedReason.PARTIAL: 1}


def test_blocks_behind_the_limit_are_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of any length costs the same, and its sum still holds."""
    monkeypatch.setattr(accounting, "MAX_BLOCKS", 3)
    story = Story()
    story.asks([*[1] * 16, *prompt(9, 64), 7], delivered=0)
    account = story.asks([*[2] * 16, *prompt(9, 64), 7], delivered=0)
    assert account.uncached == {
        UncachedReason.COLD: 16 + 32,
        UncachedReason.DIVERGED: 32,
        UncachedReason.PARTIAL: 1,
    }


def test_a_prompt_without_a_block_is_counted() -> None:
    story = Story()
    account = story.asks([1, 2, 3], delivered=0)
    assert account.uncached == {UncachedReason.PARTIAL: 3}
    assert story.accounting.totals.blockless == 1


def test_a_request_without_a_token_is_not_accounted_for() -> None:
    story = Story()
    query = RouteQuery(RequestId("gone"), [], 5)
    story.routing.choose(query)
    assert story.accounting.num_open == 1
    story.routing.finish(RequestId("gone"))
    assert story.accounting.num_open == 0
    assert story.accounting.totals.requests == 0


def test_a_load_decision_is_what_elsewhere_is_charged_to() -> None:
    """The holder is so far behind that computing again is cheaper."""
    story = Story()
    story.says(A, story.hints(prompt(1, 64)))
    story.clock.advance(1.0)
    name, packed = RequestId("q"), array("i", prompt(1, 65))
    story.routing.on_load(A, load(queued_uncached_tokens=1_000_000, num_waiting=4))
    story.routing.on_load(B, load())
    hashes = story.hasher.chain(story.hasher.root(), packed)
    placement = story.routing.choose(RouteQuery(name, hashes, 65, token_ids=packed))
    assert placement.replica_id == B
    story.routing.first_token(name, B, 0)
    assert story.accounting.totals.elsewhere == {RouteReason.LOAD: 64}


@pytest.mark.parametrize("cached_tokens", [-5, 0, 65, 1000])
def test_an_engine_that_talks_nonsense_does_not_break_the_sum(cached_tokens: int) -> None:
    account = Story().asks(prompt(1, 65), delivered=cached_tokens)
    assert sum(account.uncached.values()) == 65 - account.delivered
    assert 0 <= account.delivered <= 65


def test_the_regions_of_a_worked_example() -> None:
    """100 tokens in blocks of 16: 96 full, 96 usable; 32 found, 48 expected, 64 somewhere."""
    cut = regions(100, 16, delivered=32, captured=48, available=64)
    assert cut == (16, 16, 64, 96, 0, 4)
