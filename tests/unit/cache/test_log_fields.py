"""Fields of a log line come out with every formatter, on one line, once."""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import logging
import logging.handlers
import sys
import traceback
from collections.abc import Iterator

import pytest

from cache.log_fields import (
    FieldsHandler,
    as_text,
    fields_of,
    lose_unwritable_lines,
    pass_on,
    spell_traceback,
)

PACKAGE = "warmpath_test_package"
FULL_DISK = "/dev/full"  # takes nothing, and says that no room is left


class SomeJsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"message": record.getMessage(), **fields_of(record)}, default=str)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger(PACKAGE)
    yield logger
    logger.handlers.clear()


def stream(formatter: logging.Formatter | None = None) -> tuple[io.StringIO, logging.Handler]:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(formatter or logging.Formatter("%(levelname)s %(message)s"))
    return written, handler


def test_text_has_the_fields_behind_the_message(logger: logging.Logger) -> None:
    written, handler = stream()
    pass_on(PACKAGE, [handler])
    logger.getChild("part").info("request %s", "ended", extra={"request_id": "r-1", "elapsed_s": 0.5})
    assert written.getvalue() == "INFO request ended request_id=r-1 elapsed_s=0.5\n"


def test_json_has_them_as_keys_and_nowhere_else(logger: logging.Logger) -> None:
    written, handler = stream(SomeJsonFormatter())
    buffer = logging.handlers.MemoryHandler(1, target=handler)  # as Serve has it before its files
    pass_on(PACKAGE, [buffer])
    logger.info("request ended", extra={"request_id": "r-1", "replicas": ["a", "b"]})
    assert json.loads(written.getvalue()) == {
        "message": "request ended",
        "request_id": "r-1",
        "replicas": ["a", "b"],
    }
    buffer.close()


def test_no_buffer_holds_a_line_back(logger: logging.Logger) -> None:
    written, handler = stream()
    buffer = logging.handlers.MemoryHandler(1000, target=handler)
    pass_on(PACKAGE, [buffer])
    logger.info("line")
    assert written.getvalue() == "INFO line\n"
    buffer.close()


def test_one_line_whatever_is_in_a_field() -> None:
    fields: dict[str, object] = {
        "a": "x y",
        "b": 'say "no"',
        "c": "",
        "d": "two\nlines",
        "e": None,
        "f": [1, "z"],
    }
    text = as_text(fields)
    assert text == r'a="x y" b="say \"no\"" c="" d="two\nlines" e=null f=[1, "z"]'


def test_a_line_is_written_once_however_often_it_is_set_up(logger: logging.Logger) -> None:
    written, handler = stream()
    for _ in range(3):
        pass_on(PACKAGE, [handler])
    logger.warning("once")
    assert written.getvalue() == "WARNING once\n"


def test_what_a_target_writes_into_a_record_nobody_else_sees(logger: logging.Logger) -> None:
    """Serve's filters put an id of their own there."""
    first_written, first = stream(SomeJsonFormatter())
    second_written, second = stream(SomeJsonFormatter())

    def spoil(record: logging.LogRecord) -> bool:
        record.request_id = "another"
        return True

    first.addFilter(spoil)
    pass_on(PACKAGE, [first, second])
    logger.info("line", extra={"request_id": "mine"})
    assert json.loads(first_written.getvalue())["request_id"] == "another"
    assert json.loads(second_written.getvalue())["request_id"] == "mine"


def test_a_traceback_is_still_there(logger: logging.Logger) -> None:
    written, handler = stream()
    logger.addHandler(FieldsHandler(handler))
    try:
        raise ValueError("cause")
    except ValueError:
        logger.exception("failed", extra={"request_id": "r-1"})
    assert "failed request_id=r-1\nTraceback" in written.getvalue()
    assert "ValueError: cause" in written.getvalue()


def test_a_traceback_is_text_whatever_print_is(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve's replicas have another `print`, which wrote `('Traceback (most recent call last):\\n',)`."""
    own = builtins.print

    def of_serve(*objects: object, sep: str = " ", end: str = "\n", file: io.StringIO | None = None) -> None:
        own(objects, sep=sep, end=end, file=file)

    passed, handler = stream()
    logger.addHandler(FieldsHandler(handler))
    serves, handler = stream()
    logger.addHandler(handler)
    logger.addFilter(spell_traceback)
    monkeypatch.setattr(builtins, "print", of_serve)
    try:
        raise ValueError("cause")
    except ValueError as error:
        logger.exception("failed")
        spelled = "".join(traceback.format_exception(error))
    assert passed.getvalue() == serves.getvalue() == f"ERROR failed\n{spelled}"
    logger.removeFilter(spell_traceback)


def test_marks_of_others_are_no_fields() -> None:
    """Ray's record factory marks whatever is logged in a process that has imported it."""
    record = logging.makeLogRecord({"request_id": "r-1", "_ray_timestamp_ns": 1})
    assert fields_of(record) == {"request_id": "r-1"}


def test_a_line_that_cannot_be_written_is_lost_and_nobody_fails(logger: logging.Logger) -> None:
    handler = logging.FileHandler(FULL_DISK)
    pass_on(PACKAGE, [handler])
    logger.warning("retrying elsewhere", extra={"request_id": "r-1"})
    discard(handler)


def test_it_is_not_told_to_the_log_that_could_not_take_it(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve's replicas log what comes to standard error, behind a buffer of a thousand lines."""
    told: list[str] = []

    class LoggedError(io.StringIO):
        def write(self, text: str) -> int:
            told.append(text)
            if len(told) < 10:  # without an end there, until it can recurse no deeper
                logger.info(text.rstrip())
            return len(text)

    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.setattr(sys, "stderr", LoggedError())
    file = logging.FileHandler(FULL_DISK)
    buffer = logging.handlers.MemoryHandler(1000, target=file, flushLevel=logging.ERROR)
    lose_unwritable_lines()
    pass_on(PACKAGE, [buffer])
    logger.warning("retrying elsewhere", extra={"request_id": "r-1"})
    assert not told
    assert not buffer.buffer
    buffer.close()
    discard(file)


def discard(handler: logging.FileHandler) -> None:
    """Close it; what it could not write it would try to write once more."""
    with contextlib.suppress(OSError):
        handler.close()
