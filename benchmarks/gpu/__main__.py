"""`make bench-gpu`: correctness, then throughput and first tokens, on one card. Wires arguments and files.

Needs torch, transformers, xxhash and msgspec; neither Ray nor sockets.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import machine
from benchmarks.arguments import between
from benchmarks.gpu.plan import FULL, NAMES, TINY, Plan
from benchmarks.gpu.sheet import NoResults, OtherConditions, Sheet, forget
from benchmarks.stopping import stoppable

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Bench

OUT = Path(".bench/gpu/results.json")

DESCRIPTION = """\
Measure the engine on one card: an 8B-shaped network, drawn on the card from a seed, in bfloat16.

  limits            matrix products and copies a second, measured first: what the rest is held beside
  attention error   each attention backend beside exact attention, in the network's own shape
  greedy tokens     beside generate's, computed and from the cache: where they part it has to be at a near-tie
  prefill, decode   tokens/s, and the operations or bytes they need as part of the card's limits
  first token       16,384 tokens with 0, 50 and 90 % of them cached

Contenders, one after the other, each with the card to itself: our engine over each attention backend that
can run here, transformers' generate, transformers' continuous batching. All our backends have to be right;
the targets are for triton, which is to serve on cards.

Every result is written to --out at once. Run the same command again after an interruption: what is in the
file is not measured again.
"""
EPILOG = """\
examples:
  make bench-gpu                                              everything
  python -m benchmarks.gpu --limit-s 540                       stop starting measurements after nine minutes
  python -m benchmarks.gpu --device cpu --tiny                 seconds: that everything runs
"""


class CannotBegin(Exception):
    """Says why, and what to name instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """0: everything that can run here was measured, is right and reached its targets; 1: not; 2: it could not
    begin."""
    options = _parser().parse_args(argv)
    import torch

    from benchmarks.gpu.bench import Bench
    from benchmarks.gpu.contenders import device_name, why_too_small

    if options.device == "cuda" and not torch.cuda.is_available():
        return _refuse("torch sees no CUDA device here; --device cpu --tiny shows that it runs")
    _quieten()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    plan, dtype = (TINY if options.tiny else FULL), getattr(torch, options.dtype)
    try:
        sheet = _sheet(options, conditions(plan, device_name(device), options.dtype))
    except CannotBegin as error:
        return _refuse(str(error))
    began_s = time.monotonic()
    names = tuple(options.contenders)
    bench = Bench(plan, names, device, dtype, is_done=sheet.__contains__)
    keys = bench.keys  # the file may hold other contenders' results as well
    num_before = sum(key in sheet for key in keys)
    begun = f"{num_before} of them in {options.out}"
    if num_before < len(keys) and (too_small := why_too_small(plan, device, dtype)) is not None:
        return _refuse(f"{too_small}; --tiny shows that it runs")
    _say(f"{device_name(device)}, {plan.spec.name} in {options.dtype}: {len(keys)} results, {begun}")
    _measure(bench, sheet, began_s, options.limit_s)
    return _report(sheet, bench, names, plan)


def _sheet(options: argparse.Namespace, conditions: Mapping[str, Any]) -> Sheet:
    """The file of results, made where it is missing. Raises CannotBegin, which says what to name instead."""
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        if options.fresh:
            forget(options.out)
        return Sheet(options.out, conditions)
    except NoResults as error:
        raise CannotBegin(f"--out: {error}; name another") from error
    except OtherConditions as error:
        raise CannotBegin(f"{error}; name another --out, or --fresh") from error
    except OSError as error:
        raise CannotBegin(f"--out cannot be written: {error}; name another") from error


def _measure(bench: Bench, sheet: Sheet, began_s: float, limit_s: float) -> None:
    """What the sheet lacks, kept and told one by one."""
    keys = bench.keys
    num_before = sum(key in sheet for key in keys)
    for done, result in enumerate(bench.results(began_s + limit_s), num_before + 1):
        sheet.add(result)
        said = result.note or (f"{result.seconds:.4f} s" if result.seconds is not None else "done")
        where = f"[{done}/{len(keys)} {time.monotonic() - began_s:6.1f} s]"
        _say(f"{where} {result.contender}: {result.section} {result.case}: {said}")


def conditions(plan: Plan, device: str, dtype: str) -> dict[str, Any]:
    """What has to be the same for results to stand in one table."""
    packages = ("torch", "transformers", "triton", "flash_attn")
    return {
        "device": device,
        "model": plan.spec.name,
        "dtype": dtype,
        "step_tokens": plan.step_tokens,
        "versions": {name: _version(name) for name in packages},
        "commit": machine.commit(Path(__file__).parent),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _report(sheet: Sheet, bench: Bench, names: Sequence[str], plan: Plan) -> int:
    from benchmarks.gpu import table

    found = table.verdicts(sheet, plan)
    _say("", *table.table(sheet, names, bench.absent, plan), "", *table.verdict_lines(found))
    keys = bench.keys
    results = [each for each in sheet if each.key in keys]
    failed = [each for each in results if each.note.startswith("failed")]
    if len(results) < len(keys):
        _say("", f"{len(keys) - len(results)} results are not there yet: run the same command again.")
    if failed:
        _say("", f"{len(failed)} results failed, and stay so in the file: --fresh measures everything anew.")
    is_complete = len(results) == len(keys) and not failed
    return 0 if is_complete and all(each.is_reached is True for each in found) else 1


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()  # whoever is cut off has seen all there was


def _refuse(reason: str) -> int:
    sys.stderr.write(f"bench-gpu: {reason}\n")
    return 2


def _quieten() -> None:
    """transformers' advice would tear the progress; whose layers are measured has to be known."""
    import logging
    import warnings

    import transformers

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("replica.layers.layer_swap").setLevel(logging.INFO)
    transformers.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a network of 0.2M weights and short prompts")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="FILE", help=f"(default: {OUT}, which git ignores)"
    )
    parser.add_argument("--fresh", action="store_true", help="measure anew what FILE already holds")
    parser.add_argument(
        "--limit-s",
        type=between(0),
        default=float("inf"),
        metavar="S",
        help="start nothing after so many seconds",
    )
    return parser


if __name__ == "__main__":
    sys.exit(stoppable(main, "what was measured stays in the file of --out"))
