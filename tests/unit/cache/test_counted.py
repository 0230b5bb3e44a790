import pytest

from cache.counted import counted


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 replicas"), (1, "1 replica"), (2, "2 replicas"), (1980, "1,980 replicas")]
)
def test_one_of_them_is_told_in_the_singular(count: int, said: str) -> None:
    assert counted(count, "replica") == said
