"""deploy/gpu.yaml: two replicas on one card, and what is said of it where there is none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy import app, preflight
from deploy.__main__ import main
from deploy.errors import MachineLacks
from deploy.preflight import check_gpus, check_here
from deploy.serve_file import ServeFile
from replica.config import ReplicaConfig

FILE = Path(__file__).resolve().parents[3] / "deploy" / "gpu.yaml"

LACKS = """\
MachineLacks in {file}: not on this machine; --gpus N checks for a cluster with N GPUs
- an NVIDIA card: 2 replicas take 0.5 GPUs each, 1 in all, and there are 0
- a torch that computes on cards: torch 2.13.0+cpu is built for CPUs alone
- the package triton, for attention_backend: triton (it comes with torch for CUDA)
"""


def machine(
    patch: pytest.MonkeyPatch, folder: Path, *, cards: int, torch: str, packages: tuple[str, ...]
) -> None:
    for number in range(cards):
        (folder / f"0000:{number}").mkdir()
    patch.setattr(preflight, "NVIDIA_CARDS", folder if cards else folder / "absent")
    patch.setattr(preflight.metadata, "version", lambda _name: torch)
    patch.setattr(preflight.importlib.util, "find_spec", lambda name: name if name in packages else None)


def test_what_a_machine_without_a_card_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Word for word, and refused; with --gpus it is about another machine."""
    machine(monkeypatch, tmp_path, cards=0, torch="2.13.0+cpu", packages=())
    assert main(["check", str(FILE)]) == 2
    heard = capsys.readouterr()
    assert heard.err == LACKS.format(file=FILE)
    assert heard.out == ""
    assert main(["check", str(FILE), "--gpus", "1"]) == 0


def test_docs_show_it_word_for_word() -> None:
    assert LACKS.format(file="deploy/gpu.yaml") in (FILE.parents[1] / "docs" / "gpu.md").read_text()


def test_a_machine_with_a_card_lacks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, tmp_path, cards=1, torch="2.13.0", packages=("triton",))
    assert main(["check", str(FILE)]) == 0
    assert capsys.readouterr().out == f"{FILE}: fine (2 replicas of tiny)\n"


def test_one_card_is_enough_and_none_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, tmp_path, cards=0, torch="2.13.0", packages=("triton",))
    file = ServeFile.read(FILE)
    check_gpus(file, 1)
    check_here(file, cards=1)
    with pytest.raises(MachineLacks, match=r"2 replicas take 0\.5 GPUs each, 1 in all, and there are 0"):
        check_here(file, cards=0)


def test_replicas_compute_in_half_precision_over_the_kernels() -> None:
    """The built-in model is stored as float32, whose products take no tensor cores here."""
    replica = ServeFile.read(FILE).app.replica
    assert (replica.model, replica.dtype, replica.attention_backend) == ("tiny", "bfloat16", "triton")


def test_who_asks_for_no_card_lacks_none() -> None:
    check_here(ServeFile.read(FILE.parents[1] / "deploy.yaml"), cards=0)


@pytest.mark.parametrize(("assigned", "share"), [({"GPU": 0.5}, 0.5), ({"GPU": 2.0}, 1.0), ({}, 1.0)])
def test_a_replica_may_have_its_part_of_the_card(
    assigned: dict[str, float], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": 2.0}}])
    monkeypatch.setattr(app.serve, "get_replica_context", lambda: SimpleNamespace(world_size=2))
    context = SimpleNamespace(get_assigned_resources=lambda: assigned)
    monkeypatch.setattr(app.ray, "get_runtime_context", lambda: context)
    assert app._on_node(ReplicaConfig(device="cuda")).device_share == share
