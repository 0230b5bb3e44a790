"""Advice follows the tokens: the dearest cause first, the trifling ones not at all."""

from __future__ import annotations

from typing import Any

import msgspec

from router.insight.advice import advise, hit_ratio
from router.insight.debug_view import LoopView, SummaryView, TotalsView

TOTALS = TotalsView(
    requests=1000,
    prompt=1_000_000,
    available=700_000,
    captured=620_000,
    delivered=600_000,
    uncached={},
    elsewhere_by_decision={},
    parting_tokens={},
    parting_requests={},
    blockless_requests=0,
)
SUMMARY = SummaryView(
    router="abcd",
    num_routers=1,
    uptime_s=60.0,
    model="tiny",
    policy="round_robin",
    block_size=16,
    num_replicas=4,
    cache_tokens=262_144,
    totals=TOTALS,
    loop=LoopView(1000, 990, 0.99, 0, 0, 0, 0),
    shadow=None,
    recording=None,
)


def summary(block_size: int = 16, **totals: Any) -> SummaryView:
    return msgspec.structs.replace(
        SUMMARY, block_size=block_size, totals=msgspec.structs.replace(TOTALS, **totals)
    )


def titles(view: SummaryView) -> list[str]:
    return [advice.title for advice in advise(view)]


def test_the_dearest_comes_first() -> None:
    found = advise(
        summary(
            uncached={"evicted": 90_000, "other_salt": 20_000, "cold": 200_000, "diverged": 150_000},
            parting_tokens={"0": 120_000, "4": 30_000},
            parting_requests={"0": 400, "4": 50},
        )
    )
    assert [advice.tokens for advice in found] == [120_000, 90_000, 30_000, 20_000]
    assert found[0].title == "Move what changes at the top of the prompt behind what stays"
    assert "400 of 1,000 requests (40%) part in block 0" in found[0].evidence
    assert found[1].title == "Give the replicas more cache"
    assert "262,144 tokens fit the cache of 4 replicas" in found[1].evidence
    assert found[2].title == "Move what changes at tokens 64 to 127 behind what stays"
    assert "cache_salt" in found[3].title


def test_new_content_is_nobodys_fault() -> None:
    assert not advise(summary(uncached={"cold": 400_000}))


def test_trifles_are_left_out() -> None:
    assert not advise(summary(uncached={"evicted": 4_999}))
    assert titles(summary(uncached={"evicted": 5_001})) == ["Give the replicas more cache"]


def test_elsewhere_is_three_different_troubles() -> None:
    found = advise(
        summary(
            uncached={"elsewhere": 100_000},
            elsewhere_by_decision={"turn": 60_000, "blind": 30_000, "load": 9_000, "prefix": 1_000},
        )
    )
    assert [advice.tokens for advice in found] == [60_000, 30_000, 10_000]
    assert "policy: expected_time" in found[0].change
    assert "(round_robin)" in found[0].evidence
    assert "replicas are not followed" in found[1].title
    assert "add replicas" in found[2].change


def test_blocks_are_made_smaller_only_while_that_pays() -> None:
    uncached = {"partial_block": 80_000, "capped_block": 20_000}
    [advice] = advise(summary(block_size=256, uncached=uncached, blockless_requests=300))
    assert advice.tokens == 50_000
    assert "block_size: 128" in advice.change
    assert "300 requests have no usable block" in advice.evidence
    assert not advise(summary(block_size=16, uncached=uncached))


def test_a_stale_index_shows_who_was_wrong() -> None:
    loop = LoopView(1000, 800, 0.8, 30_000, 5_000, 0, 2)
    view = msgspec.structs.replace(summary(uncached={"stale_index": 35_000}), loop=loop)
    [advice] = advise(view)
    assert "30,000 tokens that replicas had announced" in advice.evidence
    assert "5,000 that the router had guessed; 2 snapshots" in advice.evidence


def test_tenants_have_salts_that_nobody_sent() -> None:
    [advice] = advise(summary(uncached={"other_salt": 35_000}))
    assert "or for another tenant" in advice.evidence
    assert "name one `tenant`" in advice.change


def test_hit_ratio() -> None:
    assert hit_ratio(TOTALS) == 0.6
    assert hit_ratio(msgspec.structs.replace(TOTALS, prompt=0)) == 0.0
