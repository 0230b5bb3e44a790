"""Copies between the cache and host memory, made before the step that needs them.

Where one fails nothing in host memory counts any more, and the step is taken back: nobody fails, what was to
come from there is computed. Knows which blocks, and who copies them; knows neither bytes nor requests.
Engine thread only.
"""

from __future__ import annotations

import logging

from cache.kv_cache_manager import KVCacheManager
from replica.engine.engine_meter import EngineMeter
from replica.errors import StepOutOfMemory
from replica.scheduling.copy_pace import CopyPace
from replica.scheduling.runner import Runner
from replica.scheduling.scheduler import Scheduler

# In a row, to or from host memory; then it is left alone, since each costs a step.
MAX_FAILED_COPIES = 3

logger = logging.getLogger(__name__)


class HostCopies:
    """One engine's."""

    def __init__(
        self,
        cache: KVCacheManager,
        runner: Runner,
        scheduler: Scheduler,
        pace: CopyPace,
        meter: EngineMeter,
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._scheduler = scheduler
        self._pace = pace
        self._meter = meter
        self._num_failed = 0  # in a row

    def make(self) -> bool:
        """Bring the coming step's blocks from host memory, and there what it pushes out of the cache.

        False if a copy raised: then that step is no more. After a few in a row host memory is left alone.
        """
        moves = self._cache.take_moves()
        if not moves:
            return True
        try:
            copies = self._runner.copy_blocks(moves)
        except Exception as error:
            self._num_failed += 1
            is_over = self._num_failed >= MAX_FAILED_COPIES
            self._cache.forget_host(for_good=is_over)
            logger.warning(
                "a copy to or from host memory failed; what it held is lost",
                extra={"num_saves": len(moves.saves), "num_loads": len(moves.loads), "is_off": is_over},
                exc_info=error,
            )
            if not (isinstance(error, StepOutOfMemory) and self._scheduler.retreat()):
                self._scheduler.take_back()
            else:
                self._meter.ran_out_of_memory()
            return False
        self._num_failed = 0
        for copy in copies:
            self._pace.observe(copy)
        return True
