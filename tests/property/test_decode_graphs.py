"""Replayed decode steps say what steps that run as they are say, whoever is in them, however long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.messages import SamplingParams
from replica.attention.kv_pages import ATTRIBUTE
from replica.attention.step_batch import StepBatch
from replica.config import ReplicaConfig
from replica.errors import StepOutOfMemory
from replica.models.model_source import resolve
from replica.runners import decode_graphs, model_runner
from replica.runners.decode_graphs import batch_sizes, lengths
from replica.runners.model_runner import ModelRunner
from tests import family_engines as engines
from tests import model_families as families
from tests.fakes.recording import FailingRecorder, OperationRecorder, TabledAttention
from tests.family_engines import Setting
from tests.model_families import FAMILIES

BLOCK_SIZE, NUM_BLOCKS = 4, 128
SETTING = Setting("graphs", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_batched_tokens=48)

NO_MEMORY = "no memory to record more decode steps; the others run as they are"


def load(folder: Path, recorder: Any = None) -> ModelRunner:
    """With room for twelve sequences of four lengths."""
    config = ReplicaConfig(
        model=str(folder),
        device="cpu",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_running=12,
        greedy_screen="off",
        torch_threads=1,
    )
    resolved = resolve(str(folder))
    if recorder is None:
        return ModelRunner.load(config, resolved)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "choose_backend", lambda _name, device, *_: TabledAttention(device))
        patch.setattr(decode_graphs, "SHORTEST", 32)
        model = model_runner.load_model(resolved, torch.device("cpu"), torch.float32)
        runner = ModelRunner.over(model, config, "family", max_model_len=256, recorder=recorder)
    for module in runner._pages._modules:
        # Replayed steps zero no block they open, and the fake's gather reads what it masks.
        pages = module.__dict__[ATTRIBUTE]
        pages.keys.zero_()
        pages.values.zero_()
    return runner


def ended_badly(cause: RuntimeError) -> RuntimeError:
    """What is raised by the end of a recording in which `cause` was."""
    error = torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
    error.__context__ = cause
    return error


@dataclass(frozen=True, slots=True)
class Pair:
    """One network, recorded and not."""

    plain: ModelRunner
    recorded: ModelRunner
    recorder: OperationRecorder


@pytest.fixture(scope="module", params=["llama", "mistral"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """mistral: a window of 10."""
    family = next(each for each in FAMILIES if each.name == request.param)
    folder = families.save(family, tmp_path_factory.mktemp(family.name))
    recorder = OperationRecorder()
    pair = Pair(load(folder), load(folder, recorder), recorder)
    yield pair
    pair.plain.close()
    pair.recorded.close()


def num_replays(runner: ModelRunner) -> int:
    assert runner._graphs is not None
    return runner._graphs.num_replays


def answers(runner: ModelRunner, setting: Setting, questions: list[tuple[int, ...]], heat: float) -> Any:
    sampling = SamplingParams(max_tokens=9, temperature=heat, ignore_eos=True)
    return engines.answer_all(
        engines.engine_over(runner, setting), questions, sampling=sampling, at_once=4, seed=5
    )


@given(
    questions=st.lists(st.sampled_from(families.prompts()), min_size=1, max_size=10),
    heat=st.sampled_from([0.0, 1.0]),
    max_running=st.integers(1, 12),
    caching=st.booleans(),
)
@settings(max_examples=10)
def test_replayed_steps_answer_the_same(
    pair: Pair, questions: list[tuple[int, ...]], heat: float, max_running: int, caching: bool
) -> None:
    setting = replace(SETTING, max_running=max_running, prefix_caching=caching)
    wanted = answers(pair.plain, setting, questions, heat)
    assert answers(pair.recorded, setting, questions, heat) == wanted


def test_a_shape_is_recorded_when_it_comes_again(pair: Pair) -> None:
    before, recorded = num_replays(pair.recorded), pair.recorder.num_recorded
    wanted = answers(pair.plain, SETTING, list(families.prompts()[:6]), 0.0)
    assert answers(pair.recorded, SETTING, list(families.prompts()[:6]), 0.0) == wanted
    assert num_replays(pair.recorded) > before
    now = pair.recorder.num_recorded
    assert now > recorded or recorded > 0
    assert answers(pair.recorded, SETTING, list(families.prompts()[:6]), 0.0) == wanted
    assert pair.recorder.num_recorded - now < now + 8, "it records again and again"


def test_old_recordings_make_room(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "MAX_KEPT", 1)
    questions = list(families.prompts()[:5])
    graphs = pair.recorded._graphs
    assert graphs is not None
    graphs._let_go()  # of all that other tests have recorded
    assert answers(pair.recorded, SETTING, questions, 0.0) == answers(pair.plain, SETTING, questions, 0.0)
    assert len(graphs._recordings) == 1
    assert len(graphs._backend.held) == len(graphs._recordings)  # type: ignore[attr-defined]


SHAPES = len(batch_sizes(12)) * 4  # of 32 to 256 tokens


def test_after_the_warm_up_nobody_waits_for_a_recording(tmp_path: Path) -> None:
    folder = families.save(FAMILIES[0], tmp_path)
    recorder = OperationRecorder()
    plain, recorded = load(folder), load(folder, recorder)
    assert recorder.num_recorded == 0
    for _ in range(2):
        assert recorded.warm_up() > 0
        assert recorder.num_recorded == SHAPES
    questions = list(families.prompts()[:6])
    assert answers(recorded, SETTING, questions, 0.0) == answers(plain, SETTING, questions, 0.0)
    assert recorder.num_recorded == SHAPES
    assert num_replays(recorded) >= 9, "the first step of a shape is replayed, too"


def test_of_more_shapes_than_are_kept_the_short_ones_are_recorded_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "MAX_KEPT", 7)
    recorder = OperationRecorder()
    runner = load(families.save(FAMILIES[0], tmp_path), recorder)
    runner.warm_up()
    assert runner._graphs is not None
    assert [length for _, length in runner._graphs._recordings] == [32] * 5 + [64] * 2
    assert recorder.num_recorded == 7, "none made room for another"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, "decode steps cannot be recorded; they run as they are"),
        (torch.OutOfMemoryError("of memory"), NO_MEMORY),
        (torch.AcceleratorError("CUDA error: out of memory"), NO_MEMORY),
        (ended_badly(torch.OutOfMemoryError("of memory")), NO_MEMORY),
    ],
    ids=["no forward to record", "no memory", "no memory for a graph", "no memory, which the end hides"],
)
def test_a_warm_up_that_cannot_record_all_is_one_all_the_same(
    error: RuntimeError | None, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = families.save(FAMILIES[0], tmp_path)
    plain, failing = load(folder), load(folder, FailingRecorder(successes=3, error=error))
    assert failing.warm_up() > 0
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [told]
    assert failing._graphs is not None
    assert len(failing._graphs._recordings) == (3 if error else 0)
    question = [families.prompts()[1]]  # alone and short: of a shape that was recorded
    assert answers(failing, SETTING, question, 0.0) == answers(plain, SETTING, question, 0.0)
    assert (num_replays(failing) > 0) == (error is not None)


@pytest.mark.parametrize("is_warm", [True, False], ids=["in the warm-up", "while serving"])
@pytest.mark.parametrize("successes", [0, 1])
def test_steps_that_there_is_no_memory_to_record_run_as_they_are(
    successes: int, is_warm: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of them was taken back as one that does not fit; at a single token it failed with its requests."""
    folder = families.save(FAMILIES[0], tmp_path)
    recorder = FailingRecorder(successes, torch.OutOfMemoryError("of memory"))
    plain, failing = load(folder), load(folder, recorder)
    if is_warm:
        failing.warm_up()
    alone = [families.prompts()[1]]  # short: of the shape that a warm-up begins with
    for questions in (alone, list(families.prompts()[:8]), alone):
        assert answers(failing, SETTING, questions, 0.0) == answers(plain, SETTING, questions, 0.0)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [NO_MEMORY]
    assert failing._graphs is not None
    assert len(failing._graphs._recordings) == successes
    assert (num_replays(failing) > 0) == (successes > 0)


@pytest.mark.parametrize("units", [0, 1, 5])
def test_a_warm_up_leaves_room_for_a_full_step(
    units: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every recording keeps one unit of memory; a full step fits beside so many."""
    folder = families.save(FAMILIES[0], tmp_path)
    plain, recorded = load(folder), load(folder, OperationRecorder())
    graphs = recorded._graphs
    assert graphs is not None
    forward = recorded._forward

    def within_memory(batch: StepBatch) -> torch.Tensor:
        if batch.num_tokens > 12 and len(graphs._recordings) > units:
            raise torch.OutOfMemoryError("of memory")
        return forward(batch)

    monkeypatch.setattr(recorded, "_forward", within_memory)
    assert recorded.warm_up() > 0
    kept = list(graphs._recordings)
    assert len(kept) <= units < 2 * len(kept) + 1, "the fewest that were in the way have gone, by halves"
    assert kept == sorted(kept, key=lambda shape: (shape[1], shape[0])), "short ones stay"
    assert len(graphs._backend.held) == len(kept)  # type: ignore[attr-defined]
    caplog.clear()
    questions = list(families.prompts()[:8])
    assert answers(recorded, SETTING, questions, 0.0) == answers(plain, SETTING, questions, 0.0)
    assert set(graphs._recordings) == set(kept), "no more are recorded"
    assert not caplog.records


def test_a_warm_up_whose_full_step_fits_beside_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = load(families.save(FAMILIES[0], tmp_path), OperationRecorder())
    graphs = recorded._graphs
    assert graphs is not None
    forward, has_recorded = recorded._forward, lambda: bool(graphs._seen)

    def within_memory(batch: StepBatch) -> torch.Tensor:
        if batch.num_tokens > 12 and has_recorded():
            raise torch.OutOfMemoryError("of memory")
        return forward(batch)

    monkeypatch.setattr(recorded, "_forward", within_memory)
    with pytest.raises(StepOutOfMemory):
        recorded.warm_up()
    assert not graphs._recordings, "it was tried without any of them"


def test_a_network_that_cannot_be_recorded_runs_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = families.save(FAMILIES[2], tmp_path)
    plain, failing = load(folder), load(folder, FailingRecorder())
    questions = list(families.prompts()[:4])
    assert answers(failing, SETTING, questions, 0.0) == answers(plain, SETTING, questions, 0.0)
    assert [record.message for record in caplog.records if "cannot be recorded" in record.message] == [
        "decode steps cannot be recorded; they run as they are"
    ], "said once"
    assert num_replays(failing) == 0


def test_a_refusal_lets_go_of_what_was_recorded_before_it(tmp_path: Path) -> None:
    """Tables of every earlier recording stayed on the device until the runner was closed."""
    folder = families.save(FAMILIES[2], tmp_path)
    plain, failing = load(folder), load(folder, FailingRecorder(successes=1))
    graphs = failing._graphs
    assert graphs is not None
    for questions in (list(families.prompts()[:6]), list(families.prompts()[:1])):  # batches of 4, and of 1
        assert graphs._refusal is None
        assert answers(failing, SETTING, questions, 0.0) == answers(plain, SETTING, questions, 0.0)
        assert graphs.num_replays > 0, "nothing was recorded before"
    assert graphs._refusal is not None
    assert not graphs._backend.held  # type: ignore[attr-defined]


def test_every_shape_of_64_sequences_of_32768_tokens_is_kept() -> None:
    """With fewer, a load that goes through them all records what it has just let go, every time."""
    assert len(batch_sizes(64)) * len(lengths(32_768, 16)) <= decode_graphs.MAX_KEPT


@given(most=st.integers(1, 700), count=st.integers(1, 700))
def test_every_batch_has_a_size_that_wastes_little(most: int, count: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    if count <= most:
        size = min(each for each in sizes if each >= count)
        assert size - count <= max(count / 2, 7)


@given(most=st.integers(1, 200_000), block_size=st.integers(1, 300))
def test_lengths_are_whole_blocks_up_to_the_longest(most: int, block_size: int) -> None:
    found = lengths(most, block_size)
    assert found == sorted(set(found))
    assert all(each % block_size == 0 for each in found)
    assert most <= found[-1] < most + block_size
