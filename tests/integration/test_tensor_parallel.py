"""A model in two processes over gloo: one process's tokens, nobody left behind, nobody goes on alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cache.errors import ConfigError
from cache.messages import SamplingParams
from replica.config import ReplicaConfig
from replica.errors import RankLost, RankSilent
from replica.models.model_source import ModelRefused, resolve
from replica.parallel.orders import Load
from replica.parallel.rank_group import RankGroup
from replica.runners import followers as followers_module
from replica.runners.followers import Followers
from replica.runners.model_runner import ModelRunner
from replica.runners.parallel_runner import ParallelRunner
from replica.scheduling.runner import LaunchingRunner
from tests.family_engines import GREEDY, Setting, answer_all, engine_over
from tests.model_families import FAMILIES, MAX_NEW_TOKENS, prompts, save

SAMPLED = SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=0.8, top_p=0.9, ignore_eos=True)
SCORED = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
CHUNKED = Setting("chunked", block_size=4, max_batched_tokens=23)  # with prefix hits and mixed steps
FAMILY_BY_NAME = {family.name: family for family in FAMILIES}


def config_of(folder: Path) -> ReplicaConfig:
    return ReplicaConfig(
        model=str(folder), device="cpu", dtype="float32", block_size=4, num_blocks=1024, torch_threads=1
    )


def in_parts(folder: Path, lost: threading.Event, *, limit_s: float = 600.0) -> ParallelRunner:
    config = replace(config_of(folder), tensor_parallel=2, warm_up_time_limit_s=limit_s)
    return ParallelRunner.load(config, resolve(str(folder)), on_lost=lost.set)


def is_gone(pid: int) -> bool:
    """Whether the process has ended, collected or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def soon_gone(pid: int) -> bool:
    deadline_s = time.monotonic() + 20
    while not is_gone(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return is_gone(pid)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(FAMILY_BY_NAME["llama"], tmp_path_factory.mktemp("parts") / "llama")


@pytest.fixture(scope="module")
def whole(llama: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(config_of(llama), resolve(str(llama)))
    yield runner
    runner.close()


def test_two_processes_say_what_one_says_until_one_is_killed(
    llama: Path, whole: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One start serves all of it: a follower takes seconds to import torch."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lost = threading.Event()
    runner = in_parts(llama, lost)
    try:
        for sampling in (GREEDY, SAMPLED, SCORED):
            expected = answer_all(engine_over(whole, CHUNKED), prompts(), sampling=sampling, at_once=3)
            answered = answer_all(engine_over(runner, CHUNKED), prompts(), sampling=sampling, at_once=3)
            assert answered == expected
            assert sampling is SCORED or any(answer.cached_tokens for answer in answered)
        assert runner.info.kv_bytes_per_block == whole.info.kv_bytes_per_block // 2, "its own heads alone"
        assert (runner.info.num_ranks, whole.info.num_ranks) == (2, 1)
        assert not isinstance(runner, LaunchingRunner), "followers cannot know tokens yet to be drawn"

        (pid,) = runner.follower_pids
        assert not list(tmp_path.iterdir()), "where all ranks are killed nobody removes it"
        os.kill(pid, signal.SIGKILL)
        assert lost.wait(20), "nobody was told"
        with pytest.raises(RankLost, match=r"rank 1 .*exit code -9"):
            answer_all(engine_over(runner, CHUNKED), prompts()[:1])
    finally:
        runner.close()
    assert not dist.is_initialized()
    runner.close()  # may be called twice


def test_rank_0_leaves_when_the_others_have_been_told(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL lets no rank leave before the others: one that was not told to would be waited for."""
    own_close, have_gone = RankGroup.close, []

    def close(group: RankGroup) -> None:
        have_gone.append(all([soon_gone(pid) for pid in runner.follower_pids]))
        own_close(group)

    runner = in_parts(llama, threading.Event())
    monkeypatch.setattr(RankGroup, "close", close)
    runner.close()
    assert have_gone == [True]


def test_memory_that_runs_out_on_rank_0_is_a_refusal_which_says_so(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """While the other one waits for it in a collective, whose own error nobody is shown."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelRunner, "_forward", full)
    with pytest.raises(ModelRefused, match=r"needs more memory than cpu has .*CUDA out of memory"):
        in_parts(llama, threading.Event())
    assert not dist.is_initialized()
    assert "Traceback" not in capfd.readouterr().err


FAILING = """
import itertools, torch
from replica.runners import follower, rank_model
from replica.runners.model_runner import ModelRunner
def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")
"""
FULL_FROM_THE_START = FAILING + "rank_model.cut = full; follower.main()"
FULL_IN_THE_WARM_UP = (
    FAILING
    + """
own, steps = ModelRunner.follow, itertools.count(1)
ModelRunner.follow = lambda *given: full() if next(steps) > 3 else own(*given)  # of the self-check
follower.main()
"""
)


def test_a_follower_that_refuses_is_told_of_while_rank_0_waits_in_a_collective(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reason was lost: rank 0 told of a closed connection."""
    monkeypatch.setattr(followers_module, "FOLLOWER", ("-c", FULL_FROM_THE_START))
    lost = threading.Event()
    with pytest.raises(ModelRefused, match=r"rank 1 cannot serve its part: .* cpu has .*CUDA out of memory"):
        in_parts(llama, lost)
    assert not lost.is_set(), "the process would have ended, and the error with it"
    assert not dist.is_initialized()


@pytest.mark.long
def test_a_follower_that_fails_in_the_warm_up_is_told_of_by_that(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers_module, "FOLLOWER", ("-c", FULL_IN_THE_WARM_UP))
    lost = threading.Event()
    runner = in_parts(llama, lost)
    try:
        with pytest.raises(RankLost, match=r"rank 1 cannot serve its part: .*CUDA out of memory"):
            runner.warm_up()
        assert not lost.is_set()
    finally:
        runner.close()


def test_a_follower_that_stands_still_is_not_waited_for_for_ever(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers_module, "FOLLOWER", ("-S", "-c", "import sys; sys.stdin.buffer.read()"))
    with pytest.raises(RankSilent, match=r"rank 1 .* has not answered for 1 s: .*warm_up_time_limit_s"):
        in_parts(llama, threading.Event(), limit_s=1.0)


def test_where_ranks_cannot_meet_that_is_said_before_anything_is_started(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"^tensor_parallel = 2: must be 1 on darwin: .* need Linux"):
        in_parts(llama, threading.Event())


LEADER = """
import sys, threading, time
from pathlib import Path
from tests.integration.test_tensor_parallel import in_parts
for last in (False, True):
    runner = in_parts(Path(sys.argv[1]), threading.Event())
    print(*runner.follower_pids, flush=True)
    if not last:
        runner.close()
time.sleep(600)
"""


@pytest.mark.long
def test_no_follower_outlives_rank_0(llama: Path) -> None:
    """Neither where rank 0 closes, and loads again, nor where it is killed. One that is stopped outlived it;
    `tests/e2e/test_ranks.py` has one that is not."""
    leader = subprocess.Popen([sys.executable, "-c", LEADER, str(llama)], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    with leader.stdout:
        try:
            (closed,) = map(int, leader.stdout.readline().split())
            (running,) = map(int, leader.stdout.readline().split())
            assert is_gone(closed)
            assert not is_gone(running)
            os.kill(running, signal.SIGSTOP)
        finally:
            leader.kill()
            leader.wait()
        assert soon_gone(running)


def test_a_follower_that_fails_ends_at_once_and_in_order() -> None:
    """Python could not end while a thread read standard input: it aborted instead, after a while."""
    lost = threading.Event()
    followers = Followers(2, shared_fd=2, on_lost=lambda _: lost.set())
    try:
        config = ReplicaConfig(model="tiny", device="cpu", tensor_parallel=2)
        followers.tell_each(lambda rank: Load(config, rank, "store", 512, "no such dtype", part_bytes=1))
        with pytest.raises(RankLost, match=r"rank 1 .* has gone: AttributeError: .*no such dtype"):
            followers.hear_each(60.0)
        assert lost.is_set()
    finally:
        followers.close()


def test_a_model_without_a_plan_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    folder = save(FAMILY_BY_NAME["gpt2"], tmp_path / "gpt2")
    with pytest.raises(ModelRefused, match=r"cannot be served by 2 ranks: .*no plan"):
        in_parts(folder, threading.Event())
    assert not dist.is_initialized()
