"""The cost table worked out by hand: `routing_costs.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cache.events import StepTimeModel
from cache.types import ReplicaId
from router.policies import make_policy
from router.pricing.cost import Candidate, RequestShape, costs
from tests.fakes.router import context, request, view

CASES = json.loads(Path(__file__).with_name("routing_costs.json").read_text())["cases"]


def candidate(name: str, replica: dict[str, Any], per_attention_s: float) -> Candidate:
    known = {key: value for key, value in replica.items() if key not in ("cached", "cost", "measured")}
    step_time = StepTimeModel(0.01, 0.0001, per_attention_s, 0.0) if replica.get("measured", True) else None
    load = view(max_batched_tokens=500, step_time=step_time, **known)
    return Candidate(ReplicaId(name), load, replica.get("cached", 0), True)


@pytest.mark.parametrize("case", CASES, ids=[case["name"][:40] for case in CASES])
def test_costs_are_those_worked_out_by_hand(case: dict[str, Any]) -> None:
    replicas = case["replicas"]
    attention_s = case.get("per_attention_s", 0.0)
    candidates = [candidate(name, replica, attention_s) for name, replica in replicas.items()]
    shape = RequestShape(case["prompt"], case.get("hot", 0), case["w"], case.get("share", 1.0))
    assert costs(candidates, shape) == pytest.approx([replica["cost"] for replica in replicas.values()])
    policy = make_policy("expected_time", context=context())
    assert policy.rank(candidates, request(shape))[0].replica_id == case["best"]
