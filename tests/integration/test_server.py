"""A whole replica without Serve: what Serve would call, on the simulated runner."""

from __future__ import annotations

import gc
import inspect
import json
import pickle
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private import replica as serve_replica
from zmq.constants import SUB, SUBSCRIBE
from zmq.sugar.context import Context

from cache.errors import ConfigError
from cache.event_wire import decode_batch
from cache.messages import FinishReason, ReplicaInfo
from replica.config import ReplicaConfig, SimConfig
from replica.errors import EngineStopped, InvalidRequest, RequestRefused
from replica.server import ReplicaServer, _given_by
from tests.fakes.engine import make_request
from tests.fakes.structures import tiny_tokenizer
from tests.fakes.versions import as_sent_without

CONFIG = ReplicaConfig(
    runner="simulated",
    model_name="sim",
    num_blocks=100,
    heartbeat_interval_s=0.05,
    sim=SimConfig(base_s=0.001),
)


@pytest.fixture(scope="module")
def tiny_model_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARMPATH_CACHE", str(tmp_path_factory.mktemp("models")))
        yield


@pytest.fixture
def server(tiny_model_cache: None) -> Any:
    replica = ReplicaServer(pickle.loads(pickle.dumps(CONFIG)))
    yield replica
    replica.shutdown()


async def test_streams_text_and_counts_cached_tokens(server: ReplicaServer) -> None:
    request = make_request("r", range(3, 60), max_tokens=10)
    for cached in (0, 48):
        deltas = [delta async for delta in server.generate(request)]
        assert {delta.cached_tokens for delta in deltas} == {cached}
        assert sum(len(delta.token_ids) for delta in deltas) == 10
        assert "".join(delta.text for delta in deltas)
        assert deltas[-1].finish_reason is FinishReason.LENGTH
    with pytest.raises(InvalidRequest):
        await anext(server.generate(make_request("bad", [10**6])))


def test_tells_what_it_is_in_json(server: ReplicaServer) -> None:
    metadata = json.loads(json.dumps(server.record_replica_metadata()))
    info = ReplicaInfo.from_json(metadata["warmpath"])
    assert (info.num_blocks, info.max_model_len, info.device) == (100, 1600, "simulated")
    assert (info.fingerprint.model_id, info.fingerprint.block_size) == ("tiny", 16)
    assert info.fingerprint.template_digest
    assert info.vocab_size == len(tiny_tokenizer())  # type: ignore[arg-type]  # as the simulated model has
    described = json.loads(json.dumps(server.describe()))
    assert described.items() >= metadata["warmpath"].items()
    assert (described["model_name"], described["runner"], described["replica_id"]) == (
        "sim",
        "simulated",
        None,
    )


async def test_tells_an_autoscaler_what_waits(server: ReplicaServer) -> None:
    idle = server.record_autoscaling_stats()
    assert idle.keys() == {"queued_s", "held_s", "busy", "refused"}
    assert (idle["queued_s"], idle["held_s"]) == (0.0, 0.0)
    request = replace(make_request("r", range(3, 60), max_tokens=10), held_s=60.0, refused_ratio=2.0)
    running = [delta async for delta in server.generate(request)]
    assert running
    busy = server.record_autoscaling_stats()
    assert 30.0 < busy["held_s"] <= 60.0  # seconds pass here as they do
    assert 0.0 < busy["busy"] <= 1.0
    assert 0.0 < busy["refused"] <= 2.0


async def test_serves_a_router_of_the_version_before(server: ReplicaServer) -> None:
    """Its requests come without what that version did not know."""
    known = make_request("r", range(3, 60), max_tokens=10)
    without = {"refused_ratio", "for_cache", "skip_special_tokens"}
    sampling = as_sent_without(known.sampling, without)
    request = as_sent_without(replace(known, sampling=sampling), without)
    assert request == known
    assert [delta async for delta in server.generate(request)]
    assert server.record_autoscaling_stats()["refused"] == 0.0


async def test_a_request_that_lacks_what_has_no_default_is_refused_alone(server: ReplicaServer) -> None:
    """By name. It ended the engine's thread, and every request with it."""
    known = make_request("r", range(3, 60), max_tokens=10)
    sampling = as_sent_without(known.sampling, {"max_tokens"})
    for request, name in (
        (as_sent_without(known, {"seed"}), "seed"),
        (replace(known, sampling=sampling), "sampling.max_tokens"),
    ):
        with pytest.raises(RequestRefused, match=rf"^{name}: was not sent"):
            await anext(server.generate(request))
    assert [delta async for delta in server.generate(known)]


def test_a_request_may_reach_the_length_it_was_told(server: ReplicaServer) -> None:
    """The router derives the default output length from `max_model_len`: it must fit the pool."""
    limit = ReplicaInfo.from_json(server.record_replica_metadata()["warmpath"]).max_model_len
    server._engine._core.submit(make_request("r", [5] * 10, max_tokens=limit - 10))


def test_publishes_where_it_says(server: ReplicaServer) -> None:
    context: Any = Context()
    sub = context.socket(SUB)
    sub.setsockopt(SUBSCRIBE, b"kv")
    sub.connect(server.describe()["event_endpoint"])
    assert sub.poll(5000)
    batch = decode_batch(sub.recv_multipart()[1])
    assert batch.load.total_blocks == 100
    context.destroy(linger=0)


def test_shutdown_is_final_and_may_be_called_twice(server: ReplicaServer) -> None:
    server.check_health()
    server.shutdown()
    server.shutdown()
    with pytest.raises(EngineStopped):
        server.check_health()


@pytest.mark.parametrize("replica_id", ["r1", None])
def test_under_serve_its_heap_is_settled(
    tiny_model_cache: None, monkeypatch: pytest.MonkeyPatch, replica_id: str | None
) -> None:
    """Elsewhere the process is not its own: what it holds besides is to be collected."""
    monkeypatch.setattr("replica.server._replica_id", lambda: replica_id)
    monkeypatch.setattr("replica.server._log_through_serve", lambda: None)  # loggers are the whole process's
    before = gc.get_freeze_count()
    server = ReplicaServer(CONFIG)
    try:
        assert (gc.get_freeze_count() > before) is (replica_id is not None)
    finally:
        gc.unfreeze()
        server.shutdown()


def test_a_failed_start_leaves_nothing_open(tiny_model_cache: None) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="does not exist"):
        ReplicaServer(ReplicaConfig(runner="simulated", model="/no/such/folder"))
    assert not set(threading.enumerate()) - before


def test_how_long_serve_gives_a_replica_is_asked_of_serve_itself() -> None:
    replica = SimpleNamespace(
        _shutting_down=False, _deployment_config=SimpleNamespace(graceful_shutdown_timeout_s=30)
    )
    given_s = _given_by(replica)
    assert given_s is not None
    assert given_s() is None
    replica._shutting_down = True
    assert given_s() == 30.0


def test_another_serve_that_does_not_say_is_served_under_all_the_same() -> None:
    assert _given_by(SimpleNamespace()) is None
    assert _given_by(None) is None


def test_what_is_asked_of_serve_is_there_in_this_version() -> None:
    """Private names: an upgrade that renames one shows here, not in replicas that leave unannounced."""
    source = inspect.getsource(serve_replica)
    for name in ("self._shutting_down = True", "self._deployment_config", "self._replica_impl"):
        assert name in source
