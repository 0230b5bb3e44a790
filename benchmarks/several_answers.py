"""`python -m benchmarks.several_answers`: one request for n answers beside n cold requests for one.

Both without a prefix cache, so that nothing but the fork shares the prompt; in turns, in one process.
CPU seconds, since other processes may have the machine too: medians, and the range of the ratios.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks import cases, models
from benchmarks.arguments import positive
from benchmarks.stopping import stoppable
from cache.counted import counted
from cache.errors import ServingError
from cache.messages import GenerateRequest, SamplingParams
from cache.types import RequestId
from replica.assembly import Assembly, assemble
from replica.config import ReplicaConfig

TARGET = 0.5  # of the time that as many cold requests take


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of getting n answers."""

    cpu_s: float
    computed_tokens: int
    outputs: tuple[tuple[int, ...], ...]


def measure(assembly: Assembly, requests: list[GenerateRequest]) -> Measured:
    """All of them at once on an engine that holds nothing yet."""
    core = assembly.core()
    began_s = time.process_time()
    completions = core.complete(requests)
    cpu_s = time.process_time() - began_s
    return Measured(cpu_s, core.stats().computed_tokens, tuple(each.token_ids for each in completions))


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    spec, n, length = cases.MODELS[options.model], options.n, options.prompt_tokens
    try:
        pairs = _pairs(spec, options)
    except ServingError as error:  # more than fits the machine, or the model
        parser.error(f"--n, --prompt-tokens, --output-tokens: {error}")
    for shared, apart in pairs:
        assert shared.outputs[0] == apart.outputs[0], "the first answer is that of n = 1"
    ratios = [shared.cpu_s / apart.cpu_s for shared, apart in pairs]
    shared, apart = pairs[-1]
    sys.stdout.write(
        f"{spec.name}, n = {n}, {counted(length, 'prompt token')}, "
        f"{counted(options.output_tokens, 'output token')}, {counted(options.repeats, 'pair')}\n"
        f"one request for {n} answers   {median(s.cpu_s for s, _ in pairs):7.2f} s"
        f"   {shared.computed_tokens:7,} tokens computed\n"
        f"{n} cold requests for one     {median(a.cpu_s for _, a in pairs):7.2f} s"
        f"   {apart.computed_tokens:7,} tokens computed\n"
        f"ratio {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), to reach {TARGET}\n"
    )
    return 0 if median(ratios) <= TARGET else 1


def _pairs(spec: cases.ModelSpec, options: argparse.Namespace) -> list[tuple[Measured, Measured]]:
    """One request and as many cold ones, by turns. Raises ServingError for sizes that do not fit."""
    n, length = options.n, options.prompt_tokens
    num_blocks = n * -(-(length + options.output_tokens) // 16) + 16
    with tempfile.TemporaryDirectory() as parent:
        config = ReplicaConfig(
            model=str(models.build(spec, Path(parent))),
            device="cpu",
            dtype="float32",
            torch_threads=1,
            num_blocks=num_blocks,
            prefix_caching=False,
            max_waiting=n,
        )
        assembly = assemble(config)
        assembly.runner.warm_up()
        # Sampled: greedy ones would all be the same answer.
        sampling = SamplingParams(max_tokens=options.output_tokens, temperature=1.0, ignore_eos=True)
        prompt = array("i", [3 + (i * i * 31 + i) % (spec.vocabulary - 3) for i in range(length)])
        cold = [GenerateRequest(RequestId(f"r{i}"), prompt, length, sampling, seed=i) for i in range(n)]
        several = replace(cold[0], n=n)
        try:
            return [(measure(assembly, [several]), measure(assembly, cold)) for _ in range(options.repeats)]
        finally:
            assembly.runner.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.several_answers", description=__doc__)
    parser.add_argument("--model", choices=list(cases.MODELS), default=cases.SMALL.name)
    parser.add_argument("--n", type=positive, default=8)
    parser.add_argument("--prompt-tokens", type=positive, default=4096)
    parser.add_argument("--output-tokens", type=positive, default=64)
    parser.add_argument("--repeats", type=positive, default=3)
    return parser


if __name__ == "__main__":
    sys.exit(stoppable(main))
