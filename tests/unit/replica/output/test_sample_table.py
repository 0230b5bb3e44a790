"""The sample table: the same everywhere, long, and each question has one answer in it."""

from __future__ import annotations

import hashlib

from replica.output.sample_table import people, people_table, prompt, questions


def test_thirty_people_and_no_value_that_could_be_confused() -> None:
    rows = people()
    assert len(rows) == 30
    for column in ("id", "name", "email", "phone", "address", "country"):
        assert len({getattr(row, column) for row in rows}) == 30, column


def test_table_is_the_same_on_every_machine() -> None:
    """Measured demo figures stand on it: a change is a decision, not an accident."""
    assert people_table().startswith("| id | name | age | occupation | country | email | phone | address |\n")
    assert people_table().count("\n") == 32
    assert hashlib.sha256(people_table().encode()).hexdigest()[:16] == "7eba5a7151b24ce6"


def test_questions_differ_and_the_table_answers_them() -> None:
    asked = questions()
    assert len({q.text for q in asked}) == len({q.answer for q in asked}) == len(asked) == 10
    for question in asked:
        name = question.text.split(" of ")[1].removesuffix("?")
        [row] = [line for line in people_table().splitlines() if name in line]
        assert f"| {question.answer} |" in row


def test_prompts_share_everything_before_the_question() -> None:
    first, second = (prompt(q) for q in questions()[:2])
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert shared > 0.95 * len(first)
