"""What `passing.c` is to Python: the loop of `router.placement.passing.Passing.interpreted`, to the last bit.

Raises OverflowError where a number of tokens that one request or a step may have does not fit into 31 bits.
"""

from collections.abc import Callable, Sequence

from cache.types import HashHint, ReplicaId
from router.placement.replica_queue import ReplicaQueue
from router.pricing.cost import Price
from router.pricing.replica_state import ReplicaState

def met_by(
    states: Sequence[ReplicaState],
    cached: Sequence[int],
    passable: dict[ReplicaId, ReplicaQueue],
    hints: Sequence[HashHint],
    tenant: str,
    share: float,
    num_prompt_tokens: int,
    block_size: int,
    now: float,
    own: Callable[[ReplicaQueue, Price, int], tuple[float, float]],
    promised_place: Callable[[ReplicaId, int], float],
    /,
) -> list[ReplicaState]: ...
