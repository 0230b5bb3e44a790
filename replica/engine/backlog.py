"""What one answer has produced and nobody has read yet, as one delta that grows.

A delta for each step, kept as it came, takes four times the bytes of what it says. Knows deltas; knows
neither streams nor why nobody reads.
"""

from __future__ import annotations

from array import array

from cache.messages import Delta, Logprobs

# The Router makes JSON of a delta in one go, with log probabilities ten times as large; and a delta
# channel takes no more than `MAX_PIECE_BYTES` of `cache/channel/frames.py` in one piece. 30,000 tokens of
# plain text, 1,500 with twenty log probabilities each.
MAX_DELTA_BYTES = 256 << 10


class Backlog:
    """Of one answer; begins with a delta, and has no others after the one that is final."""

    def __init__(self, first: Delta) -> None:
        self._first = self._last = first
        # In UTF-8, with what follows, once there is more than the first. `StringIO` takes seven times that.
        self._text: bytearray | None = None
        self._token_ids = array("i")
        self._logprobs: Logprobs | None = None
        self.num_bytes = size_bytes(first)

    @property
    def choice(self) -> int:
        """Which of several answers it is of."""
        return self._first.choice

    @property
    def is_full(self) -> bool:
        """Whether the next delta shall begin another one."""
        return self.num_bytes >= MAX_DELTA_BYTES

    def add(self, delta: Delta) -> None:
        """Of the same answer. O(its length), amortized."""
        if self._text is None:
            self._text = bytearray()
            self._append(self._first)
        self._append(delta)
        self._last = delta
        self.num_bytes += size_bytes(delta)

    def delta(self) -> Delta:
        """One delta that says what these say, in order."""
        if self._text is None:
            return self._first
        return Delta(
            text=self._text.decode(),
            token_ids=tuple(self._token_ids),
            cached_tokens=self._last.cached_tokens,
            finish_reason=self._last.finish_reason,
            choice=self._last.choice,
            logprobs=self._logprobs,
            prompt_logprobs=self._first.prompt_logprobs,
        )

    def _append(self, delta: Delta) -> None:
        assert self._text is not None
        self._text += delta.text.encode()
        self._token_ids.extend(delta.token_ids)
        if (found := delta.logprobs) is None:
            return
        if self._logprobs is None:
            self._logprobs = Logprobs(found.num_top, array("f"), array("i"), array("f"))
        self._logprobs.chosen.extend(found.chosen)
        self._logprobs.top_ids.extend(found.top_ids)
        self._logprobs.top.extend(found.top)


def size_bytes(delta: Delta) -> int:
    """What it takes in a backlog: its text in UTF-8, and four bytes for each token id and number.

    The prompt's log probabilities do not count: they come once, and nobody can make more of them.
    """
    found = delta.logprobs
    num_numbers = 0 if found is None else len(found.chosen) + len(found.top_ids) + len(found.top)
    text_bytes = len(delta.text) if delta.text.isascii() else len(delta.text.encode())
    return text_bytes + 4 * (len(delta.token_ids) + num_numbers)
