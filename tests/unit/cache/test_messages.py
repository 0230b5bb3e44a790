"""What crosses the border between router and replica arrives as it was sent."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from cache.fingerprint import HashAlgorithm, SaltMode
from cache.messages import Delta, FinishReason, GenerateRequest, ReplicaInfo, SamplingParams
from cache.types import BlockHash, ReplicaId, RequestId, pack_tokens
from tests.fakes.cache import a_fingerprint

REQUEST = GenerateRequest(
    request_id=RequestId("r1"),
    token_ids=pack_tokens([1, 2, 3]),
    num_prompt_tokens=2,
    sampling=SamplingParams(max_tokens=5, stop=("\n",), stop_token_ids=(7,)),
    seed=11,
    sent_chars=4,
    cache_salt="s",
    excluded_replicas=frozenset({ReplicaId("a")}),
    ranks=(ReplicaId("b"),),
    block_hashes=(BlockHash(b"x" * 16),),
    deadline_s=3.5,
    held_s=1.5,
    refused_ratio=0.5,
)


def an_info(**changes: Any) -> ReplicaInfo:
    fields: dict[str, Any] = {
        "fingerprint": a_fingerprint(hash_algorithm=HashAlgorithm.XXH3_128, salt_mode=SaltMode.TENANT),
        "event_endpoint": "tcp://127.0.0.1:1",
        "snapshot_endpoint": "tcp://127.0.0.1:2",
        "num_blocks": 10,
        "max_model_len": 100,
        "max_batched_tokens": 64,
        "max_running": 4,
        "device": "cpu",
        "attention_backend": "gather_sdpa",
    }
    known = ReplicaInfo.__dataclass_fields__
    return ReplicaInfo(**{name: value for name, value in {**fields, **changes}.items() if name in known})


@pytest.mark.parametrize(
    "message",
    [REQUEST, Delta("héllo", (1, 2), 16), Delta("", (), 0, FinishReason.LENGTH), an_info()],
    ids=lambda message: type(message).__name__,
)
def test_message_survives_pickling(message: object) -> None:
    assert pickle.loads(pickle.dumps(message)) == message


def test_replica_info_survives_json() -> None:
    info = an_info(pid=42)
    again = ReplicaInfo.from_json(json.loads(json.dumps(info.to_json())))
    assert again == info
    assert type(again.fingerprint.hash_algorithm) is HashAlgorithm
    assert type(again.fingerprint.salt_mode) is SaltMode


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda value: value.pop("fingerprint"), KeyError),
        (lambda value: value.pop("num_blocks"), TypeError),
        (lambda value: value.update(surprise=1), TypeError),
        (lambda value: value["fingerprint"].update(hash_algorithm="md5"), ValueError),
        (lambda value: value["fingerprint"].pop("block_size"), TypeError),
    ],
)
def test_another_shape_is_refused(spoil: Any, error: type[Exception]) -> None:
    value = an_info().to_json()
    spoil(value)
    with pytest.raises(error):
        ReplicaInfo.from_json(value)
