"""What is found wrong with API keys and GPUs before a cluster is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cache.errors import ConfigError
from deploy import preflight
from deploy.__main__ import main
from deploy.errors import MachineLacks
from deploy.preflight import check_cpus, check_gpus, check_here, check_keys, check_memory
from deploy.serve_file import ServeFile
from replica.models.model_source import NotEnoughMemory
from router.ingress import ONE_LOOP_VARIABLE
from tests.fakes.keys import entry, key_file

ROOT = Path(__file__).resolve().parents[3]
ON_CPUS = "; device: cpu under args.replica runs them on CPUs"


@pytest.fixture(autouse=True)
def no_card_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def a_file(folder: Path, **tenants: str) -> ServeFile:
    content = yaml.safe_load((ROOT / "deploy.yaml").read_text())
    content["applications"][0]["args"]["router"]["tenants"] = tenants
    (folder / "deploy.yaml").write_text(yaml.safe_dump(content))
    return ServeFile.read(folder / "deploy.yaml")


def test_keys_that_are_there_are_fine(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(key_file(entry("a")))
    (tmp_path / "secret").write_text("0123456789abcdef" * 2)
    check_keys(a_file(tmp_path, keys_file=str(tmp_path / "keys"), secret_file=str(tmp_path / "secret")))
    check_keys(a_file(tmp_path))


@pytest.mark.parametrize(
    ("keys", "secret", "field"),
    [
        (None, "0" * 32, "args.router.tenants.keys_file"),
        ("keys: [{name: a}]", "0" * 32, "keys[0].sha256"),
        ("keys: []", "short", "args.router.tenants.secret_file"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, keys: str | None, secret: str, field: str) -> None:
    if keys is not None:
        (tmp_path / "keys").write_text(keys)
    (tmp_path / "secret").write_text(secret)
    file = a_file(tmp_path, keys_file=str(tmp_path / "keys"), secret_file=str(tmp_path / "secret"))
    with pytest.raises(ConfigError) as caught:
        check_keys(file)
    assert caught.value.field == field


def with_gpus(
    device: str, replicas: dict[str, Any], router: dict[str, Any] | None = None, tensor_parallel: int = 1
) -> ServeFile:
    content = yaml.safe_load((ROOT / "deploy.yaml").read_text())
    application = content["applications"][0]
    application["args"]["replica"] |= {"device": device, "tensor_parallel": tensor_parallel}
    of_router, of_replicas = application["deployments"]
    del of_replicas["num_replicas"]
    of_replicas |= replicas
    of_router |= router or {}
    return ServeFile.checked(Path("deploy.yaml"), content)


@pytest.mark.parametrize(
    ("device", "replicas", "num_gpus", "key", "at_most"),
    [
        ("cuda", {"num_replicas": 3}, 3, None, 0),
        ("cuda", {"num_replicas": 3}, 2, "num_replicas", 2),
        ("cuda", {"num_replicas": 1}, 0, "num_replicas", 0),
        ("auto", {"num_replicas": 3}, 2, "num_replicas", 2),
        ("auto", {"num_replicas": 3}, 0, None, 0),  # on CPUs then
        ("cpu", {"num_replicas": 3}, 2, None, 0),
        (
            "cuda",
            {"autoscaling_config": {"min_replicas": 1, "max_replicas": 8}},
            4,
            "autoscaling_config.max_replicas",
            4,
        ),
        ("cuda", {"num_replicas": 2, "ray_actor_options": {"num_gpus": 0.5}}, 1, None, 0),
        ("cuda", {"num_replicas": 3, "ray_actor_options": {"num_gpus": 0.5}}, 1, "num_replicas", 2),
        # Ray gives a part of a GPU from one alone.
        ("cuda", {"num_replicas": 2, "ray_actor_options": {"num_gpus": 0.6}}, 2, None, 0),
        ("cuda", {"num_replicas": 3, "ray_actor_options": {"num_gpus": 0.6}}, 2, "num_replicas", 2),
        ("cuda", {"num_replicas": 5, "ray_actor_options": {"num_gpus": 0.4}}, 2, "num_replicas", 4),
        ("cuda", {"num_replicas": 10, "ray_actor_options": {"num_gpus": 0.1}}, 1, None, 0),
        ("cuda", {"num_replicas": 11, "ray_actor_options": {"num_gpus": 0.1}}, 1, "num_replicas", 10),
        ("auto", {"num_replicas": 2, "ray_actor_options": {"num_gpus": 1}}, 0, "num_replicas", 0),
        ("auto", {"num_replicas": 2, "ray_actor_options": {"num_gpus": 0}}, 0, None, 0),
    ],
)
def test_more_gpus_than_there_are(
    device: str, replicas: dict[str, Any], num_gpus: int, key: str | None, at_most: int
) -> None:
    """Serve would leave the others pending for ever."""
    file = with_gpus(device, replicas)
    if key is None:
        check_gpus(file, num_gpus)
        return
    with pytest.raises(ConfigError) as caught:
        check_gpus(file, num_gpus)
    assert caught.value.field == f"applications.warmpath.deployments.Replica.{key}"
    assert f"must be at most {at_most}:" in caught.value.accepted
    assert f"there are {num_gpus}" in caught.value.accepted


def test_it_says_why_parts_whose_sum_there_is_do_not_fit() -> None:
    file = with_gpus("cuda", {"num_replicas": 3, "ray_actor_options": {"num_gpus": 0.6}})
    with pytest.raises(ConfigError, match=r"each takes 0\.6 GPUs, and there are 2, each with room for 1$"):
        check_gpus(file, 2)
    with pytest.raises(MachineLacks, match=r"1\.8 in all, and there are 2, each with room for 1"):
        check_here(file, cards=2)


@pytest.mark.parametrize(
    ("device", "actor", "settings", "instead"),
    [
        (
            "auto",
            None,
            {},
            f"{ON_CPUS}, and deploy/gpu.yaml two on one card (make serve DEPLOY=deploy/gpu.yaml)",
        ),
        ("auto", None, {"tensor_parallel": 2}, ON_CPUS),  # a card for each rank
        ("auto", None, {"attention_backend": "triton"}, ""),  # computes on no CPU
        ("auto", {"num_gpus": 1}, {}, ""),  # Ray would still be asked for it
        ("cuda", None, {}, ""),  # cards are what was wanted
    ],
)
def test_who_has_not_asked_for_cards_is_told_how_to_do_with_fewer(
    device: str,
    actor: dict[str, float] | None,
    settings: dict[str, Any],
    instead: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file as it ships has two replicas, and one card was the end of `make serve`."""
    monkeypatch.setattr(preflight, "machine_cpus", lambda: 4.0)
    content = yaml.safe_load((ROOT / "deploy.yaml").read_text())
    application = content["applications"][0]
    application["args"]["replica"] |= {"device": device, **settings}
    if actor is not None:
        application["deployments"][1]["ray_actor_options"] = actor
    file = ServeFile.checked(Path("deploy.yaml"), content)
    with pytest.raises(ConfigError) as refused:
        check_gpus(file, 1)
    assert refused.value.accepted.endswith(f"and there are 1{instead}")
    with pytest.raises(MachineLacks) as lacks:
        check_here(file, cards=1)
    assert lacks.value.missing[0].endswith(instead or ("there are 1", "num_replicas may be 1"))


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_replicas_that_ask_for_no_gpu_take_none(num_gpus: int) -> None:
    """`auto` is CUDA where there are GPUs, and Ray hides none from who asks for none."""
    none_asked = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.4, "num_gpus": 0}}
    file = with_gpus("auto", none_asked)
    for check in (check_gpus, check_here):
        with pytest.raises(ConfigError) as caught:
            check(file, num_gpus)
        assert caught.value.field.endswith("Replica.ray_actor_options.num_gpus")
        assert "set device: cpu" in caught.value.accepted
        check(with_gpus("cpu", none_asked), num_gpus)


FAR_TOO_MANY = {"num_cpus": float("inf"), "runtime_env": {"env_vars": {ONE_LOOP_VARIABLE: "0"}}}


@pytest.mark.parametrize(
    ("replicas", "router", "num_cpus", "key", "at_most"),
    [
        ({"num_replicas": 4}, {}, 2, None, 0),
        ({"num_replicas": 6}, {}, 2, "num_replicas", 4),
        ({"num_replicas": 5}, {}, 2, "num_replicas", 4),  # they fit, and the Router does not
        ({"num_replicas": 2}, {}, 1, None, 0),  # two of 0.4 and one of 0.2
        ({"num_replicas": 3}, {"num_replicas": 4}, 2, None, 0),
        ({"num_replicas": 4}, {"num_replicas": 4}, 2, "num_replicas", 3),
        ({"num_replicas": 1}, {"num_replicas": 10}, 2, "num_replicas", 0),
        ({"num_replicas": 1}, {"ray_actor_options": FAR_TOO_MANY}, 2, "num_replicas", 0),
        ({"num_replicas": 2, "ray_actor_options": {"num_cpus": 2}}, {}, 4, "num_replicas", 1),
        ({"num_replicas": 2, "ray_actor_options": {"num_gpus": 0}}, {}, 2, "num_replicas", 1),  # Serve's 1
        ({"num_replicas": 99, "ray_actor_options": {"num_cpus": 0}}, {}, 2, None, 0),
        # What scaling adds later may wait, and the service is there.
        ({"autoscaling_config": {"min_replicas": 1, "max_replicas": 99}}, {}, 2, None, 0),
        (
            {"autoscaling_config": {"min_replicas": 9, "max_replicas": 99}},
            {},
            2,
            "autoscaling_config.min_replicas",
            4,
        ),
    ],
)
def test_more_cpus_than_there_are(
    replicas: dict[str, Any], router: dict[str, Any], num_cpus: int, key: str | None, at_most: int
) -> None:
    """Replicas would take them all, and the Router would wait for ever."""
    file = with_gpus("cpu", replicas, router)
    if key is None:
        check_cpus(file, num_cpus)
        check_here(file, cards=0, cpus=num_cpus)
        return
    with pytest.raises(ConfigError) as caught:
        check_cpus(file, num_cpus)
    assert caught.value.field == f"applications.warmpath.deployments.Replica.{key}"
    assert f"must be at most {at_most}:" in caught.value.accepted
    assert f"there are {num_cpus}, of which Routers take" in caught.value.accepted
    with pytest.raises(MachineLacks, match=r"^not on this machine; .*\n- CPUs: "):
        check_here(file, cards=0, cpus=num_cpus)


def test_this_machine_has_the_cpus_that_ray_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "machine_cpus", lambda: 2.0)
    with pytest.raises(MachineLacks) as caught:
        check_here(with_gpus("cpu", {"num_replicas": 6}), cards=0)
    assert caught.value.missing == (
        "CPUs: 6 replicas take 0.4 CPUs each, 2.6 in all, and there are 2, of which Routers take 0.2; "
        "num_replicas may be 4",
    )


def test_the_command_counts_another_machines_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With one of the numbers nothing here counts."""
    monkeypatch.setattr(preflight, "machine_cpus", lambda: 0.0)
    file = str(ROOT / "deploy.yaml")
    assert [main(["check", file, *of]) for of in ([], ["--gpus", "0"], ["--cpus", "1"])] == [2, 0, 0]
    capfd.readouterr()
    assert main(["check", file, "--cpus", "0"]) == 2
    assert (
        "num_replicas = 2: must be at most 0: each takes 0.4 CPUs, and there are 0" in capfd.readouterr().err
    )


def test_gpus_of_routers_are_gone_for_replicas() -> None:
    router = {"ray_actor_options": {"num_gpus": 1, "runtime_env": {"env_vars": {ONE_LOOP_VARIABLE: "0"}}}}
    with pytest.raises(ConfigError, match="at most 1:"):
        check_gpus(with_gpus("cuda", {"num_replicas": 2}, router), 2)


def test_the_command_says_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text((ROOT / "deploy.yaml").read_text().replace("device: auto", "device: cuda"))
    assert main(["check", str(file), "--gpus", "2"]) == 0
    assert main(["check", str(file), "--gpus", "1"]) == 2
    told = capfd.readouterr().err
    assert "num_replicas = 2: must be at most 1: each takes 1 GPU, and there are 1" in told


@pytest.mark.parametrize(("cards", "status"), [(0, 2), (1, 2), (2, 0)])
def test_without_a_number_this_machine_is_meant(
    cards: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "driver").mkdir()
    for number in range(cards):
        (tmp_path / "driver" / f"0000:{number}").mkdir()
    monkeypatch.setattr(preflight, "NVIDIA_CARDS", tmp_path / "driver")
    torch_for_cuda, version = "2.13.0", preflight.metadata.version
    monkeypatch.setattr(
        preflight.metadata, "version", lambda name: torch_for_cuda if name == "torch" else version(name)
    )
    monkeypatch.setattr(preflight, "machine_cpus", lambda: 4.0)
    file = tmp_path / "deploy.yaml"
    replica = "      - name: Replica\n        ray_actor_options: {num_cpus: 1, num_gpus: 1}\n"
    file.write_text((ROOT / "deploy.yaml").read_text().replace("      - name: Replica\n", replica))
    assert main(["check", str(file)]) == status


@pytest.mark.parametrize(
    ("visible", "counted"), [(None, 2), ("", 0), ("NoDevFiles", 0), ("1", 1), ("0,1", 2), ("0,1,2", 2)]
)
def test_cards_that_are_hidden_from_ray_do_not_count(
    visible: str | None, counted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check` refused what `make serve` would have served on CPUs."""
    for number in range(2):
        (tmp_path / f"0000:{number}").mkdir()
    monkeypatch.setattr(preflight, "NVIDIA_CARDS", tmp_path)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert preflight.num_cards() == counted


class Nvml:
    """The management library of a driver with `cards`; None: it does not start."""

    def __init__(self, cards: int | None) -> None:
        self._cards, self.num_open = cards, 0

    def nvmlInit_v2(self) -> int:
        self.num_open += self._cards is not None
        return 0 if self._cards is not None else 9

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        assert self.num_open == 1
        count._obj.value = self._cards
        return 0

    def nvmlShutdown(self) -> int:
        self.num_open -= 1
        return 0


@pytest.mark.parametrize(("cards", "counted"), [(2, 2), (0, 0), (None, 0)])
def test_where_the_driver_has_no_folder_its_library_counts(
    cards: int | None, counted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml, asked = Nvml(cards), []
    monkeypatch.setattr(preflight, "NVIDIA_CARDS", tmp_path / "absent")
    monkeypatch.setattr(preflight.ctypes, "CDLL", lambda name: asked.append(name) or nvml)
    assert preflight.num_cards() == counted
    assert asked == ["libnvidia-ml.so.1"]
    assert nvml.num_open == 0


def test_without_driver_and_library_there_is_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "NVIDIA_CARDS", tmp_path / "absent")
    monkeypatch.setattr(preflight, "NVML", "libabsent.so.1")
    assert preflight.num_cards() == 0


@pytest.mark.parametrize(
    ("device", "actor", "ranks", "is_fine"),
    [
        ("cuda", {"num_gpus": 2}, 2, True),
        ("cuda", None, 2, True),  # then two are asked for
        ("cuda", {"num_gpus": 1}, 2, False),
        ("cuda", {"num_gpus": 2}, 1, False),
        ("cuda", {"num_gpus": 0.5}, 1, True),
        ("auto", {"num_gpus": 2}, 4, False),
        ("auto", {"num_gpus": 0}, 2, True),  # on CPUs
        ("cpu", {"num_cpus": 2}, 2, True),
    ],
)
def test_each_rank_has_a_card(device: str, actor: dict[str, float] | None, ranks: int, is_fine: bool) -> None:
    replicas: dict[str, Any] = {"num_replicas": 1} | ({} if actor is None else {"ray_actor_options": actor})
    if is_fine:
        with_gpus(device, replicas, None, ranks)
        return
    with pytest.raises(ConfigError) as caught:
        with_gpus(device, replicas, None, ranks)
    assert caught.value.field.endswith("ray_actor_options.num_gpus")
    assert actor is not None
    assert caught.value.value == actor["num_gpus"]
    assert caught.value.accepted == f"must be {ranks}, as args.replica.tensor_parallel is"


def test_a_replica_of_two_ranks_asks_for_two_gpus() -> None:
    file = with_gpus("cuda", {"num_replicas": 2}, None, 2)
    check_gpus(file, 4)
    with pytest.raises(ConfigError, match="each takes 2 GPUs, and there are 3"):
        check_gpus(file, 3)


@pytest.mark.parametrize(
    ("device", "cards", "is_refused"),
    [("cpu", 0, True), ("cpu", 1, True), ("auto", 0, True), ("auto", 1, False), ("cuda", 0, False)],
)
def test_weights_that_go_to_cards_need_no_room_beside_each_other_here(
    device: str, cards: int, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a card has no room for, its replica says."""
    for number in range(cards):
        (tmp_path / f"0000:{number}").mkdir()
    monkeypatch.setattr(preflight, "NVIDIA_CARDS", tmp_path)
    monkeypatch.setattr(preflight, "free_host_bytes", lambda: 1024)
    file = with_gpus(device, {"num_replicas": 2})
    if not is_refused:
        check_memory(file)
        return
    with pytest.raises(NotEnoughMemory, match=r"for the weights of 2 replicas, 1\.0 KiB are free"):
        check_memory(file)


@pytest.mark.parametrize(
    ("device", "what"), [("cuda", "host_cache_gib"), ("cpu", "the weights and host_cache_gib")]
)
def test_evicted_blocks_of_all_replicas_have_room_here_together(
    device: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone had: memory on a CPU is taken as it is filled, and then the kernel ends a process."""
    file = with_gpus(device, {"num_replicas": 2})
    file = replace(file, app=replace(file.app, replica=replace(file.app.replica, host_cache_gib=3.0)))
    monkeypatch.setattr(preflight, "free_host_bytes", lambda: 7 << 30)
    check_memory(file)
    monkeypatch.setattr(preflight, "free_host_bytes", lambda: 5 << 30)
    with pytest.raises(
        NotEnoughMemory, match=rf"6\.\d GiB of memory on this machine for {what} of 2 replicas, 5"
    ):
        check_memory(file)
    check_memory(replace(file, app=replace(file.app, replica=replace(file.app.replica, runner="simulated"))))
