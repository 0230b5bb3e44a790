"""One forward's worth of metadata: which tokens, at which positions, into which slots, attending to what.

Built once per step and shared by all layers; what depends on a layer's sliding window is built at
first use and kept. Knows tokens and block tables; knows neither the model nor how attention is done.

Sequences are reordered: first those that compute one token ("decodes", by length, so that neighbours
can share a padded batch), then those that compute more ("prefills", one piece each).

    row    0 .. num_decodes)                       one row per decode
           num_decodes .. num_tokens)              each prefill's rows, contiguous
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cache.types import RequestId
from replica.scheduling.runner import ScheduledSequence
from replica.transfer import to_device

# A group's gathered K/V per layer stays around the size of a cache-friendly scratch buffer.
MAX_GROUP_TOKENS = 1 << 15
# Below this many blocks, padding a short sequence to its neighbour's length is cheaper than another call.
SHORT_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class DecodedSequence:
    """One decode, as the next step needs it to tell whether it sees the same again."""

    request_id: RequestId
    start: int  # position of its newest token
    block_ids: list[int]  # blocks in sight; no two the same, so a window that moved on shows in them


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar length, attended to as one padded batch.

    Rows [first_row, first_row + size) of the step; each sequence's blocks padded to `num_blocks`, of
    whose slots the first `length` are attended to.
    """

    first_row: int
    size: int
    num_blocks: int  # per sequence, after padding
    length: int  # keys of the longest
    block_ids: torch.Tensor  # (size * num_blocks,) int64
    places: torch.Tensor  # (size,) int64: where each newest key stands among its sequence's
    bias: torch.Tensor | None  # (size, 1, 1, length): 0 or -inf; None = every key counts
    sequences: tuple[DecodedSequence, ...]  # who they are, in row order

    def continues(self, before: DecodeGroup) -> bool:
        """Whether these are the sequences of `before`, in the same rows and blocks, one token later."""
        return len(self.sequences) == len(before.sequences) and all(
            new.request_id == old.request_id
            and new.start == old.start + 1
            and new.block_ids[: len(old.block_ids)] == old.block_ids
            for new, old in zip(self.sequences, before.sequences, strict=True)
        )


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """One sequence's new tokens, at least two. Keys `[first_key, start)` are context from the pages.

    rows [first_row, first_row + num_tokens) of the step; row i may see keys up to itself, and in a
    layer with a window only the last `window` of those.
    """

    first_row: int
    num_tokens: int
    num_context: int  # start - first_key: keys gathered before the first new one
    block_ids: torch.Tensor | None  # blocks that hold the context; None = none needed
    bias: torch.Tensor | None  # (num_tokens, num_context + num_tokens): 0 or -inf; None = plain causal


@dataclass(frozen=True, slots=True)
class PlacedSequence:
    """One sequence's new tokens: rows [first_row, first_row + num_new), positions from `start` on."""

    request_id: RequestId
    start: int
    num_new: int
    first_row: int
    block_table: list[int]  # of the whole sequence, from position 0


class StepBatch:
    """Device tensors of a step: `input_ids` and `positions` (1, tokens), `slots` (tokens,), all int64."""

    def __init__(
        self,
        sequences: Sequence[ScheduledSequence],
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        order = sorted(
            range(len(sequences)),
            key=lambda index: (sequences[index].num_new_tokens > 1, sequences[index].start),
        )
        self.block_size = block_size
        self._device, self._dtype = device, dtype
        self.sequences: list[PlacedSequence] = []  # in row order, decodes first
        self.order = order  # indices into `sequences`, in row order
        last_rows: list[int] = []
        row = 0
        for index in order:
            item = sequences[index]
            self.sequences.append(
                PlacedSequence(item.request_id, item.start, item.num_new_tokens, row, item.block_table)
            )
            row += item.num_new_tokens
            # One that is not through all layers has none yet: any that is there.
            last_rows.append(row - 1 if item.layers is None or item.layers.is_last else last_rows[-1])
        self.num_tokens = row
        self.num_decodes = sum(sequence.num_new == 1 for sequence in self.sequences)
        packed = np.empty((3, row), dtype=np.int64)
        self._fill(packed, [sequences[index] for index in order])
        self._packed = to_device(packed, device)
        self.input_ids, self.positions, self.slots = self._packed[0:1], self._packed[1:2], self._packed[2]
        # Each sequence's last row, drawn from or not: NaN anywhere in its new tokens shows there.
        self.last_rows = to_device(np.array(last_rows, dtype=np.int64), device)
        self.opened_blocks = self._opened_blocks(self.sequences)
        self._written_by_decodes: tuple[torch.Tensor | None, torch.Tensor] | None = None
        self._decode_groups: dict[int | None, list[DecodeGroup]] = {}
        self._prefill_pieces: dict[int | None, list[PrefillPiece]] = {}
        self._causal_biases: dict[tuple[int, int], torch.Tensor] = {}

    def put_tokens(self, rows: Sequence[int], tokens: torch.Tensor) -> None:
        """Token ids of some rows, known on the device alone: (rows,) int64."""
        self._packed[0].index_copy_(0, to_device(np.array(rows, dtype=np.int64), self._device), tokens)

    def refill(self, packed: torch.Tensor) -> None:
        """In place: other token ids, positions and slots of as many rows, (3, tokens) int64 on the device.

        Only what kernels read of the step changes; its sequences, groups and pieces are those before.
        """
        self._packed.copy_(packed)

    def _fill(
        self, packed: np.ndarray[tuple[int, int], np.dtype[np.int64]], ordered: list[ScheduledSequence]
    ) -> None:
        """Token ids, positions and slots of every row."""
        size, decodes = self.block_size, self.num_decodes
        if decodes:
            starts = [item.start for item in ordered[:decodes]]
            packed[0, :decodes] = [
                item.token_ids[item.start] if item.drawn_by is None else 0 for item in ordered[:decodes]
            ]
            packed[1, :decodes] = starts
            packed[2, :decodes] = [
                item.block_table[item.start // size] * size + item.start % size for item in ordered[:decodes]
            ]
        for item, place in zip(ordered[decodes:], self.sequences[decodes:], strict=True):
            start, stop = item.start, item.start + item.num_new_tokens
            rows = slice(place.first_row, place.first_row + item.num_new_tokens)
            packed[0, rows] = item.token_ids[start:stop]
            positions = np.arange(start, stop)
            packed[1, rows] = positions
            first_block = start // size
            table = np.asarray(item.block_table[first_block : (stop - 1) // size + 1], dtype=np.int64)
            packed[2, rows] = table[positions // size - first_block] * size + positions % size

    def _opened_blocks(self, sequences: Sequence[PlacedSequence]) -> torch.Tensor | None:
        """Blocks whose first slot these write and whose last they do not, (blocks,) int64; None: none."""
        size = self.block_size
        opened = []
        for sequence in sequences:
            end = sequence.start + sequence.num_new
            if end % size and end - end % size >= sequence.start:
                opened.append(sequence.block_table[end // size])
        return to_device(np.array(opened), self._device) if opened else None

    def written_by(self, num_rows: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What a layer opens and which slots it writes that is given so many rows: all, or the decodes' alone
        (`layered_part.py`)."""
        if num_rows == self.num_tokens:
            return self.opened_blocks, self.slots
        assert num_rows == self.num_decodes, "neither all rows nor those of the decodes"
        written = self._written_by_decodes
        if written is None:
            opened = self._opened_blocks(self.sequences[: self.num_decodes])
            written = self._written_by_decodes = (opened, self.slots[: self.num_decodes])
        return written

    def decode_groups(self, window: int | None) -> list[DecodeGroup]:
        """How layers with this window (tokens; None = unlimited) attend in the decodes."""
        groups = self._decode_groups.get(window)
        if groups is None:
            groups = self._decode_groups[window] = self._build_decode_groups(window)
        return groups

    def prefill_pieces(self, window: int | None) -> list[PrefillPiece]:
        """How layers with this window (tokens; None = unlimited) attend in the prefills."""
        pieces = self._prefill_pieces.get(window)
        if pieces is None:
            prefills = self.sequences[self.num_decodes :]
            pieces = self._prefill_pieces[window] = [
                self._build_piece(sequence, window) for sequence in prefills
            ]
        return pieces

    # -- decodes ----------------------------------------------------------------------------------

    def _build_decode_groups(self, window: int | None) -> list[DecodeGroup]:
        decodes = self.sequences[: self.num_decodes]
        spans = [self._block_span(sequence, window) for sequence in decodes]
        groups, first = [], 0
        while first < len(decodes):
            last = self._end_of_group(spans, first)
            groups.append(self._build_group(decodes, spans, first, last, window))
            first = last
        return groups

    def _block_span(self, sequence: PlacedSequence, window: int | None) -> tuple[int, int]:
        """Blocks [first, last) of the table that hold keys the sequence's newest token may see."""
        end = sequence.start // self.block_size + 1
        return (max(0, sequence.start + 1 - window) // self.block_size if window else 0), end

    def _end_of_group(self, spans: list[tuple[int, int]], first: int) -> int:
        """Grow the group while padding stays cheap: at most twice the shortest, at most the scratch size."""
        shortest = widest = spans[first][1] - spans[first][0]
        last = first + 1
        while last < len(spans):
            blocks = spans[last][1] - spans[last][0]
            new_widest, new_shortest = max(widest, blocks), min(shortest, blocks)
            too_large = (last - first + 1) * new_widest * self.block_size > MAX_GROUP_TOKENS
            too_ragged = new_widest > SHORT_BLOCKS and new_widest > 2 * new_shortest
            if too_large or too_ragged:
                break
            widest, shortest, last = new_widest, new_shortest, last + 1
        return last

    def _build_group(
        self,
        decodes: list[PlacedSequence],
        spans: list[tuple[int, int]],
        first: int,
        last: int,
        window: int | None,
    ) -> DecodeGroup:
        size, block_size = last - first, self.block_size
        num_blocks = max(end - begin for begin, end in spans[first:last])
        padded: list[int] = []
        members: list[DecodedSequence] = []
        low, high = np.empty((size, 1), dtype=np.int64), np.empty((size, 1), dtype=np.int64)
        for index, (sequence, (begin, end)) in enumerate(
            zip(decodes[first:last], spans[first:last], strict=True)
        ):
            blocks = sequence.block_table[begin:end]
            members.append(DecodedSequence(sequence.request_id, sequence.start, blocks))
            padded += blocks
            padded += blocks[-1:] * (num_blocks - len(blocks))  # masked; its own, so never another's NaN
            high[index] = sequence.start + 1 - begin * block_size
            low[index] = max(0, sequence.start + 1 - window - begin * block_size) if window else 0
        length = int(high.max())
        slots = np.arange(length)[None]
        keep = (slots < high) & (slots >= low)
        everything = bool(keep.all())
        return DecodeGroup(
            first_row=first,
            size=size,
            num_blocks=num_blocks,
            length=length,
            places=to_device(high[:, 0] - 1, self._device),
            sequences=tuple(members),
            block_ids=to_device(np.array(padded, dtype=np.int64), self._device),
            bias=None if everything else self._as_bias(to_device(keep, self._device)[:, None, None, :]),
        )

    # -- prefills ---------------------------------------------------------------------------------

    def _build_piece(self, sequence: PlacedSequence, window: int | None) -> PrefillPiece:
        start, count = sequence.start, sequence.num_new
        if window is not None and start + count <= window:
            window = None  # nothing is out of sight yet
        first_block = max(0, start + 1 - window) // self.block_size if window else 0
        first_key = min(first_block * self.block_size, start)
        blocks = sequence.block_table[first_block : -(-start // self.block_size)] if start > first_key else []
        return PrefillPiece(
            first_row=sequence.first_row,
            num_tokens=count,
            num_context=start - first_key,
            block_ids=to_device(np.array(blocks, dtype=np.int64), self._device) if blocks else None,
            bias=self._window_bias(start, count, first_key, window) if window else None,
        )

    def _window_bias(self, start: int, count: int, first_key: int, window: int) -> torch.Tensor:
        queries = torch.arange(start, start + count, device=self._device)[:, None]
        keys = torch.arange(first_key, start + count, device=self._device)[None]
        return self._as_bias((keys <= queries) & (keys > queries - window))

    def causal_bias(self, piece: PrefillPiece) -> torch.Tensor:
        """A piece's plain causal mask as numbers to add, for kernels that take no causal offset."""
        key = (piece.first_row, piece.num_context)  # the context is shorter in layers with a window
        bias = self._causal_biases.get(key)
        if bias is None:
            queries = torch.arange(piece.num_tokens, device=self._device)[:, None]
            keys = torch.arange(-piece.num_context, piece.num_tokens, device=self._device)[None]
            bias = self._causal_biases[key] = self._as_bias(keys <= queries)
        return bias

    def _as_bias(self, keep: torch.Tensor) -> torch.Tensor:
        # SDPA would turn a boolean mask into this once per layer; once per step is enough.
        return torch.zeros(keep.shape, dtype=self._dtype, device=self._device).masked_fill_(
            ~keep, float("-inf")
        )
