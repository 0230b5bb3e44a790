"""Whom tokens are charged to. Which of them are, and how often, is said in `token_accounts.py`."""

from __future__ import annotations

from router.dispatch.job import Job
from router.placement.placing import Placer


class Bill:
    """Whom a generation's tokens are charged to: its key, and its tenant's turn once it is over.

    Apart from the generation: an engine may still tell of one whose client has left, and its prompt need not
    be kept for that.
    """

    __slots__ = ("_placer", "_share", "_spend", "_tenant", "is_over")

    def __init__(self, job: Job, placer: Placer) -> None:
        self._spend, self._tenant, self._share = job.spend, job.tenant, job.share
        self._placer = placer
        self.is_over = False

    def charge(self, num_tokens: int) -> None:
        """They were made for it; perhaps its client has left since."""
        self._spend(num_tokens)
        if self.is_over:
            self.serve(num_tokens)

    def serve(self, num_tokens: int) -> None:
        self._placer.served(self._tenant, num_tokens, self._share)
