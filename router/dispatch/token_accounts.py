"""What is charged for answers: each of their tokens once, when it is read or when an engine tells of it.

An engine computes also for a client that does not read, whose stream waits at the replica, or is given up
with whatever lies there. So it tells of each attempt's end how many tokens it has computed.

    open ──> read, read, …          charged as they come
      │        └──> told            charged what nobody has read: it may be read later, or never
      ├──> refused ──> close        nothing was computed: forgotten at once, as what is told or read whole
      └──> close ──> told           its client has left: charged what it has not read

Of an attempt that has failed only what was read is charged: another one computes the rest again.
Knows request ids and numbers; knows neither keys nor replicas. Owner: the router's event loop.
"""

from __future__ import annotations

from collections.abc import Callable

from cache.events import RequestEnded
from cache.types import RequestId

# An engine tells of an end at once. One that has not by then is dead, or its message was lost.
FORGOTTEN_AFTER_S = 60.0


class TokenAccount:
    """One request's, over all its attempts."""

    __slots__ = ("_attempt", "_charge", "_is_settled", "_most", "_num_before", "_num_charged", "_num_read")

    def __init__(self, charge: Callable[[int], None], most: int) -> None:
        """charge: told of tokens, of all answers together, each once; kept as long as the account is. most:
        that were asked for: no engine's word is charged beyond."""
        self._charge = charge
        self._most = most
        self._num_read = self._num_charged = 0
        self._attempt, self._num_before = 0, 0
        self._is_settled = False

    @property
    def num_charged(self) -> int:
        return self._num_charged

    @property
    def is_settled(self) -> bool:
        """Whether no engine has more to tell of the present attempt."""
        return self._is_settled

    def begin(self, attempt: int) -> None:
        """It goes on from what was read, and no earlier one counts any more."""
        self._attempt, self._num_before = attempt, self._num_read
        self._is_settled = False

    def refused(self) -> None:
        """No engine has taken the present attempt in: none will tell of it."""
        self._is_settled = True

    def read(self, num_tokens: int) -> None:
        """So many more have come."""
        self._num_read += num_tokens
        self._charge_up_to(self._num_read)

    def told(self, ended: RequestEnded) -> None:
        """An engine's word, any number of times; of an earlier attempt it changes nothing."""
        if ended.attempt == self._attempt:
            self._is_settled = True
            self._charge_up_to(min(self._num_before + ended.num_tokens, self._most))

    def _charge_up_to(self, num_tokens: int) -> None:
        more = num_tokens - self._num_charged
        if more > 0:
            self._num_charged = num_tokens
            self._charge(more)


class TokenAccounts:
    """All of one Router's that an engine may still tell of."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[RequestId, TokenAccount] = {}
        self._left: dict[RequestId, float] = {}  # when they are forgotten; in that order

    def __len__(self) -> int:
        return len(self._accounts)

    def open(self, request_id: RequestId, account: TokenAccount) -> None:
        """An engine may tell of it from now on. Idempotent. As `close` in complexity."""
        self._accounts[request_id] = account
        self._left.pop(request_id, None)
        self._sweep()

    def close(self, request_id: RequestId, *, is_whole: bool) -> None:
        """Nobody reads it any more. is_whole: everything that was computed has been read.

        O(those that are forgotten now). Idempotent.
        """
        account = self._accounts.get(request_id)
        if account is not None and (is_whole or account.is_settled):
            self._forget(request_id)
        elif account is not None:
            self._left.setdefault(request_id, self._clock() + FORGOTTEN_AFTER_S)
        self._sweep()

    def told(self, ended: RequestEnded) -> None:
        """Of any router's requests. As `close` in complexity."""
        account = self._accounts.get(ended.request_id)
        if account is not None:
            account.told(ended)
            if account.is_settled and ended.request_id in self._left:
                self._forget(ended.request_id)
        self._sweep()

    def _sweep(self) -> None:
        """Forget those whose engines have not told in time."""
        now = self._clock()
        while self._left and (oldest := next(iter(self._left.items())))[1] <= now:
            self._forget(oldest[0])

    def _forget(self, request_id: RequestId) -> None:
        del self._accounts[request_id]
        self._left.pop(request_id, None)
