"""Where prompts go and what is cached there, through real processes: proxy, Router, two replicas.

Behind one proxy, as none has a part in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from loadtest import demo
from tests.e2e.asking import ask, cached, reusable, unique_prompt
from tests.e2e.deployments import USUAL, deployed
from tests.servers import Server

pytestmark = deployed(USUAL)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
        yield client


def test_warm_prompt_goes_where_it_is_cached(client: openai.OpenAI) -> None:
    """Both replicas are made warm for something; each later question finds its own replica."""
    prompts = [unique_prompt() for _ in range(6)]
    # By itself the Router might send all to one that has measured itself as faster.
    in_turn = {"x-warmpath-policy": "round_robin"}
    first = [ask(client, prompt, extra_headers=in_turn) for prompt in prompts]
    assert len({replica for _, replica in first}) == 2
    for prompt, (cold, replica) in zip(prompts, first, strict=True):
        warm, where = ask(client, prompt)
        assert cached(cold) == 0
        assert where == replica
        assert cached(warm) == reusable(warm) > 0


def test_one_prompt_ten_times_is_computed_once(client: openai.OpenAI) -> None:
    prompt = unique_prompt()
    answers = [ask(client, prompt) for _ in range(10)]
    assert len({replica for _, replica in answers}) == 1
    assert [cached(answer) for answer, _ in answers] == [0] + [reusable(answers[0][0])] * 9
    assert len({answer.choices[0].message.content for answer, _ in answers}) == 1


def test_ten_twins_at_once_are_computed_on_one_replica(client: openai.OpenAI) -> None:
    """The predicted entries: none of the ten has been cached anywhere when the last is placed."""
    prompt = unique_prompt()  # long: ten twins of a short one may rightly be worth a second copy
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: ask(client, prompt), range(10)))
    assert len({replica for _, replica in answers}) == 1
    assert sorted(cached(answer) for answer, _ in answers)[-9:] == [reusable(answers[0][0])] * 9


def test_another_salt_does_not_hit(client: openai.OpenAI) -> None:
    prompt = unique_prompt()
    salts = ["one", "one", "two", ""]
    answers = [ask(client, prompt, extra_body={"cache_salt": salt} if salt else {})[0] for salt in salts]
    assert [cached(answer) for answer in answers] == [0, reusable(answers[0]), 0, 0]


def test_burst_of_different_prompts_spreads(client: openai.OpenAI) -> None:
    prompts = [unique_prompt(20) for _ in range(16)]
    with ThreadPoolExecutor(16) as pool:
        replicas = [replica for _, replica in pool.map(lambda prompt: ask(client, prompt), prompts)]
    counts = sorted(replicas.count(replica) for replica in set(replicas))
    assert len(counts) == 2
    assert counts[0] >= 4, counts


def test_same_seed_same_text_on_either_replica(client: openai.OpenAI) -> None:
    """The draw at (seed, position) is a pure function, whichever replica makes it."""
    prompt = unique_prompt(10)
    texts, replicas = set(), set()
    for _ in range(4):
        raw = client.chat.completions.with_raw_response.create(
            model="tiny",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=24,
            temperature=1.0,
            seed=7,
            extra_body={"ignore_eos": True},
            extra_headers={"x-warmpath-policy": "round_robin"},
        )
        replicas.add(raw.headers["x-warmpath-replica"])
        texts.add(raw.parse().choices[0].message.content)
    assert len(replicas) == 2
    assert len(texts) == 1


def test_completions_take_text_and_token_ids(client: openai.OpenAI) -> None:
    first = client.completions.create(model="tiny", prompt="The quick brown fox", max_tokens=4, temperature=0)
    assert first.usage is not None
    ids = client.completions.create(model="tiny", prompt=list(range(100, 140)), max_tokens=4, temperature=0)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 40
    again = client.completions.create(model="tiny", prompt=list(range(100, 140)), max_tokens=4, temperature=0)
    assert cached(again) == 32
    assert again.choices[0].text == ids.choices[0].text


def test_demo_shows_what_placing_by_prefix_is_worth(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second question of the prefix-aware arm is warm; round robin's goes to the cold replica."""
    assert demo.main(["--url", server.url, "--rounds", "1", "--questions", "2", "--max-tokens", "2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    [first, second] = [row for row in rows if len(row) == 8]
    _, _, _, robin_cached, robin_replica, _, aware_cached, aware_replica = second
    assert robin_replica != first[4]
    assert robin_cached == "0"
    assert aware_replica == first[7]
    assert int(aware_cached) > 1000
