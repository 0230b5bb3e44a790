"""Who was let in and finds no room is told so over HTTP, by status, while who has it streams on."""

from __future__ import annotations

import threading

import httpx

from replica.config import SimConfig
from tests.http_server import MODEL, engine_server

NUM_BLOCKS, BLOCK_SIZE = 16, 16
FULL = NUM_BLOCKS * BLOCK_SIZE
STEPS = 15  # of 0.1 s, beside a patience of 0.4; as few as leave no block for anybody else
SIM = SimConfig(base_s=0.1, per_token_s=0.0, per_attention_s=0.0, per_sequence_s=0.0, num_blocks=NUM_BLOCKS)


def test_a_request_that_cannot_begin_is_a_429_and_the_stream_before_it_is_whole() -> None:
    replica = {"runner": "simulated", "sim": SIM, "block_size": BLOCK_SIZE, "max_wait_s": 0.2}
    # The Router itself would refuse nobody: this is about who is let in.
    with engine_server(
        num_replicas=1, num_blocks=NUM_BLOCKS, replica=replica, max_wait_s=None, binding="at_once"
    ) as server:
        url, ask = f"{server.url}/v1/completions", {"model": MODEL, "ignore_eos": True}
        has_begun, heard = threading.Event(), []

        def take_all_blocks() -> None:
            body = {**ask, "prompt": [5] * (FULL - STEPS), "max_tokens": STEPS, "stream": True}
            with httpx.stream("POST", url, json=body, timeout=30.0) as answer:
                for line in answer.iter_lines():
                    has_begun.set()
                    heard.append(line)

        first = threading.Thread(target=take_all_blocks)
        first.start()
        assert has_begun.wait(20.0)
        refused = httpx.post(url, json={**ask, "prompt": [7] * 20, "max_tokens": 1}, timeout=30.0)
        was_streaming = first.is_alive()
        first.join()
    assert was_streaming, "it was to be refused while the other went on"
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "server_busy"
    assert int(refused.headers["retry-after"]) >= 1
    assert [line for line in heard if line][-1] == "data: [DONE]"
