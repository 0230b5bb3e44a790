"""Log lines as a constant message and fields, whatever handler they end in.

`logger.info("request ended", extra={"request_id": …})`: a handler that writes JSON writes the fields as keys;
one that writes text would drop them, so there they follow the message as key=value.
Knows log records; knows nothing of what is logged.
"""

from __future__ import annotations

import copy
import json
import logging
import traceback
from collections.abc import Mapping, Sequence

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class FieldsHandler(logging.Handler):
    """Hands records on to another handler, their fields included."""

    def __init__(self, target: logging.Handler) -> None:
        super().__init__()
        self.target = target
        self._is_json = _writes_json(target)

    def emit(self, record: logging.LogRecord) -> None:
        # A copy: the target's filters write into it, and other handlers see the same record.
        told = copy.copy(record)
        spell_traceback(told)
        fields = fields_of(record)
        if fields and not self._is_json:
            told.msg, told.args = f"{record.getMessage()} {as_text(fields)}", ()
        try:
            self.target.handle(told)
            # A buffer before a file (Serve's fast path has one of a thousand lines) would hold the few lines
            # of a quiet process back for hours, and those of its last minute for ever.
            self.target.flush()
        except Exception:  # on a full disk: a request or a thread must not end because of a line
            self.handleError(record)


def pass_on(package: str, targets: Sequence[logging.Handler]) -> None:
    """Let this package's loggers write through these handlers, and no further up. May be called twice."""
    logger = logging.getLogger(package)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    known = [handler.target for handler in logger.handlers if isinstance(handler, FieldsHandler)]
    for target in targets:
        if target not in known:
            logger.addHandler(FieldsHandler(target))


def spell_traceback(record: logging.LogRecord) -> bool:
    """A filter that takes every record, and gives it the traceback's text before a formatter does.

    logging's own formatter prints it, and Serve puts another function in `print`'s place in its replicas,
    which prints each line as a tuple (seen in Ray 2.60).
    """
    if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
        record.exc_text = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
    return True


def lose_unwritable_lines() -> None:
    """Say nothing of a line that cannot be written, in this process, whoever logs it. May be called twice.

    logging says so on standard error, which Serve turns into lines of the log that could not be written: on a
    full disk a process would do nothing else any more.
    """
    logging.raiseExceptions = False


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What the caller passed as `extra`. A leading `_` is somebody else's mark: Ray sets one."""
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD and not name.startswith("_")
    }


def as_text(fields: Mapping[str, object]) -> str:
    """key=value; what is not one plain word is a JSON string: still one line."""
    return " ".join([f"{name}={_shown(value)}" for name, value in fields.items()])


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    is_word = text.isprintable() and text and not any([char in ' "=\\' for char in text])
    return text if is_word or not isinstance(value, str) else json.dumps(text)


def _writes_json(handler: logging.Handler) -> bool:
    """Whether the fields come out anyway: by the formatter's name, since it is somebody else's."""
    formatter = getattr(
        handler, "target", handler
    ).formatter  # a buffer before a file has its formatter there
    return "json" in type(formatter).__name__.lower()
