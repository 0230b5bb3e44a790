"""The latest requests with their decisions and what came of them, to be asked for by id.

Knows ids, decisions and accounts; no prompt, no text. Bounded: the oldest requests go first.
Owner: the router's event loop.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from cache.types import HashHint, ReplicaId, RequestId
from router.insight.accounting import TokenAccount
from router.insight.kept_decision import KeptDecision, kept
from router.insight.shadow import ShadowVerdict
from router.placement.decision import DecisionRecord, RouteQuery
from router.placement.observer import SilentObserver

MAX_ATTEMPTS_KEPT = 4  # of one request, the latest
ID_PREFIXES = ("chatcmpl-", "cmpl-")  # what the HTTP surface puts before an id in its answers
# What the Router puts behind a client's id, and behind its own where a body has several prompts. Eight
# decimal digits are never a prompt's number, so the two cannot be taken for each other. Copies that are made
# beside a request (`…-copy-1`) are not that request.
_OWN_MARK, _NUMBER = r"-[0-9a-f]{8}", r"-[1-9][0-9]{0,6}"
_ADDED = re.compile(rf"{_OWN_MARK}({_NUMBER})?")
_NAMED_BY_US, _NUMBERED = re.compile(rf".*{_OWN_MARK}", re.DOTALL), re.compile(_NUMBER)


@dataclass(slots=True)
class JournalEntry:
    """One request so far. Times are the clock's, seconds."""

    request_id: RequestId
    asked_at: float  # when it first wanted a replica
    decisions: list[KeptDecision] = field(default_factory=list)  # of its attempts, oldest first
    num_attempts: int = 0
    account: TokenAccount | None = None  # None: no first token yet
    first_token_at: float | None = None
    finished_at: float | None = None
    num_output_tokens: int = 0
    verdict: ShadowVerdict | None = None  # of the last attempt
    number: int = 0  # of the request, in the order they first wanted a replica
    revision: int = 0  # the journal's when something was last heard of it
    answering_attempt: int | None = None  # which of them computed the first token, from 1
    answering: KeptDecision | None = None  # of that one

    @property
    def attempt(self) -> int:
        """Which attempt `decision` is of, from 1."""
        return self.answering_attempt or self.num_attempts

    @property
    def rest_to(self) -> ReplicaId | None:
        """Where the rest of an answer that had begun was sent last; None where it was not cut off."""
        return self.decisions[-1].replica_id if self.attempt < self.num_attempts else None

    @property
    def decision(self) -> KeptDecision:
        """Of the attempt that computed the first token; of the last one where none has yet."""
        return self.answering or self.decisions[-1]


def _is_of(request_id: RequestId, name: str) -> bool:
    """Whether the Router has made that id of this name."""
    if not request_id.startswith(name):
        return False
    added = request_id[len(name) :]
    is_next = _NUMBERED.fullmatch(added) is not None and _NAMED_BY_US.fullmatch(name) is not None
    return is_next or _ADDED.fullmatch(added) is not None


class Journal(SilentObserver):
    """What happened to the last `max_requests` requests."""

    def __init__(self, max_requests: int, *, max_candidates: int, clock: Callable[[], float]) -> None:
        """max_candidates: of one decision, the best; of the rest their number."""
        self._max_requests = max_requests
        self._max_candidates = max_candidates
        self._clock = clock
        self._entries: OrderedDict[RequestId, JournalEntry] = OrderedDict()
        self._num_requests = 0  # since the start
        self.revision = 0  # grows with everything that is heard

    def __len__(self) -> int:
        return len(self._entries)

    def latest(self, count: int) -> list[JournalEntry]:
        """The newest first."""
        return list(islice(reversed(self._entries.values()), max(0, count)))

    def changed_since(self, revision: int, count: int) -> list[JournalEntry]:
        """Of the latest `count` requests those of which something was heard since, newest first. O(count)."""
        return [entry for entry in self.latest(count) if entry.revision > revision]

    def find(self, request_id: str) -> JournalEntry | None:
        """By the id in an answer (`chatcmpl-…`), the router's own, or the newest of a client's x-request-id.

        O(requests kept) for the last of these, and where only later prompts of an answer's are kept.
        """
        # As it is first: a client's own id may begin like those in answers.
        names = [request_id, *(request_id[len(p) :] for p in ID_PREFIXES if request_id.startswith(p))]
        for name in names:
            if (entry := self._entries.get(RequestId(name))) is not None:
                return entry
        # The router adds a suffix of its own to what a client sends: clients repeat themselves.
        return next(
            (e for e in reversed(self._entries.values()) if any(_is_of(e.request_id, n) for n in names)), None
        )

    # --- what is heard ------------------------------------------------------------------------

    def decided(self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        entry = self._entries.get(query.request_id)
        if entry is None:
            asked_at = query.asked_at if query.asked_at is not None else record.decided_at
            entry = self._entries[query.request_id] = JournalEntry(query.request_id, asked_at)
            if len(self._entries) > self._max_requests:
                self._entries.popitem(last=False)
            self._num_requests += 1
            entry.number = self._num_requests
        self._heard(entry)
        entry.num_attempts += 1
        entry.decisions.append(kept(record, self._max_candidates))
        del entry.decisions[:-MAX_ATTEMPTS_KEPT]
        if entry.account is None:
            entry.verdict = None

    def first_token(self, request_id: RequestId, replica_id: ReplicaId, cached_tokens: int) -> None:
        entry = self._entries.get(request_id)
        if entry is not None and entry.first_token_at is None:
            entry.first_token_at = self._clock()
            self._heard(entry)

    def finished(self, request_id: RequestId, hints: Sequence[HashHint], answers: Sequence[int]) -> None:
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.finished_at = self._clock()
            entry.num_output_tokens = sum(answers)
            self._heard(entry)

    def accounted(self, account: TokenAccount, record: DecisionRecord) -> None:
        """Its first token came, and every prompt token has a reason."""
        entry = self._entries.get(account.request_id)
        if entry is not None:
            entry.account = account
            entry.answering_attempt, entry.answering = entry.num_attempts, entry.decisions[-1]
            self._heard(entry)

    def shadowed(self, verdict: ShadowVerdict) -> None:
        """What the shadow policy would have done. Told after `decided`."""
        entry = self._entries.get(verdict.request_id)
        if entry is not None and entry.account is None:
            entry.verdict = verdict
            self._heard(entry)

    def _heard(self, entry: JournalEntry) -> None:
        self.revision += 1
        entry.revision = self.revision
