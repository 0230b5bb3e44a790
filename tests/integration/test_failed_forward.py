"""A forward that raises fails the requests of its step and nobody else; the next answers are exact.

One that runs out of memory fails nobody: the step is taken back. One that costs the process its card is the
engine's end: all steps after it would fail as well, at once, and more requests would come to whoever is idle.

Also NaN: whose answer a model computes nonsense for fails instead of being answered, and nobody beside it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.messages import GenerateRequest
from cache.types import RequestId
from replica.attention.kv_pages import ATTRIBUTE
from replica.config import ReplicaConfig
from replica.engine.engine_core import EngineCore, Progress
from replica.errors import EngineBroken, ForwardFailed, InvalidLogits
from replica.models.model_source import resolve
from replica.runners import model_runner
from replica.runners.model_runner import ModelRunner
from tests import family_engines as engines
from tests import model_families as families
from tests.fakes.steps import scheduled
from tests.family_engines import GREEDY, Runners, Setting
from tests.model_families import FAMILIES, MAX_NEW_TOKENS

PROMPTS = families.prompts()
SETTINGS = (
    Setting("roomy", block_size=4),
    Setting("crowded", block_size=4, num_blocks=30, max_batched_tokens=23, max_running=5),
    Setting("screened", block_size=4, greedy_screen="on"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.save(FAMILIES[0], tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[tuple[int, ...]]:
    return families.expected(folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def runners(folder: Path) -> Iterator[Runners]:
    runners = Runners(folder, "cpu")
    yield runners
    runners.close()


@contextmanager
def failing_once(
    runner: ModelRunner, after_calls: int, last_layer: bool, error: Exception | None = None
) -> Iterator[None]:
    """One layer raises in one forward. The last layer: K and V of those before it are written by then."""
    calls = 0

    def hook(module: torch.nn.Module, inputs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == after_calls:
            raise error or RuntimeError("the device fell over")

    layers = runner._model.model.layers
    handle = layers[-1 if last_layer else 0].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def nan_once(runner: ModelRunner, after_calls: int) -> Iterator[None]:
    """The first layer answers NaN for one token of one step, which from there on spoils later ones."""
    calls = 0

    def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == after_calls:
            output = output.clone()
            output[..., output.shape[-2] // 2, :] = float("nan")
        return output

    handle = runner._model.model.layers[0].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _failures() -> Iterator[Any]:
    """A layer that has written nothing yet is the lesser case: one setting meets it, the others in the broad
    suite."""
    for setting in SETTINGS:
        for after_calls in (1, 2, 9):
            for last_layer in (False, True):
                is_broad = not last_layer and setting.name != "roomy"
                name = f"{setting.name}-{after_calls}-{'last' if last_layer else 'first'}-layer"
                marks = (pytest.mark.long, pytest.mark.broad) if is_broad else ()
                yield pytest.param(setting, after_calls, last_layer, id=name, marks=marks)


def run_to_the_end(engine: EngineCore) -> dict[RequestId, Progress]:
    """How each request ended; checks the pool after every step."""
    ended = {}
    while engine.has_work:
        for progress in engine.step():
            if progress.is_last:
                ended[progress.request.request_id] = progress
        engines.check_pool(engine)
    return ended


def submit_all(engine: EngineCore) -> list[RequestId]:
    requests = [
        GenerateRequest(RequestId(f"r{index}"), array("i", prompt), len(prompt), GREEDY, seed=0)
        for index, prompt in enumerate(PROMPTS)
    ]
    return [engine.submit(request).request_id for request in requests]


@pytest.mark.parametrize(("setting", "after_calls", "last_layer"), [*_failures()])
def test_a_forward_that_raises_fails_its_requests_only(
    runners: Runners,
    wanted: list[tuple[int, ...]],
    setting: Setting,
    after_calls: int,
    last_layer: bool,
) -> None:
    engine = runners.engine(setting)
    runner = runners.get(setting.block_size, setting.num_blocks, setting.greedy_screen)
    ids = submit_all(engine)
    with failing_once(runner, after_calls, last_layer):
        ended = run_to_the_end(engine)
    check_aftermath(engine, ids, ended, wanted, crowded=setting.name == "crowded", cause="RuntimeError")


@pytest.mark.parametrize("after_calls", [1, 2, 9])
@pytest.mark.parametrize(
    "setting",
    [*SETTINGS, replace(SETTINGS[0], name="ahead", async_scheduling=True)],
    ids=lambda setting: setting.name,
)
def test_nan_fails_its_request_alone_and_poisons_no_block(
    runners: Runners, wanted: list[tuple[int, ...]], setting: Setting, after_calls: int
) -> None:
    """Not even one in the middle of a prompt, whose step draws nothing: its blocks would stay cached."""
    engine = runners.engine(setting)
    runner = runners.get(setting.block_size, setting.num_blocks, setting.greedy_screen)
    ids = submit_all(engine)
    with nan_once(runner, after_calls):
        ended = run_to_the_end(engine)
    check_aftermath(engine, ids, ended, wanted, crowded=setting.name == "crowded", cause="InvalidLogits")
    failed = [request_id for request_id in ids if ended[request_id].error is not None]
    assert len(failed) <= 2  # in the first step two begin alike: what one computes is the other's, too


def test_the_step_behind_one_of_nonsense_is_not_told_of_its_time(folder: Path) -> None:
    """Both are under way on a card: it was measured from before the other was done."""
    now_s = 0.0
    config = ReplicaConfig(device="cpu", block_size=4, num_blocks=128)
    runner = ModelRunner.load(config, resolve(str(folder)), clock=lambda: now_s)
    with nan_once(runner, 1):
        first = runner.launch([scheduled("first", [0], 0, 4)])
    now_s = 1.0
    second = runner.launch([scheduled("second", [1], 0, 4)])
    now_s = 5.0
    with pytest.raises(InvalidLogits):
        first.result()
    now_s = 7.0
    assert second.result().elapsed_s == 2.0
    runner.close()


def check_aftermath(
    engine: EngineCore,
    ids: list[RequestId],
    ended: dict[RequestId, Progress],
    wanted: list[tuple[int, ...]],
    *,
    crowded: bool,
    cause: str,
) -> None:
    """The failed ended with the cause, the others exactly; nothing is held; asked again, all are exact."""
    assert set(ended) == set(ids)
    failed = [request_id for request_id in ids if ended[request_id].error is not None]
    assert failed
    if crowded:  # five run at a time: the others were not in the step
        assert len(failed) <= 5
    for index, request_id in enumerate(ids):
        progress = ended[request_id]
        if progress.error is not None:
            assert isinstance(progress.error, ForwardFailed)
            assert cause in str(progress.error)
        else:
            assert tuple(progress.request.token_ids[len(PROMPTS[index]) :]) == wanted[index]
    stats = engine.stats()
    assert stats.num_failed_steps == 1
    assert (stats.cache.used, stats.cache.free) == (0, stats.cache.total)
    engines.check_answers(engines.answer_all(engine, PROMPTS), wanted, "asked again")


def test_blocks_full_of_nan_are_harmless_to_whoever_gets_them_next(
    folder: Path, wanted: list[tuple[int, ...]]
) -> None:
    """K and V written as NaN by a failed step: a masked NaN is still a NaN, unless its block is cleaned."""
    setting = Setting("small", block_size=4, num_blocks=24)
    runners = Runners(folder, "cpu")
    runner = runners.get(setting.block_size, setting.num_blocks, setting.greedy_screen)
    found = [module.__dict__.get(ATTRIBUTE) for module in runner._model.modules()]
    all_pages = [pages for pages in found if pages is not None]
    assert len(all_pages) == len(runner._model.model.layers)
    for pages in all_pages:
        pages.keys.fill_(float("nan"))
        pages.values.fill_(float("nan"))
    engines.check_answers(engines.answer_all(runners.engine(setting), PROMPTS), wanted, "after NaN")
    runners.close()


def test_the_error_does_not_tell_what_the_model_said(runners: Runners) -> None:
    """The message of an exception may quote a prompt; a client sees only its type."""
    setting = SETTINGS[0]
    engine = runners.engine(setting)
    submit_all(engine)
    with failing_once(
        runners.get(setting.block_size, setting.num_blocks, setting.greedy_screen), 1, last_layer=False
    ):
        errors = [progress.error for progress in engine.step()]
    assert len(errors) == len(PROMPTS)
    assert all(isinstance(error, ForwardFailed) for error in errors)
    assert all("fell over" not in str(error) for error in errors)


def test_a_runner_that_failed_answers_alone_and_in_a_batch_as_before(
    runners: Runners, wanted: list[tuple[int, ...]]
) -> None:
    setting = SETTINGS[0]
    runner = runners.get(setting.block_size, setting.num_blocks, setting.greedy_screen)
    with failing_once(runner, 1, last_layer=True):
        engine = runners.engine(setting)
        submit_all(engine)
        run_to_the_end(engine)
    alone: Callable[[int], tuple[int, ...]] = lambda index: (  # noqa: E731
        engines.answer_all(engine, [PROMPTS[index]])[0].token_ids
    )
    assert [alone(index) for index in range(4)] == wanted[:4]
    assert len(alone(0)) == MAX_NEW_TOKENS


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("after_calls", [1, 2, 9])
def test_an_engine_whose_card_is_lost_ends(
    runners: Runners, after_calls: int, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = replace(SETTINGS[0], async_scheduling=async_scheduling)
    engine = runners.engine(setting)
    submit_all(engine)
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(model_runner, "is_lost", lambda device: True)
    runner = runners.get(setting.block_size, setting.num_blocks, setting.greedy_screen)
    with (
        failing_once(runner, after_calls, last_layer=False, error=error),
        pytest.raises(EngineBroken, match="cpu is lost to this process: CUDA error: an illegal"),
    ):
        run_to_the_end(engine)


def _device_error() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory.")


def _driver_error() -> Exception:
    """Of what torch's allocator does not hand out: graphs, kernels' code, locked memory."""
    return torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later")


def _host_error() -> Exception:
    """As torch's allocator of the CPU has it: no type of its own."""
    try:
        torch.empty(1 << 50)
    except RuntimeError as error:
        return error
    raise AssertionError("a petabyte was allocated")


@pytest.mark.parametrize(
    ("make_error", "after_calls"),
    [
        pytest.param(
            make_error,
            after_calls,
            id=f"{name}-{after_calls}",
            marks=() if name == "device" or after_calls == 9 else (pytest.mark.long, pytest.mark.broad),
        )
        for name, make_error in (("device", _device_error), ("driver", _driver_error), ("host", _host_error))
        for after_calls in (1, 2, 9)
    ],
)
def test_out_of_memory_fails_nobody(
    runners: Runners,
    wanted: list[tuple[int, ...]],
    make_error: Callable[[], Exception],
    after_calls: int,
) -> None:
    """The step is taken back, smaller ones follow, and every answer is exact."""
    setting = SETTINGS[1]
    engine = runners.engine(setting)
    ids = submit_all(engine)
    with failing_once(
        runners.get(setting.block_size, setting.num_blocks, setting.greedy_screen),
        after_calls,
        last_layer=True,
        error=make_error(),
    ):
        ended = run_to_the_end(engine)
    for index, request_id in enumerate(ids):
        assert ended[request_id].error is None
        assert tuple(ended[request_id].request.token_ids[len(PROMPTS[index]) :]) == wanted[index]
    assert engine.stats().num_failed_steps == 0
    assert engine.report(epoch=1, number=1).out_of_memory_steps == 1
