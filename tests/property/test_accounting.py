"""The reasons of uncached tokens sum to the uncached tokens, whatever happens."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from cache.block_hash import BlockHasher, hints
from cache.events import FORMAT_VERSION, EventBatch, digest_of
from cache.types import HashHint, RequestId
from router.insight.accounting import Accounting, TokenAccount, regions
from router.insight.closed_loop import ClosedLoop
from router.insight.content_sketch import ContentSketch
from router.insight.held_memory import HeldMemory, as_words
from router.placement.decision import RouteQuery
from router.placement.routing import Routing
from tests.fakes.router import FINGERPRINT, FakeClock, config, info, load, replica_id

SIZE = FINGERPRINT.block_size
REPLICAS = [replica_id(index) for index in range(3)]
HASHER = BlockHasher(FINGERPRINT)

tokens_upto = st.integers(min_value=0, max_value=200)


@given(
    prompt=st.integers(1, 200),
    block_size=st.integers(1, 40),
    delivered=tokens_upto,
    captured=tokens_upto,
    available=tokens_upto,
)
def test_regions_cover_the_uncached_tokens_once(
    prompt: int, block_size: int, delivered: int, captured: int, available: int
) -> None:
    delivered = min(delivered, prompt)
    cut = regions(prompt, block_size, delivered, captured, available)
    nobody = cut.usable - cut.nobody_from
    assert min(cut.stale, cut.elsewhere, nobody, cut.capped, cut.partial) >= 0
    assert cut.stale + cut.elsewhere + nobody + cut.capped + cut.partial == prompt - delivered


# A prompt is a few blocks out of a few contents, so that prompts share heads, tails and salts; then a rest.
prompts = st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, SIZE), st.sampled_from(["", "x"]))
steps = st.lists(
    st.tuples(prompts, st.sampled_from(["ask", "store", "remove"]), st.integers(0, 2), st.integers(0, 120)),
    max_size=25,
)


@given(steps)
def test_sums_hold_over_any_history(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    clock = FakeClock()
    routing = Routing(config(predicted_ttl_s=0.5), clock=clock)
    accounting = Accounting(SIZE, held=HeldMemory(1 << 8), sketch=ContentSketch(SIZE, num_slots=1 << 8))
    loop = ClosedLoop(SIZE, clock=clock, doubt=lambda _replica: None)
    accounts: list[TokenAccount] = []
    accounting.listen(lambda account, _: accounts.append(account))
    accounting.listen(loop.heard)
    routing.watch(accounting)
    routing.update_replicas({each: info() for each in REPLICAS})
    held: dict[str, dict[HashHint, None]] = {each: {} for each in REPLICAS}
    uncached = 0
    for number, ((contents, rest, salt), verb, which, delivered) in enumerate(steps):
        clock.advance(0.2)
        tokens = array("i", [content for content in contents for _ in range(SIZE)] + [9] * rest)
        replica = REPLICAS[which]
        hashes = HASHER.chain(HASHER.root(salt=salt), tokens)
        if verb == "ask" and tokens:
            query = RouteQuery(RequestId(str(number)), hashes, len(tokens), token_ids=tokens, cache_salt=salt)
            routing.choose(query)
            routing.first_token(query.request_id, replica, delivered)
            routing.finish(query.request_id)
            uncached += len(tokens) - min(delivered, len(tokens))
        elif verb == "store":
            stored = [hint for hint in hints(hashes) if hint not in held[replica]]
            held[replica].update(dict.fromkeys(stored))
            _say(routing, which, number, held[replica], tuple(stored), ())
        elif verb == "remove":
            removed = tuple(held[replica])[: -1 - len(held[replica]) // 2 : -1]  # the latest, children first
            for hint in removed:
                del held[replica][hint]
            _say(routing, which, number, held[replica], (), removed)
    totals = accounting.totals
    assert sum(totals.uncached.values()) == uncached == totals.prompt - totals.delivered
    assert all(tokens > 0 for account in accounts for tokens in account.uncached.values())
    assert all(sum(each.uncached.values()) == each.prompt - each.delivered for each in accounts)
    assert totals.requests == len(accounts)
    assert accounting.num_open == 0
    assert sum(loop.totals.by_bound) == loop.totals.requests


def _say(
    routing: Routing,
    which: int,
    seq: int,
    held: dict[HashHint, None],
    stored: tuple[HashHint, ...],
    removed: tuple[HashHint, ...],
) -> None:
    digest = digest_of(list(held))
    batch = EventBatch(FORMAT_VERSION, 1, seq, stored, removed, digest, load())
    routing.on_events(REPLICAS[which], batch)


@given(st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=300), st.data())
def test_what_was_held_lately_is_never_forgotten(words: list[int], data: st.DataObject) -> None:
    """No false negatives among the last capacity / 2, however they came in."""
    memory = HeldMemory(capacity=64)
    given = [HashHint(word) for word in words]
    start = 0
    while start < len(given):
        size = data.draw(st.integers(1, 40))
        memory.record(as_words(given[start : start + size]))
        start += size
    latest = given[-32:]
    assert memory.knows(as_words(latest)).all()
