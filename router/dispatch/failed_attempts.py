"""What has failed of one generation so far, and whether another attempt at it is worth making.

Counts attempts; makes none, and knows neither replicas nor streams.
"""

from __future__ import annotations

from cache.errors import (
    AdmissionFailed,
    DeadlineExceeded,
    ForwardFailed,
    HandedOver,
    PiecesLost,
    PromptTooLong,
    QueueFull,
    RefusedEverywhere,
    RequestRefused,
    StructureRefused,
)
from router.errors import ReplicaLost


class FailedAttempts:
    """Of one generation."""

    def __init__(self, max_attempts: int, max_deaths: int) -> None:
        """max_deaths: without a new token between them."""
        self._max_attempts = max_attempts
        self._max_deaths = max_deaths
        self._num_failed = 0  # who leaves, and hands over, has not
        self._num_deaths = 0
        self._deaths_in_a_row = 0  # without a new token between them
        self._num_tokens_at_death = 0
        self._num_forward_failures = 0
        self._num_admission_failures = 0

    @property
    def num_deaths(self) -> int:
        return self._num_deaths

    @property
    def is_suspect(self) -> bool:
        """So many replicas died under it that it may be the cause: one after the other where it stood, or in
        as many attempts as it may have."""
        deaths = self._num_deaths if self._num_failed >= self._max_attempts else self._deaths_in_a_row
        return deaths >= self._max_deaths

    def add(self, error: ReplicaLost | RequestRefused, num_output_tokens: int) -> str | None:
        """One more attempt has failed. The label of another one elsewhere; None if it would do no better, or
        there were as many as there may be.

        num_output_tokens: that the generation has by now, of all its answers.
        """
        self._num_failed += not isinstance(error, HandedOver)
        if isinstance(error, ReplicaLost):
            self._count_death(num_output_tokens)
        cause = self._cause(error)
        return cause if self._num_failed != self._max_attempts else None

    def _count_death(self, num_output_tokens: int) -> None:
        """What kills whoever computes it does so again where it stands: it gets no further in between.

        A stream that has gone on was there by chance; `max_attempts` bounds how often.
        """
        goes_on = num_output_tokens > self._num_tokens_at_death
        self._num_tokens_at_death = num_output_tokens
        self._deaths_in_a_row = 1 if goes_on else self._deaths_in_a_row + 1
        self._num_deaths += 1

    def _cause(self, error: ReplicaLost | RequestRefused) -> str | None:
        if isinstance(error, ReplicaLost):
            return "replica_lost" if self._deaths_in_a_row < self._max_deaths else None
        if isinstance(error, PromptTooLong | DeadlineExceeded | StructureRefused | RefusedEverywhere):
            return None
        if isinstance(error, ForwardFailed):
            # Once: a request whose tokens make the model fail would make it fail everywhere.
            self._num_forward_failures += 1
            return "forward_failed" if self._num_forward_failures == 1 else None
        if isinstance(error, AdmissionFailed):
            # Likewise: the request's doing, unless only the first meets it.
            self._num_admission_failures += 1
            return "admission_failed" if self._num_admission_failures == 1 else None
        if isinstance(error, QueueFull):
            return "busy"
        if isinstance(error, HandedOver):
            return "handed_over"
        if isinstance(error, PiecesLost):
            return "deltas_lost"
        return "replica_lost"  # it refused for a reason of its own, such as shutting down
