"""Ray Serve's own router behind the adapter: its text has equal beginnings where prompts have, and our Router
hears of replicas and of who accepted."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from loadtest.rivals.ray_prefix_router import RayPrefixRouter, text_of
from router.ingress import ROUTING_KEY

TOKENS = st.lists(st.integers(0, 300_000), max_size=40)


@given(TOKENS, TOKENS)
def test_text_is_equal_as_far_as_token_ids_are(one: list[int], other: list[int]) -> None:
    first, second = text_of(array("i", one)), text_of(array("i", other))
    assert (len(first), len(second)) == (len(one), len(other))
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        assert (first[index] == second[index]) == (a == b)
    first.encode()  # no surrogates: it travels to an actor


def test_it_is_rays_own_decision_under_our_routers_name() -> None:
    base = RayPrefixRouter.__mro__[1]
    assert (base.__name__, base.__module__.partition(".llm")[0]) == ("PrefixCacheAffinityRouter", "ray")
    overridden = {name for name in vars(RayPrefixRouter) if callable(getattr(RayPrefixRouter, name))}
    assert "_prefix_match_best_replicas" not in overridden
    assert RayPrefixRouter.initialize_state.__defaults__ == (ROUTING_KEY,)
