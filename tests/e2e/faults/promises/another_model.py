"""A rolling update to another model: every answer is the old one's or the new one's, whole and unmixed.

The other model has the tiny one's shapes, other weights, and other numbers for the same words, so token ids
that reach the wrong one are an answer that neither gives.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from safetensors.numpy import save_file

from replica.models import tiny_model
from tests.e2e.faults.checks import Row
from tests.e2e.faults.cluster import Cluster, Spec, cluster
from tests.e2e.faults.traffic import ClosedLoop, Outcome, Question, answers, cycle

SHARE = 0.3

SPEC = Spec(
    replica={"runner": "model", "model_name": "tiny", "num_blocks": 1024},
    deployments={"Replica": {"graceful_shutdown_timeout_s": 4}},
)
OTHER_SEED = 7
NUM_CLIENTS = 4
BEFORE_S, AFTER_S = 3.0, 4.0  # of load, around the update


async def run(duration_s: float) -> list[Row]:
    """duration_s: nothing; one update, which takes as long as Serve takes."""
    questions = _questions()
    with tempfile.TemporaryDirectory() as folder:
        _write_other_model(Path(folder))
        async with cluster(SPEC) as running:
            old = await _texts(running, questions)
            async with ClosedLoop(running.url, cycle(questions), num_clients=NUM_CLIENTS) as load:
                await asyncio.sleep(BEFORE_S)
                await running.redeploy(replica={"model": folder})
                await running.until_ready()
                await asyncio.sleep(AFTER_S)
            new = await _texts(running, questions)
            await running.restore()
    kinds = Counter(_kind(each, old, new) for each in load.outcomes)
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    of_both = bool(kinds["the old one's"] and kinds["the new one's"])
    # Who is refused, or cut with an error, knows: docs/failures.md says when that is.
    is_mixed = bool(kinds["of neither"] or kinds["truncated"])
    return [
        Row(
            "another model: answers under a rolling update", "none of neither", told, of_both and not is_mixed
        )
    ]


def _kind(outcome: Outcome, old: dict[Question, str], new: dict[Question, str]) -> str:
    if outcome.failure is not None:
        return outcome.failure
    if outcome.text == old[outcome.question]:
        return "the old one's"
    return "the new one's" if outcome.text == new[outcome.question] else "of neither"


async def _texts(running: Cluster, questions: Sequence[Question]) -> dict[Question, str]:
    """What each is answered while nothing changes. Raises AssertionError if something fails then."""
    found = await answers(running.url, questions, at_once=NUM_CLIENTS)
    assert not [each.failure for each in found.values() if each.failure is not None]
    return {question: outcome.text for question, outcome in found.items()}


def _questions() -> list[Question]:
    """As texts: the same text is other token ids for the other model."""
    draw = random.Random(1)
    words = "the river stone was cold and nobody in town had ever seen what lay under its green moss".split()
    texts = [" ".join(draw.choices(words, k=40)) for _ in range(12)]
    return [Question((), 60, extra=(("prompt", text),)) for text in texts]


def _write_other_model(folder: Path) -> None:
    for name in tiny_model.COMMITTED_FILES:
        shutil.copyfile(tiny_model.SOURCE / name, folder / name)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    ids = sorted(each for each in vocabulary.values() if each not in special)
    others = dict(zip(ids, reversed(ids), strict=True))
    tokenizer["model"]["vocab"] = {text: others.get(each, each) for text, each in vocabulary.items()}
    path.write_text(json.dumps(tokenizer))
    weights = dict(tiny_model.draw_weights(json.loads((folder / "config.json").read_text()), OTHER_SEED))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
