"""How many tokens, and so how many sequences, one step may hold: less for a while after memory ran out.

A forward's memory grows with its tokens, so half of them fit where all did not. What took the memory may go
again (another process, a burst of log probabilities): after 256 steps that fit, twice as many are
tried. Where it has not gone, that costs one step of 257.

A prompt whose rest would fit but for the decodes' own tokens ends in that step all the same, by so many more.
Four prompts of 128 fill a step of 512; beside those four the next four would leave four tokens for a step of
their own, which costs more than what they add to this one.
Counts alone. Engine thread only.
"""

from __future__ import annotations

RECOVERY_STEPS = 256  # of the present size, before a larger one is tried


class StepBudget:
    """The largest step that is planned."""

    def __init__(self, max_tokens: int, max_running: int) -> None:
        self._max_tokens = max_tokens
        self._max_running = max_running
        self._num_fitting = 0  # steps in a row, since the budget changed
        self.tokens = max_tokens  # between 1 and `max_tokens`

    @property
    def places(self) -> int:
        """No more sequences than tokens in a step, so that each of them moves forward in every step."""
        return min(self._max_running, self.tokens)

    def part(self, num_left: int, room: int, num_decodes: int) -> int:
        """Of a prompt's tokens that are left, those that go into a step.

        room: above 0; of the budget, what the decodes and other prompts have left. While memory is short it
        is all there is.
        """
        beyond = num_decodes if self.tokens == self._max_tokens else 0
        return num_left if num_left <= room + beyond else room

    def ran_out(self, num_tokens: int) -> bool:
        """A step of so many tokens had too little memory; False if a smaller one cannot be made."""
        assert num_tokens < 2 * self.tokens, "steps keep to the budget, but for a rest"
        self._num_fitting = 0
        if num_tokens < 2:
            return False
        self.tokens = num_tokens // 2
        return True

    def fitted(self) -> None:
        """A step was computed."""
        if self.tokens == self._max_tokens:
            return
        self._num_fitting += 1
        if self._num_fitting >= RECOVERY_STEPS:
            self._num_fitting = 0
            self.tokens = min(self._max_tokens, 2 * self.tokens)
