"""What is compared: deployments, each as the content of a deploy.yaml with a label.

Reads and changes mappings; starts nothing. What is wrong with one, `python -m deploy check` says.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cache.counted import counted
from cache.errors import ConfigError
from cache.scheduling_order import SchedulingOrder
from deploy import strict_yaml
from deploy.router_variable import ROUTER_VARIABLE, folded, settings_in
from loadtest.comparison.errors import BadDeployment
from loadtest.placement.errors import BadRequest
from loadtest.placement.policy_choice import DEFAULT, LATE, parse_policy

IMPORT_PATH = "deploy.app:build"
# Ray's own class on the replica deployment, behind an adapter; a policy's name on the command line.
RAY_ROUTER = "ray_prefix_router"
RAY_ROUTER_CLASS = "loadtest.rivals.ray_prefix_router:RayPrefixRouter"


@dataclass(frozen=True, slots=True)
class Contender:
    label: str
    content: Mapping[str, Any]

    @property
    def num_replicas(self) -> int:
        """As many as there have to be before anything is sent."""
        options = _deployment(_application(self.content), "Replica")
        scaling = _mapping_in(options, "autoscaling_config")
        number = scaling.get("min_replicas") if scaling else options.get("num_replicas")
        try:
            return int(float(number or 1))  # text, too, which Serve takes here for the number it says
        except ValueError:
            return 1  # as many as the work wants

    def url(self, port: int) -> str:
        """Where it answers, started with that port."""
        host = (self.content.get("http_options") or {}).get("host") or "127.0.0.1"
        prefix = _application(self.content).get("route_prefix", "/")
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}{prefix.removesuffix('/')}"

    @property
    def engine(self) -> str:
        """What answers: for the report."""
        replica = _section(_application(self.content), "replica")
        if replica.get("runner") == "simulated":
            return "simulated steps, no model"
        return f"real engine, model {replica.get('model', 'tiny')}"


@dataclass(frozen=True, slots=True)
class Changes:
    """What every contender gets, whatever its file says. None = as the file says."""

    num_replicas: int | None = None
    simulated: bool = False
    replica: Mapping[str, Any] | None = None
    router: Mapping[str, Any] | None = None


def read_contender(path: Path, changes: Changes) -> Contender:
    """Raises BadDeployment."""
    return _changed(str(path), _read(path), changes)


def of_policies(path: Path, policies: Sequence[str], changes: Changes) -> list[Contender]:
    """One file with each policy in turn, written as `simulate --policy` takes them.

    The file's own binding is kept for what ships (`expected_time`); rivals dispatch at once, as they do
    where they come from, unless `+late` asks otherwise, to engines that take what comes in its order, unless
    the file or `+shortest` asks otherwise. `ray_prefix_router` is Ray Serve's own class.
    Raises BadDeployment.
    """
    content = _read(path)
    return [_changed(text, _with_policy(content, text), changes) for text in policies]


def of_routers(path: Path, numbers: Sequence[int], changes: Changes) -> list[Contender]:
    """One file with each number of Routers in turn. Raises BadDeployment."""
    content = _read(path)
    return [_changed(_routers(number), _with_routers(content, number), changes) for number in numbers]


def _routers(number: int) -> str:
    return counted(number, "Router")


def _with_routers(content: Mapping[str, Any], number: int) -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(dict(content))
    _set_number(_deployment(_application(changed), "Router"), number)
    return changed


def _set_number(deployment: dict[str, Any], number: int) -> None:
    """Serve takes no number beside autoscaling."""
    deployment.pop("autoscaling_config", None)
    deployment["num_replicas"] = number


def _with_policy(content: Mapping[str, Any], text: str) -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(dict(content))
    application = _application(changed)
    router, replica = _section(application, "router"), _section(application, "replica")
    if text == RAY_ROUTER:
        _deployment(application, "Replica")["request_router_config"] = {
            "request_router_class": RAY_ROUTER_CLASS,
            "request_router_kwargs": {},
        }
        # Only to have the Router hold nothing back: the class above decides.
        router.update(policy="round_robin", policy_options={}, binding="at_once")
        _serve_as_they_come(replica)
        return changed
    try:
        choice = parse_policy(text)
    except BadRequest as error:
        raise BadDeployment(f"{error} (and {RAY_ROUTER}, Ray Serve's own)") from None
    if choice.is_ideal:
        raise BadDeployment(f"{text!r} can be simulated only")
    router.update(policy=choice.name, policy_options=dict(choice.options))
    settings = dict(choice.router_settings)
    if choice.name == DEFAULT and f"+{LATE}" not in text:
        settings.pop("binding")
    router.update(settings)
    if choice.engine_order is not None:
        replica["scheduling_order"] = choice.engine_order.value
    elif choice.name != DEFAULT or choice.is_late:  # a form other than what ships says so
        _serve_as_they_come(replica)
    return changed


def _serve_as_they_come(replica: dict[str, Any]) -> None:
    """As rivals' own engines do, where ours would compute short prompts first."""
    replica.setdefault("scheduling_order", SchedulingOrder.FIRST_COME.value)


def _changed(label: str, content: Mapping[str, Any], changes: Changes) -> Contender:
    changed: dict[str, Any] = copy.deepcopy(dict(content))
    application = _application(changed)
    replica, router = _section(application, "replica"), _section(application, "router")
    replica.update(changes.replica or {})
    router.update({"expose_routing": True, **(changes.router or {})})  # which replica answered
    if changes.simulated:
        replica["runner"] = "simulated"
    if changes.num_replicas is not None:
        _set_number(_deployment(application, "Replica"), changes.num_replicas)
    for name in ("Router", "Replica"):
        _deployment(application, name)["graceful_shutdown_timeout_s"] = 2  # nobody is answered at the end
    return Contender(label, changed)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = strict_yaml.load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadDeployment(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise BadDeployment(f"{path}: must be a mapping, as deploy.yaml is")
    try:
        application = _application(content)
    except (LookupError, TypeError, AttributeError):
        raise BadDeployment(f"{path}: needs an application with import_path {IMPORT_PATH}") from None
    if not _has_mappings(application):
        raise BadDeployment(f"{path}: args, its two sections and deployments must hold mappings of settings")
    try:
        _fold_router_variable(application)
    except ConfigError as error:
        raise BadDeployment(f"{path}: {error}") from None
    return content


def _fold_router_variable(application: dict[str, Any]) -> None:
    """Puts what the Routers' environment lays over `args.router` into it, and takes it out there.

    Otherwise it would be laid over what a comparison sets, too, and all policies would be one. Raises
    ConfigError.
    """
    text = None
    # A Router's own go before the application's.
    for owner in (application, _deployment(application, "Router").get("ray_actor_options")):
        found = _mapping_in(_mapping_in(owner, "runtime_env"), "env_vars")
        if isinstance(found.get(ROUTER_VARIABLE), str):  # `deploy check` says what is wrong with another
            text = found.pop(ROUTER_VARIABLE)
    if text is not None:
        router = _section(application, "router")
        application["args"]["router"] = folded(router, settings_in(text))


def _mapping_in(owner: Any, key: str) -> dict[str, Any]:
    value = owner.get(key) if isinstance(owner, dict) else None
    return value if isinstance(value, dict) else {}


def _has_mappings(application: dict[str, Any]) -> bool:
    """Where settings are changed."""
    try:
        places = [_section(application, side) for side in ("replica", "router")]
        places += [_deployment(application, name) for name in ("Router", "Replica")]
    except (TypeError, AttributeError):
        return False
    return all(isinstance(each, dict) for each in places)


def _application(content: Mapping[str, Any]) -> dict[str, Any]:
    application: dict[str, Any] = next(
        (each for each in content["applications"] if each.get("import_path") == IMPORT_PATH), {}
    )
    if not application:
        raise LookupError(IMPORT_PATH)
    return application


def _section(application: dict[str, Any], side: str) -> dict[str, Any]:
    """One side's settings; added if the file has none, or a heading with nothing below it."""
    arguments = application["args"] = application.get("args") or {}
    section: dict[str, Any] = arguments.get(side) or {}
    arguments[side] = section
    return section


def _deployment(application: dict[str, Any], name: str) -> dict[str, Any]:
    """Its options; added if the file does not mention it."""
    deployments: list[dict[str, Any]] = application.get("deployments") or []
    application["deployments"] = deployments
    for each in deployments:
        if each.get("name") == name:
            return each
    deployments.append({"name": name})
    return deployments[-1]
