"""A kept result is that of exactly this spec, this trace and this code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadtest.placement import code_version as code_version_module
from loadtest.placement import store as store_module
from loadtest.placement.code_version import code_version
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
    spec = replace(fake_spec(), workload=WorkloadRef(str(trace)))
    paths = set()
    for content in ("one", "two", "one"):
        trace.write_text(content)
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
