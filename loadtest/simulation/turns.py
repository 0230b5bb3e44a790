"""From a workload's block ids to what production's cache and policies read: hashes, packed tokens, text.

Equal block ids <=> equal block hashes, by construction: an id's hash is its number, scrambled by a
multiplication that loses nothing. So no token of a 12,000-token prompt is ever made, and a hit, which
compares contents, compares exactly what the ids say.
What is generated gets contents too: where the next request of the session goes on from this one, the blocks
that its prompt names, so that it finds the answer cached; else blocks that nobody ever asks for.
Knows ids, hashes and text; knows neither replicas nor time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.block_hash import BlockHasher, ExtraKeys
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.types import BlockHash, RequestId
from loadtest.workloads.request import Workload, WorkRequest

CHARS_PER_TOKEN = 4  # of English under today's tokenizers
_WORD_CHARS = 16

if TYPE_CHECKING:
    _IntArray = array[int]
else:
    _IntArray = array  # Python 3.11's cannot be subscripted

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: odd, so that multiplying loses nothing


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request of the workload, as the cluster handles it."""

    index: int  # in order of arrival, from 0
    request_id: RequestId
    work: WorkRequest
    block_hashes: list[BlockHash]  # of the full blocks of prompt and answer
    prompt: TurnPrompt

    @property
    def is_copy(self) -> bool:
        """No request: see `copy_turn`."""
        return self.index == COPY


COPY = -1  # the index of a turn that is no request of the workload


def copy_turn(request_id: RequestId, num_tokens: int, block_hashes: Sequence[BlockHash], at_s: float) -> Turn:
    """A hot prefix that a router has computed once more, and that nobody asked for."""
    work = WorkRequest(at_s, num_tokens, 1, (), session=COPY)
    return Turn(COPY, request_id, work, list(block_hashes), TurnPrompt((), 0, 0, 0, None))


@dataclass(frozen=True, slots=True, eq=False)
class TurnPrompt:
    """A prompt's text, made when asked for: each block a word of its own, repeated to its length.

    Prompts share text exactly as far as they share blocks; an answer's text goes on where its prompt ends.
    """

    words: Sequence[int]  # one number per block, a partial last one included
    num_chars: int
    block_chars: int
    head_blocks: int  # leading blocks that other sessions have too: their system prompt
    session: str | None

    @property
    def text(self) -> str:
        return self._from(0)

    @property
    def first_user_text(self) -> str:
        """What follows the system prompt; all of it where nothing does."""
        return self._from(self.head_blocks if self.head_blocks < len(self.words) else 0)

    def _from(self, first_block: int) -> str:
        repeats = -(-self.block_chars // _WORD_CHARS)
        pieces = [(f"{_scrambled(word):015x}"[:15] + " ") * repeats for word in self.words[first_block:]]
        text = "".join([piece[: self.block_chars] for piece in pieces])
        return text[: self.num_chars - first_block * self.block_chars]


class TurnTokens(_IntArray):
    """A sequence of tokens that has the right length, grows like any other, and is known by its blocks.

    The numbers themselves are all zero and one byte each: nobody reads them.
    """

    block_hashes: Sequence[BlockHash]

    @classmethod
    def of(cls, num_tokens: int, block_hashes: Sequence[BlockHash]) -> TurnTokens:
        """block_hashes: of every block that the sequence will ever fill."""
        tokens = cls("b", bytes(num_tokens))
        tokens.block_hashes = block_hashes
        return tokens


class TurnHasher(BlockHasher):
    """The hash rule's stand-in: a block's hash is what its turn says. Everything else is production's."""

    __slots__ = ()

    def extend(
        self,
        parent: BlockHash,
        token_ids: array[int],
        first_block: int,
        last_block: int,
        extra_keys: ExtraKeys | None = None,
    ) -> list[BlockHash]:
        assert isinstance(token_ids, TurnTokens), "the simulation hashes only its own tokens"
        return list(token_ids.block_hashes[first_block:last_block])

    def contents(self, token_ids: array[int], first_block: int, last_block: int) -> list[bytes]:
        assert isinstance(token_ids, TurnTokens), "the simulation compares only its own tokens"
        return list(token_ids.block_hashes[first_block:last_block])  # injective, so as good as the tokens


def fingerprint(block_tokens: int) -> Fingerprint:
    """What routers and replicas of the simulation agree on."""
    return Fingerprint("simulated", "", "simulated", "", block_tokens, HashAlgorithm.XXH3_128)


def make_turns(workload: Workload) -> list[Turn]:
    """Every request with its blocks' hashes. O(blocks)."""
    contents = name_contents(workload)
    heads = _head_blocks(workload)
    hashes: dict[int, BlockHash] = {}  # one object per number: many blocks of many replicas refer to it
    size = workload.block_tokens
    turns: list[Turn] = []
    for index, work in enumerate(workload.requests):
        for number in contents.blocks[index]:
            if number not in hashes:
                hashes[number] = _block_hash(number)
        turns.append(
            Turn(
                index=index,
                request_id=RequestId(str(index)),
                work=work,
                block_hashes=[hashes[number] for number in contents.blocks[index]],
                prompt=TurnPrompt(
                    words=contents.prompts[index],
                    num_chars=work.input_tokens * CHARS_PER_TOKEN,
                    block_chars=size * CHARS_PER_TOKEN,
                    head_blocks=heads[index],
                    session=str(work.session),
                ),
            )
        )
    return turns


@dataclass(frozen=True, slots=True)
class Contents:
    """What each request's blocks hold, as numbers: equal numbers, equal prefixes."""

    blocks: list[list[int]]  # per request its full blocks, of prompt and answer
    prompts: list[list[int]]  # per request its prompt's blocks, a partial last one included
    texts: list[list[int]]  # per request those of prompt and answer, a partial last one included


def name_contents(workload: Workload) -> Contents:
    """Numbers for all blocks, those that answers fill included. O(blocks)."""
    numbers = _Numbers()
    chains = [[numbers.of(block_id) for block_id in work.block_ids] for work in workload.requests]
    following = _next_turns(workload, chains)
    size = workload.block_tokens
    blocks: list[list[int]] = [[] for _ in chains]
    prompts: list[list[int]] = [[] for _ in chains]
    texts: list[list[int]] = [[] for _ in chains]
    # Backwards, for an answer is named by the turn that comes after it.
    for index in range(len(chains) - 1, -1, -1):
        work, chain, after = workload.requests[index], chains[index], following[index]
        num_full = work.input_tokens // size
        num_blocks = (work.input_tokens + work.output_tokens) // size
        # [0, full) the prompt's own   [full, end) what the next turn calls it, or nobody
        own = chain[:num_full]
        num_begun = -(-(work.input_tokens + work.output_tokens) // size)
        if after is None:
            blocks[index] = own + [numbers.fresh() for _ in range(num_blocks - num_full)]
            prompts[index] = chain
            texts[index] = chain + [numbers.fresh() for _ in range(num_begun - len(chain))]
        else:
            blocks[index] = own + chains[after][num_full:num_blocks]
            prompts[index] = own + prompts[after][num_full : len(chain)]
            texts[index] = own + texts[after][num_full:num_begun]
    return Contents(blocks, prompts, texts)


class _Numbers:
    """Block ids in order of first sight, and after them numbers for what no id names."""

    def __init__(self) -> None:
        self._by_id: dict[int, int] = {}
        self._num_fresh = 0

    def of(self, block_id: int) -> int:
        return self._by_id.setdefault(block_id, len(self._by_id))

    def fresh(self) -> int:
        self._num_fresh += 1
        return (1 << 40) + self._num_fresh


def _block_hash(number: int) -> BlockHash:
    return BlockHash(_scrambled(number).to_bytes(8, "little") + number.to_bytes(8, "little"))


def _scrambled(number: int) -> int:
    """A 64-bit number for each number below 2^64, no two alike, all bits in use."""
    return (number + 1) * _MULTIPLIER & _MASK


def _next_turns(workload: Workload, chains: Sequence[Sequence[int]]) -> list[int | None]:
    """Per request the first later one of its session whose prompt holds its whole prompt and answer.

    Of several answers to a prompt the first is taken to be the one that is gone on from.
    """
    size = workload.block_tokens
    later: dict[int, list[int]] = {}  # session -> its requests after this one, latest first
    following: list[int | None] = [None] * len(chains)
    for index in range(len(chains) - 1, -1, -1):
        work = workload.requests[index]
        own = chains[index][: work.input_tokens // size]
        total = work.input_tokens + work.output_tokens
        candidates = later.setdefault(work.session, [])
        for candidate in () if work.branch else reversed(candidates):
            if workload.requests[candidate].input_tokens >= total and _begins(chains[candidate], own):
                following[index] = candidate
                break
        candidates.append(index)
    return following


def _begins(chain: Sequence[int], prefix: Sequence[int]) -> bool:
    # A block's id names all before it, so the last one decides.
    return not prefix or chain[len(prefix) - 1] == prefix[-1]


def _head_blocks(workload: Workload) -> list[int]:
    """Per request its leading blocks that requests of other sessions have too."""
    session_of: dict[int, int] = {}
    shared: set[int] = set()
    for work in workload.requests:
        for block_id in work.block_ids:
            if session_of.setdefault(block_id, work.session) != work.session:
                shared.add(block_id)
    heads = []
    for work in workload.requests:
        head = 0
        while head < len(work.block_ids) and work.block_ids[head] in shared:
            head += 1
        heads.append(head)
    return heads
