"""What is left to compute, as the load tells it: prompts, their twins, answers that wait for a place."""

from __future__ import annotations

from dataclasses import replace

from cache.block_hash import BlockHasher
from cache.messages import GenerateRequest
from cache.types import RequestId
from tests.fakes.engine import expect_short_answers, fingerprint, make_request, run, sim_core


def test_load_counts_what_is_left_to_compute() -> None:
    core = sim_core(max_batched_tokens=16)
    core.complete([make_request("before", range(8), max_tokens=1)])
    core.submit(make_request("a", range(100, 130), max_tokens=5))
    core.submit(make_request("b", [*range(8), 50, 51], max_tokens=5))
    assert core.load().queued_uncached_tokens == 30 + 2
    core.step()
    load = core.load(admitted=(RequestId("a"),))
    assert (load.queued_uncached_tokens, load.num_running, load.num_waiting) == (14 + 2, 1, 1)
    assert (load.context_tokens, load.free_blocks, load.total_blocks) == (16, 60, 64)
    assert load.admitted == ("a",)
    core.step()
    assert core.load().queued_uncached_tokens == 0


def test_the_attention_left_is_that_of_the_steps_to_come() -> None:
    """Routers price a queue by it: the last chunk of a prompt attends to all before it."""
    core = sim_core(max_batched_tokens=10)
    core.submit(make_request("long", range(100, 140), max_tokens=1))
    core.submit(make_request("short", [1, 2, 3], max_tokens=1))
    told = [core.load().queued_attention]
    while core.has_work:
        core.step()
        told.append(core.load().queued_attention)
    # 40 tokens are 40 * 40 / 2 pairs, 3 are 4; ten at a time leave (40 * 40 - start * start) / 2 and those 4.
    assert told == [804, 754, 604, 354, 4, 0]


def with_hashes(request: GenerateRequest) -> GenerateRequest:
    """As a router sends it."""
    hasher = BlockHasher(fingerprint())
    return replace(request, block_hashes=tuple(hasher.chain(hasher.root(), request.token_ids)))


def test_a_crowd_of_twins_is_one_prompt_to_compute() -> None:
    """The second and later ones find the first one's blocks, whether it waits or is half computed."""
    core = sim_core(max_batched_tokens=8)
    prompt = range(100, 121)  # five full blocks and a token
    for name in ("first", "second"):
        core.submit(with_hashes(make_request(name, prompt, max_tokens=1)))
    assert core.load().queued_uncached_tokens == 21 + 1
    core.step()
    core.submit(with_hashes(make_request("third", prompt, max_tokens=1)))
    core.submit(with_hashes(make_request("longer", [*prompt, *range(9)], max_tokens=1)))
    assert core.load().queued_uncached_tokens == (21 - 8) + 1 + 1 + (30 - 20)
    completed = core.stats().computed_tokens
    run(core)
    assert core.stats().computed_tokens == completed + 13 + 1 + 1 + 10  # as was said
    assert len(core._scheduler._promises) == 0


def test_a_twin_of_whole_blocks_has_the_last_of_them_to_compute() -> None:
    """One token at least is computed of every prompt, and so the block that it is in."""
    core = sim_core()
    for name in ("first", "second"):
        core.submit(with_hashes(make_request(name, range(100, 120), max_tokens=1)))  # five blocks
    assert core.load().queued_uncached_tokens == 20 + 4
    run(core)
    assert core.stats().computed_tokens == 20 + 4  # as was said


def test_what_a_cancelled_request_had_promised_is_counted_with_the_next() -> None:
    core = sim_core(max_running=1)
    core.submit(make_request("running", [1], max_tokens=9))
    core.step()
    prompt = range(100, 121)
    core.submit(with_hashes(make_request("first", prompt, max_tokens=1)))
    core.cancel(RequestId("first"))
    core.submit(with_hashes(make_request("second", prompt, max_tokens=1)))
    assert core.load().queued_uncached_tokens == 21


def test_without_a_prefix_cache_twins_are_computed_and_counted_one_by_one() -> None:
    core = sim_core(prefix_caching=False)
    for name in ("first", "second"):
        core.submit(with_hashes(make_request(name, range(100, 121), max_tokens=1)))
    assert core.load().queued_uncached_tokens == 42


def test_answers_that_wait_for_a_place_are_counted_without_the_prompt_that_is_computed() -> None:
    """Two of five run; the others have the prompt's last token to compute, in blocks of four."""
    core = sim_core(max_running=2)
    core.take(replace(make_request("five", range(41), max_tokens=4), n=5))
    core.step()
    load = core.load()
    assert (load.num_running, load.num_waiting, load.queued_uncached_tokens) == (2, 3, 3)
    assert load.queued_attention == 3 * 40
    assert [of.tokens for of in load.queued] == [(1, 1, 1)]


def test_an_answer_that_is_put_back_is_counted_without_its_prompt() -> None:
    core = sim_core(10)
    expect_short_answers(core)
    _, other = core.take(replace(make_request("two", range(9), max_tokens=24, temperature=1.0), n=2))
    while core.has_work and not other.num_preemptions:
        core.step()
    assert core.load().queued_uncached_tokens == len(other.token_ids) - 8
