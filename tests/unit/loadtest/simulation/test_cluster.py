"""A whole cluster: delays, several routers, deaths, growth, and nothing left to chance."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest

from cache.errors import ConfigError
from loadtest.simulation.cell import CellResult, Failure, Scaling
from loadtest.simulation.run import simulate
from loadtest.workloads.request import Workload
from router.policies import NAMES
from tests.fakes.simulation import BLOCK_TOKENS, MACHINE, Blocks, request, spec, unrelated, workload

DIGEST_SCRIPT = """
import hashlib
from dataclasses import fields
from loadtest.simulation.run import simulate
from tests.fakes.simulation import spec
from tests.unit.loadtest.simulation.test_cluster import sessions
result = simulate(sessions(), spec(policy="expected_time", num_replicas=3, num_routers=2, event_delay_s=0.01))
parts = [repr(getattr(result, field.name)) for field in fields(result)]
print(hashlib.sha256("".join(parts).encode()).hexdigest())
"""


def sessions(count: int = 12, turns: int = 3) -> Workload:
    """Conversations over one system prompt, a new one every 0.3 s."""
    blocks = Blocks()
    head = blocks.extend((), 2 * BLOCK_TOKENS)
    requests = []
    for session in range(count):
        prompt, tokens = head, 2 * BLOCK_TOKENS
        for turn in range(turns):
            tokens += 40
            prompt = blocks.extend(prompt[: (tokens - 1) // BLOCK_TOKENS], tokens)
            requests.append(request(0.3 * session + 1.5 * turn, tokens, 20, prompt, session))
            prompt = prompt[: tokens // BLOCK_TOKENS]
            tokens += 20
    return workload(*requests)


def test_another_process_finds_the_same() -> None:
    """Python's hashes of strings differ between processes; no order here may depend on them."""
    digests = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", DIGEST_SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1


def test_another_seed_draws_otherwise() -> None:
    """The draw among routers, so that two of them see other requests."""
    results = [simulate(sessions(), spec(num_routers=2, seed=seed)) for seed in (0, 1)]
    assert results[0].replica.tolist() != results[1].replica.tolist()


def test_a_burst_on_a_hot_prefix_delays_nobody_else() -> None:
    """Sixty twins wait for the one replica that holds their prefix; three others are idle. Whoever came after
    them waited behind the first two dozen for 1.8 s in the mean, and has its first token after 0.07 s now."""
    head_tokens, own_tokens, other_tokens = 100 * BLOCK_TOKENS, 20, 60
    blocks = Blocks()
    head = blocks.extend((), head_tokens)
    twins = [(at_s, head_tokens + own_tokens) for at_s in (0.0, 4.0, *[10.0] * 60)]
    requests = [
        request(at_s, tokens, 8, blocks.extend(head, tokens), session)
        for session, (at_s, tokens) in enumerate(twins)
    ]
    requests += [
        request(10.05 + 0.1 * i, other_tokens, 8, blocks.extend((), other_tokens), 100 + i) for i in range(10)
    ]
    result = simulate(
        workload(*requests),
        spec(
            policy="expected_time",
            num_replicas=4,
            router_options=(("binding", "late"),),
            cache_tokens=512 * BLOCK_TOKENS,
            machine=replace(MACHINE, max_running=64),
        ),
    )
    assert result.ttft_s[result.input_tokens == other_tokens].max() < 0.1
    assert result.ttft_s[result.input_tokens != other_tokens].max() > 3.0, "the twins do wait"


@pytest.mark.parametrize("policy", NAMES)
def test_every_policy_serves_every_request(policy: str) -> None:
    result = simulate(sessions(), spec(policy=policy, num_replicas=3))
    assert (result.ttft_s > 0).all()
    assert (result.e2e_s >= result.ttft_s).all()
    assert set(result.replica.tolist()) <= {0, 1, 2}


def test_placement_by_prefix_finds_what_turns_share() -> None:
    """Twelve conversations stay where they are; round robin sends half of the turns astray."""
    aware = simulate(sessions(), spec(policy="expected_time"))
    blind = simulate(sessions(), spec(policy="round_robin"))
    assert aware.hit_ratio > 1.2 * blind.hit_ratio


def test_round_robin_takes_turns() -> None:
    work = unrelated(*((float(i), 20, 2) for i in range(6)))
    assert simulate(work, spec(num_replicas=3)).replica.tolist() == [0, 1, 2, 0, 1, 2]


def test_the_way_to_a_replica_takes_its_time() -> None:
    work = unrelated((0.0, 20, 2))
    near, far = (simulate(work, spec(dispatch_delay_s=delay)) for delay in (0.0, 0.25))
    assert far.ttft_s[0] == pytest.approx(near.ttft_s[0] + 0.25)


def test_a_day_without_requests_takes_no_longer_than_an_hour() -> None:
    """Idle replicas say that they are there twice a second, and nobody looks."""
    hour, day = (
        simulate(unrelated((0.0, 200, 10), (gap_s, 200, 10)), spec(num_replicas=4))
        for gap_s in (3_600.0, 86_400.0)
    )
    assert day.num_events == hour.num_events < 1_000
    np.testing.assert_allclose(day.ttft_s, hour.ttft_s, rtol=1e-9)


def test_late_events_are_known_late() -> None:
    """The same prompt again, when the prediction has long ended: only events tell where it is cached."""
    blocks = Blocks().extend((), 64)
    work = workload(request(0.0, 64, 1, blocks), request(7.0, 64, 1, blocks))
    hits = [
        simulate(work, spec(policy="expected_time", event_delay_s=delay)).cached_tokens[1]
        for delay in (0.1, 8.0)
    ]
    assert hits == [48, 0]


def test_imitated_caches_find_what_turns_share() -> None:
    """Without block events each conversation is followed by what was sent and answered: as well, in caches
    that evict nothing."""
    told, imitated = (
        simulate(sessions(), spec(policy="expected_time", has_kv_events=told)) for told in (True, False)
    )
    assert imitated.hit_ratio == pytest.approx(told.hit_ratio, rel=0.02)


def test_a_slow_replica_gets_less() -> None:
    work = unrelated(*((0.1 * i, 64, 4) for i in range(60)))
    result = simulate(work, spec(policy="expected_time", slowdowns=(3.0,)))
    shares = np.bincount(result.replica, minlength=2)
    assert shares[0] < 0.6 * shares[1]


def test_requests_of_a_dead_replica_end_elsewhere() -> None:
    work = unrelated(*((0.02 * i, 40, 30) for i in range(20)))
    result = simulate(work, spec(failures=(Failure(0.3, 0),)))
    calm = simulate(work, spec())
    assert result.num_retries > 0
    assert (result.e2e_s > 0).all()
    assert result.mean_e2e_s > calm.mean_e2e_s
    late = result.arrival_s > 0.3
    assert set(result.replica[late].tolist()) == {1}


def test_a_replaced_replica_starts_empty_under_a_new_name() -> None:
    work = unrelated(*((0.1 * i, 40, 5) for i in range(40)))
    result = simulate(work, spec(failures=(Failure(0.5, 0, down_s=1.0),)))
    assert len(result.busy_s) == 3
    after = result.arrival_s >= 1.5
    assert set(result.replica[after].tolist()) == {1, 2}


def test_the_whole_fleet_may_be_down_for_a_while() -> None:
    work = unrelated((0.0, 40, 30), (1.0, 40, 5))
    result = simulate(work, spec(num_replicas=1, failures=(Failure(0.1, 0, down_s=3.0),)))
    assert result.ttft_s[1] > 2.1
    assert result.e2e_s[0] > 3.1


def test_the_fleet_grows_and_shrinks() -> None:
    work = unrelated(*((0.1 * i, 40, 5) for i in range(60)))
    result = simulate(work, spec(num_replicas=1, scalings=(Scaling(2.0, 3), Scaling(3.95, 1))))
    before, during, after = (
        set(result.replica[(result.arrival_s >= low) & (result.arrival_s < high)].tolist())
        for low, high in ((0.0, 2.0), (2.0, 4.0), (4.0, 9.0))
    )
    assert (before, during, after) == ({0}, {0, 1, 2}, {0})
    assert result.num_retries == 0  # who leaves finishes first


@pytest.mark.parametrize(
    ("failure", "scalings", "names"),
    [
        # Its seat has gone and come back meanwhile: whoever is there stays.
        (Failure(1.0, 3, down_s=5.0), (Scaling(2.0, 3), Scaling(3.0, 4)), {0, 1, 2, 4}),
        (Failure(1.0, 3, down_s=1.0), (Scaling(3.0, 3), Scaling(4.0, 4)), {0, 1, 2, 5}),
        # Dead for good is none of so many.
        (Failure(1.0, 0), (Scaling(2.0, 6),), {1, 2, 3, 4, 5, 6}),
        (Failure(1.0, 0), (Scaling(2.0, 3),), {1, 2, 3}),
        # Its successor counts from the start.
        (Failure(1.0, 0, down_s=3.0), (Scaling(2.0, 3),), {1, 2, 4}),
    ],
    ids=str,
)
def test_a_fleet_that_fails_and_scales_has_as_many_as_asked_for(
    failure: Failure, scalings: tuple[Scaling, ...], names: set[int]
) -> None:
    work = unrelated(*((0.1 * i, 40, 5) for i in range(120)))
    result = simulate(work, spec(num_replicas=4, failures=(failure,), scalings=scalings))
    assert set(result.replica[result.arrival_s > 8.0].tolist()) == names


def test_a_fleet_that_dies_for_good_ends_the_simulation() -> None:
    """Its requests would ask again for ever."""
    work = unrelated((0.0, 40, 30), (1.0, 40, 5))
    with pytest.raises(ConfigError, match="no replica is left, but 2 requests"):
        simulate(work, spec(num_replicas=1, failures=(Failure(0.1, 0),)))
    saved = simulate(work, spec(num_replicas=1, failures=(Failure(0.1, 0),), scalings=(Scaling(2.0, 1),)))
    assert saved.ttft_s[1] > 1.0


def test_a_name_that_is_no_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        simulate(sessions(), spec(policy="guessing"))


def test_a_cache_too_small_for_a_request_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="takes 700 tokens"):
        simulate(unrelated((0.0, 600, 100)), spec(cache_tokens=640))


def test_results_have_one_entry_per_request_in_order_of_arrival() -> None:
    work = sessions()
    result = simulate(work, spec())
    per_request = {
        "arrival_s",
        "ttft_s",
        "e2e_s",
        "input_tokens",
        "output_tokens",
        "cached_tokens",
        "replica",
    }
    assert per_request <= {field.name for field in fields(CellResult)}
    for name in per_request:
        assert getattr(result, name).shape == (len(work.requests),)
    assert result.arrival_s.tolist() == [one.arrival_s for one in work.requests]
