"""Windows of synthetic traffic at any rate: sessions that come as a Poisson process, laid over each other."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

from loadtest.workloads.conversation import BlockIds
from loadtest.workloads.generator import BLOCK_TOKENS, Generator, Session, Turn
from loadtest.workloads.request import Workload, WorkRequest


class GeneratorSource:
    """A `Source` that draws its sessions when asked."""

    natural_rate_per_s = 5.0  # it has none of its own: where the search for a load begins

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    @property
    def name(self) -> str:
        return self._generator.name

    @property
    def block_tokens(self) -> int:
        return BLOCK_TOKENS

    def window(self, rate_per_s: float, num_requests: int, seed: int) -> Workload:
        """See `Source`. What was asked before the window opens is left out, its sessions go on into it."""
        rng = random.Random(f"{self.name}/{seed}")
        sessions = enumerate(self._generator.sessions(rng, BlockIds()))
        arrivals = random.Random(f"{self.name}/{seed}/arrivals")
        sessions_per_s = rate_per_s / self._generator.requests_per_session
        opens_s = self._generator.session_s
        chosen: list[WorkRequest] = []
        for time_s, number, turn in _laid_over(sessions, arrivals, sessions_per_s):
            if time_s < opens_s:
                continue
            if not chosen:
                opens_s = time_s  # times count from the first request, as in every window
            chosen.append(
                WorkRequest(time_s - opens_s, turn.input_tokens, turn.output_tokens, turn.block_ids, number)
            )
            if len(chosen) == num_requests:
                break
        return Workload(self.name, BLOCK_TOKENS, tuple(chosen))


def _laid_over(
    sessions: Iterator[tuple[int, Session]], rng: random.Random, sessions_per_s: float
) -> Iterator[tuple[float, int, Turn]]:
    """Every session's turns in order of time; sessions begin as a Poisson process from 0 on."""
    going: list[tuple[float, int, Turn, Session]] = []  # by the time of each one's next turn
    begins_s = rng.expovariate(sessions_per_s)
    while True:
        if not going or begins_s <= going[0][0]:
            number, session = next(sessions)
            heapq.heappush(going, (begins_s, number, next(session), session))
            begins_s += rng.expovariate(sessions_per_s)
            continue
        time_s, number, turn, session = heapq.heappop(going)
        yield time_s, number, turn
        following = next(session, None)
        if following is not None:
            heapq.heappush(going, (time_s + following.after_s, number, following, session))
