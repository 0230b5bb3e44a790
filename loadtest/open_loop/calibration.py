"""How many tokens a word is, as the served model's own tokenizer counts: asked once, before a run."""

from __future__ import annotations

from loadtest.client.asking import Asker
from loadtest.client.endpoint import Endpoint
from loadtest.client.errors import Unreachable
from loadtest.client.question import completion
from loadtest.scenarios.words import text

_FEW, _MANY = 50, 250  # words: their difference leaves out what every prompt costs


def tokens_per_word(endpoint: Endpoint) -> float:
    """Raises Unreachable if the server does not answer, or does not count."""
    asker = Asker(endpoint)
    try:
        few, many = (_prompt_tokens(asker, endpoint, words) for words in (_FEW, _MANY))
    finally:
        asker.close()
    return max(0.1, (many - few) / (_MANY - _FEW))


def _prompt_tokens(asker: Asker, endpoint: Endpoint, num_words: int) -> int:
    answer = asker.ask(completion(text("how many tokens is a word", num_words), max_tokens=1))
    if not answer.is_ok:
        assert answer.failure is not None
        raise Unreachable(endpoint.url, f"{answer.failure.value}: {answer.problem}")
    if answer.prompt_tokens is None:
        raise Unreachable(endpoint.url, "it streams no usage, so there is no telling how long prompts are")
    return answer.prompt_tokens
