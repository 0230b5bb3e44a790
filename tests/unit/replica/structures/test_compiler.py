"""Structures are compiled once, elsewhere, and within limits."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Iterator

import pytest

from cache.errors import QueueFull, StructureRefused
from cache.structure import Structure, StructureKind
from replica.structures import compiler as module
from replica.structures.compiler import NoStructures, StructureCompiler, compile_structure
from replica.structures.matcher import StructureMatcher
from replica.structures.vocabulary import StructureVocabulary
from tests.fakes.router import FakeClock
from tests.fakes.structures import allowed, deep_structures, regex, schema, tiny_vocabulary

BROKEN = schema({"type": "array", "uniqueItems": True})


class Counting:
    """Compiles for real, counts, and waits to be let through."""

    def __init__(self) -> None:
        self.calls: list[Structure] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, vocabulary: StructureVocabulary, structure: Structure) -> StructureMatcher:
        self.calls.append(structure)
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(20)
        return compile_structure(vocabulary, structure)


@pytest.fixture
def build() -> Iterator[Counting]:
    counting = Counting()
    yield counting
    counting.gate.set()


def _compiler(
    build: Counting, *, max_kept: int = 4, max_kept_chars: int = 10_000, limit_s: float = 20.0
) -> StructureCompiler:
    return StructureCompiler(
        tiny_vocabulary(), max_kept=max_kept, max_kept_chars=max_kept_chars, limit_s=limit_s, build=build
    )


async def test_twins_wait_for_one_compilation_which_is_on_no_callers_thread(build: Counting) -> None:
    compiler = _compiler(build)
    first, second, third = await asyncio.gather(*(compiler.begin_soon(regex("a+")) for _ in range(3)))
    assert len({id(first), id(second), id(third)}) == 3
    assert compiler.begin(regex("a+")) is not first
    assert build.calls == [regex("a+")]
    assert all(name.startswith("warmpath-structures") for name in build.threads)


async def test_a_remembered_refusal_keeps_nothing_of_who_is_refused(build: Counting) -> None:
    compiler = _compiler(build)
    for begin in (compiler.begin_soon, lambda structure: asyncio.to_thread(compiler.begin, structure)):
        lengths = []
        for _ in range(3):
            with pytest.raises(StructureRefused) as caught:
                await begin(BROKEN)
            lengths.append(len(list(traceback.walk_tb(caught.value.__traceback__))))
        assert lengths[1] == lengths[2]


async def test_what_is_deep_ends_no_process(build: Counting) -> None:
    """Its stack would overflow on a thread like any other; what is compiled is followed on any."""
    compiler = _compiler(build, max_kept=8, limit_s=60.0)
    for structure in deep_structures(4000):
        matcher = await compiler.begin_soon(structure)
        assert allowed(matcher)
    compiler.close()


async def test_a_refusal_is_remembered(build: Counting) -> None:
    compiler = _compiler(build)
    for _ in range(3):
        with pytest.raises(StructureRefused):
            await compiler.begin_soon(BROKEN)
        with pytest.raises(StructureRefused):
            compiler.begin(BROKEN)
    assert build.calls == [BROKEN]


async def test_the_least_recently_asked_for_is_forgotten(build: Counting) -> None:
    compiler = _compiler(build, max_kept=2)
    for source in ("a", "b", "a", "c", "a", "b"):
        await compiler.begin_soon(regex(source))
    assert [structure.source for structure in build.calls] == ["a", "b", "c", "b"]


async def test_so_it_is_where_sources_are_long(build: Counting) -> None:
    """Compiled they take memory by their length: 64 of the longest were more than half a gigabyte."""
    compiler = _compiler(build, max_kept=8, max_kept_chars=6)
    for source in ("aaa", "bb", "aaa", "cc", "aaa", "bb", "d" * 9, "d" * 9, "aaa"):
        await compiler.begin_soon(regex(source))
    called = [structure.source for structure in build.calls]
    assert called == ["aaa", "bb", "cc", "bb", "d" * 9, "d" * 9, "aaa"]


async def test_who_takes_too_long_is_refused_and_not_compiled_again(build: Counting) -> None:
    compiler = _compiler(build, limit_s=0.05)
    build.gate.clear()
    with pytest.raises(StructureRefused, match=r"limit of 0\.05 s"):
        await compiler.begin_soon(regex("a"))
    with pytest.raises(StructureRefused, match=r"limit of 0\.05 s"):
        await asyncio.to_thread(compiler.begin, regex("a"))
    build.gate.set()
    while not compiler._asked["", regex("a")].compiled.done():  # noqa: ASYNC110  # a thread's future has no event here
        await asyncio.sleep(0.001)
    assert await compiler.begin_soon(regex("a"))
    assert build.calls == [regex("a")]


async def test_a_cancelled_wait_leaves_the_others_theirs(build: Counting) -> None:
    compiler = _compiler(build)
    build.gate.clear()
    waiting = [asyncio.create_task(compiler.begin_soon(regex("a"))) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    build.gate.set()
    assert await waiting[1]
    assert waiting[0].cancelled()


async def test_too_many_at_once_are_busy(build: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 2)
    compiler = _compiler(build)
    build.gate.clear()
    waiting = [asyncio.create_task(compiler.begin_soon(regex(source))) for source in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await compiler.begin_soon(regex("c"))
    build.gate.set()
    await asyncio.gather(*waiting)
    assert await compiler.begin_soon(regex("c"))


async def test_tenants_take_turns_and_share_no_compilation(
    build: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NUM_THREADS", 1)
    compiler = _compiler(build, max_kept=16)
    build.gate.clear()
    asked = [("alice", source) for source in "abcde"] + [("bob", "e"), ("bob", "f")]
    waiting = [
        asyncio.create_task(compiler.begin_soon(regex(source), tenant=tenant)) for tenant, source in asked
    ]
    await asyncio.sleep(0)
    build.gate.set()
    await asyncio.gather(*waiting)
    assert [structure.source for structure in build.calls] == list("abecfde")


async def test_nobody_is_refused_for_another_tenants_line(
    build: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of the longest line gives way, and is told that this replica is full."""
    monkeypatch.setattr(module, "MAX_PENDING", 4)
    compiler = _compiler(build, max_kept=16)
    build.gate.clear()
    alices = [asyncio.create_task(compiler.begin_soon(regex(source), tenant="alice")) for source in "abcd"]
    await asyncio.sleep(0)
    bobs = asyncio.create_task(compiler.begin_soon(regex("d"), tenant="bob"))
    with pytest.raises(QueueFull):
        await alices[3]
    with pytest.raises(QueueFull):
        await compiler.begin_soon(regex("e"), tenant="alice")
    build.gate.set()
    await asyncio.gather(bobs, *alices[:3])
    assert await compiler.begin_soon(regex("d"), tenant="alice")


async def test_who_had_no_turn_in_time_is_not_called_too_complex(build: Counting) -> None:
    compiler = _compiler(build, limit_s=0.05)
    build.gate.clear()
    waiting = [asyncio.create_task(compiler.begin_soon(regex(source))) for source in "abc"]
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in ended] == [StructureRefused, StructureRefused, QueueFull]
    assert str(ended[2]) == "3 requests are waiting, the limit is 64"
    build.gate.set()


@pytest.mark.parametrize("is_awaited", [True, False])
async def test_the_limit_counts_from_when_its_own_compiling_began(
    monkeypatch: pytest.MonkeyPatch, is_awaited: bool
) -> None:
    """It counted from the question: what had waited in line was called too complex."""
    monkeypatch.setattr(module, "NUM_THREADS", 1)
    limit_s = 0.01  # what the clock says of it counts; for so long the loop really sleeps
    clock = FakeClock(0.0)
    gates, begun = ({name: threading.Event() for name in "ab"} for _ in range(2))

    def build(vocabulary: StructureVocabulary, structure: Structure) -> StructureMatcher:
        begun[structure.source].set()
        assert gates[structure.source].wait(20)
        return compile_structure(vocabulary, structure)

    def ask(name: str) -> asyncio.Task[StructureMatcher]:
        if is_awaited:
            return asyncio.create_task(compiler.begin_soon(regex(name)))
        return asyncio.create_task(asyncio.to_thread(compiler.begin, regex(name)))

    compiler = StructureCompiler(tiny_vocabulary(), limit_s=limit_s, build=build, clock=clock)
    first = ask("a")
    assert await asyncio.to_thread(begun["a"].wait, 20)
    behind = ask("b")
    while len(compiler._asked) < 2:  # noqa: ASYNC110  # a thread's question has no event here
        await asyncio.sleep(0.001)
    clock.now = 0.9 * limit_s
    gates["a"].set()
    assert await first
    assert await asyncio.to_thread(begun["b"].wait, 20)
    clock.now = 1.8 * limit_s
    await asyncio.sleep(3 * limit_s)
    assert not behind.done()
    refused = ask("b")
    clock.now = 1.95 * limit_s
    for asked in (behind, refused):
        with pytest.raises(StructureRefused, match=r"limit of 0\.01 s"):
            await asyncio.wait_for(asked, 20)
    gates["b"].set()
    compiler.close()


@pytest.mark.parametrize(
    "structure",
    [
        BROKEN,
        schema(False),
        schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        schema({"enum": [f"v{index}" for index in range(100_000)]}),
        regex("(?=a)b"),
        regex("("),
        Structure(StructureKind.GRAMMAR, "start: nobody"),
        Structure(StructureKind.JSON_SCHEMA, "{"),
    ],
    ids=lambda structure: structure.source[:40],
)
def test_what_cannot_be_followed_is_refused_without_a_word_of_it(structure: Structure) -> None:
    with pytest.raises(StructureRefused) as caught:
        compile_structure(tiny_vocabulary(), structure)
    assert "nobody" not in str(caught.value)


async def test_without_a_vocabulary_every_structure_is_refused_with_the_reason() -> None:
    structures = NoStructures("this model's tokenizer is odd")
    with pytest.raises(StructureRefused, match="is odd"):
        structures.begin(regex("a"))
    with pytest.raises(StructureRefused, match="is odd"):
        await structures.begin_soon(regex("a"))
    structures.close()
