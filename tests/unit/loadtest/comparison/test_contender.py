"""Deployments to compare: what each policy changes in a deploy.yaml, and what every contender gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.router_variable import ROUTER_VARIABLE
from deploy.serve_file import ServeFile
from loadtest.commands.serving import policy_names
from loadtest.comparison.contender import (
    RAY_ROUTER,
    RAY_ROUTER_CLASS,
    Changes,
    of_policies,
    of_routers,
    read_contender,
)
from loadtest.comparison.deployment import check
from loadtest.comparison.errors import BadDeployment

DEPLOY = Path(__file__).parents[4] / "deploy.yaml"


def parts(content: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """args.replica, args.router, and the options of the deployment Replica."""
    application = content["applications"][0]
    options = next(each for each in application["deployments"] if each["name"] == "Replica")
    return application["args"]["replica"], application["args"]["router"], options


def test_what_ships_keeps_its_binding_and_rivals_dispatch_at_once() -> None:
    names = ["expected_time", "round_robin", "expected_time+late", "chwbl:replication=64"]
    found = of_policies(DEPLOY, names, Changes())
    assert [contender.label for contender in found] == names
    routers = [parts(contender.content)[1] for contender in found]
    assert [router.get("binding") for router in routers] == [None, "at_once", "late", "at_once"]
    assert [router["policy"] for router in routers] == [
        "expected_time",
        "round_robin",
        "expected_time",
        "chwbl",
    ]
    assert routers[3]["policy_options"] == {"replication": 64}


def test_numbers_of_routers_change_nothing_else() -> None:
    found = of_routers(DEPLOY, (2, 1), Changes())
    assert [contender.label for contender in found] == ["2 Routers", "1 Router"]
    as_is = read_contender(DEPLOY, Changes())
    for contender, number in zip(found, (2, 1), strict=True):
        content = yaml.safe_load(yaml.safe_dump(contender.content))
        router = next(each for each in content["applications"][0]["deployments"] if each["name"] == "Router")
        assert router["num_replicas"] == number
        router["num_replicas"] = 1
        assert parts(content) == parts(as_is.content)


def test_a_number_of_routers_takes_the_place_of_autoscaling(tmp_path: Path) -> None:
    content = yaml.safe_load(DEPLOY.read_text())
    router = next(each for each in content["applications"][0]["deployments"] if each["name"] == "Router")
    del router["num_replicas"]
    router["autoscaling_config"] = {"min_replicas": 1, "max_replicas": 4}
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump(content))
    (found,) = of_routers(file, [2], Changes())
    (router,) = [each for each in found.content["applications"][0]["deployments"] if each["name"] == "Router"]
    assert router["num_replicas"] == 2
    assert "autoscaling_config" not in router


@pytest.mark.parametrize(
    ("options", "prefix", "url"),
    [
        (None, None, "http://127.0.0.1:9000"),
        ({"host": "0.0.0.0"}, "/", "http://127.0.0.1:9000"),
        ({"host": "127.0.0.2", "port": 1}, "/llm", "http://127.0.0.2:9000/llm"),
    ],
)
def test_it_is_asked_where_its_file_has_it_answer(
    tmp_path: Path, options: dict[str, Any] | None, prefix: str | None, url: str
) -> None:
    """A start was waited for at / of 127.0.0.1 until it had taken too long."""
    content = yaml.safe_load(DEPLOY.read_text())
    content["http_options"] = options
    content["applications"][0].pop("route_prefix", None)
    if prefix is not None:
        content["applications"][0]["route_prefix"] = prefix
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump(content))
    assert read_contender(file, Changes()).url(9000) == url


def routers_own(tmp_path: Path, text: Any) -> Path:
    """deploy.yaml with this in the environment of its Routers alone."""
    content = yaml.safe_load(DEPLOY.read_text())
    application = content["applications"][0]
    application["args"]["router"].update(limits={"max_tools": 3, "max_prompts": 5}, max_wait_s=4.0)
    application["runtime_env"] = {"env_vars": {ROUTER_VARIABLE: "policy: random"}}  # hidden by a Router's own
    variables = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0", ROUTER_VARIABLE: text}
    router = next(each for each in application["deployments"] if each["name"] == "Router")
    router["ray_actor_options"] = {"num_cpus": 0.2, "runtime_env": {"env_vars": variables}}
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def test_settings_of_the_routers_alone_are_the_files_and_not_laid_over_what_is_compared(
    tmp_path: Path,
) -> None:
    """All contenders ran the one policy that it names, under as many names as were asked for."""
    text = "policy: mooncake_min_ttft\nexpose_routing: false\nlimits: {max_tools: 7}\nbinding: late\n"
    file = routers_own(tmp_path, text)
    for contender in [read_contender(file, Changes()), *of_policies(file, ["round_robin"], Changes())]:
        assert ROUTER_VARIABLE not in str(contender.content)
        assert "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP" in str(contender.content)
        router = parts(contender.content)[1]
        assert (router["expose_routing"], router["max_wait_s"]) == (True, 4.0)
        assert router["limits"] == {"max_tools": 7, "max_prompts": 5}
    as_is, rival, ours = (
        parts(each.content)[1]
        for each in (
            read_contender(file, Changes()),
            *of_policies(file, ["round_robin", "expected_time"], Changes()),
        )
    )
    assert (as_is["policy"], as_is["binding"]) == ("mooncake_min_ttft", "late")
    assert (rival["policy"], rival["binding"]) == ("round_robin", "at_once")
    assert (ours["policy"], ours["binding"]) == ("expected_time", "late")  # the file's own


def test_settings_of_the_routers_alone_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadDeployment, match=r"deploy\.yaml: WARMPATH_ROUTER .*there twice"):
        read_contender(routers_own(tmp_path, "policy: random\npolicy: chwbl"), Changes())
    with pytest.raises(BadDeployment, match=r"must be text: `WARMPATH_ROUTER: \|`"):
        check(read_contender(routers_own(tmp_path, {"policy": "random"}), Changes()))


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """As by `python -m deploy check`; the last one held."""
    file = tmp_path / "mine.yaml"
    file.write_text(f"{OURS}args: {{router: {{policy: random, policy: chwbl}}}}}}]")
    with pytest.raises(BadDeployment, match="'policy' is there twice"):
        read_contender(file, Changes())


def test_engines_take_turns_as_the_rivals_own_do_unless_asked_otherwise() -> None:
    names = ["expected_time", "round_robin", "round_robin+shortest", "expected_time+shortest"]
    names += ["expected_time+late", "expected_time+late+shortest", RAY_ROUTER]
    replicas = [parts(contender.content)[0] for contender in of_policies(DEPLOY, names, Changes())]
    assert [replica.get("scheduling_order") for replica in replicas] == [
        None,  # as the engine ships
        "first_come",
        "shortest_preempting",
        "shortest_preempting",
        "first_come",
        "shortest_preempting",
        "first_come",
    ]


def test_ray_serves_own_router_is_set_where_serve_reads_it() -> None:
    (found,) = of_policies(DEPLOY, [RAY_ROUTER], Changes())
    _, router, options = parts(found.content)
    assert options["request_router_config"]["request_router_class"] == RAY_ROUTER_CLASS
    assert router["binding"] == "at_once"  # our Router holds nothing back from it


def test_changes_reach_every_contender_and_not_the_file() -> None:
    before = DEPLOY.read_text()
    changes = Changes(
        num_replicas=16, simulated=True, replica={"num_blocks": 77}, router={"max_wait_s": None}
    )
    for contender in [read_contender(DEPLOY, changes), *of_policies(DEPLOY, ["round_robin"], changes)]:
        replica, router, _ = parts(contender.content)
        assert (replica["runner"], replica["num_blocks"]) == ("simulated", 77)
        assert (router["max_wait_s"], router["expose_routing"]) == (None, True)
        assert contender.num_replicas == 16
        assert "simulated" in contender.engine
    assert DEPLOY.read_text() == before
    assert "real engine, model tiny" in read_contender(DEPLOY, Changes()).engine


@pytest.mark.parametrize("name", ["fastest", "ideal", "round_robin:speed=1"])
def test_a_policy_that_cannot_run_is_named(name: str) -> None:
    with pytest.raises(BadDeployment, match=name.split(":")[0]):
        of_policies(DEPLOY, [name], Changes())


@pytest.mark.parametrize("content", ["- 1", "{}", "applications: []", "a: ["])
def test_a_file_that_is_no_deployment_is_named(content: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(BadDeployment, match=r"mine\.yaml"):
        read_contender(file, Changes())


OURS = "applications: [{import_path: 'deploy.app:build', "


@pytest.mark.parametrize(
    "content", ["args: 3", "args: {replica: 3}", "args: {router: [a]}", "deployments: 2", "deployments: [a]"]
)
def test_a_deployment_whose_settings_are_none_is_named(content: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"{OURS}{content}}}]")
    with pytest.raises(BadDeployment, match=r"mine\.yaml: .* must hold mappings"):
        read_contender(file, Changes())


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(b"a: \xff")
    with pytest.raises(BadDeployment, match=r"mine\.yaml cannot be read"):
        read_contender(file, Changes())


@pytest.mark.parametrize("content", ["args: {replica: , router: }", "args: ", "deployments: "])
def test_a_heading_with_nothing_below_it_is_as_none(content: str, tmp_path: Path) -> None:
    """As `python -m deploy check` has it, which finds such a file fine."""
    file = tmp_path / "mine.yaml"
    file.write_text(f"{OURS}{content}}}]")
    _, router, _ = parts(read_contender(file, Changes()).content)
    assert router["expose_routing"]
    assert parts(of_policies(file, ["round_robin"], Changes())[0].content)[1]["policy"] == "round_robin"


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("num_replicas: 3", 3),
        ("num_replicas: auto", 1),
        ("num_replicas: null", 1),
        ("autoscaling_config: {min_replicas: 3, max_replicas: 4}", 3),
        ("autoscaling_config: {min_replicas: '3', max_replicas: '4'}", 3),  # as Serve reads them
        ("autoscaling_config: {min_replicas: 3.0, max_replicas: 4}", 3),
        ("autoscaling_config: {max_replicas: 4}", 1),
        ("autoscaling_config: {initial_replicas: 2, max_replicas: 4}", 1),
    ],
)
def test_as_many_replicas_are_waited_for_as_there_are_at_least(
    said: str, number: int, tmp_path: Path
) -> None:
    """With autoscaling it was one: what was measured first had replicas that were still starting."""
    file = tmp_path / "mine.yaml"
    file.write_text(f"{OURS}deployments: [{{name: Replica, {said}}}]}}]")
    assert read_contender(file, Changes()).num_replicas == number
    assert ServeFile.read(file).num_replicas == number


def test_a_number_of_replicas_takes_the_place_of_autoscaling(tmp_path: Path) -> None:
    """Serve refuses both in one."""
    content = yaml.safe_load(DEPLOY.read_text())
    _, _, options = parts(content)
    del options["num_replicas"]
    options["autoscaling_config"] = {"min_replicas": 2, "max_replicas": 4}
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump(content))
    found = read_contender(file, Changes(num_replicas=3))
    check(found)
    assert found.num_replicas == 3
    assert "autoscaling_config" not in parts(found.content)[2]
    assert parts(read_contender(file, Changes()).content)[2]["autoscaling_config"]["min_replicas"] == 2


def test_what_deploy_finds_wrong_is_told_before_anything_starts(tmp_path: Path) -> None:
    content = yaml.safe_load(DEPLOY.read_text())
    content["applications"][0]["args"]["replica"]["block_size"] = 0
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(BadDeployment, match="block_size") as told:
        check(read_contender(file, Changes()))
    assert str(file) in str(told.value)


def test_commas_inside_a_policys_knobs_do_not_part_policies() -> None:
    assert policy_names("a,b:x=1,y=2,c") == ["a", "b:x=1,y=2", "c"]
