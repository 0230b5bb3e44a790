"""A replica without a model for tests under a real Serve: it follows the order in a request's salt."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from cache.errors import ForwardFailed, QueueFull
from cache.event_log import EventLog
from cache.events import Load
from cache.fingerprint import Fingerprint
from cache.messages import Delta, FinishReason, GenerateRequest, ReplicaInfo
from replica.publisher import new_epoch
from tests.fakes.publisher import a_publisher

# Orders. "once" means on the first attempt only, so that the next one succeeds.
DIE_BEFORE_FIRST = "die before the first token, once"
DIE_MID_STREAM = "die after three tokens, once"
DIE_ALWAYS = "die before the first token"
BUSY = "refuse as busy, once"
FORWARD_FAILED = "fail in the forward"
FAIL_MID_STREAM = "fail in the forward after three more tokens"
SLOW = "a token every 50 ms"


def text_of(position: int) -> str:
    return f"t{position} "


class OrderedReplica:
    """Counts tokens; `generate` and metadata as the real one has them."""

    def __init__(self, fingerprint: Fingerprint, journal: Path) -> None:
        """journal: a file all replicas append to: a handle of the test's own would need its event loop."""
        epoch = new_epoch()
        self._log = EventLog(epoch)
        self._publisher = a_publisher(port=0, epoch=epoch)
        self._publisher.start()
        self._journal = journal
        self._info = ReplicaInfo(
            fingerprint=fingerprint,
            event_endpoint=self._publisher.event_endpoint,
            snapshot_endpoint=self._publisher.snapshot_endpoint,
            num_blocks=1000,
            max_model_len=1000,
            max_batched_tokens=512,
            device="cpu",
            attention_backend="none",
            pid=os.getpid(),
        )
        self._heart = threading.Thread(target=self._beat, daemon=True)
        self._stopping = threading.Event()
        self._heart.start()

    def _beat(self) -> None:
        while not self._stopping.wait(0.2):
            self._publisher.publish(self._log.flush(Load(total_blocks=1000, free_blocks=1000)))

    def record_replica_metadata(self) -> dict[str, Any]:
        return {"warmpath": self._info.to_json()}

    def describe(self) -> dict[str, Any]:
        return self._info.to_json()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        order, is_first = request.cache_salt, request.attempt == 0
        position = len(request.token_ids) - request.num_prompt_tokens
        assert request.sent_chars == sum(len(text_of(i)) for i in range(position))
        self._note("started")
        try:
            if order == DIE_ALWAYS or (order == DIE_BEFORE_FIRST and is_first):
                os.kill(os.getpid(), signal.SIGKILL)
            if order == BUSY and is_first:
                raise QueueFull(waiting=3, limit=3)
            if order == FORWARD_FAILED:
                raise ForwardFailed("on purpose")
            start = position
            while position < request.sampling.max_tokens:
                if order == FAIL_MID_STREAM and position == start + 3:
                    raise ForwardFailed("on purpose")
                if order == DIE_MID_STREAM and is_first and position == 3:
                    await asyncio.sleep(0.3)  # the tokens before it are on their way
                    os.kill(os.getpid(), signal.SIGKILL)
                if order == SLOW:
                    await asyncio.sleep(0.05)
                position += 1
                is_last = position == request.sampling.max_tokens
                finish = FinishReason.LENGTH if is_last else None
                yield Delta(text_of(position - 1), (100 + position % 50,), 0, finish)
        except (asyncio.CancelledError, GeneratorExit):
            self._note("cancelled")
            raise
        finally:
            self._note("ended")

    def _note(self, word: str) -> None:
        with self._journal.open("a") as file:
            file.write(word + "\n")

    def __del__(self) -> None:
        if hasattr(self, "_stopping"):
            self._stopping.set()
            self._heart.join()
            self._publisher.close()
