"""Reading and parsing a request body: limits, strictness, and messages that quote nothing."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import BodyTooLarge, BodyTooSlow, MalformedJson
from router.openai_api import body
from router.openai_api.body import LEAST_BYTES_PER_S, due_at, read_limited

MAX_DEPTH = 64
PAUSE_S = 10.0


def parse_object(content: bytes, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    return body.parse_object(content, max_depth)


async def _chunks(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def test_a_body_at_the_limit_is_read() -> None:
    assert await read_limited(_chunks(b"ab", b"cd"), None, 4, PAUSE_S) == b"abcd"


async def test_a_declared_length_above_the_limit_is_refused_unread() -> None:
    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("read")
        yield b""

    with pytest.raises(BodyTooLarge) as caught:
        await read_limited(unread(), "5", 4, PAUSE_S)
    assert caught.value.size_bytes == 5


@pytest.mark.parametrize("declared", [None, "1", "x", "-1", "", "٣", "9" * 5000])
async def test_a_body_that_grows_beyond_the_limit_is_refused_whatever_it_declared(
    declared: str | None,
) -> None:
    with pytest.raises(BodyTooLarge):
        await read_limited(_chunks(b"abc", b"de"), declared, 4, PAUSE_S)


@pytest.mark.parametrize("before", [(), (b"ab",)])
async def test_a_body_that_stops_is_given_up(before: tuple[bytes, ...]) -> None:
    is_closed = False

    async def stops() -> AsyncIterator[bytes]:
        nonlocal is_closed
        try:
            for chunk in before:
                yield chunk
            await asyncio.Event().wait()
        finally:
            is_closed = True

    with pytest.raises(BodyTooSlow) as caught:
        await asyncio.wait_for(read_limited(stops(), None, 4, 0.01), 20)
    assert caught.value.num_bytes == len(b"".join(before))
    assert is_closed


async def test_every_part_gives_it_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third part comes when the first one's time is over."""
    loop, now = asyncio.get_running_loop(), 1000.0
    monkeypatch.setattr(loop, "time", lambda: now)

    async def slow() -> AsyncIterator[bytes]:
        nonlocal now
        for _ in range(3):
            yield b"x" * LEAST_BYTES_PER_S
            now += 0.8
            await asyncio.sleep(0)

    assert len(await read_limited(slow(), None, 1 << 20, 1.0)) == 3 * LEAST_BYTES_PER_S


async def test_an_error_of_who_sends_it_stays_one() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"a"
        raise TimeoutError("theirs")

    with pytest.raises(TimeoutError, match="theirs"):
        await read_limited(broken(), None, 4, PAUSE_S)


PAUSES = st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 1 << 20)), max_size=20)


@given(PAUSES, st.floats(0.1, 60.0))
def test_what_comes_at_the_least_rate_is_cut_for_a_pause_alone(
    parts: list[tuple[float, int]], max_pause_s: float
) -> None:
    """And whatever is not cut has come at that rate on average, but for one pause."""
    now, total = 1000.0, 0
    for pause_s, num_bytes in parts:
        due = due_at(1000.0, now, total, max_pause_s)
        assert due <= now + max_pause_s
        if now - 1000.0 <= total / LEAST_BYTES_PER_S:
            assert due == now + max_pause_s
        if now + pause_s > due:
            return
        now, total = now + pause_s, total + num_bytes
        assert now - 1000.0 <= max_pause_s + total / LEAST_BYTES_PER_S + 1e-9


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "empty"),
        (b"secret", "not JSON"),
        (b'{"secret": ', "too early"),
        (b'{"secret": 1} secret', "after the end"),
        (b'{"secret": 1,}', "trailing comma"),
        (b'{"secret": NaN}', "NaN"),
        (b'{"secret": Infinity}', "Infinity"),
        (b'{"secret": -Infinity}', "malformed"),
        (b"{secret: 1}", "key is not a string"),
        (b'{"secret" 1}', "colon"),
        (b'{"a": 1 "b": 2}', "comma"),
        (b"[1 2]", "comma"),
        (b'{"secret": "\xff"}', "UTF-8"),
        (b'{"secret": "\x01"}', "control character"),
        (b'{"secret": "\\q"}', "invalid escape"),
        (b'{"secret": "\\ud800"}', "surrogate"),
        (b'{"secret": "\\udc00"}', "surrogate"),
        (b'{"secret": 01}', "number"),
        (b'{"secret": ' + b"9" * 5000 + b"}", "out of range"),
        (b'{"secret": 1e400}', "out of range"),
        (b'{"secret": [{"a": -1e999}]}', "out of range"),
        (b'{"secret": 1.5E+400}', "out of range"),
        (b'{"secret": 1e0000000400}', "out of range"),
        (b'{"secret": ' + b"9" * 310 + b".0}", "out of range"),
        (b'{"secret": ' + b"9" * 250 + b"e60}", "out of range"),
        (b'{"secret": ' + b"[" * 100_000, "nested too deeply"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'["secret"]', "must be an object"),
        (b'"secret"', "must be an object"),
        (b"null", "must be an object"),
    ],
)
def test_what_is_not_a_json_object_is_refused_with_its_cause_and_not_its_content(
    content: bytes, cause: str
) -> None:
    with pytest.raises(MalformedJson) as caught:
        parse_object(content)
    assert cause in caught.value.message
    assert "secret" not in caught.value.message


def test_an_object_is_returned_as_it_is() -> None:
    assert parse_object('{"a": [1, 2.5, "ü", null, true]}'.encode()) == {"a": [1, 2.5, "ü", None, True]}


@pytest.mark.parametrize(
    "text", ["1e308", "-1.7976931348623157E+308", "0e999", "1e-400", "9" * 400, '"1e400"']
)
def test_numbers_within_range_stay_what_they_are(text: str) -> None:
    assert parse_object(f'{{"a": {text}}}'.encode()) == {"a": json.loads(text)}


@pytest.mark.parametrize(
    "text", ["room 101, 1e5 of 1.5e+10, 2e-400", "[12345, 67890]", "e100 The end", "9" * 199]
)
def test_only_where_a_number_may_be_out_of_range_is_it_looked_for(text: str) -> None:
    """Looking takes as long as writing the whole body."""
    assert not body._may_overflow(text.encode())


def test_a_byte_order_mark_is_no_part_of_it() -> None:
    assert parse_object(b'\xef\xbb\xbf{"a": 1}', 4) == {"a": 1}


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a": ', b"}")])
def test_a_body_may_be_nested_to_the_limit_and_no_deeper(opening: bytes, closing: bytes) -> None:
    """The body itself is the first level."""
    for levels, fits in ((3, True), (4, False)):
        content = b'{"a": ' + opening * levels + b"1" * (opening != b"[") + closing * levels + b"}"
        if fits:
            assert parse_object(content, 4)
        else:
            with pytest.raises(MalformedJson, match="deeper than 4 levels"):
                parse_object(content, 4)


def test_wide_is_not_deep() -> None:
    assert len(parse_object(b'{"a": [' + b"[[]]," * 1000 + b"[]]}", 4)["a"]) == 1001


@pytest.mark.parametrize("part", [b"[]", b"{}", b'{"a": []}', b'{"\\"[\\\\": "[{\\\\\\""}'])
def test_a_body_of_very_many_parts_is_neither_walked_nor_searched_for_garbage(
    part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop stood still for 0.8 s for one of four megabytes."""
    num_parts, walked, collections = 100_000, 0, 0
    look_into = body._containers_in

    def count(container: Any) -> object:
        nonlocal walked
        walked += len(container)
        return look_into(container)

    def collected(_phase: str, _info: dict[str, int]) -> None:
        nonlocal collections
        collections += 1

    monkeypatch.setattr(body, "_containers_in", count)
    gc.callbacks.append(collected)
    try:
        parsed = parse_object(b'{"a": [' + (part + b",") * num_parts + part + b"]}", 4)
    finally:
        gc.callbacks.remove(collected)
    assert len(parsed["a"]) == num_parts + 1
    assert walked < num_parts / 5
    assert collections < 10
    assert gc.isenabled()


def test_the_ids_of_a_batch_of_prompts_are_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """More brackets than a body may be deep, and two million ids: the event loop stood still for 0.2 s."""
    looked_into: list[int] = []
    look_into = body._containers_in

    def count(container: Any) -> object:
        looked_into.append(len(container))
        return look_into(container)

    monkeypatch.setattr(body, "_containers_in", count)
    parsed = parse_object(
        b'{"a": [' + b"[1" + b",1" * 5000 + b"]" + b",[1]" * 65 + b"," + b"[1" + b",1" * 5000 + b"]]}"
    )
    assert len(parsed["a"]) == 67
    assert looked_into == [1, 67]


@pytest.mark.parametrize("deepest", [b"[[1]]", b'[{"]": "}"}]', b'[["\\\\"]]', b'{"a\\\\\\"": [1]}'])
def test_a_body_of_very_many_parts_may_not_be_deeper_either(deepest: bytes) -> None:
    """Whatever its strings hold."""
    content = b'{"a": [' + b'"]}",[],' * 20_000 + deepest + b"]}"
    assert parse_object(content, 4)
    with pytest.raises(MalformedJson, match="deeper than 3 levels"):
        parse_object(content, 3)


def test_the_garbage_collector_is_back_after_a_body_of_very_many_parts_that_is_none() -> None:
    with pytest.raises(MalformedJson):
        parse_object(b'{"a": [' + b"[]," * 20_000 + b"]}")
    assert gc.isenabled()


def test_brackets_are_those_that_open_and_no_other_byte() -> None:
    assert body._num_brackets(b"") == 0
    assert body._num_brackets(bytes(range(256)) * 3) == 6
