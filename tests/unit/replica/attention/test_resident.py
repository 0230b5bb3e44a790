"""What is kept from step to step equals what the pages hold, and is dropped when it would not."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from replica.attention.kv_pages import LayerPages
from replica.attention.resident import HEADROOM_BLOCKS, TURNED_AGE, ResidentDecodes
from replica.attention.step_batch import SHORT_BLOCKS, DecodeGroup, StepBatch
from replica.scheduling.runner import ScheduledSequence
from tests.fakes.steps import BLOCK_SIZE, layer_pages, scheduled, step


@dataclass
class Layer:
    """A layer driven as a backend drives it; tells whether the step's K/V had been kept."""

    pages: LayerPages
    resident: ResidentDecodes
    num_gathers: int = 0
    turns: bool = False

    def decode(self, *sequences: ScheduledSequence) -> tuple[DecodeGroup, torch.Tensor, torch.Tensor]:
        return self.attend(step(*sequences))

    def attend(
        self, batch: StepBatch, reaches_attention: bool = True
    ) -> tuple[DecodeGroup, torch.Tensor, torch.Tensor]:
        key, value = torch.randn(batch.num_tokens, 2, 8), torch.randn(batch.num_tokens, 2, 8)
        self.pages.write(batch, key, value)
        group = batch.decode_groups(None)[0]
        if not reaches_attention:
            return group, *self.gathered(group)
        self.resident.begin(batch)
        rows = slice(group.first_row, group.first_row + group.size)
        age = self.resident.age_of(batch, None, 0)
        kept = self.resident.added(self.pages, age, 0, key[rows], value[rows], turns=self.turns)
        if kept is not None:
            return group, *kept
        self.num_gathers += 1
        gathered = self.gathered(group)
        self.resident.keep(self.pages, age, 0, *gathered)
        return group, *gathered

    def gathered(self, group: DecodeGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """The truth: what the pages hold now."""
        keys, values = (
            pages[group.block_ids].view(group.size, -1, 2, 8).transpose(1, 2)[:, :, : group.length]
            for pages in (self.pages.keys, self.pages.values)
        )
        return keys, values

    def prefill(self, name: str, table: list[int], start: int, count: int) -> None:
        batch = step(scheduled(name, table, start, count))
        self.pages.write(batch, torch.randn(count, 2, 8), torch.randn(count, 2, 8))
        self.resident.begin(batch)


def new_layer(max_bytes: int = 1 << 20, *, turns: bool = False) -> Layer:
    torch.manual_seed(3)
    return Layer(layer_pages(num_blocks=40), ResidentDecodes(max_bytes), turns=turns)


def assert_in_sight_equal(layer: Layer, seen: tuple[DecodeGroup, torch.Tensor, torch.Tensor]) -> None:
    """Each row's own keys equal the pages'; what is beyond them is finite (it is masked)."""
    group, *kept = seen
    for now, truth in zip(kept, layer.gathered(group), strict=True):
        for row, place in enumerate(group.places.tolist()):
            assert torch.equal(now[row, :, : place + 1], truth[row, :, : place + 1])
        assert now.isfinite().all()


@pytest.mark.parametrize("turns", [False, True])
def test_a_group_that_stays_together_is_gathered_twice_and_then_only_grows(turns: bool) -> None:
    layer = new_layer(turns=turns)
    tables = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [11, 12, 13, 14, 15, 16, 17]}
    layer.prefill("a", tables["a"], 0, 6)
    layer.prefill("b", tables["b"], 0, 3)
    for index in range(12):
        a, b = 6 + index, 3 + index
        seen = layer.decode(
            scheduled("a", tables["a"][: a // BLOCK_SIZE + 1], a, 1),
            scheduled("b", tables["b"][: b // BLOCK_SIZE + 1], b, 1),
        )
        assert_in_sight_equal(layer, seen)
    assert layer.num_gathers == 2


def test_a_block_that_gives_way_to_its_twin_is_gathered_from_where_the_table_points() -> None:
    """Merging rewrites a table between steps, and whoever gets the old block writes over it."""
    layer, table = new_layer(), [1, 2, 3, 4]
    layer.prefill("a", table, 0, 8)
    for start in range(8, 11):
        layer.decode(scheduled("a", table, start, 1))
    layer.prefill("twin", [11, 12], 0, 8)  # other values, so that a stale one shows
    table[1] = 12
    layer.prefill("b", [2], 0, 4)
    for start in range(11, 14):
        assert_in_sight_equal(layer, layer.decode(scheduled("a", table, start, 1)))


def test_a_group_that_stays_through_a_merge_is_not_gathered_from_the_old_block() -> None:
    """As above, without a step in between that computes something else."""
    layer, table = new_layer(), [1, 2, 3, 4]
    layer.prefill("twin", [11, 12], 0, 8)
    layer.prefill("a", table, 0, 8)
    for start in range(8, 11):
        layer.decode(scheduled("a", table, start, 1))
    table[1] = 12
    for start in range(11, 14):
        assert_in_sight_equal(layer, layer.decode(scheduled("a", table, start, 1)))


@pytest.mark.parametrize("turns", [False, True])
def test_a_group_that_outgrows_its_room_is_moved_and_not_gathered_again(turns: bool) -> None:
    layer = new_layer(turns=turns)
    table = list(range(30))
    layer.prefill("a", table, 0, 4)
    for start in range(4, 100):
        assert_in_sight_equal(layer, layer.decode(scheduled("a", table[: start // 4 + 1], start, 1)))
    assert layer.num_gathers == 2


class Layers:
    """Those of one backend, all given the same steps; tells what each step got of each."""

    def __init__(self, count: int, *, turns: bool, max_bytes: int = 1 << 20) -> None:
        first = new_layer(max_bytes, turns=turns)
        others = [Layer(layer_pages(40), first.resident, turns=turns) for _ in range(count - 1)]
        self.layers = [first, *others]

    def decode(self, name: str, stop: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """A sequence from its fifth token on, step by step and layer by layer."""
        self._attend(step(scheduled(name, [0], 0, 4)))
        table = list(range(stop // 4 + 1))
        return [self._attend(step(scheduled(name, table[: s // 4 + 1], s, 1))) for s in range(4, stop)]

    def _attend(self, batch: StepBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
        seen = []
        for layer in self.layers:
            if batch.num_decodes:
                group, keys, values = layer.attend(batch)
                assert_in_sight_equal(layer, (group, keys, values))
                seen.append((keys, values))
            else:
                count = batch.num_tokens
                layer.pages.write(batch, torch.randn(count, 2, 8), torch.randn(count, 2, 8))
                layer.resident.begin(batch)
        return seen


@pytest.mark.parametrize("turns", [False, True])
def test_layers_are_moved_one_after_the_other_and_all_to_the_same_room(turns: bool) -> None:
    """A step that moves them all would be the slow one of fifty; different rooms cost each step a little."""
    layers = Layers(3, turns=turns)
    for name in ("a", "another"):
        rooms = [tuple(keys.shape[2] for keys, _ in seen) for seen in layers.decode(name, 60)][1:]
        for before, now in pairwise(rooms[1:]):
            assert sum(old != new for old, new in zip(before, now, strict=True)) <= 1
        settled = {each for each in rooms if len(set(each)) == 1}
        assert sum(each in settled for each in rooms) > len(rooms) * 3 // 4
        assert len(settled) > 2


def test_keys_are_turned_where_asked_for_one_layer_after_the_other() -> None:
    layers = Layers(3, turns=True)
    for name in ("a", "another"):
        seen = layers.decode(name, 16)
        turned = [sum(keys.mT.is_contiguous() for keys, _ in each) for each in seen]
        assert turned[:TURNED_AGE] == [0] * TURNED_AGE
        assert all(now - before in (0, 1) for before, now in pairwise(turned))
        assert turned[-1] == 3
        assert all(values.is_contiguous() for each in seen[2:] for _, values in each)


@pytest.mark.parametrize("turns", [False, True])
def test_groups_one_after_the_other_live_in_the_same_memory(turns: bool) -> None:
    """Fresh memory costs a step more than the copy into it."""
    layers = Layers(3, turns=turns)
    first = {keys.data_ptr() for seen in layers.decode("a", 60)[2:] for keys, _ in seen}
    again = {keys.data_ptr() for seen in layers.decode("another", 60)[2:] for keys, _ in seen}
    assert again <= first


@pytest.mark.parametrize("turns", [False, True])
def test_the_memory_behind_what_is_kept_is_within_the_bound(turns: bool) -> None:
    """Also what was taken so that it can grow, and pieces that others have left. All of it is kept."""
    max_bytes = 32_000
    layers = Layers(3, turns=turns, max_bytes=max_bytes)
    for name in ("a", "another"):
        before = sum(layer.num_gathers for layer in layers.layers)
        for seen in layers.decode(name, 60)[2:]:
            sides = (side for each in seen for side in each)
            assert sum(side.untyped_storage().nbytes() for side in sides) <= max_bytes
        assert sum(layer.num_gathers for layer in layers.layers) - before == 2 * 3


@pytest.mark.parametrize("turns", [False, True])
def test_where_there_is_no_more_room_it_is_gathered_again(turns: bool) -> None:
    """Room for a group of one block and what it may grow by, and no more."""
    layer = new_layer(max_bytes=2 * (1 + HEADROOM_BLOCKS) * BLOCK_SIZE * 2 * 8 * 4, turns=turns)
    layer.prefill("a", [1], 0, 1)
    for start in range(1, 40):
        assert_in_sight_equal(layer, layer.decode(scheduled("a", list(range(1, start // 4 + 2)), start, 1)))
    num_kept = (1 + HEADROOM_BLOCKS) * BLOCK_SIZE - 3  # from the third step up to the last place
    assert layer.num_gathers == 39 - num_kept


def test_a_joining_sequence_makes_another_group() -> None:
    layer = new_layer()
    layer.prefill("a", [1, 2, 3], 0, 4)
    layer.prefill("b", [4, 5, 6], 0, 4)
    for start in (4, 5, 6):
        layer.decode(scheduled("a", [1, 2], start, 1))
    assert layer.num_gathers == 2
    seen = layer.decode(scheduled("a", [1, 2], 7, 1), scheduled("b", [4, 5], 4, 1))
    assert_in_sight_equal(layer, seen)
    assert layer.num_gathers == 3


def test_a_pause_ends_it_even_if_the_same_ids_come_back_in_the_same_blocks() -> None:
    """Another request under an old id, in blocks written anew: nothing of the old one may be seen."""
    layer = new_layer()
    layer.prefill("a", [1, 2, 3], 0, 4)
    for start in (4, 5, 6):
        layer.decode(scheduled("a", [1, 2], start, 1))
    layer.prefill("a", [1, 2, 3], 0, 7)  # the same id, other content, up to just where the old one stood
    assert_in_sight_equal(layer, layer.decode(scheduled("a", [1, 2], 7, 1)))
    assert layer.num_gathers == 3


def test_a_step_computed_again_is_gathered_again() -> None:
    """The step failed after this layer: the same tokens are computed once more."""
    layer = new_layer()
    layer.prefill("a", [1, 2, 3], 0, 4)
    for start in (4, 5, 6, 6):
        assert_in_sight_equal(layer, layer.decode(scheduled("a", [1, 2], start, 1)))
    assert layer.num_gathers == 3


def test_a_layer_that_a_failed_step_did_not_reach_is_gathered_again() -> None:
    """Layers before the failure have the step's rows, this one has not: it must not skip a place."""
    layer = new_layer()
    late = Layer(layer_pages(num_blocks=40), layer.resident)
    layer.prefill("a", [1, 2, 3], 0, 4)
    late.pages.keys.copy_(layer.pages.keys)
    late.pages.values.copy_(layer.pages.values)
    for start in (4, 5, 6, 7):
        batch = step(scheduled("a", [1, 2], start, 1))
        for each in (layer, late):
            seen = each.attend(batch, reaches_attention=each is layer or start != 6)
            assert_in_sight_equal(each, seen)
    assert (layer.num_gathers, late.num_gathers) == (2, 3)


def test_what_does_not_fit_is_gathered_every_time() -> None:
    layer = new_layer(max_bytes=1)
    layer.prefill("a", [1, 2, 3], 0, 4)
    for start in range(4, 9):
        assert_in_sight_equal(layer, layer.decode(scheduled("a", [1, 2, 3], start, 1)))
    assert layer.num_gathers == 5


def test_groups_that_are_no_more_make_room() -> None:
    """Room for one group's copy: a later group gets it."""
    one_group = 2 * (1 + HEADROOM_BLOCKS) * BLOCK_SIZE * 2 * 8 * 4
    layer = new_layer(max_bytes=one_group)
    layer.prefill("a", [1], 0, 1)
    for start in (1, 2, 3):
        layer.decode(scheduled("a", [1], start, 1))
    assert layer.num_gathers == 2
    other = Layer(layer_pages(num_blocks=40), layer.resident)
    other.prefill("b", [2], 0, 1)
    for start in (1, 2, 3):
        assert_in_sight_equal(other, other.decode(scheduled("b", [2], start, 1)))
    assert other.num_gathers == 2


def test_a_group_that_does_not_fit_leaves_those_behind_it_what_they_keep() -> None:
    """Room for the second group's copy alone: the first asks for room in each step, before the second."""
    num_steps, length = 8, (SHORT_BLOCKS + 1) * BLOCK_SIZE
    resident = ResidentDecodes(2 * (SHORT_BLOCKS + 2 + HEADROOM_BLOCKS) * BLOCK_SIZE * 2 * 8 * 4)
    pages = layer_pages(num_blocks=40)
    kept = []
    for start in range(num_steps):
        short = [scheduled(f"short {index}", [index] * 3, start, 1) for index in range(12)]
        long = scheduled("long", list(range(12, 12 + SHORT_BLOCKS + 4)), length + start, 1)
        batch = step(*short, long)
        resident.begin(batch)
        for index, group in enumerate(batch.decode_groups(None)):
            age = resident.age_of(batch, None, index)
            new = torch.zeros(group.size, 2, 8)
            if resident.added(pages, age, index, new, new, turns=False) is not None:
                kept.append(index)
                continue
            gathered = torch.zeros(group.size, 2, group.length, 8)
            resident.keep(pages, age, index, gathered, gathered)
    assert kept == [1] * (num_steps - 2)
