"""Scenarios ask the same for the same seed, and share what they claim: an infinite cache measures it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from loadtest.client.answer import Answer, Failure
from loadtest.client.question import Question
from loadtest.scenarios.catalogue import SCENARIOS, make_scenario
from loadtest.scenarios.examples import SelfConsistency, vote
from loadtest.scenarios.scenario import Ask, Pause, Stopped
from loadtest.scenarios.sharing import InfiniteCache, made_up, measure
from loadtest.scenarios.tree_of_thought import TreeOfThought, score

# Shares of prompt words that a cache which forgets nothing finds; 60 sessions of the default sizes.
CLAIMED = {
    "long_documents": (0.90, 0.99),
    "chat": (0.80, 0.95),
    "few_shot": (0.70, 0.95),
    "self_consistency": (0.60, 0.95),
    "tree_of_thought": (0.80, 0.98),
    "retrieval": (0.35, 0.80),
    "agent": (0.88, 0.99),
    "no_sharing": (0.0, 0.0),
    "hot_system_prompt": (0.80, 0.98),
    "decode_heavy": (0.70, 0.92),
}


def asked(name: str, seed: int) -> list[Question | float]:
    """One session's questions and pauses."""
    script = make_scenario(name).session(random.Random(seed), "s")
    found: list[Question | float] = []
    answers: Sequence[Answer] | None = None
    while True:
        try:
            step = next(script) if answers is None else script.send(answers)
        except StopIteration:
            return found
        answers = []
        if isinstance(step, Pause):
            found.append(step.seconds)
        else:
            found += step.questions
            answers = [made_up(each) for each in step.questions]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_seed_fixes_every_question_and_pause(name: str) -> None:
    assert asked(name, 3) == asked(name, 3)
    assert asked(name, 3) != asked(name, 4)


def test_every_scenario_says_what_it_shares() -> None:
    assert set(CLAIMED) == set(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_prompts_share_what_is_claimed(name: str) -> None:
    low, high = CLAIMED[name]
    found = measure(make_scenario(name), sessions=60, seed=1)
    assert low <= found.ratio <= high, f"{name}: {found.ratio:.3f} over {found.requests} requests"


def test_an_infinite_cache_finds_whole_blocks_of_equal_prefixes_only() -> None:
    cache = InfiniteCache()
    words = [f"w{n}" for n in range(40)]
    assert cache.hit_words(words) == 0
    cache.remember(words)
    assert cache.hit_words(words) == 32
    assert cache.hit_words(words[:32]) == 16  # one word is always computed
    assert cache.hit_words(["x", *words]) == 0
    assert cache.hit_words([*words[:16], "x", *words[16:]]) == 16


def test_samples_are_asked_one_by_one_where_n_is_refused_and_n_is_not_tried_again() -> None:
    votes: list[tuple[str, float]] = []
    scenario = SelfConsistency(on_vote=lambda winner, share: votes.append((winner, share)))
    script = scenario.session(random.Random(0), "s")
    first = next(script)
    assert isinstance(first, Ask)
    assert (first.questions[0].num_choices, first.may_refuse) == (scenario.samples, True)
    refused = Answer(0, 0, None, (), None, None, None, None, (), (), status=400, failure=Failure.STATUS)
    second = script.send([refused])
    assert isinstance(second, Ask)
    assert [each.num_choices for each in second.questions] == [1] * scenario.samples
    assert len({each.body["seed"] for each in second.questions}) == scenario.samples
    with pytest.raises(StopIteration):
        script.send([made_up(each) for each in second.questions])
    assert len(votes) == 1
    again = next(scenario.session(random.Random(1), "s"))
    assert isinstance(again, Ask)
    assert len(again.questions) == scenario.samples


def test_a_busy_server_does_not_refuse_n() -> None:
    script = SelfConsistency().session(random.Random(0), "s")
    next(script)
    busy = Answer(0, 0, None, (), None, None, None, None, (), (), status=429, failure=Failure.BUSY)
    with pytest.raises(Stopped):
        script.send([busy])


def test_the_vote_goes_to_the_ending_said_most() -> None:
    assert vote(["so it is 4", "hence 5", "I say 4"]) == ("4", 2 / 3)
    assert vote(["", ""]) == ("", 1.0)


def test_a_tree_branches_scores_and_prunes() -> None:
    """Two of six are kept: those with the best scores, and only they are gone on from."""
    tree = TreeOfThought(depth=2, branches=3, kept=2)
    script = tree.session(random.Random(0), "s")
    first = next(script)
    assert isinstance(first, Ask)
    assert len(first.questions) == 3
    scoring = script.send([made_up(each) for each in first.questions])
    assert isinstance(scoring, Ask)
    marks = ["2", "9", "7"]
    answers = [made_up(each) for each in scoring.questions]
    object.__setattr__(answers[0], "texts", (marks[0],))
    object.__setattr__(answers[1], "texts", (marks[1],))
    object.__setattr__(answers[2], "texts", (marks[2],))
    second = script.send(answers)
    assert isinstance(second, Ask)
    assert len(second.questions) == tree.kept * tree.branches
    kept = {each.body["messages"][3]["content"] for each in second.questions}
    assert kept == {
        scoring.questions[1].body["messages"][3]["content"],
        scoring.questions[2].body["messages"][3]["content"],
    }
    assert [score(said) for said in ("7 of 9", "none", "")] == [7, 0, 0]


@pytest.mark.parametrize("name", SCENARIOS)
def test_scale_makes_prompts_shorter(name: str) -> None:
    small = measure(make_scenario(name, scale=0.1, pauses=0.0), sessions=8, seed=1)
    assert small.prompt_words < 0.5 * measure(make_scenario(name), sessions=8, seed=1).prompt_words
