"""The next step: which requests are part of it, and with how many tokens.

Decodes come first; what they leave goes to prompts, begun or waiting, by whose turn it is (`turns.py`), and
no more of them than the decodes may be stalled for (`step_room.py`): few tokens, or more through some of the
layers (`layer_span.py`). It may end before it is full, for the sake of prompts that end with it
(`early_end.py`). Blocks are taken as it is composed, at the cost of the newest where they are short.
Knows token counts and blocks; knows neither how a step ends nor who is taken in. Engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cache.events import StepTimeModel
from cache.kv_cache_manager import PrefixHit
from cache.prefix_cache import PrefixCache
from replica.scheduling.admission import Admission
from replica.scheduling.early_end import EarlyEnd
from replica.scheduling.going_on import MOST_UNSEEN, NextPart, going_on
from replica.scheduling.layer_span import LayerSpan
from replica.scheduling.load_account import context_tokens
from replica.scheduling.request import Halfway, Request, RequestState
from replica.scheduling.running import Running
from replica.scheduling.step_budget import StepBudget
from replica.scheduling.step_correction import StepCorrection
from replica.scheduling.step_room import ENOUGH_AT_ONCE, StepRoom
from replica.scheduling.turns import Turns

# Of a block: so much of a prompt is computed in a step at the least. After 4,000 tokens of context a whole
# block of 16 takes a small model on a CPU longer than eight decodes.
LEAST_PART = 1 / 4


class StepPlan:
    """Composed anew for each step; `entries` is empty between two."""

    def __init__(
        self,
        cache: PrefixCache,
        running: Running,
        turns: Turns,
        admission: Admission,
        budget: StepBudget,
        *,
        block_size: int,
        num_layers: int,
        itl_target_s: float | None,
        ends_early: bool,
        pace: Callable[[], StepTimeModel | None],
        clock: Callable[[], float],
    ) -> None:
        """ends_early: a step is not filled up where prompts that end with it would wait too long for that."""
        self._cache = cache
        self._running = running
        self._turns = turns
        self._waiting = turns.waiting
        self._admission = admission
        self._budget = budget
        self._block_size = block_size
        self._num_layers = num_layers
        self._itl_target_s = itl_target_s
        self._is_limited = itl_target_s != math.inf
        self._ends_early = ends_early
        self._pace = pace
        self._clock = clock
        self._correction = StepCorrection()
        self._composed: StepRoom | None = None  # what prompts had of the last one; None: no limit, or none
        self._num_decodes = 0  # of the step being composed: its first entries
        self._early_end = EarlyEnd.beside(None, 0, 0, 0)  # likewise
        self.entries: list[tuple[Request, int]] = []  # request, its tokens
        self.span: LayerSpan | None = None  # of the last entry, the only prompt then; None: all layers
        self.started: list[Request] = []  # of those, who was admitted to it
        self.has_preempted = False
        self.is_cut_short = False  # it could have held more of a prompt, but for the decodes' sake
        self.has_ended_early = False  # it could have held more, but for the sake of prompts that end with it
        # Whoever waits was refused a place or blocks, and nothing has come free since. Of no meaning while
        # nobody waits.
        self.is_settled = False

    def compose(self) -> None:
        """Fill it. Empty exactly when nobody can move forward."""
        assert not self.entries, "the last step was neither updated nor failed"
        self.has_preempted = self.is_cut_short = self.has_ended_early = self.is_settled = False
        self.started.clear()
        self._composed = self.span = None
        self._schedule_decodes()
        self._schedule_prompts()

    def parts_after(self, *, unseen: int) -> list[NextPart]:
        """The step after this one, as far as it can be said before this one is done; empty if it cannot.

        unseen: steps in a row that were begun so. O(running).
        """
        if len(self.entries) < len(self._running):  # the next one may have blocks for who was left out
            return []
        if self.span is not None:  # through how many layers next, is seen when these are done
            return []
        going = going_on(self.entries)
        if going is None or len(going.prompts) > 1:
            return []
        if self._waiting and len(going.decodes) + len(going.prompts) < len(self.entries):
            return []  # there will be a place
        parts = [NextPart(each, len(each.token_ids), 1, is_drawn=True) for each in going.decodes]
        if going.prompts:
            [(prompt, start)] = going.prompts
            num_tokens = self._part_after(prompt, start, going.decodes)
            return [*parts, NextPart(prompt, start, num_tokens, is_drawn=False)] if num_tokens else []
        return parts if not self._waiting or (self.is_settled and unseen < MOST_UNSEEN) else []

    def _part_after(self, prompt: Request, start: int, decodes: Sequence[Request]) -> int:
        """Tokens of the only prompt that has begun; 0 where somebody else's turn might come, too."""
        left, budget = len(prompt.token_ids) - start, self._budget.tokens - len(decodes)
        if budget <= 0:
            return 0
        if self._waiting and (left < budget or self._turns.next([prompt], admits=True) is not prompt):
            return 0
        wanted = self._budget.part(left, budget, len(decodes))
        return self._room(1 + len(self._waiting), decodes).fits(start, wanted)

    def go_on(self, parts: Sequence[NextPart]) -> None:
        """Fill it with these, which have their blocks: `parts_after` the step that is done now, without those
        who have left since."""
        assert not self.entries, "the last step was neither updated nor failed"
        self.has_preempted = self.is_cut_short = self.has_ended_early = False
        self.started.clear()
        self._composed = self.span = None
        self._turns.begin_step([part.request for part in parts if not part.is_drawn])
        for part in parts:
            request, end = part.request, part.start + part.num_tokens
            assert request.num_computed == part.start, "it is not where it was to be"
            self._cache.grow(request.blocks, end)
            self.entries.append((request, part.num_tokens))
            if not part.is_drawn or part.start % self._block_size == 0:  # a decode: where it opens a block
                self._turns.charge(request, end)

    def take(self) -> list[tuple[Request, int]]:
        """It is over, well or not: what it was."""
        entries, self.entries = self.entries, []
        return entries

    def take_computed(self) -> list[tuple[Request, int]]:
        """It is over, and well: who has how many more tokens computed."""
        entries = self.take()
        if (span := self.span) is not None:
            request, num_tokens = entries[-1]
            request.halfway = None if span.is_last else Halfway(num_tokens, span)
            if not span.is_last:
                entries[-1] = (request, 0)
        return entries

    def took(self, elapsed_s: float) -> None:
        """The last one was computed in so many seconds."""
        room = self._composed
        if room is not None and (self.is_cut_short or not room.prompts_s):
            self._correction.observe(decodes_s=room.decodes_s, prompts_s=room.prompts_s, elapsed_s=elapsed_s)

    @property
    def num_tokens(self) -> int:
        """Of all entries: a decode is one."""
        return sum([num_tokens for _, num_tokens in self.entries])

    def fills_blocks(self, request: Request, num_tokens: int) -> bool:
        """Whether blocks that were registered with this step are part of it."""
        size, start = self._block_size, request.num_computed
        if self.span is not None and not self.span.is_last and not request.is_decoding:
            return False  # it has room for them, and nobody was told
        fills = bool(request.blocks.root) and (start + num_tokens) // size > start // size
        return fills or any(request is started for started in self.started)

    def quiet_steps(self) -> int:
        """How many steps would follow this one that only decode and leave the cache alone. O(running)."""
        if self.has_preempted or self.is_cut_short or self.has_ended_early:  # the next step admits again
            return 0
        if len(self.entries) < len(self._running):  # the next one may have blocks for who was left out
            return 0
        # Whoever waits was refused for want of places or blocks, and these steps free neither.
        size, quiet = self._block_size, self._block_size
        for request, num_tokens in self.entries:
            end = request.num_computed + num_tokens  # of this step
            if end != len(request.token_ids) or num_tokens > 1 or request.followers:
                return 0
            quiet = min(quiet, size - 1 - end % size if end % size else 0)
        return quiet if self.entries else 0

    # -- decodes ----------------------------------------------------------------------------------

    def _schedule_decodes(self) -> None:
        """A token for everybody who decodes, oldest first."""
        for request in self._running.requests[:]:
            if request.state is RequestState.RUNNING and request.is_decoding:
                held = len(request.blocks.block_table)
                if self._make_room(request, 1):
                    self.entries.append((request, 1))
                    # Block by block, so that in quiet steps nobody's share changes.
                    if len(request.blocks.block_table) > held:
                        self._turns.charge(request, len(request.token_ids))

    # -- prompts ----------------------------------------------------------------------------------

    def _schedule_prompts(self) -> None:
        """Parts of prompts, begun ones and waiting ones, while budget, time, places and blocks last."""
        begun = [r for r in self._running.requests if not r.is_decoding]
        self._turns.begin_step(begun)
        num_prompts = len(begun) + len(self._waiting)
        room = self._room(num_prompts) if num_prompts or self._is_limited else None
        self._composed = room if self._is_limited else None
        if room is None or not num_prompts:
            return
        self._num_decodes = len(self.entries)
        budget = self._budget.tokens - self._num_decodes
        self._early_end = self._end(num_prompts)
        if not self._send_on(begun, budget, room):
            self._take_turns(begun, budget, room)

    def _take_turns(self, begun: list[Request], budget: int, room: StepRoom) -> None:
        """A part of whoever's turn it is, until the step is full or nobody else may have one in it."""
        running, places = self._running.requests, self._budget.places
        admits, without = True, set[str]()  # whether anybody may start; tenants of whom nobody may
        while budget > 0 and not room.is_full and not self.has_ended_early and self.span is None:
            # Blocks were short a moment ago: whoever came in now would be the next to be thrown out.
            may_start = admits and not self.has_preempted
            request = self._turns.next(begun, admits=may_start, without=without)
            if request is None:
                self.is_settled = not self.has_preempted
                return
            if request.state is RequestState.RUNNING:
                begun.remove(request)
                budget -= self._go_on(request, budget, room)
            elif not self._has_place(self._turns.places(request.tenant, running, places), places):
                if self._has_place(places, places):  # it is its tenant's own sequences that it waits for
                    without.add(request.tenant)
                else:
                    admits = False
            elif (hit := self._admission.hit(request, running)) is not None:
                budget -= self._admit(request, hit, budget, room)
            else:  # nobody else may start in its place: else it might wait for ever
                admits = False

    def _go_on(self, request: Request, budget: int, room: StepRoom) -> int:
        """The next part of a prompt that has begun; its tokens in this step."""
        is_first = room.is_empty
        num_tokens = self._part(request, request.num_computed, budget, room)
        if not num_tokens:
            return 0
        if is_first and (by_layers := self._part_by_layers(request, num_tokens, budget, room)):
            every = LayerSpan(0, self._num_layers, self._num_layers)
            return by_layers if self._compute_layers(request, by_layers, every, room) else 0
        if not self._make_room(request, num_tokens):
            return 0
        self._compute(request, num_tokens, room)
        return num_tokens

    def _admit(self, request: Request, hit: PrefixHit, budget: int, room: StepRoom) -> int:
        """Start on what the cache does not hold of it; its tokens in this step."""
        num_tokens = self._part(request, hit.num_tokens, budget, room)
        if num_tokens:
            self._cache.admit(request.blocks, hit, num_tokens)
            self._running.start(request, hit.num_tokens, self._clock())
            self.started.append(request)
            self._compute(request, num_tokens, room)
        return num_tokens

    def _part(self, request: Request, start: int, budget: int, room: StepRoom) -> int:
        wanted = self._wanted(request, start, budget)
        num_tokens = room.fits(start, wanted)
        self.has_ended_early = self._early_end.is_before(start, num_tokens)
        if self.has_ended_early:
            return 0
        self.is_cut_short |= num_tokens < wanted
        return num_tokens

    def _wanted(self, request: Request, start: int, budget: int) -> int:
        return self._budget.part(len(request.token_ids) - start, budget, self._num_decodes)

    def _compute(self, request: Request, num_tokens: int, room: StepRoom) -> None:
        """Let so many tokens of its prompt be part of the step. Its blocks are there."""
        end = request.num_computed + num_tokens
        self.entries.append((request, num_tokens))
        self._turns.charge(request, end)
        self._early_end.take(is_last=end == len(request.token_ids))
        room.take(request.num_computed, num_tokens, 1.0 if self.span is None else self.span.share)

    # -- layer by layer ---------------------------------------------------------------------------

    def _send_on(self, begun: Sequence[Request], budget: int, room: StepRoom) -> bool:
        """Let the part that is halfway through the layers be the step's; False: there is none, or no more."""
        request = next((each for each in begun if each.halfway is not None), None)
        if request is None:
            return False
        assert request.halfway is not None
        num_tokens, end = request.halfway.num_tokens, request.halfway.through.end
        if room.model is None or self._budget.part(num_tokens, budget, self._num_decodes) < num_tokens:
            request.halfway = None  # begun anew: there is time for all layers, or less memory
            return False
        left = LayerSpan(end, self._num_layers, self._num_layers)
        return self._compute_layers(request, num_tokens, left, room)

    def _part_by_layers(self, request: Request, at_once: int, budget: int, room: StepRoom) -> int:
        """Tokens of its next part, the step's only one, if it goes through the layers step by step; else 0.

        at_once: that fit through all of them.
        """
        wanted = self._wanted(request, request.num_computed, budget)
        if self._num_layers == 1 or at_once >= min(wanted, ENOUGH_AT_ONCE) or request.logprobs is not None:
            return 0
        num_tokens = room.fits_by_layers(request.num_computed, wanted, self._num_layers)
        return num_tokens if num_tokens > at_once else 0

    def _compute_layers(self, request: Request, num_tokens: int, left: LayerSpan, room: StepRoom) -> bool:
        """Send so many tokens of its prompt through as many of these layers as there is time for, at least
        one; False if there are no blocks for them."""
        span = room.layers(request.num_computed, num_tokens, left)
        if not self._make_room(request, num_tokens, is_computed=span.is_last):
            return False
        self.span = span
        self.is_cut_short = True
        self._compute(request, num_tokens, room)
        return True

    # -- time -------------------------------------------------------------------------------------

    def _room(self, num_prompts: int, decodes: Sequence[Request] | None = None) -> StepRoom:
        """What the decodes of this step, or these, leave to so many prompts, budget and blocks aside."""
        if decodes is None:
            decodes = [request for request, _ in self.entries]
        return StepRoom.beside(
            self._pace() if decodes else None,
            num_decodes=len(decodes),
            context_tokens=context_tokens(decodes),
            num_prompts=num_prompts,
            itl_target_s=self._itl_target_s,
            least=max(1, int(LEAST_PART * self._block_size)),
            correction=self._correction,
        )

    def _end(self, num_prompts: int) -> EarlyEnd:
        """When this step, of which the decodes are known, ends."""
        decodes = [request for request, _ in self.entries]
        model = self._pace() if self._ends_early else None
        # Of a prompt one token may be left, as of all but the first answer to it.
        num_ending = sum([not request.num_tokens_here for request in decodes])
        return EarlyEnd.beside(model, len(decodes), context_tokens(decodes), num_prompts, num_ending)

    def _has_place(self, may_be_taken: int, places: int) -> bool:
        most_followed = self._turns.most_places(places)
        return self._admission.has_place(self._running.requests, may_be_taken, most_followed)

    # -- blocks -----------------------------------------------------------------------------------

    def _make_room(self, request: Request, num_tokens: int, *, is_computed: bool = True) -> bool:
        """Give a request its blocks, at the cost of the newest.

        False when it was itself the newest, or all that are newer are part of this step already: then it
        stands back until the next one. is_computed: as `Running.try_grow`.
        """
        while not self._running.try_grow(request, num_tokens, is_computed=is_computed):
            victim = self._running.requests[-1]
            if any(victim is scheduled for scheduled, _ in self.entries):
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        """Put one back that has no part in this step yet.

        (A scheduled one has registered blocks that would then never be computed.)
        """
        assert all(victim is not scheduled for scheduled, _ in self.entries)
        self.has_preempted = True
        self._running.preempt(victim)
