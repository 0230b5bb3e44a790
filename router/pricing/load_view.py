"""One replica's load as a policy sees it.

Knows numbers; knows neither how they came about nor what they cost.
"""

from __future__ import annotations

from typing import NamedTuple

from cache.events import StepTimeModel


class LoadView(NamedTuple):
    """One replica's load at one moment: everything a decision may look at."""

    backlog_s: float  # prefill ahead of a new request; 0 while `step_time` is unknown
    num_requests: int  # running, waiting, and sent but not yet seen by the engine
    num_running: int
    num_waiting: int  # in the engine's queue, or sent and not yet seen
    context_tokens: int  # of all running sequences
    used_fraction: float  # of blocks, by running sequences and by what was sent; 0..1
    max_batched_tokens: int
    # None while unknown: the engine has not measured itself, and there are too few others to go by.
    step_time: StepTimeModel | None
    is_full: bool  # it would refuse one more request
    is_draining: bool
    is_silent: bool  # nothing heard for too long: its cache is unknown, its load a guess
    last_chosen: int  # number of the decision that last chose it; 0 = never. Spreads ties evenly
    queued_tokens: int  # uncached prompt tokens in the engine's queue, or sent and not yet seen
    total_blocks: int  # of its cache, those of held prefixes aside
    num_in_flight: int  # sent by this router and not over
    fleet_time: StepTimeModel | None = None  # of a typical replica; None while unknown
    regret: float = 0.0  # of a block that it evicts: how often it is asked for again
    uses_lost: float = 0.0  # of such a block: how often it was asked for in a minute or two
    alone_s: float = 0.0  # of its machine's time, for a newcomer's steps that nobody shares
    step_left_s: float | None = None  # of the step that a new request finds in progress; None: nobody knows
