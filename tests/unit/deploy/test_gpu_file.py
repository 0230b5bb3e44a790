"""deploy/gpu.yaml: two replicas on one card, and what is said of it where there is none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from cache.errors import ConfigError
from deploy import app, launcher, preflight
from deploy.__main__ import main
from deploy.errors import MachineLacks
from deploy.ports import Ports
from deploy.preflight import check_gpus, check_here
from deploy.serve_file import ServeFile
from replica.config import ReplicaConfig

FILE = Path(__file__).resolve().parents[3] / "deploy" / "gpu.yaml"

LACKS = """\
MachineLacks in {file}: not on this machine; --gpus N and --cpus N check for a cluster
- an NVIDIA card: 2 replicas take 0.5 GPUs each, 1 in all, and there are 0
- a torch that computes on cards: torch 2.13.0+cpu is built for CPUs alone
- the package triton, for attention_backend: triton (it comes with torch for CUDA)
"""


def machine(
    patch: pytest.MonkeyPatch, folder: Path, *, cards: int, torch: str, packages: tuple[str, ...]
) -> None:
    driver = folder / "driver"
    for number in range(cards):
        (driver / f"0000:{number}").mkdir(parents=True)
    patch.setattr(preflight, "NVIDIA_CARDS", driver)
    installed = preflight.metadata.version
    patch.setattr(preflight.metadata, "version", lambda name: torch if name == "torch" else installed(name))
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patch.setattr(preflight, "_is_installed", lambda name: name in packages)
    patch.delenv("CC", raising=False)
    patch.setattr(preflight.shutil, "which", lambda name: f"/usr/bin/{name}")
    include = folder / "include"
    include.mkdir()
    (include / "Python.h").touch()
    patch.setattr(preflight, "INCLUDE", include)


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


def test_triton_needs_what_it_compiles_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it every replica would end at its start."""
    machine(monkeypatch, tmp_path, cards=1, torch="2.13.0", packages=("triton",))
    monkeypatch.setenv("CC", str(tmp_path / "gone"))
    monkeypatch.setattr(preflight, "INCLUDE", tmp_path)
    monkeypatch.setattr(preflight.shutil, "which", lambda name: None)
    file = ServeFile.read(FILE)
    with pytest.raises(MachineLacks) as caught:
        check_here(file, cards=1)
    compiler, headers = caught.value.missing
    assert compiler == "a C compiler (gcc, clang, or what CC names), for attention_backend: triton"
    assert headers.startswith("Python's C headers (as in the package python3.")

    monkeypatch.setattr(preflight.shutil, "which", lambda name: name if name == "clang" else None)
    with pytest.raises(MachineLacks):  # what CC names is taken, and nothing in its place
        check_here(file, cards=1)
    monkeypatch.delenv("CC")
    (tmp_path / "Python.h").touch()
    check_here(file, cards=1)
    monkeypatch.setattr(preflight, "INCLUDE", tmp_path / "gone")
    check_here(with_backend("auto", "auto"), cards=2)  # does without


def test_one_card_is_enough_and_none_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, tmp_path, cards=0, torch="2.13.0", packages=("triton",))
    file = ServeFile.read(FILE)
    check_gpus(file, 1)
    check_here(file, cards=1)
    with pytest.raises(MachineLacks, match=r"2 replicas take 0\.5 GPUs each, 1 in all, and there are 0"):
        check_here(file, cards=0)


def with_backend(device: str, backend: str) -> ServeFile:
    """deploy.yaml, which asks Ray for no GPU by itself."""
    content = yaml.safe_load((FILE.parents[1] / "deploy.yaml").read_text())
    content["applications"][0]["args"]["replica"] |= {
        "device": device,
        "attention_backend": backend,
        "block_size": 256,
    }
    return ServeFile.checked(Path("deploy.yaml"), content)


@pytest.mark.parametrize("backend", ["triton", "flash_attn"])
def test_attention_for_cards_needs_one(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As replicas find at their start, each a Ray cluster later."""
    machine(monkeypatch, tmp_path, cards=2, torch="2.13.0+cpu", packages=())
    with pytest.raises(MachineLacks) as caught:
        check_here(with_backend("auto", backend), cards=0)
    assert caught.value.missing == (f"an NVIDIA card, for attention_backend: {backend}",)
    with pytest.raises(MachineLacks) as caught:
        check_here(with_backend("auto", backend), cards=2)
    assert "device: cpu" not in str(caught.value)  # which would be refused for the backend
    assert [each.split(",")[0].split(":")[0] for each in caught.value.missing] == [
        "a torch that computes on cards",
        f"the package {backend.replace('_', '-')}",
    ]
    for cards in (0, 2):
        with pytest.raises(
            ConfigError, match=r"attention_backend.*must be auto or gather_sdpa where device is cpu"
        ):
            check_here(with_backend("cpu", backend), cards=cards)
    check_here(with_backend("cpu", "gather_sdpa"), cards=0)


@pytest.mark.parametrize(("cards", "visible"), [(1, None), (0, None), (1, "")])
def test_what_computes_on_cards_is_looked_for_before_a_cluster_starts(
    cards: int, visible: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica found it out when it started, and Serve started it again and again. A card that is hidden
    from Ray makes no replica compute on it."""

    class ClusterStarts(Exception):
        """So far it comes where nothing is missing."""

    def init(**_options: object) -> None:
        raise ClusterStarts

    machine(monkeypatch, tmp_path, cards=cards, torch="2.13.0+cpu", packages=())
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(Ports, "check_free", lambda _ports, _host: None)
    monkeypatch.setattr(launcher.ray, "init", init)
    monkeypatch.setattr(launcher.stop_signals, "catch", lambda _handler: None)

    def launch() -> None:
        launcher.launch(
            FILE.parents[1] / "deploy.yaml", Ports(9100), tmp_path, fast_proxy=False, verbose=False
        )

    if not cards or visible == "":
        with pytest.raises(ClusterStarts):
            launch()
        return
    with pytest.raises(MachineLacks) as caught:
        launch()
    assert str(caught.value) == (
        "not on this machine\n- a torch that computes on cards: torch 2.13.0+cpu is built for CPUs alone; "
        "device: cpu under args.replica does without"
    )


def test_replicas_compute_in_half_precision_over_the_kernels() -> None:
    """The built-in model is stored as float32, whose products take no tensor cores here."""
    replica = ServeFile.read(FILE).app.replica
    assert (replica.model, replica.dtype, replica.attention_backend) == ("tiny", "bfloat16", "triton")


def test_who_asks_for_no_card_lacks_none() -> None:
    check_here(ServeFile.read(FILE.parents[1] / "deploy.yaml"), cards=0)


def given(patch: pytest.MonkeyPatch, assigned: dict[str, float]) -> None:
    """A node whose Ray has given a replica this."""
    patch.setattr(app.ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0, "GPU": 2.0}}])
    patch.setattr(app.serve, "get_replica_context", lambda: SimpleNamespace(world_size=2))
    context = SimpleNamespace(get_assigned_resources=lambda: assigned)
    patch.setattr(app.ray, "get_runtime_context", lambda: context)


@pytest.mark.parametrize(
    ("assigned", "share"), [({"GPU": 0.5}, 0.5), ({"GPU": 1.0}, 1.0), ({"GPU": 2.0}, 1.0)]
)
def test_a_replica_may_have_its_part_of_the_card(
    assigned: dict[str, float], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, assigned)
    assert app._on_node(ReplicaConfig(device="cuda")).device_share == share


def test_a_replica_takes_no_card_that_it_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hides none from it: all replicas would compute on the first card, each with all of its memory."""
    given(monkeypatch, {"CPU": 0.4})
    with pytest.raises(ConfigError, match=r"num_gpus = 0\.0: must be above 0 where device is cuda"):
        app._on_node(ReplicaConfig(device="cuda"))
    for config in (ReplicaConfig(device="cpu"), ReplicaConfig(device="cuda", runner="simulated")):
        assert app._on_node(config).device_share == 1
