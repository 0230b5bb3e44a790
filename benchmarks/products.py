"""Which kernels a linear layer's product is fastest with on this processor: what `replica/layers/` goes by.

    python -m benchmarks.products [--repeats 9] [--layers 12]

One line per shape of weight and number of rows: torch's own product by the weight as loaded, oneDNN's by the
packed one, the same with the rows repeated to four, and with SiLU as its post-op and by itself. CPU time of
one layer, medians over repeats in which all ways take turns; every layer has a weight of its own, so that
weights come from memory as they do in a step. One thread. Knows kernels; knows neither models nor steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.functional import linear, silu

from benchmarks.arguments import positive
from benchmarks.machine import describe
from benchmarks.stopping import stoppable
from replica.layers.packed_linear import EXPECTED_ROWS, NO_SCALARS, find_kernels

SHAPES = ((3072, 768), (768, 3072), (1024, 256), (256, 1024))  # (outputs, inputs): of MLPs, 132M's and 9M's
ROWS = (1, 4, 8, 32, 512)
WAYS = ("as loaded", "packed", "packed, 4 rows", "SiLU as post-op", "SiLU by itself")

Way = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.products",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=positive, default=9, help="of every way, in turns (default: 9)")
    parser.add_argument("--layers", type=positive, default=12, help="weights of each shape (default: 12)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console(highlight=False)
    table = Table("weight", "rows", *[f"{way}, ms" for way in WAYS], box=SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    cells = [(shape, num_rows) for shape in SHAPES for num_rows in ROWS]
    with torch.inference_mode():
        for shape, num_rows in track(cells, "Multiplying", console=Console(stderr=True), transient=True):
            times = medians(ways(shape, num_rows, arguments.layers), arguments.repeats)
            shown = [f"{times[way] / arguments.layers:.3f}" if way in times else "" for way in WAYS]
            table.add_row(f"{shape[0]} x {shape[1]}", str(num_rows), *shown)
    console.print(table)
    console.print(describe(1), soft_wrap=True)
    return 0


def ways(shape: tuple[int, int], num_rows: int, num_layers: int) -> dict[str, Way]:
    """What is compared: each multiplies the same rows by all weights of this shape."""
    kernels = find_kernels()
    if kernels is None:
        raise SystemExit("oneDNN's packed product is not to be had with this torch: nothing to compare")
    pack, multiply = kernels
    weights = [torch.randn(shape) for _ in range(num_layers)]
    packed = [pack(weight, EXPECTED_ROWS) for weight in weights]
    rows, four = torch.randn(1, num_rows, shape[1]), torch.randn(1, 4, shape[1])

    def product(of: torch.Tensor, how: str) -> list[torch.Tensor]:
        return [multiply(of, weight, None, how, NO_SCALARS, "") for weight in packed]

    found: dict[str, Way] = {
        "as loaded": lambda: [linear(rows, weight) for weight in weights],
        "packed": lambda: product(rows, "none"),
        "SiLU as post-op": lambda: product(rows, "swish"),
        "SiLU by itself": lambda: [silu(each, inplace=True) for each in product(rows, "none")],
    }
    if num_rows < four.shape[1]:
        found["packed, 4 rows"] = lambda: product(four, "none")
    return found


def medians(compared: dict[str, Way], repeats: int) -> dict[str, float]:
    """CPU milliseconds of each, taken in turns; the first round is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in compared}
    for number in range(repeats + 1):
        for name, way in compared.items():
            began_s = time.process_time()
            way()
            if number:
                taken[name].append(1e3 * (time.process_time() - began_s))
    return {name: statistics.median(times) for name, times in taken.items()}


if __name__ == "__main__":
    sys.exit(stoppable(main))
