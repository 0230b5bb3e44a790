"""deploy.yaml: the project's own file passes, and what Serve would accept in silence is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cache.errors import ConfigError, ServingError, as_yaml
from deploy.errors import DeployFileError, UnknownKey
from deploy.serve_file import ServeFile, load_mapping
from loadtest.comparison.contender import RAY_ROUTER_CLASS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def content() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "deploy.yaml").read_text())
    return loaded


def read(folder: Path, content: object) -> ServeFile:
    path = folder / "deploy.yaml"
    path.write_text(yaml.safe_dump(content))
    return ServeFile.read(path)


def test_own_file(content: dict[str, Any], tmp_path: Path) -> None:
    file = ServeFile.read(ROOT / "deploy.yaml")
    assert (file.host, file.port) == ("127.0.0.1", 8000)
    assert (file.num_replicas, file.app_name) == (2, "warmpath")
    assert file.with_port(9100)["http_options"]["port"] == 9100
    assert read(tmp_path, file.with_port(9100)).port == 9100


@pytest.mark.parametrize(
    ("path", "key", "nearest"),
    [
        ((), "http_option", "http_options"),
        (("http_options",), "prt", "port"),
        (("grpc_options",), "prt", "port"),
        (("applications", 0), "import_pat", "import_path"),
        (("applications", 0, "args", "replica"), "modle", "model"),
        (("applications", 0, "deployments", 1), "max_ongoing_request", "max_ongoing_requests"),
        (("applications", 0, "deployments", 1, "ray_actor_options"), "num_cpu", "num_cpus"),
    ],
)
def test_typo_anywhere_is_refused(
    content: dict[str, Any], tmp_path: Path, path: tuple[str | int, ...], key: str, nearest: str
) -> None:
    content["applications"][0]["deployments"][1]["ray_actor_options"] = {"num_gpus": 0}
    content["grpc_options"] = {}
    place: Any = content
    for step in path:
        place = place[step]
    place[key] = 1
    with pytest.raises(UnknownKey, match=repr(nearest)):
        read(tmp_path, content)


@pytest.mark.parametrize("number", [1 << 31, 10**400], ids=["just", "far"])
@pytest.mark.parametrize(
    ("key", "index", "options"),
    [
        ("Router.num_replicas", 0, "num_replicas"),
        ("Replica.num_replicas", 1, "num_replicas"),
        ("Replica.autoscaling_config.max_replicas", 1, "max_replicas"),
        ("Router.max_ongoing_requests", 0, "max_ongoing_requests"),
        ("Replica.max_ongoing_requests", 1, "max_ongoing_requests"),
        ("Router.max_queued_requests", 0, "max_queued_requests"),
        ("Replica.max_queued_requests", 1, "max_queued_requests"),
    ],
)
def test_more_than_serve_can_count_is_refused(
    content: dict[str, Any], tmp_path: Path, number: int, key: str, index: int, options: str
) -> None:
    """The check took them; what counts GPUs or memory overflowed, or Serve's messages did and named none."""
    deployment = content["applications"][0]["deployments"][index]
    if options == "max_replicas":
        deployment.pop("num_replicas", None)
        deployment["autoscaling_config"] = {options: number}
    else:
        deployment[options] = number
    with pytest.raises(ConfigError, match=rf"deployments\.{key} = .*: must be at most 2147483647"):
        read(tmp_path, content)


@pytest.mark.parametrize("key", ["max_ongoing_requests", "max_queued_requests"])
def test_as_many_as_serve_can_count_are_taken(content: dict[str, Any], tmp_path: Path, key: str) -> None:
    for deployment in content["applications"][0]["deployments"]:
        deployment[key] = (1 << 31) - 1
    read(tmp_path, content)


def test_what_is_nested_too_deep_is_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text("a: " + "[" * 1500 + "]" * 1500)
    with pytest.raises(DeployFileError, match="not YAML: nested too deep"):
        ServeFile.read(path)


def test_serves_own_checks_are_named(content: dict[str, Any], tmp_path: Path) -> None:
    content["applications"][0]["deployments"][1]["max_ongoing_requests"] = -1
    where = r"applications\.warmpath\.deployments\.Replica\.max_ongoing_requests = -1: "
    with pytest.raises(ConfigError, match=where):
        read(tmp_path, content)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda application: application["deployments"][1].update(max_queued_requests=0),
            r"^applications\.warmpath\.deployments\.Replica = \[.*'name'.*\]: max_queued_requests must be",
        ),
        (
            lambda application: application.update(runtime_env={"working_dir": "/here"}),
            r"^applications\.warmpath\.runtime_env = \['working_dir'\]: ",
        ),
    ],
)
def test_a_check_of_serves_of_several_settings_shows_their_names_alone(
    content: dict[str, Any], tmp_path: Path, change: Any, said: str
) -> None:
    application = content["applications"][0]
    application["args"]["router"]["debug_token"] = "sixteen-characters"
    change(application)
    with pytest.raises(ConfigError, match=said) as caught:
        read(tmp_path, content)
    assert "sixteen-characters" not in str(caught.value)


@pytest.mark.parametrize("number", ["2", 2.0, "many", ["auto"]])
def test_a_number_of_replicas_that_serve_takes_for_none_is_named(
    content: dict[str, Any], tmp_path: Path, number: object
) -> None:
    """Serve's own words are shown for all options, and the one that was wrong has to be found."""
    content["applications"][0]["deployments"][1]["num_replicas"] = number
    said = r"^applications\.warmpath\.deployments\.Replica\.num_replicas = .*: must be a whole number"
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, content)


def test_text_that_serve_takes_for_numbers_is_one_to_whoever_asks(
    content: dict[str, Any], tmp_path: Path
) -> None:
    numbers = {"max_ongoing_requests": 2000, "max_replicas_per_node": 1, "max_surge_percent": 50}
    replica = content["applications"][0]["deployments"][1]
    replica |= {key: str(number) for key, number in numbers.items()}
    replica["ray_actor_options"] = {"num_cpus": "0.5", "num_gpus": "0", "resources": {"engine": 1}}
    options = read(tmp_path, content).options("Replica")
    assert {key: options[key] for key in numbers} == numbers
    assert options["ray_actor_options"] == {"num_cpus": 0.5, "num_gpus": 0, "resources": {"engine": 1}}


@pytest.mark.parametrize("amount", ["1", None, -1, [1]])
def test_resources_that_ray_would_refuse_when_it_builds_are_named(
    content: dict[str, Any], tmp_path: Path, amount: object
) -> None:
    """Serve's schema takes anything, and the application failed to deploy: on Kubernetes that is final."""
    replica = content["applications"][0]["deployments"][1]
    replica["ray_actor_options"] = {"num_gpus": 0, "resources": {"engine": amount}}
    where = r"deployments\.Replica\.ray_actor_options\.resources\.engine = .*: must be a number, 0 or more"
    with pytest.raises(ConfigError, match=where):
        read(tmp_path, content)


def test_two_applications_under_one_prefix_are_told_by_name(content: dict[str, Any], tmp_path: Path) -> None:
    content["applications"][0]["args"]["router"]["debug_token"] = "sixteen-characters"
    content["applications"].append({"name": "b", "import_path": "x:y", "route_prefix": "/"})
    with pytest.raises(ConfigError, match=r"^applications = \['warmpath', 'b'\]: ") as caught:
        read(tmp_path, content)
    assert "sixteen-characters" not in str(caught.value)


def test_routers_own_actor_options_keep_the_one_loop(content: dict[str, Any], tmp_path: Path) -> None:
    """Serve replaces `ray_actor_options` whole: the Router then refused to start, minutes later."""
    router = content["applications"][0]["deployments"][0]
    router["ray_actor_options"] = {"num_cpus": 1}
    with pytest.raises(ConfigError, match="RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"):
        read(tmp_path, content)
    router["ray_actor_options"]["runtime_env"] = {"env_vars": {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}}
    read(tmp_path, content)


@pytest.mark.parametrize(
    ("device", "options", "ranks", "told"),
    [
        ("auto", {"num_cpus": 1}, 1, "above 0 and at most 1 where .* is auto, or 0 where there are no GPUs"),
        ("cuda", {"num_cpus": 1}, 1, "above 0 and at most 1 where .* is cuda"),
        ("cuda", {"num_gpus": 0}, 1, "above 0 and at most 1 where .* is cuda"),
        ("cuda", {"num_gpus": 0}, 2, "2 where .* is cuda"),
        ("cuda", {"num_gpus": "0"}, 1, "above 0 and at most 1 where .* is cuda"),
        ("auto", {"num_gpus": 0}, 1, None),
        ("auto", {"num_gpus": "0"}, 1, None),
        ("cuda", {"num_gpus": 0.5}, 1, None),
        ("cpu", {"num_cpus": 1}, 1, None),
    ],
)
def test_replicas_own_actor_options_keep_the_gpu(
    content: dict[str, Any],
    tmp_path: Path,
    device: str,
    options: dict[str, Any],
    ranks: int,
    told: str | None,
) -> None:
    """Serve replaces `ray_actor_options` whole: replicas on a GPU machine were then given no GPU."""
    content["applications"][0]["args"]["replica"] |= {"device": device, "tensor_parallel": ranks}
    content["applications"][0]["deployments"][1]["ray_actor_options"] = options
    if told is None:
        read(tmp_path, content)
        return
    with pytest.raises(ConfigError, match=rf"num_gpus = (null|0(\.0)?): must be {told}$"):
        read(tmp_path, content)


@pytest.mark.parametrize("options", [{}, {"initial_backoff_s": 0.5}])
def test_replicas_own_request_router_is_not_replaced_in_passing(
    content: dict[str, Any], tmp_path: Path, options: dict[str, Any]
) -> None:
    """A longer back-off came with Serve's own router, and every placement by prefix was gone."""
    replicas = content["applications"][0]["deployments"][1]
    replicas["request_router_config"] = options
    with pytest.raises(ConfigError, match=r"Replica\.request_router_config = .* a request_router_class"):
        read(tmp_path, content)
    replicas["request_router_config"] = {"request_router_class": RAY_ROUTER_CLASS}  # meant so
    read(tmp_path, content)
    replicas["request_router_config"] = {"request_router_class": "somebodys.routers:Own"}
    with pytest.raises(DeployFileError, match="No module named 'somebodys'"):
        read(tmp_path, content)


def test_needs_our_application(content: dict[str, Any], tmp_path: Path) -> None:
    content["applications"][0]["import_path"] = "other:app"
    with pytest.raises(DeployFileError, match=r"deploy\.app:build"):
        read(tmp_path, content)


LOOP = "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({LOOP: 0}, rf"env_vars\.{LOOP} = '\(hidden\)': must be text in quotes, not int"),
        (
            {LOOP: "0", "OMP_NUM_THREADS": 1},
            r"env_vars\.OMP_NUM_THREADS = '\(hidden\)': must be text in quotes, not int",
        ),
        (3, r"env_vars = 3: must be a mapping"),
        (None, rf'env_vars\.{LOOP} = null: must be "0" where'),
        ({"HF_TOKEN": "hf_secret"}, rf'^[^=]*env_vars\.{LOOP} = null: must be "0" where [^=]*$'),
    ],
)
def test_a_variable_that_ray_would_refuse_when_it_builds_is_named(
    content: dict[str, Any], tmp_path: Path, variables: object, said: str
) -> None:
    router = content["applications"][0]["deployments"][0]
    router["ray_actor_options"] = {"num_cpus": 1, "runtime_env": {"env_vars": variables}}
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, content)


def test_variables_of_the_whole_application_are_text_too(content: dict[str, Any], tmp_path: Path) -> None:
    content["applications"][0]["runtime_env"] = {"env_vars": {"HF_HUB_OFFLINE": True}}
    with pytest.raises(
        ConfigError,
        match=r"warmpath\.runtime_env\.env_vars\.HF_HUB_OFFLINE = .*: must be text in quotes, not bool",
    ):
        read(tmp_path, content)
    content["applications"][0]["runtime_env"] = {"env_vars": None}
    read(tmp_path, content)


def test_a_value_that_breaks_a_check_of_serves_is_named_by_what_it_says(
    content: dict[str, Any], tmp_path: Path
) -> None:
    content["applications"][0]["deployments"][1]["gang_scheduling_config"] = True
    with pytest.raises(DeployFileError, match="is not what Serve reads: "):
        read(tmp_path, content)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"proxy_location": "Disabled"}, "proxy_location = 'Disabled': must be EveryNode or HeadOnly"),
        ({"route_prefix": None}, r"warmpath\.route_prefix = null: must be /"),
        ({"route_prefix": "llm"}, r"warmpath\.route_prefix = 'llm': must be /"),
        ({"route_prefix": b"/llm"}, r"warmpath\.route_prefix = b'/llm': must be /"),
        ({"route_prefix": "/llm/"}, r"warmpath\.route_prefix = '/llm/': must be /"),
    ],
)
def test_what_nobody_could_ask_is_refused(
    content: dict[str, Any], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    (content if "proxy_location" in change else content["applications"][0]).update(change)
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, content)


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("ssl_keyfile", "'/secret/of/mine'"),
        ("ssl_ca_certs", "'/secret/of/mine'"),
        ("ssl_keyfile_password", r"'\(hidden\)'"),
    ],
)
def test_tls_that_the_fast_proxy_does_not_know_is_refused(
    content: dict[str, Any], tmp_path: Path, key: str, shown: str
) -> None:
    """It would listen in the clear where the file asks for TLS."""
    content["http_options"][key] = "/secret/of/mine"
    with pytest.raises(ConfigError, match=rf"^http_options\.{key} = {shown}: must be left out"):
        read(tmp_path, content)
    content["http_options"][key] = None
    read(tmp_path, content)


@pytest.mark.parametrize("host", ["", " "])
def test_an_empty_host_is_no_address_of_this_machine_alone(
    content: dict[str, Any], tmp_path: Path, host: str
) -> None:
    """As a template's variable leaves it that is not set: Serve would listen on every interface."""
    content["http_options"]["host"] = host
    with pytest.raises(ConfigError, match=r"^http_options\.host = .*: must be an address"):
        read(tmp_path, content)
    del content["http_options"]["host"]
    assert read(tmp_path, content).host == "0.0.0.0"  # what Serve itself does then


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("host", b"127.0.0.1", "must be an address or a name, whose parts between dots have"),
        ("host", "10.0..5", "must be an address or a name, whose parts between dots have 1 to 63 characters"),
        ("host", "x" * 64, "must be an address or a name, whose parts between dots have 1 to 63 characters"),
        ("keep_alive_timeout_s", -1, "must be between 1 and 2147483"),
        ("keep_alive_timeout_s", 0, "must be between 1 and 2147483"),
        ("keep_alive_timeout_s", 2147484, "must be between 1 and 2147483"),
        ("request_timeout_s", -1.0, "must be seconds above 0, or left out: nothing ends requests then"),
        ("request_timeout_s", 0.0, "must be seconds above 0, or left out: nothing ends requests then"),
        ("request_timeout_s", float("inf"), "must be seconds above 0, or left out"),
    ],
)
def test_a_listener_that_would_not_come_up_or_end_what_it_takes_is_refused(
    content: dict[str, Any], tmp_path: Path, key: str, value: Any, accepted: str
) -> None:
    content["http_options"][key] = value
    with pytest.raises(ConfigError, match=rf"^http_options\.{key} = {as_yaml(value)}: {accepted}"):
        read(tmp_path, content)


@pytest.mark.parametrize("percent", [0, 50, "99.5"])
def test_a_part_of_the_replicas_that_are_waited_for_is_refused(
    content: dict[str, Any], tmp_path: Path, percent: float | str
) -> None:
    content["target_capacity"] = percent
    with pytest.raises(ConfigError, match=r"^target_capacity = .*: must be left out, or 100"):
        read(tmp_path, content)
    content["target_capacity"] = 100
    read(tmp_path, content)


@pytest.mark.parametrize("prefix", ["/", "/llm", "/a/b"])
def test_a_prefix_of_all_paths_is_known(content: dict[str, Any], tmp_path: Path, prefix: str) -> None:
    content["applications"][0]["route_prefix"] = prefix
    assert read(tmp_path, content).route_prefix == prefix
    del content["applications"][0]["route_prefix"]
    assert read(tmp_path, content).route_prefix == "/"


def test_a_key_that_is_there_twice_is_named_with_its_line(tmp_path: Path) -> None:
    """The last one would be all that anybody reads: half of the settings were gone in silence."""
    path = tmp_path / "deploy.yaml"
    own = (ROOT / "deploy.yaml").read_text()
    path.write_text(
        own.replace("      router:\n", "      replica:\n        max_running: 8\n      router:\n", 1)
    )
    with pytest.raises(DeployFileError, match=r"(?s)the key 'replica' is there twice.*line \d+"):
        ServeFile.read(path)


@pytest.mark.parametrize("place", ['model: "tiny\\udfff"', '"\\ud800": tiny'])
def test_half_a_surrogate_pair_is_named_with_its_line(tmp_path: Path, place: str) -> None:
    """YAML can spell it; whoever wrote it down or sent it later ended with a traceback."""
    path = tmp_path / "deploy.yaml"
    own = (ROOT / "deploy.yaml").read_text()
    path.write_text(own.replace("model: tiny", place, 1))
    with pytest.raises(DeployFileError, match=r"(?s)has half a surrogate pair.*line 18"):
        ServeFile.read(path)


def test_what_an_anchor_brings_along_may_be_said_again(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text("base: &base {a: 1, b: 2}\nother: &other {<<: *base, a: 3}\nlast: {<<: *other, b: 4}\n")
    assert load_mapping(path)["last"] == {"a": 3, "b": 4}


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_bytes(b"a: \xff")
    with pytest.raises(DeployFileError, match="must be text in UTF-8"):
        ServeFile.read(path)


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "applications: 3"])
def test_not_a_deployment(tmp_path: Path, text: str) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text(text)
    with pytest.raises(ServingError):
        ServeFile.read(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DeployFileError, match="No such file"):
        ServeFile.read(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"max_ongoing_requests": -1}, "max_ongoing_requests"),  # by Serve
        ({"max_ongoing_requests": 1}, "max_ongoing_requests"),  # by what Routers send
        ({"num_replicas": 1 << 31}, "num_replicas"),
        ({"max_ongoing_request": 1}, None),
    ],
)
@pytest.mark.parametrize("name", ["warmpath", None])
def test_a_place_is_called_the_same_whoever_refuses_it(
    content: dict[str, Any], tmp_path: Path, options: dict[str, Any], key: str | None, name: str | None
) -> None:
    """Some left out the application's name."""
    if name is None:
        del content["applications"][0]["name"]
    content["applications"][0]["deployments"][1] |= options
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content)
    place = f"applications.{name or 'default'}.deployments.Replica"
    assert caught.value.field == (place if key is None else f"{place}.{key}")
