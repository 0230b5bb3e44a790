"""One request's log probabilities on their way from the steps that find them to the stream.

Knows packed log probabilities and counts; knows neither logits nor text. Engine thread only.
"""

from __future__ import annotations

from cache.messages import Logprobs


class LogprobLog:
    """What was found and not sent yet: of the prompt as a whole, of drawn tokens one by one."""

    def __init__(self, num_scored: int) -> None:
        """num_scored: prompt tokens to find log probabilities of, all but the first; 0 = of none."""
        self._num_scored = num_scored
        self._prompt: list[Logprobs] = []
        self._drawn: list[Logprobs] = []

    @property
    def scores_prompt(self) -> bool:
        """Whether some of the prompt's are still to be found."""
        return sum(map(len, self._prompt)) < self._num_scored

    def add_drawn(self, found: Logprobs) -> None:
        """Of the token that was just drawn."""
        self._drawn.append(found)

    def add_prompt(self, start: int, found: Logprobs) -> None:
        """Of prompt tokens; start: how many of those wanted come before. 0 again after a preemption."""
        if start == 0:
            self._prompt.clear()
        assert start == sum(map(len, self._prompt)), "a chunk of the prompt was left out"
        self._prompt.append(found)

    def take_drawn(self, num_tokens: int) -> Logprobs | None:
        """Of the next tokens to be sent; None where nobody asked."""
        taken, self._drawn = self._drawn[:num_tokens], self._drawn[num_tokens:]
        return Logprobs.joined(taken)

    def take_prompt(self) -> Logprobs | None:
        """Of the prompt, once: None before they are whole, and from then on."""
        if not self._num_scored or self.scores_prompt:
            return None
        self._num_scored = 0
        return Logprobs.joined(self._prompt)
