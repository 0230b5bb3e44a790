"""The laws of pins over random workloads: whatever is held, everybody is served, and all of it comes back."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import PinsFull
from cache.messages import GenerateRequest
from cache.types import PinId, RequestId
from replica.config import SimConfig
from replica.engine.engine_core import EngineCore
from replica.engine.pins import pin_limit
from tests.fakes.engine import BLOCK_SIZE, VirtualClock, make_pin, make_request, sim_core

NUM_BLOCKS = 14
MAX_MODEL_LEN = 28  # seven blocks: so seven may be pinned
SIM = SimConfig(vocab_size=4)


@dataclass
class Workload:
    requests: dict[int, list[GenerateRequest]]  # by the step before which they come; some are pins
    unpins: dict[int, PinId]
    raise_every_steps: int | None
    max_batched_tokens: int


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    tokens, steps = st.integers(0, 1), st.integers(0, 30)
    shared = draw(st.lists(tokens, min_size=24, max_size=24))
    requests: dict[int, list[GenerateRequest]] = {}
    pins = []
    for index in range(draw(st.integers(1, 10))):
        prompt = shared[: draw(st.integers(0, 24))] + draw(st.lists(tokens, min_size=1, max_size=3))
        salt = draw(st.sampled_from(["", "", "other"]))
        if len(prompt) >= BLOCK_SIZE and draw(st.booleans()):
            whole = prompt[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE]
            request = make_pin(
                f"p{index}", whole, seconds=draw(st.sampled_from([0.01, 0.1, 60.0])), salt=salt
            )
            pins.append(PinId(f"p{index}"))
        else:
            most = MAX_MODEL_LEN - len(prompt)
            if most < 1:
                continue
            request = make_request(f"r{index}", prompt, max_tokens=draw(st.integers(1, most)), salt=salt)
        requests.setdefault(draw(steps), []).append(request)
    unpins = {draw(steps): pin for pin in pins if draw(st.booleans())}
    faults = draw(st.sampled_from([None, None, 3]))
    return Workload(requests, unpins, faults, draw(st.sampled_from([3, 16, 64])))


def drive(core: EngineCore, clock: VirtualClock, workload: Workload) -> dict[RequestId, object]:
    """Run to the end: output or error of each request that was taken in, None for one that was not."""
    ended: dict[RequestId, object] = {}
    step = 0
    while step <= 30 or core.has_work:
        for request in workload.requests.get(step, ()):
            try:
                core.submit(request)
            except PinsFull as error:
                check_refusal(error)
                ended[request.request_id] = None
        if step in workload.unpins:
            core.pins.release(workload.unpins[step])
        core.pins.expire()
        clock.sleep(0.001)
        for progress in core.step():
            if progress.is_last:
                done = progress.request
                ended[done.request_id] = progress.error or tuple(done.token_ids[done.num_prompt_tokens :])
                if done.lease is not None:
                    assert progress.token_id is None, "what nobody asked for was told"
        check_laws(core)
        step += 1
        assert step < 2000, "no progress"
    return ended


def check_refusal(error: PinsFull) -> None:
    assert error.needed > error.left >= 0


def check_laws(core: EngineCore) -> None:
    cache, load = core.stats().cache, core.load()
    assert cache.free + cache.used == cache.total == NUM_BLOCKS
    assert cache.pinned <= min(cache.used, NUM_BLOCKS // 2)
    assert load.free_blocks == cache.free
    assert load.total_blocks == cache.total - cache.pinned
    if load.num_running == 0:
        assert cache.used == cache.pinned
    assert (cache.pinned > 0) == bool(core.pins.held())


def check_held(core: EngineCore, workload: Workload) -> None:
    """Whatever is held now is found by who asks for more than it."""
    held = {pin.pin_id for pin in core.pins.held()}
    pins = [each for step in workload.requests.values() for each in step if each.pin is not None]
    for request in pins:
        assert request.pin is not None
        if request.pin.pin_id in held:
            more = make_request("probe", [*request.token_ids, 3], max_tokens=1, salt=request.cache_salt)
            assert core.complete([more])[0].cached_tokens >= len(request.token_ids)


@given(workloads())
@settings(max_examples=100)
def test_everybody_is_served_beside_what_is_held(workload: Workload) -> None:
    """And as if alone; nothing held is evicted; in the end every block is free again."""
    clock = VirtualClock()
    sim = SimConfig(vocab_size=4, raise_every_steps=workload.raise_every_steps)
    core = sim_core(
        NUM_BLOCKS,
        clock=clock,
        sim=sim,
        max_model_len=MAX_MODEL_LEN,
        max_batched_tokens=workload.max_batched_tokens,
    )
    ended = drive(core, clock, workload)
    everybody = [request for step in workload.requests.values() for request in step]
    assert set(ended) == {request.request_id for request in everybody}
    if workload.raise_every_steps is None:
        for request in everybody:
            if request.pin is None:
                assert ended[request.request_id] == alone(request)
        check_held(core, workload)
    clock.sleep(100.0)
    core.pins.expire()
    assert core.stats().cache.free == NUM_BLOCKS
    assert core.pins.held() == ()
    core.submit(make_pin("last", [2] * 24))  # six of seven blocks: no promise was forgotten


def alone(request: GenerateRequest) -> tuple[int, ...]:
    core = sim_core(64, sim=SIM, prefix_caching=False)
    bare = make_request("alone", request.token_ids, max_tokens=request.sampling.max_tokens)
    return core.complete([bare])[0].token_ids


@given(st.integers(1, 500), st.integers(1, 64), st.floats(0.0, 0.95), st.integers(2, 5000))
def test_the_longest_request_fits_beside_the_most_that_may_be_pinned(
    num_blocks: int, block_size: int, max_fraction: float, max_model_len: int
) -> None:
    limit = pin_limit(num_blocks, block_size, max_fraction=max_fraction, max_model_len=max_model_len)
    assert 0 <= limit <= num_blocks * max_fraction
    longest = min(max_model_len, num_blocks * block_size)
    assert (num_blocks - limit) * block_size >= longest
