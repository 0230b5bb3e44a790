"""How long what is queued here keeps the engine busy before a newcomer gets its turn.

The Router asks the same of what an engine reports, and first: this is the engine's own bound, for several
Routers that do not know of each other's last requests, and for callers that are none. Arithmetic alone.
"""

from __future__ import annotations

from cache.events import Load

# While no step time is known, for some two dozen steps, so many full ones of queued tokens count as the
# longest wait: a first burst of long prompts must not be refused.
UNMEASURED_STEPS = 256
LEAST_ROOM = 1 / 8  # of a step's tokens, counted for prefill however many sequences decode


def queue_s(load: Load, max_batched_tokens: int, max_wait_s: float) -> float:
    """Seconds to prefill what the load has queued, beside the sequences that decode meanwhile.

    max_wait_s: what `UNMEASURED_STEPS` full steps are taken for while the engine has not measured itself.
    """
    tokens, model = load.queued_uncached_tokens, load.step_time
    if not tokens:
        return 0.0
    if model is None:
        return max_wait_s * tokens / (UNMEASURED_STEPS * max_batched_tokens)
    room = max(1, max_batched_tokens - load.num_running, int(max_batched_tokens * LEAST_ROOM))
    steps = tokens / room
    each_step_s = model.step_s(load.num_running, float(load.context_tokens), load.num_running)
    # In every step there is one prompt at least, and each prompt is in one at least.
    prompts = round(steps) + max(1, load.num_waiting)
    prefill_s = model.step_s(tokens, float(load.queued_attention or 0), prompts) - model.base_s
    return prefill_s + steps * each_step_s
