"""`python -m benchmarks.step_profile`: where a step's CPU time goes, part by part.

    step ┬ scheduling        whose turn, blocks, hashes
         ├ forward ┬ attention      gathering keys and values included
         │         ├ linear layers  with what is fused into them
         │         ├ output layer
         │         └ the rest       norms, rotary, embedding, transformers' own code
         ├ sampling
         ├ the runner around those  packing the step's tokens and tables
         ├ tokens taken             detokenizing, stopping, counting
         └ events                   made and packed, here after every step

A part's time is its own, without the parts inside it, so that they sum to the step. Clocks are read where a
part begins and ends, by wrapping methods of the engine's classes before it is assembled: what reading them
costs is told as what a step takes more than one without. One thread; CPU time. Knows the engine's classes by
name; a part that none of them computes any more is refused, so that the table cannot lose one quietly.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from benchmarks import cases, machine, models
from benchmarks.arguments import positive, to_write
from benchmarks.cases import ModelSpec, random_prompts
from benchmarks.stopping import ctrl_c_is_ours, stoppable
from benchmarks.worker import ALLOCATOR
from cache.event_log import EventLog
from cache.event_wire import encode
from cache.messages import GenerateRequest, SamplingParams
from cache.types import RequestId

if TYPE_CHECKING:
    from replica.assembly import Assembly

EPILOG = """\
examples:
  python -m benchmarks.step_profile
  python -m benchmarks.step_profile --models 9M --only decode --repeats 1 --json out.json
"""

SCHEDULING, ATTENTION, LINEAR, OUTPUT = "scheduling", "attention", "linear layers", "output layer"
FORWARD, SAMPLING, RUNNER = "norms and the rest of the forward", "sampling", "the runner around those"
TAKEN, EVENTS, OTHER = "tokens taken: text, stopping", "events", "else"
PARTS = (ATTENTION, LINEAR, OUTPUT, FORWARD, SAMPLING, RUNNER, SCHEDULING, TAKEN, EVENTS, OTHER)


@dataclass(frozen=True, slots=True)
class Shape:
    """The steps of one column."""

    name: str
    batch: int
    prompt_tokens: int
    output_tokens: int
    is_prefill: bool  # its steps compute prompts; else they decode, all of the batch


SHAPES = (
    Shape("decode, batch 1", 1, 128, 40, is_prefill=False),
    Shape("decode, batch 8", 8, 128, 40, is_prefill=False),
    Shape("decode, batch 32", 32, 128, 40, is_prefill=False),
    Shape("prefill, 512 of 2,048", 1, 2_048, 1, is_prefill=True),
)


@dataclass(frozen=True, slots=True)
class Profile:
    """One model's steps of one shape; seconds of CPU time per step, medians but for the parts."""

    model: str
    shape: str
    num_steps: int
    parts: Mapping[str, float]  # means over the middle half of the steps: they sum to one of those
    step_s: float
    unwatched_s: float  # the same step with no clock read inside


class PartTimes:
    """Own time of nested parts. One thread."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._open: list[tuple[str, bool]] = []  # part, whether it takes in what is inside it
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    @contextmanager
    def step(self) -> Iterator[dict[str, float]]:
        """What is watched meanwhile; the mapping is filled when it is over."""
        assert not self._open, "steps do not nest"
        seconds: dict[str, float] = {}
        self._seconds = seconds
        self._enter(OTHER, False)
        try:
            yield seconds
        finally:
            while self._open:
                self._leave()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._enter(name, True)
        try:
            yield
        finally:
            self._leave()

    def watched(self, function: Callable[..., Any], name: str, *, is_whole: bool) -> Callable[..., Any]:
        """The function, its time the part's; is_whole: with what it calls, whatever part that is."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._open or self._open[-1][1]:  # outside a step, or inside a whole part
                return function(*args, **kwargs)
            self._enter(name, is_whole)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return timed

    def _enter(self, name: str, is_whole: bool) -> None:
        now = self._clock()
        if self._open:
            self._add(now)
        self._open.append((name, is_whole))
        self._since = now

    def _leave(self) -> None:
        now = self._clock()
        self._add(now)
        self._open.pop()
        self._since = now

    def _add(self, now: float) -> None:
        name, _ = self._open[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since


def watch_engine(times: PartTimes) -> Callable[[], None]:
    """Wrap the engine's methods by part; call it before one is assembled. Returns what undoes it."""
    from replica.attention.gather_sdpa import GatherSdpa
    from replica.engine.engine_core import EngineCore
    from replica.layers.combining_linear import CombiningLinear
    from replica.layers.packed_linear import PackedLinear
    from replica.layers.screened_head import ScreenedHead
    from replica.runners.drawer import Drawer
    from replica.runners.model_runner import ModelRunner
    from replica.scheduling.scheduler import Scheduler

    # Class, methods, part, whether it takes in what it calls.
    places: tuple[tuple[type, tuple[str, ...], str, bool], ...] = (
        (Scheduler, ("expire", "schedule", "update"), SCHEDULING, True),
        (ModelRunner, ("execute",), RUNNER, False),
        (Drawer, ("compute",), SAMPLING, False),
        (ModelRunner, ("_forward",), FORWARD, False),
        (GatherSdpa, ("attend",), ATTENTION, True),
        (PackedLinear, ("forward",), LINEAR, True),
        (CombiningLinear, ("swish", "times", "plus"), LINEAR, True),
        (ScreenedHead, ("forward",), OUTPUT, True),
        (EngineCore, ("_advance",), TAKEN, True),
    )
    with ExitStack() as stack:
        for owner, methods, part, is_whole in places:
            for method in methods:
                own = owner.__dict__[method]
                setattr(owner, method, times.watched(own, part, is_whole=is_whole))
                stack.callback(setattr, owner, method, own)
        return stack.pop_all().close


def profile(spec: ModelSpec, shapes: Sequence[Shape], folder: Path, repeats: int) -> list[Profile]:
    """Steps of these shapes, watched and, by an engine of its own, not. Imports torch."""
    times = PartTimes()
    unwatch = watch_engine(times)
    try:
        watched = _steps(spec, shapes, folder, repeats, times)
    finally:
        unwatch()
    unwatched = _steps(spec, shapes, folder, repeats, PartTimes())
    return [
        _profile(spec, shape, mine, others)
        for shape, mine, others in zip(shapes, watched, unwatched, strict=True)
    ]


def _profile(
    spec: ModelSpec,
    shape: Shape,
    watched: Sequence[Mapping[str, float]],
    unwatched: Sequence[Mapping[str, float]],
) -> Profile:
    if lost := {ATTENTION, LINEAR, FORWARD, SCHEDULING, TAKEN}.difference(*watched):
        raise RuntimeError(f"nothing was computed by the classes watched for {', '.join(sorted(lost))}")
    ordered = sorted(watched, key=_total)
    middle = ordered[len(ordered) // 4 : -(-3 * len(ordered) // 4)]
    return Profile(
        spec.name,
        shape.name,
        len(watched),
        {part: fmean(step.get(part, 0.0) for step in middle) for part in PARTS},
        median(map(_total, watched)),
        median(map(_total, unwatched)),
    )


def _total(step: Mapping[str, float]) -> float:
    return sum(step.values())


def _steps(
    spec: ModelSpec, shapes: Sequence[Shape], folder: Path, repeats: int, times: PartTimes
) -> list[list[dict[str, float]]]:
    """By shape, on one runner."""
    from replica.assembly import assemble
    from replica.config import ReplicaConfig

    most_tokens = max(shape.batch * (shape.prompt_tokens + shape.output_tokens + 16) for shape in shapes)
    config = ReplicaConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        torch_threads=1,
        num_blocks=most_tokens // 16 + 16,
    )
    assembly = assemble(config)
    assembly.runner.warm_up()
    try:
        return [_steps_of(spec, shape, assembly, repeats, times) for shape in shapes]
    finally:
        assembly.runner.close()


def _steps_of(
    spec: ModelSpec, shape: Shape, assembly: Assembly, repeats: int, times: PartTimes
) -> list[dict[str, float]]:
    rng = random.Random(f"{spec.name} {shape.name}")
    found: list[dict[str, float]] = []
    for _ in range(repeats):
        prompts = random_prompts(rng, shape.batch, shape.prompt_tokens, spec.vocabulary)
        found += _run(assembly, shape, prompts, times)
    return found


def _run(
    assembly: Assembly, shape: Shape, prompts: Sequence[Any], times: PartTimes
) -> list[dict[str, float]]:
    """Every step of that shape from prompts to their last tokens, on an engine that holds nothing yet."""
    log = EventLog(epoch=1)
    core = assembly.core(sink=log)
    sampling = SamplingParams(max_tokens=shape.output_tokens, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        core.submit(GenerateRequest(RequestId(f"r{number}"), prompt, len(prompt), sampling, seed=0))
    found: list[dict[str, float]] = []
    while core.has_work:
        is_decode = all(request.num_output_tokens for request in core.requests())
        with times.step() as step:
            core.step()
            with times.part(EVENTS):
                encode(log.flush(core.load()))
        if is_decode != shape.is_prefill:
            found.append(step)
    return found


def table(profiles: Sequence[Profile]) -> str:
    """Markdown, a column per profile: milliseconds, and percent of the step."""
    heads = "".join(f" {each.model}, {each.shape} |" for each in profiles)
    lines = [f"| CPU-ms of a step |{heads}", "|---|" + "---:|" * len(profiles)]
    for part in PARTS:
        cells = (f" {_ms(each.parts[part])} ({_share(each, part)}) |" for each in profiles)
        lines.append(f"| {part} |" + "".join(cells))
    lines.append("| **step, watched** |" + "".join(f" {_ms(each.step_s)} |" for each in profiles))
    lines.append("| step, not watched |" + "".join(f" {_ms(each.unwatched_s)} |" for each in profiles))
    lines.append("| steps |" + "".join(f" {each.num_steps} |" for each in profiles))
    return "\n".join(lines) + "\n"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds < 0.01 else f"{1000 * seconds:.1f}"


def _share(each: Profile, part: str) -> str:
    return f"{100 * each.parts[part] / sum(each.parts.values()):.0f} %"


def _of_model(spec: ModelSpec, shapes: Sequence[Shape], repeats: int) -> list[Profile]:
    with tempfile.TemporaryDirectory(prefix="warmpath-profile-") as parent:
        folder = models.build(spec, Path(parent))
        return profile(spec, shapes, folder, repeats)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    shapes = [
        shape for shape in SHAPES if not options.only or any(word in shape.name for word in options.only)
    ]
    if not shapes:
        parser.error(f"argument --only: no shape has one of these; there are: {_names(SHAPES)}")
    # Read when a process starts: by torch, which sizes its thread pools, and by glibc.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    os.environ.update(ALLOCATOR)
    found: list[Profile] = []
    for name in options.models or cases.MODELS:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
            with ctrl_c_is_ours():
                asked = processes.submit(_of_model, cases.MODELS[name], shapes, options.repeats)
            try:
                found += asked.result()
            except KeyboardInterrupt:
                for process in multiprocessing.active_children():
                    process.kill()  # the pool would wait for it
                raise
    sys.stdout.write(f"{machine.describe(1)}\n\n{table(found)}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    return 0


def _names(shapes: Sequence[Shape]) -> str:
    return "; ".join(shape.name for shape in shapes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_profile",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=list(cases.MODELS), metavar="MODEL", help="9M, 132M")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="shapes whose name has one: decode, prefill ..."
    )
    parser.add_argument(
        "--repeats", type=positive, default=3, metavar="N", help="runs of each shape (default: 3)"
    )
    parser.add_argument("--json", type=to_write, metavar="FILE", help="also write every number")
    return parser


if __name__ == "__main__":
    sys.exit(stoppable(main))
