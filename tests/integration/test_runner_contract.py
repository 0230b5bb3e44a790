"""What the scheduler relies on, of every runner: one suite over the simulated and the real one."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache.block_hash import BlockHasher
from cache.messages import SamplingParams
from cache.types import RequestId
from replica.config import ReplicaConfig, SimConfig
from replica.engine.engine_core import EngineCore
from replica.models.model_source import resolve
from replica.runners.sim_runner import SimRunner
from replica.scheduling.runner import LaunchingRunner, Runner, ScheduledSequence
from tests.fakes.engine import BLOCK_SIZE, fingerprint, make_request

NUM_BLOCKS = 64
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
WARM = SamplingParams(max_tokens=8, temperature=1.0)


def _simulated(_: Path) -> Runner:
    sim = SimConfig(num_blocks=NUM_BLOCKS, vocab_size=300)
    return SimRunner(sim, block_size=BLOCK_SIZE, sleep=lambda _: None)


def _model(folder: Path) -> Runner:
    from replica.runners.model_runner import ModelRunner

    config = ReplicaConfig(model=str(folder), device="cpu", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    return ModelRunner.load(config, resolve(config.model))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of the tiny model's family, small enough to load in a moment."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.2,  # a flat distribution would let a wrong context pass for a right one
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(params=[_simulated, _model], ids=["simulated", "model"])
def build(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Callable[[], Runner]]:
    opened: list[Runner] = []

    def make() -> Runner:
        opened.append(request.param(model_folder))
        return opened[-1]

    yield make
    for runner in opened:
        runner.close()


@pytest.fixture
def runner(build: Callable[[], Runner]) -> Runner:
    return build()


def piece(
    tokens: list[int],
    table: list[int],
    start: int = 0,
    end: int | None = None,
    *,
    sampling: SamplingParams = GREEDY,
    seed: int = 0,
    name: str = "r",
) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=RequestId(name),
        token_ids=array("i", tokens),
        block_table=table,
        start=start,
        num_new_tokens=(len(tokens) if end is None else end) - start,
        num_prompt_tokens=len(tokens),
        sampling=sampling,
        seed=seed,
    )


def token(runner: Runner, *pieces: ScheduledSequence) -> int:
    """The last sequence's next token after running the pieces one step each."""
    result = None
    for each in pieces:
        result = runner.execute([each])
    assert result is not None
    drawn = result.next_tokens[-1]
    assert drawn is not None
    return drawn


PROMPT = [(7 * i) % 290 for i in range(18)]
OTHER = [(11 * i + 5) % 290 for i in range(9)]


def test_info_tells_the_pool(runner: Runner) -> None:
    info = runner.info
    assert (info.num_blocks, info.block_size, info.vocab_size) == (NUM_BLOCKS, BLOCK_SIZE, 300)
    assert info.kv_bytes_per_block > 0
    assert info.max_model_len >= 2048


def test_samples_exactly_where_a_step_reaches_the_last_token(runner: Runner) -> None:
    result = runner.execute(
        [
            piece(PROMPT, [0, 1, 2, 3, 4], 0, 10, name="a"),
            piece(OTHER, [5, 6, 7], name="b"),
            piece(OTHER, [8, 9, 10], 0, 8, name="c"),
        ]
    )
    assert [t is None for t in result.next_tokens] == [True, False, True]
    assert result.elapsed_s > 0


def test_a_step_in_which_nobody_samples(runner: Runner) -> None:
    assert runner.execute([piece(PROMPT, [0, 1, 2, 3, 4], 0, 10)]).next_tokens == (None,)


@pytest.mark.parametrize("cuts", [[1], [4], [5, 6], [3, 9, 17]])
def test_chunks_change_nothing(build: Callable[[], Runner], cuts: list[int]) -> None:
    whole = token(build(), piece(PROMPT, [0, 1, 2, 3, 4]))
    bounds = [0, *cuts, len(PROMPT)]
    table = [9, 3, 30, 4, 63]
    pieces = [piece(PROMPT, table, a, b) for a, b in itertools.pairwise(bounds)]
    assert token(build(), *pieces) == whole


def test_batch_mates_change_nothing(build: Callable[[], Runner]) -> None:
    alone = token(build(), piece(PROMPT, [0, 1, 2, 3, 4], sampling=WARM, seed=3))
    mates = [piece([i] * (i + 1), [20 + i, 40 + i], name=f"m{i}", seed=i) for i in range(6)]
    result = build().execute([*mates, piece(PROMPT, [0, 1, 2, 3, 4], sampling=WARM, seed=3)])
    assert result.next_tokens[-1] == alone


def test_decodes_read_what_earlier_steps_wrote(build: Callable[[], Runner]) -> None:
    """Prefill, then one token at a time, beside a stranger's prefill: as if computed in one piece."""
    runner, table = build(), [5, 6, 7, 8, 9]
    runner.execute([piece(PROMPT[:12], table, name="a")])
    for length in range(13, len(PROMPT)):
        stranger = piece(OTHER, [20, 21, 22], name="b")
        runner.execute([piece(PROMPT[:length], table, length - 1, name="a"), stranger])
    assert token(runner, piece(PROMPT, table, len(PROMPT) - 1)) == token(
        build(), piece(PROMPT, [0, 1, 2, 3, 4])
    )


def test_twins_read_blocks_filled_in_the_same_step(build: Callable[[], Runner]) -> None:
    """Blocks are shared as soon as they are scheduled, so K/V must be written before it is read."""
    table = [0, 1, 2, 3, 4]
    result = build().execute([piece(PROMPT, table, name="a"), piece(PROMPT, [0, 1, 2, 3, 9], 16, name="b")])
    alone = token(build(), piece(PROMPT, table))
    assert result.next_tokens == (alone, alone)


def test_blocks_of_another_context_are_noticed(build: Callable[[], Runner]) -> None:
    """The suite's own check: were pages not read, the tests above would prove nothing."""
    right = token(build(), piece(PROMPT, [0, 1, 2, 3, 4]))
    runner = build()
    outcomes = []
    for number in range(4):
        foreign = [(13 * i + 31 * number + 1) % 290 for i in range(16)]
        runner.execute([piece([*foreign, 1], [0, 1, 2, 3, 4])])
        outcomes.append(token(runner, piece(PROMPT, [0, 1, 2, 3, 4], 16)))
    assert any(outcome != right for outcome in outcomes)


def test_the_draw_is_a_function_of_seed_and_position(build: Callable[[], Runner]) -> None:
    def draw(seed: int, length: int = len(PROMPT)) -> int:
        return token(build(), piece(PROMPT[:length], [0, 1, 2, 3, 4], sampling=WARM, seed=seed))

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(12)}) > 3


def test_a_step_that_raises_leaves_the_runner_usable(build: Callable[[], Runner]) -> None:
    runner = build()
    with pytest.raises(Exception):  # noqa: B017, PT011 - the protocol says: anything
        runner.execute([piece(PROMPT, [0, 1])])  # a table too short for its tokens
    assert token(runner, piece(PROMPT, [0, 1, 2, 3, 4])) == token(build(), piece(PROMPT, [0, 1, 2, 3, 4]))


def test_a_step_is_begun_before_the_one_before_is_looked_at(build: Callable[[], Runner]) -> None:
    """Its tokens are known to the device alone; another's prompt goes on beside it."""
    table, other = [0, 1, 2, 3, 4], [20, 21, 22]
    runner = build()
    first = token(runner, piece(PROMPT, table, sampling=WARM, seed=3))
    runner.execute([piece(OTHER, other, 0, 5, name="b")])
    longer = piece([*PROMPT, first], table, len(PROMPT), sampling=WARM, seed=3)
    wanted = runner.execute([piece(OTHER, other, 5, name="b"), longer]).next_tokens

    launching = build()
    assert isinstance(launching, LaunchingRunner)
    before = launching.launch(
        [piece(OTHER, other, 0, 5, name="b"), piece(PROMPT, table, sampling=WARM, seed=3)]
    )
    unseen = replace(longer, token_ids=array("i", PROMPT), drawn_by=1)
    after = launching.launch([piece(OTHER, other, 5, name="b"), unseen], before)
    assert before.result().next_tokens == (None, first)
    result = after.result()
    assert result.next_tokens == wanted
    assert result.elapsed_s > 0


def test_a_step_after_one_that_failed_fails(build: Callable[[], Runner]) -> None:
    runner = build()
    assert isinstance(runner, LaunchingRunner)
    before = runner.launch([piece(PROMPT, [0, 1])])  # a table too short for its tokens
    after = runner.launch([replace(piece(PROMPT, [0, 1, 2, 3, 4], 18, 19), drawn_by=0)], before)
    for step in (before, after):
        with pytest.raises(Exception):  # noqa: B017, PT011 - the protocol says: anything
            step.result()
    assert token(runner, piece(PROMPT, [0, 1, 2, 3, 4])) == token(build(), piece(PROMPT, [0, 1, 2, 3, 4]))


def test_warm_up_leaves_no_trace(build: Callable[[], Runner]) -> None:
    runner = build()
    runner.warm_up()
    assert token(runner, piece(PROMPT, [0, 1, 2, 3, 4])) == token(build(), piece(PROMPT, [0, 1, 2, 3, 4]))


def test_close_may_be_called_twice(build: Callable[[], Runner]) -> None:
    runner = build()
    runner.close()
    runner.close()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix_caching": False},
        {"max_batched_tokens": 5},
        {"max_batched_tokens": 1},
        {"max_running": 2},
        {"num_blocks": 12},
    ],
    ids=lambda settings: ",".join(f"{k}={v}" for k, v in settings.items()) or "defaults",
)
def test_the_engine_gives_each_request_its_own_output(
    build: Callable[[], Runner], settings: dict[str, Any]
) -> None:
    """Cache on or off, chunked, crowded, preempted, cold and warm: as if each had run alone."""
    requests = [
        make_request(
            f"r{i}",
            [*PROMPT[: 4 * i], *OTHER[: 1 + i]],
            max_tokens=10,
            temperature=float(i % 2),
            seed=i,
        )
        for i in range(5)
    ]
    alone = [_engine(build(), {}).complete([r])[0].token_ids for r in requests]
    own = {name: value for name, value in settings.items() if name != "num_blocks"}
    engine = _engine(_smaller(build(), settings.get("num_blocks", NUM_BLOCKS)), own)
    for _ in range(2):
        assert [c.token_ids for c in engine.complete(requests)] == alone
    assert engine.stats().cache.used == 0


class _Smaller:
    """A runner that tells of fewer blocks than it has."""

    def __init__(self, runner: Runner, num_blocks: int) -> None:
        self.info = replace(runner.info, num_blocks=num_blocks)
        self.execute, self.warm_up, self.close = runner.execute, runner.warm_up, runner.close


def _smaller(runner: Runner, num_blocks: int) -> Runner:
    return _Smaller(runner, num_blocks)


def _engine(runner: Runner, settings: dict[str, Any]) -> EngineCore:
    config = ReplicaConfig(block_size=BLOCK_SIZE, **settings)
    return EngineCore(runner, config, BlockHasher(fingerprint()))
