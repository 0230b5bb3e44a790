"""Where in a table of segments a hint belongs, and how many segments so many entries call for.

Linear hashing (Litwin 1980): a table grows by splitting one segment at a time, in order, and shrinks by
undoing the last split. A place's low bits are its slot, those above them its segment; while a round of splits
is not done, some segments are told apart by one bit more than others.

    segments   [ 0 1 2 3 | 4 5 )     4 and 5 took their part of 0 and 1; 2 and 3 are yet to be split
    load = entries / slots between 0.375 (a round of splits is done) and 0.55 (the next one begins)

Hints are the hashes of what clients send, made with a public function: who could choose slots by them
could make every probe long. A place is therefore `(hint mod p) * f mod p` with a secret random prime p of
30 bits and a secret factor f: two given hints are congruent for at most 2 of millions of primes, and what is
regular about the others (runs, multiples, equal low halves) the factor scatters. (Both are universal
families: Carter & Wegman 1979.)

Knows 64-bit hints and numbers of segments and slots; keeps no entries. Not thread-safe.
"""

from __future__ import annotations

import random
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Slots = NDArray[np.int64]

SPLITS_BEGIN, SPLITS_END = 0.55, 0.75  # load of a segment not yet split in this round
PRIME_BITS = 30  # the most for which Python divides a 64-bit integer by a single digit


class LinearHashing:
    """Homes of hints among `num_segments` segments. Slots are numbered through all segments, from 0.

    What is public is read-only outside this module.
    """

    __slots__ = ("bits", "factor", "full_at", "high", "in_segment", "low", "num_segments", "numbers", "prime")

    def __init__(self, segment_bits: int, rng: random.Random) -> None:
        """segment_bits: of a slot's number within its segment. rng: draws the secrets. No segments yet."""
        self.bits = segment_bits
        self.in_segment = (1 << segment_bits) - 1  # mask that makes a slot of a place
        self.prime = _random_prime(rng)
        self.factor = rng.randrange(1, self.prime)
        self.num_segments = 0
        self.high = self.low = 0  # masks that make a segment of a place: the second where the first is beyond
        self.full_at = 0  # entries for which the next split is due
        self.numbers = (0, 0, 0, 0, 0, 0)  # all that `home` asks for, as what is compiled takes it

    # --- where --------------------------------------------------------------------------------

    def home(self, hint: int) -> int:
        """The slot at which the hint's probing begins."""
        place: int = hint % self.prime * self.factor % self.prime
        segment = place >> self.bits & self.high
        if segment >= self.num_segments:
            segment &= self.low
        return segment << self.bits | place & self.in_segment

    def homes(self, keys: Keys) -> Slots:
        """`home` of each."""
        places = self._places(keys)
        segments = places >> self.bits & self.high
        beyond = segments >= self.num_segments
        segments[beyond] &= self.low
        return segments << self.bits | places & self.in_segment

    def homes_within(self, keys: Keys) -> Slots:
        """`home` of each, counted from its segment's beginning: the same whatever there is of segments."""
        return self._places(keys) & self.in_segment

    def _places(self, keys: Keys) -> Slots:
        """30 bits each; segments are numbered by the upper ones, slots by the lower."""
        prime = np.uint64(self.prime)
        return (keys % prime * np.uint64(self.factor) % prime).astype(np.int64)

    # --- how many -----------------------------------------------------------------------------

    def resize(self, num_segments: int) -> None:
        """There are so many segments now: one more, or one less, than before."""
        self.num_segments = num_segments
        self.high = (1 << (num_segments - 1).bit_length()) - 1
        self.low = self.high >> 1
        self.full_at = self.capacity(num_segments)
        self.numbers = self.prime, self.factor, self.bits, self.high, self.low, num_segments

    def capacity(self, num_segments: int) -> int:
        """Entries that so many segments take before the next split is due."""
        whole = 1 << num_segments.bit_length() - 1  # segments when the round began
        done = (num_segments - whole) / whole  # part of them that has been split since
        return int((whole << self.bits) * (SPLITS_BEGIN + done * (SPLITS_END - SPLITS_BEGIN)))

    def segments_for(self, num_entries: int) -> int:
        """The fewest segments that take so many entries."""
        count = 1
        while self.capacity(count) < num_entries:
            count *= 2
        first = count // 2 + 1
        return first + bisect_left(range(first, count), num_entries, key=self.capacity)


def split_from(segment: int) -> int:
    """The segment whose split opened this one, and that takes its keys back when that is undone; 0 for 0."""
    return segment - (1 << segment.bit_length() - 1) if segment else 0


def _random_prime(rng: random.Random) -> int:
    """One of about 6 million: the upper eighth of the numbers of PRIME_BITS bits."""
    while True:
        candidate = rng.randrange(7 << PRIME_BITS - 3, 1 << PRIME_BITS) | 1
        if _is_prime(candidate):
            return candidate


def _is_prime(number: int) -> bool:
    """Miller-Rabin, with bases that leave no doubt below 3.2e9 (Pomerance, Selfridge, Wagstaff 1980)."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7):
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True
