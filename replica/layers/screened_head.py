"""A model's output layer that answers "which token is largest" without computing every logit.

Takes the place of the packed layer in the model, so that transformers' own code goes on around it: what a
family does to its logits (a softcap, a scale) it does to the few that are computed here. That has to leave
their order alone, each by itself; `keeps_order` sees whether it does, before anything is packed.

    rows of a step   largest   only their largest logit is asked for: screened
                     others    all their logits are asked for (sampled, stop tokens held back): computed
                     unused    nothing is drawn: neither, once it is known that they are numbers

Knows the model's output layer and which rows are asked what; knows neither requests nor sampling.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from replica.layers.coarse_product import MakeProduct, find_bfloat16, find_int8
from replica.layers.greedy_screen import GreedyScreen, narrowed
from replica.layers.packed_linear import PackedLinear
from replica.layers.screen_costs import FEW_ROWS, MANY_ROWS, ScreenCosts, compare

logger = logging.getLogger(__name__)

# A softcap pulls large logits together until they round to one number, of which the first token is the
# answer, screened out or not. Largest and limit must come out at least this far apart, relatively.
_DISTINCT = 2.0**-18


@dataclass(frozen=True, slots=True)
class RowsAsked:
    """Rows of a step by what is asked of them; a row in neither is unused."""

    largest: tuple[int, ...]
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowsAnswered:
    """One step's answer."""

    tokens: dict[int, int]  # row -> the token with the largest logit, the first among equals
    computed: tuple[int, ...]  # rows that were computed in full: those asked for and those handed back
    logits: torch.Tensor  # theirs, (computed, vocabulary)


@dataclass(slots=True)
class _Screening:
    """Between the runner and the layer, for the length of one forward."""

    asked: RowsAsked
    tokens: tuple[int, ...] = ()  # contenders, by row
    counts: tuple[int, ...] = ()  # how many of them each row of `asked.largest` has
    computed: tuple[int, ...] = ()


class ScreenedHead(nn.Module):
    """Wraps the packed output layer; without `screening` it is that layer. Inference only."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, whole: PackedLinear, screen: GreedyScreen, costs: ScreenCosts | None) -> None:
        """costs: None = screen whenever there is a row to screen."""
        super().__init__()
        self.in_features, self.out_features = whole.in_features, whole.out_features
        for name in ("weight", "bias"):
            object.__setattr__(self, name, getattr(whole, name))
        self.whole = whole
        self._screen = screen
        self._costs = costs
        self._screening: _Screening | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self._screening is None:
            logits: torch.Tensor = self.whole(rows)
            return logits
        return self._screened(rows.reshape(-1, self.in_features), self._screening)[None, None]

    def screens(self, asked: RowsAsked, num_rows: int) -> bool:
        """Whether these rows of a step are better screened."""
        if self._costs is None:
            return bool(asked.largest)
        num_unused = num_rows - len(asked.largest) - len(asked.others)
        pays = self._costs.pays(len(asked.largest), len(asked.others), num_unused)
        if not pays and asked.largest:
            self._costs.note_left_alone()
        return pays

    def answer(self, asked: RowsAsked, forward: Callable[[], torch.Tensor]) -> RowsAnswered | None:
        """Run the forward with these rows screened. forward: returns the model's logits.

        None: the model made equals of logits that are not, and only a forward without screening can tell
        which token is first among them.
        """
        with self._asking(asked) as screening:
            values = forward().reshape(-1)
        num_contenders, num_largest = len(screening.tokens), len(asked.largest)
        num_decided = num_contenders + num_largest
        contenders, limits = values[:num_contenders], values[num_contenders:num_decided]
        tokens = _first_largest(asked.largest, screening, contenders.tolist(), limits.tolist())
        num_handed_back = num_largest - sum(count > 0 for count in screening.counts)
        if self._costs is not None:
            self._costs.note(num_largest, num_largest if tokens is None else num_handed_back)
        if tokens is None:
            return None
        return RowsAnswered(tokens, screening.computed, values[num_decided:].view(-1, self.out_features))

    @contextmanager
    def _asking(self, asked: RowsAsked) -> Iterator[_Screening]:
        self._screening = _Screening(asked)
        try:
            yield self._screening
        finally:
            self._screening = None

    def _screened(self, rows: torch.Tensor, screening: _Screening) -> torch.Tensor:
        """Contenders' logits, then the screened rows' limits, then all logits of the rows computed."""
        asked = screening.asked
        parts = []
        handed_back: list[int] = []
        if asked.largest:
            those = rows if len(asked.largest) == rows.shape[0] else rows[list(asked.largest)]
            contenders = self._screen.contenders(those)
            parts += [self._screen.exact(those, contenders), contenders.limits]
            screening.tokens = tuple(contenders.tokens.tolist())
            screening.counts = tuple(contenders.counts)
            handed_back = [
                row for row, count in zip(asked.largest, contenders.counts, strict=True) if not count
            ]
        if len(asked.largest) + len(asked.others) < rows.shape[0]:
            handed_back += self._unbounded(rows, {*asked.largest, *asked.others})
        computed = sorted([*asked.others, *handed_back])
        screening.computed = tuple(computed)
        if computed:
            parts.append(self.whole(rows[computed]).reshape(-1))
        return torch.cat(parts) if parts else rows.new_zeros(0)

    def _unbounded(self, rows: torch.Tensor, used: set[int]) -> list[int]:
        """Unused rows whose logits might not be numbers: computed, for the sampler to find that."""
        unused = [row for row in range(rows.shape[0]) if row not in used]
        bounded = self._screen.can_bound(rows[unused]).tolist()
        return [row for row, is_bounded in zip(unused, bounded, strict=True) if not is_bounded]


def _first_largest(
    rows: Sequence[int], screening: _Screening, values: list[float], limits: list[float]
) -> dict[int, int] | None:
    """Each decided row's token. None: a token that was screened out may be equal to the largest."""
    tokens: dict[int, int] = {}
    at = 0
    for row, count, limit in zip(rows, screening.counts, limits, strict=True):
        if not count:
            continue
        own = values[at : at + count]
        best = max(own)
        if any(map(math.isnan, own)) or not best - limit > _DISTINCT * abs(best):
            return None
        tokens[row] = screening.tokens[at + own.index(best)]
        at += count
    return tokens


# -- at load ----------------------------------------------------------------------------------------


def keeps_order(vocabulary: int, replay: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether a model changes its logits one by one, larger ones to no smaller ones.

    replay: what the model returns when its output layer gives the tensor.
    """
    magnitudes = torch.logspace(-3, 4, vocabulary // 2 + 1)
    ascending = torch.cat([-magnitudes.flip(0), magnitudes])[:vocabulary]
    shuffled = torch.cat([ascending.flip(0), ascending, ascending[: vocabulary // 3]])
    try:
        in_order = replay(ascending.view(1, 1, -1)).flatten()
        others = replay(shuffled.view(1, 1, -1)).flatten()
        few, none = (replay(ascending[:count].view(1, 1, -1)).flatten() for count in (1, 0))
    except Exception:  # whatever a family raises when it is given no whole vocabulary
        return False
    wanted = torch.cat([in_order.flip(0), in_order, in_order[: vocabulary // 3]])
    return (
        torch.equal(others, wanted)
        and torch.equal(few, in_order[:1])
        and not none.numel()
        and bool((in_order.diff() >= 0).all())
        and float(in_order[-1]) > float(in_order[0])
    )


def screen_head(
    linear: nn.Linear, whole: PackedLinear, rows: torch.Tensor, *, is_shared: bool, measured: bool
) -> ScreenedHead | None:
    """The layer that screens; None where it would not, with the reason logged.

    linear: the layer as loaded. rows: (rows, width), such as the model gives it: how few contenders a coarse
    product leaves depends on them. is_shared: its weight stays in memory anyway (tied embeddings).
    measured: only if it is the faster way on this machine.
    """
    weight = linear.weight if is_shared else narrowed(linear.weight.detach())
    best: tuple[ScreenCosts, GreedyScreen] | None = None
    refusal = "this torch or processor has no coarse product"
    for make in _products():
        try:
            screen = GreedyScreen(weight, linear.bias, make)
        except (ValueError, RuntimeError) as error:
            refusal = str(error)
            continue
        costs = _measured(whole, screen, rows)
        if best is None or costs.seconds(MANY_ROWS) < best[0].seconds(MANY_ROWS):
            best = costs, screen
    if best is None:
        _log_refusal(refusal)
        return None
    costs, screen = best
    if measured and not (costs.pays(FEW_ROWS, 0) or costs.pays(MANY_ROWS, 0)):
        _log_refusal("the whole product is as fast")
        return None
    return ScreenedHead(whole, screen, costs if measured else None).train(linear.training)


def _products() -> list[MakeProduct]:
    """The coarse products that this machine has."""
    return [make for make in (find_bfloat16(), find_int8()) if make is not None]


def _log_refusal(reason: str) -> None:
    logger.info("greedy tokens are not screened", extra={"reason": reason})


def screen_bytes(linear: nn.Linear, *, is_shared: bool) -> int:
    """Memory that screening takes at most, while both kinds are tried: three bytes a weight, and the layer
    itself where it would be freed. What is left of the three is two, or one."""
    return linear.weight.numel() * 3 + (0 if is_shared else linear.weight.nbytes)


def _measured(whole: PackedLinear, screen: GreedyScreen, rows: torch.Tensor) -> ScreenCosts:
    """What both ways take with rows like these, over and over if there are too few."""
    many = rows.repeat(-(-MANY_ROWS // rows.shape[0]), 1)[:MANY_ROWS]

    def screened(num_rows: int) -> Any:
        return screen.exact(many[:num_rows], screen.contenders(many[:num_rows]))

    with torch.inference_mode():
        handed_back = screen.contenders(many).counts.count(0) / MANY_ROWS
        of_whole, of_screened = compare(lambda num_rows: whole(many[None, :num_rows]), screened)
        return ScreenCosts(of_whole, of_screened, handed_back)
