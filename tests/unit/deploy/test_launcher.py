"""What the launcher says of a service that is ready."""

from __future__ import annotations

import pytest

from deploy.launcher import _replica_line


@pytest.mark.parametrize(
    ("num_ranks", "where"), [(1, "cpu, float32, "), (2, "cpu, 2 ranks, float32, ")], ids=["one", "two"]
)
def test_a_replica_is_shown_with_its_ranks_where_it_has_several(num_ranks: int, where: str) -> None:
    replica = {
        "replica_id": "r1",
        "device": "cpu",
        "num_ranks": num_ranks,
        "kv_dtype": "float32",
        "attention_backend": "gather_sdpa",
        "num_blocks": 1024,
        "block_size": 16,
    }
    assert _replica_line(replica) == f"r1  {where}gather_sdpa attention, 1024 blocks of 16 tokens"
