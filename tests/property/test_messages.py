"""Whatever another version does not send of a message has its default, and the rest is as it was sent."""

from __future__ import annotations

import pickle
from dataclasses import MISSING, Field, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.messages import Delta, GenerateRequest, SamplingParams
from cache.pickled import missing_field
from cache.types import RequestId, pack_tokens
from tests.fakes.versions import as_sent_without

SAMPLING = SamplingParams(5, 1, 0.5, 0.5, 3, ("a",), (7,), True, 0.1, 0.2, 0.3, 1.5, ((1, 2.0),), 2, 3, False)
REQUEST = replace(
    GenerateRequest(
        RequestId("r"), pack_tokens([1, 2, 3]), 2, SAMPLING, 11, 4, "s", "a", "t", 2.0, 3, 1.5, 1
    ),
    block_hashes=(b"x" * 16,),
    deadline_s=3.5,
    traceparent="00",
    n=2,
    held_s=1.5,
    refused_ratio=0.5,
    for_cache=True,
)
DELTA = Delta("héllo", (1, 2), 16, choice=2)

FIELDS: dict[str, Field[Any]] = {
    field.name: field for kind in (REQUEST, SAMPLING, DELTA) for field in fields(kind)
}
defaulted = st.sets(st.sampled_from([name for name, field in FIELDS.items() if field.default is not MISSING]))
mandatory = st.sets(st.sampled_from([name for name, field in FIELDS.items() if field.default is MISSING]))


def without(message: Any, names: set[str]) -> Any:
    """As it should arrive: the defaults in the place of these."""
    return replace(message, **{field.name: field.default for field in fields(message) if field.name in names})


@pytest.mark.parametrize("message", [REQUEST, SAMPLING, DELTA])
@given(names=defaulted, unknown=st.sampled_from([{}, {"surprise": 1}]))
def test_what_is_not_sent_has_its_default(message: Any, names: set[str], unknown: dict[str, object]) -> None:
    arrived = as_sent_without(message, names, **unknown)
    assert arrived == without(message, names)
    assert missing_field(arrived) is None
    assert pickle.loads(pickle.dumps(arrived)) == arrived


@given(names=mandatory)
def test_what_has_none_is_missed_by_name(names: set[str]) -> None:
    own = [field.name for field in fields(REQUEST) if field.name in names]
    inner = [field.name for field in fields(SAMPLING) if field.name in names]
    arrived = as_sent_without(REQUEST, names)
    if "sampling" not in names:
        object.__setattr__(arrived, "sampling", as_sent_without(SAMPLING, names))
    else:
        inner = []
    missed = {*own, *(f"sampling.{name}" for name in inner)}
    found = missing_field(arrived)
    assert (found is None) is not bool(missed)
    assert found is None or found in missed
