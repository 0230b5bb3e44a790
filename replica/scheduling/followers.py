"""Other answers to a prompt that is being computed: they wait for it, and start on its blocks.

Knows who follows whom; knows neither blocks nor steps. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache.types import RequestId
from replica.scheduling.request import Request, RequestState


class Followers:
    """Each follows one leader, which has it in its `followers`."""

    def __init__(self) -> None:
        self._leaders: dict[RequestId, Request] = {}  # by who follows

    def __len__(self) -> int:
        return len(self._leaders)

    def follow(self, leader: Request, followers: Sequence[Request]) -> None:
        """The leader has none yet."""
        leader.followers = list(followers)
        for follower in followers:
            follower.state = RequestState.FOLLOWING
            self._leaders[follower.request_id] = leader

    def leave(self, follower: Request) -> None:
        """It ends before its leader's prompt is computed."""
        self._leaders.pop(follower.request_id).followers.remove(follower)

    def release(self, leader: Request) -> list[Request]:
        """They follow it no longer."""
        followers, leader.followers = leader.followers, []
        for follower in followers:
            del self._leaders[follower.request_id]
        return followers

    def hand_on(self, leader: Request) -> Request:
        """It leaves before its prompt is computed: who leads in its place, and is to wait there."""
        heir, *others = self.release(leader)
        heir.state = RequestState.WAITING
        heir.expected_hit = leader.expected_hit
        self.follow(heir, others)
        return heir
