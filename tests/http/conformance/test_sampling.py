"""Length and sampling: each setting, by what it does to the text."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.conformance.asking import chat, complete
from tests.conformance.rows import row
from tests.fakes.structures import END
from tests.http_server import MODEL, HttpServer


@row("max_tokens and max_completion_tokens")
def test_both_names_of_the_limit(client: openai.OpenAI) -> None:
    assert chat(client, max_tokens=3).usage.completion_tokens == 3
    assert chat(client, max_completion_tokens=4).usage.completion_tokens == 4
    answer = client.completions.create(model=MODEL, prompt="The sea", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16  # the API's default


@row("temperature")
def test_temperature_0_is_greedy_and_higher_ones_are_not(client: openai.OpenAI) -> None:
    greedy = {complete(client, "Greedy", temperature=0).choices[0].text for _ in range(3)}
    drawn = {complete(client, "Greedy", temperature=1.5).choices[0].text for _ in range(4)}
    assert len(greedy) == 1
    assert len(drawn) > 1


@row("top_p")
def test_a_tiny_nucleus_is_greedy(client: openai.OpenAI) -> None:
    narrow = complete(client, temperature=1, top_p=1e-6).choices[0].text
    assert narrow == complete(client).choices[0].text


@row("top_k")
def test_the_one_best_token_is_greedy(client: openai.OpenAI) -> None:
    narrow = complete(client, temperature=1, extra_body={"top_k": 1}).choices[0].text
    assert narrow == complete(client).choices[0].text


@row("seed")
def test_a_seed_draws_the_same_text_again(client: openai.OpenAI) -> None:
    texts = [complete(client, temperature=1, seed=seed, max_tokens=16).choices[0].text for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


@row("stop")
@pytest.mark.parametrize("as_list", [True, False])
def test_stop_ends_before_the_string(client: openai.OpenAI, as_list: bool) -> None:
    whole = complete(client, max_tokens=16).choices[0].text
    stop = whole[6:9]
    answer = complete(client, max_tokens=16, stop=[stop] if as_list else stop)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


@row("ignore_eos")
def test_ignore_eos_generates_to_the_limit(client: openai.OpenAI) -> None:
    """A model that ends at once, and is not let."""
    ended, went_on = (
        chat(client, max_tokens=60, logit_bias={str(END): 100}, extra_body={"ignore_eos": ignores})
        for ignores in (False, True)
    )
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("stop", 1)
    assert (went_on.choices[0].finish_reason, went_on.usage.completion_tokens) == ("length", 60)


@row("stop_token_ids")
def test_stop_token_ids_end_the_answer(server: HttpServer, client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=8).choices[0].text
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": whole}).json()["tokens"]
    answer = complete(client, max_tokens=8, extra_body={"stop_token_ids": ids[:16]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 8


@row("min_tokens")
def test_min_tokens_hold_off_the_stop(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=12).choices[0].text
    stop = whole[:2]
    early = complete(client, max_tokens=12, stop=stop)
    late = complete(client, max_tokens=12, stop=stop, extra_body={"min_tokens": 10})
    assert early.usage.completion_tokens < 10 <= late.usage.completion_tokens
