"""What a tenant can learn from the clock: whether another tenant has sent a prompt before.

A victim sends a prompt; an attacker with a key of its own sends it again, and beside it one that nobody has
sent, in random order, and looks at the times to the first token alone. The area under the ROC curve is how
often the right one of two looks faster: 0.5 is a coin, 1 is certainty. Where caches are shared the attack
must work, or the test would have no power to find a leak.
"""

from __future__ import annotations

import random
import string
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from router.tenants.settings import TenantSettings
from tests.fakes.keys import entry, key_file
from tests.http_server import MODEL, engine_server

WORDS = 20  # of a prompt: about 110 tokens, 6 full blocks
MANY_WORDS = 120  # so that computing them shows above the noise of a busy machine
WARM_UP = 5
PROBES = 400  # a side
FEW_PROBES = 50  # where the attack works: of an area near 1 these tell it from 0.9 as surely
NEAR = 0.02


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("scope", "num_words", "probes", "low", "high"),
    [("shared", MANY_WORDS, FEW_PROBES, 0.9, 1.0 + NEAR), ("tenant", WORDS, PROBES, 0.45, 0.55)],
)
def test_the_clock_tells_of_another_tenants_prompts_only_where_caches_are_shared(
    tmp_path: Path, scope: str, num_words: int, probes: int, low: float, high: float
) -> None:
    """Whoever comes near a bound is probed again: by chance alone the area of 800 probes a side lies beyond
    0.5 ± 0.05 once in 2,000 runs, that of 400 once in 70."""
    rng = random.Random(20260101)
    known_s: list[float] = []
    unknown_s: list[float] = []
    with attack(tmp_path, scope) as (victim, attacker):
        probe(victim, attacker, WARM_UP, num_words, rng)
        while len(known_s) < 2 * PROBES:
            known, unknown = probe(victim, attacker, probes, num_words, rng)
            known_s += known
            unknown_s += unknown
            area = area_under_roc(known_s, unknown_s)
            if low + NEAR <= area <= high - NEAR:
                break
    print(f"cache scope {scope}: area {area:.3f} over {len(known_s)} probes a side")
    assert low <= area <= high


@contextmanager
def attack(folder: Path, scope: str) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """A server with one real engine, and a client for each of two tenants."""
    (folder / "keys.yaml").write_text(key_file(entry("victim"), entry("attacker")))
    (folder / "secret").write_text("0123456789abcdef" * 2)
    settings = TenantSettings(
        keys_file=str(folder / "keys.yaml"), secret_file=str(folder / "secret"), cache_scope=scope
    )
    with engine_server(num_replicas=1, num_blocks=1024, tenants=settings) as server, ExitStack() as clients:
        yield tuple(  # type: ignore[misc]
            clients.enter_context(
                httpx.Client(
                    base_url=server.url, timeout=60, headers={"authorization": f"Bearer key of {name}"}
                )
            )
            for name in ("victim", "attacker")
        )


def probe(
    victim: httpx.Client, attacker: httpx.Client, count: int, num_words: int, rng: random.Random
) -> tuple[list[float], list[float]]:
    """Seconds to the first token of prompts that the victim has sent, and of others."""
    known_s: list[float] = []
    unknown_s: list[float] = []
    for _ in range(count):
        theirs, nobodys = a_prompt(rng, num_words), a_prompt(rng, num_words)
        ask(victim, theirs)
        both = [(theirs, known_s), (nobodys, unknown_s)]
        rng.shuffle(both)
        for prompt, times_s in both:
            times_s.append(ask(attacker, prompt))
    return known_s, unknown_s


def a_prompt(rng: random.Random, num_words: int = WORDS) -> str:
    """Words that occur in no other: a cache of words, too, would be a way to tell."""
    return " ".join("".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(num_words))


def ask(client: httpx.Client, prompt: str) -> float:
    """Seconds to the first token, as a client sees them."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 1,
        "stream": True,
    }
    started_at = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        chunks = answer.iter_raw()
        next(chunks)
        elapsed_s = time.perf_counter() - started_at
        for _ in chunks:
            pass
    return elapsed_s


def area_under_roc(faster: list[float], slower: list[float]) -> float:
    """How often one of `faster` is below one of `slower`; ties count half."""
    ranked = sorted(slower)
    below = sum(len(ranked) - bisect_right(ranked, each) for each in faster)
    ties = sum(bisect_right(ranked, each) - bisect_left(ranked, each) for each in faster)
    return (below + ties / 2) / (len(faster) * len(slower))


@pytest.mark.parametrize(
    ("scope", "finds"),  # again, another tenant, again with a salt, another tenant with that salt
    [
        ("shared", [True, True, True, True]),
        ("tenant", [True, False, True, False]),
        ("request", [False, False, True, False]),
    ],
)
def test_who_finds_what_a_tenant_has_sent(tmp_path: Path, scope: str, finds: list[bool]) -> None:
    """Not by the clock: by the engine's own count."""
    plain, salted = a_prompt(random.Random(1)), a_prompt(random.Random(2))
    with attack(tmp_path, scope) as (victim, attacker):
        assert cached_tokens(victim, plain) == cached_tokens(victim, salted, cache_salt="ours") == 0
        found = [
            cached_tokens(victim, plain),
            cached_tokens(attacker, plain),
            cached_tokens(victim, salted, cache_salt="ours"),
            cached_tokens(attacker, salted, cache_salt="ours"),
        ]
    assert [count > 0 for count in found] == finds


def cached_tokens(client: httpx.Client, prompt: str, **fields: str) -> int:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_the_area() -> None:
    assert area_under_roc([1, 2], [3, 4]) == 1.0
    assert area_under_roc([3, 4], [1, 2]) == 0.0
    assert area_under_roc([1, 2], [1, 2]) == 0.5
    assert area_under_roc([1, 4], [2, 3]) == 0.5
