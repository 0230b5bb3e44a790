"""The requests of a run, made before its clock starts: each as an HTTP body and as a replica's request.

Knows tokenizer and hash rule, as the Router does; knows neither Ray nor sockets.
"""

from __future__ import annotations

import json
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.overhead.cells import Cell, Prompt
from benchmarks.tokenization import TINY, Writer
from cache.block_hash import BlockHasher
from cache.fingerprint import Fingerprint
from cache.messages import GenerateRequest, SamplingParams
from cache.types import RequestId
from router.prompts.chat import Chat
from router.prompts.prompt import PromptEncoder

SMALL_TOKENS, LONG_TOKENS, LONG_MESSAGES = 16, 8192, 16
NUM_CONVERSATIONS = 4

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Question:
    """One request, ready to be sent either way."""

    body: bytes  # of POST /v1/chat/completions
    request: GenerateRequest


class Questions:
    """Makes questions that nobody has asked before, behind conversations that come again."""

    def __init__(self, model: str, fingerprint: Fingerprint) -> None:
        self._model = model
        self._hasher = BlockHasher(fingerprint)
        self._block_size = fingerprint.block_size
        self._encoder = PromptEncoder.load(str(TINY), cache_bytes=256 << 20)
        corpus = (TINY / "corpus.txt").read_text()
        self._writer = Writer(corpus, len(corpus) / len(self._encoder.text(corpus)))
        self._conversations = [
            self._writer.conversation(LONG_TOKENS, LONG_MESSAGES) for _ in range(NUM_CONVERSATIONS)
        ]
        self._asked = 0

    def of(self, cell: Cell, count: int) -> list[Question]:
        return [self._question(cell.prompt, cell.output_tokens) for _ in range(count)]

    def tokenizing_s(self, prompt: Prompt, count: int = 15) -> float:
        """What the text of a prompt that is new takes to tokenize, and only that: median seconds of CPU."""
        times = []
        for _ in range(count):
            new = "".join(message["content"] for message in self._new(prompt))
            began_s = time.process_time()
            self._encoder.text(new, salt=str(began_s))
            times.append(time.process_time() - began_s)
        return statistics.median(times)

    def _question(self, prompt: Prompt, output_tokens: int) -> Question:
        self._asked += 1
        messages: Messages = [*self._before(prompt), *self._new(prompt)]
        token_ids = self._encoder.chat(Chat(messages))
        return Question(_body(self._model, messages, output_tokens), self._request(token_ids, output_tokens))

    def _before(self, prompt: Prompt) -> Messages:
        return self._conversations[self._asked % NUM_CONVERSATIONS] if prompt is Prompt.LONG else []

    def _new(self, prompt: Prompt) -> Messages:
        if prompt is Prompt.LONG:
            return self._writer.next_turn([])
        return [{"role": "user", "content": self._writer.text(SMALL_TOKENS)}]

    def _request(self, token_ids: array[int], output_tokens: int) -> GenerateRequest:
        num_blocks = len(token_ids) // self._block_size
        hashes = self._hasher.extend(self._hasher.root(), token_ids, 0, num_blocks)
        return GenerateRequest(
            request_id=RequestId(f"direct-{self._asked}"),
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(max_tokens=output_tokens, ignore_eos=True),
            seed=self._asked,
            block_hashes=hashes,
        )


def _body(model: str, messages: Sequence[dict[str, str]], output_tokens: int) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()
