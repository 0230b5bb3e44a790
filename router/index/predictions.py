"""What routed prompts will leave in the caches, for a few seconds: one path in a tree per prediction.

A prediction covers its whole chain from block 0 with one expiry, so what is predicted of a replica is closed
under parents whatever events say meanwhile, and making one costs a step per branch on its path, not one per
block. A node counts the predictions that go through it, by member; it loses the member with the last.

Knows 64-bit hints, member numbers and expiries; knows neither replicas' names nor events.
Owner: the router's event loop.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence

from router.index.radix_tree import Node, RadixTree

PREDICTION_BYTES = 250  # its entry in both orders, beside its nodes
LEAVING_PER_CALL = 64  # predictions of departed members ended with each expiry: about 0.2 ms


class _Prediction:
    """One routed prompt, and its twins."""

    __slots__ = ("expires_at", "last", "member", "node")

    def __init__(self, member: int, last: int, node: Node[int], expires_at: float) -> None:
        self.member = member
        self.last = last  # its last hint, which names the whole chain
        self.node = node  # where it ends
        self.expires_at = expires_at


class Predictions:
    """Live predictions of every member, soonest expiry first."""

    def __init__(self, max_blocks: int) -> None:
        """max_blocks: of one member; beyond it the oldest predictions end early."""
        self._max_blocks = max_blocks
        self._tree: RadixTree[int] = RadixTree(lambda count, upper: count)
        self._order: OrderedDict[_Prediction, None] = OrderedDict()
        self._of: dict[int, OrderedDict[int, _Prediction]] = {}  # member -> last hint -> prediction
        self._num_blocks: dict[int, int] = {}  # member -> distinct blocks
        self._leaving: deque[_Prediction] = deque()  # of members that have gone
        self._num_leaving: dict[int, int] = {}  # by member

    # --- questions ----------------------------------------------------------------------------

    def match(self, chain: Sequence[int], members: int) -> list[tuple[int, int]]:
        """As `RadixTree.match`. O(nodes on its path * log(blocks))."""
        return self._tree.match(chain, members)

    def has(self, member: int, last: int) -> bool:
        predictions = self._of.get(member)
        return predictions is not None and last in predictions

    def lasts(self, member: int) -> Collection[int]:
        """The last hint of each of its predictions, oldest first."""
        return self._of.get(member, {}).keys()

    def edges(self) -> list[memoryview[int]]:
        """Every predicted block once, in runs whose blocks follow one another. O(nodes)."""
        return [node.edge for node in self._tree.nodes()]

    def is_clear_of(self, member: int) -> bool:
        """Whether nothing is left of a member that has gone."""
        return member not in self._num_leaving

    def num_bytes(self) -> int:
        total = len(self._order) + len(self._leaving)
        return self._tree.num_bytes() + PREDICTION_BYTES * total

    # --- changes ------------------------------------------------------------------------------

    def predict(self, member: int, chain: Sequence[int], expires_at: float) -> None:
        """Count the chain (not empty) as held until then. A twin of a live prediction renews it.

        Expiries must not fall from call to call. O(nodes on its path * log(blocks)).
        """
        last = chain[-1]
        predictions = self._of.setdefault(member, OrderedDict())
        prediction = predictions.get(last)
        if prediction is not None:
            prediction.expires_at = expires_at
            self._order.move_to_end(prediction)
            predictions.move_to_end(last)
            return
        node = self._tree.extend(chain)
        prediction = _Prediction(member, last, node, expires_at)
        self._order[prediction] = None
        predictions[last] = prediction
        for step in node.path():
            count = step.records.get(member)
            if count is None:
                self._tree.join(step, member, 1)
                self._num_blocks[member] = self._num_blocks.get(member, 0) + len(step.edge)
            else:
                step.records[member] = count + 1
        while self._num_blocks.get(member, 0) > self._max_blocks:
            self._end(next(iter(predictions.values())))

    def end(self, member: int, last: int) -> None:
        """End one prediction. Raises KeyError if there is none."""
        self._end(self._of[member][last])

    def expire(self, now: float) -> None:
        """End predictions whose time has passed, and some of those who have gone. O(those)."""
        order = self._order
        while order:
            prediction = next(iter(order))
            if prediction.expires_at > now:
                break
            self._end(prediction)
        self.let_go()

    def forget(self, member: int) -> None:
        """The member has gone. Some of its predictions end at once, others with the next calls of `expire`;
        until then they match, so ask for the members that are there."""
        predictions = self._of.pop(member, None)
        self._num_blocks.pop(member, None)
        if not predictions:
            return
        for prediction in predictions.values():
            del self._order[prediction]
        self._leaving.extend(predictions.values())
        self._num_leaving[member] = len(predictions)
        self.let_go()

    def let_go(self) -> None:
        """End some of the predictions of members that have gone."""
        for _ in range(min(LEAVING_PER_CALL, len(self._leaving))):
            self._end_leaving(self._leaving.popleft())

    def _end(self, prediction: _Prediction) -> None:
        member = prediction.member
        del self._order[prediction]
        predictions = self._of[member]
        del predictions[prediction.last]
        freed = self._uncount(prediction)
        if predictions:
            self._num_blocks[member] -= freed
        else:
            del self._of[member], self._num_blocks[member]

    def _end_leaving(self, prediction: _Prediction) -> None:
        self._uncount(prediction)
        left = self._num_leaving.pop(prediction.member) - 1
        if left:
            self._num_leaving[prediction.member] = left

    def _uncount(self, prediction: _Prediction) -> int:
        """Take one prediction off its path, tail first. Blocks that its member does not hold any more."""
        tree, member, freed = self._tree, prediction.member, 0
        kept: Node[int] | None = None
        for node in list(prediction.node.path()):
            count = node.records[member]
            if count > 1:
                node.records[member] = count - 1
            else:
                freed += len(node.edge)
                tree.leave(node, member)
            if kept is None and node.members:
                kept = node
        # Where the path branched and nobody branches off or ends any more, it is one edge again: else a
        # hot prefix would end up as one node per block, and every match would walk them.
        if kept is not None and len(kept.children) == 1:
            (child,) = kept.children.values()
            if child.records == kept.records:
                tree.fuse(kept)
        return freed
