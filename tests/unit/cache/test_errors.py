"""Every error of the tree crosses a process border with its facts."""

from __future__ import annotations

import pickle
from datetime import date

import pytest
import yaml

import cache.errors
from cache.errors import (
    AdmissionFailed,
    BlocksAwaited,
    BlocksInUse,
    ConfigError,
    DeadlineExceeded,
    ForwardFailed,
    HandedOver,
    LeftUnread,
    NoFreeBlocks,
    PiecesLost,
    PinsFull,
    PromptTooLong,
    QueueFull,
    RefusedEverywhere,
    RequestRefused,
    ServingError,
    StaleHit,
    StructureRefused,
    WireError,
)
from tests.error_trees import assert_complete, assert_survives_pickling

EXAMPLES = [
    ServingError("something"),
    ConfigError("num_blocks", 0, "at least 1"),
    NoFreeBlocks(needed=12, free=3),
    StaleHit(num_blocks=2),
    BlocksAwaited(),
    BlocksInUse(used=4),
    WireError("malformed event batch"),
    LeftUnread(unread_bytes=9, limit_bytes=8),
    RequestRefused("no"),
    QueueFull(waiting=8, limit=8),
    PromptTooLong(prompt_tokens=9, limit=8),
    DeadlineExceeded(deadline_s=1.0, waited_s=1.5),
    DeadlineExceeded(deadline_s=1.0, waited_s=0.5, prefill_s=0.7),
    ForwardFailed("CUDA error"),
    HandedOver(),
    PiecesLost(),
    PinsFull(needed=12, left=3),
    RefusedEverywhere("share: 0 is not above 0"),
    AdmissionFailed("AttributeError"),
    StructureRefused("its grammar is too complex"),
]


def test_every_error_has_an_example() -> None:
    assert_complete(EXAMPLES, cache.errors)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_error_survives_pickling(error: ServingError, protocol: int) -> None:
    assert_survives_pickling(error, protocol)


def test_an_error_names_the_situation() -> None:
    assert str(NoFreeBlocks(needed=12, free=3)) == "needed 12 free blocks, have 3"
    assert str(ConfigError("num_blocks", 0, "at least 1")) == "num_blocks = 0: at least 1"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (1, "1"),
        (float("inf"), ".inf"),
        (float("-inf"), "-.inf"),
        (float("nan"), ".nan"),
        (date(2026, 1, 1), "2026-01-01"),
        ("no", "'no'"),
    ],
)
def test_a_setting_is_spelled_as_in_its_file(value: object, text: str) -> None:
    assert str(ConfigError("field", value, "must be other")) == f"field = {text}: must be other"
    assert isinstance(value, float) or yaml.safe_load(text) == value
