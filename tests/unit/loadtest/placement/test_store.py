"""A kept result is that of exactly this spec, this trace and this code."""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.placement import code_version as code_version_module
from loadtest.placement import store as store_module
from loadtest.placement.code_version import code_version
from loadtest.placement.errors import NotKept, UnreadableResult
from loadtest.placement.store import ResultStore
from loadtest.simulation.cell import CellResult
from loadtest.simulation.machine import H100_8B
from loadtest.workloads.reference import WorkloadRef
from router.policies import POLICIES
from tests.fakes.placement import fake_result, fake_spec


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    store, spec = ResultStore(tmp_path / "new" / "folder"), fake_spec()
    assert store.load(spec) is None
    store.save(spec, fake_result(spec))
    loaded = store.load(spec)
    assert loaded is not None
    for name in CellResult.__dataclass_fields__:
        ours, theirs = getattr(loaded, name), getattr(fake_result(spec), name)
        assert type(ours) is type(theirs)
        assert np.array_equal(ours, theirs), name
    assert [path.suffix for path in store.folder.iterdir()] == [".npz"]


def equal(one: CellResult, other: CellResult) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in CellResult.__dataclass_fields__
    )


@given(st.data())
def test_a_damaged_file_is_told_and_never_another_result(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """An empty one, as a full disk left, ended the next run in a traceback."""
    store, spec = ResultStore(tmp_path_factory.mktemp("cells")), fake_spec()
    store.save(spec, fake_result(spec))
    path = store.path(spec)
    content = bytearray(path.read_bytes())
    del content[data.draw(st.integers(0, len(content))) :]
    for place in data.draw(st.lists(st.integers(0, max(0, len(content) - 1)), max_size=3)):
        content[place : place + 1] = b"\xa5"
    path.write_bytes(content)
    with suppress(UnreadableResult):  # a byte may be what it was, or in no content
        loaded = store.load(spec)
        assert loaded is not None
        assert equal(loaded, fake_result(spec))
    store.save(spec, fake_result(spec))
    loaded = store.load(spec)
    assert loaded is not None
    assert equal(loaded, fake_result(spec))


def test_what_is_no_result_at_all_is_told(tmp_path: Path) -> None:
    store, spec = ResultStore(tmp_path), fake_spec()
    path = store.path(spec)
    for content in (b"", b"hello", b"\x93NUMPY\x01\x00"):
        path.write_bytes(content)
        with pytest.raises(UnreadableResult, match=path.name):
            store.load(spec)
    np.savez(path, ttft_s=np.zeros(3))
    with pytest.raises(UnreadableResult, match="numbers"):
        store.load(spec)


def test_a_full_disk_is_told_and_leaves_what_there_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, spec = ResultStore(tmp_path), fake_spec()
    store.save(spec, fake_result(spec))

    def write(file: BinaryIO, result: CellResult) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module, "_write", write)
    with pytest.raises(NotKept, match=r"No space left on device.*--results") as caught:
        store.save(spec, fake_result(spec))
    assert caught.value.path == store.path(spec)
    assert list(tmp_path.iterdir()) == [store.path(spec)]
    assert store.load(spec) is not None


def test_two_who_write_one_cell_at_a_time_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers that share a folder have the same process ids: one took the other's file away."""
    store, spec = ResultStore(tmp_path), fake_spec()
    write = store_module._write

    def write_after_another(file: BinaryIO, result: CellResult) -> None:
        monkeypatch.setattr(store_module, "_write", write)
        ResultStore(tmp_path).save(spec, result)
        write(file, result)

    monkeypatch.setattr(store_module, "_write", write_after_another)
    store.save(spec, fake_result(spec))
    assert list(tmp_path.iterdir()) == [store.path(spec)]
    assert store.load(spec) is not None


def test_ctrl_c_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(file: BinaryIO, result: CellResult) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module, "_write", write)
    with pytest.raises(KeyboardInterrupt):
        ResultStore(tmp_path).save(fake_spec(), fake_result(fake_spec()))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_has_become_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "cells").touch()
    with pytest.raises(NotKept, match="cells"):
        ResultStore(tmp_path / "cells").save(fake_spec(), fake_result(fake_spec()))


def test_any_change_of_the_spec_is_another_place(tmp_path: Path) -> None:
    spec = fake_spec()
    others = [
        replace(spec, seed=1),
        replace(spec, load=0.51),
        replace(spec, policy="round_robin"),
        replace(spec, policy_options=(("near_tie", 0.2),)),
        replace(spec, router_options=(("binding", "late"),)),
        replace(spec, cache_tokens=1),
        replace(spec, machine=replace(H100_8B, base_s=0.001)),
        replace(spec, workload=WorkloadRef("no_reuse", num_requests=17)),
        replace(spec, workload=WorkloadRef("no_reuse", (("prompt_tokens", 2.0),), 16)),
    ]
    store = ResultStore(tmp_path)
    assert len({store.path(one) for one in [spec, *others]}) == 1 + len(others)


def test_a_changed_trace_is_another_place(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    paths = set()
    for content in ("one", "two", "one"):
        trace.write_text(content)
        spec = replace(fake_spec(), workload=WorkloadRef(str(trace)).as_it_is())
        paths.add(ResultStore(tmp_path).path(spec))
    assert len(paths) == 2


def test_changed_code_is_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ResultStore(tmp_path).path(fake_spec())
    monkeypatch.setattr(store_module, "code_version", lambda policy: "changed")
    assert ResultStore(tmp_path).path(fake_spec()) != before


def test_code_that_counts() -> None:
    versions = {policy: code_version(policy) for policy in POLICIES}
    assert len(set(versions.values())) == len(versions)
    assert code_version("ideal") == code_version("ideal_shortest")
    assert code_version("ideal") != versions["round_robin"]
    reachable = code_version_module._reachable(
        {code_version_module.SIMULATION, POLICIES["expected_time"].policy_type.__module__}
    )
    assert {
        "loadtest.simulation.engine",
        "loadtest.workloads.trace_source",
        "replica.scheduling.scheduler",
        "cache.block_pool",
        "router.placement.routing",
        "router.pricing.cost",
        "router.policies.expected_time",
    } <= reachable
    assert not reachable & {"router.policies.round_robin", "router.ingress", "loadtest.placement.report"}
    assert {"cache.native", "router.native"} <= reachable
    # Compiled: another machine may do without.
    assert not reachable & {
        "cache.native.chains",
        "router.native.costs",
        "router.native.depths",
        "router.native.passing",
        "router.native.uses",
        "router.native.changes",
    }


def test_comments_and_docstrings_are_not_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(text: str) -> str:
        path = tmp_path / "module.py"
        path.write_text(text)
        monkeypatch.setattr(code_version_module, "_path", lambda module: path)
        code_version_module._code.cache_clear()
        try:
            return code_version_module._code("module")
        finally:
            code_version_module._code.cache_clear()

    plain = digest("def f(x):\n    return x\n")
    assert digest('"""Doc."""\n\n# why\ndef f(x):\n    """Doc."""\n    return x  # because\n') == plain
    assert digest("def f(x):\n    return -x\n") != plain
