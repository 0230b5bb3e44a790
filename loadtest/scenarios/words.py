"""Text of a given length that is the same wherever it is made: words drawn from a key.

About a token per word with the tokenizers of real models; what a prompt has really cost, `usage` says.
"""

from __future__ import annotations

import random
from functools import lru_cache

# Short, common English: one token each in most vocabularies.
_WORDS = (
    "the of and to in is that it was for on are with as his they be at one have this from or had by word "
    "but what some we can out other were all there when up use your how said an each she which do their "
    "time if will way about many then them write would like so these her long make thing see him two has "
    "look more day could go come did number sound no most people my over know water than call first who "
    "may down side been now find any new work part take get place made live where after back little only "
    "round man year came show every good me give our under name very through just form great think say "
    "help low line turn cause much mean before move right boy old too same tell does set three want air "
    "well also play small end put home read hand port large spell add even land here must big high such "
    "follow act why ask men change went light kind off need house picture try us again animal point "
    "mother world near build self earth father head stand own page should country found answer school "
    "grow study still learn plant cover food"
).split()


@lru_cache(maxsize=4096)
def text(key: str, num_words: int) -> str:
    """`num_words` words (at least 1) that follow from `key` alone, in sentences."""
    draw = random.Random(key)
    words = draw.choices(_WORDS, k=max(1, num_words))
    for begin in range(0, len(words), 12):
        words[begin] = words[begin].capitalize()
        last = min(begin + 11, len(words) - 1)
        words[last] += "."
    return " ".join(words)
