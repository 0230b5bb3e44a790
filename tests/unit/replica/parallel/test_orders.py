"""A step arrives at followers as it was planned, and a frame that was cut off is the end of the stream."""

from __future__ import annotations

import io
from array import array

from hypothesis import given
from hypothesis import strategies as st

from cache.messages import SamplingParams
from cache.types import RequestId
from replica.output.logprob_log import LogprobLog
from replica.parallel import orders
from replica.parallel.orders import AllocatePages, Close
from replica.runners.prompt_scoring import wanted
from replica.scheduling.runner import ScheduledSequence

BLOCK_SIZE = 4


@st.composite
def sequences(draw: st.DrawFn) -> ScheduledSequence:
    tokens = array("i", draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)))
    start = draw(st.integers(0, len(tokens) - 1))
    num_new = draw(st.integers(1, len(tokens) - start))
    num_blocks = -(-(start + num_new) // BLOCK_SIZE) + draw(st.integers(0, 3))
    num_top = draw(st.none() | st.integers(0, 5))
    return ScheduledSequence(
        RequestId(draw(st.text(max_size=8))),
        tokens,
        draw(st.lists(st.integers(0, 2**31 - 1), min_size=num_blocks, max_size=num_blocks)),
        start,
        num_new,
        draw(st.integers(1, len(tokens))),
        SamplingParams(max_tokens=3, temperature=0.7, prompt_logprobs=num_top),
        seed=draw(st.integers(0, 2**63 - 1)),
        copy_source=draw(st.none() | st.integers(0, 100)),
        logprobs=LogprobLog(draw(st.integers(0, 2))) if num_top is not None else None,
    )


@given(st.lists(sequences(), max_size=5))
def test_a_follower_computes_what_was_planned(step: list[ScheduledSequence]) -> None:
    stream = io.BytesIO(orders.framed(orders.planned(step, BLOCK_SIZE)) + orders.framed(Close()))
    order = orders.read(stream, orders.orders)
    assert isinstance(order, orders.Step)
    followed = orders.scheduled(order)
    for told, meant in zip(followed, step, strict=True):
        stop = meant.start + meant.num_new_tokens
        assert (told.request_id, told.start, told.num_new_tokens) == (
            meant.request_id,
            meant.start,
            meant.num_new_tokens,
        )
        assert told.token_ids[meant.start : stop] == meant.token_ids[meant.start : stop]
        assert told.block_table == meant.block_table[: -(-stop // BLOCK_SIZE)]
        assert (told.copy_source, told.samples) == (meant.copy_source, meant.samples)
    rows = range(len(step))
    assert [(c.sequence, c.first_row, len(c.token_ids), c.num_top) for c in wanted(followed, rows)] == [
        (c.sequence, c.first_row, len(c.token_ids), c.num_top) for c in wanted(step, rows)
    ]
    assert orders.read(stream, orders.orders) == Close()
    assert orders.read(stream, orders.orders) is None


@given(st.integers(0, 2**31))
def test_a_frame_cut_off_is_the_end(num_blocks: int) -> None:
    frame = orders.framed(AllocatePages(num_blocks))
    for cut in range(len(frame)):
        assert orders.read(io.BytesIO(frame[:cut]), orders.orders) is None
