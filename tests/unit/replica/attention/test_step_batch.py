"""A step's metadata, worked out by hand. Blocks have four slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replica.attention import step_batch
from replica.scheduling.layer_span import LayerSpan
from tests.fakes.steps import scheduled, step

INF = float("inf")


def test_decodes_come_first_shortest_first_and_prefills_after() -> None:
    batch = step(
        scheduled("long prefill", [7, 8], 2, 4),
        scheduled("long decode", [1, 2, 3], 9, 1),
        scheduled("short decode", [5], 3, 1),
    )
    assert batch.order == [2, 1, 0]
    assert batch.num_decodes == 2
    assert batch.num_tokens == 6
    assert batch.positions.tolist() == [[3, 9, 2, 3, 4, 5]]
    assert batch.input_ids.tolist() == [[103, 109, 102, 103, 104, 105]]
    assert batch.slots.tolist() == [5 * 4 + 3, 3 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 8 * 4, 8 * 4 + 1]
    assert batch.last_rows.tolist() == [0, 1, 5]


def test_a_prompt_of_one_token_is_a_decode_without_context() -> None:
    batch = step(scheduled("one", [3], 0, 1))
    (group,) = batch.decode_groups(None)
    assert (group.size, group.length, group.places.tolist()) == (1, 1, [0])
    assert group.bias is None
    assert batch.opened_blocks is not None
    assert batch.opened_blocks.tolist() == [3]


@pytest.mark.parametrize(
    ("start", "num_new", "opened"),
    [
        (0, 4, None),  # fills block 0
        (0, 5, [11]),  # fills block 0, opens block 1
        (4, 1, [11]),  # a decode at a block's first slot
        (5, 1, None),  # inside a block that was opened before
        (5, 2, None),
        (5, 3, None),  # fills what was open
        (5, 5, [12]),  # fills it, opens the next and leaves it open
        (2, 6, None),  # ends with a block
    ],
)
def test_blocks_opened_and_not_filled_are_named(start: int, num_new: int, opened: list[int] | None) -> None:
    batch = step(scheduled("s", [10, 11, 12], start, num_new))
    assert (None if batch.opened_blocks is None else batch.opened_blocks.tolist()) == opened


def test_layers_that_are_given_the_decodes_alone_write_theirs_alone() -> None:
    batch = step(
        scheduled("decode", [1], 0, 1), scheduled("prefill", [3, 4], 4, 2), scheduled("d", [2], 2, 1)
    )
    (all_opened, all_slots), (opened, slots) = batch.written_by(4), batch.written_by(2)
    assert all_opened is not None
    assert opened is not None
    assert (all_opened.tolist(), opened.tolist()) == ([1, 4], [1])
    assert (all_slots.tolist(), slots.tolist()) == ([4, 10, 16, 17], [4, 10])


@pytest.mark.parametrize(("end", "last_rows"), [(2, [0, 1, 1]), (3, [0, 1, 3])])
def test_who_is_not_through_all_layers_has_no_last_row(end: int, last_rows: list[int]) -> None:
    """It is given another's, which nobody draws from."""
    part = replace(scheduled("part", [3, 4], 4, 2), layers=LayerSpan(1, end, 3))
    batch = step(scheduled("a", [1], 1, 1), scheduled("b", [2], 2, 1), part)
    assert batch.last_rows.tolist() == last_rows


def test_equal_lengths_need_no_mask() -> None:
    batch = step(scheduled("a", [1, 2], 5, 1), scheduled("b", [3, 4], 5, 1))
    (group,) = batch.decode_groups(None)
    assert group.bias is None
    assert group.block_ids.tolist() == [1, 2, 3, 4]
    assert group.length == 6


def test_the_shorter_sequence_is_padded_with_its_own_last_block_and_masked() -> None:
    batch = step(scheduled("long", [1, 2, 3], 8, 1), scheduled("short", [5], 1, 1))
    (group,) = batch.decode_groups(None)
    assert group.block_ids.tolist() == [5, 5, 5, 1, 2, 3]
    assert group.places.tolist() == [1, 8]
    assert group.bias is not None
    assert group.bias.shape == (2, 1, 1, 9)
    assert group.bias[0, 0, 0].tolist() == [0.0, 0.0] + [-INF] * 7
    assert group.bias[1, 0, 0].tolist() == [0.0] * 9


def test_a_window_leaves_blocks_out_of_sight_out() -> None:
    """Position 9 with a window of 3 sees 7, 8, 9: block 1 from its last slot, and block 2."""
    batch = step(scheduled("s", [1, 2, 3], 9, 1))
    (group,) = batch.decode_groups(3)
    assert group.block_ids.tolist() == [2, 3]
    assert group.bias is not None
    assert group.bias[0, 0, 0].tolist() == [-INF, -INF, -INF, 0.0, 0.0, 0.0]
    assert batch.decode_groups(None)[0].block_ids.tolist() == [1, 2, 3]
    assert batch.decode_groups(3) is batch.decode_groups(3)  # built once, for all layers


def test_groups_split_where_padding_would_cost_more_than_a_call() -> None:
    long = step_batch.SHORT_BLOCKS * 4
    tables = [list(range(2)), list(range(long)), list(range(long - 1))]
    batch = step(*[scheduled(str(len(table)), table, len(table) * 4 - 1, 1) for table in tables])
    groups = batch.decode_groups(None)
    assert [(group.first_row, group.size, group.num_blocks) for group in groups] == [(0, 1, 2), (1, 2, long)]


def test_groups_split_at_the_size_of_the_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_batch, "MAX_GROUP_TOKENS", 16)
    batch = step(*[scheduled(str(index), [index, index + 8], 6, 1) for index in range(5)])
    assert [group.size for group in batch.decode_groups(None)] == [2, 2, 1]


def test_a_fresh_prefill_needs_neither_context_nor_mask() -> None:
    (piece,) = step(scheduled("s", [1, 2], 0, 7)).prefill_pieces(None)
    assert (piece.num_context, piece.block_ids, piece.bias) == (0, None, None)


def test_a_prefill_in_the_middle_of_a_block_has_that_block_as_context() -> None:
    batch = step(scheduled("s", [1, 2, 3], 6, 3))
    (piece,) = batch.prefill_pieces(None)
    assert piece.num_context == 6
    assert piece.block_ids is not None
    assert piece.block_ids.tolist() == [1, 2]
    assert piece.bias is None
    rows = batch.causal_bias(piece).tolist()
    assert rows == [[0.0] * 7 + [-INF] * 2, [0.0] * 8 + [-INF], [0.0] * 9]


def test_a_prefill_wider_than_its_window_is_masked_on_both_sides() -> None:
    """Positions 6, 7, 8 with a window of 2; the context begins with the block that holds position 5."""
    (piece,) = step(scheduled("s", [1, 2, 3], 6, 3)).prefill_pieces(2)
    assert piece.num_context == 2  # positions 4 and 5
    assert piece.block_ids is not None
    assert piece.block_ids.tolist() == [2]
    assert piece.bias is not None
    assert piece.bias.tolist() == [
        [-INF, 0.0, 0.0, -INF, -INF],
        [-INF, -INF, 0.0, 0.0, -INF],
        [-INF, -INF, -INF, 0.0, 0.0],
    ]


def test_a_window_that_holds_everything_is_no_window() -> None:
    (piece,) = step(scheduled("s", [1, 2], 2, 4)).prefill_pieces(6)
    assert piece.bias is None
    assert piece.num_context == 2


def test_a_group_continues_only_in_the_same_rows_and_blocks_one_token_later() -> None:
    def group(*decodes: tuple[str, list[int], int]) -> step_batch.DecodeGroup:
        return step(*[scheduled(name, table, start, 1) for name, table, start in decodes]).decode_groups(
            None
        )[0]

    before = group(("a", [1, 2], 6), ("b", [3, 4], 6))
    assert group(("a", [1, 2], 7), ("b", [3, 4], 7)).continues(before)
    after = group(("a", [1, 2], 7), ("b", [3, 4], 7))
    assert group(("a", [1, 2, 5], 8), ("b", [3, 4, 6], 8)).continues(after)  # grown by a block
    assert not group(("a", [1, 2], 6), ("b", [3, 4], 6)).continues(before)  # the same step again
    assert not group(("a", [1, 2, 5], 8), ("b", [3, 4, 6], 8)).continues(before)  # one too many
    assert not group(("a", [1, 2], 7), ("c", [3, 4], 7)).continues(before)  # somebody else
    assert not group(("a", [1, 2], 7), ("b", [3, 9], 7)).continues(before)  # computed anew elsewhere
    assert not group(("a", [1, 2], 7)).continues(before)


def test_a_group_whose_window_moved_on_to_another_block_does_not_continue() -> None:
    before = step(scheduled("a", [1, 2, 3], 10, 1)).decode_groups(4)[0]  # sees 7 to 10
    same = step(scheduled("a", [1, 2, 3], 11, 1)).decode_groups(4)[0]  # 8 to 11: block 1 is out of sight
    assert before.block_ids.tolist() == [2, 3]
    assert same.block_ids.tolist() == [3]
    assert not same.continues(before)


def test_everything_is_int64_and_on_the_device() -> None:
    batch = step(scheduled("s", [1, 2], 2, 4), scheduled("t", [3], 1, 1))
    for tensor in (batch.input_ids, batch.positions, batch.slots, batch.last_rows):
        assert tensor.dtype == torch.int64
        assert tensor.device.type == "cpu"
