"""What a step costs on this machine, learned while serving.

    step_s = base_s + per_token_s * new_tokens + per_attention_s * attention + per_sequence_s * sequences

Least squares over the steps seen, kept as running normal equations; coefficients are never negative.
Steps are forgotten kind by kind: an hour of decoding must not blur what a prefill costs, so a kind of step
fades as more of its own kind come in, and only so far by others.
Forgetting alone follows a machine that becomes ten times slower (a throttled card, a neighbour that takes
the cores) in some 150 steps, which by then take fifteen seconds. Such a machine is slower at everything: a
few steps in a row that are all far off, to the same side, scale whatever was learned by how far off they are.
Pure arithmetic: knows no clock, no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from cache.events import StepTimeModel
from replica.scheduling.runner import ScheduledSequence

# Typical sizes, so that all four columns are of order one and the solver sees no tiny pivots.
_SCALES = (1.0, 256.0, 65536.0, 16.0)
_ATTENTION, _SEQUENCES = 2, 3  # their columns

FORGETTING = 0.97  # per step of a kind: about its last 33 count
FADING = 0.998  # per step of other kinds: half after 350, so that a slower machine is noticed everywhere
LEAST_WEIGHT = 0.02  # but never forgotten: old news about prefills is better than none
MIN_STEPS = 24
MIN_SPREAD = 4  # largest step's tokens over the smallest's; below it the slope is guesswork
REFIT_STEPS = 16  # steps between two solutions: solving costs about a tenth of a millisecond

STRAY = 1.6  # times the fit's prediction, or a part of it: what noise and a poor fit hardly reach
STRAYS = 5  # such steps in a row, all too slow or all too fast, are another pace of the machine
# If together they are this far off; below it, forgetting does. Decodes of one length are attended to all at
# once and others one by one: that alone is a factor of 2, and says nothing of prompts.
RESCALE = 3.0

_RIDGE = 1e-6  # of each column's own weight: settles what the steps cannot tell apart
# What steps do not show belongs to the terms that grow least. Where all prompts are short, attention is too
# little to be seen, and a slow step or two would be laid to it: a prompt ten times as long is then priced at
# a hundred times as much, and whoever comes with one is refused. Where sequences come one by one, half of
# what a step costs anyway would be each sequence's. So both cost nothing until steps of some thousand pairs,
# or of several sequences, show that they do: this part of all steps' weight says so.
_UNSEEN = 3e-5


class StepWork(NamedTuple):
    """What a step's time is made of: the arguments of `StepTimeModel.step_s`."""

    new_tokens: int
    attention: float  # (query, key) pairs, see `attention_pairs`
    sequences: int


def attention_pairs(start: int, new_tokens: int) -> float:
    """(query, key) pairs of `new_tokens` tokens after `start` computed ones, under a causal mask."""
    return new_tokens * (start + new_tokens / 2)


def step_work(sequences: Sequence[ScheduledSequence]) -> StepWork:
    """The work of one step, of one sequence at least. Of what goes through some of the layers it is that
    share."""
    new_tokens = sum([s.num_new_tokens for s in sequences])
    attention = sum([attention_pairs(s.start, s.num_new_tokens) for s in sequences])
    last = sequences[-1]
    if (layers := last.layers) is not None:
        new_tokens -= last.num_new_tokens - layers.tokens(last.num_new_tokens)
        attention -= (1 - layers.share) * attention_pairs(last.start, last.num_new_tokens)
    return StepWork(new_tokens, attention, len(sequences))


Matrix = list[list[float]]
Vector = list[float]


class _Step(NamedTuple):
    """One observation."""

    work: StepWork
    elapsed_s: float
    number: int


class StepTimeFit:
    """Owned by the engine thread."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._num_steps = 0
        self._smallest = self._largest = 0
        self._model: StepTimeModel | None = None
        self._solved_at = 0
        self._strays: list[_Step] = []  # the latest steps, if they are far off, all to the same side

    def observe(self, *, new_tokens: int, attention: float, sequences: int, elapsed_s: float) -> None:
        """Learn from one step. attention: sum over sequences of new * (context + new / 2). O(1)."""
        if new_tokens < 1 or elapsed_s <= 0:
            return
        self._num_steps += 1
        self._smallest = min(self._smallest or new_tokens, new_tokens)
        self._largest = max(self._largest, new_tokens)
        step = _Step(StepWork(new_tokens, attention, sequences), elapsed_s, self._num_steps)
        stray = self._stray(step)
        if not stray or (self._strays and self._stray(self._strays[-1]) != stray):
            self._learn_strays()
        if not stray:
            self._learn(step)
            return
        self._strays.append(step)
        if len(self._strays) >= STRAYS:
            self._rescale()

    def model(self) -> StepTimeModel | None:
        """The present fit; None until enough steps of different sizes have been seen."""
        if self._num_steps < MIN_STEPS or self._largest < MIN_SPREAD * self._smallest:
            return None
        if self._model is None or self._num_steps - self._solved_at >= REFIT_STEPS:
            self._solved_at = self._num_steps
            self._model = self._solve()
        return self._model

    def _stray(self, step: _Step) -> int:
        """1: much slower than the present fit has it, -1: much faster, 0: neither, or there is no fit."""
        if self._model is None:
            return 0
        expected_s = self._model.step_s(*step.work)
        return (step.elapsed_s > STRAY * expected_s) - (STRAY * step.elapsed_s < expected_s)

    def _learn(self, step: _Step) -> None:
        work = step.work
        kind = ((work.new_tokens - work.sequences).bit_length(), int(work.attention).bit_length() // 4)
        row = [value / scale for value, scale in zip((1.0, *work), _SCALES, strict=True)]
        self._kinds.setdefault(kind, _Kind()).add(row, step.elapsed_s, step.number)

    def _learn_strays(self) -> None:
        for step in self._strays:
            self._learn(step)
        self._strays.clear()

    def _rescale(self) -> None:
        """The machine's pace has changed: what was learned holds, times a factor."""
        assert self._model is not None, "strays are strays from a fit"
        expected_s = sum([self._model.step_s(*step.work) for step in self._strays])
        factor = sum([step.elapsed_s for step in self._strays]) / expected_s if expected_s > 0 else 1.0
        if not 1 / RESCALE < factor < RESCALE:
            for kind in self._kinds.values():
                kind.scale(factor)
            self._model = None  # to be solved when it is asked for, with the strays
        self._learn_strays()

    def _solve(self) -> StepTimeModel:
        gram: Matrix = [[0.0] * 4 for _ in range(4)]
        moment: Vector = [0.0] * 4
        for kind in self._kinds.values():
            weight = max(LEAST_WEIGHT, FADING ** (self._num_steps - kind.seen_at))
            for i in range(4):
                moment[i] += weight * kind.moment[i]
                for j in range(4):
                    gram[i][j] += weight * kind.gram[i][j]
        for column in (_ATTENTION, _SEQUENCES):
            gram[column][column] += _UNSEEN * gram[0][0]
        solution = _non_negative_least_squares(gram, moment)
        base_s, per_token_s, per_attention_s, per_sequence_s = (
            value / scale for value, scale in zip(solution, _SCALES, strict=True)
        )
        return StepTimeModel(base_s, per_token_s, per_attention_s, per_sequence_s)


class _Kind:
    """Normal equations of one kind of step, the older ones fading."""

    __slots__ = ("gram", "moment", "seen_at")

    def __init__(self) -> None:
        self.gram: Matrix = [[0.0] * 4 for _ in range(4)]
        self.moment: Vector = [0.0] * 4
        self.seen_at = 0  # number of the last step of this kind

    def scale(self, factor: float) -> None:
        """As if every step had taken that many times as long."""
        for i in range(4):
            self.moment[i] /= factor
            for j in range(4):
                self.gram[i][j] /= factor * factor

    def add(self, row: Vector, elapsed_s: float, step: int) -> None:
        keep = FORGETTING * FADING ** (step - self.seen_at)
        self.seen_at = step
        # Weighted by 1/elapsed^2: errors count relative to the step, else one slow step (a page
        # fault storm, a busy neighbour) would outweigh a thousand ordinary decodes.
        weight = 1.0 / (elapsed_s * elapsed_s)
        for i in range(4):
            for j in range(4):
                self.gram[i][j] = keep * self.gram[i][j] + weight * row[i] * row[j]
            self.moment[i] = keep * self.moment[i] + weight * row[i] * elapsed_s


def _non_negative_least_squares(gram: Matrix, moment: Vector) -> Vector:
    """Minimise x'Gx - 2m'x over x >= 0, exactly: the best of all 15 choices of columns to use."""
    best, best_loss = [0.0] * 4, 0.0
    for size in range(1, 5):
        for columns in combinations(range(4), size):
            part = _solve_linear(
                [[gram[i][j] * (1 + _RIDGE * (i == j)) for j in columns] for i in columns],
                [moment[i] for i in columns],
            )
            if part is None or min(part) < 0:
                continue
            loss = -sum(moment[i] * value for i, value in zip(columns, part, strict=True))
            if loss < best_loss:
                best, best_loss = [0.0] * 4, loss
                for i, value in zip(columns, part, strict=True):
                    best[i] = value
    return best


def _solve_linear(matrix: Matrix, right: Vector) -> Vector | None:
    """Gaussian elimination with pivoting; None when singular. At most 4 x 4."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        if abs(rows[pivot][column]) < 1e-300:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for below in range(column + 1, size):
            factor = rows[below][column] / rows[column][column]
            for k in range(column, size + 1):
                rows[below][k] -= factor * rows[column][k]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][k] * solution[k] for k in range(row + 1, size))
        solution[row] = (rows[row][size] - known) / rows[row][row]
    return solution
